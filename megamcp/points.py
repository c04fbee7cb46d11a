"""What can be read of a rollout: its digest at a point, and what differs between two.

A point is `base` (what the environment starts with), `head` (now) or a checkpoint. Readers hold the rollout's lock
shared, so that no call that writes is half done, and change nothing. Evaluators' own SQL is in `queries`.
"""

from dataclasses import dataclass

import asyncpg

from megamcp import state
from megamcp import store as sql
from megamcp.databases import Reads, Spot
from megamcp.digests import Sums, add, digest_of, part_of
from megamcp.environments import Environments, LoadedEnvironment, LoadedServer
from megamcp.rollouts import Rollouts, alive, compared, demand_open
from megamcp.settings import Settings

BASE = "base"
HEAD = "head"
_LOCKED = " for key share of c"


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


class Points:
    """Reads of any kind of state."""

    def __init__(self, rollouts: Rollouts, environments: Environments, databases: Reads, settings: Settings) -> None:
        self._rollouts = rollouts
        self._environments = environments
        self._databases = databases
        self._settings = settings

    async def diff(
        self, rollout: str, start: str, end: str
    ) -> dict[str, tuple[LoadedServer, dict[str, state.TableDiff]]]:
        """Row changes from one point to another, per server that has SQL state.

        Raises `NotFound`, `Gone`, `Conflict` (`foreign_checkpoint`).
        """
        limit = self._settings.diff_rows
        found: dict[str, tuple[LoadedServer, dict[str, state.TableDiff]]] = {}
        async with self._rollouts.reading(rollout) as (connection, row):
            environment = await self._environments.by_id(row["environment"], connection)
            a, b = await _point(connection, row, start), await _point(connection, row, end)
            common = await connection.fetchval(sql.LAST_COMMON_LAYER, a.checkpoint, b.checkpoint) or 0
            for server in environment.servers:
                if server.schema:
                    tables = await state.diff(connection, server.schema, a.chain, b.chain, limit, common)
                elif server.database:
                    spots = [await self._spot(row, p, server, environment) for p in (a, b)]
                    tables = await self._databases.diff(*spots, limit=limit)
                else:
                    continue
                found[server.name] = server, tables
        return found

    async def digest(self, rollout: str, at: str) -> tuple[str, dict[str, str | None], dict[str, dict[str, int]]]:
        """The digest at a point, its part per server, and the counters that it leaves out."""
        async with self._rollouts.reading(rollout) as (connection, row):
            environment = await self._environments.by_id(row["environment"], connection)
            point = await _point(connection, row, at)
            sums, counters = dict(point.sums), {}
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
        per_server = {
            server.name: part_of(server, sums) if server.schema or server.database else None
            for server in environment.servers
        }
        whole = digest_of(environment, sums)
        assert whole is not None  # every sum that wasn't known was computed
        return whole, per_server, counters

    async def _spot(
        self, row: asyncpg.Record, point: Point, server: LoadedServer, environment: LoadedEnvironment
    ) -> Spot:
        """Where a point is in the databases of a server."""
        return await self._databases.spot(
            server, environment, rollout=row if point.name == HEAD else None, checkpoint=point.checkpoint
        )


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
