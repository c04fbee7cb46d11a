"""`python -m sandboxes.forkserver.driver ENTRY ARGUMENT`: a server that is warmed once and then forked.

A *driver thread* (the main one) talks to the keeper over descriptor 3 and forks; it keeps the capabilities that it has
inside its user namespace, and runs no code of the server once that is loaded. The server's code runs in a *tool
thread*, which has given up every capability and is confined by Landlock for good; so is all that it starts. Rights of
threads are their own, so a fork from the driver thread starts free, and confinement does not pile up over generations.
At a fork the tool thread has ended and nothing else is alive: no thread, no socket, no event loop.

Three kinds of process run this: the *zygote* (warm, not confined to any folder), *images* (frozen, forked off a sandbox
and waiting) and *sandboxes* (with a folder and pipes of their own). The first two only fork.

`ENTRY` (`package.module:attribute`) is called with `ARGUMENT` and gives the handler: `handle(line, send)` answers one
line of the client by calling `send` with lines; it is given the next line only after it returned.
"""

import contextlib
import fcntl
import importlib
import json
import os
import random
import select
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sandboxes.confine import kernel

CONTROL = 3
READABLE = ["/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys"]
MOST_MESSAGE = 1 << 16


class Handler(Protocol):
    """A server behind lines."""

    def handle(self, line: bytes, send: Callable[[bytes], None]) -> None:
        """Raises nothing: what goes wrong is an answer too."""
        ...


class NotAlone(Exception):
    """Something is alive that would not survive a fork, or would be shared by both sides of it."""


class Driver:
    """One process. `run` is left only by a child, or at the end."""

    def __init__(self, control: socket.socket, handler: Handler, readable: list[str]) -> None:
        self.control = control
        self.handler = handler
        self.readable = [*READABLE, *readable]
        self.folder: str | None = None
        self.network = False
        self.images: set[int] = set()
        self.buffer = bytearray()

    def run(self) -> None:
        """Serves the keeper, and in a sandbox its client, until either is gone."""
        while True:
            waiting: list[Any] = [self.control] if self.folder is None else [self.control, 0]
            if b"\n" in self.buffer:
                ready: list[Any] = select.select([self.control], [], [], 0)[0] or [0]
            else:
                ready = select.select(waiting, [], [])[0]
            self._reap()
            if self.control in ready:
                if not self._obey():
                    return
            elif not self._serve():
                return

    # -- the keeper -----------------------------------------------------------------------------------------------

    def _obey(self) -> bool:
        body, descriptors, _, _ = socket.recv_fds(self.control, MOST_MESSAGE, 8)
        if not body:
            return False
        order = json.loads(body)
        try:
            if self._fork(order, descriptors):
                return True  # in the child, which has a control of its own now
            answer: dict[str, Any] = {"ok": True}
        except NotAlone as error:
            answer = {"error": "not_forkable", "message": str(error)}
        except OSError as error:
            answer = {"error": "failed", "message": str(error)}
        finally:
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self.control.send(json.dumps(answer).encode())
        return True

    def _fork(self, order: dict[str, Any], descriptors: list[int]) -> bool:
        """True in the child."""
        files = self.alone(descriptors)
        child = os.fork()
        if child:
            self.images.add(child)
            return False
        self.images.clear()
        try:
            self.control.close()
            self.control = socket.socket(fileno=descriptors.pop(0))
            if order["op"] == "freeze":
                self._become_image()
            else:
                self._become_sandbox(order, descriptors, files)
            # The kernel tells the keeper which process said this.
            self.control.send(json.dumps({"ready": True}).encode())
        except BaseException as error:
            with contextlib.suppress(Exception):
                self.control.send(
                    json.dumps({"error": "failed", "message": f"{type(error).__name__}: {error}"}).encode()
                )
            os._exit(1)
        return True

    def _become_image(self) -> None:
        self.folder = None
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever was forked off it ends without it
        quiet = os.open("/dev/null", os.O_RDWR)
        for number in range(3):
            os.dup2(quiet, number)
        os.close(quiet)

    def _become_sandbox(self, order: dict[str, Any], descriptors: list[int], files: list["_Open"]) -> None:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        with contextlib.suppress(OSError):  # what the process that this was forked from has there
            kernel.unmount("/.room")
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("overlay", "/.room", "overlay", flags, order["overlay"])
        for inside, outside in (("work", order["workdir"]), ("tmp", "/tmp")):
            with contextlib.suppress(OSError):
                kernel.unmount(outside)
            kernel.mount(f"/.room/{inside}", outside, None, kernel.MS_BIND)
        os.chdir(order["workdir"])
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        for file in files:
            file.reopen()
        self.folder, self.network = order["workdir"], bool(order["network"])
        self.buffer.clear()
        random.seed()
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _reap(self) -> None:
        for pid in list(self.images):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self.images.discard(pid)

    # -- the client -----------------------------------------------------------------------------------------------

    def _serve(self) -> bool:
        end = self.buffer.find(b"\n")
        if end < 0:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return False
            self.buffer += chunk
            return True
        line = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        if line.strip():
            thread = threading.Thread(target=self._handle, args=(line,), name="tool")
            thread.start()
            thread.join()
        return True

    def _handle(self, line: bytes) -> None:
        """In the tool thread."""
        assert self.folder is not None
        try:
            kernel.drop_capabilities()
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
            kernel.landlock(self.readable, [self.folder, "/tmp", *devices], network=self.network)
        except OSError as error:
            sys.stderr.write(f"this thread can't be confined: {error}\n")
            os._exit(1)
        self.handler.handle(line, _send)

    # -- before a fork --------------------------------------------------------------------------------------------

    def alone(self, descriptors: Sequence[int] = ()) -> list["_Open"]:
        """The files that a child has to open again; `descriptors` are of the fork itself. Raises `NotAlone`."""
        threads = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        count = len(os.listdir("/proc/self/task"))
        if count > 1:
            raise NotAlone(f"{count - 1} threads are alive besides the main one: {', '.join(threads) or 'not Python'}")
        found: list[_Open] = []
        known = {0, 1, 2, self.control.fileno(), *descriptors}
        for name in os.listdir("/proc/self/fd"):
            number = int(name)
            try:
                told = os.fstat(number)
                target = os.readlink(f"/proc/self/fd/{number}")
            except OSError:
                continue  # the listing's own
            if number in known:
                continue
            if stat.S_ISSOCK(told.st_mode):
                raise NotAlone(f"a socket is open (descriptor {number})")
            if target.startswith("anon_inode:"):
                raise NotAlone(f"an event loop or the like is open (descriptor {number}, {target[11:]})")
            if stat.S_ISFIFO(told.st_mode):
                raise NotAlone(f"a pipe is open (descriptor {number})")
            if self.folder is not None and stat.S_ISREG(told.st_mode) and _within(target, self.folder, "/tmp"):
                found.append(_Open.of(number, target))
        if self.folder is not None:
            with open("/proc/self/maps") as maps:
                for line in maps:
                    path = line.split(maxsplit=5)[5].strip() if line.count(" ") > 5 and "/" in line else ""
                    if _within(path, self.folder, "/tmp"):
                        raise NotAlone(f"{path} is mapped into memory")
        return found


class _Open:
    """A file of the working folder that is open: in another folder's process it must be that folder's."""

    def __init__(self, number: int, path: str, flags: int, offset: int) -> None:
        self.number, self.path, self.flags, self.offset = number, path, flags, offset

    @classmethod
    def of(cls, number: int, path: str) -> "_Open":
        if path.endswith(" (deleted)"):
            raise NotAlone(f"{path} is open, and can't be opened again")
        flags = fcntl.fcntl(number, fcntl.F_GETFL) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
        return cls(number, path, flags, os.lseek(number, 0, os.SEEK_CUR))

    def reopen(self) -> None:
        fresh = os.open(self.path, self.flags)
        inheritable = os.get_inheritable(self.number)
        os.lseek(fresh, self.offset, os.SEEK_SET)
        os.dup2(fresh, self.number, inheritable)
        os.close(fresh)


def _within(path: str, *folders: str) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _send(line: bytes) -> None:
    data = memoryview(line.replace(b"\n", b" ") + b"\n")
    while data:
        data = data[os.write(1, data) :]


def main() -> int:
    """The exit status."""
    entry, argument, *readable = sys.argv[1:]
    control = socket.socket(fileno=CONTROL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # while the server is loaded
    try:
        module, _, attribute = entry.partition(":")
        handler = getattr(importlib.import_module(module), attribute)(argument)
        driver = Driver(control, handler, readable)
        driver.alone()
    except BaseException as error:
        kind = "not_forkable" if isinstance(error, NotAlone) else "start_failed"
        control.send(json.dumps({"error": kind, "message": f"{type(error).__name__}: {error}"}).encode())
        return 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.send(json.dumps({"ready": True}).encode())
    driver.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
