"""A tool server as a process: its socket, its ends, and the official client in both eras."""

import asyncio
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import httpx2
import pytest
from mcp import Client as McpClient
from mcp.client.streamable_http import streamable_http_client

from tests.integration.sdk.conftest import Client
from tests.integration.sdk.counter_database import CounterDatabase

ROOT = Path(__file__).parents[3]

ENTRY = "tests.integration.sdk.counter_server:server"


@asynccontextmanager
async def tool_server(
    path: Path, entry: str = ENTRY, **environment: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Client]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "megamcp.sdk",
        entry,
        "--socket",
        str(path),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    try:
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://tool", timeout=30
        ) as http:
            async with asyncio.timeout(20):
                while process.returncode is None:
                    try:
                        await http.get("/healthz")
                        break
                    except httpx.ConnectError:
                        await asyncio.sleep(0.02)
            yield process, Client(http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_its_socket_is_private_and_gone_after_a_clean_end(scratch_folder: Path) -> None:
    path = scratch_folder / "private.sock"
    async with tool_server(path) as (process, client):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (await client.call("stateless")).result["structuredContent"] == {"result": "step one"}
        process.terminate()
        assert await process.wait() == 0
    assert not path.exists()


async def test_it_ends_when_its_parent_closes_the_pipe(scratch_folder: Path) -> None:
    async with tool_server(scratch_folder / "pipe.sock") as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(3):
            assert await process.wait() == 0


async def test_it_ends_with_its_parent_even_while_a_tool_blocks_it(scratch_folder: Path) -> None:
    async with tool_server(scratch_folder / "blocked.sock") as (process, client):
        call = asyncio.create_task(client.call("block", {"seconds": 60}))
        await asyncio.sleep(0.2)
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(10):
            assert await process.wait() == 1
        with pytest.raises(httpx.HTTPError):
            await call


async def test_sigterm_lets_running_calls_finish(scratch_folder: Path, counters: CounterDatabase, rollout: str) -> None:
    async with tool_server(scratch_folder / "term.sock", MEGAMCP_TOOL_DSN=counters.dsn) as (process, client):
        call = asyncio.create_task(client.call("wait", {"seconds": 0.5}, handle=counters.handle(rollout)))
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert "isError" not in (await call).result
        assert await process.wait() == 0
    assert await counters.value() == 2


async def test_a_process_killed_in_a_statement_frees_its_rollout_and_leaves_nothing(
    scratch_folder: Path, counters: CounterDatabase, rollout: str
) -> None:
    async with tool_server(scratch_folder / "kill.sock", MEGAMCP_TOOL_DSN=counters.dsn) as (process, client):
        call = asyncio.create_task(
            client.call("wait_in_sql", {"seconds": 60}, handle=counters.handle(rollout, key="k"))
        )
        await asyncio.sleep(0.3)
        process.kill()
        with pytest.raises(httpx.HTTPError):
            await call
    async with tool_server(scratch_folder / "kill2.sock", MEGAMCP_TOOL_DSN=counters.dsn) as (process, client):
        began = time.monotonic()
        reply = await client.call("add", {"name": "a"}, handle=counters.handle(rollout, key="k"))
        assert time.monotonic() - began < 30
        assert reply.result["structuredContent"]["value"] == 2
        assert len(await counters.calls(rollout)) == 1


async def test_a_client_that_leaves_cancels_its_call_over_a_real_socket(
    scratch_folder: Path, counters: CounterDatabase, rollout: str
) -> None:
    path = scratch_folder / "leave.sock"
    async with tool_server(path, MEGAMCP_TOOL_DSN=counters.dsn, MEGAMCP_TOOL_POOL="1") as (_, client):
        for tool in ("wait", "wait_in_sql"):
            with pytest.raises(httpx.ReadTimeout):
                async with httpx.AsyncClient(
                    transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://tool", timeout=0.2
                ) as http:
                    await Client(http).call(tool, {"seconds": 30}, handle=counters.handle(rollout))
        async with asyncio.timeout(3):
            reply = await client.call("add", {"name": "a"}, handle=counters.handle(rollout))
        assert reply.result["structuredContent"]["value"] == 2


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nowhere.at.all:server", "can't import nowhere.at.all"),
        ("json:dumps", "not a megamcp.sdk.Server"),
        ("json", "package.module:attribute"),
    ],
)
async def test_a_wrong_entry_is_said_in_one_line(scratch_folder: Path, entry: str, said: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megamcp.sdk", entry, "--socket", str(scratch_folder / "wrong.sock")),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert said in errors.decode()
    assert "Traceback" not in errors.decode()


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28", "auto"])
async def test_the_official_client_works_in_both_eras(scratch_folder: Path, mode: str) -> None:
    path = scratch_folder / f"mcp-{mode}.sock"
    seen: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append(progress)

    async with (
        tool_server(path),
        httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(path))) as http,
        McpClient(streamable_http_client("http://tool/mcp", http_client=http), mode=mode) as client,
    ):
        tools = (await client.list_tools()).tools
        assert tools[0].name == "add"
        assert tools[1].annotations is not None
        assert tools[1].annotations.read_only_hint is True
        result = await client.call_tool("count", {"to": 3}, progress_callback=on_progress)
        assert result.structured_content == {"result": [1, 2, 3]}
        assert seen == [1, 2, 3]
        failed = await client.call_tool("threaded", {"a": "x"})
        assert failed.is_error


async def test_a_socket_path_that_is_no_socket_is_left_alone(scratch_folder: Path) -> None:
    path = scratch_folder / "file"
    path.write_text("precious")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megamcp.sdk", ENTRY, "--socket", str(path)),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"no socket" in errors
    assert path.read_text() == "precious"


async def test_a_stale_socket_is_replaced(scratch_folder: Path) -> None:
    path = scratch_folder / "stale.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    async with tool_server(path) as (_, client):
        assert (await client.call("stateless")).status == 200
