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
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from megamcp import __version__
from megamcp.dataplane import wire
from megamcp.dataplane.http import Address, Broken, ConnectFailed, Pool, Response, TooMuch, field_lines
from megamcp.dataplane.ports import Limits
from megamcp.dataplane.protocol import (
    CAPABILITIES_KEY,
    CLIENT_KEY,
    DATABASE_HEADER,
    HANDLE_HEADER,
    HANDSHAKE,
    MODERN,
    PROTOCOL_KEY,
    Era,
    Progress,
    ToolCall,
    UpstreamLost,
    header_value,
)
from megamcp.dataplane.sse import SseReader
from megamcp.errors import UpstreamError

log = logging.getLogger(__name__)

_CLIENT = {"name": "megamcp", "version": __version__}
_OWN_META = wire.encode({PROTOCOL_KEY: MODERN, CLIENT_KEY: _CLIENT, CAPABILITIES_KEY: {}})[1:-1]
_PLAIN = b"Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
_MODERN = b"MCP-Protocol-Version: %b\r\n" % MODERN.encode()
_REVISION = re.compile(r"[0-9A-Za-z.-]{1,40}")
_RESUME_ATTEMPTS = 3


@dataclass(slots=True)
class _Session:
    version: str
    id: str | None


class Upstream:
    """A client of one server at one address. Owns its connections; `aclose` ends them."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        limits: Limits,
        socket: str | None = None,
        headers: Mapping[str, str] | None = None,
        era: Era | None = None,
    ) -> None:
        # Below the 5 s after which uvicorn closes an idle connection: a request never races that close.
        self._http = Pool(
            Address.of(url, socket),
            limit=limits.connections_per_server,
            idle_s=4.0,
            connect_s=limits.connect_timeout_s,
        )
        self.name = name
        self._limits = limits
        self._ids = itertools.count(1)
        self._era = era
        self._fixed = era is not None
        self._session: _Session | None = None
        self._negotiating = asyncio.Lock()
        self.instructions: str | None = None
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
    ) -> wire.Reply:
        """Runs one tool call. Raises UpstreamLost, UpstreamError. The caller sets the deadline.

        `handle` and `database` (a DSN) are for servers on our SDK.
        """
        if (era := self._era) is None:
            era = await self.negotiate()
        number = str(next(self._ids)).encode()
        name = wire.encode(call.name)
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
            if call.modern:
                meta = call.meta
            elif len(call.meta) > 2:
                meta = b"{%b,%b" % (_OWN_META, call.meta.lstrip()[1:])
            else:
                meta = b"{%b}" % _OWN_META
            body = (
                b'{"jsonrpc":"2.0","id":%b,"method":"tools/call","params":{"name":%b,"arguments":%b%b,"_meta":%b}}'
                % (number, name, call.arguments, call.more, meta)
            )
            return await self._exchange(body, fields, number, progress, None)
        meta = self._handshake_meta(call, number)
        body = b'{"jsonrpc":"2.0","id":%b,"method":"tools/call","params":{"name":%b,"arguments":%b%b%b}}' % (
            number,
            name,
            call.arguments,
            call.more,
            b',"_meta":' + meta if meta else b"",
        )
        return await self._in_session(body, number, progress, call.progress_token)

    async def request(self, method: str, params: Mapping[str, object]) -> wire.Reply:
        """Any other request, with parameters of ours."""
        era = self._era or await self.negotiate()
        number = str(next(self._ids)).encode()
        if era is Era.MODERN:
            fields = b"%bMcp-Method: %b\r\n" % (self._modern, method.encode())
            params = {**params, "_meta": {PROTOCOL_KEY: MODERN, CLIENT_KEY: _CLIENT, CAPABILITIES_KEY: {}}}
            return await self._exchange(_message(number, method, params), fields, number, None, None)
        return await self._in_session(_message(number, method, params), number, None, None)

    # The handshake era

    def _handshake_meta(self, call: ToolCall, number: bytes) -> bytes:
        if len(call.meta) <= 2:
            return b""
        # All rollouts share the session, so tokens of different clients could be equal: ours is the request's
        # number. What describes a modern client has no meaning here.
        members = {
            key: value
            for key, value in wire.read_members(call.meta, "_meta").items()
            if key not in (PROTOCOL_KEY, CLIENT_KEY, CAPABILITIES_KEY)
        }
        if call.progress_token is not None:
            members["progressToken"] = msgspec.Raw(number)
        return wire.encode(members) if members else b""

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
        body = (
            b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%b,"reason":"left"}}' % number
        )
        with contextlib.suppress(Exception):
            # Shielded from the cancellation that brought us here, and short: the caller is leaving.
            await asyncio.shield(asyncio.ensure_future(self._post_quietly(body, fields)))

    async def _post_quietly(self, body: bytes, fields: bytes) -> None:
        with contextlib.suppress(ConnectFailed, Broken, TimeoutError):
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
        params = {"_meta": {PROTOCOL_KEY: MODERN, CLIENT_KEY: _CLIENT, CAPABILITIES_KEY: {}}}
        try:
            reply = await self._exchange(_message(b"0", "server/discover", params), fields, b"0", None, None)
        except UpstreamLost:
            raise
        except (UpstreamError, _SessionGone):
            return False
        if reply.failed:
            return False
        try:
            found = msgspec.json.decode(reply.body, type=_Discovered)
        except msgspec.DecodeError:
            return False
        self.instructions = found.instructions
        return MODERN in found.supportedVersions

    async def _initialize(self) -> None:
        number = str(next(self._ids)).encode()
        params = {"protocolVersion": HANDSHAKE[0], "capabilities": {}, "clientInfo": _CLIENT}
        session = _Session(HANDSHAKE[0], None)
        try:
            reply = await self._exchange(
                _message(number, "initialize", params), self._plain, number, None, None, session
            )
        except _SessionGone:
            reply = None
        if reply is None or reply.failed:
            self._era = None
            why = wire.peek_error(reply.body)[1] if reply else "404"
            raise UpstreamError(
                f"Tool server {self.name!r} refuses MCP's handshake: {why}", code="tool_server_protocol"
            )
        try:
            found = msgspec.json.decode(reply.body, type=_Initialized)
        except msgspec.DecodeError as error:
            raise UpstreamError(
                f"Tool server {self.name!r} answers the handshake with nonsense: {error}",
                code="tool_server_protocol",
            ) from None
        if not _REVISION.fullmatch(found.protocolVersion):
            raise UpstreamError(
                f"Tool server {self.name!r} speaks no known revision of MCP.", code="tool_server_protocol"
            )
        self.instructions = found.instructions
        session.version = found.protocolVersion
        await self._post_quietly(
            b'{"jsonrpc":"2.0","method":"notifications/initialized"}', self._session_fields(session)
        )
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
        reply = _reply_in(envelope, number)
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
        try:
            wire.check_text(body, 10 * self._limits.depth)
            return wire.read_envelope(body)
        except wire.RpcFailure as error:
            raise UpstreamError(
                f"Tool server {self.name!r} sent something that is not JSON-RPC: {error.message}",
                code="tool_server_protocol",
            ) from None

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
                        if (reply := _reply_in(envelope, number)) is not None:
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
            if progress is not None:
                if token is not None:
                    try:
                        params = wire.read_members(envelope.params, "params")
                    except wire.RpcFailure:
                        return
                    params["progressToken"] = msgspec.Raw(token)
                    body = wire.encode(params)
                    data = b'{"jsonrpc":"2.0","method":"notifications/progress","params":%b}' % body
                await progress(data)
        elif envelope.method == "notifications/tools/list_changed":
            if self.on_list_changed is not None:
                self.on_list_changed()
        elif envelope.method is not None and envelope.id is not wire.ABSENT:
            # A request to the client (sampling, elicitation, roots): none is declared, so it is refused.
            number = bytes(envelope.id)
            body = (
                wire.result_message(number, b"{}")
                if envelope.method == "ping"
                else wire.error_message(number, b'{"code":-32601,"message":"No such capability is declared."}')
            )
            await self._post_quietly(body, fields)


class _SessionGone(Exception):
    """HTTP 404: the server does not know the session (any more)."""


class _Discovered(msgspec.Struct):
    supportedVersions: list[str]
    instructions: str | None = None


class _Initialized(msgspec.Struct):
    protocolVersion: str
    instructions: str | None = None


def _message(number: bytes, method: str, params: Mapping[str, object]) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"method":%b,"params":%b}' % (
        number,
        wire.encode(method),
        wire.encode(params),
    )


def _reply_in(envelope: wire.Envelope, number: bytes) -> wire.Reply | None:
    if envelope.method is not None or envelope.id is wire.ABSENT or bytes(envelope.id) != number:
        return None
    if envelope.result is not wire.ABSENT and (result := bytes(envelope.result))[0] == 0x7B:
        return wire.Reply(result)
    if envelope.error is not wire.ABSENT:
        return wire.Reply(bytes(envelope.error), failed=True)
    return None
