"""One socket: read by a coroutine while somebody logs in, by callbacks once the session runs.

Callbacks, since a wake-up of a task for each direction of each message is most of what a relay on asyncio would cost.
A wire that is read by a coroutine takes in 64 KiB at most; its owner decides afterwards.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final, Protocol, cast

from megamcp.relay.messages import ProtocolViolation

_BUFFER: Final = 64 << 10
_FLUSH_S: Final = 5.0  # how long what was written last may take to leave


class Owner(Protocol):
    """Who is told what happens on a wire."""

    def data(self, wire: "Wire", data: bytes) -> None:
        """Bytes came."""

    def lost(self, wire: "Wire") -> None:
        """The connection is gone; called once."""

    def writable(self, wire: "Wire", yes: bool) -> None:
        """The wire's send buffer got full, or has room again."""


class Wire(asyncio.Protocol):
    """A connected socket, from `connection_made` on."""

    def __init__(self, on_made: Callable[["Wire"], None] | None = None) -> None:
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._owner: Owner | None = None
        self._buffer = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._reading = True
        self.gone = False
        self.full = False

    # -- for coroutines --------------------------------------------------------------------------------------------

    async def exactly(self, size: int) -> bytes:
        """Raises ConnectionError at the end of the stream."""
        while len(self._buffer) < size:
            if self.gone:
                raise ConnectionResetError("the connection was closed")
            self.read(True)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def message(self, limit: int) -> tuple[int, bytes]:
        """Letter and body of the next message. Raises ProtocolViolation over `limit` bytes, ConnectionError."""
        head = await self.exactly(5)
        length = int.from_bytes(head[1:], "big")
        if not 4 <= length <= limit:
            raise ProtocolViolation("invalid message length")
        return head[0], await self.exactly(length - 4)

    def attach(self, owner: Owner) -> None:
        """From here on the owner is told; what came already first."""
        self._owner = owner
        self.read(True)
        if self._buffer:
            data, self._buffer = bytes(self._buffer), bytearray()
            owner.data(self, data)
        if self.gone:
            owner.lost(self)

    # -- for both --------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self.gone:
            self._transport.write(data)

    def read(self, yes: bool) -> None:
        """Takes bytes in, or lets the other side wait."""
        if yes == self._reading or self.gone or self._transport is None:
            return
        self._reading = yes
        if yes:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def close(self, last: bytes = b"") -> None:
        """Sends what is left, but doesn't wait for a peer that reads nothing. The owner isn't told any more."""
        self._owner = None
        if self._transport is None or self.gone:
            return
        if last:
            self._transport.write(last)
        self._transport.close()
        if self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(_FLUSH_S, self._transport.abort)

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        found = transport.get_extra_info("socket")
        if found is not None and found.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        if self._owner is not None:
            self._owner.data(self, data)
            return
        self._buffer += data
        if len(self._buffer) >= _BUFFER:
            self.read(False)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._wake()
        if self._owner is not None:
            self._owner.lost(self)

    def pause_writing(self) -> None:
        self.full = True
        if self._owner is not None:
            self._owner.writable(self, False)

    def resume_writing(self) -> None:
        self.full = False
        if self._owner is not None:
            self._owner.writable(self, True)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
