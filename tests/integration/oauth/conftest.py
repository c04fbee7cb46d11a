"""Two gateways on one database, and a tool server of a test's own that wants authorization."""

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio
import uvicorn
from pydantic import SecretStr
from starlette.types import ASGIApp

from megamcp.testing import Gateway, running_gateway
from tests.integration.conftest import copy_of
from tests.integration.oauth.guarded_server import Guarded

MODERN = "2026-07-28"


@asynccontextmanager
async def serving(listener: socket.socket, app: ASGIApp) -> AsyncIterator[None]:
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, ws="none"))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task
        listener.close()


@dataclass
class Scene:
    """The gateways, and people and programs before them."""

    first: Gateway
    second: Gateway
    guarded: Guarded
    http: httpx.AsyncClient
    folder: Path
    environment: str = field(default_factory=lambda: f"e{secrets.token_hex(4)}")
    rollout: str = ""

    async def load(self, **server: Any) -> "Scene":
        """An environment with the tool server in it, and a rollout of that."""
        document = {"name": self.environment, "mcpServers": {"guarded": {"url": self.guarded.url, **server}}}
        file = self.folder / "mcp.json"
        file.write_text(json.dumps(document))
        loaded = await self.http.post(f"{self.first.url}/v1/environments", json={"path": str(file)})
        assert loaded.status_code == 201, loaded.text
        opened = await self.http.post(f"{self.first.url}/v1/rollouts", json={"environment": self.environment})
        self.rollout = opened.json()["rollouts"][0]["id"]
        return self

    async def call(self, tool: str = "look", *, at: Gateway | None = None, **more: Any) -> httpx.Response:
        url = f"{(at or self.first).url}/v1/rollouts/{self.rollout}/call"
        return await self.http.post(url, json={"tool": tool, "arguments": {}, **more})

    async def done(self, tool: str = "look", *, at: Gateway | None = None, **more: Any) -> None:
        answer = await self.call(tool, at=at, **more)
        assert answer.is_success, answer.text

    async def refused(self, tool: str = "look", *, at: Gateway | None = None, **more: Any) -> str:
        """The URL of the consent that a call waits for."""
        answer = await self.call(tool, at=at, **more)
        assert answer.status_code == 424, answer.text
        assert answer.json()["code"] == "authorization_required"
        return str(answer.json()["url"])

    async def visit(self, url: str) -> httpx.Response:
        """What a browser shows in the end."""
        return await self.http.get(url, follow_redirects=True)

    async def authorized(self) -> "Scene":
        page = await self.visit(await self.refused())
        assert page.status_code == 200, page.text
        return self

    async def rpc(self, method: str, params: Mapping[str, Any], *, modern: bool) -> Any:
        headers = {"Accept": "application/json, text/event-stream"}
        if modern:
            headers |= {"MCP-Protocol-Version": MODERN, "Mcp-Method": method, "Mcp-Name": params.get("name", "")}
            told = {"protocolVersion": MODERN, "clientCapabilities": {"elicitation": {"url": {}}}}
            meta = {f"io.modelcontextprotocol/{name}": value for name, value in told.items()}
            params = {**params, "_meta": meta}
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = await self.http.post(f"{self.first.url}/r/{self.rollout}/mcp", json=message, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateways(postgres_dsn: str, ledger_template: str) -> AsyncIterator[tuple[Gateway, Gateway, str]]:
    key = SecretStr("a key that is the same for both")
    async with (
        copy_of(postgres_dsn, ledger_template, f"mm_oauth_{secrets.token_hex(4)}") as dsn,
        running_gateway(dsn, token_key=key, reap_interval_s=3600) as first,
        running_gateway(dsn, token_key=key, reap_interval_s=3600) as second,
    ):
        yield first, second, dsn


@pytest_asyncio.fixture(loop_scope="session")
async def scene(gateways: tuple[Gateway, Gateway, str], tmp_path: Path) -> AsyncIterator[Scene]:
    """Before anything is loaded."""
    listener = socket.create_server(("127.0.0.1", 0))
    guarded = Guarded(f"http://127.0.0.1:{listener.getsockname()[1]}")
    async with serving(listener, guarded), httpx.AsyncClient(timeout=60) as http:
        yield Scene(gateways[0], gateways[1], guarded, http, tmp_path)
