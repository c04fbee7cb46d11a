"""The keeper's end of a driver's control socket: orders and answers, one datagram each, and the process behind it."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Sequence
from typing import Any

from sandboxes.types import SandboxError

_MOST = 1 << 16
_CREDENTIALS = struct.Struct("iII")


class Control:
    """One driver. Orders run one after another."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket = sock
        self._turn = asyncio.Lock()
        self.pid = 0
        """As the host sees it, once it has said something."""
        self._pidfd = -1

    @staticmethod
    def pair() -> tuple["Control", socket.socket]:
        """Ours and the driver's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Control(ours), theirs

    async def order(self, order: dict[str, Any], descriptors: Sequence[int], timeout_s: float) -> None:
        """Sends an order and waits until it is done. Raises `SandboxError`."""
        async with self._turn:
            try:
                socket.send_fds(self._socket, [json.dumps(order).encode()], list(descriptors))
            except OSError as error:
                raise SandboxError("gone", f"The process that was to be forked is gone: {error.strerror}.") from error
            await self.answer(timeout_s)

    async def answer(self, timeout_s: float) -> None:
        """Waits for what the driver says. Raises `SandboxError` when that is bad, or comes too late, or never."""
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._receive()
        except TimeoutError:
            raise SandboxError("busy", f"The sandbox's driver did not answer in {timeout_s:g} s.") from None
        except OSError as error:
            raise SandboxError("gone", f"The sandbox's driver is gone: {error.strerror}.") from error
        if not body:
            raise SandboxError("start_failed", "The process ended before it was ready.")
        told = json.loads(body)
        if "error" in told:
            raise SandboxError(str(told["error"]), str(told["message"]))

    async def _receive(self) -> bytes:
        while True:
            try:
                body, extra, _, _ = self._socket.recvmsg(_MOST, socket.CMSG_SPACE(_CREDENTIALS.size))
                break
            except BlockingIOError:
                await _readable(self._socket.fileno())
        for level, kind, payload in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and not self.pid:
                self.pid = _CREDENTIALS.unpack(payload)[0]
                self._pidfd = os.pidfd_open(self.pid)
        return body

    async def ended(self) -> None:
        """Returns when the process has ended."""
        if self._pidfd >= 0:
            await _readable(os.dup(self._pidfd), close=True)

    def kill(self) -> None:
        """SIGKILL; nothing where it has ended."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        self._socket.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


async def _readable(descriptor: int, *, close: bool = False) -> None:
    """Returns when something can be read of a descriptor, or (a process's) when it has ended."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, wake)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
        if close:
            os.close(descriptor)
