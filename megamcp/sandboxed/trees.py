"""The files of rollouts' sandboxes, for readers: what differs between two points, a digest at one.

A point is what the environment starts with, a checkpoint's image, or the head: the sandbox itself, where it was called
since it was last frozen. Nothing is started for reading but what a runtime has to prepare to show a folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from megamcp.digests import NOTHING
from megamcp.environments import LoadedEnvironment, LoadedServer
from megamcp.errors import Conflict
from megamcp.sandboxed import journal as sql
from megamcp.sandboxed.boxes import demand_host, spec_of
from megamcp.sandboxed.host import Host, translated
from megamcp.sandboxed.lost import box_lost
from megamcp.store import LOSE_INTENTS, Store
from sandboxes.types import FileChange, Kind


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the files of a server are at a point. `name` is a sandbox's or an image's, None what it starts with."""

    name: str | None
    host: str | None
    kind: Kind | None
    memory: bool
    """Whether there is more to its state than files."""
    digest: str | None
    """Of the files, where it is known."""


@dataclass(frozen=True, slots=True)
class FileChanges:
    """By path; `truncated`: there are more."""

    changes: Sequence[FileChange]
    truncated: bool


class Trees:
    """Reads. Holds nothing."""

    def __init__(self, store: Store, host: Host) -> None:
        self._store = store
        self._host = host

    async def forget_the_dead(self) -> None:
        """Calls of gateways that died run no more, as far as anybody waits for them."""
        await self._store.value(LOSE_INTENTS)

    async def still(self, connection: asyncpg.Connection, rollout: str, environment: LoadedEnvironment) -> bool:
        """Whether no call to the rollout's sandboxes runs; then none begins until the transaction ends."""
        await connection.execute(sql.LOCK_ROLLOUT, rollout)
        servers = [server.name for server in environment.servers if server.process]
        return not await connection.fetchval(sql.RUNNING, rollout, servers)

    async def spot(
        self, connection: asyncpg.Connection, server: LoadedServer, *, rollout: str | None, checkpoint: str | None
    ) -> Spot:
        """Where the head of a rollout stands, or a checkpoint (neither: what the environment starts with). Raises
        `Conflict` (`state_lost`)."""
        head = await connection.fetchrow(sql.HEAD, rollout, server.name) if rollout else None
        if head is not None and head["called"]:
            if head["status"] != "ready":
                assert rollout is not None
                words = f" ({head['reason']}), and its files with it."
                raise await box_lost(connection.fetchval, rollout, server.name, words)
            kind = Kind(head["runtime"])
            await self._host.keeper()  # for what it said of its runtimes
            return Spot(head["name"], head["host"], kind, self._host.keeps_memory(kind), None)
        if head is not None:
            point = head["image"] and await connection.fetchrow(sql.IMAGE, head["image"])
        else:
            point = checkpoint and await connection.fetchrow(sql.POINT, checkpoint, server.name)
        if not point:
            return Spot(None, None, None, False, server.files or NOTHING)
        return Spot(
            point["name"] if point["status"] == "ready" else None,
            point["host"],
            Kind(point["runtime"]),
            point["memory"],
            point["digest"],
        )

    async def digest(self, server: LoadedServer, environment: LoadedEnvironment, spot: Spot) -> str:
        """Of the files."""
        if spot.digest is not None:
            return spot.digest
        assert spot.kind is not None
        keeper, host = await self._host.keeper()
        demand_host({"host": spot.host}, host, server.name)
        with translated(server.name):
            return await keeper.digest(spec_of(server, environment, spot.kind), spot.name)

    async def diff(
        self, server: LoadedServer, environment: LoadedEnvironment, older: Spot, newer: Spot, most: int
    ) -> FileChanges:
        """Of the files, from one spot to another."""
        if older.digest is not None and older.digest == newer.digest:
            return FileChanges((), truncated=False)
        keeper, host = await self._host.keeper()
        for spot in (older, newer):
            if spot.host is not None:
                demand_host({"host": spot.host}, host, server.name)
                if spot.name is None:
                    raise Conflict(
                        f"What a checkpoint keeps of tool server {server.name!r} died with the process that had it.",
                        code="state_lost",
                        hint="Compare points whose checkpoints are still there.",
                    )
        kind = newer.kind or older.kind
        assert kind is not None
        with translated(server.name):
            found = await keeper.diff(spec_of(server, environment, kind), older.name, newer.name, most)
        return FileChanges(found[:most], truncated=len(found) > most)
