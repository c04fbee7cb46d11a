"""The supervisor's children: start them as some user, wait for them, find those that lost their parent.

Invariants: every wait also watches the gateway (end of file on stdin, or another parent process) and reaps
whatever ended; a child gets a signal from the kernel when the supervisor dies. Knows nothing of PostgreSQL
but the name of its program. Standard library only, one thread.
"""

import contextlib
import os
import select
import signal
from typing import Final

from megamcp.postgres import identity as identities

_ENVIRONMENT: Final = {"LC_ALL": "C", "TZ": "UTC", "PATH": "/usr/bin:/bin"}
_STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RESET: Final = (*_STOPS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ)  # what Python or we changed


class StopRequested(Exception):
    """The gateway is gone or asked for an end."""


class Processes:
    """The one poll loop. `ended` maps a reaped child's pid to its exit code, or minus its signal.

    It's about the children since the last `spawn`: pids come round again.
    """

    def __init__(self, parent: int, folder: str) -> None:
        self.parent = parent
        self.folder = folder
        self.ended: dict[int, int] = {}
        self.stopping = False
        self.wake_read, wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(wake_write, False)
        self.poll = select.poll()
        self.poll.register(0, select.POLLIN | select.POLLHUP)
        self.poll.register(self.wake_read, select.POLLIN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the poll
        for number in _STOPS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.stopping = True

    def pause(self, seconds: float) -> None:
        """Wait, at most this long, until a child ends or the gateway is gone."""
        for descriptor, _ in self.poll.poll(seconds * 1000):
            if descriptor == self.wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_read, 4096)
            elif descriptor == 0 and not os.read(0, 4096):
                self.poll.unregister(0)
                self.stopping = True
        if os.getppid() != self.parent:  # a forked copy of the gateway may keep the pipe open
            self.stopping = True
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                self.ended[pid] = os.waitstatus_to_exitcode(status)

    def pause_or_stop(self, seconds: float) -> None:
        """`pause`, but raises `StopRequested` when it's time to go."""
        self.pause(seconds)
        if self.stopping:
            raise StopRequested

    def spawn(self, arguments: list[str], way: identities.Identity, output: int, death_signal: int) -> int:
        """Start a program as `way`; the kernel sends it `death_signal` when this process ends."""
        supervisor = os.getpid()
        self.ended.clear()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _RESET)  # our handler mustn't eat the child's signal
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return pid
        try:
            for number in _RESET:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            identities.become(way)
            identities.die_with_parent(death_signal)
            os.chdir(self.folder)
            if os.getppid() == supervisor:
                os.execve(arguments[0], arguments, _ENVIRONMENT)
        except BaseException as error:
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(126)

    def run(self, arguments: list[str], way: identities.Identity) -> tuple[int, str]:
        """Run a program to its end: exit status and output."""
        reader, writer = os.pipe()
        pid = self.spawn(arguments, way, writer, signal.SIGKILL)
        os.close(writer)
        os.set_blocking(reader, False)
        output = b""
        self.poll.register(reader, select.POLLIN)
        try:
            while True:
                ended = pid in self.ended
                with contextlib.suppress(BlockingIOError):
                    while chunk := os.read(reader, 65536):
                        output += chunk
                if ended:
                    return self.ended.pop(pid), output.decode(errors="replace")
                self.pause_or_stop(1.0)
        except StopRequested:
            os.kill(pid, signal.SIGKILL)
            raise
        finally:
            self.poll.unregister(reader)
            os.close(reader)

    def orphans(self, cluster: str) -> list[int]:
        """The live PostgreSQL processes of this cluster, where /proc shows them."""
        if not os.path.isdir("/proc/self"):
            return []
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and self.serves(int(name), cluster)]

    def serves(self, pid: int, cluster: str) -> bool:
        """Is `pid` a live PostgreSQL process of this cluster? Where there's no /proc: is it alive?

        One that we may not look into counts when it's our child or the cluster's lock file names it.
        """
        if pid in self.ended:
            return False
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
        except OSError:
            return not os.path.isdir("/proc/self") and _exists(pid)
        state, parent = rest.split()[:2]
        if name != b"postgres" or state in {b"Z", b"X"}:
            return False
        if int(parent) == os.getpid():
            return True
        try:
            return os.path.samestat(os.stat(f"/proc/{pid}/cwd"), os.stat(cluster))
        except PermissionError:
            return lock_file(cluster)[:1] == [str(pid)]
        except OSError:
            return False


def lock_file(cluster: str) -> list[str]:
    """The lines of postmaster.pid; the first is the pid, the eighth the status. Empty when there's none."""
    try:
        with open(os.path.join(cluster, "postmaster.pid"), encoding="utf-8", errors="replace") as file:
            return [line.strip() for line in file.read().splitlines()]
    except OSError:
        return []


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
