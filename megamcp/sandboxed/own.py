"""A keeper of sandboxes that belongs to one gateway: found running, or started; started again when it dies.

One process of the gateway has it; others are told its socket, which stays the same. It outlives a gateway that is
killed or stopped for a short while, so that the next one on the same folder finds the rollouts' sandboxes as they
were: what holds it is an open connection, and without any it ends by itself. One that has nothing is ended at once by
who stops.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from megamcp.errors import Unavailable
from megamcp.settings import Settings
from sandboxes.client import Client
from sandboxes.types import SandboxError

log = logging.getLogger(__name__)

_START_S = 30.0
_ENDING_S = 5.0
_AGAIN_S = 1.0
_TRY_EACH_S = 0.05
_LINGER_S = 30
_TAKEN = 3
"""Exit status of a keeper whose folder another one has."""
_LONGEST_PATH = 100
_CREDENTIALS = struct.Struct("3i")


class OwnKeeper:
    """Raises `Unavailable` (`sandboxes_unavailable`) where none can be started."""

    def __init__(self, settings: Settings) -> None:
        self._state = _state_of(settings)
        self._lock = -1
        self._link: socket.socket | None = None
        self._process: _Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self.socket = ""

    async def __aenter__(self) -> Self:
        self._lock = await _locked(self._state)
        try:
            self.socket = str(socket_path(self._state))
            await self._begin()
        except BaseException:
            os.close(self._lock)
            raise
        self._watching = asyncio.create_task(self._watch(), name="watch the keeper of sandboxes")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        waits = self._link is not None and await self._holds_something()
        if waits:
            log.info("the keeper of sandboxes waits %d s for the next gateway, with all that it has", _LINGER_S)
        elif self._link is not None:
            await _end(self._link)
        elif self._process is not None and self._process.status is None:  # it was just being started
            self._process.kill()
        if self._link is not None:
            self._link.close()
        if self._process is not None and not waits:
            await self._process.wait()
        os.close(self._lock)
        with contextlib.suppress(OSError):
            if not waits and not Path(self.socket).is_relative_to(self._state):
                os.rmdir(os.path.dirname(self.socket))

    async def _holds_something(self) -> bool:
        """Whether there is anything that would be lost with it."""
        client = Client(self.socket)
        try:
            async with asyncio.timeout(_ENDING_S):
                there = await client.inventory()
            return bool(there.sandboxes or there.images)
        except (SandboxError, TimeoutError):
            return False
        finally:
            await client.aclose()

    async def _begin(self) -> None:
        """Connects to the keeper that runs, or to one that is started for it."""
        give_up = time.monotonic() + _START_S
        starting = None
        while time.monotonic() < give_up:
            self._link = _connected(self.socket)
            if self._link is not None:
                if starting is None:
                    log.info("a keeper of sandboxes runs already; what it has is taken over")
                return
            if starting is None or starting.status == _TAKEN:  # by one that is just ending
                starting = self._process = self._start()
            elif starting.status is not None:
                break
            await asyncio.sleep(_TRY_EACH_S)
        if starting is not None and starting.status is None:
            starting.kill()
            await starting.wait()
        raise Unavailable(
            "The keeper of sandboxes did not start; the log says why.",
            code="sandboxes_unavailable",
            hint=f"MEGAMCP_SANDBOX_DIR names another folder than {self._state}.",
        )

    def _start(self) -> "_Process":
        options = ("--linger", str(_LINGER_S), "--socket", self.socket, "--state", str(self._state))
        environ = {name: value for name, value in os.environ.items() if not name.upper().startswith("MEGAMCP_")}
        return _Process((sys.executable, "-m", "sandboxes", *options), environ)

    async def _watch(self) -> None:
        while True:
            assert self._link is not None
            await _hung_up(self._link)
            self._link.close()
            self._link = None
            log.error("the keeper of sandboxes has ended, and every sandbox with it; starting another")
            while self._link is None:
                try:
                    await self._begin()
                except Unavailable as error:
                    log.error("%s", error.message)
                    await asyncio.sleep(_AGAIN_S)


def is_own(settings: Settings) -> bool:
    """Whether the keeper is the gateway's own: this process's, or that of the process that started this worker."""
    return settings.sandbox_socket is None or settings.sandbox_socket == socket_path(_state_of(settings))


def _state_of(settings: Settings) -> Path:
    return (settings.sandbox_dir or settings.data_dir / "sandboxes").absolute()


class _Process:
    """A child in a session of its own that outlives us. asyncio kills its children when it ends."""

    def __init__(self, command: tuple[str, ...], environ: Mapping[str, str]) -> None:
        quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
        self._pid = os.posix_spawn(command[0], command, environ, file_actions=quiet, setsid=True)
        self._status: int | None = None

    @property
    def status(self) -> int | None:
        """Its exit status, if it has ended."""
        return self._status if self._status is not None else self._reap(os.WNOHANG)

    def _reap(self, options: int) -> int | None:
        pid, status = os.waitpid(self._pid, options)
        if pid:
            self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    async def wait(self) -> None:
        if self.status is None:
            await asyncio.to_thread(self._reap, 0)


async def _locked(state: Path) -> int:
    """A descriptor that keeps other gateways from the folder: they have other rows, and would remove what ours name."""
    give_up = time.monotonic() + _ENDING_S
    descriptor = -1
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(state / "gateway", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(_TRY_EACH_S)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        used = isinstance(error, BlockingIOError)
        raise Unavailable(
            f"The folder {state} can't be used for sandboxes: {'another gateway has it' if used else error.strerror}.",
            code="sandboxes_unavailable",
            hint="MEGAMCP_SANDBOX_DIR names another one; gateways with one database share a keeper by"
            " MEGAMCP_SANDBOX_SOCKET.",
        ) from error


def socket_path(state: Path) -> Path:
    """In the state folder; or, where that has too long a name for a socket, in a folder that only we may use."""
    path = state / "keeper.sock"
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        return path
    short = Path(tempfile.gettempdir())
    if len(os.fsencode(short)) > _LONGEST_PATH - 60:
        short = Path("/tmp")
    folder = short / f"megamcp-{os.geteuid()}-{hashlib.sha256(os.fsencode(state)).hexdigest()[:16]}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    told = folder.lstat()
    if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.geteuid() or told.st_mode & 0o077:
        raise Unavailable(
            f"The keeper of sandboxes needs the folder {folder}, and it is not ours alone.",
            code="sandboxes_unavailable",
            hint="Remove it, or name a shorter path in MEGAMCP_SANDBOX_DIR.",
        )
    return folder / path.name


def _connected(path: str) -> socket.socket | None:
    """A connection that says nothing: as long as it is open the keeper stays."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    link.setblocking(False)
    try:
        link.connect(path)
    except OSError:
        link.close()
        return None
    return link


async def _hung_up(link: socket.socket) -> None:
    while True:
        try:
            if not await asyncio.get_running_loop().sock_recv(link, 1 << 12):
                return
        except ConnectionError:
            return


async def _end(link: socket.socket) -> None:
    """Asks whoever is at the other end to stop, and waits for its end; SIGKILL when that takes too long."""
    pid = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    try:
        process = os.pidfd_open(pid)
    except (ProcessLookupError, OSError):
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_S):
                    await ended.wait()
                return
    finally:
        loop.remove_reader(process)
        os.close(process)
