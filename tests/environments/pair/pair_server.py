"""The same tools on both kinds of state: a rollout of this environment has a copy-on-write schema and a database."""

from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Server

server = Server("shared")
own = Server("own")


async def put(db: AsyncConnection, key: str, value: str) -> int:
    """Set an item, and write down that it was; gives the number of the line, which has no gaps."""
    item = {"key": key, "value": value}
    if (await db.execute(text("update item set value = :value where key = :key"), item)).rowcount == 0:
        await db.execute(text("insert into item (key, value) values (:key, :value)"), item)
    return await _line(db, item)


async def delete(db: AsyncConnection, key: str) -> int:
    """Remove an item, and write down that it is gone; gives the number of the line."""
    await db.execute(text("delete from item where key = :key"), {"key": key})
    return await _line(db, {"key": key, "value": None})


async def _line(db: AsyncConnection, item: dict[str, Any]) -> int:
    row = await db.execute(text("insert into history (key, value) values (:key, :value) returning id"), item)
    return int(row.scalar_one())


async def items(db: AsyncConnection) -> dict[str, str]:
    """Every item."""
    return {row.key: row.value for row in await db.execute(text("select key, value from item order by key"))}


async def lines(db: AsyncConnection) -> list[list[Any]]:
    """Everything that was written down: number, key, value."""
    return [list(row) for row in await db.execute(text("select id, key, value from history order by id"))]


for each in (server, own):
    each.tool(put)
    each.tool(delete)
    each.tool(read_only=True)(items)
    each.tool(read_only=True)(lines)


@own.tool
async def reshape(db: AsyncConnection, column: str) -> str:
    """Give the items another column, or take it away: what the log of changes can't undo."""
    known = await db.execute(
        text("select 1 from pg_attribute where attrelid = 'item'::regclass and attname = :c and not attisdropped"),
        {"c": column},
    )
    verb = "drop" if known.first() else "add"
    await db.execute(text(f"alter table item {verb} column {column} {'text' if verb == 'add' else ''}"))
    return verb


@own.tool
async def clear(db: AsyncConnection) -> str:
    """Remove everything that was written down, the quick way."""
    await db.execute(text("truncate history"))
    return "cleared"
