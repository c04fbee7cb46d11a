"""A gateway with plain classes whose state is a document, and a second one on the same database."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import SecretStr

from megamcp.app import prepare
from megamcp.client import Client
from megamcp.settings import Settings
from megamcp.testing import Gateway, database_named, running_gateway

SERVER = Path(__file__).parents[2] / "environments" / "shelf_server.py"
TOML = """
name = "shelf"
clock = "2026-03-04T05:06:07Z"
[servers.shelf]
entry = "shelf_server:Shelf"
env = { SHELF_MARKS = "@FOLDER@" }
[servers.shelf.state]
kind = "document"
"""
LEDGER = TOML.replace('name = "shelf"', 'name = "ledger"').replace(":Shelf", ":Ledger")
TOWER = """
name = "tower"
[servers.tower]
entry = "shelf_server:Tower"
[servers.tower.state]
kind = "document"
initial = "tower.json"
[servers.shelf]
entry = "shelf_server:Shelf"
[servers.shelf.state]
kind = "document"
"""


@dataclass(frozen=True, slots=True)
class Library:
    """Gateways on one database, and a client of each."""

    gateway: Gateway
    client: Client
    other: Gateway
    other_client: Client
    dsn: str
    marks: Path
    """Where slow calls leave a mark."""

    async def rows(self) -> dict[str, int]:
        """How many rows each table of documents has."""
        tables = ("documents", "document_deltas", "document_points", "document_blobs")
        store = self.gateway.services.store
        return {table: await store.value(f"select count(*) from megamcp.{table}") for table in tables}


@asynccontextmanager
async def environments(postgres_dsn: str, folder: Path) -> AsyncIterator[str]:
    """DSN of a database with the environments of this folder's tests."""
    folders = []
    for name, text in (("shelf", TOML), ("ledger", LEDGER), ("tower", TOWER)):
        (folder / name).mkdir()
        (folder / name / "environment.toml").write_text(text.replace("@FOLDER@", str(folder)))
        (folder / name / "shelf_server.py").write_text(SERVER.read_text())
        folders.append(folder / name)
    (folder / "tower" / "tower.json").write_text('{"floors": [["ground", 0], ["first", 1]]}')
    async with database_named(postgres_dsn, f"mm_shelf_{secrets.token_hex(4)}") as dsn:
        await prepare(Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=folders), dsn)
        yield dsn


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def library(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Library]:
    marks = tmp_path_factory.mktemp("documents")
    options: dict[str, Any] = {
        "quiesce_timeout_s": 3,
        "rollback_grace_s": 0.2,
        "reap_interval_s": 3600,
        "document_bytes": 3 << 20,
    }
    async with (
        environments(postgres_dsn, marks) as dsn,
        running_gateway(dsn, **options) as gateway,
        running_gateway(dsn, **options) as other,
        Client(gateway.url) as client,
        Client(other.url) as other_client,
    ):
        yield Library(gateway, client, other, other_client, dsn, marks)
