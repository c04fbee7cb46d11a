"""Frames over a unix stream socket: JSON, with file descriptors beside it.

A frame is four bytes of length, one byte that says how many descriptors belong to it, and the JSON. Descriptors
travel with the frame's first bytes; the kernel keeps their order, so each frame takes its own off the front of those
that came.
"""

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

_HEAD = struct.Struct("!IB")
_CHUNK = 1 << 18
_DESCRIPTORS = 8
MOST = 64 << 20
"""Bytes of a frame."""


class Closed(ConnectionError):
    """The other side is gone, or this one was closed."""


class Wire:
    """One end of a connection. `send` may be called by several tasks, `receive` by one."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._sending = asyncio.Lock()
        self._read = bytearray()
        self._descriptors: deque[int] = deque()
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False

    @classmethod
    async def connect(cls, path: str) -> "Wire":
        """Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, path)
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def send(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """The whole frame. Raises `Closed`. The descriptors stay the caller's."""
        frame = memoryview(_HEAD.pack(len(body), len(descriptors)) + body)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        async with self._sending:
            sent = 0
            try:
                while sent < len(frame):
                    self._demand_open()
                    try:
                        part = frame[sent : sent + _CHUNK]
                        sent += self._socket.sendmsg([part], rights if sent == 0 else [])
                    except BlockingIOError:
                        await self._ready(writing=True)
            except BaseException as error:
                if sent:  # half a frame can't be followed by another
                    self.close()
                if isinstance(error, OSError) and not isinstance(error, Closed):
                    raise Closed(str(error)) from error
                raise

    async def receive(self) -> tuple[bytes, list[int]]:
        """The next frame; its descriptors are the caller's now. Raises `Closed`."""
        length, count = _HEAD.unpack(await self._exactly(_HEAD.size))
        if length > MOST:
            raise Closed(f"a frame of {length} bytes is too long")
        body = await self._exactly(length)
        if len(self._descriptors) < count:
            raise Closed("descriptors are missing")
        return body, [self._descriptors.popleft() for _ in range(count)]

    async def _exactly(self, count: int) -> bytes:
        room = socket.CMSG_SPACE(_DESCRIPTORS * array.array("i").itemsize)
        while len(self._read) < count:
            self._demand_open()
            try:
                data, rights, _, _ = self._socket.recvmsg(_CHUNK, room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await self._ready(writing=False)
                continue
            except OSError as error:
                raise Closed(str(error)) from error
            for level, kind, payload in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    found = array.array("i")
                    found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
                    self._descriptors.extend(found)
            if not data:
                raise Closed("the other side has closed")
            self._read += data
        taken = bytes(self._read[:count])
        del self._read[:count]
        return taken

    def _demand_open(self) -> None:
        if self._closed:
            raise Closed("the connection is closed")

    async def _ready(self, *, writing: bool) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        add(self._socket, wake)
        self._waiting.add(ready)
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if not self._closed:
                remove(self._socket)

    def close(self) -> None:
        """Whoever waits in `send` or `receive` gets `Closed`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        self._socket.close()
        for ready in self._waiting:
            if not ready.done():
                ready.set_exception(Closed("the connection was closed"))
        while self._descriptors:
            with contextlib.suppress(OSError):
                os.close(self._descriptors.popleft())
