"""SQL expressions that ask, inside a trigger, whether the bound chain holds a row: base and delta probed directly.

All read the trigger's variable `_mm_chain` (bigint[], base first) and never a view, so a probe costs one index
descent a partition and sees what the running statement has written so far.
"""

from collections.abc import Sequence

from megamcp.state.catalog import ForeignKey, Table
from megamcp.state.names import DELETED, LAYER, ident
from megamcp.state.tables import base, delta, match


def _equal(alias: str, columns: Sequence[str], values: Sequence[str], nulls_equal: bool = False) -> str:
    form = "({c} = {v} or ({c} is null and {v} is null))" if nulls_equal else "{c} = {v}"
    return " and ".join(form.format(c=f"{alias}.{ident(c)}", v=v) for c, v in zip(columns, values, strict=True))


def by_key(state: str, table: Table, values: Sequence[str]) -> str:
    """True when the chain shows a row with this primary key."""
    b, d = base(state, table.name), delta(state, table.name)
    return (
        f"coalesce((select not _mm_d.{DELETED} from {d} _mm_d where _mm_d.{LAYER} = any (_mm_chain) and "
        f"{_equal('_mm_d', table.primary, values)} order by _mm_d.{LAYER} desc limit 1),\n"
        f"    exists (select from {b} _mm_b where {_equal('_mm_b', table.primary, values)}))"
    )


def by_columns(
    state: str,
    table: Table,
    columns: Sequence[str],
    values: Sequence[str],
    *,
    but: str | None = None,
    nulls_equal: bool = False,
) -> str:
    """True when the chain shows a row with these values; `but` (a record name) leaves out the row of its key."""
    b, d = base(state, table.name), delta(state, table.name)
    other = f" and not ({match('_mm_d', but, table.primary)})" if but else ""
    other_base = f" and not ({match('_mm_b', but, table.primary)})" if but else ""
    chained = f"{LAYER} = any (_mm_chain)"
    own = f"{_equal('_mm_b', columns, values, nulls_equal)}{other_base}"
    written = f"{_equal('_mm_d', columns, values, nulls_equal)}{other}"
    newer = f"_mm_n.{LAYER} > _mm_d.{LAYER} and {match('_mm_n', '_mm_d', table.primary)}"
    shadow = match("_mm_n", "_mm_b", table.primary)
    return (
        f"(exists (select from {b} _mm_b where {own} and not exists (\n"
        f"      select from {d} _mm_n where _mm_n.{chained} and {shadow}))\n"
        f"    or exists (select from {d} _mm_d where _mm_d.{chained} and not _mm_d.{DELETED} and {written}\n"
        f"      and not exists (\n"
        f"      select from {d} _mm_n where _mm_n.{chained} and {newer})))"
    )


def parent_row(state: str, parent: Table, foreign: ForeignKey, values: Sequence[str]) -> str:
    """True when the chain shows the row that a foreign key refers to."""
    if set(foreign.parent_columns) == set(parent.primary):
        by_name = dict(zip(foreign.parent_columns, values, strict=True))
        return by_key(state, parent, [by_name[c] for c in parent.primary])
    return by_columns(state, parent, foreign.parent_columns, values)


def child_row(state: str, child: Table, foreign: ForeignKey, values: Sequence[str]) -> str:
    """True when the chain shows a row that refers to these values."""
    return by_columns(state, child, foreign.columns, values)
