"""The SDK on a real copy-on-write state: time and chance are the rollout's, and equal to what SQL sees."""

import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import httpx
import pytest_asyncio
from sqlalchemy import Column, Integer, MetaData, String, Table, bindparam, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp import state
from megamcp.handles import Mode
from megamcp.migrate import migrate
from megamcp.sdk import Clock, Random, Server
from tests.integration.sdk.conftest import Client
from tests.integration.sdk.counter_database import CounterDatabase

START = datetime(2026, 1, 15, 9, tzinfo=UTC)
DDL = """
create table note (
    id integer generated always as identity primary key, at timestamptz not null default now(), text text not null
);
create table tally (name text primary key, n integer not null default 1);
create table pair (id integer primary key, other integer references pair deferrable initially deferred);
"""
TALLY = Table("tally", MetaData(), Column("name", String, primary_key=True), Column("n", Integer))

server = Server("notes")


@server.tool
async def draw(random: Random) -> dict[str, Any]:
    """By the SDK."""
    return {"number": await random.random(), "uuid": str(await random.uuid())}


@server.tool
async def draw_in_sql(db: AsyncConnection) -> dict[str, Any]:
    """By SQL."""
    row = (await db.execute(text("select random() as number, gen_random_uuid() as uuid"))).one()
    return {"number": row.number, "uuid": str(row.uuid)}


@server.tool
async def sleep(clock: Clock, db: AsyncConnection, hours: int) -> dict[str, Any]:
    """Moves the clock, writes a row."""
    before = clock.now()
    after = await clock.advance(timedelta(hours=hours))
    written = (await db.execute(text("insert into note (text) values ('x') returning at"))).scalar_one()
    return {"before": before, "after": after, "now": clock.now(), "written": written}


@server.tool(read_only=True)
async def times(clock: Clock, db: AsyncConnection) -> dict[str, Any]:
    """The clock, by SDK and SQL."""
    return {"sdk": clock.now(), "sql": (await db.execute(text("select now()"))).scalar_one()}


@server.tool
async def count(db: AsyncConnection, names: list[str], step: int) -> list[Any]:
    """INSERT … ON CONFLICT as SQLAlchemy writes it."""
    statement = insert(TALLY).values([{"name": name, "n": step} for name in names])
    statement = statement.on_conflict_do_update(
        index_elements=[TALLY.c.name], set_={"n": TALLY.c.n + statement.excluded.n + bindparam("more", 0)}
    )
    result = await db.execute(statement.returning(TALLY.c.name, TALLY.c.n))
    return [list(row) for row in result]


@server.tool
async def clash(db: AsyncConnection) -> str:
    """An ON CONFLICT that names no key: caught like any error of SQL."""
    try:
        async with db.begin_nested():
            await db.execute(text("insert into tally values (:a, 2) on conflict (n) do nothing"), {"a": "x"})
    except ProgrammingError as error:
        return str(getattr(error.orig, "sqlstate", ""))
    return "none"


@server.tool
async def pair(db: AsyncConnection, ids: list[int], late: bool = True) -> int:
    """Rows of a ring: each refers to the next."""
    if not late:
        await db.execute(text("set constraints all immediate"))
    for one, other in zip(ids, [*ids[1:], ids[0] if len(ids) > 1 else -1], strict=True):
        await db.execute(text("insert into pair values (:a, :b)"), {"a": one, "b": other})
    return int((await db.execute(text("select count(*) from pair"))).scalar_one())


@pytest_asyncio.fixture(loop_scope="session")
async def notes(postgres_dsn: str) -> AsyncIterator[tuple[Client, CounterDatabase]]:
    name = f"mm_sdk_{secrets.token_hex(5)}"
    outside = await asyncpg.connect(postgres_dsn)
    await outside.execute(f"create database {name}")
    url = make_url(postgres_dsn).set(database=name)
    dsn = url.render_as_string(hide_password=False)
    signer = await migrate(dsn)
    admin = await asyncpg.connect(dsn)
    try:
        async with admin.transaction():
            loaded = await state.load(
                admin, ddl=DDL, seeds=[], clock=START, seed=7, tool_password="t", query_password="q"
            )
            await admin.execute(f'grant megamcp_tools to "{loaded.tool_role}"')
        environment = await admin.fetchval(
            "insert into megamcp.environments (name, hash, definition, clock, seed)"
            " values ('notes', 'x', '{}', $1, 7) returning id",
            START,
        )
        await admin.execute(
            "insert into megamcp.servers (environment, name, position, kind, role)"
            " values ($1, 'counter', 0, 'schema', $2)",
            environment,
            loaded.tool_role,
        )
        tool_dsn = url.set(username=loaded.tool_role, password="t").render_as_string(hide_password=False)
        app = server.asgi_app(tool_dsn, pool_size=2)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tool") as http:
            yield Client(http), CounterDatabase(tool_dsn, admin, signer, environment)
        await app.aclose()
        async with admin.transaction():
            await state.unload(admin, loaded)
    finally:
        await admin.close()
        await outside.execute(f"drop database {name} with (force)")
        await outside.close()


async def test_chance_is_the_states_and_the_same_by_sdk_and_by_sql(notes: tuple[Client, CounterDatabase]) -> None:
    client, database = notes
    first, second = await database.rollout(), await database.rollout()

    async def call(tool: str, rollout: str) -> Any:
        return (await client.call(tool, handle=database.handle(rollout))).result["structuredContent"]

    by_sdk = [await call("draw", first) for _ in range(2)]
    by_sql = [await call("draw_in_sql", second) for _ in range(2)]
    assert by_sdk == by_sql
    assert by_sdk[0] != by_sdk[1]


async def test_the_clock_is_state_and_what_sql_sees(notes: tuple[Client, CounterDatabase]) -> None:
    client, database = notes
    rollout, other = await database.rollout(), await database.rollout()
    for day in (1, 2):
        reply = await client.call("sleep", {"hours": 24}, handle=database.handle(rollout))
        now = f"2026-01-{15 + day}T09:00:00Z"
        assert reply.result["structuredContent"] == {
            "before": f"2026-01-{14 + day}T09:00:00Z",
            "after": now,
            "now": now,
            "written": now,
        }
    for ro, at in ((rollout, "2026-01-17T09:00:00Z"), (other, "2026-01-15T09:00:00Z")):
        reply = await client.call("times", handle=database.handle(ro, mode=Mode.READ))
        assert reply.result["structuredContent"] == {"sdk": at, "sql": at}


async def test_on_conflict_works_through_the_connection(notes: tuple[Client, CounterDatabase]) -> None:
    client, database = notes
    rollout = await database.rollout()
    found = []
    for names, step in ((["a", "b"], 2), (["b", "c"], 5)):
        reply = await client.call("count", {"names": names, "step": step}, handle=database.handle(rollout))
        found.append(reply.result["structuredContent"]["result"])
    assert found == [[["a", 2], ["b", 2]], [["b", 7], ["c", 5]]]
    reply = await client.call("count", {"names": ["z", "z"], "step": 1}, handle=database.handle(rollout))
    assert "cannot affect row a second time" in reply.result["content"][0]["text"]
    reply = await client.call("clash", handle=database.handle(rollout))
    assert reply.result["structuredContent"]["result"] == "42P10"


async def test_what_a_deferred_constraint_says_at_commit_is_the_calls_error(
    notes: tuple[Client, CounterDatabase],
) -> None:
    client, database = notes
    rollout = await database.rollout()

    async def call(**arguments: Any) -> dict[str, Any]:
        result: dict[str, Any] = (await client.call("pair", arguments, handle=database.handle(rollout))).result
        return result

    assert (await call(ids=[1, 2, 3]))["structuredContent"] == {"result": 3}
    at_commit, at_once = await call(ids=[4]), await call(ids=[4], late=False)
    for refused in (at_commit, at_once):
        assert refused["isError"]
        assert 'violates foreign key constraint "pair_other_fkey"' in refused["content"][0]["text"]
    assert (await call(ids=[4, 5]))["structuredContent"] == {"result": 5}
