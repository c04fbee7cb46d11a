"""An `mcp.json` as people have it, loaded as an environment: each command in a sandbox a rollout."""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from megamcp.app import prepare
from megamcp.client import Client, Rollout, UpstreamError
from megamcp.settings import Settings
from megamcp.testing import running_gateway
from tests.integration.criu.conftest import Host

pytestmark = [pytest.mark.criu, pytest.mark.npm, pytest.mark.timeout(400)]

MCP_JSON = {
    "mcpServers": {
        "memory": {
            "command": "npx",
            "args": ["-y", "@modelcontextprotocol/server-memory"],
            "env": {"MEMORY_FILE_PATH": "/workspace/memory.json"},
        },
        "files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/workspace"]},
    }
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(host: Host, postgres_dsn: str) -> AsyncIterator[Client]:
    """Of a gateway that uses a keeper of the tests."""
    folder = Path(tempfile.mkdtemp(prefix="desk-"))
    (folder / "mcp.json").write_text(json.dumps({"name": "desk", **MCP_JSON}))
    name = f"mm_desk_{secrets.token_hex(4)}"
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute(f'create database "{name}"')
    dsn = make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    await prepare(Settings(database_url=SecretStr(dsn), bundled_environments=False), dsn)
    try:
        socket = host.folder / "s"
        async with (
            running_gateway(dsn, sandbox_socket=socket, quiesce_timeout_s=5, start_timeout_s=120) as gateway,
            Client(gateway.url) as client,
        ):
            told: list[str] = []
            await client.load_environment(str(folder), progress=lambda what, done, total: told.append(what))
            for server in MCP_JSON["mcpServers"]:  # so no first call waits for it
                assert any(what.startswith(f"{server}: ready after") for what in told), told
            yield client
    finally:
        await connection.execute(f'drop database "{name}" with (force)')
        await connection.close()
        shutil.rmtree(folder)


async def seen(rollout: Rollout) -> tuple[bool, str]:
    """Whether Ada is known, and what the note says."""
    graph = await rollout.call("memory__read_graph")
    note = await rollout.call("files__read_text_file", path="/workspace/note")
    return "Ada" in str(graph.structured), str(note.text)


async def test_a_package_that_can_not_be_got_is_said_when_its_environment_is_loaded(
    client: Client, tmp_path: Path
) -> None:
    server = {"command": "npx", "args": ["-y", "@modelcontextprotocol/no-such-server-at-all"]}
    (tmp_path / "mcp.json").write_text(json.dumps({"name": "nowhere", "mcpServers": {"absent": server}}))
    told: list[str] = []
    with pytest.raises(UpstreamError, match="'absent': @modelcontextprotocol/no-such-server-at-all") as refused:
        await client.load_environment(str(tmp_path), progress=lambda what, done, total: told.append(what))
    assert refused.value.code == "tool_server_start_failed"
    assert "is loaded, but absent is not ready" in told[-1]


async def test_an_mcp_json_forks_and_rolls_back_with_all_of_its_servers(client: Client) -> None:
    rollout = await client.open("desk")
    ada = [{"name": "Ada", "entityType": "person", "observations": []}]
    await rollout.call("memory__create_entities", entities=ada)
    await rollout.call("files__write_file", path="/workspace/note", content="one")
    point = await rollout.checkpoint()
    await rollout.call("memory__delete_entities", entityNames=["Ada"])
    await rollout.call("files__write_file", path="/workspace/note", content="two")
    assert await seen(rollout) == (False, "two")
    left, right = await point.fork(count=2)
    await left.call("files__write_file", path="/workspace/note", content="left")
    assert await seen(left) == (True, "left")
    assert await seen(right) == (True, "one")
    await rollout.rollback(point)
    assert await seen(rollout) == (True, "one")
    assert os.listdir(Path(tempfile.gettempdir()))  # the host's own /tmp was nobody's
