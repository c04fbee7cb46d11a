"""SQL expressions that ask, inside a trigger, whether the bound chain holds a row: base and delta probed directly.

All read the trigger's variables `_mm_chain` (bigint[], base first) and, where rows are told apart by the hidden
column, `_mm_this`, and never a view, so a probe costs one index descent a partition and sees what the running statement
has written so far.
"""

from collections.abc import Callable, Sequence

from megamcp.state.catalog import ForeignKey, Key, Table
from megamcp.state.expressions import over
from megamcp.state.names import DELETED, LAYER, ROW, ident
from megamcp.state.tables import base, delta, match

Condition = Callable[[str], str]
"""SQL over the row of an alias."""


def is_row(table: Table, alias: str, record: str) -> str:
    """The alias is a version of the row in `record` (or in `_mm_this`: no record of a view holds the hidden column)."""
    return f"{alias}.{ROW} = _mm_this" if table.row else match(alias, record, table.identity)


def _equal(alias: str, columns: Sequence[str], values: Sequence[str]) -> str:
    return " and ".join(f"{alias}.{ident(c)} = {v}" for c, v in zip(columns, values, strict=True))


def _by_key(state: str, table: Table, values: Sequence[str]) -> str:
    """True when the chain shows a row with this key, the one that tells the table's rows apart."""
    b, d = base(state, table.name), delta(state, table.name)
    return (
        f"coalesce((select not _mm_d.{DELETED} from {d} _mm_d where _mm_d.{LAYER} = any (_mm_chain) and "
        f"{_equal('_mm_d', table.identity, values)} order by _mm_d.{LAYER} desc limit 1),\n"
        f"    exists (select from {b} _mm_b where {_equal('_mm_b', table.identity, values)}))"
    )


def _in_base(state: str, table: Table) -> str:
    """Rest of a query on the base after its condition: no layer of the chain holds the row."""
    shadow = match("_mm_n", "_mm_b", table.identity)
    return (
        f"not exists (\n      select from {delta(state, table.name)} _mm_n "
        f"where _mm_n.{LAYER} = any (_mm_chain) and {shadow})"
    )


def _in_delta(state: str, table: Table) -> str:
    newer = f"_mm_n.{LAYER} > _mm_d.{LAYER} and {match('_mm_n', '_mm_d', table.identity)}"
    return (
        f"_mm_d.{LAYER} = any (_mm_chain) and not _mm_d.{DELETED} and not exists (\n"
        f"      select from {delta(state, table.name)} _mm_n where _mm_n.{LAYER} = any (_mm_chain) and {newer})"
    )


def _shows(state: str, table: Table, condition: Condition) -> str:
    """True when the chain shows a row that meets the condition."""
    b, d = base(state, table.name), delta(state, table.name)
    return (
        f"(exists (select from {b} _mm_b where {condition('_mm_b')} and {_in_base(state, table)})\n"
        f"    or exists (select from {d} _mm_d where {condition('_mm_d')} and {_in_delta(state, table)}))"
    )


def parent_row(state: str, parent: Table, foreign: ForeignKey, values: Sequence[str]) -> str:
    """True when the chain shows the row that a foreign key refers to."""
    if set(foreign.parent_columns) == set(parent.identity):
        by_name = dict(zip(foreign.parent_columns, values, strict=True))
        return _by_key(state, parent, [by_name[c] for c in parent.identity])
    return _shows(state, parent, lambda alias: _equal(alias, foreign.parent_columns, values))


def child_row(state: str, child: Table, foreign: ForeignKey, values: Sequence[str]) -> str:
    """True when the chain shows a row that refers to these values."""
    return _shows(state, child, lambda alias: _equal(alias, foreign.columns, values))


def clash(state: str, table: Table, key: Key, record: str, *, other: bool) -> str:
    """True when the chain shows a row with the record's value of a unique key; `other`: another than itself."""
    if key.identifies and not other:
        return _by_key(state, table, [f"{record}.{ident(c)}" for c in table.identity])
    found = _shows(state, table, _same_value(table, key, record, other))
    return " and ".join([*may_clash(table, key, record), found])


def perhaps_clash(state: str, table: Table, key: Key, record: str, *, other: bool) -> str:
    """False only where `clash` is: a row has the value, if only one that the chain no longer shows. Half the price."""
    condition = _same_value(table, key, record, other)
    b, d = base(state, table.name), delta(state, table.name)
    return (
        f"(exists (select from {b} _mm_b where {condition('_mm_b')})\n    or exists (select from {d} _mm_d where "
        f"{condition('_mm_d')} and _mm_d.{LAYER} = any (_mm_chain) and not _mm_d.{DELETED}))"
    )


def _value(table: Table, item: str, column: str, of: str) -> str:
    return f"{of}.{ident(column)}" if column else f"({over(item, table.names, of)})"


def may_clash(table: Table, key: Key, record: str) -> list[str]:
    """Conditions on the record alone: only a row of the key's predicate, without nulls, clashes at all."""
    values = [_value(table, item, column, record) for item, column in zip(key.items, key.columns, strict=True)]
    found = [] if key.nulls_equal or key.identifies else [f"{value} is distinct from null" for value in values]
    return [f"({over(key.predicate, table.names, record)})", *found] if key.predicate else found


def _same_value(table: Table, key: Key, record: str, other: bool) -> Condition:
    parts = list(zip(key.items, key.columns, strict=True))

    def condition(alias: str) -> str:
        tests: list[str] = []
        for item, column in parts:
            held, given = (_value(table, item, column, of) for of in (alias, record))
            tests.append(
                f"({held} = {given} or ({held} is not distinct from null and {given} is not distinct from null))"
                if key.nulls_equal
                else f"{held} = {given}"
            )
        if key.predicate:
            tests.append(f"({over(key.predicate, table.names, alias)})")
        if other:
            tests.append(f"not ({is_row(table, alias, record)})")
        return " and ".join(tests)

    return condition


def is_current(state: str, table: Table, record: str, columns: Sequence[str]) -> str:
    """True when the row of an event is still there with the values that it was queued for (it is in the head then)."""
    same = [f"_mm_d.{ident(c)} is not distinct from {record}.{ident(c)}" for c in columns]
    return (
        f"exists (select from {delta(state, table.name)} _mm_d where _mm_d.{LAYER} = _mm_head\n"
        f"      and not _mm_d.{DELETED} and {' and '.join([is_row(table, '_mm_d', record), *same])})"
    )
