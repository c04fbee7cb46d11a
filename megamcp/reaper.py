"""Ends what has outlived its lease, and frees what nothing stands on.

Every gateway process runs it. A step that sweeps takes an advisory lock of its own for one transaction, so two never
do it at once; leases are ended under the locks of their rollouts and checkpoints. Each piece of work is bounded. A
checkpoint that is being forked is locked by the fork and skipped here; one under a live rollout or another checkpoint
keeps its row until those are gone.
"""

import asyncio
import logging
from datetime import timedelta

from megamcp import state
from megamcp import store as sql
from megamcp.environments import Environments
from megamcp.errors import MegaMCPError
from megamcp.rollouts import Rollouts
from megamcp.settings import Settings
from megamcp.store import Store

log = logging.getLogger(__name__)

BATCH = 500


class Reaper:
    """Runs `once` every `reap_interval_s` until cancelled."""

    def __init__(self, store: Store, environments: Environments, rollouts: Rollouts, settings: Settings) -> None:
        self._store = store
        self._environments = environments
        self._rollouts = rollouts
        self._settings = settings

    async def run(self) -> None:
        """An outage of the database stops nothing: the next round tries again."""
        while True:
            try:
                await self.once()
            except MegaMCPError as error:
                log.warning("reaper: %s", error)
            except Exception:
                log.exception("reaper")
            await self._store.connections.rest()
            await asyncio.sleep(self._settings.reap_interval_s)

    async def once(self) -> dict[str, int]:
        """One round; gives what was done, by step."""
        self._rollouts.open_count = await self._store.value(sql.COUNT_OPEN)
        done = {"rollouts": await self._end_rollouts(), "leases": await self._end_leases()}
        steps: dict[str, tuple[str, tuple[object, ...]]] = {
            "intents": (sql.LOSE_INTENTS, ()),
            "ended calls": (sql.FORGET_ENDED, ()),
            "checkpoints": (sql.COLLECT_CHECKPOINTS, (BATCH,)),
            "journals": (sql.DROP_JOURNALS, (timedelta(days=self._settings.journal_days), BATCH)),
            "blobs": (sql.DROP_BLOBS, (self._settings.blob_bytes,)),
        }
        for name, (query, arguments) in steps.items():
            done[name] = await self._step(name, query, arguments)
            while name == "checkpoints" and (more := await self._step(name, query, arguments)):
                done[name] += more  # what stood on what has just gone
        done["layers"] = await self._discard_layers()
        while done["layers"] and (more := await self._discard_layers()):
            done["layers"] += more
        return done

    async def _end_rollouts(self) -> int:
        expired = await self._store.rows(sql.EXPIRED_ROLLOUTS, BATCH)
        at_once = asyncio.Semaphore(4)

        async def end(rollout: str) -> bool:
            async with at_once:
                try:
                    return await self._rollouts.close(rollout, expired=True)
                except MegaMCPError as error:  # one that can't be ended now must not keep the others
                    log.warning("reaper: rollout %s: %s", rollout, error)
                    return False

        return sum(await asyncio.gather(*(end(row["id"]) for row in expired)))

    async def _end_leases(self) -> int:
        async with self._store.transaction() as connection:
            ids = [row["id"] for row in await connection.fetch(sql.LOCK_EXPIRED_CHECKPOINTS, BATCH)]
            return _count(await connection.execute(sql.RELEASE_EXPIRED_CHECKPOINTS, ids))

    async def _step(self, name: str, query: str, arguments: tuple[object, ...]) -> int:
        async with self._store.transaction() as connection:
            if not await connection.fetchval("select pg_try_advisory_xact_lock(hashtextextended($1, 7728))", name):
                return 0
            if name == "checkpoints":
                return int(await connection.fetchval(query, *arguments))
            return _count(await connection.execute(query, *arguments))

    async def _discard_layers(self) -> int:
        async with self._store.transaction() as connection:
            if not await connection.fetchval("select pg_try_advisory_xact_lock(hashtextextended('layers', 7728))"):
                return 0
            dead: dict[int, list[int]] = {}
            for row in await connection.fetch(sql.DEAD_LAYERS, BATCH):
                dead.setdefault(row["environment"], []).append(row["layer"])
            for environment, layers in dead.items():
                for server in (await self._environments.by_id(environment, connection)).servers:
                    if server.schema:
                        await state.discard(connection, server.schema, layers)
                await connection.execute(sql.FORGET_LAYERS, layers)
            return sum(map(len, dead.values()))


def _count(tag: str) -> int:
    """Rows of a command tag such as `DELETE 3`."""
    return int(tag.rsplit(" ", 1)[-1])
