"""A tool server over streamable HTTP, of the handshake era, that does what no tool server should.

It runs in the test's own process, so that a test sees what it was told: each tool is one misdeed. Written without an
SDK, since no SDK would do these things.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from megamcp.dataplane.ports import UrlTarget

TOOLS = (
    *("echo", "count", "hang", "die", "utf8", "line", "junk", "slow", "twice", "wrong_id", "no_reply", "odd_result"),
    *("bad_cancel", "cut_short", "events", "late", "updated"),
)
CAPABILITIES = {
    "tools": {"listChanged": True},
    "resources": {"subscribe": True, "listChanged": True},
    "prompts": {},
    "logging": {},
}


def message(**members: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **members}, ensure_ascii=False).encode()


def event(data: bytes) -> bytes:
    return b"event: message\ndata: " + data + b"\n\n"


def text(value: object) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(value)}]}


class HostileHttp:
    """What it was told, and what it has open."""

    def __init__(self) -> None:
        self.sessions: dict[str, int] = {}
        self.streams: set[asyncio.Queue[bytes]] = set()
        self.subscribed: list[str] = []
        self.hanging = 0
        self.cancel_told = asyncio.Event()
        self.prompts: Any = {"prompts": [{"name": "good"}]}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        session = request.headers.get("mcp-session-id", "")
        if request.method == "DELETE":
            self.sessions.pop(session, None)
            return web.Response(status=204)
        if session and session not in self.sessions:
            return web.Response(status=404)
        if request.method == "GET":
            return await self._stream(request)
        said = json.loads(await request.read())
        number, method, params = said.get("id"), said.get("method"), said.get("params", {})
        if method == "notifications/cancelled":
            self.cancel_told.set()
        if number is None or method is None:
            return web.Response(status=202)
        if method == "tools/call":
            return await self._call(request, session, number, params["name"], params["arguments"])
        return self._said(self._plain(number, method, params), {} if session else {"mcp-session-id": self._new()})

    def _new(self) -> str:
        session = secrets.token_hex(8)
        self.sessions[session] = 0
        return session

    @staticmethod
    def _said(body: bytes, headers: dict[str, str] | None = None) -> web.Response:
        return web.Response(body=body, content_type="application/json", headers=headers)

    def _plain(self, number: Any, method: str, params: dict[str, Any]) -> bytes:
        match method:
            case "initialize":
                about = {"name": "hostile", "version": "1"}
                result: Any = {"protocolVersion": "2025-11-25", "capabilities": CAPABILITIES, "serverInfo": about}
            case "tools/list":
                result = {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
            case "prompts/list":
                result = self.prompts
            case "resources/subscribe":
                self.subscribed.append(params["uri"])
                result = {}
            case "resources/unsubscribe" | "logging/setLevel" | "ping":
                result = {}
            case _:
                return message(id=number, error={"code": -32601, "message": "No."})
        return message(id=number, result=result)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.streams.add(queue)
        try:
            while True:
                await response.write(event(await queue.get()))
        finally:
            self.streams.discard(queue)

    def say(self, data: bytes) -> None:
        """To all who listen."""
        for queue in self.streams:
            queue.put_nowait(data)

    async def _call(
        self, request: web.Request, session: str, number: Any, name: str, arguments: dict[str, Any]
    ) -> web.StreamResponse:
        match name:
            case "echo":
                return self._said(message(id=number, result=text(arguments.get("value"))))
            case "count":
                self.sessions[session] += 1
                return self._said(message(id=number, result=text(self.sessions[session])))
            case "utf8":
                return self._said(message(id=number, result=text("größe😀" * (arguments["bytes"] // 11))))
            case "hang":
                self.hanging += 1
                try:
                    await asyncio.sleep(600)
                finally:
                    self.hanging -= 1
            case "late":
                await self.cancel_told.wait()
                return self._said(message(id=number, result=text("too late")))
            case "die":
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(1)
            case "junk":
                return self._said(b"\x00\xff{]" * 10)
            case "odd_result":
                return self._said(message(id=number, result=5))
            case "wrong_id":
                return self._said(message(id=987654, result=text("another's")))
        return await self._events(request, number, name, arguments)

    async def _events(
        self, request: web.Request, number: Any, name: str, arguments: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        reply = event(message(id=number, result=text("done")))
        match name:
            case "line":
                await response.write(event(message(id=number, result=text("x" * arguments["bytes"]))))
            case "slow":
                for place in range(0, len(reply), 3):
                    await response.write(reply[place : place + 3])
                    await asyncio.sleep(0)
            case "twice":
                await response.write(reply + event(message(id=number, result=text("again"))))
            case "events":
                for step in range(arguments["steps"]):
                    log = {"level": "error", "data": step}
                    await response.write(event(message(method="notifications/message", params=log)))
                self.hanging += 1
                try:
                    await asyncio.sleep(600)
                finally:
                    self.hanging -= 1
            case "bad_cancel":
                for params in (5, None, {}, {"requestId": {}}):
                    await response.write(event(message(method="notifications/cancelled", params=params)))
                await response.write(event(message(method="notifications/cancelled")) + reply)
            case "updated":
                for params in ({"uri": 7}, 5, {}, None):
                    self.say(message(method="notifications/resources/updated", params=params))
                self.say(message(method="notifications/cancelled", params=5))
                self.say(b"nonsense")
                self.say(message(method="notifications/resources/updated", params={"uri": arguments["uri"]}))
                await response.write(reply)
            case "cut_short":
                await response.write(reply[:20])
        return response


@contextlib.asynccontextmanager
async def hostile_http() -> AsyncIterator[tuple[HostileHttp, UrlTarget]]:
    hostile = HostileHttp()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/mcp", hostile.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield hostile, UrlTarget(f"http://127.0.0.1:{runner.addresses[0][1]}/mcp")
    finally:
        await runner.cleanup()
