"""The client that every peer is measured with: MCP over streamable HTTP in posts of raw JSON, kept alive.

It does what an agent's client does, in the handshake era (initialize, session, protocol version header) or in the
stateless one of 2026-07-28, and as little as possible else, so that what it costs doesn't hide what its servers cost.
Checks that every call got a result.
"""

import asyncio
import itertools
import json
import time
from typing import Any

import aiohttp

HANDSHAKE = "2025-11-25"
STATELESS = "2026-07-28"
_CLIENT = {"name": "megamcp-benchmark", "version": "1"}
_META = {
    "io.modelcontextprotocol/protocolVersion": STATELESS,
    "io.modelcontextprotocol/clientInfo": _CLIENT,
    "io.modelcontextprotocol/clientCapabilities": {},
}
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}


class Refused(Exception):
    """A server answered with something that is no result."""


class McpClient:
    """One client of one server; in the handshake era, one session."""

    def __init__(self, http: aiohttp.ClientSession, url: str, *, stateless: bool = False) -> None:
        self._http = http
        self._url = url
        self._stateless = stateless
        self._headers = dict(_HEADERS)
        self._ids = itertools.count(1)

    async def open(self) -> "McpClient":
        """`initialize` and its notification, where the era has them."""
        if self._stateless:
            self._headers["MCP-Protocol-Version"] = STATELESS
            return self
        hello = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": _CLIENT}
        answer, session = await self._post({"id": 0, "method": "initialize", "params": hello})
        if session:
            self._headers["Mcp-Session-Id"] = session
        self._headers["MCP-Protocol-Version"] = _result(answer)["protocolVersion"]
        await self._post({"method": "notifications/initialized"})
        return self

    async def tools(self) -> list[dict[str, Any]]:
        """`tools/list`, its first page."""
        answer, _ = await self._post({"id": next(self._ids), "method": "tools/list", "params": {}})
        tools: list[dict[str, Any]] = _result(answer)["tools"]
        return tools

    async def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """`tools/call`. Raises `Refused` unless the tool did what was asked."""
        params = {"name": tool, "arguments": arguments}
        answer, _ = await self._post({"id": next(self._ids), "method": "tools/call", "params": params})
        result = _result(answer)
        if result.get("isError"):
            raise Refused(json.dumps(result)[:500])
        return result

    async def _post(self, message: dict[str, Any]) -> tuple[bytes, str | None]:
        headers = self._headers
        if self._stateless:
            message["params"]["_meta"] = _META
            headers = {**headers, "Mcp-Method": message["method"]}
            if name := message["params"].get("name"):
                headers["Mcp-Name"] = name
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        async with self._http.post(self._url, data=body, headers=headers) as response:
            answer = await response.read()
            if response.status >= 300:
                raise Refused(f"HTTP {response.status}: {answer[:500].decode(errors='replace')}")
            return answer, response.headers.get("Mcp-Session-Id")


def _result(answer: bytes) -> dict[str, Any]:
    if not answer.startswith(b"{"):  # an event stream: the response is its last event
        answer = answer.rpartition(b"data: ")[2]
    document = json.loads(answer)
    if "result" not in document:
        raise Refused(json.dumps(document)[:500])
    result: dict[str, Any] = document["result"]
    return result


async def one_after_another(client: McpClient, tool: str, arguments: dict[str, Any], count: int) -> list[float]:
    """Milliseconds of each call."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await client.call(tool, arguments)
        taken.append((time.perf_counter() - began) * 1000)
    return taken


async def at_once(clients: list[McpClient], tool: str, arguments: dict[str, Any], count: int) -> None:
    """`count` calls, one of each client at a time."""
    share = count // len(clients)
    await asyncio.gather(*(one_after_another(client, tool, arguments, share) for client in clients))
