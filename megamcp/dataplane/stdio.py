"""MCP over the pipes of a process: one JSON-RPC message a line, many requests at once.

The process may print what it likes. Lines that are no message of the protocol are handed to the log, lines over the
bound are dropped (with the call that they answer), and who floods is read slowly; none of it reaches another call.
A request that is left (deadline, cancellation) is cancelled at the server and settled before leaving returns: it was
answered, or the process was killed. So nothing that was reported as ended can still take effect. What the process
does after it answered is not known here, and nothing is sent twice.

A process in a sandbox is its rollout's state, so it is killed less lightly. It is asked something right after it was
told that a call is left: who answers that has read both, and since servers should not answer a call that was
cancelled, more can't be known. One that is stuck has until the deadline of the call that it is stuck in.

The era is asked for by `initialize`, since servers of the handshake era may leave anything else unanswered before
that; one that only speaks 2026-07-28 refuses it and is asked `server/discover`.
"""

import asyncio
import contextlib
import itertools
import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from megamcp.dataplane import messages, wire
from megamcp.dataplane.children import Pace
from megamcp.dataplane.ports import Limits, Spoken
from megamcp.dataplane.protocol import About, Client, Sink, ToolCall, UpstreamLost
from megamcp.errors import UpstreamError

_CHUNK = 1 << 16
_UNASKED_PER_S = 1 << 20
_UNREAD_BYTES = 1 << 20
_PROGRESS_KEPT = 64
_ENDING_S = 0.5
_ENDS = 256
_PATIENCE = 8
"""A line that is over the bound is read to its end, which most often is the end of a call; so many bounds of it."""
_ID_FIRST = re.compile(rb'\s*\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*([0-9]{1,18})\s*,')
_ID_LAST = re.compile(rb'"id"\s*:\s*([0-9]{1,18})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')

Told = Callable[[], None]


class Life(Protocol):
    """A process that lives once, as its client sees it."""

    @property
    def stdin(self) -> asyncio.StreamWriter: ...

    @property
    def stdout(self) -> asyncio.StreamReader: ...

    @property
    def exited(self) -> asyncio.Event: ...

    @property
    def reason(self) -> str | None:
        """Why it ended, as far as that is known."""
        ...

    def kill(self, reason: str, *, blameless: bool = False) -> None:
        """Ends it at once."""
        ...


class _ProgressToken(msgspec.Struct):
    progressToken: int


class _Pending:
    """A request that waits for its answer."""

    __slots__ = ("client", "ended", "news", "progress", "token")

    def __init__(self, client: Client | None, token: bytes | None) -> None:
        self.client = client
        self.token = token
        self.progress: deque[bytes] = deque(maxlen=_PROGRESS_KEPT)
        self.news = asyncio.Event()
        self.ended: asyncio.Future[wire.Reply | UpstreamError] = asyncio.get_running_loop().create_future()

    def end(self, how: wire.Reply | UpstreamError) -> None:
        if not self.ended.done():
            self.ended.set_result(how)
            self.news.set()


class StdioUpstream:
    """A client of one process, for as long as it lives."""

    def __init__(
        self,
        name: str,
        running: Life,
        *,
        limits: Limits,
        printed: Callable[[bytes], None],
        used: Told | None,
        list_changed: Told | None,
        sandbox: str | None = None,
    ) -> None:
        self.name = name
        self.sandbox = sandbox
        self._running = running
        self._stdin = running.stdin
        self._stdout = running.stdout
        self._limits = limits
        self._printed = printed
        self._used = used
        self._list_changed = list_changed
        # Where a conversation goes on that others have begun, a number must not come twice.
        self._ids = itertools.count(secrets.randbits(48) + 1)
        self._pending: dict[bytes, _Pending] = {}
        self._writing = asyncio.Lock()
        self._modern: bool | None = None
        self._about = About()
        self._listeners: dict[Sink, Client] = {}
        self._asking: dict[bytes, asyncio.Task[None]] = {}
        self._pace = Pace(_UNASKED_PER_S)
        self._closed = False

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    @property
    def modern(self) -> bool:
        return self._modern is True

    async def negotiate(self) -> None:
        """The handshake, in the era that the server speaks. Raises UpstreamLost, UpstreamError.

        A process serves clients of all kinds in its time, so it is told of all that one could do; what the client of a
        request can't do is refused when it asks.
        """
        number = self._number()
        reply = await self._answered(number, messages.initialize(number, messages.ALL_CAPABILITIES), None, None)
        if reply.failed:
            number = self._number()
            discover = messages.request(number, "server/discover", messages.DISCOVER_PARAMS)
            found = messages.read_discovered(await self._answered(number, discover, None, None))
            if found is not None:
                self._modern, self._about = True, found.about
                return
        self._about = messages.read_initialized(self.name, reply).about
        self._say(messages.INITIALIZED)
        self._modern = False

    @property
    def spoken(self) -> Spoken:
        """What the handshake found."""
        assert self._modern is not None
        return Spoken(self._modern, self._about)

    def resume(self, spoken: Spoken) -> None:
        """The handshake was done by somebody else, with this process or with the one that it was frozen from."""
        self._modern, self._about = spoken.modern, spoken.about

    async def call(
        self,
        call: ToolCall,
        *,
        handle: str | None = None,
        database: str | None = None,
        client: Client | None = None,
        deadline: float | None = None,
    ) -> wire.Reply:
        """Runs one tool call. Raises UpstreamLost, UpstreamError. The caller sets the deadline."""
        number = self._number()
        body = messages.tool_call(number, call, messages.shared_meta(call, number, modern=self._modern is True))
        return await self._answered(number, body, client, call.progress_token, deadline)

    async def request(
        self, method: str, params: Mapping[str, object], client: Client | None = None, *, changes: bool = True
    ) -> wire.Reply:
        """Any other request. Raises UpstreamLost, UpstreamError. What changes nothing is simply left."""
        number = self._number()
        if self._modern and not isinstance(params.get("_meta"), msgspec.Raw):
            params = messages.for_modern(params, client)
        told = messages.for_shared(params, number, modern=self._modern is True)
        body, token = messages.request(number, method, told), messages.token_of(params)
        return await self._answered(number, body, client, token, changes=changes)

    async def about(self) -> About:
        """What the server said about itself."""
        return self._about

    async def tell(self, method: str, client: Client) -> None:
        """A notification of a client: the process knows of no other."""
        if self._modern is False:
            self._say(messages.notification(method, {}))

    async def end(self, session: str) -> None:
        """Sessions share the process, and end with it."""

    async def listen(self, wants: Mapping[str, object], client: Client, sink: Sink) -> None:
        """Hands on what the process says outside of requests. Raises UpstreamLost, UpstreamError."""
        self._listeners[sink] = client
        try:
            uris = wants.get("resourceSubscriptions")
            if self._modern:
                await self.request("subscriptions/listen", {"notifications": wants}, client, changes=False)
            for uri in uris if isinstance(uris, list) else ():
                await self.request("resources/subscribe", {"uri": uri}, client)
            await self._running.exited.wait()
        finally:
            del self._listeners[sink]

    def _number(self) -> bytes:
        return str(next(self._ids)).encode()

    # A request and its answer

    async def _answered(
        self,
        number: bytes,
        body: bytes,
        client: Client | None,
        token: bytes | None,
        deadline: float | None = None,
        *,
        changes: bool = True,
    ) -> wire.Reply:
        pending = self._pending[number] = _Pending(client, token)
        sent = False
        try:
            async with self._writing:
                # A server that does not read makes its callers wait here, one after another, each to its deadline.
                try:
                    await self._stdin.drain()
                except ConnectionError:
                    self._closed = True
                if self._closed:
                    raise UpstreamLost(f"Tool server {self.name!r} is gone.", sent=False)
                sent = True
                self._write(body)
            while True:
                while pending.progress and client is not None:
                    await client.notify(pending.progress.popleft())
                if pending.ended.done():
                    break
                await pending.news.wait()
                pending.news.clear()
        except BaseException:
            # A start that is given up is killed by who gave it up.
            if sent and not pending.ended.done() and self._modern is not None:
                if changes:
                    await self._settle(number, pending, deadline)
                else:
                    self._say(messages.cancelled(number))
            raise
        finally:
            del self._pending[number]
            if self._used is not None:
                self._used()
        how = pending.ended.result()
        if isinstance(how, UpstreamError):
            raise how
        return how

    async def _settle(self, number: bytes, pending: _Pending, deadline: float | None) -> None:
        """See the module's docstring. A second cancellation leaves no time for the first step."""
        self._say(messages.cancelled(number))
        patience, heard = self._limits.grace_s, pending
        probe = self._number()
        if self.sandbox is not None:
            if deadline is not None:
                patience = max(patience, deadline - asyncio.get_running_loop().time())
            heard = self._pending[probe] = _Pending(None, None)
            self._say(messages.request(probe, *self._question))
        try:
            await asyncio.wait({pending.ended, heard.ended}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pending.pop(probe, None)
            if not pending.ended.done() and not heard.ended.done():
                self._running.kill("a call went on after it had been cancelled", blameless=True)
        await asyncio.wait({pending.ended}, timeout=self._limits.grace_s)

    @property
    def _question(self) -> tuple[str, Mapping[str, object]]:
        """That any server answers, whatever it is doing."""
        return ("server/discover", messages.DISCOVER_PARAMS) if self._modern else ("ping", {})

    # What is written

    def _write(self, body: bytes) -> None:
        # Between the tokens of a client's JSON there may be line ends; inside of strings there can't.
        if b"\n" in body or b"\r" in body:
            body = body.replace(b"\n", b" ").replace(b"\r", b" ")
        self._stdin.write(body + b"\n")

    def _say(self, body: bytes) -> None:
        """Something that nobody waits for. A server that does not read does not hear it."""
        if not self._closed and self._stdin.transport.get_write_buffer_size() < _UNREAD_BYTES:
            self._write(body)

    # What is read

    async def read(self) -> None:
        """Reads until the process ends its output; then there is nobody to talk to, so the process ends too."""
        try:
            with contextlib.suppress(ConnectionError):
                await self._read()
            self._closed = True
            # Most often it is ending by itself, and its exit status and last words explain more than a kill.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDING_S):
                    await self._running.exited.wait()
        finally:
            self.close()
        self._running.kill("it closed its output")

    def close(self) -> None:
        """The process is gone: what waits for an answer gets none."""
        self._closed = True
        for task in self._asking.values():
            task.cancel()
        why = f" ({self._running.reason})" if self._running.reason else ""
        for pending in self._pending.values():
            pending.end(UpstreamLost(f"Tool server {self.name!r} ended during a call{why}.", sent=True))

    async def _read(self) -> None:
        most = self._limits.response_bytes
        buffer, searched = bytearray(), 0
        head: bytes | None = None  # of a line that is over the bound, whose middle is not kept
        dropped = 0
        while chunk := await self._stdout.read(_CHUNK):
            buffer += chunk
            while (end := buffer.find(b"\n", searched)) >= 0:
                line = bytes(buffer[:end])
                del buffer[: end + 1]
                searched = 0
                if head is None:
                    await self._line(line)
                else:
                    self._oversized(head, line[-_ENDS:])
                    head = None
            if len(buffer) > most or head is not None:
                if head is None:
                    head, dropped = bytes(buffer[:_ENDS]), 0
                dropped += max(0, len(buffer) - _ENDS)
                del buffer[:-_ENDS]
                if dropped > _PATIENCE * most:
                    self._oversized(head, b"")
                    self._running.kill(f"it wrote a line of more than {dropped} bytes")
                    return
            searched = len(buffer)
        if buffer:
            await self._line(bytes(buffer))

    async def _line(self, line: bytes) -> None:
        if line.lstrip()[:1] == b"[":  # revision 2025-03-26 has batches
            with contextlib.suppress(wire.RpcFailure):
                for member in wire.read_batch(line):
                    await self._message(bytes(member))
                return
        await self._message(line)

    async def _message(self, text: bytes) -> None:
        printed = False
        try:
            envelope = messages.read(self.name, text, 10 * self._limits.depth)
        except UpstreamError:
            printed = True
        else:
            if envelope.method is None:
                if self._reply(envelope):
                    return
                printed = not bytes(envelope.id).isdigit()  # else it comes too late
            elif envelope.id is not wire.ABSENT:
                self._put(envelope)
            elif envelope.method == "notifications/progress":
                self._progress(envelope.params)
            else:
                await self._told(envelope, text)
        if printed:
            self._printed(text)
        await self._pace.spend(len(text))

    def _reply(self, envelope: wire.Envelope) -> bool:
        number = bytes(envelope.id)
        if number == b"null" and envelope.error is not wire.ABSENT and len(self._pending) == 1:
            number = next(iter(self._pending))  # refused before its id was read
            envelope.id = msgspec.Raw(number)
        pending = self._pending.get(number)
        if pending is None:
            return False
        reply = messages.reply_in(envelope, number)
        pending.end(
            reply
            or UpstreamError(
                f"Tool server {self.name!r} answered with something that is no response.", code="tool_server_protocol"
            )
        )
        return True

    def _progress(self, params: msgspec.Raw) -> None:
        try:
            number = str(msgspec.json.decode(params, type=_ProgressToken).progressToken).encode()
        except msgspec.DecodeError:
            return
        pending = self._pending.get(number)
        if pending is not None and pending.token is not None:
            text = messages.progress_for(params, pending.token)
            if text is not None:
                pending.progress.append(text)
                pending.news.set()

    async def _told(self, envelope: wire.Envelope, text: bytes) -> None:
        """A notification that names no request: for who listens, or else for who has a request open."""
        if envelope.method == "notifications/tools/list_changed" and self._list_changed is not None:
            self._list_changed()
        if envelope.method == "notifications/subscriptions/acknowledged":
            return
        if envelope.method == "notifications/cancelled":
            wanted = messages.cancels(envelope.params)
            if wanted is not None and (task := self._asking.get(wanted)) is not None:
                task.cancel()
        elif self._listeners and not (self._pending and messages.is_log(text)):
            for sink in list(self._listeners):
                await sink(text)
        elif messages.is_log(text):
            for pending in self._pending.values():
                if pending.client is not None:
                    pending.progress.append(text)
                    pending.news.set()

    def _put(self, envelope: wire.Envelope) -> None:
        """Puts a question of the server to the client whose request is the newest, and its answer to the server."""
        open_ = [pending.client for pending in self._pending.values() if pending.client is not None]
        client = next(iter([*reversed(open_), *self._listeners.values()]), None)
        if client is None or envelope.method == "ping":
            self._say(messages.answer_to(envelope))
            return
        number = bytes(envelope.id)
        if number in self._asking:
            return  # it has asked that
        task = asyncio.create_task(self._answer(envelope, client))
        self._asking[number] = task
        task.add_done_callback(lambda _: self._asking.pop(number, None))

    async def _answer(self, envelope: wire.Envelope, client: Client) -> None:
        params = b"{}" if envelope.params is wire.ABSENT else bytes(envelope.params)
        reply = await client.ask(envelope.method or "", params)
        self._say(wire.reply_message(bytes(envelope.id), reply))

    def _oversized(self, head: bytes, tail: bytes) -> None:
        """A line over the bound ends the call that it answers: the id is first or last, or there is only one call."""
        found = _ID_FIRST.match(head) or _ID_LAST.search(tail)
        pending = self._pending.get(found[1]) if found else None
        if pending is None and len(self._pending) == 1:
            pending = next(iter(self._pending.values()))
        self._printed(b"(a line of more than %d bytes)" % self._limits.response_bytes)
        if pending is not None:
            pending.end(
                UpstreamError(
                    f"Tool server {self.name!r} sent more than {self._limits.response_bytes} bytes for one call.",
                    code="result_too_large",
                )
            )
