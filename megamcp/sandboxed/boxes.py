"""A rollout's sandboxes: made when they are first needed, opened, lost, moved back, given up.

Invariants:
- a rollout has at most one sandbox per server; its row is there before it is and after it was removed;
- a sandbox stands at an image and a place in the journal: if the server answered a call after that place, what the
  sandbox knows is nowhere else; if it didn't, it can be made again and nobody notices;
- a sandbox that ended with something in it is never replaced silently: its rollout is told until it goes back.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

import megamcp
from megamcp.dataplane.ports import Opened, Spoken
from megamcp.dataplane.protocol import About
from megamcp.definitions import Runtime
from megamcp.environments import Environments, LoadedEnvironment, LoadedServer
from megamcp.errors import Conflict, DeadlineExceeded, Gone, MegaMCPError, Unavailable, Unprocessable
from megamcp.failpoints import failpoint
from megamcp.sandboxed import journal as sql
from megamcp.sandboxed.host import Host, as_ours, translated
from megamcp.sandboxed.lost import box_lost, image_lost
from megamcp.store import Store
from megamcp.targets import variables
from sandboxes.client import Client
from sandboxes.types import Exited, Kind, Limits, Pipes, SandboxError, Spec

log = logging.getLogger(__name__)

_MADE_ELSEWHERE_S = 0.01
_WAIT_S = 60.0
_REASONS_KEPT = 1000
_WORDS_KEPT = 2000
_PACKAGES = str(Path(megamcp.__file__).parent.parent)


class Boxes:
    """One per gateway process. `owner` is the number under which others can tell that it lives."""

    def __init__(self, store: Store, environments: Environments, host: Host, owner: Callable[[], int]) -> None:
        self._store = store
        self._environments = environments
        self._host = host
        self._owner = owner
        self._making: dict[tuple[str, str], asyncio.Task[str]] = {}
        self._started: dict[str, Pipes] = {}
        """Pipes that came with a start, until they are opened."""
        self._names: dict[str, str] = {}
        """Sandbox -> server, for what is told of it."""
        self._ends: dict[str, asyncio.Future[str]] = {}
        self._unfit: dict[tuple[int, str], set[Kind]] = {}
        """Environment and server -> runtimes that it was tried with in vain."""
        self.let_go: Callable[[str], bool] | None = None
        """Asked to close a sandbox's pipes as soon as nothing is under way in them; False: they aren't open."""
        host.on_exit, host.on_wanted, host.on_meeting = self._exited, self.leave, self._met

    # -- finding and making ---------------------------------------------------------------------------------------

    async def ready(self, rollout: str, server: LoadedServer, environment: LoadedEnvironment) -> str:
        """Name of the rollout's sandbox, which runs; made now if there is none.

        Raises `Conflict` (`state_lost`), `Gone`, `Unprocessable`, `UpstreamError`, `NoCapacity`, `Unavailable`.
        """
        key = (rollout, server.name)
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = asyncio.create_task(self._find_or_make(rollout, server, environment))
            making.add_done_callback(lambda task: self._made(key, task))
        # Many calls may wait for one start, and none of them owns it.
        return await asyncio.shield(making)

    def _made(self, key: tuple[str, str], task: "asyncio.Task[str]") -> None:
        self._making.pop(key, None)
        if not task.cancelled():
            task.exception()  # whoever waited may have left

    async def _find_or_make(self, rollout: str, server: LoadedServer, environment: LoadedEnvironment) -> str:
        keeper, host = await self._host.keeper()
        give_up = time.monotonic() + _WAIT_S
        while True:
            head = await self._store.row(sql.HEAD, rollout, server.name)
            name: str | None = None
            if head is None:
                name = await self._make(keeper, host, rollout, server, environment)
            else:
                demand_host(head, host, server.name)
                match head["status"]:
                    case "ready":
                        self._names[head["name"]] = server.name
                        return str(head["name"])
                    case "lost" if head["called"]:
                        raise await self._state_lost(rollout, server.name, head)
                    case "lost" | "parked":
                        name = await self._make_again(keeper, host, rollout, server, environment, head)
                    case "creating" if head["orphaned"] or head["owner"] == self._owner():  # this is ours to make now
                        await self._store.value(sql.CONDEMN, head["name"])
                    case _:
                        await asyncio.sleep(_MADE_ELSEWHERE_S)
            if name is not None:
                return name
            if time.monotonic() > give_up:
                raise DeadlineExceeded(f"The sandbox of rollout {rollout} is not ready yet.", code="sandbox_not_ready")

    async def _make(
        self, keeper: Client, host: str, rollout: str, server: LoadedServer, environment: LoadedEnvironment
    ) -> str | None:
        """A sandbox as the rollout stands; None when somebody else is making it, or the rollout moved meanwhile."""
        standing = await self._standing(rollout)
        origin = await self._store.row(sql.ORIGIN, rollout, server.name)
        if origin is not None:
            demand_host(origin, host, server.name)
            if origin["status"] != "ready":
                raise await image_lost(self._store.value, rollout, server.name, standing["checkpoint"])
        kind = Kind(origin["runtime"]) if origin else await self._kind(server, environment)
        name = _new_name("sb")
        planned = await self._store.value(
            sql.PLAN,
            name,
            host,
            environment.id,
            server.name,
            kind.value,
            rollout,
            origin and origin["name"],
            standing["since"],
            origin and origin["modern"],
            origin and origin["about"],
            self._owner(),
        )
        if planned is None:
            return None
        try:
            return await self._start(
                keeper, rollout, name, kind, server, environment, origin and origin["name"], standing
            )
        except Unprocessable as error:
            if origin is not None or not await self._falls_back(server, environment, kind, error):
                raise
            return None

    async def _falls_back(
        self, server: LoadedServer, environment: LoadedEnvironment, kind: Kind, error: Unprocessable
    ) -> bool:
        """Whether a server that can't be frozen as it was tried gets another runtime from now on."""
        assert server.process is not None
        if server.process.runtime is not Runtime.AUTO or error.code != "not_forkable":
            return False
        unfit = self._unfit.setdefault((environment.id, server.name), set())
        try:
            other = await self._host.kind(Runtime.AUTO, entry=server.config.entry is not None, unfit={*unfit, kind})
        except Unprocessable:
            return False
        if kind not in unfit:
            unfit.add(kind)
            log.warning(
                "tool server %s of %s runs with runtime %s from now on, since %s can't freeze it: %s",
                *(server.name, environment.full_name, other, kind, error.message),
            )
        return True

    async def unfit(
        self, server: LoadedServer, environment: LoadedEnvironment, kind: Kind, error: Unprocessable
    ) -> None:
        """A sandbox could not be frozen. Those that are made from now on get another runtime, where one works."""
        await self._falls_back(server, environment, kind, error)

    async def _make_again(
        self,
        keeper: Client,
        host: str,
        rollout: str,
        server: LoadedServer,
        environment: LoadedEnvironment,
        head: Mapping[str, Any],
    ) -> str | None:
        """One that is on disk, or that ended with nothing in it."""
        standing = await self._standing(rollout)
        name = _new_name("sb")
        async with self._store.transaction() as connection:
            await connection.execute(sql.LOCK, head["name"])
            if await connection.fetchval(sql.REPLACE, head["name"], name, self._owner(), host) is None:
                return None
        kind = Kind(head["runtime"])
        return await self._start(keeper, rollout, name, kind, server, environment, head["image"], standing)

    async def _start(
        self,
        keeper: Client,
        rollout: str,
        name: str,
        kind: Kind,
        server: LoadedServer,
        environment: LoadedEnvironment,
        image: str | None,
        standing: Mapping[str, Any],
    ) -> str | None:
        try:
            await failpoint("sandbox.planned")
            self._names[name] = server.name
            self._started[name] = await self._new(keeper, rollout, name, kind, server, environment, image, standing)
            await failpoint("sandbox.started")
            if await self._store.value(sql.READY, name, standing["epoch"]):
                return name
        except BaseException:
            with contextlib.suppress(Exception):  # else the tender does it, or the next call
                await asyncio.shield(self._store.value(sql.CONDEMN, name))
            self._forget(name)
            raise
        await self._store.value(sql.CONDEMN, name)
        await self._discard(name)
        return None

    async def _new(
        self,
        keeper: Client,
        rollout: str,
        name: str,
        kind: Kind,
        server: LoadedServer,
        environment: LoadedEnvironment,
        image: str | None,
        standing: Mapping[str, Any],
    ) -> Pipes:
        with translated(server.name):
            try:
                return await keeper.start(spec_of(server, environment, kind), name, image)
            except SandboxError as error:
                if error.code != "gone" or image is None:
                    raise
                await self._image_lost(image)
                raise await image_lost(self._store.value, rollout, server.name, standing["checkpoint"]) from error

    async def _standing(self, rollout: str) -> asyncpg.Record:
        standing = await self._store.row(sql.STANDING, rollout)
        if standing is None or standing["status"] != "open":
            raise Gone(f"Rollout {rollout} is {standing['status'] if standing else 'gone'}.", code="rollout_closed")
        return standing

    async def _kind(self, server: LoadedServer, environment: LoadedEnvironment) -> Kind:
        assert server.process is not None
        unfit = self._unfit.get((environment.id, server.name), ())
        process = server.process
        return await self._host.kind(
            process.runtime, entry=server.config.entry is not None, image=process.image, unfit=unfit
        )

    async def _state_lost(self, rollout: str, server: str, head: Mapping[str, Any]) -> Conflict:
        await self._standing(rollout)
        await self._tell_lost(head["name"])
        words = f", and with it what was called since its last checkpoint: {head['reason']}"
        return await box_lost(self._store.value, rollout, server, words)

    # -- the data plane's door ------------------------------------------------------------------------------------

    async def open(self, sandbox: str) -> Opened:
        """See `dataplane.ports.SandboxDoor`, also for the next five."""
        keeper, _ = await self._host.keeper()
        pipes = self._started.pop(sandbox, None)
        server = self._names.get(sandbox)
        if pipes is None:
            try:
                pipes = await keeper.attach(sandbox, _WAIT_S)
            except SandboxError as error:
                if error.code == "gone":
                    await self.lost(sandbox, "it is not there any more")
                raise as_ours(error, server) from error
        self._ends.setdefault(sandbox, asyncio.get_running_loop().create_future())
        try:
            row = await self._store.row(sql.SPOKEN, sandbox)
            await self._store.value(sql.USED, sandbox)
        except BaseException:
            _close(pipes)
            raise
        spoken = None
        if row is not None and row["modern"] is not None:
            spoken = Spoken(bool(row["modern"]), msgspec.json.decode(row["about"], type=About))
        return Opened(pipes.stdin, pipes.stdout, pipes.stderr, pipes.clean, spoken)

    async def spoke(self, sandbox: str, spoken: Spoken) -> None:
        await self._store.value(sql.SPOKE, sandbox, spoken.modern, msgspec.json.encode(spoken.about).decode())

    async def close(self, sandbox: str, *, clean: bool) -> None:
        self._ends.pop(sandbox, None)
        await self._detach(sandbox, clean=clean)

    async def _detach(self, sandbox: str, *, clean: bool) -> None:
        with contextlib.suppress(SandboxError, MegaMCPError):
            keeper, _ = await self._host.keeper()
            await keeper.detach(sandbox, clean=clean)

    async def kill(self, sandbox: str, reason: str) -> None:
        await self.lost(sandbox, reason)
        with contextlib.suppress(SandboxError, MegaMCPError):  # else the tender does it
            keeper, _ = await self._host.keeper()
            await keeper.remove(sandbox)

    async def obituary(self, sandbox: str) -> str | None:
        ending = self._ends.get(sandbox)
        return await asyncio.shield(ending) if ending is not None else None

    async def last_words(self, sandbox: str, words: str) -> None:
        with contextlib.suppress(MegaMCPError):
            await self._store.value(sql.LAST_WORDS, sandbox, words[-_WORDS_KEPT:].replace("\0", "\\0"))

    async def lost(self, sandbox: str, reason: str) -> None:
        """A sandbox has ended by itself. Nothing where it was given up already."""
        if server := await self._store.value(sql.LOST, sandbox, reason):
            log.warning("sandbox %s of server %s is lost: %s", sandbox, server, reason)
        await self._tell_lost(sandbox)

    async def _tell_lost(self, sandbox: str) -> None:
        async with self._store.transaction() as connection:
            rollout = await connection.fetchval(sql.LOCK_ROLLOUT_OF, sandbox)
            await connection.execute(sql.TELL_LOST, sandbox, await connection.fetchval(sql.LAST_WHOLE, rollout))

    async def _exited(self, exited: Exited) -> None:
        try:
            await self.lost(exited.sandbox, exited.reason)
        except MegaMCPError as error:
            log.warning("the end of sandbox %s could not be booked: %s", exited.sandbox, error)
        ending = self._ends.setdefault(exited.sandbox, asyncio.get_running_loop().create_future())
        if not ending.done():
            ending.set_result(exited.reason)
        while len(self._ends) > _REASONS_KEPT:
            del self._ends[next(iter(self._ends))]

    async def leave(self, sandbox: str) -> None:
        """Closes its pipes as soon as nothing is under way in them; nothing where others have them."""
        if (pipes := self._started.pop(sandbox, None)) is not None:  # nobody has opened it
            _close(pipes)
            await self.close(sandbox, clean=True)
        elif self.let_go is None or not self.let_go(sandbox):  # whoever had asked for it has left before it came
            await self._detach(sandbox, clean=False)

    async def _met(self, keeper: Client, host: str) -> None:
        """A keeper may be another than the last one: what it doesn't have is lost."""
        # The rows come first: what other processes make meanwhile is not among them.
        sandboxes = {row["name"] for row in await self._store.rows(sql.READY_HERE, host)}
        images = {row["name"] for row in await self._store.rows(sql.IMAGES_HERE, host)}
        there = await keeper.inventory()
        for name in images - set(there.images):  # first: whoever is told of a sandbox's end is told what is left
            await self._image_lost(name)
        for name in sandboxes - {info.sandbox for info in there.sandboxes}:
            await self.lost(name, "the keeper of sandboxes was started anew")

    async def _image_lost(self, name: str) -> None:
        log.warning("image %s is lost: its keeper doesn't have it any more", name)
        await self._store.value(sql.IMAGE_LOST, name)

    async def known(self) -> None:
        """Returns when rows say what the keeper has, as far as it can be met."""
        if self._host.opened:
            with contextlib.suppress(MegaMCPError):
                await self._host.keeper()

    # -- following the rollout ------------------------------------------------------------------------------------

    async def moved(self, connection: asyncpg.Connection, rollout: str, checkpoint: str) -> list[str]:
        """After a rollback, in its transaction: the sandboxes that are given up, for `give_up`."""
        return [row["name"] for row in await connection.fetch(sql.MOVE, rollout, checkpoint)]

    async def left(self, connection: asyncpg.Connection, rollout: str) -> list[str]:
        """A rollout ends: its sandboxes, for `give_up`."""
        return [row["name"] for row in await connection.fetch(sql.LEAVE, rollout)]

    async def give_up(self, names: list[str]) -> None:
        """Ends sandboxes whose rows are condemned. What fails is the tender's."""
        if names:
            await failpoint("sandbox.condemned")
        for name in names:
            await self._discard(name)

    async def _discard(self, name: str) -> None:
        self._forget(name)
        with contextlib.suppress(SandboxError, MegaMCPError):
            keeper, host = await self._host.keeper()
            await keeper.remove(name)
            await failpoint("sandbox.removed")
            await self._store.value(sql.FORGET, name, host)

    def _forget(self, name: str) -> None:
        if (pipes := self._started.pop(name, None)) is not None:
            _close(pipes)
        self._names.pop(name, None)


def spec_of(server: LoadedServer, environment: LoadedEnvironment, kind: Kind) -> Spec:
    """What the sandboxes of a server are made from."""
    config, process = server.config, server.process
    assert process is not None
    # Other code under the same entry is another version, and warmed for itself.
    environ = {"MEGAMCP_ENVIRONMENT": environment.full_name, **variables(server).texts}
    if config.command is not None:
        command: tuple[str, ...] = (config.command, *config.args)
    elif kind is Kind.FORK:
        command = ()
    else:  # a server of ours, behind its own pipes
        command = (sys.executable, "-m", "megamcp.sdk.lines", config.entry or "")
        environ["PYTHONPATH"] = os.pathsep.join((str(environment.folder), _PACKAGES))
    return Spec(
        kind=kind,
        command=command,
        entry=None if command else "megamcp.sdk.lines:Lines",
        argument="" if command else config.entry or "",
        python=sys.executable if config.entry else None,
        pythonpath=(str(environment.folder),) if config.entry else (),
        image=process.image,
        files=str(environment.folder / process.files) if process.files else None,
        content=server.files,
        environ=environ,
        workdir=process.workdir,
        cwd=_cwd(server, environment, kind),
        network=process.network,
        limits=Limits(
            memory=process.memory_mb << 20,
            disk=process.disk_mb << 20,
            pids=process.pids,
            cpus=process.cpus,
        ),
    )


def _cwd(server: LoadedServer, environment: LoadedEnvironment, kind: Kind) -> str | None:
    """Where a command is started, if that is said."""
    assert server.process is not None
    if (said := server.config.cwd) is None:
        return None
    of_image = kind is Kind.DOCKER or server.process.image is not None
    return os.path.normpath(os.path.join(server.process.workdir if of_image else environment.folder, said))


def demand_host(row: Mapping[str, Any], host: str, server: str) -> None:
    """Raises `Unavailable` for what another keeper has."""
    if row["host"] != host:
        raise Unavailable(
            f"The sandbox of tool server {server!r} is with another keeper ({row['host']}) than this gateway's"
            f" ({host}).",
            code="sandboxes_unavailable",
            hint="Gateway processes that share a database must share the keeper: MEGAMCP_SANDBOX_SOCKET.",
        )


def _new_name(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(8)}"


def _close(pipes: Pipes) -> None:
    for descriptor in pipes.all:
        with contextlib.suppress(OSError):
            os.close(descriptor)
