"""The process between gateway and postmaster: `python -m megamcp.postgres.supervise PLAN` (PLAN is JSON).

Invariants:
- Its stdin is a pipe from the gateway. End of file, or a new parent process, means the gateway is gone,
  however it went: a fast shutdown of the postmaster follows, then exit. The kernel ends the postmaster when
  the supervisor dies.
- Before a postmaster is started, the previous one of the folder and its orphaned backends have been ended;
  stale lock files have been removed. A lock, held for life, keeps two supervisors from doing that to each
  other.
- A postmaster that dies is started again, with a growing pause; only one that never ran is given up.
- A cluster appears by rename, complete and synced, or not at all.

Reports to the gateway on stdout, one JSON object a line: `ready`, `down`, `failed`. Standard library only,
and little of it: it has to start in milliseconds. Doesn't speak SQL and doesn't decide where things lie
(`layout.py` does).
"""

import contextlib
import errno
import fcntl
import json
import os
import signal
import sys
import time
from typing import Any, Final

from megamcp.postgres import identity as identities
from megamcp.postgres.processes import Processes, StopRequested, lock_file

LOG_LIMIT: Final = 16 << 20  # bytes, of the current file; one older file is kept
_STEP: Final = 0.01  # seconds between looks while something is awaited
_GIVE_UP_AFTER: Final = 3  # failed starts of a postmaster that was never ready
# Fast shutdown, immediate shutdown, the end; each with the seconds it gets. Immediate loses nothing that was
# committed and costs a recovery. It's needed: in 18.4 a fast shutdown that comes while PostgreSQL starts over
# after a crashed backend never ends.
_ENDING: Final = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 10.0))


class FailedError(Exception):
    """Why PostgreSQL can't run; the gateway turns `code` into one of its own errors."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


class Supervisor:
    """One data folder, one postmaster at a time. `run` returns when the gateway is gone."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.folder: str = plan["folder"]
        self.cluster = os.path.join(self.folder, "cluster")
        self.log_path = os.path.join(self.folder, "postgres.log")
        self.binaries: str = plan["binaries"]
        self.socket_folder: str = plan["socket_folder"]
        self.socket_is_temporary: bool = plan["socket_is_temporary"]
        self.settings: dict[str, str] = plan["settings"]
        self.superuser: str = plan["superuser"]
        self.create: bool = plan["create"]
        self.identity = identities.Identity(os.geteuid(), os.getegid())
        self.postmaster: int | None = None
        self.log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(self.log, 2)
        self.processes = Processes(plan["parent"], self.folder)

    def run(self) -> int:
        """Serve until the gateway is gone. Returns the exit status."""
        try:
            lock = self._lock()
            identities.adopt_orphans()
            self._end_previous()
            self._choose_identity()
            if not os.path.isdir(self.cluster):
                self._create_cluster()
            self._own(self.cluster)
            self._make_socket_folder()
            self._serve()
        except StopRequested:
            return 0
        except (FailedError, OSError) as error:
            failure = error if isinstance(error, FailedError) else _from_os_error(error)
            self._note(failure.message)
            self._emit("failed", code=failure.code, message=failure.message, hint=failure.hint)
            return 1
        finally:
            self._shut_down()
        os.close(lock)
        return 0

    def _lock(self) -> int:
        """Wait for the supervisor of a gateway that was killed to finish its shutdown."""
        descriptor = os.open(os.path.join(self.folder, "supervisor.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + sum(patience for _, patience in _ENDING) + 15
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in {errno.EACCES, errno.EAGAIN}:
                    raise
            else:
                return descriptor
            if time.monotonic() > deadline:
                raise FailedError(
                    "data_folder_in_use",
                    f"The former supervisor of {self.folder} doesn't end.",
                    "Look for a process `megamcp.postgres.supervise` of this folder and end it.",
                )
            self.processes.pause_or_stop(2 * _STEP)

    # -- starting ----------------------------------------------------------------------------------

    def _choose_identity(self) -> None:
        owner: tuple[int, int] | None = None
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(self.cluster)
            owner = status.st_uid, status.st_gid
        ways = identities.candidates(owner)
        if len(ways) == 1:
            self.identity = ways[0]
            return
        reasons: list[str] = []
        for way in ways:
            if way.becomes:
                mode = os.stat(self.folder).st_mode & 0o777
                os.chmod(self.folder, mode | 0o011)  # it must pass through; each thing inside guards itself
            status_code, output = self.processes.run([os.path.join(self.binaries, "postgres"), "-V"], way)
            if status_code == 0:
                self.identity = way
                self._note(f"PostgreSQL runs {way}")
                return
            reasons.append(f"{way}: {output.strip() or f'exit status {status_code}'}")
        raise FailedError(
            "postgres_needs_a_user",
            f"PostgreSQL refuses to run as root, and no other way worked ({'; '.join(reasons)}).",
            "Run the gateway as an unprivileged user, or put data folder and installation where every user "
            "may enter (not below /root), or allow user namespaces or CAP_SETUID, CAP_SETGID and CAP_CHOWN.",
        )

    def _create_cluster(self) -> None:
        if not self.create:
            raise FailedError(
                "cluster_missing",
                f"The database cluster in {self.folder} is gone.",
                "It was removed while the gateway ran. Restart the gateway to begin with an empty one.",
            )
        import shutil  # only here: it loads compression libraries

        for name in os.listdir(self.folder):
            if name.startswith("cluster.new-"):  # initdb was interrupted
                path = os.path.join(self.folder, name)
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        new = os.path.join(self.folder, f"cluster.new-{time.time_ns():x}")
        password_copy = f"{new}.password"  # initdb's user can't read the original when the gateway is root
        with open(os.path.join(self.folder, "password"), "rb") as file:
            password = file.read()
        os.mkdir(new, 0o700)
        self._own(new)
        with open(os.open(password_copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(password)
        self._own(password_copy)
        arguments = [
            os.path.join(self.binaries, "initdb"),
            f"--pgdata={new}",
            f"--username={self.superuser}",
            f"--pwfile={password_copy}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale-provider=builtin",
            "--builtin-locale=C.UTF-8",
            "--locale=C",
            "--no-instructions",
        ]
        status, output = self.processes.run(arguments, self.identity)
        os.unlink(password_copy)
        if status != 0:
            shutil.rmtree(new, ignore_errors=True)
            raise _from_output("initdb_failed", f"initdb failed with status {status}", output)
        os.rename(new, self.cluster)
        descriptor = os.open(self.folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def _make_socket_folder(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.socket_folder, 0o700)
        status = os.lstat(self.socket_folder)
        if status.st_uid not in {os.geteuid(), self.identity.uid} or status.st_mode & 0o170000 != 0o040000:
            raise FailedError(
                "data_folder_foreign",
                f"{self.socket_folder} isn't a folder of this user.",
                f"Remove it, or remove {os.path.join(self.folder, 'run.path')} to have another one chosen.",
            )
        self._own(self.socket_folder)
        os.chmod(self.socket_folder, 0o700)

    def _own(self, path: str) -> None:
        """Give a file or tree to the identity. The top goes last, so that an interrupted run is noticed."""
        uid, gid = self.identity.uid, self.identity.gid
        if os.geteuid() != 0 or os.stat(path).st_uid == uid:
            return
        for parent, folders, files in os.walk(path):
            for name in (*folders, *files):
                os.chown(os.path.join(parent, name), uid, gid, follow_symlinks=False)
        os.chown(path, uid, gid)

    def _serve(self) -> None:
        """Keep a postmaster running until the gateway is gone."""
        arguments = [os.path.join(self.binaries, "postgres"), "-D", self.cluster]
        for name, value in self.settings.items():
            arguments += ["-c", f"{name}={value}"]
        failures, ever_ready, delay = 0, False, 0.05
        while True:
            self._remove_stale_files()
            log_start, began = os.fstat(self.log).st_size, time.monotonic()
            self.postmaster = self.processes.spawn(arguments, self.identity, self.log, signal.SIGINT)
            ready = self._wait_ready(self.postmaster)
            if ready:
                ever_ready = True
                self._emit("ready", pid=self.postmaster, seconds=round(time.monotonic() - began, 4))
            while self.postmaster not in self.processes.ended:
                self.processes.pause_or_stop(1.0)
                self._bound_log()
            status = self.processes.ended.pop(self.postmaster)
            self.postmaster = None
            self._emit("down", status=status)
            self._note(f"the postmaster ended with status {status}")
            self._end_stragglers()
            failures += 1
            if not ever_ready and failures >= _GIVE_UP_AFTER:
                raise _from_output("postgres_start_failed", "PostgreSQL doesn't start", self._log_since(log_start))
            delay = 0.05 if time.monotonic() - began > 30 else min(delay * 2, 5.0)
            until = time.monotonic() + delay
            while (left := until - time.monotonic()) > 0:
                self.processes.pause_or_stop(left)

    def _wait_ready(self, pid: int) -> bool:
        """True when the postmaster says in its lock file that it takes connections; False when it ended."""
        while pid not in self.processes.ended:
            lines = lock_file(self.cluster)
            if len(lines) > 7 and lines[0] == str(pid) and lines[7] == "ready":
                return True
            self.processes.pause_or_stop(_STEP)
        return False

    # -- ending ------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        if self.postmaster is not None:
            self._end(self.postmaster)
            self._end_stragglers()
            self.postmaster = None
        if self.socket_is_temporary:
            with contextlib.suppress(OSError):
                os.rmdir(self.socket_folder)

    def _end_previous(self) -> None:
        """End a postmaster, and backends without one, that a former life of this folder left behind."""
        lines = lock_file(self.cluster)
        if lines and lines[0].isdigit():
            pid = int(lines[0])
            if self.processes.serves(pid, self.cluster):
                self._note(f"ending a postmaster that was left running: {pid}")
                self._end(pid)
        self._end_stragglers()

    def _end(self, pid: int) -> None:
        for number, patience in _ENDING:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                self.processes.pause(_STEP)
                if pid in self.processes.ended or (
                    pid != self.postmaster and not self.processes.serves(pid, self.cluster)
                ):
                    return
        raise FailedError(
            "postgres_stuck", f"The postmaster {pid} doesn't end.", "It hangs in the kernel: check its disk."
        )

    def _end_stragglers(self) -> None:
        """End the backends of a postmaster that is no more: one that computes wouldn't notice for long."""
        for number, patience in _ENDING[1:]:
            deadline = time.monotonic() + patience
            pids = self.processes.orphans(self.cluster)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            while pids and time.monotonic() < deadline:
                self.processes.pause(_STEP)
                pids = self.processes.orphans(self.cluster)
            if not pids:
                return

    def _remove_stale_files(self) -> None:
        """Remove what a killed postmaster leaves: PostgreSQL refuses when the pid in it is in use again."""
        for path in (
            os.path.join(self.cluster, "postmaster.pid"),
            os.path.join(self.socket_folder, ".s.PGSQL.5432"),
            os.path.join(self.socket_folder, ".s.PGSQL.5432.lock"),
        ):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    # -- files --------------------------------------------------------------------------------------

    def _log_since(self, offset: int) -> str:
        with open(self.log_path, "rb") as file:
            file.seek(offset)
            return file.read(65536).decode(errors="replace")

    def _bound_log(self) -> None:
        """Keep the log below its limit. Lines written during the copy may be lost; the server never waits."""
        if os.fstat(self.log).st_size > LOG_LIMIT:
            with open(self.log_path, "rb") as source, open(f"{self.log_path}.1", "wb") as target:
                while chunk := source.read(1 << 20):
                    target.write(chunk)
            os.ftruncate(self.log, 0)

    def _note(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        os.write(self.log, f"{stamp} UTC [{os.getpid()}] supervisor: {text}\n".encode())

    def _emit(self, event: str, **fields: object) -> None:
        with contextlib.suppress(OSError):  # the gateway is gone: end of file on stdin says so too
            os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def _from_os_error(error: OSError) -> FailedError:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return FailedError("no_space", f"The disk is full{where}.", "Free some space; PostgreSQL needs about 100 MB.")
    return FailedError(
        "postgres_start_failed",
        f"PostgreSQL can't be started: {error.strerror or error}{where}.",
        "Check the owner and the permissions of the data folder.",
    )


def _from_output(code: str, what: str, output: str) -> FailedError:
    lines = [line for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in ("FATAL", "PANIC", "error:", "HINT", "ERROR"))]
    reason = " | ".join((telling or lines)[-4:]) or "it said nothing"
    if "No space left on device" in output:
        return FailedError("no_space", f"{what}: the disk is full ({reason}).", "Free some space and start again.")
    if "could not look up effective user" in output:
        return FailedError(code, f"{what}: {reason}", "Run under a user that /etc/passwd knows.")
    return FailedError(code, f"{what}: {reason}", "The whole story is in postgres.log in the data folder.")


def main() -> int:
    """Entry point. The plan is the only argument."""
    return Supervisor(json.loads(sys.argv[1])).run()


if __name__ == "__main__":
    sys.exit(main())
