"""The embedded PostgreSQL as the gateway sees it: start, stop, a DSN, and news of restarts.

    async with EmbeddedPostgres(Path("data/postgres")) as postgres:
        await asyncpg.connect(postgres.dsn)

`data_dir` is PostgreSQL's alone (`layout.py` says what's in it); one process at a time may have it. All the
watching is done by `supervise.py`, a child process; this module starts it, starts another when that one is
killed, and follows its reports. The DSN stays the same from `start` to `stop`, whatever is restarted
meanwhile; connections don't survive a restart, and making new ones is the pool's business. Bound to the event
loop that called `start`.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from megamcp import errors
from megamcp.postgres import layout

_log = logging.getLogger(__name__)

_CLAIM_PATIENCE: Final = 0.5  # seconds; a gateway that was just killed holds its lock while its memory goes
_STOP_PATIENCE: Final = 60.0  # seconds; the supervisor itself uses force after 10
_GIVE_UP_AFTER: Final = 3  # supervisors that died before PostgreSQL ran
_LARGE_MEMORY: Final = 8 << 30  # bytes of a machine that can spare more for PostgreSQL
_FAILURES: Final[Mapping[str, type[errors.MegaMCPError]]] = {
    "data_folder_in_use": errors.Conflict,
    "data_folder_foreign": errors.Unprocessable,
}


class EmbeddedPostgres:
    """A PostgreSQL 18 of the gateway's own, reached over a unix socket.

    `settings` are PostgreSQL's own (`{"work_mem": "16MB"}`) and replace the defaults, except for those that
    say where it listens. `start_timeout` is in seconds and has to leave room for crash recovery.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        max_connections: int = 200,
        settings: Mapping[str, object] | None = None,
        start_timeout: float = 300.0,
    ) -> None:
        self.data_dir = Path(data_dir)
        self.start_timeout = start_timeout
        self._settings = _settings(max_connections, settings or {})
        self._claim: layout.Claim | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stop_asked = asyncio.Event()
        self._changed = asyncio.Condition()
        self._failure: errors.MegaMCPError | None = None
        self._postmaster_pid: int | None = None
        self._generation = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # -- what callers ask --------------------------------------------------------------------------

    @property
    def dsn(self) -> str:
        """DSN of the superuser and the database `postgres`. It holds the password: don't log it."""
        return self.dsn_for()

    def dsn_for(self, database: str = "postgres", *, user: str | None = None, password: str = "") -> str:
        """DSN of another database, or of another role with its password."""
        claim = self._claimed()
        if user is None:
            user, password = layout.SUPERUSER, claim.password
        return claim.dsn(database, user, password)

    @property
    def postmaster_pid(self) -> int | None:
        """Pid of the running postmaster; None while it's down."""
        return self._postmaster_pid

    @property
    def supervisor_pid(self) -> int | None:
        """Pid of the process that watches the postmaster."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def generation(self) -> int:
        """How often a postmaster has become ready since `start`: 1 until the first restart."""
        return self._generation

    async def ready(self, *, after: int = 0, timeout: float = 60.0) -> int:
        """Wait until PostgreSQL takes connections and `generation` is above `after`; returns the generation.

        `ready(after=n)` so waits for the restart that follows generation n. Raises `DeadlineExceeded`, or the
        reason why PostgreSQL can't run.
        """

        def settled() -> bool:
            up = self._postmaster_pid is not None and self._generation > after
            return up or self._failure is not None or self._stop_asked.is_set()

        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(settled)
        except TimeoutError:
            raise errors.DeadlineExceeded(
                f"The embedded PostgreSQL in {self.data_dir} isn't ready after {timeout:g} s.",
                code="postgres_not_ready",
                hint="postgres.log in the data folder says what it does; recovery after a crash takes time.",
            ) from None
        if self._failure is not None:
            raise self._failure
        if self._stop_asked.is_set():
            raise errors.Unavailable("The embedded PostgreSQL was stopped.", code="postgres_stopped")
        return self._generation

    # -- start and stop ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Claim the folder, make the cluster if there's none, run it. Returns when connections are accepted.

        Raises what `layout.claim` raises, `Unavailable` with the reason when PostgreSQL can't run
        (`postgres_needs_a_user`, `initdb_failed`, `postgres_start_failed`, `no_space`, …), or
        `DeadlineExceeded`.
        """
        if self._claim is not None:
            raise errors.Conflict(f"PostgreSQL in {self.data_dir} was started already.", code="already_started")
        programs = layout.binaries()
        self._claim = await self._claim_folder()
        self._stop_asked.clear()
        self._failure, self._generation = None, 0
        self._watcher = asyncio.create_task(self._watch(programs), name="embedded-postgres")
        try:
            await self.ready(timeout=self.start_timeout)
        except BaseException:
            await self.stop()
            raise

    async def _claim_folder(self) -> layout.Claim:
        deadline = time.monotonic() + _CLAIM_PATIENCE
        while True:
            try:
                return layout.claim(self.data_dir)
            except errors.Conflict as conflict:
                if time.monotonic() > deadline or conflict.extra["pid"] == os.getpid():
                    raise
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Fast shutdown: open transactions are rolled back, connections closed. No-op when not started."""
        watcher, claim = self._watcher, self._claim
        if watcher is None or claim is None:
            return
        self._stop_asked.set()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(watcher), _STOP_PATIENCE)
        except TimeoutError:
            if self._process is not None:
                self._process.kill()  # the kernel ends the postmaster
            await watcher
        finally:
            if self._claim is claim:  # not for the second of two concurrent stops
                claim.release()
                self._claim = self._watcher = None

    # -- the supervisor ----------------------------------------------------------------------------

    async def _watch(self, programs: Path) -> None:
        """Keep a supervisor running until `stop`; give up when PostgreSQL never ran."""
        delay, deaths = 0.05, 0
        while not self._stop_asked.is_set():
            generation = self._generation
            status = await self._supervise(programs)
            if self._stop_asked.is_set() or (self._failure is not None and self._generation == 0):
                break
            delay = 0.05 if self._generation > generation else min(delay * 2, 5.0)
            deaths += 1
            if self._generation == 0 and deaths >= _GIVE_UP_AFTER:
                message = f"The supervisor of PostgreSQL ends with status {status} before PostgreSQL runs."
                await self._update(failure=errors.Unavailable(message, code="postgres_start_failed"))
                break
            _log.warning("the supervisor of PostgreSQL ended with status %s; starting another", status)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_asked.wait(), delay)
        await self._update()

    async def _supervise(self, programs: Path) -> int:
        """Run one supervisor to its end and follow its reports. Returns its exit status."""
        source = Path(__file__).parents[2]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-S", "-P", "-m", "megamcp.postgres.supervise"),  # without site-packages: a faster start
            self._plan(programs),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**_kept_environment(), "PYTHONPATH": str(source)},
            start_new_session=True,  # Ctrl-C in a terminal is for the gateway, which then stops us in order
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        if self._stop_asked.is_set():
            process.stdin.close()
        try:
            async for line in process.stdout:
                await self._on_report(json.loads(line))
            return await process.wait()
        finally:
            process.stdin.close()
            await self._update(pid=None)

    def _plan(self, programs: Path) -> str:
        claim = self._claimed()
        plan = {
            "folder": str(claim.folder),
            "binaries": str(programs),
            "socket_folder": str(claim.socket_folder),
            "socket_is_temporary": claim.socket_is_temporary,
            "settings": {**self._settings, "unix_socket_directories": str(claim.socket_folder)},
            "superuser": layout.SUPERUSER,
            "create": claim.is_new and self._generation == 0,
            "parent": os.getpid(),
        }
        return json.dumps(plan)

    async def _on_report(self, report: dict[str, Any]) -> None:
        match report["event"]:
            case "ready":
                self._generation += 1
                _log.info("PostgreSQL is ready: pid %s after %s s", report["pid"], report["seconds"])
                await self._update(pid=report["pid"])
            case "down":
                _log.warning("PostgreSQL ended with status %s and is started again", report["status"])
                await self._update(pid=None)
            case "failed":
                kind = _FAILURES.get(report["code"], errors.Unavailable)
                failure = kind(report["message"], code=report["code"], hint=report["hint"])
                if self._generation == 0:
                    await self._update(failure=failure)
                else:  # it ran before: keep trying, the cause (a full disk) may go away
                    _log.error("PostgreSQL doesn't come back: %s", failure)

    async def _update(self, *, pid: int | None = None, failure: errors.MegaMCPError | None = None) -> None:
        async with self._changed:
            self._postmaster_pid = pid
            self._failure = failure or self._failure
            self._changed.notify_all()

    def _claimed(self) -> layout.Claim:
        if self._claim is None:
            raise errors.Unavailable("The embedded PostgreSQL isn't started.", code="postgres_stopped")
        return self._claim


def _kept_environment() -> dict[str, str]:
    """What a Python may need to find its own libraries; nothing else of ours is the supervisor's business."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ}


def _settings(max_connections: int, overrides: Mapping[str, object]) -> dict[str, str]:
    """PostgreSQL's settings: made for small machines, durable, many short transactions on many partitions."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    defaults: dict[str, object] = {
        "shared_buffers": "256MB" if total >= _LARGE_MEMORY else "128MB",
        "maintenance_work_mem": "64MB",
        "max_connections": max_connections,
        "max_locks_per_transaction": 256,  # every partition and index that a statement touches takes one
        "fsync": "on",
        "synchronous_commit": "on",
        "autovacuum": "on",
        "jit": "off",  # compiling costs more than our short statements
        "wal_level": "minimal",  # nothing replicates from here; loading an environment writes half as much
        "max_wal_senders": 0,
        "log_line_prefix": "%m [%p] %q%u@%d ",
        "log_checkpoints": "off",
        "cluster_name": "megamcp",
    }
    fixed: dict[str, object] = {"listen_addresses": "", "port": 5432, "logging_collector": "off"}
    return {name: str(value) for name, value in {**defaults, **overrides, **fixed}.items()}
