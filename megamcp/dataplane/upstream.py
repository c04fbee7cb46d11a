"""One tool server as the gateway's client sees it: MCP over streamable HTTP, in the era the server speaks.

Our own servers speak 2026-07-28 and need no negotiation. Others are asked (`server/discover`, else
`initialize`); a handshake-era session is shared by every rollout, which is what "passed through" means for a
stateless server. Leaving a request (its task is cancelled) drops its connection, which is the cancellation of
the modern era, and sends `notifications/cancelled` to servers of the older one. The module retries only what
can't have run.
"""

import asyncio
import contextlib
import io
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp
import msgspec
from multidict import CIMultiDict

from megamcp import __version__
from megamcp.dataplane import wire
from megamcp.dataplane.ports import Limits
from megamcp.dataplane.protocol import (
    CAPABILITIES_KEY,
    CLIENT_KEY,
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
_RESUME_ATTEMPTS = 3
_WRITE_AT_ONCE = 1 << 20


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
        connector: aiohttp.BaseConnector = (
            aiohttp.UnixConnector(socket, limit=limits.connections_per_server, keepalive_timeout=4.0)
            if socket
            else aiohttp.TCPConnector(limit=limits.connections_per_server, keepalive_timeout=4.0)
        )
        # Below the 5 s after which uvicorn closes an idle connection: a request never races that close.
        self._http = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_s),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            auto_decompress=False,
        )
        self.name = name
        self._url = url
        self._limits = limits
        self._ids = itertools.count(1)
        self._era = era
        self._fixed = era is not None
        self._session: _Session | None = None
        self._negotiating = asyncio.Lock()
        self.instructions: str | None = None
        self.on_list_changed: Callable[[], None] | None = None
        self._plain: CIMultiDict[str] = CIMultiDict(
            {
                **(headers or {}),
                "Content-Type": "application/json",
                "Accept": "application/json, text/event-stream",
            }
        )
        self._modern: CIMultiDict[str] = self._plain.copy()
        self._modern["MCP-Protocol-Version"] = MODERN

    async def aclose(self) -> None:
        await self._http.close()

    async def call(self, call: ToolCall, *, handle: str | None = None, progress: Progress | None = None) -> wire.Reply:
        """Runs one tool call. Raises UpstreamLost, UpstreamError. The caller sets the deadline."""
        if (era := self._era) is None:
            era = await self.negotiate()
        number = str(next(self._ids)).encode()
        name = wire.encode(call.name)
        if era is Era.MODERN:
            headers = self._modern.copy()
            headers["Mcp-Method"] = "tools/call"
            headers["Mcp-Name"] = header_value(call.name)
            for key, value in call.headers:
                headers[key] = value
            if handle is not None:
                headers[HANDLE_HEADER] = handle
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
            return await self._exchange(body, headers, number, progress, None)
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
            headers = self._modern.copy()
            headers["Mcp-Method"] = method
            params = {**params, "_meta": {PROTOCOL_KEY: MODERN, CLIENT_KEY: _CLIENT, CAPABILITIES_KEY: {}}}
            return await self._exchange(_message(number, method, params), headers, number, None, None)
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
            headers = self._session_headers(session)
            try:
                return await self._exchange(body, headers, number, progress, token)
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
                await self._say_cancelled(headers, number)
                raise
        raise AssertionError("unreachable")

    def _session_headers(self, session: _Session) -> CIMultiDict[str]:
        headers = self._plain.copy()
        headers["MCP-Protocol-Version"] = session.version
        if session.id is not None:
            headers["Mcp-Session-Id"] = session.id
        return headers

    async def _say_cancelled(self, headers: CIMultiDict[str], number: bytes) -> None:
        body = (
            b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%b,"reason":"left"}}' % number
        )
        with contextlib.suppress(Exception):
            # Shielded from the cancellation that brought us here, and short: the caller is leaving.
            await asyncio.shield(asyncio.ensure_future(self._post_quietly(body, headers)))

    async def _post_quietly(self, body: bytes, headers: CIMultiDict[str]) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(self._limits.grace_s):
                response = await self._http.post(self._url, data=body, headers=headers, allow_redirects=False)
                response.release()

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
        headers = self._modern.copy()
        headers["Mcp-Method"] = "server/discover"
        params = {"_meta": {PROTOCOL_KEY: MODERN, CLIENT_KEY: _CLIENT, CAPABILITIES_KEY: {}}}
        try:
            reply = await self._exchange(_message(b"0", "server/discover", params), headers, b"0", None, None)
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
        started: list[str | None] = []
        try:
            reply = await self._exchange(
                _message(number, "initialize", params), self._plain.copy(), number, None, None, started
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
        self.instructions = found.instructions
        session = _Session(found.protocolVersion, started[0] if started else None)
        await self._post_quietly(
            b'{"jsonrpc":"2.0","method":"notifications/initialized"}', self._session_headers(session)
        )
        self._session = session

    # One POST

    async def _exchange(
        self,
        body: bytes,
        headers: CIMultiDict[str],
        number: bytes,
        progress: Progress | None,
        token: bytes | None,
        session_id: list[str | None] | None = None,
    ) -> wire.Reply:
        response: aiohttp.ClientResponse | None = None
        try:
            # aiohttp writes large bytes at once, and warns about it; a file object it writes piece by piece.
            data = body if len(body) < _WRITE_AT_ONCE else io.BytesIO(body)
            response = await self._http.post(self._url, data=data, headers=headers, allow_redirects=False)
            if session_id is not None:
                session_id.append(response.headers.get("Mcp-Session-Id"))
            kind = response.headers.get("Content-Type", "")
            if kind.startswith("application/json"):
                in_session = response.status == 404 and "Mcp-Session-Id" in headers
                reply = self._read_reply(await self._read(response), number, response.status, in_session)
                response.release()
            elif response.status == 404 and "Mcp-Session-Id" in headers:
                response.release()
                raise _SessionGone
            elif response.status == 200 and kind.startswith("text/event-stream"):
                reply = await self._read_stream(response, headers, number, progress, token)
                response.release()
            else:
                response.close()
                raise UpstreamError(
                    f"Tool server {self.name!r} answered HTTP {response.status} ({kind or 'untyped'}).",
                    code="tool_server_protocol",
                )
        except aiohttp.ClientConnectorError as error:
            raise UpstreamLost(
                f"Tool server {self.name!r} can't be reached: {error.strerror or error}",
                sent=False,
                code="tool_server_unreachable",
            ) from None
        except aiohttp.ConnectionTimeoutError:
            raise UpstreamLost(
                f"Tool server {self.name!r} accepted no connection in {self._limits.connect_timeout_s:g} s.",
                sent=False,
                code="tool_server_unreachable",
            ) from None
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            if response is not None:
                response.close()
            if not self._fixed:
                # Whatever comes back at that address may be another server: ask it again.
                self._era = self._session = None
            raise UpstreamLost(
                f"Tool server {self.name!r} broke off during a call: {error or type(error).__name__}",
                sent=True,
            ) from None
        except BaseException:
            # Cancelled or refused: closing the connection is what tells the server to stop.
            if response is not None:
                response.close()
            raise
        return reply

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        length = response.content_length
        limit = self._limits.response_bytes
        if length is not None and length <= limit:
            return await response.read()
        chunks: list[bytes] = []
        size = 0
        if length is None:
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if size > limit:
                    break
                chunks.append(chunk)
            else:
                return b"".join(chunks)
        raise UpstreamError(
            f"Tool server {self.name!r} sent more than {limit} bytes for one call.", code="result_too_large"
        )

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
        response: aiohttp.ClientResponse,
        headers: CIMultiDict[str],
        number: bytes,
        progress: Progress | None,
        token: bytes | None,
    ) -> wire.Reply:
        """Reads events until the response; what belongs to the request goes to `progress`."""
        reader = SseReader(self._limits.response_bytes)
        for attempt in range(_RESUME_ATTEMPTS):
            async for chunk in response.content.iter_any():
                for data in reader.feed(chunk):
                    envelope = self._parse(data)
                    if (reply := _reply_in(envelope, number)) is not None:
                        return reply
                    await self._aside(envelope, data, headers, progress, token)
            if reader.last_id is None or self._era is Era.MODERN or attempt == _RESUME_ATTEMPTS - 1:
                break
            # 2025-11-25 lets a server close the stream and be polled: go on after the last event seen.
            response.release()
            await asyncio.sleep(min((reader.retry_ms or 1000) / 1000, 30.0))
            resumed = headers.copy()
            resumed["Last-Event-ID"] = reader.last_id
            resumed.pop("Content-Type", None)
            response = await self._http.get(self._url, headers=resumed, allow_redirects=False)
            if response.status != 200:
                break
        response.close()
        raise UpstreamLost(f"Tool server {self.name!r} ended the stream without a response.", sent=True)

    async def _aside(
        self,
        envelope: wire.Envelope,
        data: bytes,
        headers: CIMultiDict[str],
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
            await self._post_quietly(body, headers)


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
