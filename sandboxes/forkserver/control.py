"""The keeper's end of a driver's control socket: orders and answers, one datagram each, and the process behind it.

The process at the other end may have been taken over by what runs in it: its words are checked, and believed only about
itself.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Sequence
from typing import Any

from sandboxes.confine import kernel
from sandboxes.types import SandboxError

_MOST = 1 << 16
_CREDENTIALS = struct.Struct("iII")
_REAPED_SOON = 20
_CODES = ("busy", "failed", "not_forkable", "start_failed")


class Control:
    """One driver. Orders run one after another."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket = sock
        self._turn = asyncio.Lock()
        self._number = 0
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
            self._number += 1
            try:
                body = json.dumps({**order, "number": self._number}).encode()
                socket.send_fds(self._socket, [body], list(descriptors))
            except BlockingIOError:
                raise SandboxError("busy", "The sandbox's driver does not read its orders.") from None
            except OSError as error:
                raise SandboxError("gone", f"The process that was to be forked is gone: {error.strerror}.") from error
            await self._answer(timeout_s, self._number)

    def resume(self) -> None:
        """After a freeze: calls may begin again."""
        with contextlib.suppress(OSError):
            self._socket.send(b'{"op":"resume","number":0}')

    async def ready(self, timeout_s: float) -> None:
        """Waits until a new driver is. Raises `SandboxError` when it says why not, or comes too late, or never."""
        await self._answer(timeout_s, None)

    async def _answer(self, timeout_s: float, number: int | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    told = _decoded(await self._receive())
                    if told.get("number") == number:  # else an answer that came too late
                        break
        except TimeoutError:
            raise SandboxError("busy", f"The sandbox's driver did not answer in {timeout_s:g} s.") from None
        except OSError as error:
            raise SandboxError("gone", f"The sandbox's driver is gone: {error.strerror}.") from error
        if "error" in told:
            code = told["error"] if told["error"] in _CODES else "failed"
            raise SandboxError(code, str(told.get("message"))[:2000])

    async def _receive(self) -> bytes:
        while True:
            try:
                body, extra, _, _ = self._socket.recvmsg(_MOST, socket.CMSG_SPACE(_CREDENTIALS.size))
                break
            except BlockingIOError:
                await _readable(self._socket.fileno())
        for level, kind, payload in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and not self.pid and body:
                self.pid = _CREDENTIALS.unpack(payload)[0]
                self._pidfd = os.pidfd_open(self.pid)
        return body

    async def ended(self) -> int | None:
        """Returns when the process has ended: its exit status, negative for a signal, None where that isn't known."""
        if self._pidfd < 0:
            return None
        pidfd = os.dup(self._pidfd)
        try:
            await _readable(pidfd)
            for _ in range(_REAPED_SOON):
                if (status := kernel.exit_status(pidfd)) is not None:
                    return status
                await asyncio.sleep(0.001)
            return None
        finally:
            os.close(pidfd)

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


def _decoded(body: bytes) -> dict[str, Any]:
    if not body:
        raise SandboxError("start_failed", "The process ended before it was ready.")
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise SandboxError("failed", "The sandbox's driver said something that is no answer.")
    return told


async def _readable(descriptor: int) -> None:
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
