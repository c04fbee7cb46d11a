"""A small tool server with tools that behave, and tools that do what tools must not."""

import asyncio
import os
import time
from datetime import datetime
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Clock, Context, Random, Server, ToolError

server = Server("ledger")


@server.tool
async def put(db: AsyncConnection, key: str, value: str) -> str:
    """Set an item."""
    done = await db.execute(text("update item set value = :value where key = :key"), {"key": key, "value": value})
    if done.rowcount == 0:
        await db.execute(text("insert into item (key, value) values (:key, :value)"), {"key": key, "value": value})
    return value


@server.tool
async def delete(db: AsyncConnection, key: str) -> int:
    """Remove an item; gives how many there were."""
    return (await db.execute(text("delete from item where key = :key"), {"key": key})).rowcount


@server.tool(read_only=True)
async def items(db: AsyncConnection) -> dict[str, str]:
    """Every item."""
    return {row.key: row.value for row in await db.execute(text("select key, value from item order by key"))}


@server.tool(read_only=True)
async def slow_items(db: AsyncConnection, seconds: float) -> dict[str, Any]:
    """Every item, and when reading began and ended."""
    began = time.monotonic()
    found = await items(db)
    await asyncio.sleep(seconds)
    return {"items": found, "began": began, "ended": time.monotonic()}


@server.tool
async def increment(db: AsyncConnection, owner: str, by: int = 1, pause: float = 0.0) -> int:
    """Read a balance, wait, write the sum: loses updates wherever calls overlap."""
    found = (await db.execute(text("select balance from account where owner = :o"), {"o": owner})).scalar_one()
    await asyncio.sleep(pause)
    await db.execute(text("update account set balance = :b where owner = :o"), {"b": found + by, "o": owner})
    return int(found + by)


@server.tool
async def open_account(db: AsyncConnection, id: int, owner: str, pause: float = 0.0) -> int:
    """Make an account unless the owner has one."""
    await asyncio.sleep(pause)
    await db.execute(text("insert into account (id, owner) values (:id, :o)"), {"id": id, "o": owner})
    return id


@server.tool
async def close_account(db: AsyncConnection, id: int, pause: float = 0.0) -> int:
    """Delete an account."""
    done = await db.execute(text("delete from account where id = :id"), {"id": id})
    await asyncio.sleep(pause)
    return done.rowcount


@server.tool
async def book(db: AsyncConnection, account_id: int, amount: int, pause: float = 0.0) -> dict[str, Any]:
    """Add an entry and move the balance: both or neither."""
    row = await db.execute(
        text("insert into entry (account_id, amount) values (:a, :m) returning id, made_at"),
        {"a": account_id, "m": amount},
    )
    entry = row.one()
    await asyncio.sleep(pause)
    await db.execute(text("update account set balance = balance + :m where id = :a"), {"m": amount, "a": account_id})
    return {"id": entry.id, "made_at": entry.made_at.isoformat()}


@server.tool(read_only=True)
async def sums(db: AsyncConnection) -> dict[str, int]:
    """Balances beyond the seed, and entries: equal unless something was half done."""
    balances = (await db.execute(text("select sum(balance) - 1000 from account"))).scalar_one()
    entries = (await db.execute(text("select coalesce(sum(amount), 0) from entry"))).scalar_one()
    return {"balances": int(balances), "entries": int(entries)}


@server.tool
async def draw(random: Random, clock: Clock) -> dict[str, Any]:
    """A random number, a uuid and the time."""
    now: datetime = clock.now()
    return {"number": await random.random(), "uuid": str(await random.uuid()), "now": now.isoformat()}


@server.tool
async def refuse_after_write(db: AsyncConnection, key: str) -> str:
    """Write, then refuse."""
    await put(db, key, "must not stay")
    raise ToolError("refused", "The ledger refuses.")


@server.tool
async def crash_after_write(db: AsyncConnection, key: str) -> str:
    """Write, then fail in an unplanned way."""
    await put(db, key, "must not stay")
    raise ZeroDivisionError("division by zero")


@server.tool
async def commit_after_write(db: AsyncConnection, key: str) -> str:
    """Write, then try to commit behind the gateway's back."""
    await put(db, key, "must not stay")
    await db.commit()
    return "committed"


@server.tool
async def run_sql(db: AsyncConnection, sql: str) -> list[list[Any]]:
    """Whatever the test says."""
    result = await db.execute(text(sql))
    return [list(row) for row in result] if result.returns_rows else [[result.rowcount]]


@server.tool
async def hang(db: AsyncConnection, key: str) -> str:
    """Write, then never return."""
    await put(db, key, "must not stay")
    await asyncio.Event().wait()
    return "never"


@server.tool
async def block(db: AsyncConnection, key: str, seconds: float) -> str:
    """Write, then block the whole process."""
    await put(db, key, "must not stay")
    time.sleep(seconds)  # noqa: ASYNC251
    return "done"


@server.tool
async def count_up(context: Context, steps: int) -> int:
    """Tell progress, step by step."""
    for step in range(steps):
        await context.progress(step + 1, steps, f"step {step + 1}")
        await asyncio.sleep(0.01)
    return steps


@server.tool
async def refuse_after_savepoint(db: AsyncConnection, name: str) -> str:
    """Write, set a savepoint, write again, then refuse."""
    await put(db, "first", "must not stay")
    await db.execute(text(f"savepoint {name}"))
    await put(db, "second", "must not stay")
    raise ToolError("refused", "The ledger refuses.")


@server.tool(read_only=True)
def environment() -> list[str]:
    """Names of the process's environment variables."""
    return sorted(os.environ)
