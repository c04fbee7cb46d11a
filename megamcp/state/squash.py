"""Squashing within one state: a layer that shows what several layers of a chain's end show.

Like a log-structured merge tree: frozen layers never change, so the new layer is made beside them, without a lock,
and whoever reads the old ones goes on doing so. Of each key the newest row is taken; it replaces (`_mm_over`) what the
oldest row of the key replaced in the layers below. Suffixes are chosen so that a big layer is copied only when the rest
has grown to its size: a row is copied about log2(rows) times in the life of a chain.

What a squashed row keeps in `_mm_stamp`: minus the layer that the version came from. A diff of two points asks for keys
written after their last common layer; by this it finds them in a layer that also sums up older ones. For the same
reason a tombstone stays though it replaces nothing: the key may have lived at the other point.

Which chains are squashed and when the rollouts on them move over is not decided here (`megamcp.squasher`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megamcp.state.names import DELETED, LAYER, OVER, STAMP, hidden, ident, idents, literal
from megamcp.state.schema import SchemaState

OWN = (LAYER, DELETED, STAMP, OVER)


async def sizes(conn: Any, state: SchemaState, layers: Sequence[int]) -> dict[int, int]:
    """Rows of each of these layers, all tables together."""
    counts = " union all ".join(
        f"select {LAYER} as layer, count(*) as rows from {table} where {LAYER} = any ($1::bigint[]) group by 1"
        for table in _deltas(state)
    )
    if not counts:
        return {}
    rows = await conn.fetch(f"select layer, sum(rows)::bigint as rows from ({counts}) c group by 1", list(layers))
    return {row["layer"]: row["rows"] for row in rows}


def first_to_merge(rows: Sequence[int], most: int) -> int:
    """Where the suffix begins that becomes one layer; `rows` are the sizes of a chain longer than `most`, oldest first.

    At least so much that half of `most` is left, then each older layer that isn't bigger than all after it together.
    """
    first = max(0, min(most // 2, len(rows) - 2))
    merged = sum(rows[first:])
    while first and rows[first - 1] <= merged:
        first -= 1
        merged += rows[first]
    return first


async def build(conn: Any, state: SchemaState, suffix: Sequence[int], into: int) -> int:
    """Fills layer `into` with what the layers of `suffix`, oldest first, show together. Gives its rows."""
    made = 0
    for name, columns in (await _columns(conn, state)).items():
        table = f"{ident(state.hidden_schema)}.{ident(hidden(name, 'delta'))}"
        key = idents(next(t.primary for t in state.tables if t.name == name))
        status: str = await conn.execute(
            f"insert into {table} ({idents(columns)}, {', '.join(OWN)})"
            f" select distinct on ({key}) {idents(columns)}, $2::bigint, {DELETED},"
            f" case when {STAMP} < 0 then {STAMP} else -{LAYER} end,"
            f" first_value({OVER}) over (partition by {key} order by {LAYER})"
            f" from {table} where {LAYER} = any ($1::bigint[]) order by {key}, {LAYER} desc",
            list(suffix),
            into,
        )
        made += int(status.rsplit(" ", 1)[1])
    await conn.execute(
        f'insert into {ident(state.hidden_schema)}."~counters" (layer, name, number, value)'
        f' select distinct on (name) $2, name, number, value from {ident(state.hidden_schema)}."~counters"'
        " where layer = any ($1::bigint[]) order by name, layer desc",
        list(suffix),
        into,
    )
    return made


async def rows_over(conn: Any, state: SchemaState, head: int, replaced: Sequence[int], most: int) -> int:
    """Rows of a head that replace rows of these layers; counting ends above `most`."""
    found = 0
    for table in _deltas(state):
        if found > most:
            break
        found += await conn.fetchval(
            f"select count(*) from (select 1 from {table} where {LAYER} = $1 and {OVER} = any ($2::bigint[])"
            f" limit {int(most) + 1}) c",
            head,
            list(replaced),
        )
    return found


async def move_head(conn: Any, state: SchemaState, head: int, replaced: Sequence[int], by: int) -> None:
    """Makes a head that was written on the replaced layers one on the layer that sums them up.

    The caller holds the rollout's lock: nothing is bound to this head.
    """
    for table in _deltas(state):
        await conn.execute(
            f"update {table} set {OVER} = $3 where {LAYER} = $1 and {OVER} = any ($2::bigint[])",
            head,
            list(replaced),
            by,
        )


def difference(old: Sequence[int], new: Sequence[int]) -> tuple[list[int], int]:
    """The layers of a chain that squashing replaced, and the one layer that it put in their place."""
    (by,) = set(new).difference(old)
    return [layer for layer in old if layer not in set(new)], by


def _deltas(state: SchemaState) -> list[str]:
    return [f"{ident(state.hidden_schema)}.{ident(hidden(table.name, 'delta'))}" for table in state.tables]


async def _columns(conn: Any, state: SchemaState) -> Mapping[str, list[str]]:
    """Table → every column of its delta but the overlay's own, hidden keys too."""
    names = {hidden(table.name, "delta"): table.name for table in state.tables}
    rows = await conn.fetch(
        "select c.relname, array_agg(a.attname::text order by a.attnum) as columns from pg_class c"
        " join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped"
        f" and a.attname not in ({', '.join(map(literal, OWN))})"
        " where c.relnamespace = $1::text::regnamespace and c.relname = any ($2::text[]) group by 1",
        state.hidden_schema,
        list(names),
    )
    return {names[row["relname"]]: row["columns"] for row in rows}
