"""`python -m sandboxes --socket PATH --state FOLDER`: the keeper as a process.

It says `ready` on stdout when it takes requests. SIGTERM ends every sandbox and then the keeper. With `--linger` it
ends too when no client was connected for so long: whoever it was for is gone, and nobody has come in its place.
"""

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from pathlib import Path

from sandboxes.confine import kernel
from sandboxes.criu import Criu
from sandboxes.docker import Containers
from sandboxes.forkserver.runtime import WARM_S, ForkServer
from sandboxes.keeper import Keeper
from sandboxes.runtime import Died, Folders, Runtime
from sandboxes.types import Kind

log = logging.getLogger("sandboxes")

TAKEN = 3
"""The exit status where another keeper has the state folder."""


def runtimes(folders: Folders, died: Died, warm_s: float) -> dict[Kind, Runtime]:
    """All that this version has."""
    return {
        Kind.FORK: ForkServer(folders, died, warm_s),
        Kind.CRIU: Criu(Folders(folders.state / "criu"), died),
        Kind.DOCKER: Containers(folders, died),
    }


async def keep(listener: socket.socket, state: Path, *, linger_s: float | None, warm_s: float) -> None:
    """Until SIGTERM or SIGINT, or until nobody needs it any more."""
    loop = asyncio.get_running_loop()
    keeper: Keeper
    keeper = Keeper(_name(state), runtimes(Folders(state), lambda exited: keeper.died(exited), warm_s))
    await keeper.recover()
    serving = asyncio.create_task(keeper.serve(listener))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    if linger_s is not None:
        watching = asyncio.create_task(keeper.deserted(linger_s))
        watching.add_done_callback(lambda _: serving.cancel())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _name(state: Path) -> str:
    """Of the state folder, whoever keeps it."""
    file = state / "name"
    if not file.exists():
        fresh = state / "name.new"
        fresh.write_text(f"{socket.gethostname()}-{secrets.token_hex(4)}")
        fresh.rename(file)
    return file.read_text()


def listen(path: Path) -> socket.socket:
    """A listening socket that only its owner may use. Raises OSError."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.listen(128)
    return listener


def apart() -> None:
    """What this process mounts is seen by nobody else and ends with it. Without root that takes a user namespace;
    where there is none to be had, runtimes say what they can't do."""
    try:
        if os.geteuid() == 0:
            kernel.unshare(kernel.CLONE_NEWNS)
        else:
            kernel.become_root_of_oneself()
        kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_SLAVE)
    except OSError as error:
        log.warning("no namespace of mounts of its own: %s", error)


def main() -> int:
    """The exit status: 0 when it was asked to end, 2 or `TAKEN` for what keeps it from starting."""
    parser = argparse.ArgumentParser(prog="python -m sandboxes", description="Keep the sandboxes of this host.")
    parser.add_argument("--socket", type=Path, required=True, help="path of the unix socket to listen on")
    parser.add_argument("--state", type=Path, required=True, help="folder for layers and images, of this keeper alone")
    parser.add_argument("--group", type=int, help="number of a group whose members may connect too")
    parser.add_argument("--linger", type=float, help="seconds without any client after which it ends")
    parser.add_argument(
        "--warm", type=float, default=WARM_S, help="seconds for which a Python server waits that has no sandbox"
    )
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        options.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(options.state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.error("another keeper has %s", options.state)
            return TAKEN
        for name in ("templates", "sandboxes", "images"):
            (options.state / name).mkdir(exist_ok=True, mode=0o711)
        listener = listen(options.socket)
        if options.group is not None:
            os.chown(options.socket, -1, options.group)
            os.chmod(options.socket, 0o660)
    except OSError as error:
        log.error("%s", error)
        return 2
    apart()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a sandbox takes five
    try:
        asyncio.run(keep(listener, options.state, linger_s=options.linger, warm_s=options.warm))
    finally:
        options.socket.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
