"""A gateway with an environment whose server runs in the fork server's sandboxes."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from megamcp.app import prepare
from megamcp.client import Client
from megamcp.settings import Settings
from megamcp.testing import Gateway, running_gateway

NOTES = Path(__file__).parents[2] / "environments" / "notes_server.py"
TOML = """
name = "notes"
[servers.notes]
entry = "notes_server:server"
[servers.notes.state]
kind = "process"
"""


@dataclass(frozen=True, slots=True)
class Sandboxed:
    """A gateway that runs, and a client of it."""

    gateway: Gateway
    client: Client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sandboxed]:
    folder = tmp_path_factory.mktemp("notes")
    (folder / "environment.toml").write_text(TOML)
    (folder / "notes_server.py").write_text(NOTES.read_text())
    name = f"mm_notes_{secrets.token_hex(4)}"
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute(f'create database "{name}"')
    dsn = make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    settings = Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=[folder])
    await prepare(settings, dsn)
    try:
        keeper = tmp_path_factory.mktemp("keeper")
        async with (
            running_gateway(dsn, quiesce_timeout_s=3, rollback_grace_s=0.2, sandbox_dir=keeper) as gateway,
            Client(gateway.url) as client,
        ):
            yield Sandboxed(gateway, client)
    finally:
        await connection.execute(f'drop database "{name}" with (force)')
        await connection.close()
