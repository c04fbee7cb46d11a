"""Reading a rollout's database at a point: its total, its counters, what differs, and a connection for evaluators.

Now is read where it is. A point of the past is a *view*: a copy that stands exactly there, made when somebody asks and
kept for a minute after the last one did. Nothing here changes what a rollout sees.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncpg

from megamcp import state
from megamcp.databases import journal as sql
from megamcp.databases.heads import Databases, Place, Point, point_of
from megamcp.environments import LoadedEnvironment, LoadedServer
from megamcp.state.clones import Inside, compare
from megamcp.store import Store

VIEW_KEPT_S = 60.0
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a point is: in the rollout's database as it is now, at a checkpoint, or at the beginning."""

    server: LoadedServer
    environment: LoadedEnvironment
    live: str | None
    """Name of the rollout's database, when now is meant and there is one."""
    cluster: str | None
    point: Point | None
    """None: what the environment starts with."""
    lineage: dict[str, int] = field(default_factory=dict)


class Reads:
    """Readers' way to databases."""

    def __init__(self, store: Store, databases: Databases) -> None:
        self._store = store
        self._databases = databases
        self._views: dict[tuple[str, int], tuple[Place, dict[str, int], float]] = {}
        self._making = asyncio.Lock()

    async def spot(
        self,
        server: LoadedServer,
        environment: LoadedEnvironment,
        *,
        rollout: asyncpg.Record | None,
        checkpoint: str | None,
    ) -> Spot:
        """`rollout`: as it is now. Else the checkpoint, or with neither the beginning."""
        if rollout is not None:
            head = await self._databases.settled(rollout["id"], server)
            if head is not None:
                return Spot(server, environment, head["name"], head["cluster"], None, head["lineage"])
        if checkpoint is not None:
            row = await self._store.row(sql.SNAPSHOT, checkpoint, server.name)
            if row is not None:
                return Spot(server, environment, None, row["cluster"], point_of(row), row["lineage"])
        return Spot(server, environment, None, None, None)

    async def total(self, spot: Spot) -> tuple[int, dict[str, int]]:
        """128-bit sum of what differs from the beginning, and the sequences' values."""
        async with self._standing(spot) as (inside, _):
            return (await inside.digest() - await inside.origin_sum()) % state.MODULUS, await inside.sequences()

    async def diff(self, a: Spot, b: Spot, *, limit: int) -> dict[str, state.TableDiff]:
        """Rows that differ: as one log says, where it leads from one to the other; else by what is in both."""
        if a == b:
            return {}
        for host, other, forward in ((b, a, True), (a, b, False)):
            async with self._standing(host) as (inside, lineage):
                start = await _position_in(inside, lineage, host, other)
                if start is not None:
                    found = await inside.changes(start, (await inside.mark()).position, limit)
                    if found is not None:
                        return found if forward else {name: table.reversed() for name, table in found.items()}
        places = [
            (await self._place(spot))[0].name for spot in (a, b)
        ]  # made before any is locked: a copy locks its origin
        if places[0] == places[1]:
            return {}
        async with contextlib.AsyncExitStack() as stack:
            # In one order, whoever asks.
            held = {
                name: (await stack.enter_async_context(self._standing(spot)))[0]
                for name, spot in sorted(zip(places, (a, b), strict=True), key=lambda one: one[0])
            }
            return await compare(held[places[0]], held[places[1]], limit)

    @asynccontextmanager
    async def connection(self, spot: Spot) -> AsyncIterator[asyncpg.Connection]:
        """A connection of the database's own login, for a query: as little as an agent may, it may more than read."""
        place, _ = await self._place(spot)
        connection = await asyncpg.connect(
            place.dsn, statement_cache_size=0, server_settings={"application_name": "megamcp query"}
        )
        try:
            yield connection
        finally:
            with contextlib.suppress(Exception):
                await connection.close(timeout=2)

    @asynccontextmanager
    async def _standing(self, spot: Spot) -> AsyncIterator[tuple[Inside, dict[str, int]]]:
        place, lineage = await self._place(spot)
        async with place.cluster.hold(place.name, patience_s=_PATIENCE_S) as inside:
            yield inside, lineage

    async def _place(self, spot: Spot) -> tuple[Place, dict[str, int]]:
        """The database that stands at the point, and its lineage."""
        if spot.live is None:
            return await self._view(spot)
        assert spot.cluster is not None
        return await self._databases.placed(spot.cluster, spot.live), spot.lineage

    async def _view(self, spot: Spot) -> tuple[Place, dict[str, int]]:
        key = (spot.point.database, spot.point.position) if spot.point else (str(spot.server.database), -1)
        async with self._making:
            if (known := self._views.get(key)) and time.monotonic() - known[2] < VIEW_KEPT_S / 2:
                place, lineage, _ = known
            else:
                place, lineage = await self._databases.make_view(
                    spot.server, spot.environment, spot.point, spot.lineage
                )
            now = time.monotonic()
            self._views = {k: v for k, v in self._views.items() if now - v[2] < VIEW_KEPT_S / 2}
            self._views[key] = place, lineage, now
        await self._store.value(sql.USED, place.name)
        return place, lineage


async def _position_in(inside: Inside, lineage: dict[str, int], host: Spot, other: Spot) -> int | None:
    """Where `other` is in the log of the database that stands at `host`; None: not in it."""
    point = other.point
    if other.live is not None:
        return None
    if point is None:
        return 0
    same = host.live == point.database
    return point.position if same or lineage.get(point.database, -1) >= point.position else None
