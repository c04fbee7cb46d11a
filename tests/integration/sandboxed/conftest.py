"""Gateways with environments whose servers run in sandboxes."""

import json
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from pydantic import SecretStr

from megamcp.app import prepare
from megamcp.client import Client, Retry, Rollout
from megamcp.settings import Settings
from megamcp.testing import Gateway, database_named, running_gateway

ENVIRONMENTS = Path(__file__).parents[2] / "environments"
NOTES = """
name = "notes"
[servers.notes]
entry = "notes_server:server"
[servers.notes.state]
kind = "process"
"""
MEMO = """
name = "memo"
[servers.memo]
entry = "memo_server:server"
[servers.memo.state]
kind = "process"
"""


@dataclass(frozen=True, slots=True)
class Sandboxed:
    """A gateway that runs, and a client of it."""

    gateway: Gateway
    client: Client


def environment(folder: Path, toml: str, *modules: str) -> Path:
    """A folder with an environment of these modules."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.toml").write_text(toml)
    for name in modules:
        shutil.copy(ENVIRONMENTS / f"{name}.py", folder)
    return folder


@asynccontextmanager
async def database_with(postgres_dsn: str, *folders: Path) -> AsyncIterator[str]:
    """DSN of a database of its own with these environments loaded."""
    async with database_named(postgres_dsn, f"mm_boxes_{secrets.token_hex(4)}") as dsn:
        await prepare(
            Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=list(folders)), dsn
        )
        yield dsn


@asynccontextmanager
async def gateway_on(dsn: str, **settings: Any) -> AsyncIterator[Sandboxed]:
    """A gateway and a client that repeats nothing by itself."""
    chosen = {"quiesce_timeout_s": 3, "rollback_grace_s": 0.2, **settings}
    async with (
        running_gateway(dsn, **chosen) as gateway,
        Client(gateway.url, retry=Retry(attempts=1)) as client,
    ):
        yield Sandboxed(gateway, client)


async def left(rollout: Rollout, tool: str, **arguments: Any) -> Any:
    """A call that its agent cancels, as MCP has it, once the tool says that it runs. What the agent is told."""
    headers = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-06-18"}
    params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": "p"}}
    call = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
    cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(rollout.url, json=call) as answer:
        async for line in answer.content:
            if line.startswith(b"data:"):
                told = json.loads(line.removeprefix(b"data:"))
                if told.get("method") != "notifications/progress":
                    return told
                async with http.post(rollout.url, json=cancelled) as accepted:
                    assert accepted.status == 202
    raise AssertionError("the call was not answered")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sandboxed]:
    folders = [
        environment(tmp_path_factory.mktemp("notes"), NOTES, "notes_server"),
        environment(tmp_path_factory.mktemp("memo"), MEMO, "memo_server"),
    ]
    async with (
        database_with(postgres_dsn, *folders) as dsn,
        gateway_on(dsn, sandbox_dir=tmp_path_factory.mktemp("keeper")) as running,
    ):
        yield running
