"""Tool servers as supervised child processes.

A child is started when it is first needed, in a process group of its own, and lives until it is stopped, killed or
dies; the next call starts its successor, after a pause that grows while it keeps failing. It never outlives the
gateway: its stdin is a pipe that closes with us, and the kernel kills it besides. What it prints goes to the log,
and the tail of that into the error when it fails; a child that prints faster than anyone could read is made to
wait. The module speaks no MCP: what makes a child ready is said by the kind of child.
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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

from megamcp.dataplane.ports import SOCKET, ChildTarget, Limits, StdioTarget
from megamcp.errors import DeadlineExceeded, UpstreamError

log = logging.getLogger(__name__)

_LAUNCH = str(Path(__file__).with_name("_launch.py"))
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 15.0
_STABLE_S = 10.0
_TAIL_LINES = 40
_LINE_BYTES = 2000
_PRINTED_PER_S = 256 * 1024
_LAST_WORDS_S = 0.2
_OWN_VARIABLES = ("MEGAMCP_", "PROMETHEUS_MULTIPROC_DIR")
_DYING_S = 0.5
_FOLDER_PREFIX = "megamcp-sockets-"


class _Pipes(asyncio.subprocess.SubprocessStreamProtocol):
    """asyncio's own, but it tells of the process's end at once: asyncio waits for everyone who holds a pipe of it."""

    def __init__(self) -> None:
        super().__init__(limit=1 << 16, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class Printed:
    """What a server prints: to the log, and the tail of it for the error when it fails."""

    def __init__(self, name: str, secrets: tuple[str, ...] = ()) -> None:
        self._name = name
        self._secrets = secrets
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @property
    def tail(self) -> str:
        return "\n".join(self._tail)

    def clear(self) -> None:
        self._tail.clear()

    def line(self, line: bytes) -> None:
        text = line[:_LINE_BYTES].decode("utf-8", "replace").rstrip()
        for secret in self._secrets:
            text = text.replace(secret, "***")
        if text:
            self._tail.append(text)
            log.info("[%s] %s", self._name, text)

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Line by line until it ends, and no faster than anyone could read."""
        rest = b""
        pace = Pace(_PRINTED_PER_S)
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LINE_BYTES:
                lines.append(rest)
                rest = b""
            for line in lines:
                self.line(line)
            await pace.spend(len(chunk), len(lines))
        self.line(rest)


@dataclass(eq=False)
class Running:
    """One life of a child: its process and its ending. `blameless`: it did not end by a failure of its own."""

    process: asyncio.subprocess.Process
    transport: asyncio.SubprocessTransport
    exited: asyncio.Event
    since: float
    ended: asyncio.Event
    reason: str | None = None
    blameless: bool = False

    @property
    def alive(self) -> bool:
        return not self.ended.is_set()

    @property
    def stdin(self) -> asyncio.StreamWriter:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        assert self.process.stdout is not None
        return self.process.stdout

    def kill(self, reason: str, *, blameless: bool = False) -> None:
        """SIGKILL to the whole group, now."""
        if self.alive:
            self.reason = self.reason or reason
            self.blameless = self.blameless or blameless
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


class Pace:
    """Holds back a stream that says more than is worth reading."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._since = 0.0
        self._spent = 0

    async def spend(self, amount: int, lines: int = 1) -> None:
        """Waits for the next second once this one's amount is used up. Short lines cost more than their bytes."""
        now = time.monotonic()
        if now - self._since >= 1.0:
            self._since, self._spent = now, 0
        self._spent += amount + 64 * lines
        if self._spent > self._per_second:
            await asyncio.sleep(self._since + 1.0 - now)


class Child(ABC):
    """One tool server's process, over all its lives."""

    _stderr: int
    """Where its stderr goes, in the words of `asyncio.subprocess`."""

    def __init__(
        self, name: str, target: ChildTarget | StdioTarget, limits: Limits, secrets: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self._target = target
        self._limits = limits
        self._running: Running | None = None
        self._starting: asyncio.Task[Running] | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._failures = 0
        self.starts = 0
        """Lives that it has had."""
        self._not_before = 0.0
        self._closed = False
        self._printed = Printed(name, secrets)

    @abstractmethod
    def _command(self) -> tuple[str, ...]:
        """The command of the life that begins now."""

    @abstractmethod
    async def _ready(self, running: Running) -> None:
        """Returns when it can be asked something. Raises what is wrong with it; its end is watched elsewhere."""

    @abstractmethod
    def _reading(self, running: Running) -> Awaitable[object]:
        """Reads what it writes, until that ends. Begins with a life; cancelled soon after the process is gone."""

    @abstractmethod
    def _over(self, running: Running) -> None:
        """A life has ended: what belonged to it is let go."""

    @property
    def running(self) -> Running | None:
        """Its present life."""
        return self._running if self._running is not None and self._running.alive else None

    @property
    def starting(self) -> bool:
        return self._starting is not None and not self._starting.done()

    @property
    def failing(self) -> bool:
        """Whether its last lives were too short."""
        return self._failures > 1

    @property
    def tail(self) -> str:
        """The last lines that it printed."""
        return self._printed.tail

    @property
    def pid(self) -> int | None:
        return self.running.process.pid if self.running else None

    async def end(self) -> None:
        """A connection broke: if the process is dying, waits for its end, so that the next try meets its successor."""
        if (running := self.running) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DYING_S):
                    await running.ended.wait()

    async def ready(self) -> Running:
        """The running process; starts it when there is none. Raises UpstreamError, DeadlineExceeded."""
        running = self._running
        if running is not None and running.alive:
            return running
        if self._closed:
            raise self._stopped()
        starting = self._starting
        if starting is None or starting.done():
            starting = self._starting = asyncio.create_task(self._start(), name=f"start {self.name}")
            starting.add_done_callback(_retrieve)
        # Many calls wait for one start, and none of them owns it.
        await asyncio.wait({starting})
        if starting.cancelled():
            raise self._stopped()
        return starting.result()

    def _stopped(self) -> UpstreamError:
        return UpstreamError(f"Tool server {self.name!r} has been stopped.", code="tool_server_stopped")

    async def aclose(self, reason: str = "the gateway is shutting down", *, now: bool = False) -> None:
        """Closes its stdin, then terminates, then kills; or kills at once."""
        self._closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._starting
        running = self._running
        if running is not None and running.alive:
            running.reason = reason
            if running.process.stdin is not None:
                running.process.stdin.close()
            for number in (signal.SIGKILL,) if now else (None, signal.SIGTERM, signal.SIGKILL):
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
                await self._first_answer(running)
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
        self.starts += 1
        log.info("tool server %s is ready (pid %d)", self.name, running.process.pid)
        return running

    async def _spawn(self) -> Running:
        self._printed.clear()
        loop = asyncio.get_running_loop()
        try:
            transport, pipes = await loop.subprocess_exec(
                _Pipes,
                sys.executable,
                "-I",
                "-S",
                _LAUNCH,
                str(os.getpid()),
                *self._command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._stderr,
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
        process = asyncio.subprocess.Process(transport, pipes, loop)
        running = Running(process, transport, pipes.exited, time.monotonic(), asyncio.Event())
        reading = asyncio.ensure_future(self._reading(running))
        watcher = asyncio.create_task(self._watch(running, reading), name=f"watch {self.name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return running

    async def _first_answer(self, running: Running) -> None:
        """Waits for `_ready`, but no longer than the process lives."""
        ready = asyncio.ensure_future(self._ready(running))
        ended = asyncio.ensure_future(running.ended.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await ready
                return
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)
        raise UpstreamError(
            f"Tool server {self.name!r} ended while it was starting "
            f"(exit status {running.process.returncode}).\n{self.tail}".strip(),
            code="tool_server_start_failed",
            hint="See the gateway's log for what the tool server printed.",
        )

    async def _watch(self, running: Running, reading: "asyncio.Future[object]") -> None:
        """Waits until the child ends, then books the ending."""
        process = running.process
        await running.exited.wait()
        # A grandchild may hold the pipe open; the process itself is gone.
        await asyncio.wait({reading}, timeout=_LAST_WORDS_S)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        running.transport.close()
        self._over(running)
        lived = time.monotonic() - running.since
        if self._closed:
            log.info("tool server %s stopped: %s", self.name, running.reason)
        else:
            stable = lived > _STABLE_S or running.blameless
            self._failures = 1 if stable else self._failures + 1
            pause = 0.0 if stable else _FIRST_PAUSE_S * 2 ** (self._failures - 1)
            self._not_before = time.monotonic() + min(pause, _LONGEST_PAUSE_S)
            why = running.reason or f"it ended by itself (exit status {process.returncode})"
            log.warning("tool server %s is gone after %.1f s: %s", self.name, lived, why)
        running.ended.set()


class SocketChild(Child):
    """A child that serves HTTP on a unix socket; ready means that the socket accepts."""

    _stderr = asyncio.subprocess.STDOUT

    def __init__(self, name: str, target: ChildTarget, sockets: SocketFolder, limits: Limits) -> None:
        super().__init__(name, target, limits, target.secrets)
        self._sockets = sockets
        self.socket = ""
        """That of its present life."""

    def _command(self) -> tuple[str, ...]:
        self.socket = self._sockets.next()
        return tuple(part.replace(SOCKET, self.socket) for part in self._target.command)

    async def _ready(self, running: Running) -> None:
        delay = 0.01
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_unix_connection(self.socket)
                writer.close()
                return
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, 0.1)

    def _reading(self, running: Running) -> Awaitable[object]:
        assert running.process.stdout is not None
        return self._printed.read(running.process.stdout)

    def _over(self, running: Running) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.socket)


def _retrieve(task: asyncio.Task[Running]) -> None:
    """A start that failed after everyone who waited had left is no unhandled error: it was logged."""
    if not task.cancelled():
        task.exception()


def _inherited() -> dict[str, str]:
    """The gateway's environment without its own settings: they hold the database's and the API's secrets. What a server
    counts is not the gateway's either."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(_OWN_VARIABLES)}
