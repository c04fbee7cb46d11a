"""A tool server as a process: import the entry, listen, and end when asked or when the parent is gone.

As a gateway's child (`python -m megamcp.sdk ENTRY --socket PATH`) it ends when its standard input reaches
EOF: the parent holds the other end, and the kernel closes it however the parent dies. A watching thread, not
the event loop, waits for it, so that a tool that blocks the loop doesn't keep an orphan alive. Alone
(`megamcp tool-server`) standard input means nothing.

SIGTERM and EOF finish running calls for up to `GRACE_S` seconds; a call cut off by that is rolled back by
PostgreSQL. The socket is 0600: whoever may connect may call. It restarts nothing: the gateway supervises.
"""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import socket as sockets
import stat
import sys
import threading
from collections.abc import Iterator

import uvicorn

from megamcp.sdk.server import Server
from megamcp.sdk.signature import ToolSignatureError

log = logging.getLogger(__name__)

GRACE_S = 5
DEFAULT_POOL = 8
_PR_SET_PDEATHSIG = 1


class EntryError(Exception):
    """The entry can't be imported or is no tool server."""


def load_entry(entry: str) -> Server:
    """`package.module:attribute` → its Server, or the one that a plain class makes. Raises EntryError with what was
    wrong."""
    module_name, _, attribute = entry.partition(":")
    if not module_name or not attribute:
        raise EntryError(f"{entry!r} is not of the form package.module:attribute")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        log.debug("import of %s failed", module_name, exc_info=True)
        raise EntryError(f"can't import {module_name}: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        able = [
            name
            for name, value in vars(module).items()
            if isinstance(value, Server) or (isinstance(value, type) and value.__module__ == module_name)
        ]
        raise EntryError(f"{module_name} has no {attribute}; it has: {', '.join(able) or 'no server and no class'}")
    found = getattr(module, attribute)
    if isinstance(found, type):
        try:
            return Server.of(found)
        except ToolSignatureError as error:
            raise EntryError(f"{entry}: {error}") from error
    if not isinstance(found, Server):
        raise EntryError(f"{entry} is of type {type(found).__name__}, not a megamcp.sdk.Server or a class")
    return found


def serve_tool_server(
    entry: str | Server,
    *,
    socket: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    child: bool = False,
    dsn: str | None = None,
    pool_size: int | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT (as a `child` also until standard input ends).

    `dsn` and `pool_size` default to MEGAMCP_TOOL_DSN and MEGAMCP_TOOL_POOL. Raises EntryError, OSError.
    """
    server = entry if isinstance(entry, Server) else load_entry(entry)
    # Taken out of the environment, so that neither a tool nor a program that it starts shows the password by chance.
    dsn = dsn or os.environ.pop("MEGAMCP_TOOL_DSN", None) or None
    pool = pool_size or _pool_from_environment()
    app = server.asgi_app(dsn, pool_size=pool, alone=not child)
    listener = _listen_unix(socket) if socket else sockets.create_server((host, port))
    try:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            lifespan="on",
            # Longer than any client keeps an idle connection, so that no request races its close.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE_S,
        )
        log.info("tool server %s: %d tools at %s", server.name, len(server.tools), socket or listener.getsockname())
        # Documents are many small objects that stay: a collection for each 700 of them doubles the time to load one.
        gc.set_threshold(20_000, 20, 50)
        running = _Uvicorn(config)
        if child:
            _die_with_parent()
            threading.Thread(target=_watch_stdin, args=(running,), name="parent watch", daemon=True).start()
        running.run(sockets=[listener])
    finally:
        listener.close()
        if socket:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(socket)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal again after a clean shutdown, so a parent would see a death instead of an
        # exit.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        yield

    def stop(self) -> None:
        self.should_exit = True


def _watch_stdin(server: _Uvicorn) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    log.info("the parent is gone")
    server.stop()
    # The loop may be blocked by a tool; this thread is not.
    threading.Event().wait(GRACE_S + 1)
    os._exit(1)


def _die_with_parent() -> None:
    # Against a tool that holds the interpreter itself. Linux only; elsewhere standard input must do. The
    # kernel means the parent's *thread*, so a parent starts its children from its main thread.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _listen_unix(path: str) -> sockets.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise FileExistsError(f"{path} is there and is no socket")
        os.unlink(path)
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    mask = os.umask(0o177)  # the socket is born private; a chmod after bind would leave a gap
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"can't listen at {path}: {error.strerror or error}") from error
    finally:
        os.umask(mask)
    listener.listen(1024)
    return listener


def _pool_from_environment() -> int:
    text = os.environ.get("MEGAMCP_TOOL_POOL", "")
    if not text:
        return DEFAULT_POOL
    if not text.isdigit() or int(text) < 1:
        raise EntryError(f"MEGAMCP_TOOL_POOL must be a positive number, not {text!r}")
    return int(text)


async def _program(command: list[str], load: str, dump: str) -> Server:
    from megamcp.sdk.programs import ProgramFailed, program_server

    try:
        return await program_server(command, load, dump)
    except ProgramFailed as error:
        raise EntryError(f"{error} {error.hint or ''}") from error


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megamcp.sdk", description="Serve a tool server.")
    parser.add_argument(
        "entry", nargs="?", help="package.module:attribute of a megamcp.sdk.Server, or of a plain class"
    )
    parser.add_argument("--socket", required=True, help="path of the unix socket to listen on")
    parser.add_argument("--load", help="of a program instead of an entry: its tool that takes the document")
    parser.add_argument("--dump", help="its tool that gives the document")
    parser.add_argument("--program", nargs=argparse.REMAINDER, help="the program and its arguments; the last option")
    options = parser.parse_args(arguments)
    if bool(options.entry) == bool(options.program):
        parser.error("give an entry or a program")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        dsn = os.environ.pop("MEGAMCP_TOOL_DSN", None)  # before a program is started that would see it
        entry = options.entry or asyncio.run(_program(options.program, options.load, options.dump))
        serve_tool_server(entry, socket=options.socket, child=True, dsn=dsn)
    except (EntryError, OSError) as error:
        log.error("%s", error)
        return 2
    return 0
