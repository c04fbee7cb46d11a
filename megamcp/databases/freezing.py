"""Where a rollout's databases stand when a checkpoint is made of it.

Invariant:
- what is frozen stays as it is until the checkpoint is published: the database's lock is held, or a sealed copy is.

Making and moving databases is `heads`' business, the checkpoint itself `rollouts`'.
"""

import asyncio
import contextlib
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from megamcp.databases import journal as sql
from megamcp.databases.heads import Databases, Point, call_arguments, point_of
from megamcp.environments import LoadedEnvironment, LoadedServer
from megamcp.state.clones import Inside


class Freezer:
    """Freezes what `Databases` finds."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self._thawing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def frozen(
        self, connection: asyncpg.Connection, row: asyncpg.Record, environment: LoadedEnvironment, patience_s: float
    ) -> AsyncIterator[dict[str, Point]]:
        """Where each database server of the rollout stands; no call of theirs runs until the block is left.

        `connection` is in the transaction that holds the rollout's lock.
        """
        points: dict[str, Point] = {}
        stack = contextlib.AsyncExitStack()
        try:
            for server in environment.servers:
                if not server.database:
                    continue
                server.demand_current()
                head = await connection.fetchrow(sql.STANDING_HEAD, row["id"], server.name, row["checkpoint"])
                if (
                    head is not None
                    and head["rewind_to"] is not None
                    and not await self._databases.carry_out(row["id"], server.name, head)
                ):
                    head = None
                if head is not None and head["status"] == "full":
                    raise self._databases.over_quota(row["id"])
                if head is None or head["status"] != "ready":
                    if row["checkpoint"] is not None:
                        origin = await connection.fetchrow(sql.SNAPSHOT, row["checkpoint"], server.name)
                        if origin is not None:
                            known = row["sums"].get(server.name)
                            points[server.name] = point_of(origin, None if known is None else int(known, 16))
                    continue
                points[server.name] = await self._freeze(stack, connection, row, environment, server, head, patience_s)
            yield points
        except BaseException:
            if not await stack.__aexit__(*sys.exc_info()):
                raise
        else:
            # The points don't move any more, so nobody waits for the locks to be given back.
            thawing = asyncio.create_task(stack.aclose())
            self._thawing.add(thawing)
            thawing.add_done_callback(self._thawing.discard)

    async def _freeze(
        self,
        stack: contextlib.AsyncExitStack,
        connection: asyncpg.Connection,
        row: asyncpg.Record,
        environment: LoadedEnvironment,
        server: LoadedServer,
        head: asyncpg.Record,
        patience_s: float,
    ) -> Point:
        cluster, name = await self._databases.clusters.named(head["cluster"]), head["name"]
        tell = self._databases.tell(cluster, name, "a checkpoint could not wait longer")
        hold = cluster.hold(name, patience_s=patience_s, on_busy=tell)
        async with contextlib.AsyncExitStack() as inner:
            inside = await inner.enter_async_context(hold)
            mark, total, nonces, behind = await inside.freeze(head["collected"], head["sealed_position"] or 0)
            if nonces:
                await self._collect(connection, inside, head, nonces)
            if mark.exact and not self._databases.is_long(behind):
                stack.push_async_callback(inner.pop_all().aclose)
                return Point(name, mark.position, head["sealed"], head["sealed_position"], total, mark.call)
        # What was done since the last checkpoint can't be undone inside (DDL, TRUNCATE), or it is so much that the log
        # before should be trimmed: a copy keeps this point.
        # Its row is `creating` until the checkpoint is published: a copy that no checkpoint has would be taken away.
        while True:
            copy = await self._databases.plan(stack, cluster, server, environment, None, head["lineage"])
            assert copy is not None
            await self._databases.copy(cluster, name, copy)
            async with cluster.inside(copy) as there:
                fits = await there.reachable(mark.position)
                if fits:
                    await there.rewind(mark.position, within_s=max(patience_s, 1))
                    await there.forget_log(mark.position)
            await cluster.seal(copy)
            if fits:
                return Point(name, mark.position, copy, mark.position, total, mark.call)

    async def _collect(
        self, connection: asyncpg.Connection, inside: Inside, head: Mapping[str, Any], nonces: Sequence[uuid.UUID]
    ) -> None:
        """Calls that are recorded inside and not in the journal: their gateway died between the two."""
        missing = {row["nonce"] for row in await connection.fetch(sql.UNRECORDED, nonces)}
        for call in await inside.calls(head["collected"]) if missing else ():
            if call.nonce in missing:
                await connection.execute(sql.RECORD, *call_arguments(call), False)


def columns(points: Mapping[str, Point]) -> tuple[list[Any], ...]:
    """Points as the query that publishes a checkpoint wants them: servers, databases, positions, and so on."""
    rows = [(s, p.database, p.position, p.sealed, p.sealed_position, p.call) for s, p in points.items()]
    return tuple(list(column) for column in zip(*rows, strict=True))
