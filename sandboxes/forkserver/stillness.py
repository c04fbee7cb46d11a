"""Whether a process can be forked so that both sides go on as if they were the only one, and what keeps it from that.

A fork takes one thread along and shares what is open. So nothing else may be alive: no thread, no socket, no pipe, no
event loop, no memory that is shared. Files of the sandbox's own folders are fine: the other side opens them again in
its own folders, at the same place.
"""

import contextlib
import fcntl
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Sequence

_SQLITE = b"SQLite format 3\0"
_ENDING_ROUNDS, _ENDING_S = 100, 0.0002
_KINDS = {
    "eventpoll": "an event loop",
    "eventfd": "an event counter",
    "timerfd": "a timer",
    "signalfd": "a signal queue",
    "inotify": "a watch of files",
    "pidfd": "a handle of a process",
    "io_uring": "a ring of asynchronous calls",
}
_NAMES = {socket.AF_UNIX: "unix", socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6", socket.AF_NETLINK: "netlink"}


class NotAlone(Exception):
    """Something is alive that would not survive a fork, or would be shared by both sides of it. Says what."""


class OpenFile:
    """A file that is open. One of the sandbox's folders (`own`) must be, in another sandbox's process, that one's; of
    any other, each process needs a place to read at that is its own."""

    def __init__(self, number: int, path: str, *, own: bool) -> None:
        self._number, self._path, self._own = number, path, own
        self._flags = fcntl.fcntl(number, fcntl.F_GETFL) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
        if own:
            self._demand_path()
        self._inheritable = os.get_inheritable(number)
        self._offset = 0 if self._flags & os.O_DIRECTORY else os.lseek(number, 0, os.SEEK_CUR)

    def _demand_path(self) -> None:
        """That the fork finds it under its name, and may."""
        if self._path.endswith(" (deleted)"):
            raise NotAlone(f"the file {self._path} is open (descriptor {self._number}), and can't be opened again")
        writable = self._flags & os.O_ACCMODE == os.O_RDWR
        if writable and os.pread(self._number, len(_SQLITE), 0) == _SQLITE:
            # It compares inodes, and refuses to write to what isn't the file that it opened.
            raise NotAlone(f"the SQLite database {self._path} is open; close it between calls")

    def leave(self, quiet: int) -> None:
        """In an image: nothing that is the sandbox's is held. `quiet` takes the number."""
        if self._own:
            os.dup2(quiet, self._number, self._inheritable)
        else:
            self.reopen()

    def reopen(self) -> None:
        """In a new sandbox. Raises OSError."""
        fresh = os.open(self._path if self._own else f"/proc/self/fd/{self._number}", self._flags | os.O_CLOEXEC)
        if self._offset:
            os.lseek(fresh, self._offset, os.SEEK_SET)
        os.dup2(fresh, self._number, self._inheritable)
        os.close(fresh)


def alone(known: Collection[int], folders: Sequence[str], shared: Sequence[str] = ()) -> list[OpenFile]:
    """The files that are open; those of these folders are the sandbox's own, but for what lies in `shared` ones.
    `known` descriptors don't matter. Raises `NotAlone`."""

    def own(path: str) -> bool:
        return _within(path, folders) and not _within(path, shared)

    _demand_one_thread()
    files = _open_files(known, own)
    _demand_own_memory(own)
    return files


def _demand_one_thread() -> None:
    for _ in range(_ENDING_ROUNDS):
        count = len(os.listdir("/proc/self/task"))
        if count == 1:
            return
        threads = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        if threads:
            raise NotAlone(f"threads are alive besides the main one: {', '.join(threads)}")
        time.sleep(_ENDING_S)  # one that Python has joined may not have left the kernel yet
    raise NotAlone(f"threads are alive besides the main one: {count - 1} that Python did not start")


def _open_files(known: Collection[int], own: Callable[[str], bool]) -> list[OpenFile]:
    found: list[OpenFile] = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number in known:
            continue
        try:
            mode = os.fstat(number).st_mode
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the listing's own
        if stat.S_ISSOCK(mode):
            raise NotAlone(f"{_socket(number)} is open (descriptor {number})")
        if target.startswith("anon_inode:"):
            kind = target[len("anon_inode:") :].strip("[]")
            raise NotAlone(f"{_KINDS.get(kind, kind)} is open (descriptor {number})")
        if stat.S_ISFIFO(mode):
            raise NotAlone(f"a pipe is open (descriptor {number})")
        if target.startswith("/memfd:"):
            raise NotAlone(f"memory that can be shared is open (descriptor {number}, {target})")
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            found.append(OpenFile(number, target, own=own(target)))
    return found


def _socket(number: int) -> str:
    """Which, in words."""
    try:
        found = socket.socket(fileno=os.dup(number))
    except OSError:
        return "a socket"
    with found:
        words = f"a socket ({_NAMES.get(found.family, found.family)}"
        for label, address in (("at", found.getsockname), ("to", found.getpeername)):
            with contextlib.suppress(OSError):
                if told := address():
                    words += f", {label} {told[0]}:{told[1]}" if isinstance(told, tuple) else f", {label} {told!r}"
        return words + ")"


def _demand_own_memory(own: Callable[[str], bool]) -> None:
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            path = fields[5].strip() if len(fields) > 5 else ""
            if fields[1][1] == "w" and fields[1][3] == "s":
                raise NotAlone(f"memory is mapped that others may share ({path or 'without a name'})")
            if own(path):
                raise NotAlone(f"the file {path} is mapped into memory")


def _within(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)
