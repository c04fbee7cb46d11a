"""The PostgreSQL clusters that hold cloned databases: those that the settings name, or one of our own.

Our own is started when it is first needed.

A cluster is known by a name that also says which one it is (its system identifier), so that a row of a cluster that
was lost is told from one of a new cluster at the same place. Our own runs with fsync off: what an operating-system
crash may lose are states, never the journal; after such a crash the folder is set aside, since its files can't be
trusted, and a new cluster is made.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

import asyncpg

from megamcp import outages
from megamcp.errors import Gone, Unavailable, Unprocessable
from megamcp.postgres import EmbeddedPostgres
from megamcp.settings import Settings
from megamcp.state.clones import Cluster, demand, disk, place
from megamcp.state.clones.logins import scram_verifier
from megamcp.state.names import literal

log = logging.getLogger(__name__)

BOOT = Path("/proc/sys/kernel/random/boot_id")
SETTINGS = {
    "temp_file_limit": "2GB",  # of one session: sorts and the like, which no quota sees
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "128MB",
    "autovacuum_naptime": "30s",
}
CONNECTIONS = 500


class OwnCluster:
    """The embedded PostgreSQL for databases. One process runs it; others may be told its DSN."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.state_dir or settings.data_dir / "state"
        self._postgres = EmbeddedPostgres(self._folder, max_connections=CONNECTIONS, settings=SETTINGS)

    @property
    def dsn(self) -> str:
        """Of the superuser. Holds the password."""
        return self._postgres.dsn

    async def __aenter__(self) -> Self:
        _set_aside(self._folder)
        await self._postgres.start()
        disk.copy_by_page(self._folder / "cluster" / "base")
        await _shorten_login(self.dsn)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._postgres.stop()
        await asyncio.to_thread(os.sync)
        _mark(self._folder).unlink(missing_ok=True)


class Clusters:
    """Opened once, closed with the gateway. `ready` is cheap after the first time."""

    def __init__(self, settings: Settings, control_dsn: str) -> None:
        self._settings = settings
        self._control_dsn = control_dsn
        self._urls = [url.get_secret_value() for url in settings.state_urls]
        self._own = contextlib.AsyncExitStack()
        self._clusters: dict[str, Cluster] = {}
        self._opening = asyncio.Lock()

    @property
    def opened(self) -> Sequence[Cluster]:
        """Those that run already; empty when nothing has asked for one."""
        return list(self._clusters.values())

    async def ready(self) -> Sequence[Cluster]:
        """Every cluster. Raises `Unavailable`, `Unprocessable` (`bad_state_url`, and what `demand` raises)."""
        if not self._clusters:
            async with self._opening:
                if not self._clusters:
                    self._clusters = await self._open()
        return list(self._clusters.values())

    async def named(self, name: str) -> Cluster:
        """Raises `Gone` (`state_lost`) for a cluster that is no more."""
        await self.ready()
        if name not in self._clusters:
            raise Gone(
                f"The databases of cluster {name} are lost: it is not among the state clusters any more.",
                code="state_lost",
                hint="The journal still has what was done. Open a new rollout.",
            )
        return self._clusters[name]

    async def aclose(self) -> None:
        """Ends connections, and the cluster that is ours."""
        for cluster in self._clusters.values():
            await cluster.close()
        self._clusters = {}
        await self._own.aclose()

    async def _open(self) -> dict[str, Cluster]:
        if not self._urls:
            self._urls = [(await self._own.enter_async_context(OwnCluster(self._settings))).dsn]
        opened: dict[str, Cluster] = {}
        control, control_database = await _identifier(self._control_dsn)
        try:
            for url in self._urls:
                name, _ = await _identifier(url)
                if name in opened:  # named twice
                    continue
                cluster = Cluster(
                    name,
                    url,
                    admin_connections=self._settings.state_connections,
                    statement_s=self._settings.load_statement_s,
                )
                await cluster.open(control_database if name == control else None)
                opened[cluster.name] = cluster
                if not cluster.reflink:
                    log.warning(
                        "state cluster %s can't share blocks between databases: each copy takes its full size and time."
                        " Put MEGAMCP_STATE_DIR on XFS with reflink or on btrfs.",
                        cluster.name,
                    )
        except BaseException:
            for cluster in opened.values():
                await cluster.close()
            raise
        return opened


async def _shorten_login(dsn: str) -> None:
    """Our superuser's password is random; a verifier with fewer rounds saves 10 ms at each connection."""
    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        password = urlsplit(dsn).password or ""
        await connection.execute(f"alter role current_user password {literal(scram_verifier(unquote(password)))}")
    finally:
        await connection.close()


async def check(urls: Sequence[str]) -> None:
    """Whether each cluster that MEGAMCP_STATE_URLS names can be one. Raises what `Clusters.ready` does."""
    for url in urls:
        connection = await _connect(url)
        try:
            await demand(connection, place(url))
        finally:
            await connection.close()


async def _identifier(url: str) -> tuple[str, str]:
    """What tells this cluster from all others, and the database's name. Raises what `_connect` does."""
    connection = await _connect(url)
    try:
        query = "select system_identifier::text, current_database()::text from pg_control_system()"
        return tuple((await connection.fetchrow(query)).values())
    finally:
        await connection.close()


async def _connect(url: str) -> asyncpg.Connection:
    """Raises `Unavailable` (`state_cluster_unreachable`), `Unprocessable` (`bad_state_url`)."""
    try:
        return await asyncpg.connect(url, timeout=10)
    except (asyncpg.exceptions.ClientConfigurationError, ValueError) as error:  # whose words may hold the password
        raise Unprocessable(
            f"A URL of MEGAMCP_STATE_URLS can't be used: {type(error).__name__}.",
            code="bad_state_url",
            hint="Each has the form postgresql://user:password@host:5432/database; escape special characters.",
        ) from error
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        raise Unprocessable(
            f"The state cluster at {place(url)} refuses the login: {error}.",
            code="bad_state_url",
            hint="Check the user, the password and the database of this URL in MEGAMCP_STATE_URLS.",
        ) from error
    except outages.DRIVER as error:
        raise Unavailable(
            f"The state cluster at {place(url)} can't be reached: {str(error) or type(error).__name__}.",
            code="state_cluster_unreachable",
            hint="Check that PostgreSQL runs and listens there; MEGAMCP_STATE_URLS names it.",
        ) from error


def _mark(folder: Path) -> Path:
    """Names the boot of the machine in which files may not be on disk yet. Absent: all of them are."""
    return folder.with_name(f"{folder.name}.boot")


def _set_aside(folder: Path) -> None:
    """A cluster without fsync that was used when the operating system went down is not to be trusted."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    boot = BOOT.read_text().strip() if BOOT.exists() else "unknown"
    mark = _mark(folder)
    if folder.exists() and mark.exists() and mark.read_text().strip() != boot:
        aside = folder.with_name(f"{folder.name}.lost-{int(time.time())}")
        os.rename(folder, aside)
        log.error(
            "the machine went down while the state cluster ran with fsync off: its databases are lost and were set"
            " aside as %s; the journal is whole. Rollouts that stand on them answer state_lost.",
            aside.name,
        )
    mark.write_text(boot)
