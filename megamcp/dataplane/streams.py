"""Event streams to clients: a response that becomes one with its first event, and what was sent on it, for resumption.

A client of 2025-11-25 whose connection breaks comes back with the id of the last event that it saw; so what is sent on
its streams is kept for a while, within bounds, and a stream goes on without a connection. Event ids name their stream,
which is unguessable. In memory of this process only.
"""

import asyncio
import contextlib
from collections import OrderedDict, deque

from megamcp.dataplane.asgi import STREAM, Send
from megamcp.dataplane.forward import named
from megamcp.dataplane.sse import sse_event

_KEPT_S = 120.0
_KEPT_BYTES = 64 * 1024 * 1024
KEEP_ALIVE_S = 15.0
_COMMENT = b": still here\n\n"


class Record:
    """The events of one stream, as long as they are kept."""

    __slots__ = ("done", "events", "first", "news", "session", "size", "token")

    def __init__(self, session: str, token: str) -> None:
        self.session = session
        self.token = token
        self.events: deque[bytes] = deque()
        self.first = 1
        """Number of the first event that is still there."""
        self.size = 0
        self.done = False
        self.news = asyncio.Event()

    def add(self, message: bytes) -> bytes:
        """The event with its id."""
        number = self.first + len(self.events)
        event = b"id: %b.%d\n" % (self.token.encode(), number) + (sse_event(message) if message else b"data: \n\n")
        self.events.append(event)
        self.size += len(event)
        self.news.set()
        return event


class Records:
    """The streams of this process that may be resumed."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._size = 0

    def new(self, session: str) -> Record:
        record = Record(session, named(self._peer))
        self._records[record.token] = record
        return record

    def find(self, session: str, event_id: str) -> tuple[Record, int] | None:
        """The stream of an event, and the number of the next one."""
        token, _, number = event_id.partition(".")
        record = self._records.get(token)
        if record is None or record.session != session or not number.isdecimal():
            return None
        return record, int(number[:12]) + 1

    def added(self, size: int) -> None:
        """Streams that have ended go first when there is too much, then the oldest."""
        self._size += size
        while self._size > _KEPT_BYTES and self._records:
            token = next((one.token for one in self._records.values() if one.done), next(iter(self._records)))
            self._drop(token)

    def ended(self, record: Record) -> None:
        record.done = True
        record.news.set()
        asyncio.get_running_loop().call_later(_KEPT_S, self._drop, record.token)

    def _drop(self, token: str) -> None:
        if (record := self._records.pop(token, None)) is not None:
            self._size -= record.size
            record.events.clear()
            record.done = True  # the stream may go on, but nothing more of it is kept
            record.news.set()


class EventStream:
    """A response that becomes an event stream with its first event, and is plain JSON if none ever comes.

    `session` names a session whose client may resume it. One writer at a time: events of several tasks don't mix.
    """

    __slots__ = ("_alive", "_closed", "_record", "_records", "_saying", "_send", "_session", "_writing", "started")

    def __init__(self, send: Send, records: Records | None = None, session: str | None = None) -> None:
        self._send = send
        self._records = records
        self._session = session
        self._record: Record | None = None
        self._writing: asyncio.Lock | None = None
        self._alive: asyncio.TimerHandle | None = None
        self._saying: asyncio.Future[None] | None = None
        self._closed = False
        self.started = False

    async def start(self) -> None:
        """Makes it a stream now. The first event of one that may be resumed has an id and nothing else."""
        if self.started:
            return
        self.started = True
        self._writing = asyncio.Lock()
        async with self._writing:
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM})
            if self._records is not None and self._session is not None:
                self._record = self._records.new(self._session)
                await self._send({"type": "http.response.body", "body": self._framed(b""), "more_body": True})
        self._rest()

    def start_later(self) -> asyncio.TimerHandle:
        """Makes it a stream if there is still no answer after a while: silence ends connections."""
        return asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._start_now)

    def _start_now(self) -> None:
        self._saying = asyncio.ensure_future(self.start())

    async def event(self, message: bytes) -> None:
        await self.start()
        assert self._writing is not None
        async with self._writing:
            await self._send({"type": "http.response.body", "body": self._framed(message), "more_body": True})
        self._rest()

    async def finish(self, message: bytes | None = None) -> None:
        """The last event, and the end."""
        await self.start()
        assert self._writing is not None
        async with self._writing:
            last = self._framed(message) if message is not None else b""
            self.close()
            await self._send({"type": "http.response.body", "body": last})

    def close(self) -> None:
        """Nothing more is said, whether its client heard the end or has left."""
        self._closed = True
        if self._alive is not None:
            self._alive.cancel()
        if self._record is not None and self._records is not None and not self._record.done:
            self._records.ended(self._record)

    def _framed(self, message: bytes) -> bytes:
        if self._record is None or self._records is None or self._record.done:
            return sse_event(message)
        event = self._record.add(message)
        self._records.added(len(event))
        return event

    def _rest(self) -> None:
        """Proxies end connections on which nothing is said."""
        if self._alive is not None:
            self._alive.cancel()
        if not self._closed:
            self._alive = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._comment)

    def _comment(self) -> None:
        self._saying = asyncio.ensure_future(self._say_comment())

    async def _say_comment(self) -> None:
        assert self._writing is not None
        with contextlib.suppress(Exception):
            async with self._writing:
                await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
        self._rest()


async def replay(send: Send, record: Record, number: int) -> None:
    """The events of a stream from `number` on, to its end."""
    await send({"type": "http.response.start", "status": 200, "headers": STREAM})
    while True:
        record.news.clear()
        for event in list(record.events)[max(0, number - record.first) :]:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            number += 1
        if record.done:
            break
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEP_ALIVE_S):
                await record.news.wait()
                continue
        await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
