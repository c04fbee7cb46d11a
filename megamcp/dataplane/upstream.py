"""One tool server as the gateway's client sees it: MCP over streamable HTTP, in the era the server speaks.

Our own servers speak 2026-07-28 and need no negotiation. Others are asked (`server/discover`, else `initialize`). At
a server that keeps sessions, each client's session has one of its own there, opened when it is first needed with what
that client can do; one that gives out no session ids is shared. Leaving a request (its task is cancelled) drops its
connection, which is the cancellation of the modern era, and sends `notifications/cancelled` to servers of the older
one. The module retries only what can't have run.
"""

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from megamcp.dataplane import messages, wire
from megamcp.dataplane.authorized import Authorized, Requests
from megamcp.dataplane.circuit import Circuit
from megamcp.dataplane.ear import Ear
from megamcp.dataplane.exchange import Exchanger, Post, SessionGone
from megamcp.dataplane.http import Address, Broken, ConnectFailed, Pool, field_lines
from megamcp.dataplane.ports import Authority, Limits
from megamcp.dataplane.protocol import (
    DATABASE_HEADER,
    HANDLE_HEADER,
    MODERN,
    About,
    Client,
    Era,
    Sink,
    Through,
    ToolCall,
    UpstreamLost,
    header_value,
)
from megamcp.errors import MegaMCPError, UpstreamError

_PLAIN = b"Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
_MODERN = b"MCP-Protocol-Version: %b\r\n" % MODERN.encode()
_NAMED = {"prompts/get": "name", "resources/read": "uri", "tasks/get": "taskId", "tasks/cancel": "taskId"}
NOBODY = ""
"""Session of a client that is nobody in particular."""
_LISTEN_RETRIES = 5


@dataclass(slots=True, eq=False)
class _Session:
    """A session at a server of the handshake era; an `id` of None is one that the server keeps nothing of."""

    version: str
    id: str | None
    used: float = 0.0
    level: str | None = None
    ear: Ear | None = None


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
        # Streams that stay open don't take the places of calls.
        ears = Pool(Address.of(url, socket), limit=1 << 30, idle_s=4.0, connect_s=limits.connect_timeout_s)
        self.circuit = Circuit(pool)
        self._http: Requests = self.circuit if authority is None else Authorized(self.circuit, authority)
        self._ears: Requests = ears if authority is None else Authorized(ears, authority)
        self.name = name
        self._limits = limits
        self._exchanger = Exchanger(name, self._http, limits)
        self._hearing = Exchanger(name, self._ears, limits)
        self._ids = itertools.count(1)
        self._era = era
        self._fixed = era is not None
        self._about: About | None = None
        self._shared: _Session | None = None
        """The session of nobody in particular, and of all where the server keeps none."""
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # least recently used first
        self._opening: dict[str, asyncio.Task[_Session]] = {}
        self._negotiating = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._plain = field_lines(headers or {}) + _PLAIN
        self._modern = self._plain + _MODERN

    @property
    def on_list_changed(self) -> Callable[[], None] | None:
        return self._exchanger.on_list_changed

    @on_list_changed.setter
    def on_list_changed(self, told: Callable[[], None]) -> None:
        self._exchanger.on_list_changed = self._hearing.on_list_changed = told

    @property
    def modern(self) -> bool:
        return self._era is Era.MODERN

    async def aclose(self) -> None:
        for task in (*self._opening.values(), *self._leaving):
            task.cancel()
        for session in self._sessions.values():
            if session.ear is not None:
                session.ear.close()
        await self._http.aclose()
        await self._ears.aclose()

    async def call(
        self,
        call: ToolCall,
        *,
        handle: str | None = None,
        database: str | None = None,
        client: Client | None = None,
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
            body = messages.tool_call(number, call, messages.modern_meta(call, client))
            return await self._exchange(Post(number, fields, client=client), body)
        body = messages.tool_call(number, call, messages.shared_meta(call, number, modern=False))
        return await self._in_session(body, number, client, call.progress_token)

    async def request(self, method: str, params: Mapping[str, object], client: Client | None = None) -> wire.Reply:
        """Any other request. Raises UpstreamLost, UpstreamError."""
        era = self._era or await self.negotiate()
        number = str(next(self._ids)).encode()
        if era is Era.MODERN:
            fields = b"%bMcp-Method: %b\r\n" % (self._modern, method.encode())
            if (key := _NAMED.get(method)) is not None and key in params:
                fields += b"Mcp-Name: %b\r\n" % header_value(_text(params[key], key)).encode()
            body = messages.request(number, method, messages.for_modern(params, client))
            return await self._exchange(Post(number, fields, client=client), body)
        token = messages.token_of(params)
        told = messages.for_shared(params, number, modern=False)
        reply = await self._in_session(messages.request(number, method, told), number, client, token)
        if method == "logging/setLevel" and client is not None and (session := self._sessions.get(client.session)):
            session.level = _text(params.get("level", ""), "level")
        return reply

    async def about(self) -> About:
        """What the server says about itself. Raises UpstreamLost, UpstreamError."""
        if self._fixed:
            found = messages.read_discovered(await self.request("server/discover", {}))
            return found.about if found else About()
        await self.negotiate()
        return self._about or About()

    async def tell(self, method: str, client: Client) -> None:
        """A notification of a client to its session at a server of the handshake era, if it has one there."""
        if self._era is Era.HANDSHAKE and (session := self._known(client)) is not None:
            body = messages.notification(method, {})
            await self._exchanger.quietly(body, self._session_fields(session))

    @property
    def sessionless(self) -> bool:
        """Whether all clients are one to the server, as far as is known."""
        return self._era is Era.MODERN or (self._shared is not None and self._shared.id is None)

    @property
    def sessions(self) -> int:
        """Sessions of clients that the server keeps."""
        return len(self._sessions)

    def keeps(self, session: str) -> bool:
        """Whether the server has a session of this name."""
        return session in self._sessions

    async def end(self, session: str) -> None:
        """A client's session is over."""
        if (ended := self._sessions.pop(session, None)) is not None:
            await self._delete(ended)

    # The handshake era

    async def _in_session(self, body: bytes, number: bytes, client: Client | None, token: bytes | None) -> wire.Reply:
        for attempt in (1, 2):
            session = await self._session(client)
            fields = self._session_fields(session)
            if client is not None and client.level is not None and client.level != session.level:
                await self._set_level(session, client.level, fields)
            post = Post(number, fields, client=client, token=token, session_id=session.id, resumable=True)
            try:
                if client is None or session.ear is None or client.capabilities == b"{}":
                    return await self._exchange(post, body)
                await session.ear.open()
                with session.ear.calling(client):
                    return await self._exchange(post, body)
            except SessionGone:
                # 404 for a session id means that it expired; the request did not run.
                self._forget(session)
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
            telling = self._exchanger.quietly(messages.cancelled(number), fields)
            await asyncio.shield(asyncio.ensure_future(telling))

    def _known(self, client: Client) -> _Session | None:
        return self._sessions.get(client.session) or (self._shared if self._shared and not self._shared.id else None)

    async def _session(self, client: Client | None) -> _Session:
        """The client's session, opened where it has none."""
        if self._shared is None:
            await self.negotiate()
        shared = self._shared
        assert shared is not None
        if client is None or client.session == NOBODY or shared.id is None:
            return shared
        known = self._sessions.get(client.session)
        if known is None:
            opening = self._opening.get(client.session)
            if opening is None:
                opening = asyncio.create_task(self._open(client), name=f"session at {self.name}")
                self._opening[client.session] = opening
                opening.add_done_callback(lambda task: self._opened(client.session, task))
            known = await asyncio.shield(opening)
        else:
            self._sessions.move_to_end(client.session)
        known.used = time.monotonic()
        return known

    async def _open(self, client: Client) -> _Session:
        async with asyncio.timeout(self._limits.connect_timeout_s + self._limits.list_timeout_s):
            session, _ = await self._initialize(client.capabilities)
        session.used = time.monotonic()
        if session.id is not None:
            fields = self._session_fields(session)
            session.ear = Ear(self._hearing, client.session, client.capabilities, fields, session.id)
        self._sessions[client.session] = session
        self._make_room()
        return session

    def _opened(self, key: str, task: "asyncio.Task[_Session]") -> None:
        del self._opening[key]
        if not task.cancelled():
            task.exception()  # whoever waited may have left

    def _make_room(self) -> None:
        """Ends what was used least recently: over the bound, or not for long."""
        idle = time.monotonic() - self._limits.session_idle_s
        while self._sessions:
            key, oldest = next(iter(self._sessions.items()))
            if len(self._sessions) <= self._limits.sessions_per_server and oldest.used > idle:
                return
            del self._sessions[key]
            task = asyncio.create_task(self._delete(oldest))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _delete(self, session: _Session) -> None:
        if session.ear is not None:
            session.ear.close()
        with contextlib.suppress(ConnectFailed, Broken, TimeoutError, MegaMCPError):
            async with asyncio.timeout(self._limits.grace_s):
                (await self._http.request(b"DELETE", self._session_fields(session), b"")).close()

    def _forget(self, session: _Session) -> None:
        if session.ear is not None:
            session.ear.close()
        if self._shared is session:
            self._shared = None
        for key, known in list(self._sessions.items()):
            if known is session:
                del self._sessions[key]

    async def _set_level(self, session: _Session, level: str, fields: bytes) -> None:
        number = str(next(self._ids)).encode()
        body = messages.request(number, "logging/setLevel", {"level": level})
        session.level = level
        with contextlib.suppress(UpstreamError):  # it has no log messages
            await self._exchange(Post(number, fields, session_id=session.id), body)

    async def negotiate(self) -> Era:
        """Finds out the server's era, and opens the session that the older one needs."""
        async with self._negotiating:
            if self._era is Era.MODERN or (self._era is Era.HANDSHAKE and self._shared is not None):
                return self._era
            if self._era is None and await self._discover():
                self._era = Era.MODERN
                return Era.MODERN
            self._shared, self._about = await self._initialize(b"{}")
            self._era = Era.HANDSHAKE
            return Era.HANDSHAKE

    async def _discover(self) -> bool:
        fields = self._modern + b"Mcp-Method: server/discover\r\n"
        body = messages.request(b"0", "server/discover", messages.DISCOVER_PARAMS)
        try:
            reply = await self._exchange(Post(b"0", fields), body)
            if messages.speaks_modern(reply):
                reply = await self._exchange(Post(b"0", fields), body)
        except UpstreamLost:
            raise
        except (UpstreamError, SessionGone):
            return False
        if messages.speaks_modern(reply):
            raise UpstreamError(
                f"Tool server {self.name!r} refuses revision {MODERN} and names it as the one that it supports.",
                code="tool_server_protocol",
            )
        found = messages.read_discovered(reply)
        if found is not None:
            self._about = found.about
        return found is not None

    async def _initialize(self, capabilities: bytes) -> tuple[_Session, About]:
        number = str(next(self._ids)).encode()
        post = Post(number, self._plain)
        try:
            reply: wire.Reply | None = await self._exchange(post, messages.initialize(number, capabilities))
        except SessionGone:
            reply = None
        if reply is None or reply.failed:
            self._era = None
        found = messages.read_initialized(self.name, reply)
        session = _Session(found.protocolVersion, post.session_id)
        await self._exchanger.quietly(messages.INITIALIZED, self._session_fields(session))
        return session, found.about

    async def _exchange(self, post: Post, body: bytes) -> wire.Reply:
        try:
            return await self._exchanger.reply(post, body)
        except UpstreamLost as lost:
            if lost.sent and not self._fixed:
                # Whatever comes back at that address may be another server: ask it again.
                self._era = None
                for session in (self._shared, *self._sessions.values()):
                    if session is not None:
                        self._forget(session)
            raise

    # What it says of its own accord

    async def listen(self, wants: Mapping[str, object], client: Client, sink: Sink) -> None:
        """Hands what the server says outside of requests to `sink`, until the caller leaves or the server won't.

        `wants` is a subscription filter of 2026-07-28. Raises UpstreamLost, UpstreamError.
        """
        era = self._era or await self.negotiate()
        if era is Era.MODERN:
            await self._subscribe(wants, client, sink)
        else:
            await self._hear(wants, client, sink)

    async def _subscribe(self, wants: Mapping[str, object], client: Client, sink: Sink) -> None:
        number = str(next(self._ids)).encode()
        fields = b"%bMcp-Method: subscriptions/listen\r\n" % self._modern
        params = messages.for_modern({"notifications": wants}, client)

        async def said(message: bytes) -> None:
            if not messages.is_acknowledgement(message):  # what was agreed on is between the server and us
                await sink(message)

        post = Post(number, fields, client=_Listener(client, said))
        await self._hearing.reply(post, messages.request(number, "subscriptions/listen", params))

    async def _hear(self, wants: Mapping[str, object], client: Client, sink: Sink) -> None:
        uris = wants.get("resourceSubscriptions")
        for uri in uris if isinstance(uris, list) else ():
            await self.request("resources/subscribe", {"uri": uri}, client)
        if (ear := (await self._session(client)).ear) is not None:
            await ear.listen(client, sink)


class _Listener(Through):
    """A client outside of any request."""

    def __init__(self, client: Client, sink: Sink) -> None:
        super().__init__(client)
        self.ask = client.ask
        self._sink = sink

    async def notify(self, message: bytes) -> None:
        await self._sink(message)


def _text(value: object, what: str) -> str:
    return wire.read_string(value, what) if isinstance(value, msgspec.Raw) else str(value)
