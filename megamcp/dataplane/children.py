"""Tool servers as supervised child processes.

A child is started when it is first needed, in a process group of its own, and lives until it is stopped, killed or
dies; the next call starts its successor, after a pause that grows while it keeps failing. It never outlives the
gateway: its stdin is a pipe that closes with us, and the kernel kills it besides. What it prints goes to the log,
and the tail of that into the error when it fails. The module speaks no MCP: ready means that the socket accepts.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from megamcp.dataplane.ports import SOCKET, ChildTarget, Limits
from megamcp.errors import DeadlineExceeded, UpstreamError

log = logging.getLogger(__name__)

_LAUNCH = str(Path(__file__).with_name("_launch.py"))
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 15.0
_STABLE_S = 10.0
_TAIL_LINES = 40
_LINE_BYTES = 2000
_FOLDER_PREFIX = "megamcp-sockets-"


@dataclass(eq=False)
class Running:
    """One life of a child: its process, its socket, its ending."""

    process: asyncio.subprocess.Process
    socket: str
    since: float
    ended: asyncio.Event
    reason: str | None = None

    @property
    def alive(self) -> bool:
        return not self.ended.is_set()

    def kill(self, reason: str) -> None:
        """SIGKILL to the whole group, now."""
        if self.alive:
            self.reason = self.reason or reason
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


_LONGEST_PARENT = 72


class SocketFolder:
    """A private, short-named folder for the children's sockets (a path may have 107 bytes).

    A gateway that was killed leaves its folder behind; the next one removes those that nobody holds a lock on.
    """

    def __init__(self) -> None:
        self._count = 0
        while True:
            usual = tempfile.gettempdir()
            self.path = tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=usual if len(usual) <= _LONGEST_PARENT else "/tmp")
            # Another gateway that starts now may take the folder for a stale one before it is locked.
            with contextlib.suppress(OSError):
                self._lock = self._locked(self.path)
                if os.path.isdir(self.path):
                    break
        for stale in Path(self.path).parent.glob(f"{_FOLDER_PREFIX}*"):
            with contextlib.suppress(OSError):
                os.close(self._locked(str(stale)))
                shutil.rmtree(stale, ignore_errors=True)

    @staticmethod
    def _locked(folder: str) -> int:
        """A descriptor of the folder that holds its lock. Raises OSError when someone else has it."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PermissionError(folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def next(self) -> str:
        self._count += 1
        return os.path.join(self.path, f"{self._count}.sock")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


class Child:
    """One tool server's process, over all its lives."""

    def __init__(self, name: str, target: ChildTarget, sockets: SocketFolder, limits: Limits) -> None:
        self.name = name
        self._target = target
        self._sockets = sockets
        self._limits = limits
        self._running: Running | None = None
        self._starting: asyncio.Task[Running] | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._not_before = 0.0
        self._closed = False
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @property
    def tail(self) -> str:
        """The last lines that it printed."""
        return "\n".join(self._tail)

    @property
    def pid(self) -> int | None:
        return self._running.process.pid if self._running and self._running.alive else None

    async def ready(self) -> Running:
        """The running process; starts it when there is none. Raises UpstreamError, DeadlineExceeded."""
        running = self._running
        if running is not None and running.alive:
            return running
        if self._closed:
            raise UpstreamError(f"Tool server {self.name!r} has been stopped.", code="tool_server_stopped")
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start(), name=f"start {self.name}")
            self._starting.add_done_callback(_retrieve)
        # Many calls wait for one start, and none of them owns it.
        return await asyncio.shield(self._starting)

    async def aclose(self) -> None:
        """Closes its stdin, then terminates, then kills."""
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._starting
        running = self._running
        if running is not None and running.alive:
            running.reason = "the gateway is shutting down"
            if running.process.stdin is not None:
                running.process.stdin.close()
            for number in (None, signal.SIGTERM, signal.SIGKILL):
                if number is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(running.process.pid, number)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limits.grace_s):
                        await running.ended.wait()
                        break
        if self._watchers:
            await asyncio.gather(*self._watchers, return_exceptions=True)

    async def _start(self) -> Running:
        pause = self._not_before - time.monotonic()
        if pause > 1.0:
            raise UpstreamError(
                f"Tool server {self.name!r} keeps failing; the next try is in {pause:.0f} s.\n{self.tail}".strip(),
                code="tool_server_unavailable",
                hint="See the gateway's log for what the tool server printed.",
                retry_after=round(pause, 1),
            )
        if pause > 0:
            await asyncio.sleep(pause)
        running = await self._spawn()
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                await self._accepting(running)
        except TimeoutError:
            running.kill("it did not become ready in time")
            await running.ended.wait()
            raise DeadlineExceeded(
                f"Tool server {self.name!r} was not ready in {self._limits.start_timeout_s:g} s.\n{self.tail}".strip(),
                code="tool_server_start_timeout",
            ) from None
        except BaseException:
            running.kill("its start was given up")
            raise
        self._running = running
        log.info("tool server %s is ready (pid %d)", self.name, running.process.pid)
        return running

    async def _spawn(self) -> Running:
        socket = self._sockets.next()
        self._tail.clear()
        command = [part.replace(SOCKET, socket) for part in self._target.command]
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                _LAUNCH,
                str(os.getpid()),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self._target.cwd,
                env={**_inherited(), **self._target.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise UpstreamError(
                f"Tool server {self.name!r} can't be started in {self._target.cwd}: {error.strerror}.",
                code="tool_server_start_failed",
                hint="Load the environment again from where its folder is now.",
            ) from error
        running = Running(process, socket, time.monotonic(), asyncio.Event())
        watcher = asyncio.create_task(self._watch(running), name=f"watch {self.name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return running

    async def _accepting(self, running: Running) -> None:
        delay = 0.01
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_unix_connection(running.socket)
                writer.close()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await running.ended.wait()
                raise UpstreamError(
                    f"Tool server {self.name!r} ended while it was starting "
                    f"(exit status {running.process.returncode}).\n{self.tail}".strip(),
                    code="tool_server_start_failed",
                    hint="See the gateway's log for what the tool server printed.",
                )
            delay = min(delay * 1.5, 0.1)

    async def _watch(self, running: Running) -> None:
        """Reads what the child prints until it ends, then books the ending."""
        process = running.process
        assert process.stdout is not None
        reading = asyncio.create_task(self._read_output(process.stdout))
        status = await process.wait()
        # A grandchild may hold the pipe open; the process itself is gone.
        await asyncio.wait({reading}, timeout=0.2)
        reading.cancel()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.unlink(running.socket)
        lived = time.monotonic() - running.since
        if self._closed:
            log.info("tool server %s stopped", self.name)
        else:
            self._failures = 1 if lived > _STABLE_S else self._failures + 1
            pause = 0.0 if lived > _STABLE_S else _FIRST_PAUSE_S * 2 ** (self._failures - 1)
            self._not_before = time.monotonic() + min(pause, _LONGEST_PAUSE_S)
            why = running.reason or f"it ended by itself (exit status {status})"
            log.warning("tool server %s is gone after %.1f s: %s", self.name, lived, why)
        running.ended.set()

    async def _read_output(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LINE_BYTES:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._printed(line)
        self._printed(rest)

    def _printed(self, line: bytes) -> None:
        text = line[:_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if text:
            self._tail.append(text)
            log.info("[%s] %s", self.name, text)


def _retrieve(task: asyncio.Task[Running]) -> None:
    """A start that failed after everyone who waited had left is no unhandled error: it was logged."""
    if not task.cancelled():
        task.exception()


def _inherited() -> dict[str, str]:
    """The gateway's environment without its own settings: they hold the database's and the API's secrets."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("MEGAMCP_")}
