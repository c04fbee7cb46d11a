"""Fixtures of the SDK's integration tests: a database, the counter server in this process, a client of both
eras."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest_asyncio

from megamcp.sdk.endpoint import ToolApp
from tests.integration.sdk.counter_database import CounterDatabase, counter_database
from tests.integration.sdk.counter_server import cancelled, kept, server

META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}


@dataclass
class Reply:
    status: int
    content_type: str
    raw: bytes
    message: dict[str, Any]

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = self.message["result"]
        return found

    @property
    def code(self) -> str:
        """The stable code of a tool error or of a JSON-RPC error."""
        if "error" in self.message:
            return str(self.message["error"]["data"]["code"])
        return str(self.result["structuredContent"]["code"])


class Client:
    """Speaks to one tool server as the gateway does."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def call(self, tool: str, arguments: Any = None, *, handle: str | None = None, **meta: Any) -> Reply:
        params = {"name": tool, "arguments": arguments or {}, "_meta": {**META, **meta}}
        headers = {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/call", "mcp-name": tool}
        if handle is not None:
            headers["megamcp-handle"] = handle
        return await self.post({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}, headers)

    async def post(self, body: Any, headers: dict[str, str] | None = None) -> Reply:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        send = {
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            **(headers or {}),
        }
        response = await self.http.post("/mcp", content=content, headers=send)
        kind = response.headers.get("content-type", "")
        text = response.text
        if kind == "text/event-stream":
            text = text.strip().split("\r\n\r\n")[-1].split("data: ", 1)[1]
        return Reply(response.status_code, kind, response.content, json.loads(text) if text else {})


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def counters_once(postgres_dsn: str) -> AsyncIterator[CounterDatabase]:
    async with counter_database(postgres_dsn) as database:
        yield database


@pytest_asyncio.fixture(loop_scope="session")
async def counters(counters_once: CounterDatabase) -> CounterDatabase:
    kept.clear()
    cancelled.clear()
    await counters_once.admin.execute(
        "update v_test.counter set value = case name when 'a' then 1 else 10 end;"
        " update v_test.hidden set draws = 0, clock = '2026-01-15T09:00:00Z'"
    )
    return counters_once


@pytest_asyncio.fixture(loop_scope="session")
async def app(counters: CounterDatabase) -> AsyncIterator[ToolApp]:
    app = server.asgi_app(counters.dsn, pool_size=4)
    yield app
    await app.aclose()


@pytest_asyncio.fixture(loop_scope="session")
async def client(app: ToolApp) -> AsyncIterator[Client]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tool") as http:
        yield Client(http)


@pytest_asyncio.fixture(loop_scope="session")
async def rollout(counters: CounterDatabase) -> str:
    return await counters.rollout()
