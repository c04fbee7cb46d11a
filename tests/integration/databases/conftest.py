"""A gateway with the `sql` environment, on a state cluster of the tests' own."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest_asyncio
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from megamcp.app import prepare
from megamcp.databases.clusters import SETTINGS
from megamcp.postgres import EmbeddedPostgres
from megamcp.settings import Settings
from megamcp.testing import running_gateway
from tests.integration.databases.shop import Shop

SQL = Path(__file__).parents[3] / "tool_servers" / "sql"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def state_dsn(scratch_folder: Path) -> AsyncIterator[str]:
    """DSN of a state cluster's superuser."""
    async with EmbeddedPostgres(scratch_folder / "state", max_connections=200, settings=SETTINGS) as postgres:
        yield postgres.dsn


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shop(postgres_dsn: str, state_dsn: str) -> AsyncIterator[Shop]:
    """One gateway per test module; rollouts are private, so tests share it."""
    name = f"mm_shop_{secrets.token_hex(4)}"
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute(f'create database "{name}"')
    dsn = make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    settings = Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=[SQL])
    await prepare(settings, dsn)
    try:
        async with running_gateway(
            dsn,
            state_urls=[state_dsn],
            quiesce_timeout_s=3,
            rollback_grace_s=0.2,
            reap_interval_s=3600,
            spare_databases=2,
            disk_reserve=0,
            query_timeout_s=4,
        ) as running:
            yield Shop(running.services, running.url, dsn, state_dsn)
    finally:
        await connection.execute(f'drop database "{name}" with (force)')
        await connection.close()
