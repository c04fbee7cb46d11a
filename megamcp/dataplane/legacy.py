"""A server over the transport of 2024-11-05: one event stream from it, and POSTs to an address that the stream names.

Such a stream carries all that one session says, as a process's stdout does, so the conversation is `stdio`'s; each
client's session has a connection of its own. When the connection ends, what waited on it is lost, and the next request
makes another.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from urllib.parse import urljoin, urlsplit

from megamcp.dataplane import wire
from megamcp.dataplane.authorized import Authorized, Requests
from megamcp.dataplane.circuit import Circuit
from megamcp.dataplane.exchange import unreachable
from megamcp.dataplane.http import Address, Broken, ConnectFailed, Pool, Response, TooMuch, field_lines
from megamcp.dataplane.ports import Authority, Limits
from megamcp.dataplane.protocol import About, Client, Sink, ToolCall, UpstreamLost
from megamcp.dataplane.sse import SseReader
from megamcp.dataplane.stdio import StdioUpstream
from megamcp.errors import MegaMCPError, UpstreamError

_LISTEN = b"Accept: text/event-stream\r\n"
_POST = b"Content-Type: application/json\r\n"
_MOST_UNSENT = 1 << 20
_MOST_SAID = 1 << 16
_HINT = "Give the address of its stream, which most often ends with /sse; or leave out transport."


class _Line:
    """The way to the server, in the shape of a process's stdin: a line is a POST."""

    def __init__(self, life: "_Connection") -> None:
        self._life = life
        self._sending: set[asyncio.Task[None]] = set()
        self._unsent = 0
        self.transport = self

    def get_write_buffer_size(self) -> int:
        return self._unsent

    def write(self, line: bytes) -> None:
        self._unsent += len(line)
        task = asyncio.create_task(self._send(line))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def drain(self) -> None:
        while self._unsent > _MOST_UNSENT and self._sending:
            await asyncio.wait(self._sending, return_when=asyncio.FIRST_COMPLETED)

    async def _send(self, line: bytes) -> None:
        try:
            await self._life.post(line.rstrip())
        finally:
            self._unsent -= len(line)

    def close(self) -> None:
        for task in self._sending:
            task.cancel()


class _Connection:
    """One session's event stream, in the shape of a process: see `stdio.Life`."""

    def __init__(self, name: str, http: Requests, posts: "LegacyUpstream", limits: Limits) -> None:
        self.name = name
        self._http = http
        self._posts = posts
        self._limits = limits
        self.stdin = _Line(self)
        self.stdout = asyncio.StreamReader(limit=1 << 16)
        self.exited = asyncio.Event()
        self.reason: str | None = None
        self._target: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._reading: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Opens the stream, and waits for the address that it names. Raises UpstreamLost, UpstreamError."""
        try:
            response = await self._http.request(b"GET", self._posts.fields + _LISTEN, b"")
        except ConnectFailed as error:
            raise unreachable(self.name, error) from None
        except Broken as error:
            raise UpstreamLost(f"Tool server {self.name!r} broke off: {error}", sent=False) from None
        kind = response.field(b"content-type") or "untyped"
        if response.status != 200 or not kind.startswith("text/event-stream"):
            response.release()
            raise UpstreamError(
                f"Tool server {self.name!r} answered HTTP {response.status} ({kind}) where its event stream should be.",
                code="tool_server_protocol",
                hint=_HINT,
            )
        self._reading = asyncio.create_task(self._read(response), name=f"read {self.name}")
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                await asyncio.shield(self._target)
        except TimeoutError:
            self.kill("it named no address for messages")
            raise UpstreamError(
                f"Tool server {self.name!r} opened an event stream and named no address for messages.",
                code="tool_server_protocol",
                hint=_HINT,
            ) from None

    async def _read(self, response: Response) -> None:
        reader = SseReader(self._limits.response_bytes)
        try:
            while (chunk := await response.next_chunk()) is not None:
                for data in reader.feed(chunk):
                    if not self._target.done():
                        self._target.set_result(self._posts.target(data.decode("utf-8", "replace").strip()))
                    else:
                        self.stdout.feed_data(data.replace(b"\n", b" ") + b"\n")
            self.reason = self.reason or "it ended its event stream"
        except UpstreamError as error:
            self._target.set_exception(error)
        except (Broken, ValueError) as error:
            self.reason = self.reason or str(error)
        finally:
            response.close()
            self._end()

    def _end(self) -> None:
        if not self._target.done():
            self._target.set_exception(UpstreamLost(f"Tool server {self.name!r} broke off.", sent=False))
            self._target.exception()  # whoever waited may have left
        if not self.exited.is_set():
            self.stdout.feed_eof()
            self.exited.set()

    async def post(self, body: bytes) -> None:
        """One message. What the server refuses by HTTP is a broken connection: its answer would come by the stream."""
        try:
            status = await self._posts.post(self._target.result(), body)
        except (ConnectFailed, Broken, MegaMCPError) as error:
            self.kill(str(error))
            return
        if status >= 400:
            self.kill(f"it answered HTTP {status} to a message")

    def kill(self, reason: str, *, blameless: bool = False) -> None:
        self.reason = self.reason or reason
        self.stdin.close()
        if self._reading is not None:
            self._reading.cancel()
        self._end()


class LegacyUpstream:
    """A client of one such server: a conversation for each client's session."""

    sandbox: str | None = None
    modern = False

    def __init__(
        self,
        name: str,
        url: str,
        *,
        limits: Limits,
        headers: Mapping[str, str] | None = None,
        authority: Authority | None = None,
    ) -> None:
        self.name = name
        self._url = url
        self._limits = limits
        self.fields = field_lines(headers or {})
        # Streams stay open, messages are many: one pool for both, without a bound of its own.
        pool = Pool(Address.of(url), limit=1 << 30, idle_s=4.0, connect_s=limits.connect_timeout_s)
        self.circuit = Circuit(pool)
        self._http: Requests = self.circuit if authority is None else Authorized(self.circuit, authority)
        self._talks: OrderedDict[str, tuple[_Connection, StdioUpstream, asyncio.Task[None]]] = OrderedDict()
        self._opening: dict[str, asyncio.Task[StdioUpstream]] = {}
        self.on_list_changed: Callable[[], None] | None = None

    def target(self, address: str) -> bytes:
        """Where messages go, as the server named it. Raises UpstreamError for another host, ValueError for nonsense."""
        url = urljoin(self._url, address)
        if urlsplit(url)[:2] != urlsplit(self._url)[:2]:
            raise UpstreamError(
                f"Tool server {self.name!r} wants messages at another host: {url[:200]}", code="tool_server_protocol"
            )
        return Address.of(url).target

    async def post(self, target: bytes, body: bytes) -> int:
        """One message; gives the status of HTTP. Raises ConnectFailed, Broken, UpstreamError."""
        response = await self._http.request(b"POST", self.fields + _POST, body, target)
        try:
            await response.read(_MOST_SAID)
        except TooMuch:
            pass  # it says nothing that matters
        finally:
            response.release()
        return response.status

    async def call(
        self,
        call: ToolCall,
        *,
        handle: str | None = None,
        database: str | None = None,
        client: Client | None = None,
        deadline: float | None = None,
    ) -> wire.Reply:
        return await (await self._talk(client)).call(call, client=client, deadline=deadline)

    async def request(self, method: str, params: Mapping[str, object], client: Client | None = None) -> wire.Reply:
        return await (await self._talk(client)).request(method, params, client)

    async def about(self) -> About:
        return await (await self._talk(None)).about()

    async def tell(self, method: str, client: Client) -> None:
        if client.session in self._talks:
            await self._talks[client.session][1].tell(method, client)

    async def listen(self, wants: Mapping[str, object], client: Client, sink: Sink) -> None:
        await (await self._talk(client)).listen(wants, client, sink)

    @property
    def sessions(self) -> int:
        return len(self._talks)

    def keeps(self, session: str) -> bool:
        return session in self._talks

    @property
    def sessionless(self) -> bool:
        return False

    async def end(self, session: str) -> None:
        if (talk := self._talks.pop(session, None)) is not None:
            await _ended(talk)

    async def aclose(self) -> None:
        for task in self._opening.values():
            task.cancel()
        while self._talks:
            await _ended(self._talks.popitem()[1])
        await self._http.aclose()

    async def _talk(self, client: Client | None) -> StdioUpstream:
        key = client.session if client is not None else ""
        if (known := self._talks.get(key)) is not None:
            if not known[0].exited.is_set():
                self._talks.move_to_end(key)
                return known[1]
            await self.end(key)
        opening = self._opening.get(key)
        if opening is None:
            opening = self._opening[key] = asyncio.create_task(self._open(key), name=f"connect {self.name}")
            opening.add_done_callback(lambda task: self._opened(key, task))
        return await asyncio.shield(opening)

    def _opened(self, key: str, task: "asyncio.Task[StdioUpstream]") -> None:
        del self._opening[key]
        if not task.cancelled():
            task.exception()  # whoever waited may have left

    def _list_changed(self) -> None:
        if self.on_list_changed is not None:
            self.on_list_changed()

    async def _open(self, key: str) -> StdioUpstream:
        connection = _Connection(self.name, self._http, self, self._limits)
        await connection.connect()
        talk = StdioUpstream(
            self.name,
            connection,  # type: ignore[arg-type]
            limits=self._limits,
            printed=lambda _: None,
            used=None,
            list_changed=self._list_changed,
        )
        reading = asyncio.create_task(talk.read(), name=f"converse with {self.name}")
        try:
            async with asyncio.timeout(self._limits.list_timeout_s):
                await talk.negotiate()
        except BaseException as error:
            await _ended((connection, talk, reading))
            if isinstance(error, TimeoutError):
                raise UpstreamError(
                    f"Tool server {self.name!r} did not answer the handshake.", code="tool_server_protocol"
                ) from None
            raise
        self._talks[key] = connection, talk, reading
        if len(self._talks) > self._limits.sessions_per_server:
            await _ended(self._talks.popitem(last=False)[1])
        return talk


async def _ended(talk: tuple[_Connection, StdioUpstream, "asyncio.Task[None]"]) -> None:
    connection, conversation, reading = talk
    connection.kill("the session is over")
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    conversation.close()
