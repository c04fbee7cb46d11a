"""Sources: the database of each loaded content that every rollout's own is a copy of, one on each cluster that is used.

Built when an environment is loaded, or when one that comes with the package is first opened; built again where a
cluster was lost, as long as the environment's files are still what the version's hash says.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megamcp.databases import journal as sql
from megamcp.databases.clusters import Clusters
from megamcp.databases.underway import Underway
from megamcp.environments import LoadedEnvironment, LoadedServer
from megamcp.errors import DeadlineExceeded, Gone
from megamcp.failpoints import failpoint
from megamcp.handles import Signer
from megamcp.loading import Script
from megamcp.loading.units import Progress
from megamcp.reading import database_hash, read
from megamcp.state.clones import Cluster, Keys
from megamcp.store import Store

log = logging.getLogger(__name__)

_WAIT_S = 600.0
_LOADS_KEPT_S = 0.5


@dataclass(frozen=True, slots=True)
class Source:
    """A sealed database: nobody connects to it, everybody may copy it."""

    name: str
    cluster: str
    content: str


class Sources:
    """Finds or builds sources. `owner` is the number of this gateway process."""

    def __init__(self, store: Store, clusters: Clusters, signer: Signer, owner: Callable[[], int]) -> None:
        self._store = store
        self._clusters = clusters
        self._signer = signer
        self._owner = owner
        self.underway = Underway(store, owner)
        self.prefix = f"mm_{signer.password('deployment')[:8]}_"
        self._known: dict[tuple[str, str], Source] = {}
        self._loads: dict[str, int] = {}
        self._loads_at = 0.0

    async def ready(self, server: LoadedServer, environment: LoadedEnvironment) -> Source:
        """The source of a loaded server, on the cluster that has the fewest databases. Raises what building raises."""
        assert server.database is not None

        async def content() -> Sequence[Script]:
            return await asyncio.to_thread(_content, server, environment)

        return await self._ready(server.database, content, None)

    async def build(self, content: str, scripts: Sequence[Script], progress: Progress | None) -> Source:
        """The source of a content that is being loaded. Raises `Unprocessable` with what PostgreSQL said of it."""

        async def given() -> Sequence[Script]:
            return scripts

        return await self._ready(content, given, progress)

    async def _ready(
        self, content: str, scripts_of: Callable[[], Awaitable[Sequence[Script]]], progress: Progress | None
    ) -> Source:
        cluster = await self._roomiest()
        key = (content, cluster.name)
        if known := self._known.get(key):
            return known
        give_up = time.monotonic() + _WAIT_S
        while True:
            row = await self._store.row(sql.SOURCE, *key)
            if row is None:
                if await self._build(cluster, content, await scripts_of(), progress):
                    continue
            elif row["status"] == "ready":
                await self._store.value(sql.USED, row["name"])
                source = self._known[key] = Source(row["name"], cluster.name, content)
                return source
            elif row["orphaned"]:
                await self._store.value(sql.CONDEMN_SOURCE, row["name"])
                continue
            if time.monotonic() > give_up:
                raise DeadlineExceeded("The environment's database is still being built.", code="database_not_ready")
            await asyncio.sleep(0.05)

    async def of(self, content: str, cluster: str) -> str:
        """Name of the source that databases on a cluster were copied from. Raises `Gone`."""
        row = await self._store.row(sql.SOURCE, content, cluster)
        if row is None:
            raise Gone("The database that this state was copied from is gone.", code="state_lost")
        return str(row["name"])

    def new_name(self) -> str:
        """Unguessable, and tells this deployment's databases from those of another on the same cluster."""
        return f"{self.prefix}{secrets.token_hex(8)}"

    def forget(self, name: str) -> None:
        self._known = {key: source for key, source in self._known.items() if source.name != name}

    async def _roomiest(self) -> Cluster:
        clusters = await self._clusters.ready()
        if len(clusters) == 1:
            return clusters[0]
        if time.monotonic() - self._loads_at > _LOADS_KEPT_S:
            self._loads = {row["cluster"]: row["databases"] for row in await self._store.rows(sql.LOADS)}
            self._loads_at = time.monotonic()
        chosen = min(clusters, key=lambda cluster: self._loads.get(cluster.name, 0))
        self._loads[chosen.name] = self._loads.get(chosen.name, 0) + 1
        return chosen

    async def _build(
        self, cluster: Cluster, content: str, scripts: Sequence[Script], progress: Progress | None
    ) -> bool:
        """True when it was built here; False when another process is at it."""
        name = self.new_name()
        planned = await self._store.value(
            sql.PLAN, name, cluster.name, None, None, "source", content, None, {}, self._owner()
        )
        if planned is None:
            return False
        started = time.monotonic()
        async with self.underway.making(name):
            await failpoint("source.planned")
            first, *others = scripts
            await cluster.build(name, ddl=first, seeds=others, keys=self._keys(), progress=progress)
            await failpoint("source.built")
            await self.underway.ready(name, sealed=True)
        log.info("the database of content %s was built in %.2f s", content, time.monotonic() - started)
        return True

    def _keys(self) -> Keys:
        inner, outer = Signer.pads(self._signer.secret)
        return Keys(inner, outer)


def _content(server: LoadedServer, environment: LoadedEnvironment) -> Sequence[Script]:
    """SQL of the source, from the environment's folder. Raises `Gone` when the files aren't what was loaded."""
    scripts = read(environment.folder).scripts[server.name]
    if database_hash(scripts) != server.database:
        raise Gone(
            f"The files of {environment.full_name} in its folder have changed since it was loaded, and its database on"
            " this cluster is gone.",
            code="state_lost",
            hint="Load the environment again: that makes a new version.",
        )
    return scripts
