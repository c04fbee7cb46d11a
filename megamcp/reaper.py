"""Ends what has outlived its lease, and frees what nothing stands on.

Every gateway process runs it. A step that sweeps takes an advisory lock of its own for one transaction, so two never
do it at once; leases are ended under the locks of their rollouts and checkpoints. Each piece of work is bounded. A
checkpoint that is being forked is locked by the fork and skipped here; one under a live rollout keeps its layers, one
under another checkpoint its row. How layers die is told in `layers.py`; nobody waits for their rows to be deleted.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any

import asyncpg

from megamcp import layers, state
from megamcp import store as sql
from megamcp.documents import journal
from megamcp.environments import Environments
from megamcp.errors import MegaMCPError
from megamcp.failpoints import failpoint
from megamcp.rollouts import Rollouts
from megamcp.settings import Settings
from megamcp.store import Store

log = logging.getLogger(__name__)

BATCH = 500
DEAD_ROWS = 10_000
"""Rows of dead layers that are deleted in one transaction."""
DOCUMENT_AGE = timedelta(minutes=10)
"""Contents of documents that nothing points at are kept so long: whoever made one may not have committed yet."""
BUDGET_S = 5.0
Step = Callable[[], Awaitable[int]]


class Reaper:
    """Runs `once` every `reap_interval_s` until cancelled, at once again while work is left."""

    def __init__(self, store: Store, environments: Environments, rollouts: Rollouts, settings: Settings) -> None:
        self._store = store
        self._environments = environments
        self._rollouts = rollouts
        self._settings = settings
        self._left = False

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
            await asyncio.sleep(0.1 if self._left else self._settings.reap_interval_s)

    async def once(self) -> dict[str, int]:
        """One round; gives what was done, by step.

        Every step has its turn before one has a second, so none starves, however much there is for another. The round
        ends when none finds anything, or after `BUDGET_S`: then the next one follows at once.
        """
        self._left = False
        self._rollouts.open_count = await self._store.value(sql.COUNT_OPEN)
        give_up = time.monotonic() + BUDGET_S
        steps: dict[str, Step] = {
            "rollouts": self._end_rollouts,
            "leases": self._end_leases,
            "void checkpoints": self._void,
            "document points": partial(self._sweep, "document points", journal.DROP_POINTS),
            "documents": self._drop_contents,
            "loose layers": self._mark_dead,
            "layers": self._discard_layers,
            "checkpoints": self._drop_leaves,
            "journals": partial(
                self._sweep, "journals", sql.DROP_JOURNALS, timedelta(days=self._settings.journal_days), BATCH
            ),
        }
        done = {
            "intents": await self._sweep("intents", sql.LOSE_INTENTS),
            "ended calls": await self._sweep("ended calls", sql.FORGET_ENDED),
            "blobs": await self._sweep("blobs", sql.DROP_BLOBS, self._settings.blob_bytes),
            **dict.fromkeys(steps, 0),
        }
        while not self._left:
            turn = {name: await step() for name, step in steps.items()}
            for name, count in turn.items():
                done[name] += count
            if not any(turn.values()):
                break
            self._left = time.monotonic() > give_up
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

    async def _sweep(self, name: str, query: str, *arguments: object) -> int:
        async with self._store.transaction() as connection:
            if not await _alone(connection, name):
                return 0
            return _count(await connection.execute(query, *arguments))

    async def _drop_contents(self) -> int:
        try:
            return await self._sweep("documents", journal.DROP_BLOBS, DOCUMENT_AGE, BATCH)
        except asyncpg.ForeignKeyViolationError:  # one was pointed at meanwhile: the next round leaves it out
            return 0

    async def _void(self) -> int:
        async with self._store.transaction() as connection:
            if not await _alone(connection, "layers"):
                return 0
            ids = [row["id"] for row in await connection.fetch(layers.LOCK_RELEASED, BATCH)]
            done = int(await connection.fetchval(layers.VOID, ids)) if ids else 0
            await failpoint("layers.void")
            return done

    async def _mark_dead(self) -> int:
        async with self._store.transaction() as connection:
            if not await _alone(connection, "layers"):
                return 0
            horizon = await connection.fetchval(layers.HORIZON)
            await connection.execute(layers.NOTE_UNUSED)
            await connection.execute(layers.FORGET_REPLACED, horizon)
            done = int(await connection.fetchval(layers.MARK_DEAD))
            await failpoint("layers.marked")
            return done

    async def _drop_leaves(self) -> int:
        async with self._store.transaction() as connection:
            if not await _alone(connection, "layers"):
                return 0
            return int(await connection.fetchval(layers.DROP_LEAVES, BATCH))

    async def _discard_layers(self) -> int:
        """Some rows of dead layers; a layer is forgotten when its last rows are gone."""
        async with self._store.transaction() as connection:
            if not await _alone(connection, "layers"):
                return 0
            horizon = await connection.fetchval(layers.HORIZON)
            dead: dict[int, list[int]] = {}
            for row in await connection.fetch(layers.DEAD_LAYERS, horizon, BATCH):
                dead.setdefault(row["environment"], []).append(row["layer"])
            room = DEAD_ROWS
            for environment, numbers in dead.items():
                for schema in (await self._environments.by_id(environment, connection)).schemas:
                    room -= await state.discard(connection, schema, numbers, room)
                if room <= 0:
                    break
                await failpoint("layers.discarded")
                await connection.execute(layers.FORGET_LAYERS, numbers)
            return sum(map(len, dead.values()))


async def _alone(connection: asyncpg.Connection, step: str) -> Any:
    return await connection.fetchval("select pg_try_advisory_xact_lock(hashtextextended($1, 7728))", step)


def _count(tag: str) -> int:
    """Rows of a command tag such as `DELETE 3`."""
    return int(tag.rsplit(" ", 1)[-1])
