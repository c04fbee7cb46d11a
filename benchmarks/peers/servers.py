"""Tool servers and gateways as processes on ports of their own, up before they are used and gone after."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_PATIENCE_S = 60
PORT = "{port}"


@dataclass(frozen=True, slots=True)
class Running:
    """A process that listens."""

    url: str
    pid: int


@asynccontextmanager
async def listening(*command: str) -> AsyncIterator[Running]:
    """Runs a command, `{port}` replaced by a free port, until the block is left. RuntimeError: it ended at once."""
    port = _free_port()
    arguments = [part.replace(PORT, str(port)) for part in command]
    process = await asyncio.create_subprocess_exec(
        *arguments,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(START_PATIENCE_S):
            while not await _accepts(port):
                if process.returncode is not None:
                    raise RuntimeError(f"{' '.join(arguments)} ended with status {process.returncode}")
                await asyncio.sleep(0.05)
        yield Running(f"http://127.0.0.1:{port}/mcp", process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()
                await process.wait()


def tool_server() -> "contextlib.AbstractAsyncContextManager[Running]":
    """`echo`, on this project's SDK."""
    entry = "benchmarks.peers.echo:server"
    return listening(sys.executable, "-m", "megamcp", "tool-server", entry, "--port", PORT)


def official_tool_server() -> "contextlib.AbstractAsyncContextManager[Running]":
    """The same on the official SDK."""
    return listening(sys.executable, "-m", "benchmarks.peers.official", PORT)


def fastmcp_proxy(python: Path, upstream: str) -> "contextlib.AbstractAsyncContextManager[Running]":
    """FastMCP's proxy of a tool server, by the Python that has FastMCP."""
    return listening(str(python), "-P", str(Path(__file__).with_name("fastmcp_proxy.py")), upstream, PORT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False
