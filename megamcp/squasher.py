"""Keeps chains short in the background: squashes long ones, then moves the rollouts on them to the short chain.

A squash is one transaction. Its reading and copying holds no lock, for frozen layers never change; the swap, at its
end, is one row. Nobody is moved by it: a rollout names the length of the chain that it builds on, and the old chain is
kept under that name. Forks and rollbacks from then on take the short one. After that each rollout is moved by itself,
under a lock that is only ever *tried*: one with a call in flight stays where it is until another round, or until its
next checkpoint, which moves it. So no statement waits for any of this, none changes what it sees.

Every gateway process runs it; a chain is squashed by whoever gets the chain's advisory lock. Freeing the layers that
are no longer needed is the reaper's work.
"""

import asyncio
import logging
from collections.abc import Sequence

import asyncpg

from megamcp import layers as sql
from megamcp.environments import Environments, LoadedEnvironment
from megamcp.errors import MegaMCPError
from megamcp.failpoints import failpoint
from megamcp.settings import Settings
from megamcp.state import squash
from megamcp.store import Store

log = logging.getLogger(__name__)

CHAINS = 50
"""Chains that one round squashes at most, and replaced ones whose rollouts it looks at."""
ROLLOUTS = 100
"""Rollouts that are moved, and so locked, in one transaction."""
BATCHES = 20
HEAD_ROWS = 1000
"""A head with more rows to change than this is not moved: its rollout would wait for it too long."""


class Squasher:
    """Runs `once` every `squash_interval_s` until cancelled, at once again while there is more to do."""

    def __init__(self, store: Store, environments: Environments, settings: Settings) -> None:
        self._store = store
        self._environments = environments
        self._most = settings.chain_layers
        self._pause_s = settings.squash_interval_s

    async def run(self) -> None:
        """An outage of the database stops nothing: the next round tries again."""
        while True:
            done = 0
            try:
                done = await self.once()
            except MegaMCPError as error:
                log.warning("squasher: %s", error)
            except Exception:
                log.exception("squasher")
            await asyncio.sleep(min(0.01, self._pause_s) if done else self._pause_s)

    async def once(self) -> int:
        """One round; gives how many chains were squashed and how many rollouts moved."""
        squashed = 0
        for row in await self._store.rows(sql.long_chains(self._most), CHAINS):
            squashed += await self.squash(row["id"])
        return squashed + await self._move()

    async def squash(self, checkpoint: str) -> bool:
        """Replace a checkpoint's chain by a shorter one. False: nothing to do, or another process does it."""
        try:
            return await self._squash(checkpoint)
        except _GivenUpError:
            return False

    async def _squash(self, checkpoint: str) -> bool:
        async with self._store.transaction() as connection:
            if not await connection.fetchval(
                "select pg_try_advisory_xact_lock(hashtextextended($1, 7729))", checkpoint
            ):
                return False
            found = await connection.fetchrow(sql.CHAIN, checkpoint)
            if found is None or len(found["chain"]) <= self._most:
                return False
            chain = list(found["chain"])
            states = (await self._environments.by_id(found["environment"], connection)).schemas
            rows: dict[int, int] = dict.fromkeys(chain, 0)
            for state in states:
                for layer, count in (await squash.sizes(connection, state, chain)).items():
                    rows[layer] += count
            first = squash.first_to_merge([rows[layer] for layer in chain], self._most)
            into = await connection.fetchval(sql.TAKE_NUMBER, chain[-1], found["environment"])
            if into is None:
                return False
            for state in states:
                await squash.build(connection, state, chain[first:], into)
            await failpoint("squash.built")
            swapped = await connection.fetchval(sql.SWAP, checkpoint, chain, [*chain[:first], into])
            if swapped is None:
                raise _GivenUpError  # takes the rows back
            await failpoint("squash.swapped")
        log.debug("squashed %d layers of %s into one", len(chain) - first, checkpoint)
        return True

    async def _move(self) -> int:
        moved = 0
        for row in await self._store.rows(sql.REPLACED, CHAINS):
            after = ""
            for _ in range(BATCHES):
                async with self._store.transaction() as connection:
                    environment = await self._environments.by_id(row["environment"], connection)
                    tried = await connection.fetch(sql.TRY_ROLLOUTS, row["checkpoint"], row["layers"], after, ROLLOUTS)
                    moved += await _move_some(connection, environment, row, [r["id"] for r in tried if r["free"]])
                    await failpoint("squash.moved")
                if len(tried) < ROLLOUTS:
                    break
                after = tried[-1]["id"]
        return moved


async def _move_some(
    connection: asyncpg.Connection, environment: LoadedEnvironment, row: asyncpg.Record, rollouts: Sequence[str]
) -> int:
    """Rollouts whose lock this transaction holds."""
    where = row["checkpoint"], row["layers"], rollouts
    status = await connection.execute(sql.MOVE_CLEAN, *where, len(row["squashed"]))
    moved = int(status.rsplit(" ", 1)[1])
    for dirty in await connection.fetch(sql.DIRTY, *where):
        if await shorten(connection, environment, dirty["layer"], row["chain"], row["squashed"]):
            await connection.execute(sql.MOVE_DIRTY, dirty["id"], len(row["squashed"]))
            moved += 1
    return moved


async def shorten(
    connection: asyncpg.Connection,
    environment: LoadedEnvironment,
    head: int,
    chain: Sequence[int],
    squashed: Sequence[int],
) -> bool:
    """Put a head that was written on `chain` onto `squashed`, unless it is too big. The rollout's lock is held."""
    replaced, by = squash.difference(chain, squashed)
    rows = 0
    for state in environment.schemas:
        rows += await squash.rows_over(connection, state, head, replaced, HEAD_ROWS)
    if rows > HEAD_ROWS:
        return False
    if rows:
        for state in environment.schemas:
            await squash.move_head(connection, state, head, replaced, by)
    return True


class _GivenUpError(Exception):
    """The checkpoint was given up, or squashed by another, while its layers were copied."""
