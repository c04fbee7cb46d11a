"""A rollout's own database: made when it is first needed, frozen, moved back, given up.

Invariants:
- a rollout has at most one database per server. Inside it is bound to the rollout and an epoch, by the first call,
  which brings a deed of ours, and by each rollback: a handle of before is refused there;
- a copy is begun only from a point that can't move (a position in a log), and used only if the rollout still stands
  where it stood when the copy was begun;
- whoever needs a database's lock and the rollout's takes the rollout's first.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import asyncpg

from megamcp import outages
from megamcp.databases import journal as sql
from megamcp.databases.clusters import Clusters
from megamcp.databases.sources import Sources
from megamcp.environments import LoadedEnvironment, LoadedServer
from megamcp.errors import Conflict, DeadlineExceeded, Gone, MegaMCPError, NoCapacity, NotFound
from megamcp.failpoints import failpoint
from megamcp.handles import Signer
from megamcp.settings import Settings
from megamcp.state.clones import CallRow, Cluster, Disk, Inside, Standing
from megamcp.store import Store, translated

log = logging.getLogger(__name__)

PLACES_KEPT = 10_000
_MADE_ELSEWHERE_S = 0.005
_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rollout's database is."""

    cluster: Cluster
    name: str
    dsn: str
    """Of the database's own login. Holds its password, and the deed as a setting of the session."""
    deed: str = field(default="", repr=False)
    """By which the first call makes the copy the rollout's."""


@dataclass(frozen=True, slots=True)
class Point:
    """A position in the log of a database: what a checkpoint keeps.

    `sealed` is a copy at an earlier position, from which the log can be played on.
    """

    database: str
    position: int
    sealed: str | None = None
    sealed_position: int | None = None
    total: int | None = None
    """128-bit sum of what differs from the source; None where the log doesn't tell."""
    call: int = 0
    """The last call inside before it."""


class Databases:
    """One per gateway process. `owner` is the number under which others can tell that it lives."""

    def __init__(
        self,
        store: Store,
        clusters: Clusters,
        sources: Sources,
        signer: Signer,
        settings: Settings,
        owner: Callable[[], int],
    ) -> None:
        self.clusters = clusters
        self.sources = sources
        self._store = store
        self._signer = signer
        self._settings = settings
        self._owner = owner
        self.underway = sources.underway
        self._places: dict[tuple[str, str, int], Place] = {}
        self._making: dict[tuple[str, str], asyncio.Task[Place]] = {}

    # -- finding and making ---------------------------------------------------------------------------------------

    async def place(self, rollout: str, epoch: int, server: LoadedServer, environment: LoadedEnvironment) -> Place:
        """The rollout's database, ready for a call at this epoch; made now if there is none.

        Raises `Gone` (`state_lost`, or the rollout has ended), `NoCapacity` (`disk_full`), `Unavailable`.
        """
        server.demand_current()
        key = (rollout, server.name, epoch)
        if known := self._places.get(key):
            return known
        with translated():
            return await self._first_place(key, rollout, server, environment)

    async def _first_place(
        self, key: tuple[str, str, int], rollout: str, server: LoadedServer, environment: LoadedEnvironment
    ) -> Place:
        # Many calls may wait for one copy, and none of them owns it.
        making = self._making.get(key[:2])
        if making is None:
            making = asyncio.create_task(self._find_or_make(rollout, server, environment))
            self._making[key[:2]] = making
            making.add_done_callback(lambda _: self._making.pop(key[:2], None))
        place = await asyncio.shield(making)
        if len(self._places) >= PLACES_KEPT:
            del self._places[next(iter(self._places))]
        self._places[key] = place
        return place

    def forget(self, rollout: str | None = None) -> None:
        """The rollout (None: any) was moved or has ended: where its databases were is no longer true."""
        for key in [key for key in self._places if rollout in (None, key[0])]:
            del self._places[key]

    async def _find_or_make(self, rollout: str, server: LoadedServer, environment: LoadedEnvironment) -> Place:
        give_up = time.monotonic() + _WAIT_S
        while True:
            head = await self._store.row(sql.HEAD, rollout, server.name)
            if head is None:
                if place := await self._make(rollout, server, environment):
                    return place
            elif head["status"] == "ready":
                if head["rewind_to"] is None or await self.carry_out(rollout, server.name, head):
                    return await self._placed(head["cluster"], head["name"], rollout, server, head["epoch"])
            elif head["status"] == "full":
                raise self.over_quota(rollout)
            elif head["orphaned"]:  # its maker died; the keeper drops what there is of it
                await self._store.value(sql.ABANDON, head["name"], rollout)
            if time.monotonic() > give_up:
                raise DeadlineExceeded(f"Rollout {rollout} has no database yet.", code="database_not_ready")
            if head is not None:
                await asyncio.sleep(_MADE_ELSEWHERE_S)

    def over_quota(self, rollout: str) -> NoCapacity:
        return NoCapacity(
            f"The database of rollout {rollout} has more than {self._settings.database_quota >> 20} MB to itself.",
            code="quota_exceeded",
            hint="Roll back to a checkpoint, or release the rollout; MEGAMCP_DATABASE_QUOTA sets the limit.",
        )

    async def placed(self, cluster_name: str, name: str) -> Place:
        """A database that is there. Raises `Gone` where its cluster is not."""
        cluster = await self.clusters.named(cluster_name)
        return Place(cluster, name, cluster.dsn_for(name, name, self.password(name)))

    def is_long(self, behind: int | None) -> bool:
        """Whether a checkpoint should be a copy: too much log lies between it and the last such copy, or is gone."""
        return behind is None or behind > self._settings.database_log

    async def _placed(
        self, cluster_name: str, name: str, rollout: str, server: LoadedServer, epoch: int | None
    ) -> Place:
        place = await self.placed(cluster_name, name)
        if epoch is None:
            return place
        deed = self._signer.deed(name, rollout=rollout, server=server.name, epoch=epoch)
        return replace(place, dsn=f"{place.dsn}{'&' if '?' in place.dsn else '?'}megamcp.deed={quote(deed)}", deed=deed)

    def password(self, name: str) -> str:
        """Of the login that belongs to a database and has its name."""
        return self._signer.password(f"database {name}")

    async def _make(self, rollout: str, server: LoadedServer, environment: LoadedEnvironment) -> Place | None:
        """A copy for the rollout; None when somebody else is making it, or the rollout moved meanwhile."""
        standing = await self._store.row(sql.STANDING, rollout)
        if standing is None or standing["status"] != "open":
            raise Gone(f"Rollout {rollout} is {standing['status'] if standing else 'gone'}.", code="rollout_closed")
        async with contextlib.AsyncExitStack() as stack:
            made = await self._copy_for(stack, rollout, server, environment)
            if made is None:
                return None
            cluster, name, lineage, last_call = made
            await failpoint("database.made")
            done = await self._store.value(
                sql.HEAD_READY, name, standing["epoch"], standing["checkpoint"], lineage, last_call
            )
            if done:
                return await self._placed(cluster.name, name, rollout, server, standing["epoch"])
            await self._give_up(name, rollout)
            return None

    async def _copy_for(
        self, stack: contextlib.AsyncExitStack, rollout: str, server: LoadedServer, environment: LoadedEnvironment
    ) -> tuple[Cluster, str, dict[str, int], int] | None:
        """A copy that stands where the rollout does, its lineage and last call; None when another process makes it."""
        origin = await self._store.row(sql.ORIGIN, rollout, server.name)
        if origin is not None:
            cluster = await self.clusters.named(origin["cluster"])
            name = await self.plan(stack, cluster, server, environment, rollout, origin["lineage"])
            if name is None:
                return None
            found = await self._copy_at(cluster, point_of(origin), name, server, environment, origin["lineage"])
            return cluster, name, *found
        source = await self.sources.ready(server, environment)
        cluster = await self.clusters.named(source.cluster)
        name = await self._store.value(
            sql.TAKE_SPARE, rollout, source.content, source.cluster, server.name, environment.id, self._owner()
        )
        if name is not None:
            await stack.enter_async_context(self.underway.making(name))
            return cluster, name, {}, 0
        name = await self.plan(stack, cluster, server, environment, rollout, {})
        if name is None:
            return None
        await self.copy(cluster, source.name, name)
        return cluster, name, {}, 0

    async def settled(self, rollout: str, server: LoadedServer) -> asyncpg.Record | None:
        """The row of the rollout's database when it is ready and owes nothing; None when there is none yet."""
        server.demand_current()
        head = await self._store.row(sql.HEAD, rollout, server.name)
        if head is None or head["status"] != "ready":
            return None
        if head["rewind_to"] is not None and not await self.carry_out(rollout, server.name, head):
            return None
        return head

    async def make_view(
        self, server: LoadedServer, environment: LoadedEnvironment, point: Point | None, lineage: Mapping[str, int]
    ) -> tuple[Place, dict[str, int]]:
        """A copy that stands at a point (None: at the beginning), for readers. The keeper drops it when nobody does."""
        server.demand_current()
        source = await self.sources.ready(server, environment)
        if point is None:
            cluster = await self.clusters.named(source.cluster)
        else:
            at = await self._store.value(sql.CLUSTER_OF, point.database)
            if at is None:
                raise Gone("The database of this point is gone.", code="state_lost")
            cluster = await self.clusters.named(at)
        async with contextlib.AsyncExitStack() as stack:
            name = await self.plan(stack, cluster, server, environment, None, lineage, "view")
            assert name is not None
            found: dict[str, int] = {}
            if point is None:
                await self.copy(cluster, source.name, name)
            else:
                found, _ = await self._copy_at(cluster, point, name, server, environment, lineage)
            await self.underway.ready(name, sealed=False, lineage=found)
        return await self.placed(cluster.name, name), found

    async def _give_up(self, name: str, rollout: str) -> None:
        """The rollout has moved while its copy was made."""
        await self._store.value(sql.READY, name, False, None)
        await self._store.value(sql.ABANDON, name, rollout)

    async def plan(
        self,
        stack: contextlib.AsyncExitStack,
        cluster: Cluster,
        server: LoadedServer,
        environment: LoadedEnvironment,
        rollout: str | None,
        lineage: Mapping[str, int],
        kind: str = "clone",
    ) -> str | None:
        """The row of a database that is made until `stack` is left; None when the rollout has one."""
        await self._demand_space(cluster)
        assert server.database is not None
        name = self.sources.new_name()
        made: str | None = await self._store.value(
            sql.PLAN,
            name,
            cluster.name,
            environment.id,
            server.name,
            kind,
            server.database,
            rollout,
            dict(lineage),
            self._owner(),
        )
        if made is not None:
            await stack.enter_async_context(self.underway.making(name))
        await failpoint("database.planned")
        return made

    async def _full_disk(self, cluster: Cluster) -> Disk | None:
        """The cluster's file system where no copy is begun any more."""
        disk = await cluster.disk()
        return disk if disk is not None and disk.free < self._settings.disk_reserve else None

    async def _demand_space(self, cluster: Cluster) -> None:
        if disk := await self._full_disk(cluster):
            raise NoCapacity(
                f"The state cluster's file system has {disk.free >> 20} MB left, below the reserve of"
                f" {self._settings.disk_reserve >> 20} MB.",
                code="disk_full",
                retry_after=self._settings.reap_interval_s,
                hint="Release rollouts and checkpoints, or give MEGAMCP_STATE_DIR more room.",
            )

    async def copy(self, cluster: Cluster, source: str, name: str, *, at: int | None = None) -> Standing | None:
        found = await cluster.clone(source, name, login=name, password=self.password(name), at=at)
        await failpoint("database.copied")
        return found

    async def _copy_at(
        self,
        cluster: Cluster,
        point: Point,
        name: str,
        server: LoadedServer,
        environment: LoadedEnvironment,
        lineage: Mapping[str, int],
    ) -> tuple[dict[str, int], int]:
        """A copy that stands at a point. Returns its lineage and the id of its last call.

        A copy of the database whose point it is has what came after it undone; a sealed copy from before the point, or
        the source, has the log played on. Which is less is done, or what can be: DDL can be neither undone nor played.
        """
        if point.sealed is not None and point.sealed_position == point.position:
            return await self._copy_replayed(cluster, point, name, server, environment, lineage)
        if found := await self._copy_undone(cluster, point, name, lineage):
            return found
        await cluster.drop(name, name)
        try:
            return await self._copy_replayed(cluster, point, name, server, environment, lineage)
        except (Conflict, Gone) as error:
            log.warning("a point can't be reached from a copy before it: %s", error)
            await cluster.drop(name, name)
            if found := await self._copy_undone(cluster, point, name, lineage, however_far=True):
                return found
            raise

    async def _copy_undone(
        self, cluster: Cluster, point: Point, name: str, lineage: Mapping[str, int], *, however_far: bool = False
    ) -> tuple[dict[str, int], int] | None:
        standing = await self.copy(cluster, point.database, name, at=point.position)
        if standing is None or not standing.there:
            async with cluster.inside(name) as inside:
                standing = await inside.standing(point.position)
                if not standing.there and not (
                    (however_far or not await self._is_far(inside, cluster, point.position, point.sealed_position))
                    and await inside.go_back(point.position, within_s=self._settings.rewind_timeout_s)
                ):
                    return None
        return {**lineage, point.database: standing.head}, standing.call

    async def _copy_replayed(
        self,
        cluster: Cluster,
        point: Point,
        name: str,
        server: LoadedServer,
        environment: LoadedEnvironment,
        lineage: Mapping[str, int],
    ) -> tuple[dict[str, int], int]:
        """No DDL lies between the sealed copy, or the source, and the point."""
        assert server.database is not None
        sealed, after = point.sealed, point.sealed_position
        if sealed is None or after is None:
            sealed, after = await self.sources.of(server.database, cluster.name), 0
        if after == point.position:
            await self._copy_sealed(cluster, sealed, name)
            async with cluster.inside(name) as inside:
                last_call = (await inside.standing(after)).call
        else:
            async with contextlib.AsyncExitStack() as stack:
                log_of = await self.plan(stack, cluster, server, environment, None, {})
                assert log_of is not None
                await self.copy(cluster, point.database, log_of)
                await self._copy_sealed(cluster, sealed, name)
                async with cluster.inside(name) as inside, cluster.inside(log_of) as played:
                    last_call = await inside.redo(
                        played, after, point.position, within_s=self._settings.rewind_timeout_s
                    )
                await self.underway.ready(log_of, sealed=False)
        known = {ancestor: min(position, after) for ancestor, position in lineage.items()}
        return {**known, point.database: after, sealed: after}, last_call

    async def _copy_sealed(self, cluster: Cluster, sealed: str, name: str) -> None:
        """Raises `Gone` (`state_lost`) where somebody has dropped it."""
        try:
            await self.copy(cluster, sealed, name)
        except NotFound as error:
            raise Gone(f"The copy {sealed}, which a checkpoint needs, is gone.", code="state_lost") from error

    async def _is_far(self, inside: Inside, cluster: Cluster, position: int, sealed_position: int | None) -> bool:
        """Whether a copy of what is sealed before a position gets there sooner than undoing what came after it.

        Not where the disk has no room for one.
        """
        if await self._full_disk(cluster):
            return False
        base = 0 if sealed_position is None or sealed_position > position else sealed_position
        return await inside.is_far(position, base, shared=cluster.reflink)

    # -- following the rollout --------------------------------------------------------------------------------------

    async def carry_out(self, rollout: str, server: str, head: Mapping[str, Any], patience_s: float = 0.5) -> bool:
        """The rollback that a database still owes. False: given up, since only a copy gets there, or sooner."""
        cluster = await self.clusters.named(head["cluster"])
        name = head["name"]
        standing = await self._store.row(sql.STANDING, rollout)
        epoch = standing["epoch"] if standing else -1
        position = head["rewind_to"]
        origin = await self._store.row(sql.ORIGIN, rollout, server)
        tell = self.tell(cluster, name, "the rollout was rolled back")
        async with cluster.hold(name, patience_s=patience_s, on_busy=tell) as inside:
            if (bound := await inside.bound()) and bound.rollout == rollout and bound.epoch >= epoch:
                reached = True  # another process, or this one before it was killed
            else:
                await cluster.mend_logins(name, self.password)
                reached = not await self._is_far(
                    inside, cluster, position, origin and origin["sealed_position"]
                ) and await inside.go_back(position, within_s=self._settings.rewind_timeout_s)
                if reached:
                    await inside.bind(rollout, server, epoch)
        await failpoint("database.rewound")
        if reached:
            await self._store.value(sql.SETTLED, name, position)
            return True
        await self._store.value(sql.ABANDON, name, rollout)
        with contextlib.suppress(*outages.DRIVER):  # else the keeper does it
            await self.retire(cluster, name)
        return False

    def tell(self, cluster: Cluster, name: str, reason: str) -> Callable[[Sequence[str]], Awaitable[None]]:
        """What is done before calls that are in the way are ended: their agents learn why."""

        async def tell(calls: Sequence[str]) -> None:
            async with cluster.inside(name) as inside:
                await inside.tell(
                    [uuid.UUID(nonce) for nonce in calls], f"The call was ended: {reason}. Nothing of it was kept."
                )

        return tell

    async def retire(self, cluster: Cluster, name: str) -> None:
        """Nobody's any more: what it recorded goes to the journal, and it takes no connections from now on."""
        tell = self.tell(cluster, name, await self._why_over(cluster, name))
        async with cluster.hold(name, patience_s=self._settings.rollback_grace_s, on_busy=tell) as inside:
            bound = await inside.bound()
            rows = await inside.calls(await self._store.value(sql.COLLECTED_UPTO, name) or 0)
            for call in (call for call in rows if bound and call.rollout == bound.rollout):
                await self._store.value(sql.RECORD, *call_arguments(call), True)
        await self._store.value(sql.SEALED, name)
        await failpoint("database.retired")
        await cluster.seal(name, patience_s=self._settings.rollback_grace_s, on_busy=tell)

    async def _why_over(self, cluster: Cluster, name: str) -> str:
        async with cluster.inside(name) as inside:
            bound = await inside.bound()
        standing = await self._store.row(sql.STANDING, bound.rollout) if bound else None
        if standing is None or standing["status"] == "open":
            full = await self._store.value(sql.STATUS, name) == "full"
            return "its database takes more disk than a rollout may have" if full else "the rollout has moved on"
        return "the rollout was released" if standing["status"] == "closed" else "the rollout's lease ended"

    async def moved(self, connection: asyncpg.Connection, rollout: str, checkpoint: str) -> None:
        """In the transaction of a rollback: the rollout's databases owe it from now on."""
        await connection.execute(sql.MOVE, rollout, checkpoint)

    async def left(self, connection: asyncpg.Connection, rollout: str) -> None:
        """In the transaction of a release."""
        await connection.execute(sql.LEAVE, rollout)

    async def settle(self, rollout: str, environment: LoadedEnvironment) -> None:
        """After a rollback: carry it out now, so that the next call need not do it; who can't leaves it to that."""
        self.forget(rollout)
        for server in environment.servers:
            if server.database:
                head = await self._store.row(sql.HEAD, rollout, server.name)
                if head is not None and head["status"] == "ready" and head["rewind_to"] is not None:
                    try:
                        await self.carry_out(rollout, server.name, head, self._settings.rollback_grace_s)
                    except (MegaMCPError, *outages.DRIVER) as error:
                        log.warning("rollout %s: the rollback is carried out with the next call: %s", rollout, error)


def point_of(row: asyncpg.Record, total: int | None = None) -> Point:
    """The point of a row of `megamcp.snapshots`."""
    return Point(row["database"], row["position"], row["sealed"], row["sealed_position"], total)


def call_arguments(call: CallRow) -> tuple[Any, ...]:
    return (
        call.rollout, call.server, call.tool, call.arguments, call.result, call.is_error, call.began, call.ended,
        call.nonce, call.idempotency_key, call.fingerprint, call.epoch,
    )  # fmt: skip
