"""What a server of the handshake era says in a session of its own accord: the session's GET stream, kept open.

Some servers put their questions there also in the middle of a call, so the stream is open before a call of a client
that can be asked, and until some time after the last one. What comes goes to those who listen, questions first to
whoever has a call open. A stream that breaks off is resumed; a server that has none is not asked again.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from megamcp.dataplane import messages, wire
from megamcp.dataplane.exchange import Exchanger, Post
from megamcp.dataplane.http import Broken, ConnectFailed
from megamcp.dataplane.protocol import Client, Sink
from megamcp.dataplane.sse import SseReader
from megamcp.errors import UpstreamError

_READY_S = 2.0
_IDLE_S = 60.0
_RETRIES = 5
"""So often in a row a stream that says nothing is begun again."""


class Ear:
    """The stream of one session. As a `Client` it is whoever the session's server speaks to."""

    resumes = False
    level: str | None = None

    def __init__(self, exchanger: Exchanger, session: str, capabilities: bytes, fields: bytes, session_id: str) -> None:
        self.session = session
        self.capabilities = capabilities
        self._exchanger = exchanger
        self._fields = fields
        self._session_id = session_id
        self._callers: list[Client] = []
        self._listeners: dict[Sink, Client] = {}
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._closing: asyncio.TimerHandle | None = None
        self._none = False
        """The server has no such stream."""

    @contextlib.contextmanager
    def calling(self, client: Client) -> Iterator[None]:
        """While a client has a request open."""
        self._callers.append(client)
        try:
            yield
        finally:
            self._callers.remove(client)
            self._close_later()

    async def open(self) -> None:
        """Begins to listen, and waits a moment for the server to know of it."""
        if self._none:
            return
        if self._task is None or self._task.done():
            self._ready.clear()
            self._task = asyncio.create_task(self._run(), name="hear a session")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_S):
                await self._ready.wait()

    async def listen(self, client: Client, sink: Sink) -> None:
        """Hands on what is said until the caller leaves, or the server has no such stream."""
        self._listeners[sink] = client
        try:
            await self.open()
            if self._task is not None:
                await asyncio.wait({self._task})
        finally:
            del self._listeners[sink]
            self._close_later()

    def close(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        if self._task is not None:
            self._task.cancel()

    def _close_later(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._closing = asyncio.get_running_loop().call_later(_IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        if not self._callers and not self._listeners:
            self.close()

    async def notify(self, message: bytes) -> None:
        if self._listeners:
            for sink in list(self._listeners):
                await sink(message)
        elif messages.is_log(message):
            for client in list(self._callers):
                await client.notify(message)

    async def ask(self, method: str, params: bytes) -> wire.Reply:
        client = next(iter([*reversed(self._callers), *self._listeners.values()]), None)
        if client is None:
            return wire.Reply(messages.NO_CAPABILITY, failed=True)
        return await client.ask(method, params)

    async def _run(self) -> None:
        reader: SseReader | None = None
        silent = 0
        post = Post(b"null", self._fields, client=self, session_id=self._session_id)
        try:
            while silent < _RETRIES:
                silent += 1
                with contextlib.suppress(ConnectFailed, Broken, UpstreamError, ValueError):
                    reader, heard = await self._hear(reader, post)
                    if reader is None:
                        return
                    silent = 0 if heard else silent
        finally:
            self._ready.set()
            for task in post.asking.values():
                task.cancel()

    async def _hear(self, reader: SseReader | None, post: Post) -> tuple[SseReader | None, bool]:
        """Reads one connection to its end."""
        response = await self._exchanger.stream(post.fields, reader)
        heard = False
        try:
            if response.status != 200:
                self._none = response.status in (404, 405)
                return None, False
            self._ready.set()
            reader = reader or self._exchanger.reader()
            while (chunk := await response.next_chunk()) is not None:
                for data in reader.feed(chunk):
                    heard = True
                    with contextlib.suppress(UpstreamError):  # what is no message is passed over
                        await self._exchanger.aside(self._exchanger.parse(data), data, post)
        finally:
            response.release()
        return reader, heard
