"""Keeps databases in order: spares for rollouts to come, seals on what nobody writes any more, an end to the rest.

Every gateway process runs it. Each database is worked on by one process at a time (its row is locked), each round is
bounded, and every step may be cut off: the next round, here or elsewhere, takes it up from the rows.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import asyncpg

from megamcp.databases import journal as sql
from megamcp.databases.heads import Databases
from megamcp.errors import MegaMCPError
from megamcp.failpoints import failpoint
from megamcp.settings import Settings
from megamcp.state.clones import Cluster
from megamcp.state.clones.source import INSIDE
from megamcp.store import TELL_STANDING, Store

log = logging.getLogger(__name__)

BATCH = 200
PAUSE_S = 1.0
MEASURED_AT_ONCE = 20
MEASURED_EACH = timedelta(seconds=30)
LOGINS_EACH_S = 5.0
TRIMMED_EACH_S = 10.0
SPARES_FOR = timedelta(minutes=10)


async def _nobody(_calls: Sequence[str]) -> None:
    """Nobody waits for the answer of a call on a database that is nobody's."""


@contextlib.contextmanager
def _apart(name: str) -> Iterator[None]:
    """What goes wrong with one database keeps nobody from the others. It is tried again in the next round."""
    try:
        yield
    except MegaMCPError as error:
        log.warning("database %s: %s", name, error)
    except Exception:
        log.exception("database %s", name)


class Keeper:
    """Runs `once` every second until cancelled. Starts no cluster: where none runs there is nothing to keep."""

    def __init__(self, store: Store, databases: Databases, settings: Settings, owner: Callable[[], int]) -> None:
        self._store = store
        self._databases = databases
        self._settings = settings
        self._owner = owner
        self._swept = self._looked = self._cut = float("-inf")
        self._trimmed: dict[str, int] = {}

    async def run(self) -> None:
        """An outage of a cluster stops nothing: the next round tries again."""
        while True:
            try:
                await self.once()
            except MegaMCPError as error:
                log.warning("keeper of databases: %s", error)
            except Exception:
                log.exception("keeper of databases")
            await asyncio.sleep(PAUSE_S)

    async def once(self) -> dict[str, int]:
        """One round; gives what was done, by step."""
        if not self._databases.clusters.opened:
            if not await self._store.value("select exists (select 1 from megamcp.databases)"):
                return {}
            await self._databases.clusters.ready()
        done = {"sealed": await self._seal_leftovers(), "mended": await self._mend_doors()}
        done["logins"] = await self._mend_logins()
        await self._store.value(sql.DROP_SNAPSHOTS)
        await self._databases.underway.condemn_abandoned()
        await self._store.rows(sql.CONDEMN, BATCH, INSIDE)
        done["dropped"] = await self._drop()
        done["measured"] = await self._measure()
        done["trimmed"] = await self._trim()
        done["orphans"] = await self._drop_orphans()
        done["spares"] = await self._make_spares()
        return done

    async def _seal_leftovers(self) -> int:
        sealed = 0
        for row in await self._store.rows(sql.OPEN_LEFTOVERS, BATCH):
            if cluster := self._cluster(row["cluster"]):
                with _apart(row["name"]):
                    await self._databases.retire(cluster, row["name"])
                    sealed += 1
            else:  # its cluster is gone, and it with it
                await self._store.value(sql.SEALED, row["name"])
                sealed += 1
        return sealed

    async def _mend_doors(self) -> int:
        """Who is killed while copying leaves the source shut; who is killed while retiring may leave one open."""
        mended = 0
        for cluster in self._databases.clusters.opened:
            there = await cluster.doors()
            for row in await self._store.rows(sql.DOORS, cluster.name):
                name, is_open = row["name"], there.get(row["name"])
                if is_open is None or is_open == row["open"]:
                    continue
                with _apart(name):
                    if row["open"]:
                        await cluster.reopen(name)
                    else:
                        await cluster.seal(name, patience_s=1, on_busy=_nobody)
                    mended += 1
        return mended

    async def _mend_logins(self) -> int:
        """A role may change its own password and settings: then nobody else would get in."""
        if time.monotonic() - self._looked < LOGINS_EACH_S:
            return 0
        self._looked = time.monotonic()
        mended = 0
        for cluster in self._databases.clusters.opened:
            for name in await cluster.mend_logins(self._databases.sources.prefix, self._databases.password):
                log.warning("the login of database %s had changed its password or settings and got them back", name)
                mended += 1
        return mended

    async def _drop(self) -> int:
        dropped = 0
        for row in await self._store.rows(sql.DROPPING, BATCH):
            with _apart(row["name"]):
                dropped += await self._drop_one(row)
        return dropped

    async def _drop_one(self, row: asyncpg.Record) -> bool:
        async with self._store.transaction() as connection:
            if not await connection.fetchval(sql.LOCK_ROW, row["name"]):
                return False
            if cluster := self._cluster(row["cluster"]):
                await cluster.drop(row["name"], row["name"])
            self._databases.sources.forget(row["name"])
            await failpoint("database.dropped")
            await connection.execute(sql.FORGET, row["name"])
            return True

    async def _measure(self) -> int:
        """Who takes more disk than a rollout may gets no further; its checkpoints stay good."""
        rows = await self._store.rows(sql.UNMEASURED, MEASURED_AT_ONCE, MEASURED_EACH)
        for row in rows:
            if cluster := self._cluster(row["cluster"]):
                used = await cluster.own_bytes(row["name"])
                quota = self._settings.database_quota
                if await self._store.value(sql.MEASURED, row["name"], used, quota):  # this round made it full
                    log.warning(
                        "database %s has %d MB to itself; the quota is %d MB", row["name"], used >> 20, quota >> 20
                    )
                    await self._store.value(TELL_STANDING, row["rollout"])  # whose places are no longer good
                    self._databases.forget(row["rollout"])
                    with _apart(row["name"]):
                        await self._databases.retire(cluster, row["name"])
        return len(rows)

    async def _trim(self) -> int:
        """The log of databases that live long."""
        if time.monotonic() - self._cut < TRIMMED_EACH_S:
            return 0
        self._cut = time.monotonic()
        trimmed = 0
        rows = await self._store.rows(sql.TRIMMABLE, self._settings.database_log)
        self._trimmed = {row["name"]: self._trimmed.get(row["name"], 0) for row in rows}
        for row in rows:
            cluster = self._cluster(row["cluster"])
            if cluster is None or self._trimmed[row["name"]] >= row["upto"]:
                continue
            with _apart(row["name"]):
                async with cluster.inside(row["name"]) as inside:
                    trimmed += await inside.trim(row["upto"])
                self._trimmed[row["name"]] = row["upto"]
        return trimmed

    async def _drop_orphans(self) -> int:
        """Databases of ours that no row knows: there are none unless a cluster was restored from a copy."""
        if time.monotonic() - self._swept < 60:
            return 0
        self._swept = time.monotonic()
        dropped = 0
        for cluster in self._databases.clusters.opened:
            there = await cluster.names(self._databases.sources.prefix)
            known = {row["name"] for row in await self._store.rows(sql.NAMES, cluster.name)}
            for name in there - known:
                log.warning("database %s belongs to nothing and is dropped", name)
                await cluster.drop(name, name)
                dropped += 1
            for role in await cluster.drop_stray_roles(self._databases.sources.prefix):
                log.warning("role %s belongs to no database any more and is dropped", role)
        return dropped

    async def _make_spares(self) -> int:
        made = 0
        for row in await self._store.rows(sql.WANTED_SPARES, SPARES_FOR):
            cluster = self._cluster(row["cluster"])
            if cluster is None or row["spares"] >= self._settings.spare_databases:
                continue
            disk = await cluster.disk()
            if disk is not None and disk.free < 2 * self._settings.disk_reserve:
                continue
            name = self._databases.sources.new_name()
            await self._store.value(
                sql.PLAN,
                name,
                cluster.name,
                None,
                None,
                "spare",
                row["content"],
                None,
                {},
                self._owner(),
            )
            async with self._databases.underway.making(name):
                await cluster.clone(row["source"], name, login=name, password=self._databases.password(name))
                await failpoint("spare.copied")
                await self._databases.underway.ready(name, sealed=False)
            made += 1
        return made

    def _cluster(self, name: str) -> Cluster | None:
        return next((cluster for cluster in self._databases.clusters.opened if cluster.name == name), None)
