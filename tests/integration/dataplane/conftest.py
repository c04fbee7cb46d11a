"""A gateway with an in-memory control plane, served by uvicorn, in front of servers made with the official SDK."""

import asyncio
import contextlib
import itertools
import json
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from megamcp.dataplane.fake import FakeControl
from megamcp.dataplane.plane import Dataplane
from megamcp.dataplane.ports import SOCKET, ChildTarget, EnvironmentView, Limits, ServerView, UrlTarget

SCRIPT = str(Path(__file__).with_name("official_server.py"))
MODERN = "2026-07-28"
_numbers = itertools.count(1)


def child(*options: str) -> ChildTarget:
    return ChildTarget((sys.executable, SCRIPT, SOCKET, *options))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return self.json["error"]["data"]["code"]


@dataclass
class Gateway:
    """The data plane on a port of its own, and a plain HTTP client for it."""

    base: str
    plane: Dataplane
    control: FakeControl
    http: aiohttp.ClientSession
    ids: Any = field(default_factory=lambda: itertools.count(1))

    def environment(self, *servers: ServerView, **more: Any) -> EnvironmentView:
        number = next(_numbers)
        return self.control.add(EnvironmentView(number, f"env{number}", "v1", servers, **more))

    def open(self, *servers: ServerView) -> str:
        return self.control.open(self.environment(*servers))

    def url(self, rollout: str) -> str:
        return f"{self.base}/r/{rollout}/mcp"

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        sent = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.base + path, data=data, headers=sent) as response:
            return Answer(response.status, response.headers, await response.read())

    async def rpc(self, rollout: str, method: str, params: dict[str, Any] | None = None, **headers: str) -> Answer:
        """A request of the handshake era, without a session."""
        message = {"jsonrpc": "2.0", "id": next(self.ids), "method": method, "params": params or {}}
        return await self.post(f"/r/{rollout}/mcp", message, **headers)

    async def call(self, rollout: str, tool: str, arguments: dict[str, Any] | None = None, **headers: str) -> Answer:
        return await self.rpc(rollout, "tools/call", {"name": tool, "arguments": arguments or {}}, **headers)

    async def modern(
        self, path: str, method: str, params: dict[str, Any] | None = None, *, meta: Any = None, **headers: str
    ) -> Answer:
        """A request of 2026-07-28."""
        full = {
            **(params or {}),
            "_meta": {
                "io.modelcontextprotocol/protocolVersion": MODERN,
                "io.modelcontextprotocol/clientCapabilities": {},
                **(meta or {}),
            },
        }
        own = {"mcp_protocol_version": MODERN, "mcp_method": method}
        if params and "name" in params:
            own["mcp_name"] = params["name"]
        message = {"jsonrpc": "2.0", "id": next(self.ids), "method": method, "params": full}
        return await self.post(path, message, **{**own, **headers})


@contextlib.asynccontextmanager
async def serving(limits: Limits, control: FakeControl | None = None) -> AsyncIterator[Gateway]:
    control = control or FakeControl()
    plane = Dataplane(control, limits)
    config = uvicorn.Config(plane, port=0, lifespan="off", log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with aiohttp.ClientSession() as http:
            yield Gateway(f"http://127.0.0.1:{port}", plane, control, http)
    finally:
        server.should_exit = True
        await task
        await plane.aclose()


@contextlib.asynccontextmanager
async def official(*options: str) -> AsyncIterator[UrlTarget]:
    """An official server of its own on a TCP port."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, SCRIPT, str(port), *options)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.05)
        yield UrlTarget(f"http://127.0.0.1:{port}/mcp")
    finally:
        process.kill()
        await process.wait()


LIMITS = Limits(call_timeout_s=20.0, grace_s=0.5, probe_s=1.0, start_timeout_s=20.0)


@pytest.fixture(scope="session")
async def gateway() -> AsyncIterator[Gateway]:
    async with serving(LIMITS) as running:
        yield running


@pytest.fixture(scope="session")
async def shared(gateway: Gateway) -> EnvironmentView:
    """One child server, taken for one that settles its calls itself."""
    return gateway.environment(ServerView("shop", child(), exactly_once=True))


@pytest.fixture(scope="session")
async def strangers() -> AsyncIterator[dict[str, UrlTarget]]:
    """The same server over TCP: speaking both eras, and behind a proxy that lets only the older one through."""
    async with official() as both, official("--stateful") as stateful:
        yield {"modern": both, "stateful": stateful}


@pytest.fixture
def make_child() -> Any:
    return child


@pytest.fixture
def serve() -> Any:
    return serving


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if "dataplane" in str(item.path):
            item.add_marker(pytest.mark.timeout(60))
