"""Rows of the log as JSON: what a diff shows, with long values told by their size and a digest (`megamcp.told`).

Runs on a connection of the database's hand, since types of the user's own may have casts to JSON. What these do to the
session is taken back before the next statement. Generated columns are left out: the log doesn't have them.
"""

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import asyncpg

from megamcp.state.names import ident
from megamcp.state.schema import Change, TableDiff

# Asked by the superuser, in whose session nothing of the user's runs. Values of fixed length are never long.
SHAPES = """select c.oid, c.oid::regclass::text as name, n.nspname as schema, c.relname as table,
       (select array_agg(a.attname order by a.attnum) from pg_attribute a
         where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = '') as columns,
       (select array_agg(a.attname order by a.attnum) from pg_attribute a
         where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
           and a.attlen = -1) as long,
       megamcp.key_columns(c.oid) as key
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.oid in (select m.relation from megamcp.moves m)"""


async def by_table(
    hand: asyncpg.Connection, shapes: Sequence[asyncpg.Record], limit: int, most: float
) -> dict[str, TableDiff]:
    """One diff a relation, of the portions in `megamcp.moves`: what goes is there only before, the rest only after.

    Rows beyond `limit`, or beyond `most` bytes of JSON of one table, are counted and not shown.
    """
    found: dict[str, TableDiff] = {}
    for shape in shapes:
        await hand.execute("reset all")
        name = shape["table"] if shape["schema"] == "public" else f"{shape['schema']}.{shape['table']}"
        pairs: list[tuple[dict[str, Any] | None, dict[str, Any] | None]] = []
        total = size = 0
        async for row in hand.cursor(_query(shape, limit), shape["oid"], prefetch=20):
            total = row["total"]
            size += sum(len(row[side] or "") for side in ("before", "after"))
            if size > most and pairs:
                break
            pairs.append((_row(row["before"]), _row(row["after"])))
        found[name] = TableDiff(
            added=tuple(y for x, y in pairs if x is None and y is not None),
            removed=tuple(x for x, y in pairs if x is not None and y is None),
            changed=tuple(Change(x, y) for x, y in pairs if x is not None and y is not None),
            total=total,
            truncated=total > len(pairs),
        )
    return dict(sorted(found.items()))


def _query(shape: Any, limit: int) -> str:
    """Query over ($1 relation): pairs of rows with one key. Rows without a key never pair."""
    columns = [ident(name) for name in shape["columns"]]
    key = [ident(name) for name in shape["key"] or ()]
    long = {ident(name) for name in shape["long"] or ()}

    count, whole = ident("mm~n"), ident("mm~v")  # beside the user's own columns

    def side(goes: bool, lead: str) -> str:
        keys = ", ".join(f"d.{name} as k{n}" for n, name in enumerate(key))
        text = f"textin(record_out(row({', '.join(f'd.{name}' for name in key)})))" if key else f"'{lead}' || d.{count}"
        values = ", ".join(f"megamcp.told(d.{name}) as {name}" if name in long else f"d.{name}" for name in columns)
        return (
            f"(select {text} as k, {keys + ', ' if keys else ''}d.{count} as n, row_to_json({whole})::text as json"
            f" from (select x.*, row_number() over () as {count} from megamcp.portions($1, {goes}) p,"
            f" lateral megamcp.rows_of(p, null::{shape['name']}) x) d,"
            f" lateral (select {values}) {whole})"
        )

    order = ", ".join(f"coalesce(l.k{n}, m.k{n})" for n in range(len(key))) or "l.n, m.n"
    return (
        f"select l.json as before, m.json as after, count(*) over () as total"
        f" from {side(True, '-')} l full join {side(False, '+')} m using (k)"
        f" order by {order} limit {int(limit)}"
    )


def _row(text: str | None) -> dict[str, Any] | None:
    return None if text is None else json.loads(text, parse_float=Decimal)
