"""SQL that puts a row into the head layer, in a trigger: the way for most rows is one statement without ON CONFLICT.

A delta's row names the layer of the version that it replaces (`_mm_over`); a row that the head holds already keeps what
it replaces. Whether a row may be written at all is not decided here. Reads the variables of `triggers.function`.
"""

from megamcp.state import probes
from megamcp.state.catalog import Table
from megamcp.state.names import DELETED, LAYER, OVER, STAMP, ident, idents
from megamcp.state.tables import base, delta


def _put(state: str, table: Table, record: str, deleted: bool, over: str, end: str) -> str:
    """INSERT of the row into the head."""
    values = idents(table.names, record) + (", _mm_this" if table.row else "")
    return (
        f"  insert into {delta(state, table.name)} as _mm_d\n"
        f"  ({idents(table.stored)}, {LAYER}, {DELETED}, {STAMP}, {OVER})\n"
        f"  select {values}, _mm_head, {str(deleted).lower()}, _mm_statement, {over}\n  {end};\n"
    )


def _newest(state: str, table: Table, record: str, condition: str = "") -> str:
    """The layer of the chain that holds the newest version of the row; null when none does."""
    return (
        f"(select _mm_p.{LAYER} from {delta(state, table.name)} _mm_p where _mm_p.{LAYER} = any (_mm_chain)"
        f" and {probes.is_row(table, '_mm_p', record)}{condition} order by _mm_p.{LAYER} desc limit 1)"
    )


def once(state: str, table: Table, record: str, deleted: bool) -> str:
    """Puts a row that the chain shows into the head, unless its statement has done so already (FOUND is false then).

    The version that it replaces is the newest one of a lower layer, or the base's. A row that the head holds already
    keeps what it replaces.
    """
    source = (
        f"from (select {_newest(state, table, record)} as _mm_o offset 0) _mm_x where _mm_o is distinct from _mm_head"
    )
    sets = [f"{ident(c)} = {record}.{ident(c)}" for c in table.names]
    sets += [f"{DELETED} = {str(deleted).lower()}", f"{STAMP} = _mm_statement"]
    return (
        _put(state, table, record, deleted, "coalesce(_mm_o, 0)", source)
        + f"  if not found then\n    update {delta(state, table.name)} _mm_d set {', '.join(sets)}\n"
        f"    where _mm_d.{LAYER} = _mm_head and {probes.is_row(table, '_mm_d', record)}"
        f" and _mm_d.{STAMP} <> _mm_statement;\n  end if;\n"
    )


def new(state: str, table: Table) -> str:
    """Puts a row that the chain doesn't show into the head, in the place of a tombstone if there is one."""
    if table.row:
        return _put(state, table, "new", False, "-1", "")
    sets = [f"{ident(c)} = excluded.{ident(c)}" for c in (*table.names, DELETED, STAMP)]
    over = f"coalesce({_newest(state, table, 'new', f' and _mm_p.{LAYER} < _mm_head')}, -1)"
    end = f"on conflict ({LAYER}, {idents(table.identity)}) do update set {', '.join(sets)}"
    return _put(state, table, "new", False, over, end)


def absent(state: str, table: Table) -> str:
    """Puts the row of NEW into the head if no layer holds its key, nor the base (else FOUND is false)."""
    nowhere = (
        f"where {_newest(state, table, 'new')} is null\n    and (select true from {base(state, table.name)} _mm_b"
        f" where {probes.is_row(table, '_mm_b', 'new')} limit 1) is null"
    )
    return _put(state, table, "new", False, "-1", nowhere)
