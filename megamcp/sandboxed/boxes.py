"""A rollout's sandboxes: made when they are first needed, opened, lost, moved back, given up.

Invariants:
- a rollout has at most one sandbox per server; its row is there before it is and after it was removed;
- a sandbox stands at an image and a place in the journal: if the rollout called the server after that place, what the
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
from typing import Any

import asyncpg

from megamcp.dataplane.ports import Opened
from megamcp.environments import Environments, LoadedEnvironment, LoadedServer
from megamcp.errors import Conflict, DeadlineExceeded, Gone, MegaMCPError, Unavailable
from megamcp.failpoints import failpoint
from megamcp.sandboxed import journal as sql
from megamcp.sandboxed.host import Host, as_ours, translated
from megamcp.store import Store
from sandboxes.client import Client
from sandboxes.types import Exited, Kind, Limits, Pipes, SandboxError, Spec

log = logging.getLogger(__name__)

_MADE_ELSEWHERE_S = 0.01
_WAIT_S = 60.0
_KNOWN_SOON_S = 0.5
_REASONS_KEPT = 1000


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
        self.let_go: Callable[[str], object] | None = None
        """Asked to close a sandbox's pipes as soon as nothing is under way in them."""
        host.on_exit, host.on_wanted, host.on_meeting = self._exited, self._wanted, self._met

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
                    case "creating" if head["orphaned"]:
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
                raise _image_lost(server.name, standing["checkpoint"])
        kind = Kind(origin["runtime"]) if origin else await self._kind(server)
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
            origin and origin["instructions"],
            self._owner(),
        )
        if planned is None:
            return None
        return await self._start(keeper, rollout, name, kind, server, environment, origin and origin["name"], standing)

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
        if await self._store.value(sql.REPLACE, head["name"], name, self._owner(), host) is None:
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
        await failpoint("sandbox.planned")
        try:
            with translated(server.name):
                pipes = await keeper.start(spec_of(server, environment, kind), name, image)
        except BaseException:
            with contextlib.suppress(Exception):  # else the tender does it
                await asyncio.shield(self._store.value(sql.CONDEMN, name))
            raise
        self._started[name], self._names[name] = pipes, server.name
        await failpoint("sandbox.started")
        if await self._store.value(sql.READY, name, standing["epoch"]):
            return name
        await self._store.value(sql.CONDEMN, name)
        await self._discard(name)
        return None

    async def _standing(self, rollout: str) -> asyncpg.Record:
        standing = await self._store.row(sql.STANDING, rollout)
        if standing is None or standing["status"] != "open":
            raise Gone(f"Rollout {rollout} is {standing['status'] if standing else 'gone'}.", code="rollout_closed")
        return standing

    async def _kind(self, server: LoadedServer) -> Kind:
        assert server.process is not None
        return await self._host.kind(server.process.runtime, entry=server.config.entry is not None)

    async def _state_lost(self, rollout: str, server: str, head: Mapping[str, Any]) -> Conflict:
        standing = await self._standing(rollout)
        return Conflict(
            f"The sandbox of tool server {server!r} has ended, and with it what was called since its last checkpoint:"
            f" {head['reason']}",
            code="state_lost",
            checkpoint=standing["checkpoint"],
            hint=f"Roll back to checkpoint {standing['checkpoint']} (POST /v1/rollouts/{{id}}/rollback)."
            if standing["checkpoint"]
            else "There is no checkpoint to go back to: open a new rollout.",
        )

    # -- the data plane's door ------------------------------------------------------------------------------------

    async def open(self, sandbox: str) -> Opened:
        """See `dataplane.ports.SandboxDoor`, also for the next four."""
        keeper, _ = await self._host.keeper()
        pipes = self._started.pop(sandbox, None)
        server = self._names.get(sandbox)
        if pipes is None:
            try:
                pipes = await keeper.attach(sandbox)
            except SandboxError as error:
                if error.code == "gone":
                    await self.lost(sandbox, "it is not there any more")
                raise as_ours(error, server) from error
        self._ends.setdefault(sandbox, asyncio.get_running_loop().create_future())
        try:
            row = await self._store.row("select modern, instructions from megamcp.sandboxes where name = $1", sandbox)
            await self._store.value(sql.USED, sandbox)
        except BaseException:
            _close(pipes)
            raise
        spoken = None if row is None or row["modern"] is None else (bool(row["modern"]), row["instructions"])
        return Opened(pipes.stdin, pipes.stdout, pipes.stderr, pipes.clean, spoken)

    async def spoke(self, sandbox: str, spoken: tuple[bool, str | None]) -> None:
        await self._store.value(sql.SPOKE, sandbox, *spoken)

    async def close(self, sandbox: str, *, clean: bool) -> None:
        self._ends.pop(sandbox, None)
        with contextlib.suppress(MegaMCPError):
            await self._store.value(sql.USED, sandbox)
        if clean and self._host.opened:
            with contextlib.suppress(SandboxError, MegaMCPError):
                keeper, _ = await self._host.keeper()
                await keeper.detach(sandbox)

    async def kill(self, sandbox: str, reason: str) -> None:
        await self.lost(sandbox, reason)
        with contextlib.suppress(SandboxError, MegaMCPError):  # else the tender does it
            keeper, _ = await self._host.keeper()
            await keeper.remove(sandbox)

    async def obituary(self, sandbox: str) -> str | None:
        ending = self._ends.get(sandbox)
        return await asyncio.shield(ending) if ending is not None else None

    async def lost(self, sandbox: str, reason: str) -> None:
        """A sandbox has ended by itself. Nothing where it was given up already."""
        log.warning("sandbox %s of server %s is lost: %s", sandbox, self._names.get(sandbox), reason)
        await self._store.value(sql.LOST, sandbox, reason)

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

    async def _wanted(self, sandbox: str) -> None:
        if (pipes := self._started.pop(sandbox, None)) is not None:  # nobody has opened it
            _close(pipes)
            await self.close(sandbox, clean=True)
        elif self.let_go is not None:
            self.let_go(sandbox)

    async def _met(self, keeper: Client, host: str) -> None:
        """A keeper may be another than the last one: what it doesn't have is lost."""
        there = await keeper.inventory()
        names = [info.sandbox for info in there.sandboxes]
        for row in await self._store.rows(sql.LOST_HERE, host, names):
            await self.lost(row["name"], "the keeper of sandboxes was started anew")
        for row in await self._store.rows(sql.IMAGES_LOST_HERE, host, there.images):
            log.warning("image %s was lost with the keeper that had it", row["name"])

    # -- following the rollout ------------------------------------------------------------------------------------

    async def moved(self, connection: asyncpg.Connection, rollout: str, checkpoint: str) -> list[str]:
        """After a rollback, in its transaction: the sandboxes that are given up, for `give_up`."""
        return [row["name"] for row in await connection.fetch(sql.MOVE, rollout, checkpoint)]

    async def left(self, connection: asyncpg.Connection, rollout: str) -> list[str]:
        """A rollout ends: its sandboxes, for `give_up`."""
        return [row["name"] for row in await connection.fetch(sql.LEAVE, rollout)]

    async def give_up(self, names: list[str]) -> None:
        """Ends sandboxes whose rows are condemned. What fails is the tender's."""
        for name in names:
            await self._discard(name)

    async def _discard(self, name: str) -> None:
        if (pipes := self._started.pop(name, None)) is not None:
            _close(pipes)
        self._names.pop(name, None)
        with contextlib.suppress(SandboxError, MegaMCPError):
            keeper, _ = await self._host.keeper()
            await keeper.remove(name)
            await self._store.value(sql.FORGET, name)


def spec_of(server: LoadedServer, environment: LoadedEnvironment, kind: Kind) -> Spec:
    """What the sandboxes of a server are made from."""
    config, process = server.config, server.process
    assert process is not None
    return Spec(
        kind=kind,
        command=(config.command, *config.args) if config.command else (),
        entry="megamcp.sdk.lines:Lines" if config.entry else None,
        argument=config.entry or "",
        python=sys.executable if config.entry else None,
        pythonpath=(str(environment.folder),) if config.entry else (),
        image=process.image,
        files=str(environment.folder / process.files) if process.files else None,
        content=server.files,
        environ=dict(config.env),
        workdir=process.workdir,
        network=process.network,
        limits=Limits(
            memory=process.memory_mb << 20,
            disk=process.disk_mb << 20,
            pids=process.pids,
            cpus=process.cpus,
        ),
    )


def demand_host(row: Mapping[str, Any], host: str, server: str) -> None:
    """Raises `Unavailable` for what another host's keeper has."""
    if row["host"] != host:
        raise Unavailable(
            f"The sandbox of tool server {server!r} is at another host's keeper ({row['host']}), which this gateway"
            " doesn't reach.",
            code="sandboxes_unavailable",
            hint="Gateway processes that share a database must share the keeper: MEGAMCP_SANDBOX_SOCKET.",
        )


def _image_lost(server: str, checkpoint: str | None) -> Conflict:
    return Conflict(
        f"What checkpoint {checkpoint} keeps of tool server {server!r} was in memory only, and is lost.",
        code="state_lost",
        checkpoint=None,
        hint="Roll back to, or fork, a checkpoint of before; runtime criu keeps its checkpoints on disk.",
    )


def _new_name(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(8)}"


def _close(pipes: Pipes) -> None:
    for descriptor in pipes.all:
        with contextlib.suppress(OSError):
            os.close(descriptor)
