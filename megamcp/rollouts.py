"""The life of rollouts and checkpoints: the only writer of lifecycle.

Everything that moves a rollout holds its lock exclusively, in the transaction that publishes the move, so a
checkpoint sees no call half done. A fork needs no lock: it only reads a checkpoint, which never changes. Operations
wait for running calls; when the wait is over they end those calls' backends and go on. Nothing here is kept in
memory, so any number of gateway processes may do this at once.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from megamcp import state
from megamcp import store as sql
from megamcp.access.principal import owner
from megamcp.access.quotas import counts_rollouts, demand_room
from megamcp.databases import Databases, Freezer, columns, not_made
from megamcp.databases import Point as DatabasePoint
from megamcp.demands import alive, compared, demand_open, found
from megamcp.digests import add, digest_of, files_sum
from megamcp.documents import keeper
from megamcp.environments import Environments, LoadedEnvironment
from megamcp.errors import BadRequest, Conflict, DeadlineExceeded, Gone, NoCapacity, NotFound
from megamcp.handles import new_id
from megamcp.sandboxed import Boxes, BoxFreezer
from megamcp.sandboxed.freezer import Kept
from megamcp.sandboxed.lost import demand_images
from megamcp.settings import Settings
from megamcp.squasher import shorten
from megamcp.store import Store, seconds
from megamcp.types import RolloutStatus, SeedChoice

log = logging.getLogger(__name__)

_CALL = re.compile(r"call ([0-9a-f-]{36})")
_END_TRIES = 5
_END_WAIT_S = 1.0
_GLANCE_S = 0.03
_PAUSE_S = 0.07


Locked = tuple[asyncpg.Connection, asyncpg.Record]
"""A connection in a transaction that holds a rollout's lock, and the rollout."""


class Rollouts:
    """Open, checkpoint, fork, roll back, release."""

    def __init__(
        self,
        store: Store,
        environments: Environments,
        settings: Settings,
        databases: Databases | None = None,
        boxes: Boxes | None = None,
        box_freezer: BoxFreezer | None = None,
    ) -> None:
        self._store = store
        self._environments = environments
        self._databases = databases
        self._freezer = Freezer(databases) if databases else None
        self._boxes = boxes
        self._box_freezer = box_freezer
        self._settings = settings
        # One that ends calls needs two connections.
        self._enders = asyncio.Semaphore(max(1, settings.control_connections // 3))
        self.before_move: Callable[[str], Awaitable[object]] | None = None
        """Told of a rollback before it is done, so that processes of the rollout's own end what they are doing."""
        self.told: Callable[[str, str, int], None] = lambda environment, event, count: None
        """Told what became of rollouts: the environment's name, what was done, of how many."""
        self.open_count = 0
        """Open rollouts in the database as the reaper last counted them, plus those made here since."""

    # -- opening and forking ------------------------------------------------------------------------------------

    async def open(
        self,
        environment: str,
        *,
        count: int = 1,
        group: str | None = None,
        ttl_s: float | None = None,
        seed: int | None = None,
        labels: dict[str, str] | None = None,
    ) -> Sequence[asyncpg.Record]:
        """New rollouts on the environment's first state. Raises `NotFound`, `NoCapacity`, `BadRequest`."""
        loaded = await self._environments.find(environment)
        async with self._store.connection() as connection:
            return await self.open_on(
                connection, loaded, count=count, group=group, ttl_s=ttl_s, seed=seed, labels=labels
            )

    async def open_on(
        self,
        connection: asyncpg.Connection,
        loaded: LoadedEnvironment,
        *,
        count: int = 1,
        group: str | None = None,
        ttl_s: float | None = None,
        seed: int | None = None,
        labels: dict[str, str] | None = None,
    ) -> Sequence[asyncpg.Record]:
        """`open`, on a connection that the caller holds."""
        for server in loaded.servers:
            server.demand_current()
        self._admit(count)
        values = (
            [new_id("ro") for _ in range(count)],
            loaded.id,
            group or new_id("gr"),
            loaded.seed if seed is None else seed,
            labels or {},
            self._lease(ttl_s, self._settings.rollout_ttl_s),
            *owner(),
        )
        async with connection.transaction() if counts_rollouts() else contextlib.nullcontext():
            await demand_room(connection, count)
            rows: Sequence[asyncpg.Record] = await connection.fetch(sql.OPEN, *values)
        self.open_count += count
        self.told(loaded.name, "opened", count)
        return rows

    async def fork(
        self,
        checkpoint: str,
        *,
        count: int = 1,
        group: str | None = None,
        ttl_s: float | None = None,
        seed: SeedChoice = "inherit",
        labels: dict[str, str] | None = None,
    ) -> Sequence[asyncpg.Record]:
        """New rollouts on a checkpoint: one INSERT. Raises `NotFound`, `Gone`, `Conflict` (`state_lost`), `NoCapacity`,
        `BadRequest`."""
        self._admit(count)
        seeds: list[int | None]
        match seed:
            case "inherit":
                seeds = [None] * count
            case "fresh":
                seeds = [secrets.randbits(63) for _ in range(count)]
            case int():
                if not -(2**63) <= seed < 2**63:
                    raise BadRequest("The seed must fit into 64 bits, signed.", code="invalid_seed")
                seeds = [seed] * count
        if self._boxes:
            await self._boxes.known()
        values = (
            [new_id("ro") for _ in range(count)],
            checkpoint,
            group or new_id("gr"),
            seeds,
            labels or {},
            self._lease(ttl_s, self._settings.rollout_ttl_s),
            *owner(),
        )
        if counts_rollouts():
            async with self._store.transaction() as connection:
                await demand_room(connection, count)
                rows: Sequence[asyncpg.Record] = await connection.fetch(sql.FORK, *values)
        else:
            rows = await self._store.rows(sql.FORK, *values)
        if not rows:
            await self.checkpoint(checkpoint)
            async with self._store.connection() as connection:
                await demand_images(connection, checkpoint)
            raise Gone(f"Checkpoint {checkpoint} was released.", code="checkpoint_gone")
        self.open_count += count
        self.told(rows[0]["environment_name"].partition("@")[0], "forked", count)
        return rows

    def _admit(self, count: int) -> None:
        if count > self._settings.max_fork:
            raise BadRequest(
                f"One request may make {self._settings.max_fork} rollouts; {count} were asked for.",
                code="count_too_large",
                hint="Ask several times with the same group, or raise MEGAMCP_MAX_FORK.",
            )
        if self.open_count + count > self._settings.max_rollouts:
            raise NoCapacity(
                f"{self.open_count} rollouts are open, the limit is {self._settings.max_rollouts}.",
                code="too_many_rollouts",
                retry_after=self._settings.reap_interval_s,
                hint="Release rollouts that are done (DELETE /v1/rollouts/{id}), or raise MEGAMCP_MAX_ROLLOUTS.",
            )

    def _lease(self, ttl_s: float | None, default: float) -> Any:
        if ttl_s is not None and ttl_s > self._settings.max_ttl_s:
            raise BadRequest(
                f"A lease may last {self._settings.max_ttl_s:g} s at most.",
                code="ttl_too_long",
                hint="Renew it before it ends, or raise MEGAMCP_MAX_TTL_S.",
            )
        return seconds(default if ttl_s is None else ttl_s)

    # -- looking up ---------------------------------------------------------------------------------------------

    async def get(self, rollout: str) -> asyncpg.Record:
        """A rollout, open or not. Raises `NotFound`."""
        return found(await self._store.row(sql.ROLLOUT_BY_ID, rollout), rollout)

    async def checkpoint(self, checkpoint: str) -> asyncpg.Record:
        """A live checkpoint. Raises `NotFound`, `Gone`."""
        return alive(await self._store.row(sql.CHECKPOINT_BY_ID, checkpoint), checkpoint)

    async def same_environment(self, rollout: asyncpg.Record, checkpoint: str) -> None:
        """Raises `Conflict` for a checkpoint of another environment version, `NotFound`, `Gone`."""
        compared(rollout, await self.checkpoint(checkpoint))

    # -- moving one rollout -------------------------------------------------------------------------------------

    async def make_checkpoint(
        self, rollout: str, *, label: str | None = None, turn: int | None = None, ttl_s: float | None = None
    ) -> asyncpg.Record:
        """Freeze the head. Waits for running calls up to `quiesce_timeout_s`, then ends them."""
        lease = self._lease(ttl_s, self._settings.checkpoint_ttl_s)
        async with (
            self._quiet(rollout) as (connection, row, environment),
            self._frozen(connection, row, environment) as (points, boxes),
        ):
            chain, head = list(row["chain"]), row["layer"]
            # Squashing may have passed by a rollout that was never idle: here it always gets onto the short chain.
            if len(row["squashed"]) < len(chain) and (
                not row["dirty"] or await shorten(connection, environment, head, chain, row["squashed"])
            ):
                chain = list(row["squashed"])
            sums, written = dict(row["sums"]), False
            if row["dirty"]:
                for server in environment.servers:
                    if server.schema:
                        frozen = await state.freeze(connection, server.schema, chain, head)
                        sums[server.name] = add(sums.get(server.name), frozen.digest)
                        written = written or frozen.rows > 0
            sums |= {name: None if p.total is None else f"{p.total:032x}" for name, p in points.items()}
            documents = await keeper.freeze(connection, row, environment, sums)
            sums |= {name: files_sum(kept.digest, memory=kept.memory) for name, kept in boxes.items()}
            made = await connection.fetchrow(
                sql.PUBLISH_CHECKPOINT_AND_POINTS if points else sql.PUBLISH_CHECKPOINT,
                rollout,
                new_id("cp"),
                turn,
                [*chain, head] if written else chain,
                head if written else None,
                sums,
                digest_of(environment, sums),
                label,
                lease,
                *(columns(points) if points else ()),
            )
            if made is None:
                raise not_made()
            if self._box_freezer and boxes:
                await self._box_freezer.publish(connection, made, boxes)
            await keeper.publish(connection, made, documents)
            self.told(environment.name, "checkpointed", 1)
            return made

    @asynccontextmanager
    async def _quiet(self, rollout: str) -> AsyncIterator[tuple[asyncpg.Connection, asyncpg.Record, LoadedEnvironment]]:
        """`_alone`, with no call of the rollout's sandboxes under way. Those can't be ended and gone on with, so where
        they take too long it is `DeadlineExceeded`."""
        patience_s = self._settings.quiesce_timeout_s
        give_up = time.monotonic() + patience_s
        while True:
            async with self._alone(rollout, patience_s, "a checkpoint could not wait longer") as (connection, row):
                environment = await self._environments.by_id(row["environment"], connection)
                freezer = self._box_freezer if environment.has_sandboxes else None
                if freezer is None or not await freezer.busy(connection, rollout, environment):
                    yield connection, row, environment
                    return
                if time.monotonic() > give_up:
                    raise DeadlineExceeded(
                        f"Rollout {rollout} is busy: a call to one of its sandboxes is still running.",
                        code="rollout_busy",
                        hint="Make the checkpoint when the call has been answered, or roll back, which ends it.",
                    )
            # Its outcome takes a connection, and calls of gateways that died have none any more.
            await self._store.value(sql.LOSE_INTENTS)
            await asyncio.sleep(_PAUSE_S)

    @asynccontextmanager
    async def _frozen(
        self, connection: asyncpg.Connection, row: asyncpg.Record, environment: LoadedEnvironment
    ) -> AsyncIterator[tuple[Mapping[str, DatabasePoint], Mapping[str, Kept]]]:
        """What the checkpoint keeps of databases and sandboxes: all of it, or an error."""
        points: Mapping[str, DatabasePoint] = {}
        boxes: Mapping[str, Kept] = {}
        async with contextlib.AsyncExitStack() as stack:
            if self._freezer is not None and environment.has_databases:
                frozen = self._freezer.frozen(connection, row, environment, self._settings.quiesce_timeout_s)
                points = await stack.enter_async_context(frozen)
            if self._box_freezer is not None and environment.has_sandboxes:
                boxes = await stack.enter_async_context(self._box_freezer.frozen(connection, row, environment))
            yield points, boxes

    async def roll_back(self, rollout: str, checkpoint: str) -> asyncpg.Record:
        """Move the head to a checkpoint of its own line. Calls still in flight end in an error. Raises `NotFound`,
        `Gone`, `Conflict` (`foreign_checkpoint`, `state_lost`)."""
        target = await self.checkpoint(checkpoint)
        if self._boxes:
            await self._boxes.known()
        grace, reason = self._settings.rollback_grace_s, "the rollout was rolled back"
        async with self._alone(rollout, grace, reason) as (connection, row):
            if target["rollout"] != rollout and target["id"] != row["parent_checkpoint"]:
                raise Conflict(
                    f"Checkpoint {checkpoint} belongs to rollout {target['rollout']}.",
                    code="foreign_checkpoint",
                    hint="Fork it instead (POST /v1/checkpoints/{id}/fork): that gives a new rollout at this point.",
                )
            environment = await self._environments.by_id(row["environment"], connection)
            for server in environment.servers:
                if server.database:
                    server.demand_current()
            await demand_images(connection, checkpoint, rollout)
            given_up: list[str] = []
            if environment.has_dedicated and self.before_move is not None:
                await self.before_move(rollout)
            if not await connection.fetchval(sql.MOVE_BACK, rollout, checkpoint):
                raise Gone(f"Checkpoint {checkpoint} was released.", code="checkpoint_gone")
            await keeper.forget(connection, rollout, environment)
            if self._databases and environment.has_databases:
                await self._databases.moved(connection, rollout, checkpoint)
            if self._boxes and environment.has_sandboxes:
                given_up = await self._boxes.moved(connection, rollout, checkpoint)
            moved = await connection.fetchrow(sql.ROLLOUT_BY_ID, rollout)
            if environment.has_dedicated:
                await connection.execute(sql.TELL_MOVE, rollout, moved["epoch"])
        if self._databases and environment.has_databases:
            await self._databases.settle(rollout, environment)
        if self._boxes:
            await self._boxes.give_up(given_up)
        self.told(environment.name, "rolled_back", 1)
        return moved

    async def close(self, rollout: str, *, expired: bool = False) -> bool:
        """Release a rollout; True if it was open. Releasing twice, or one that isn't there, is no error.

        With `expired` only if its lease has ended: it may have been renewed since it was looked at.
        """
        status = RolloutStatus.EXPIRED if expired else RolloutStatus.CLOSED
        grace, reason = self._settings.rollback_grace_s, "the rollout was released"
        given_up: list[str] = []
        try:
            async with self._alone(rollout, grace, reason) as (connection, row):
                ended = bool(await connection.fetchval(sql.END_ROLLOUT, rollout, status, expired))
                environment = await self._environments.by_id(row["environment"], connection)
                if ended:
                    await keeper.forget(connection, rollout, environment)
                if ended and environment.has_dedicated:
                    await connection.execute(sql.TELL_MOVE, rollout, None)
                if ended and self._databases:
                    await self._databases.left(connection, rollout)
                if ended and self._boxes:
                    given_up = await self._boxes.left(connection, rollout)
        except (NotFound, Gone):
            return False
        if self._databases:
            self._databases.forget(rollout)
        if self._boxes:
            await self._boxes.give_up(given_up)
        self.open_count = max(0, self.open_count - ended)
        if ended:
            self.told(environment.name, status.value, 1)
        return ended

    async def renew(self, rollout: str, ttl_s: float | None) -> asyncpg.Record:
        """A longer lease, counted from now."""
        lease = self._lease(ttl_s, self._settings.rollout_ttl_s)
        if await self._store.value(sql.RENEW_ROLLOUT, rollout, lease) is None:
            demand_open(await self.get(rollout))
        return await self.get(rollout)

    async def score(self, rollout: str, score: dict[str, Any]) -> int:
        """Keep a score beside the journal; gives its row number. Ended rollouts take scores too."""
        seq: int | None = await self._store.value(sql.SCORE, rollout, score)
        if seq is None:
            await self.get(rollout)
            raise Conflict("The score was not kept.", code="score_not_kept")
        return seq

    @asynccontextmanager
    async def _alone(self, rollout: str, patience_s: float, reason: str) -> AsyncIterator[Locked]:
        """The open rollout, locked against calls and other moves until the transaction ends.

        Its row is locked too: calls to servers without state take no other lock than that, to number themselves.
        """
        query = sql.ROLLOUT_BY_ID + sql.ROW_LOCK
        async with self._locked(rollout, "pg_advisory_xact_lock", patience_s, reason, query) as (connection, row):
            demand_open(row)
            yield connection, row

    @asynccontextmanager
    async def reading(self, rollout: str) -> AsyncIterator[Locked]:
        """The rollout, in a transaction in which no call that writes is half done. Waits, and ends nothing."""
        patience_s = self._settings.quiesce_timeout_s
        async with self._locked(rollout, "pg_advisory_xact_lock_shared", patience_s, None) as locked:
            yield locked

    @asynccontextmanager
    async def _locked(
        self, rollout: str, lock: str, patience_s: float, reason: str | None, query: str = sql.ROLLOUT_BY_ID
    ) -> AsyncIterator[Locked]:
        """Take a rollout's lock. When patience ends: `DeadlineExceeded`, or with a `reason` end the calls in the way.

        A connection that waits is missing to other rollouts. So patience is many short waits with the connection given
        back between them; only while calls are being ended is it kept, at the head of the line.
        """
        give_up = time.monotonic() + patience_s
        tries_left = _END_TRIES
        while True:
            ending = reason if time.monotonic() >= give_up else None
            locked = False
            try:
                async with (
                    self._enders if ending else contextlib.nullcontext(),
                    self._store.transaction() as connection,
                ):
                    wait_s = _END_WAIT_S if ending else _GLANCE_S
                    # Calls are ended while this waits in line, so that the next one in line isn't let in before it.
                    end = asyncio.create_task(self._end_calls(rollout, ending)) if ending else None
                    try:
                        await connection.execute(sql.take_lock(lock, rollout, wait_s))
                    finally:
                        if end:
                            await end
                    locked = True
                    yield connection, found(await connection.fetchrow(query, rollout), rollout)
                    return
            except DeadlineExceeded:
                if locked:
                    raise
            if time.monotonic() >= give_up:
                tries_left -= 1
                if reason is None or not tries_left:
                    raise DeadlineExceeded(
                        f"Rollout {rollout} is busy: a call of it is still running.", code="rollout_busy"
                    )
            else:
                await asyncio.sleep(_PAUSE_S)

    async def _end_calls(self, rollout: str, reason: str) -> None:
        await asyncio.sleep(0.02)
        holders = await self._store.rows(sql.HOLDERS, rollout)
        calls = [match[1] for row in holders if (match := _CALL.fullmatch(row["name"]))]
        # Told first, so that whoever asks what became of the call learns why.
        await self._store.value(sql.TELL_ENDED, calls, f"The call was ended: {reason}. Nothing of it was kept.")
        await self._store.value(sql.END_HOLDERS, rollout, [row["pid"] for row in holders])
        log.info("ended %d calls of %s: %s", len(calls), rollout, reason)

    # -- checkpoints' leases ------------------------------------------------------------------------------------

    async def checkpoints(self, rollout: str) -> Sequence[asyncpg.Record]:
        """A rollout's own live checkpoints, oldest first."""
        await self.get(rollout)
        return await self._store.rows(sql.CHECKPOINTS, rollout)

    async def renew_checkpoint(self, checkpoint: str, ttl_s: float | None) -> asyncpg.Record:
        """A longer lease, counted from now."""
        lease = self._lease(ttl_s, self._settings.checkpoint_ttl_s)
        await self._store.value(sql.RENEW_CHECKPOINT, checkpoint, lease)
        return await self.checkpoint(checkpoint)

    async def release_checkpoint(self, checkpoint: str) -> None:
        """End a checkpoint's lease now. Idempotent; raises `Conflict` while somebody pins it."""
        async with self._store.transaction() as connection:
            await connection.execute(sql.LOCK_CHECKPOINT, checkpoint)
            released = await connection.fetchval(sql.RELEASE_CHECKPOINT, checkpoint)
            row = await connection.fetchrow(sql.CHECKPOINT_BY_ID, checkpoint)
        if released is None and row is not None and row["pins"]:
            raise Conflict(
                f"Checkpoint {checkpoint} is pinned by {', '.join(row['pins'])}.",
                code="checkpoint_pinned",
                hint="DELETE /v1/checkpoints/{id}/pin/{owner} first.",
            )

    async def pin(self, checkpoint: str, owner: str, ttl_s: float | None) -> asyncpg.Record:
        """Hold a checkpoint under a name. Pinning again renews."""
        lease = self._lease(ttl_s, self._settings.checkpoint_ttl_s)
        async with self._store.transaction() as connection:
            await connection.execute(sql.LOCK_CHECKPOINT, checkpoint)
            await connection.execute(sql.PIN, checkpoint, owner, lease)
            return alive(await connection.fetchrow(sql.CHECKPOINT_BY_ID, checkpoint), checkpoint)

    async def unpin(self, checkpoint: str, owner: str) -> None:
        """Let go of a pin. Idempotent."""
        async with self._store.connection() as connection:
            await connection.execute(sql.UNPIN, checkpoint, owner)
