"""One tool server as the gateway's client sees it: MCP over streamable HTTP, in the era the server speaks.

Our own servers speak 2026-07-28 and need no negotiation. Others are asked (`server/discover`, else
`initialize`); a handshake-era session is shared by every rollout, which is what "passed through" means for a
stateless server. Leaving a request (its task is cancelled) drops its connection, which is the cancellation of
the modern era, and sends `notifications/cancelled` to servers of the older one. The module retries only what
can't have run.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megamcp.dataplane import messages, wire
from megamcp.dataplane.authorized import Authorized, Requests
from megamcp.dataplane.http import Address, Broken, ConnectFailed, Pool, Response, TooMuch, field_lines
from megamcp.dataplane.ports import Authority, Limits
from megamcp.dataplane.protocol import (
    DATABASE_HEADER,
    HANDLE_HEADER,
    HANDSHAKE,
    MODERN,
    Era,
    Progress,
    ToolCall,
    UpstreamLost,
    header_value,
)
from megamcp.dataplane.sse import SseReader
from megamcp.errors import MegaMCPError, UpstreamError

_PLAIN = b"Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
_MODERN = b"MCP-Protocol-Version: %b\r\n" % MODERN.encode()
_RESUME_ATTEMPTS = 3


@dataclass(slots=True)
class _Session:
    version: str
    id: str | None


class HttpUpstream:
    """A client of one server at one address. Owns its connections; `aclose` ends them."""

    sandbox: str | None = None

    def __init__(
        self,
        name: str,
        url: str,
        *,
        limits: Limits,
        socket: str | None = None,
        headers: Mapping[str, str] | None = None,
        era: Era | None = None,
        authority: Authority | None = None,
    ) -> None:
        # Below the 5 s after which uvicorn closes an idle connection: a request never races that close.
        pool = Pool(
            Address.of(url, socket),
            limit=limits.connections_per_server,
            idle_s=4.0,
            connect_s=limits.connect_timeout_s,
        )
        self._http: Requests = pool if authority is None else Authorized(pool, authority)
        self.name = name
        self._limits = limits
        self._ids = itertools.count(1)
        self._era = era
        self._fixed = era is not None
        self._session: _Session | None = None
        self._negotiating = asyncio.Lock()
        self._instructions: str | None = None
        self.on_list_changed: Callable[[], None] | None = None
        self._plain = field_lines(headers or {}) + _PLAIN
        self._modern = self._plain + _MODERN

    async def aclose(self) -> None:
        await self._http.aclose()

    async def call(
        self,
        call: ToolCall,
        *,
        handle: str | None = None,
        database: str | None = None,
        progress: Progress | None = None,
        deadline: float | None = None,
    ) -> wire.Reply:
        """Runs one tool call. Raises UpstreamLost, UpstreamError. The caller sets the deadline; leaving takes no time.

        `handle` and `database` (a DSN) are for servers on our SDK.
        """
        if (era := self._era) is None:
            era = await self.negotiate()
        number = str(next(self._ids)).encode()
        if era is Era.MODERN:
            fields = b"%bMcp-Method: tools/call\r\nMcp-Name: %b\r\n" % (
                self._modern,
                header_value(call.name).encode(),
            )
            if handle is not None:
                fields += b"%b: %b\r\n" % (HANDLE_HEADER, handle.encode("ascii"))
            if database is not None:
                fields += b"%b: %b\r\n" % (DATABASE_HEADER, database.encode("ascii"))
            if call.headers:
                fields += field_lines(dict(call.headers))
            body = messages.tool_call(number, call, messages.modern_meta(call))
            return await self._exchange(body, fields, number, progress, None)
        body = messages.tool_call(number, call, messages.shared_meta(call, number, modern=False))
        return await self._in_session(body, number, progress, call.progress_token)

    async def request(self, method: str, params: Mapping[str, object]) -> wire.Reply:
        """Any other request, with parameters of ours."""
        era = self._era or await self.negotiate()
        number = str(next(self._ids)).encode()
        if era is Era.MODERN:
            fields = b"%bMcp-Method: %b\r\n" % (self._modern, method.encode())
            body = messages.request(number, method, {**params, "_meta": messages.OWN_META})
            return await self._exchange(body, fields, number, None, None)
        return await self._in_session(messages.request(number, method, params), number, None, None)

    async def instructions(self) -> str | None:
        """What the server says about its use. Raises UpstreamLost, UpstreamError."""
        if self._fixed:
            found = messages.read_discovered(await self.request("server/discover", {}))
            return found.instructions if found else None
        await self.negotiate()
        return self._instructions

    # The handshake era

    async def _in_session(
        self, body: bytes, number: bytes, progress: Progress | None, token: bytes | None
    ) -> wire.Reply:
        for attempt in (1, 2):
            if self._session is None:
                await self.negotiate()
            session = self._session
            assert session is not None
            fields = self._session_fields(session)
            try:
                return await self._exchange(body, fields, number, progress, token, session)
            except _SessionGone:
                # 404 for a session id means that it expired; the request did not run.
                if self._session is session:
                    self._session = None
                if attempt == 2:
                    raise UpstreamError(
                        f"Tool server {self.name!r} forgets its sessions at once.",
                        code="tool_server_protocol",
                    ) from None
            except asyncio.CancelledError:
                await self._say_cancelled(fields, number)
                raise
        raise AssertionError("unreachable")

    def _session_fields(self, session: _Session) -> bytes:
        fields = b"%bMCP-Protocol-Version: %b\r\n" % (self._plain, session.version.encode())
        if session.id is not None:
            fields += b"Mcp-Session-Id: %b\r\n" % session.id.encode("latin-1")
        return fields

    async def _say_cancelled(self, fields: bytes, number: bytes) -> None:
        with contextlib.suppress(Exception):
            # Shielded from the cancellation that brought us here, and short: the caller is leaving.
            await asyncio.shield(asyncio.ensure_future(self._post_quietly(messages.cancelled(number), fields)))

    async def _post_quietly(self, body: bytes, fields: bytes) -> None:
        # Also where it lacks authorization: what is sent beside a call says nothing of whether that ran.
        with contextlib.suppress(ConnectFailed, Broken, TimeoutError, MegaMCPError):
            async with asyncio.timeout(self._limits.grace_s):
                (await self._http.request(b"POST", fields, body)).close()

    async def negotiate(self) -> Era:
        """Finds out the server's era, and opens the session that the older one needs."""
        async with self._negotiating:
            if self._era is Era.MODERN or (self._era is Era.HANDSHAKE and self._session is not None):
                return self._era
            if self._era is None and await self._discover():
                self._era = Era.MODERN
                return Era.MODERN
            await self._initialize()
            self._era = Era.HANDSHAKE
            return Era.HANDSHAKE

    async def _discover(self) -> bool:
        fields = self._modern + b"Mcp-Method: server/discover\r\n"
        body = messages.request(b"0", "server/discover", messages.DISCOVER_PARAMS)
        try:
            reply = await self._exchange(body, fields, b"0", None, None)
        except UpstreamLost:
            raise
        except (UpstreamError, _SessionGone):
            return False
        found = messages.read_discovered(reply)
        if found is not None:
            self._instructions = found.instructions
        return found is not None

    async def _initialize(self) -> None:
        number = str(next(self._ids)).encode()
        body = messages.request(number, "initialize", messages.INITIALIZE_PARAMS)
        session = _Session(HANDSHAKE[0], None)
        try:
            reply = await self._exchange(body, self._plain, number, None, None, session)
        except _SessionGone:
            reply = None
        if reply is None or reply.failed:
            self._era = None
        found = messages.read_initialized(self.name, reply)
        self._instructions = found.instructions
        session.version = found.protocolVersion
        await self._post_quietly(messages.INITIALIZED, self._session_fields(session))
        self._session = session

    # One POST

    async def _exchange(
        self,
        body: bytes,
        fields: bytes,
        number: bytes,
        progress: Progress | None,
        token: bytes | None,
        session: _Session | None = None,
    ) -> wire.Reply:
        """One request and its reply. A `session` without an id takes the one that the server gives it."""
        response: Response | None = None
        try:
            response = await self._http.request(b"POST", fields, body)
            in_session = session is not None and session.id is not None
            if session is not None and session.id is None:
                session.id = response.field(b"mcp-session-id")
            kind = response.field(b"content-type") or ""
            if kind.startswith("application/json"):
                text = await response.read(self._limits.response_bytes)
                reply = self._read_reply(text, number, response.status, in_session)
            elif response.status == 404 and in_session:
                raise _SessionGone
            elif response.status == 200 and kind.startswith("text/event-stream"):
                reply = await self._read_stream(response, fields, number, progress, token)
            else:
                raise UpstreamError(
                    f"Tool server {self.name!r} answered HTTP {response.status} ({kind or 'untyped'}).",
                    code="tool_server_protocol",
                )
        except ConnectFailed as error:
            raise UpstreamLost(
                f"Tool server {self.name!r} can't be reached: {error}", sent=False, code="tool_server_unreachable"
            ) from None
        except (Broken, ValueError) as error:
            if not self._fixed:
                # Whatever comes back at that address may be another server: ask it again.
                self._era = self._session = None
            raise UpstreamLost(f"Tool server {self.name!r} broke off during a call: {error}", sent=True) from None
        except TooMuch:
            raise UpstreamError(
                f"Tool server {self.name!r} sent more than {self._limits.response_bytes} bytes for one call.",
                code="result_too_large",
            ) from None
        finally:
            # An incomplete response (we were cancelled, or refuse it) closes the connection; the server sees that.
            if response is not None:
                response.release()
        return reply

    def _read_reply(self, body: bytes, number: bytes, status: int, in_session: bool) -> wire.Reply:
        envelope = self._parse(body)
        reply = messages.reply_in(envelope, number)
        if reply is None:
            if envelope.error is not wire.ABSENT:  # `id: null`: refused before the id was read
                return wire.Reply(bytes(envelope.error), failed=True)
            raise UpstreamError(
                f"Tool server {self.name!r} answered HTTP {status} with something that is no response.",
                code="tool_server_protocol",
            )
        if in_session and reply.failed and wire.peek_error(reply.body)[0] != wire.METHOD_NOT_FOUND:
            raise _SessionGone
        return reply

    def _parse(self, body: bytes) -> wire.Envelope:
        return messages.read(self.name, body, 10 * self._limits.depth)

    async def _read_stream(
        self,
        response: Response,
        fields: bytes,
        number: bytes,
        progress: Progress | None,
        token: bytes | None,
    ) -> wire.Reply:
        """Reads events until the response; what belongs to the request goes to `progress`."""
        reader = SseReader(self._limits.response_bytes)
        current = response
        try:
            for _ in range(_RESUME_ATTEMPTS):
                while (chunk := await current.next_chunk()) is not None:
                    for data in reader.feed(chunk):
                        envelope = self._parse(data)
                        if (reply := messages.reply_in(envelope, number)) is not None:
                            return reply
                        await self._aside(envelope, data, fields, progress, token)
                if reader.last_id is None or self._era is Era.MODERN:
                    break
                # 2025-11-25 lets a server close the stream and be polled: go on after the last event seen.
                current.release()
                await asyncio.sleep(min((reader.retry_ms or 1000) / 1000, 30.0))
                resumed = fields + b"Last-Event-ID: %b\r\n" % reader.last_id.encode("ascii", "ignore")
                current = await self._http.request(b"GET", resumed, b"")
                if current.status != 200:
                    break
        finally:
            if current is not response:
                current.release()
        raise UpstreamLost(f"Tool server {self.name!r} ended the stream without a response.", sent=True)

    async def _aside(
        self,
        envelope: wire.Envelope,
        data: bytes,
        fields: bytes,
        progress: Progress | None,
        token: bytes | None,
    ) -> None:
        if envelope.method == "notifications/progress":
            text = data if token is None else messages.progress_for(envelope.params, token)
            if progress is not None and text is not None:
                await progress(text)
        elif envelope.method == "notifications/tools/list_changed":
            if self.on_list_changed is not None:
                self.on_list_changed()
        elif envelope.method is not None and envelope.id is not wire.ABSENT:
            await self._post_quietly(messages.answer_to(envelope), fields)


class _SessionGone(Exception):
    """HTTP 404: the server does not know the session (any more)."""
