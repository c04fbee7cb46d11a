"""What the planner is told about deltas, so that its plans don't turn with what other rollouts write.

It would count values over the deltas of all rollouts: where thousands write the same few keys, one key would seem to
have hundreds of rows, generic plans would look dear and statements be planned anew at each run; joins would be planned
for rows that no chain shows. A chain has a key once, and of any other column about as many values as a base of some
size: these numbers are set once, as `n_distinct` of the delta's columns. The layer's own number is set in `tables`.
"""

from typing import Any

from megamcp.state.catalog import Table
from megamcp.state.names import hidden, ident
from megamcp.state.tables import delta, parent

TELLING = 1000
"""Rows of a base whose values say something about those to come."""


async def settle(conn: Any, state: str, table: Table) -> None:
    """Analyzes the loaded table; a base's numbers go to its delta."""
    d = delta(state, table.name)
    once = {key.columns[0] for key in table.keys if len(key.columns) == 1 and key.plain}
    once |= {table.row.name} if table.row else set()
    await conn.execute(_told(d, dict.fromkeys(once, -1.0)) + f"analyze {parent(state, table.name)}")
    rows = await conn.fetch(
        "select s.attname::text as name,"
        " case when s.n_distinct < 0 then -s.n_distinct * c.reltuples else s.n_distinct end as distinct"
        " from pg_stats s join pg_namespace n on n.nspname = s.schemaname"
        " join pg_class c on c.relname = s.tablename and c.relnamespace = n.oid and c.reltuples >= $3"
        " where s.schemaname = $1 and s.tablename = $2 and s.attname = any ($4::text[])",
        state,
        hidden(table.name, "base"),
        TELLING,
        [name for name in table.names if name not in once],
    )
    if rows:
        await conn.execute(_told(d, {row["name"]: max(1.0, row["distinct"]) for row in rows}) + f"analyze {d}")


def _told(table: str, distinct: dict[str, float]) -> str:
    changes = ", ".join(f"alter {ident(name)} set (n_distinct = {value:g})" for name, value in distinct.items())
    return f"alter table {table} {changes};" if changes else ""
