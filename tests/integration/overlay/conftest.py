"""A database of its own for a test module, and rollouts bound by hand: no gateway, no control plane."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from megamcp.state import schema
from tests.integration.overlay.differential_database import Database
from tests.integration.overlay.differential_programs import Openness, Statement
from tests.integration.overlay.differential_run import Call, Checkpoint, Pair, Step

CLOCK = datetime(2026, 1, 15, 9, 0, tzinfo=UTC)


_SERVER = "MEGAMCP_TEST_OVERLAY_SERVER"


@pytest.fixture(scope="session", autouse=True)
def overlay_server(postgres_dsn: str) -> None:
    """Where `options` connects to; in the environment, since test modules import `options` by name."""
    os.environ[_SERVER] = postgres_dsn


def options(database: str = "postgres") -> dict[str, Any]:
    return {"dsn": os.environ[_SERVER], "database": database}


@pytest.fixture(scope="module")
async def database() -> AsyncIterator[str]:
    name = f"overlay_{uuid.uuid4().hex[:12]}"
    server = await asyncpg.connect(**options())
    await server.execute(f"create database {name}")
    conn = await asyncpg.connect(**options(name))
    await conn.execute("create schema megamcp; create sequence megamcp.layer_seq")
    await conn.execute(schema.state_sql())
    await conn.close()
    yield name
    conn = await asyncpg.connect(**options(name))
    deployment = await conn.fetchval("select megamcp.deployment()")
    found = await conn.fetch("select rolname from pg_roles where rolname ~ ('^megamcp_.*_' || $1 || '$')", deployment)
    await conn.close()
    await server.execute(f"drop database {name} with (force)")
    for row in found:  # roles belong to the cluster and stay when a database goes
        await server.execute(f'drop role "{row["rolname"]}"')
    await server.close()


@pytest.fixture
async def conn(database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(**options(database))
    yield connection
    await connection.close()


@dataclass
class Rollout:
    """A chain with a head, used through the tool role."""

    control: Any
    tool: Any
    state: schema.SchemaState
    chain: list[int] = field(default_factory=list)
    head: int = 0
    seed: int = 7

    @asynccontextmanager
    async def call(self, *, writable: bool = True) -> AsyncIterator[Any]:
        """One transaction of the tool, bound to this rollout."""
        async with self.tool.transaction(readonly=not writable):
            await self.tool.execute("reset role")
            await self.tool.execute(
                "select megamcp.bind($1::bigint[], $2, $3, $4, $5)",
                [*self.chain, self.head],
                self.head,
                self.seed,
                CLOCK,
                writable,
            )
            await self.tool.execute(f"set local role {self.state.tool_role}")
            await self.tool.execute(f"set local search_path = {self.state.visible_schema}, pg_catalog, pg_temp")
            yield self.tool

    async def run(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        async with self.call() as db:
            return [tuple(row) for row in await db.fetch(sql, *args)]

    async def status(self, sql: str, *args: Any) -> str:
        async with self.call() as db:
            return str(await db.execute(sql, *args))

    async def read(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        async with self.call(writable=False) as db:
            return [tuple(row) for row in await db.fetch(sql, *args)]

    async def checkpoint(self) -> list[int]:
        self.chain = [*self.chain, self.head]
        frozen = list(self.chain)
        self.head = await self.control.fetchval("select nextval('megamcp.layer_seq')")
        return frozen

    async def fork(self, chain: Sequence[int]) -> "Rollout":
        head = await self.control.fetchval("select nextval('megamcp.layer_seq')")
        return Rollout(self.control, self.tool, self.state, list(chain), head, self.seed)


class World:
    """Loads states and opens rollouts on them."""

    def __init__(self, control: Any, tool: Any) -> None:
        self.control = control
        self.tool = tool

    async def load(self, ddl: str, *seeds: str) -> schema.SchemaState:
        return await schema.load(
            self.control, ddl=ddl, seeds=seeds, clock=CLOCK, seed=7, tool_password="t", query_password="q"
        )

    async def open(self, state: schema.SchemaState) -> Rollout:
        head = await self.control.fetchval("select nextval('megamcp.layer_seq')")
        return Rollout(self.control, self.tool, state, [], head)


@pytest.fixture
async def world(conn: asyncpg.Connection, database: str) -> AsyncIterator[World]:
    tool = await asyncpg.connect(**options(database))
    yield World(conn, tool)
    await tool.close()


Compare = Callable[[str, Sequence[str], Sequence[str], Sequence[str | tuple[str, ...]]], None]


@pytest.fixture(scope="module")
def compare(postgres_dsn: str) -> Iterator[Compare]:
    """Runs statements on a rollout and on plain tables: (DDL, tables, rows, statements).

    Each statement, or tuple of them, is a transaction. A checkpoint is made between them now and then, so that rows of
    several layers are met.
    """
    with asyncio.Runner() as runner:
        database = runner.run(Database.create(postgres_dsn))
        made = 0

        def run(
            ddl: str, tables: Sequence[str], seeds: Sequence[str], statements: Sequence[str | tuple[str, ...]]
        ) -> None:
            nonlocal made
            made += 1
            pair = runner.run(Pair.load(database, f"same_{made}", ddl, tables, seeds))
            steps: list[Step] = []
            for number, sql in enumerate(statements):
                several = sql if isinstance(sql, tuple) else (sql,)
                steps.append(Call(0, tuple(Statement(one, Openness.EXACT) for one in several)))
                if number % 3 == 2:
                    steps.append(Checkpoint(0))
            try:
                runner.run(pair.run(steps))
            finally:
                runner.run(pair.unload())
            assert not pair.report.refused, "a statement of this test is refused"

        yield run
        runner.run(database.drop())
