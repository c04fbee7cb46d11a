"""`python -m sandboxes.forkserver.driver ENTRY ARGUMENT`: a server that is warmed once and then forked.

A *driver thread* (the main one) talks to the keeper over a control socket and forks; it keeps the capabilities that it
has inside its user namespace, and runs no code of the server once that is loaded. The server's code runs in a *tool
thread* (see `toolthread`). Rights of threads are their own, so a fork from the driver thread starts free, and
confinement does not pile up over generations. The driver thread listens while a tool runs: to the keeper, which is told
that the sandbox is busy, and to the client, which may have a call interrupted.

Three kinds of process run this: the *zygote* (warm, not confined to any folder), *images* (frozen, forked off a sandbox
and waiting) and *sandboxes* (with a folder and pipes of their own). The first two only fork.

`ENTRY` (`package.module:attribute`) is called with `ARGUMENT` and gives the handler, see `Handler`.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from sandboxes.confine import kernel
from sandboxes.forkserver import stillness
from sandboxes.forkserver.stillness import NotAlone, OpenFile
from sandboxes.forkserver.toolthread import ToolThread, confine

CONTROL = 3
READABLE = ["/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys"]
MOST_MESSAGE = 1 << 16
_AHEAD = 1 << 20
"""Bytes that are read while a tool runs."""
_LAST_STEP_MS = 100
_LARGE = 2 << 20


class Handler(Protocol):
    """A server behind lines. It may have `interrupt(line) -> bool` too: told, in another thread, of a line that came
    while one is handled; true if it needs no handling any more."""

    def handle(self, line: bytes, send: Callable[[bytes], None]) -> None:
        """Answers one line of the client with lines; given the next when it returned. Raises nothing: what goes wrong
        is an answer too."""
        ...


class Busy(Exception):
    """A call is under way."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What a sandbox has of its own."""

    folder: str
    network: bool
    stdin: int
    stdout: int
    ended: int


class Driver:
    """One process. `run` is left at its end."""

    def __init__(self, control: socket.socket, handler: Handler, readable: list[str], files: list[OpenFile]) -> None:
        self._control = control
        self._handler = handler
        self._interrupt: Callable[[bytes], bool] = getattr(handler, "interrupt", lambda line: False)
        self._readable = [*READABLE, *readable]
        self._children: set[int] = set()
        self._place: _Place | None = None
        self._tools: ToolThread | None = None
        self._busy = False
        self._held = False
        """Its files are being copied: no call begins."""
        self._buffer = bytearray()
        self._lines: deque[bytes] = deque()
        # What a sandbox that is forked off has open, and where it stands.
        self._files = files
        self._cwd: str | None = None

    def run(self) -> None:
        """Serves the keeper, and in a sandbox its client, until either is gone."""
        while self._turn():
            self._begin()

    def _turn(self) -> bool:
        """Waits for what comes first; False when one of the two is gone."""
        place = self._place
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        if place is not None:
            waiting.register(place.ended, select.POLLIN)
            if len(self._buffer) + sum(map(len, self._lines)) < _AHEAD or not self._busy:
                waiting.register(place.stdin, select.POLLIN)
        ready = [number for number, _ in waiting.poll()]
        self._reap()
        if place is not None and self._ended(place):
            self._busy = False
        if self._control.fileno() in ready:
            return self._obey()
        return place is None or place.stdin not in ready or self._read(place)

    # -- the keeper -----------------------------------------------------------------------------------------------

    def _obey(self) -> bool:
        body, descriptors, _, _ = socket.recv_fds(self._control, MOST_MESSAGE, 8)
        for descriptor in descriptors:  # recv_fds has flags for it, and doesn't use them
            os.set_inheritable(descriptor, False)
        if not body:
            return False
        order = json.loads(body)
        answer: dict[str, Any] = {"number": order["number"]}
        try:
            if order["op"] == "resume":
                self._held = False
                return True
            if self._fork(order, descriptors):
                return True  # in the child, which has a control of its own now
        except NotAlone as error:
            answer |= {"error": "not_forkable", "message": f"The server can't be forked: {error}."}
        except Busy:
            answer |= {"error": "busy", "message": "A call is under way in the sandbox."}
        except OSError as error:
            answer |= {"error": "failed", "message": str(error)}
        finally:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._control.send(json.dumps(answer).encode())
        return True

    def _fork(self, order: dict[str, Any], descriptors: list[int]) -> bool:
        """True in the child. Zygotes and images change nothing after they were made: what kept them from a fork would
        have been found then."""
        if (place := self._place) is not None:
            if self._busy and not self._lines:  # its answer may be out already, and only the thread's last step isn't
                waiting = select.poll()
                waiting.register(place.ended, select.POLLIN)
                waiting.poll(_LAST_STEP_MS)
                self._busy = not self._ended(place)
            if self._busy or self._lines or self._buffer:
                raise Busy
            self._end_tools()
            known = {0, 1, 2, self._control.fileno(), place.stdin, place.stdout, place.ended, *descriptors}
            self._files = stillness.alone(known, (place.folder, "/tmp"), self._readable)
            with contextlib.suppress(OSError):
                self._cwd = os.getcwd()
        child = os.fork()
        if child:
            self._children.add(child)
            self._held = self._place is not None
            return False
        self._children.clear()
        try:
            self._control.close()
            self._control = socket.socket(fileno=descriptors.pop(0))
            if order["op"] == "freeze":
                self._become_image()
            else:
                self._become_sandbox(order, descriptors)
            # The kernel tells the keeper which process said this.
            self._control.send(json.dumps({"ready": True}).encode())
            if self._place is not None:
                self._tools = self._thread(self._place)  # while the keeper hands the pipes over
        except BaseException as error:
            with contextlib.suppress(Exception):
                told = {"error": "failed", "message": f"{type(error).__name__}: {error}"}
                self._control.send(json.dumps(told).encode())
            os._exit(1)
        return True

    def _become_image(self) -> None:
        assert self._place is not None
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever was forked off it ends without it
        for descriptor in (self._place.stdin, self._place.stdout, self._place.ended):
            os.close(descriptor)
        self._place = None
        quiet = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        for number in range(3):
            os.dup2(quiet, number)
        for file in self._files:
            file.leave(quiet)
        os.close(quiet)
        # Back to where the zygote is: no mount of the sandbox is held, and whoever is forked off starts from there.
        kernel.enter_mounts("/proc/1/ns/mnt")
        os.chdir("/")
        gc.freeze()  # what is here is not looked through again, page by page, in each fork

    def _become_sandbox(self, order: dict[str, Any], descriptors: list[int]) -> None:
        folder = order["workdir"]
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("overlay", "/.room", "overlay", flags, order["overlay"])
        # Its user owns the layers of all: Landlock lets modes and attributes be changed, a mount to read doesn't.
        kernel.mount(None, "/.layers", None, kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | flags)
        hidden = [path for path in self._readable if path.startswith("/tmp/")]  # by the sandbox's own /tmp
        for path in hidden:
            if any(path.startswith(f"{other}/") for other in hidden):
                continue  # is a mount in that one, and comes with it
            os.makedirs(f"/.room{path}", exist_ok=True)
            kernel.mount(path, f"/.room{path}", None, kernel.MS_BIND | kernel.MS_REC)
        for inside, outside in (("tmp", "/tmp"), ("work", folder)):
            kernel.mount(f"/.room/{inside}", outside, None, kernel.MS_BIND | kernel.MS_REC)
        os.chdir(folder)
        if self._cwd is not None:
            with contextlib.suppress(OSError):
                os.chdir(self._cwd)
        # What a tool prints, or what it starts, is no message of ours.
        stdin, stdout = (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10) for number in descriptors[:2])
        quiet = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        for number, source in enumerate((quiet, descriptors[2], descriptors[2])):
            os.dup2(source, number)
        os.close(quiet)
        for file in self._files:
            file.reopen()
        self._place = _Place(
            folder, bool(order["network"]), stdin, stdout, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        )
        for name, value in order["limits"].items():
            kind = getattr(resource, f"RLIMIT_{name}")
            most = resource.getrlimit(kind)[1]
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(kind, (value, value))
        _fresh_entropy()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _reap(self) -> None:
        for pid in list(self._children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._children.discard(pid)

    # -- the client -----------------------------------------------------------------------------------------------

    def _read(self, place: _Place) -> bool:
        chunk = os.read(place.stdin, 1 << 16)
        if not chunk:
            return False
        searched = len(self._buffer)
        self._buffer += chunk
        while (end := self._buffer.find(b"\n", searched)) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            searched = 0
            if line.strip() and not ((self._busy or self._lines) and self._interrupt(line)):
                self._lines.append(line)
        return True

    @staticmethod
    def _ended(place: _Place) -> bool:
        """Whether a call has ended since this was asked last."""
        try:
            return os.eventfd_read(place.ended) > 0
        except BlockingIOError:
            return False

    def _begin(self) -> None:
        """Hands the next line to the tool thread."""
        if (place := self._place) is None or not self._lines or self._busy or self._held:
            return
        if self._tools is None:
            self._tools = self._thread(place)
        self._busy = True
        self._tools.give(self._lines.popleft())

    def _thread(self, place: _Place) -> ToolThread:
        def confined() -> None:
            confine(self._readable, [place.folder, "/tmp"], network=place.network)

        def send(line: bytes) -> None:
            _write(place.stdout, line)

        handle = self._handler.handle
        return ToolThread(lambda line: handle(line, send), confined, place.ended)

    def _end_tools(self) -> None:
        if self._tools is not None:
            self._tools.join()
            self._tools = None


def _fresh_entropy() -> None:
    """What two forks must not share. The operating system's is its own; `random` sees to itself at each fork."""
    if (numbers := sys.modules.get("numpy.random")) is not None:
        numbers.seed()
    if (ssl := sys.modules.get("ssl")) is not None:
        ssl.RAND_add(os.urandom(32), 32.0)


def _large_pages() -> None:
    """A fork copies one entry for each page: a large one is as much work as a small one, and is still shared, since the
    kernel takes it apart where somebody writes."""
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    for place, rights, _, _, inode, *name in lines:
        start, end = (int(word, 16) for word in place.split("-"))
        start, end = -(-start // _LARGE) * _LARGE, end // _LARGE * _LARGE
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]\n"]) and start < end:
            with contextlib.suppress(OSError):  # a kernel before 6.1, or without large pages
                kernel.collapse(start, end)


def _write(descriptor: int, line: bytes) -> None:
    data = memoryview(line.replace(b"\n", b" ") + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> int:
    """The exit status."""
    entry, argument, *readable = sys.argv[1:]
    os.set_inheritable(CONTROL, False)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # its memory is nobody's, also not of what its tools start
    control = socket.socket(fileno=CONTROL)
    try:
        module, _, attribute = entry.partition(":")
        handler = getattr(importlib.import_module(module), attribute)(argument)
        files = stillness.alone({0, 1, 2, CONTROL}, ())
    except BaseException as error:
        kind, words = (
            ("not_forkable", "The server can't be forked: ")
            if isinstance(error, NotAlone)
            else ("start_failed", f"{type(error).__name__}: ")
        )
        control.send(json.dumps({"error": kind, "message": f"{words}{error}"}).encode())
        return 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    _large_pages()
    control.send(json.dumps({"ready": True}).encode())
    Driver(control, handler, readable, files).run()
    # No code of the server's runs at the end: it would have this thread's rights.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
