"""MCP over streamable HTTP for one tool server, as a raw ASGI application.

Why not the `mcp` SDK's server: it decodes a result into objects and encodes it again, while a recorded result has to
leave as the bytes that were recorded; its JSON mode doesn't notice a client that hangs up, which is how the gateway
cancels a call; and a call costs it 0.46 ms of CPU (JSON mode; 0.64 ms with events) where this module takes 0.11 ms,
uvicorn included (mcp 2.3, two cores, sequential calls of a tool that returns a word).

Served, without any session: `initialize`, `ping`, `server/discover`, `tools/list`, `tools/call`, and
notifications (acknowledged, without effect), in the handshake era (to 2025-11-25) and the stateless one
(2026-07-28). A response is JSON, or server-sent events from the first progress on. A client that disconnects
cancels its call.

Not served: resources, prompts, sampling, elicitation, `notifications/cancelled` (request ids of a shared
server's clients collide, so an id names no call).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import datetime
from typing import Any

import msgspec

from megamcp.sdk import rpc
from megamcp.sdk.calls import Call, run_recorded
from megamcp.sdk.database import Database, Lease
from megamcp.sdk.documents import Documents, Run
from megamcp.sdk.inject import Clock, Context, Random
from megamcp.sdk.own import OwnDatabases
from megamcp.sdk.results import CallRefused, Outcome
from megamcp.sdk.rpc import Headers, Request, RpcError
from megamcp.sdk.server import Server, Tool
from megamcp.sdk.signature import Injected

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY = 128 * 1024 * 1024
"""More than a gateway takes of an agent, unless it was told to: the limit that is met is the gateway's."""
_JSON = (b"content-type", b"application/json")
_EVENTS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache, no-transform")]


class Disconnected(Exception):
    """The client hung up: nobody waits for an answer."""


class ToolApp:
    """The ASGI application of one server. With a `dsn`, calls that carry a state handle are recorded.

    `alone`: no gateway's, so that a plain class may keep its state in this process.
    """

    def __init__(self, server: Server, *, dsn: str | None = None, pool_size: int = 8, alone: bool = False) -> None:
        self.server = server
        self._documents = Documents(server.kept) if server.kept else None
        self._alone = alone and dsn is None
        self._database = Database(dsn, pool_size) if dsn else None
        self._owned = OwnDatabases()
        self._static = rpc.StaticAnswers(server)
        self._running = 0

    async def aclose(self) -> None:
        if self._documents is not None:
            self._documents.close()
        await self._owned.aclose()
        if self._database is not None:
            await self._database.aclose()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        match scope["path"], scope["method"]:
            case (("/mcp" | "/mcp/"), "POST"):
                await self._post(Headers(scope["headers"]), receive, send)
            case (("/mcp" | "/mcp/"), _):
                await _answer(send, 405, b"", [(b"allow", b"POST")])
            case "/healthz", ("GET" | "HEAD"):
                health = {"status": "ok", "server": self.server.name, "tools": len(self.server.tools)}
                await _answer(send, 200, msgspec.json.encode({**health, "running": self._running}))
            case _:
                await _answer(send, 404, b'{"error":"not found: MCP is at /mcp"}')

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            if (await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _post(self, headers: Headers, receive: Receive, send: Send) -> None:
        stream = _Stream(send, wants_events=headers.accepts_events())
        request_id = b"null"
        try:
            if not headers.acceptable():
                raise RpcError(rpc.INVALID_REQUEST, "Accept must allow application/json", status=406)
            request = rpc.parse(await _read(receive))
            if request.id is None:
                await _answer(send, 202, b"")
                return
            request_id = request.id
            request.check_envelope(headers)
            stream.modern = request.modern
            await self._dispatch(request, headers, receive, stream)
        except Disconnected:
            log.debug("client hung up")
        except RpcError as error:
            await stream.error(request_id, error)
        except CallRefused as error:
            await stream.error(request_id, RpcError(error.rpc, str(error), error.data, status=200))
        except Exception:
            log.exception("request failed")
            code = {"code": "internal"}
            await stream.error(request_id, RpcError(rpc.INTERNAL_ERROR, "Internal error of the tool server.", code))

    async def _dispatch(self, request: Request, headers: Headers, receive: Receive, stream: "_Stream") -> None:
        assert request.id is not None
        if request.method == rpc.CHECK_DOCUMENT and self._documents is not None and not self._alone:
            if why := await self._documents.fault_of(request.document()):
                raise RpcError(rpc.INVALID_PARAMS, why, {"code": "invalid_document"})
            await stream.result(request.id, self._static.done(request))
            return
        if request.method != "tools/call":
            await stream.result(request.id, self._static.answer(request))
            return
        call = request.tool_call()
        tool = self.server.tools.get(call.name)
        if tool is None:
            raise RpcError(rpc.INVALID_PARAMS, f"Unknown tool: {call.name}", {"code": "unknown_tool"})
        report = stream.progress(call.progress_token) if call.progress_token and stream.wants_events else None
        self._running += 1
        try:
            outcome = await _until_disconnect(
                receive, self._call(tool, call.arguments, headers, Context(tool.name, report))
            )
        finally:
            self._running -= 1
        await stream.result(request.id, outcome.result)

    async def _call(self, tool: Tool, raw: bytes, headers: Headers, context: Context) -> Outcome:
        parsed = tool.parse(raw)
        handle = headers.handle
        database = self._owned.of(headers.database) if headers.database and not self._documents else self._database
        if database is None or handle is None:
            return await self._unrecorded(tool, parsed, context, "state handle" if database else "database")

        async def body(lease: Lease, clock: Clock, random: Random) -> Outcome:
            if isinstance(parsed, Outcome):
                return parsed
            if self._documents is None:
                return await tool.run(parsed, lease=lease, clock=clock, random=random, context=context)
            run = _on_object(tool, parsed, context)
            return await self._documents.call(database, lease, handle, tool.read_only, run)

        # A document's clock stands where the environment's does; others are moved, so they have to be asked.
        reads_clock = Injected.CLOCK in tool.signature.injected.values() and self._documents is None
        call = Call(handle, tool.name, raw.decode(), tool.read_only, reads_clock)
        return await run_recorded(database, call, body)

    async def _unrecorded(
        self, tool: Tool, parsed: dict[str, Any] | Outcome, context: Context, missing: str
    ) -> Outcome:
        if tool.needs_state or (self._documents and not self._alone):
            what = f"Tool {tool.name} works on a rollout's state, but this call has no {missing}."
            where = " Its environment has to say that its state is of kind document." if self._documents else ""
            raise CallRefused("no_state", what + where, rpc=-32001)
        if isinstance(parsed, Outcome):
            return parsed
        if self._documents:
            return await self._documents.alone(tool.read_only, _on_object(tool, parsed, context))
        return await tool.run(parsed, lease=None, clock=Clock(), random=Random(), context=context)


def _on_object(tool: Tool, arguments: dict[str, Any], context: Context) -> Run:
    """A call of a method."""

    async def run(instance: Any, now: datetime | None) -> Outcome:
        return await tool.run(
            arguments, lease=None, clock=Clock(now), random=Random(), context=context, instance=instance
        )

    return run


class _Stream:
    """One response: JSON if nothing was sent before it, else the last event of a stream."""

    def __init__(self, send: Send, *, wants_events: bool) -> None:
        self._send = send
        self._events = False
        self._lock = asyncio.Lock()
        self.wants_events = wants_events
        self.modern = False

    def progress(self, token: bytes) -> Callable[[float, float | None, str | None], Awaitable[None]]:
        async def report(progress: float, total: float | None, message: str | None) -> None:
            params: dict[str, Any] = {"progressToken": msgspec.Raw(token), "progress": progress}
            if total is not None:
                params["total"] = total
            if message is not None:
                params["message"] = message
            note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": params}
            async with self._lock:  # a tool may report from several tasks; the head goes first and once
                if not self._events:
                    await self._send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                    self._events = True
                await self._event(msgspec.json.encode(note), more=True)

        return report

    async def result(self, request_id: bytes, result: bytes) -> None:
        await self._last(200, b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (request_id, result))

    async def error(self, request_id: bytes, error: RpcError) -> None:
        await self._last(error.http_status(self.modern), error.body(request_id))

    async def _last(self, status: int, body: bytes) -> None:
        if self._events:
            await self._event(body, more=False)
        else:
            await _answer(self._send, status, body)

    async def _event(self, data: bytes, *, more: bool) -> None:
        frame = b"event: message\r\ndata: %b\r\n\r\n" % data
        await self._send({"type": "http.response.body", "body": frame, "more_body": more})


async def _until_disconnect(receive: Receive, call: Awaitable[Outcome]) -> Outcome:
    """Awaits `call` in this task and cancels it when the client hangs up. Raises Disconnected."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    def on_message(watch: "asyncio.Future[Message]") -> None:
        nonlocal left
        if not watch.cancelled() and watch.exception() is None and watch.result()["type"] == "http.disconnect":
            left = True
            task.cancel()

    watch = asyncio.ensure_future(receive())
    watch.add_done_callback(on_message)
    try:
        return await call
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise Disconnected from None
        raise
    finally:
        watch.remove_done_callback(on_message)
        watch.cancel()


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        parts.append(bytes(message.get("body", b"")))
        size += len(parts[-1])
        if size > MAX_BODY:
            raise RpcError(rpc.INVALID_REQUEST, f"The body is larger than {MAX_BODY} bytes", {"code": "too_large"}, 413)
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    lines = [(b"content-length", b"%d" % len(body)), *(headers or []), *([_JSON] if body else [])]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
