"""What can be read of a rollout: its digest at a point, and what differs between two.

A point is `base` (what the environment starts with), `head` (now) or a checkpoint. Readers hold the rollout's lock
shared, so that no call that writes is half done, and change nothing. Evaluators' own SQL is in `queries`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncpg

from megamcp import state
from megamcp import store as sql
from megamcp.databases import Reads, Spot
from megamcp.demands import alive, compared, demand_open
from megamcp.digests import OPAQUE, Sums, add, digest_of, files_sum, part_of
from megamcp.documents import keeper
from megamcp.documents.difference import DocumentDiff
from megamcp.environments import Environments, LoadedEnvironment, LoadedServer
from megamcp.errors import DeadlineExceeded
from megamcp.rollouts import Rollouts
from megamcp.sandboxed import FileChanges, Trees
from megamcp.sandboxed.trees import Spot as Tree
from megamcp.settings import Settings

BASE = "base"
HEAD = "head"
_LOCKED = " for key share of c"
_PAUSE_S = 0.07


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a rollout's history that can be read."""

    name: str
    chain: tuple[int, ...]
    head: int | None
    """The layer that is still being written; None for a point that can't change."""
    checkpoint: str | None
    """What it stands on, or is."""
    sums: Sums
    """As of the last checkpoint up to here."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs in one server's state between two points; of what its kind has."""

    kind: str
    tables: Mapping[str, state.TableDiff] = field(default_factory=dict)
    files: FileChanges | None = None
    document: DocumentDiff | None = None

    def __bool__(self) -> bool:
        files, places = self.files, self.document
        return bool(self.tables or (files and files.changes) or (places and places.total))


@dataclass(frozen=True, slots=True)
class Hashes:
    """The digest at a point and its parts, each None where it isn't known, with what is left out of it."""

    whole: str | None
    servers: Mapping[str, str | None]
    """`opaque` where memory belongs to the state."""
    files: Mapping[str, str]
    counters: Mapping[str, dict[str, int]]


class Points:
    """Reads of any kind of state."""

    def __init__(
        self, rollouts: Rollouts, environments: Environments, databases: Reads, trees: Trees, settings: Settings
    ) -> None:
        self._rollouts = rollouts
        self._environments = environments
        self._databases = databases
        self._trees = trees
        self._settings = settings

    @asynccontextmanager
    async def _reading(
        self, rollout: str, *names: str
    ) -> AsyncIterator[tuple[asyncpg.Connection, asyncpg.Record, LoadedEnvironment]]:
        """`Rollouts.reading`; if the head is read, also with no call to one of its sandboxes under way."""
        give_up = time.monotonic() + self._settings.quiesce_timeout_s
        while True:
            async with self._rollouts.reading(rollout) as (connection, row):
                environment = await self._environments.by_id(row["environment"], connection)
                moving = HEAD in names and environment.has_sandboxes
                if not moving or await self._trees.still(connection, rollout, environment):
                    yield connection, row, environment
                    return
            if time.monotonic() > give_up:
                raise DeadlineExceeded(
                    f"Rollout {rollout} is busy: a call to one of its sandboxes is still running.", code="rollout_busy"
                )
            await self._trees.forget_the_dead()
            await asyncio.sleep(_PAUSE_S)

    async def diff(self, rollout: str, start: str, end: str) -> dict[str, Changes]:
        """Changes from one point to another, per server that has a state.

        Raises `NotFound`, `Gone`, `Conflict` (`foreign_checkpoint`, `state_lost`).
        """
        limit = self._settings.diff_rows
        found: dict[str, Changes] = {}
        async with self._reading(rollout, start, end) as (connection, row, environment):
            a, b = await _point(connection, row, start), await _point(connection, row, end)
            common = await connection.fetchval(sql.LAST_COMMON_LAYER, a.checkpoint, b.checkpoint) or 0
            for server in environment.servers:
                kind = server.config.state.kind
                if server.schema:
                    tables = await state.diff(connection, server.schema, a.chain, b.chain, limit, common)
                elif server.database:
                    spots = [await self._spot(row, p, server, environment) for p in (a, b)]
                    tables = await self._databases.diff(*spots, limit=limit)
                elif server.process:
                    older, newer = [await self._tree(connection, row, p, server) for p in (a, b)]
                    files = await self._trees.diff(server, environment, older, newer, limit)
                    found[server.name] = Changes(kind, files=files)
                    continue
                elif server.document:
                    was, now = [await _document(connection, row, p, server, environment) for p in (a, b)]
                    document = await keeper.diff(connection, was, now, limit)
                    found[server.name] = Changes(kind, document=document)
                    continue
                else:
                    continue
                found[server.name] = Changes(kind, tables)
        return found

    async def digest(self, rollout: str, at: str) -> Hashes:
        """The digest at a point."""
        async with self._reading(rollout, at) as (connection, row, environment):
            point = await _point(connection, row, at)
            sums, counters, files = dict(point.sums), {}, {}
            for server in environment.servers:
                if server.schema:
                    if point.head is not None and row["dirty"]:
                        frozen = await state.freeze(connection, server.schema, point.chain[:-1], point.head)
                        sums[server.name] = add(sums.get(server.name), frozen.digest)
                    counters[server.name] = await state.counters(connection, server.schema, point.chain)
                elif server.database:
                    spot = await self._spot(row, point, server, environment)
                    total, counters[server.name] = await self._databases.total(spot)
                    sums[server.name] = f"{total:032x}"
                elif server.process:
                    tree = await self._tree(connection, row, point, server)
                    files[server.name] = await self._trees.digest(server, environment, tree)
                    sums[server.name] = files_sum(files[server.name], memory=tree.memory)
                elif server.document and point.name == HEAD:
                    here = await _document(connection, row, point, server, environment)
                    await keeper.move_sum(connection, environment, server.name, here, sums)
        parts = {server.name: part_of(server, sums) if server.stateful else None for server in environment.servers}
        # Every sum that wasn't known was computed; what has no part now has more than can be compared.
        parts = {name: OPAQUE if part is None and name in files else part for name, part in parts.items()}
        return Hashes(digest_of(environment, sums), parts, files, counters)

    async def _tree(
        self, connection: asyncpg.Connection, row: asyncpg.Record, point: Point, server: LoadedServer
    ) -> Tree:
        """Where a point's files of a server are."""
        return await self._trees.spot(
            connection, server, rollout=row["id"] if point.name == HEAD else None, checkpoint=point.checkpoint
        )

    async def _spot(
        self, row: asyncpg.Record, point: Point, server: LoadedServer, environment: LoadedEnvironment
    ) -> Spot:
        """Where a point is in the databases of a server."""
        return await self._databases.spot(
            server, environment, rollout=row if point.name == HEAD else None, checkpoint=point.checkpoint
        )


async def _document(
    connection: asyncpg.Connection,
    row: asyncpg.Record,
    point: Point,
    server: LoadedServer,
    environment: LoadedEnvironment,
) -> keeper.At | None:
    """Where a point is in the document of a server."""
    rollout = row["id"] if point.name == HEAD else None
    return await keeper.at(connection, environment, server.name, rollout=rollout, checkpoint=point.checkpoint)


async def _point(connection: asyncpg.Connection, rollout: asyncpg.Record, name: str) -> Point:
    """Resolve `base`, `head` or a checkpoint id. Raises `NotFound`, `Gone`, `Conflict`.

    The checkpoint's row is locked against the reaper until the transaction ends: what it holds stays as long.
    """
    if name == BASE:
        return Point(BASE, (), None, None, {})
    if name == HEAD:
        demand_open(rollout)
        chain, layer = rollout["chain"], rollout["layer"]
        return Point(HEAD, (*chain, layer), layer, rollout["checkpoint"], dict(rollout["sums"]))
    row = compared(rollout, alive(await connection.fetchrow(sql.CHECKPOINT_BY_ID + _LOCKED, name), name))
    return Point(name, tuple(row["chain"]), None, name, dict(row["sums"]))
