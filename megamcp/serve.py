"""`megamcp serve`: the embedded PostgreSQL if none is named, then one gateway process or several.

One worker runs in this process. Several are children that share the listening socket; this process starts them again
when they die, and passes on the signal to stop. What is shared between workers is in PostgreSQL.
"""

import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import SecretStr

from megamcp import measures, metrics
from megamcp.access.entrance import keys_wanted
from megamcp.app import Gateway, create_app, prepare
from megamcp.databases.clusters import OwnCluster
from megamcp.errors import Conflict, Unavailable, Unprocessable
from megamcp.http_protocol import Protocol
from megamcp.logs import configure_logging
from megamcp.peers import peer_door
from megamcp.postgres import EmbeddedPostgres
from megamcp.reload import reloading
from megamcp.sandboxed.own import OwnKeeper
from megamcp.settings import Settings, unknown_variables

log = logging.getLogger("megamcp")

DRAIN_S = 10
ENDING_S = 3
"""Of those: for calls that are ended to be recorded and answered."""
LISTEN_PATIENCE_S = 4.0
READY = "megamcp is ready at"


def serve(settings: Settings) -> None:
    """Blocks until SIGINT or SIGTERM. Raises `MegaMCPError` for what keeps the gateway from starting."""
    configure_logging(settings.log_level, settings.log_format)
    for name, meant in unknown_variables(os.environ):
        near = f"did you mean {meant}?" if meant else "docs/settings.md lists those that there are."
        log.warning("there is no setting %s, and the variable says nothing; %s", name, near)
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(settings))
    else:
        uvloop.run(_serve(settings))


def demand_key(settings: Settings) -> None:
    """Raises `Unprocessable` where strangers on the network could do what they like."""
    if settings.open_to_all or keys_wanted(settings) or settings.on_loopback:
        return
    raise Unprocessable(
        f"Won't listen on {settings.host} without any key: it is no loopback address.", code="key_required"
    )


async def _serve(settings: Settings) -> None:
    demand_key(settings)
    # Taken first: a port that is in use is told at once, and nothing is left running.
    listener = listen(settings.host, settings.port, "--port")
    if settings.relay_port:
        listen(settings.relay_host, settings.relay_port, "MEGAMCP_RELAY_PORT").close()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(listener.close)
        settings = settings.model_copy(update={"port": listener.getsockname()[1]})
        if settings.database_url is None:
            postgres = await stack.enter_async_context(
                EmbeddedPostgres(settings.data_dir / "postgres", max_connections=connections_needed(settings))
            )
            settings = settings.model_copy(update={"database_url": SecretStr(postgres.dsn)})
        if settings.workers > 1 and not settings.state_urls:
            # One worker starts its own when it needs it; several can't share a child of one of them.
            own = await stack.enter_async_context(OwnCluster(settings))
            settings = settings.model_copy(update={"state_urls": [SecretStr(own.dsn)]})
        if settings.workers > 1 and settings.sandbox_socket is None:
            try:
                keeper = await stack.enter_async_context(OwnKeeper(settings))
                settings = settings.model_copy(update={"sandbox_socket": Path(keeper.socket)})
            except Unavailable as error:  # whoever needs it is told so; the rest works
                log.warning("%s", error.message)
        assert settings.database_url is not None
        dsn = settings.database_url.get_secret_value()
        await prepare(settings, dsn)
        async with reloading(settings, dsn):
            if settings.workers == 1:
                await _run_here(settings, listener)
            else:
                counts = stack.enter_context(tempfile.TemporaryDirectory(prefix="megamcp-metrics-"))
                await _Workers(settings, listener, counts).run()


def connections_needed(settings: Settings) -> int:
    """PostgreSQL connections of all workers and their tool servers, with room for a dozen environments."""
    each = settings.control_connections + 2 + 12 * settings.tool_connections + 4 * settings.query_connections
    return max(200, settings.workers * each + 20)


def listen(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket. Raises `Conflict` when the port that this setting names is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    give_up = time.monotonic() + LISTEN_PATIENCE_S
    while True:
        try:
            listener.bind((host, port))
            break
        except OSError as error:
            # Workers of a gateway that was killed hold the port until they have drained.
            if error.errno == errno.EADDRINUSE and time.monotonic() < give_up:
                time.sleep(0.1)
                continue
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise Conflict(
                    f"Can't listen on {host}:{port}: {error.strerror}.",
                    code="port_in_use",
                    hint=f"Choose another with {setting} (0 takes a free one), or stop what listens there.",
                ) from error
            raise Unprocessable(
                f"Can't listen on {host}:{port}: {error.strerror}.",
                code="cannot_listen",
                hint="It must be an address of this machine; ports below 1024 need rights.",
            ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


def _config(settings: Settings, listener: socket.socket) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(settings),
        http=Protocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=DRAIN_S,
        backlog=2048,
    )


_started = threading.Event()
"""This process serves."""


class _Server(uvicorn.Server):
    """Says where it is ready, once; a worker says nothing."""

    announce: str | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What runs may finish. What doesn't is ended with a word to its caller, before uvicorn ends it without."""
        app = self.config.app
        assert isinstance(app, Gateway)
        ending = asyncio.get_running_loop().call_later(DRAIN_S - ENDING_S, app.stop_calls)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal; raising it again, as uvicorn does, would end the process before PostgreSQL stops."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _started.set()
        # What start-up made stays for good: no collection looks at it again. What a call makes is gone with it, so
        # young garbage may gather for longer.
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        if self.announce and not self.should_exit:
            log.info("%s %s", READY, self.announce)


async def _run_here(settings: Settings, listener: socket.socket, announce: bool = True) -> None:
    with peer_door(settings) as door:
        config = _config(settings, listener)
        config.app.peer_address = door.address  # type: ignore[union-attr]
        server = _Server(config)
        if announce:
            server.announce = address(listener)
        await server.serve(sockets=[listener, door.socket])
    if not server.started:
        raise Unprocessable("The gateway could not start; the log says why.", code="start_failed")


def address(listener: socket.socket) -> str:
    """The listener's base URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Workers:
    """Children on one listening socket."""

    def __init__(self, settings: Settings, listener: socket.socket, counts: str) -> None:
        self._settings = settings
        self._listener = listener
        self._counts = counts
        """Folder of what they count."""
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopping.set)
        async with asyncio.TaskGroup() as group:
            for worker_number in range(self._settings.workers):
                group.create_task(self._keep(worker_number))
            log.info("%s %s (%d workers)", READY, address(self._listener), self._settings.workers)

    async def _keep(self, number: int) -> None:
        pause = 0.1
        while not self._stopping.is_set():
            started = time.monotonic()
            child = await self._start()
            ended = asyncio.create_task(child.wait())
            stop = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({ended, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            metrics.gone(child.pid, self._counts)
            if self._stopping.is_set():
                await self._end(child, ended)
                return
            pause = 0.1 if time.monotonic() - started > 10 else min(pause * 2, 5)
            log.warning("worker %d ended with status %s; starting another", number, child.returncode)
            await asyncio.sleep(pause)

    async def _start(self) -> asyncio.subprocess.Process:
        assert self._settings.database_url is not None
        descriptor = self._listener.fileno()
        environment = {
            **os.environ,
            **_as_environment(self._settings),
            measures.FOLDER: self._counts,
            "MEGAMCP_DATABASE_URL": self._settings.database_url.get_secret_value(),
        }
        # The pipe on stdin tells the worker when this process is gone, however it went.
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megamcp.serve",
            str(descriptor),
            stdin=asyncio.subprocess.PIPE,
            env=environment,
            pass_fds=(descriptor,),
            cwd=Path.cwd(),
        )

    async def _end(self, child: asyncio.subprocess.Process, ended: "asyncio.Task[Any]") -> None:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        try:
            await asyncio.wait_for(ended, DRAIN_S + 5)
        except TimeoutError:
            child.kill()


def _as_environment(settings: Settings) -> dict[str, str]:
    document = settings.model_dump(mode="json", exclude={"database_url", "api_key", "token_key"}, exclude_none=True)
    environment = {f"MEGAMCP_{name.upper()}": _text(value) for name, value in document.items()}
    environment["MEGAMCP_STATE_URLS"] = json.dumps([url.get_secret_value() for url in settings.state_urls])
    if settings.token_key:
        environment["MEGAMCP_TOKEN_KEY"] = settings.token_key.get_secret_value()
    if settings.api_key:
        environment["MEGAMCP_API_KEY"] = settings.api_key.get_secret_value()
    return environment


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def worker() -> None:
    """A child of `_Workers`: serves on the socket that it inherited, until told or until its parent is gone."""
    settings = Settings()
    configure_logging(settings.log_level, settings.log_format)
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.setblocking(False)

    async def run() -> None:
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        await _run_here(settings, listener, announce=False)

    import uvloop

    uvloop.run(run())


def _stop_with_parent() -> None:
    """The pipe on standard input ends when the parent does. A worker that lived on would keep the port."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    if _started.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(DRAIN_S + 2)
    os._exit(1)


if __name__ == "__main__":
    worker()
