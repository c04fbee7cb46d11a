"""A hostile tool author's view: the raw logins of an environment, and handles of its own rollouts only."""

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from megamcp.app import prepare
from megamcp.handles import Mode, Signer
from megamcp.migrate import migrate
from megamcp.settings import Settings
from megamcp.state import SchemaState
from megamcp.targets import role_dsn, tool_dsn
from megamcp.testing import running_gateway
from tests.integration.promises.world import World

ENVIRONMENTS = Path(__file__).parents[2] / "environments"


@dataclass(frozen=True, slots=True)
class Attack:
    """A gateway with two environments; the attacker has the logins of `vault`."""

    world: World
    signer: Signer
    state: SchemaState
    other: SchemaState

    async def login(self, role: str = "tool") -> asyncpg.Connection:
        """The raw tool or query login, as its process has it."""
        if role == "tool":
            dsn = await tool_dsn(self.world.dsn, "vault")
        else:
            dsn = role_dsn(self.world.dsn, self.state.query_role, self.signer.password("query"))
        conn = await asyncpg.connect(dsn)
        await conn.execute("set default_transaction_read_only = off")  # the query login's default stops no one
        return conn

    async def open(self, count: int = 1) -> list[str]:
        return [row["id"] for row in await self.world.services.rollouts.open("vault", count=count)]

    def handle(self, rollout: str, mode: Mode = Mode.WRITE) -> str:
        """What the gateway sends along with a call."""
        return self.signer.mint(
            rollout=rollout, server="vault", epoch=0, mode=mode, deadline=time.time() + 60, request=b"\0" * 32
        )

    @asynccontextmanager
    async def call(self, conn: asyncpg.Connection, rollout: str) -> AsyncIterator[asyncpg.Connection]:
        """A call of the rollout on a raw connection, finished and committed like the SDK does."""
        token = self.handle(rollout)
        async with conn.transaction():
            await conn.fetchrow("select * from megamcp.call_begin($1, 'raw', '{}')", token)
            yield conn
            await conn.fetchval("select megamcp.call_finish($1, 'raw', '{}', '{}', false)", token)

    @asynccontextmanager
    async def query(self, conn: asyncpg.Connection, rollout: str) -> AsyncIterator[asyncpg.Connection]:
        """A query of the rollout on the raw query login."""
        async with conn.transaction():
            await conn.execute("set transaction read write")
            await conn.fetchval("select megamcp.query_begin($1)", self.handle(rollout, Mode.QUERY))
            yield conn

    async def head(self, rollout: str) -> int:
        """The layer it writes, as the control plane has it."""
        found = await self.world.execute("select layer from megamcp.rollouts where id = $1", rollout)
        return int(found[0]["layer"])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def attack(postgres_dsn: str) -> AsyncIterator[Attack]:
    server = await asyncpg.connect(postgres_dsn)
    name = f"mm_attacked_{secrets.token_hex(4)}"
    await server.execute(f"create database {name} template template0")
    dsn = make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    folders = [ENVIRONMENTS / "vault", ENVIRONMENTS / "ledger"]
    await prepare(Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=folders), dsn)
    async with running_gateway(dsn, reap_interval_s=3600) as running:
        world = World(running.services, running.url, dsn)
        states = []
        for environment in ("vault", "ledger"):
            schema = (await running.services.environments.find(environment)).servers[0].schema
            assert schema is not None
            states.append(schema)
        yield Attack(world, await migrate(dsn), states[0], states[1])
    await server.execute(f"drop database {name} with (force)")
    await server.close()


@pytest_asyncio.fixture(loop_scope="session")
async def tool(attack: Attack) -> AsyncIterator[asyncpg.Connection]:
    conn = await attack.login()
    yield conn
    conn.terminate()


@pytest_asyncio.fixture(loop_scope="session")
async def query(attack: Attack) -> AsyncIterator[asyncpg.Connection]:
    conn = await attack.login("query")
    yield conn
    conn.terminate()


async def refused(conn: asyncpg.Connection, sql: str, *arguments: Any, state: str | tuple[str, ...] = "42501") -> None:
    """The statement fails with this SQLSTATE; in a transaction, that goes on."""
    states = (state,) if isinstance(state, str) else state
    with pytest.raises(asyncpg.PostgresError) as error:
        await _fetch(conn, sql, *arguments)
    assert error.value.sqlstate in states, f"{sql}: {error.value.sqlstate} {error.value}"


async def _fetch(conn: asyncpg.Connection, sql: str, *arguments: Any) -> None:
    if not conn.is_in_transaction():
        await conn.fetch(sql, *arguments)
        return
    async with conn.transaction():
        await conn.fetch(sql, *arguments)


def hidden(state: SchemaState, table: str, part: str = "delta") -> str:
    return f'{state.hidden_schema}."{table}~{part}"'
