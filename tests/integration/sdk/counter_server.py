"""A tool server whose tools do everything that tools do, the wrong things too. Its tables:
counter_database.py."""

import asyncio
import enum
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BaseModel, Field
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Clock, Context, Random, Server, ToolError

server = Server("counter", instructions="Counts.", version="7")
kept: dict[str, Any] = {}
cancelled: list[str] = []


class Counter(BaseModel):
    name: str
    value: int


class Step(enum.StrEnum):
    ONE = "one"
    TWO = "two"


@dataclass
class Drawn:
    uuid: str
    number: float
    die: int
    chosen: str


@server.tool
async def add(db: AsyncConnection, name: str, by: Annotated[int, Field(ge=1, le=100)] = 1) -> Counter:
    """Add to a counter.

    Args:
        name: Which counter.
        by: How much.
    """
    row = await db.execute(
        text("update counter set value = value + :by where name = :name returning name, value"),
        {"by": by, "name": name},
    )
    found = row.mappings().one_or_none()
    if found is None:
        raise ToolError("no_such_counter", f"There is no counter {name}.", name=name)
    return found  # type: ignore[return-value]


@server.tool(read_only=True, title="Read a counter")
async def read(db: AsyncConnection, name: str) -> Counter:
    """Read a counter."""
    row = await db.execute(text("select name, value from counter where name = :name"), {"name": name})
    return Counter.model_validate(row.mappings().one())


@server.tool(read_only=True)
async def write_in_read(db: AsyncConnection) -> None:
    """Breaks its promise."""
    await db.execute(text("update counter set value = 99"))


@server.tool
async def add_then_raise(db: AsyncConnection, how: str) -> None:
    """Writes, then fails in one of several ways."""
    await db.execute(text("update counter set value = value + 1"))
    match how:
        case "refuse":
            raise ToolError("refused", "No.")
        case "bug":
            raise ZeroDivisionError("division by zero")
        case "sql":
            await db.execute(text("insert into counter (name, value) values (:n, 1)"), {"n": "a"})
        case "swallow":
            try:
                await db.execute(text("insert into counter (name, value) values ('a', 1)"))
            except DBAPIError:
                return
        case "nested":
            try:
                async with db.begin_nested():
                    await db.execute(text("insert into counter (name, value) values ('a', 1)"))
            except DBAPIError:
                return
        case _:
            raise AssertionError(how)


@server.tool
async def end_transaction(db: AsyncConnection, how: str) -> str:
    """Writes, then tries to end the transaction."""
    await db.execute(text("update counter set value = value + 1"))
    driver = (await db.get_raw_connection()).driver_connection
    assert driver is not None
    match how:
        case "commit":
            await db.commit()
        case "rollback":
            await db.rollback()
        case "quiet commit":
            try:
                await db.commit()
            except Exception:
                return "committed"
        case "sql commit":
            await db.execute(text("commit"))
        case "driver commit":
            await driver.execute("commit")
        case "driver rollback":
            await driver.execute("rollback")
        case "driver new transaction":
            await driver.execute("rollback; begin")
        case "driver release":
            await driver.execute("release savepoint megamcp_tool")
        case "sync commit":
            await db.run_sync(lambda connection: connection.commit())
        case _:
            raise AssertionError(how)
    return "done"


@server.tool
async def keep_connection(db: AsyncConnection, clock: Clock) -> None:
    """Keeps what belongs to its call."""
    await db.execute(text("select 1"))
    kept["db"], kept["clock"] = db, clock


@server.tool
async def leave_statement_running(db: AsyncConnection) -> None:
    """Returns while its own statement still runs."""
    statement = text("update counter set value = (pg_sleep(0.5) is null)::int")
    kept["task"] = asyncio.create_task(_swallow(db.execute(statement)))
    await asyncio.sleep(0.1)


async def _swallow(statement: Any) -> None:
    try:
        await statement
    except Exception as error:
        kept["error"] = error


@server.tool
async def draw(random: Random, clock: Clock, hours: int = 0) -> dict[str, Any]:
    """Time and chance."""
    before = clock.now()
    if hours:
        await clock.advance(timedelta(hours=hours))
    return {
        "uuid": str(await random.uuid()),
        "number": await random.random(),
        "die": await random.randint(1, 6),
        "chosen": await random.choice(["x", "y"]),
        "before": before.isoformat(),
        "after": clock.now().isoformat(),
    }


@server.tool
async def wait(db: AsyncConnection, seconds: float, name: str = "a") -> None:
    """Writes, then waits in the event loop."""
    await db.execute(text("update counter set value = value + 1 where name = :name"), {"name": name})
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        cancelled.append("wait")
        raise


@server.tool
async def wait_in_sql(db: AsyncConnection, seconds: float) -> None:
    """Writes, then waits in PostgreSQL."""
    await db.execute(text("update counter set value = value + 1 where name = 'a'"))
    await db.execute(text("select pg_sleep(:s)"), {"s": seconds})


@server.tool
async def block(seconds: float) -> None:
    """Blocks the event loop."""
    time.sleep(seconds)  # noqa: ASYNC251


@server.tool(read_only=True)
def threaded(a: int, b: int = 2) -> int:
    """Runs in a thread."""
    return a * b


@server.tool
async def count(context: Context, to: int) -> list[int]:
    """Counts, with progress."""
    for n in range(1, to + 1):
        await context.progress(n, to, f"{n}")
    return list(range(1, to + 1))


@server.tool
async def stateless(step: Step = Step.ONE) -> str:
    """Needs nothing."""
    return f"step {step}"


@server.tool
async def wrong_result() -> Counter:
    """Returns what its type forbids."""
    return {"name": "a", "value": "many"}  # type: ignore[return-value]


@server.tool
async def say(words: str) -> str:
    """Echo."""
    return words
