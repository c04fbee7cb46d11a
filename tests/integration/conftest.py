"""The ledger environment on a gateway in this process."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest_asyncio
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from megamcp.app import prepare
from megamcp.settings import Settings
from megamcp.testing import running_gateway
from tests.integration.promises.world import World

LEDGER = Path(__file__).parent.parent / "environments" / "ledger"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ledger_template(postgres_dsn: str) -> AsyncIterator[str]:
    """A migrated database with the ledger environment, to be copied."""
    connection = await asyncpg.connect(postgres_dsn)
    name = "mm_template_ledger"
    await connection.execute(f'drop database if exists "{name}" with (force)')
    await connection.execute(f'create database "{name}" template template0')
    dsn = make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    await prepare(Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=[LEDGER]), dsn)
    yield name
    await connection.execute(f'drop database if exists "{name}" with (force)')
    await connection.close()


@asynccontextmanager
async def copy_of(server: str, template: str, name: str) -> AsyncIterator[str]:
    """DSN of a copy of a database, dropped afterwards."""
    connection = await asyncpg.connect(server)
    await connection.execute(f'drop database if exists "{name}" with (force)')
    await connection.execute(f'create database "{name}" template "{template}"')
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        await connection.execute(f'drop database if exists "{name}" with (force)')
        await connection.close()


@pytest_asyncio.fixture(loop_scope="session")
async def world_database(postgres_dsn: str, ledger_template: str) -> AsyncIterator[str]:
    """A database with the ledger environment, of this test's own."""
    async with copy_of(postgres_dsn, ledger_template, f"mm_ledger_{secrets.token_hex(4)}") as dsn:
        yield dsn


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(postgres_dsn: str, ledger_template: str) -> AsyncIterator[World]:
    """One gateway per test module; rollouts are private, so tests share it."""
    async with (
        copy_of(postgres_dsn, ledger_template, f"mm_world_{secrets.token_hex(4)}") as dsn,
        running_gateway(dsn, quiesce_timeout_s=3, rollback_grace_s=0.2, reap_interval_s=3600) as running,
    ):
        yield World(running.services, running.url, dsn)
