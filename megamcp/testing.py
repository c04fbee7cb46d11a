"""Public fixtures: a database of one's own in milliseconds, and a whole gateway in the test's own process.

Import them in a `conftest.py`: `from megamcp.testing import *  # noqa: F403`. Databases are copies of a template
that is migrated once per session; `MEGAMCP_TEST_DSN` names a server to use instead of the embedded one (as superuser).
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
import uvicorn
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from megamcp.app import create_app, prepare
from megamcp.migrate import migrate
from megamcp.postgres import EmbeddedPostgres
from megamcp.services import Services
from megamcp.settings import Settings

__all__ = [
    "Gateway",
    "database",
    "database_named",
    "gateway",
    "postgres_dsn",
    "running_gateway",
    "scratch_folder",
    "template_database",
]


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway under test."""

    url: str
    services: Services
    settings: Settings


@pytest.fixture(scope="session")
def scratch_folder() -> Iterator[Path]:
    """A short path (unix sockets allow about 100 characters) that is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="mm-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def postgres_dsn(scratch_folder: Path) -> AsyncIterator[str]:
    """DSN of a superuser: the embedded PostgreSQL of this session, or `MEGAMCP_TEST_DSN`."""
    if given := os.environ.get("MEGAMCP_TEST_DSN"):
        yield given
        return
    # Nothing in it outlives the session, so nothing has to outlive the machine's power.
    settings = {"fsync": "off", "full_page_writes": "off"}
    async with EmbeddedPostgres(scratch_folder / "pg", max_connections=300, settings=settings) as postgres:
        yield postgres.dsn


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def template_database(postgres_dsn: str) -> AsyncIterator[str]:
    """Name of a migrated database with the bundled environments loaded."""
    name = f"mm_template_{secrets.token_hex(4)}"
    async with database_named(postgres_dsn, name) as dsn:
        await migrate(dsn)
        await prepare(Settings(database_url=SecretStr(dsn)), dsn)
        yield name


@pytest_asyncio.fixture(loop_scope="session")
async def database(postgres_dsn: str, template_database: str) -> AsyncIterator[str]:
    """DSN of a migrated database of this test's own, dropped after it."""
    name = f"mm_test_{secrets.token_hex(6)}"
    async with database_named(postgres_dsn, name, template_database) as dsn:
        yield dsn


@asynccontextmanager
async def database_named(server: str, name: str, template: str = "template0") -> AsyncIterator[str]:
    """DSN of a new database on the server of a superuser's DSN; dropped afterwards."""
    connection = await asyncpg.connect(server)
    try:
        await connection.execute(f'create database "{name}" template "{template}"')
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        await connection.execute(f'drop database if exists "{name}" with (force)')
        await connection.close()


@asynccontextmanager
async def running_gateway(dsn: str, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway on a free port, in this process."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    own = {"port": listener.getsockname()[1], "bundled_environments": False}
    chosen = Settings(database_url=SecretStr(dsn), **own, **settings)
    app = create_app(chosen)
    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="on", access_log=False, log_config=None)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started:
            if task.done():
                await task
                raise RuntimeError("the gateway did not start; see the log")
            await asyncio.sleep(0.005)
        yield Gateway(f"http://127.0.0.1:{listener.getsockname()[1]}", app.control.state.services, chosen)
    finally:
        server.should_exit = True
        await task
        listener.close()


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(database: str) -> AsyncIterator[Gateway]:
    """A gateway with the bundled environments on a database of this test's own."""
    async with running_gateway(database) as running:
        yield running
