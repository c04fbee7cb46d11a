"""One state cluster: sources, clones, their logins and locks.

Every step may be cut off by a kill; `drop` takes away whatever is left, so that its caller (who has written down what
it was about to make) can always begin again. Databases are owned by the superuser, so that nobody else can drop or
open one. Clones are made one at a time in the whole cluster, under a lock of PostgreSQL.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import asyncpg

from megamcp.errors import Conflict, DeadlineExceeded, NotFound, Unavailable, Unprocessable
from megamcp.failpoints import failpoint
from megamcp.state.clones import logins, source
from megamcp.state.clones.inside import Inside
from megamcp.state.clones.sessions import Sessions
from megamcp.state.clones.types import Disk, Keys
from megamcp.state.names import ident

log = logging.getLogger(__name__)

PREFIX = "mm_"
LOCK = 7723
_CLONING = 7730
_NAME = re.compile(r"mm_[a-z0-9_]{1,50}")
_COPIED_S = 5.0  # how long a copy may take before its source counts as sealed
_GONE_S = 10.0  # how long an ended backend may take to be gone
_TERMINATE = "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1 and not (pid = any ($2::int[]))"
# The functions, not the views on them: those show a session nothing but its own login's (see rights.sql).
_HOLDERS = """select l.pid, a.application_name from pg_lock_status() l
  join pg_database d on d.oid = l.database and d.datname = current_database()
  join pg_stat_get_activity(null) a on a.pid = l.pid
 where l.locktype = 'advisory' and l.granted and l.objid = 7723 and l.classid = 0 and l.objsubid = 1
   and ($1 or l.mode = 'ExclusiveLock')"""

OnBusy = Callable[[list[str]], Awaitable[None]]


class Cluster:
    """Raises `Unavailable` where the server can't be reached, `NoCapacity` where its connections are used up."""

    def __init__(self, name: str, dsn: str, *, admin_connections: int = 32) -> None:
        self.name = name
        self.reflink = False
        self._dsn = dsn
        self._sessions = Sessions(admin_connections)
        self._hands: dict[str, str] = {}  # database → password of its hand
        self._cloning = asyncio.Lock()
        self._folder: str | None = None

    async def open(self) -> None:
        """Look whether the server can do this. Raises `Unprocessable` (`postgres_too_old`, `postgres_rights`)."""
        async with self._maintenance() as connection:
            row = await connection.fetchrow(
                "select current_setting('server_version_num')::int as number,"
                " current_setting('server_version') as version,"
                " current_setting('data_directory') as folder, rolsuper from pg_roles where rolname = current_user"
            )
            if row["number"] < 180000:
                raise Unprocessable(
                    f"State cluster {self.name} runs PostgreSQL {row['version']}; databases as state need 18.",
                    code="postgres_too_old",
                    hint="Name a PostgreSQL 18, or leave the setting out: the embedded one is 18.",
                )
            if not row["rolsuper"]:
                raise Unprocessable(
                    f"The login of state cluster {self.name} is no superuser.",
                    code="postgres_rights",
                    hint="Databases as state need event triggers and changed catalogs, which only a superuser makes.",
                )
            self._folder = row["folder"]
            await connection.execute(logins.group(logins.OWNER) + logins.group(logins.HANDS))
            self.reflink = await self._probe(connection)
        if not self.reflink:
            log.warning(
                "state cluster %s: its file system can't share blocks between files (reflink), so every clone is a full"
                " copy; XFS and btrfs can",
                self.name,
            )

    async def close(self) -> None:
        """Close every connection."""
        await self._sessions.close()

    def dsn_for(self, database: str, user: str, password: str) -> str:
        """DSN of a login. It holds the password: don't log it."""
        parts = urlsplit(self._dsn)
        place = parts.netloc.rpartition("@")[2]
        options = [(key, value) for key, value in parse_qsl(parts.query) if key not in ("user", "password", "dbname")]
        who = f"{quote(user, safe='')}:{quote(password, safe='')}@"
        return urlunsplit(("postgresql", who + place, "/" + quote(database, safe=""), urlencode(options), ""))

    async def names(self) -> set[str]:
        """All databases of ours that are there."""
        async with self._maintenance() as connection:
            rows = await connection.fetch("select datname from pg_database where starts_with(datname, $1)", PREFIX)
        return {row["datname"] for row in rows}

    async def build(
        self,
        name: str,
        *,
        ddl: str,
        seeds: Sequence[str],
        keys: Keys,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Make a source: sealed, with the environment's tables and rows. Whole or not at all.

        Raises `Unprocessable` (`environment_sql_failed`) with PostgreSQL's words, `Conflict` where the name is taken.
        """
        self._check(name)
        made, builder, password = source.temporary(name), f"mm_builder_{secrets.token_hex(8)}", secrets.token_hex(32)
        try:
            async with self._maintenance() as connection:
                if await self._exists(connection, name):
                    raise Conflict(f"There is a database {name} already.", code="database_exists")
                await connection.execute(
                    f"create database {ident(made)} template template0 encoding 'UTF8' locale_provider builtin"
                    " builtin_locale 'C.UTF-8' locale 'C.UTF-8'"
                )
                await connection.execute(
                    source.database_rights(made) + logins.login(made, builder, password, exists=False)
                )
            async with self._sessions.use(made, self._dsn_of(made)) as admin:
                await source.fill(
                    admin,
                    self.dsn_for(made, builder, password),
                    ddl=ddl,
                    seeds=seeds,
                    progress=progress or (lambda *_: None),
                )
                await self._disown(admin)
                await source.install(admin, keys)
            async with self._maintenance() as connection:
                await self._shut(connection, made)
                await connection.execute(f"alter database {ident(made)} rename to {ident(name)}")
            await failpoint("build.renamed")
        except BaseException:
            with contextlib.suppress(Exception):
                await asyncio.shield(self.drop(made, builder))
            raise
        async with self._maintenance() as connection:
            await connection.execute(
                f"revoke all on database {ident(name)} from {ident(builder)}; drop role {ident(builder)}"
            )

    async def clone(
        self,
        source_name: str,
        target: str,
        *,
        login: str | None,
        password: str = "",
        patience_s: float = 10.0,
        on_busy: OnBusy | None = None,
    ) -> None:
        """Copy a database. Without a login the copy stays sealed.

        Where the source takes connections, its lock is waited for (see `hold`) and all its sessions are ended.
        Raises `NotFound`, `Conflict` (`database_exists`), `Unavailable` (`disk_full`).
        """
        self._check(target)
        async with self._one_at_a_time() as connection:
            sealed = await self._sealed(connection, source_name)
            if await self._exists(connection, target):
                raise Conflict(f"There is a database {target} already.", code="database_exists")
            try:
                if not sealed:
                    await self._drain(connection, source_name, patience_s, on_busy)
                await failpoint("clone.drained")
                await self._copy(connection, source_name, target)
            finally:
                if not sealed:
                    await asyncio.shield(
                        connection.execute(f"alter database {ident(source_name)} with allow_connections true")
                    )
            await failpoint("clone.created")
            await connection.execute(source.database_rights(target))
            await self._clean(connection, target, login)
            await failpoint("clone.cleaned")
            if login is not None:
                await self.admit(target, login, password)
        await failpoint("clone.admitted")

    async def admit(self, name: str, login: str, password: str) -> None:
        """Make or renew a database's login and open the database."""
        async with self._maintenance() as connection:
            exists = await connection.fetchval("select exists (select from pg_roles where rolname = $1)", login)
            await connection.execute(
                logins.login(name, login, password, exists=exists)
                + f"alter database {ident(name)} with allow_connections true"
            )

    async def seal(self, name: str, *, patience_s: float = 10.0, on_busy: OnBusy | None = None) -> None:
        """Let nobody in any more, after the work that is open. Idempotent."""
        async with self._maintenance() as connection:
            if not await self._sealed(connection, name):
                await self._drain(connection, name, patience_s, on_busy)

    async def unseal(self, name: str) -> None:
        """Let its login in again."""
        async with self._maintenance() as connection:
            await self._sealed(connection, name)
            await connection.execute(f"alter database {ident(name)} with allow_connections true")

    async def drop(self, name: str, login: str | None = None) -> None:
        """Take a database away with its login and its hand, whatever they are doing. Idempotent."""
        self._check(name)
        async with self._maintenance() as connection:
            if await self._exists(connection, name):
                await self._shut(connection, name)
                await failpoint("drop.shut")
                await connection.execute(f"drop database if exists {ident(name)} with (force)")
            await failpoint("drop.database")
            self._hands.pop(name, None)
            for role in filter(None, (login, logins.hand(name))):
                await self._drop_role(connection, role)

    @asynccontextmanager
    async def inside(self, name: str) -> AsyncIterator[Inside]:
        """A look inside, without the lock. Raises `Conflict` (`database_sealed`), `NotFound`."""
        async with self._session(name) as connection:
            yield Inside(connection, lambda: self._hand(name))

    @asynccontextmanager
    async def hold(
        self, name: str, *, shared: bool = False, patience_s: float, on_busy: OnBusy | None = None
    ) -> AsyncIterator[Inside]:
        """A look inside with the database's lock: no call and no client's transaction is open (`shared`: no call that
        writes). Each thing done inside is a transaction of its own.

        When patience ends, `on_busy` is told the nonces of the calls that have the lock, and their backends are ended.
        Without it: `DeadlineExceeded`.
        """
        give_up = time.monotonic() + patience_s + (_GONE_S if on_busy else 0)
        busy_at = time.monotonic() + patience_s
        async with self._session(name) as connection:
            while not await self._locked(connection, shared, min(busy_at, give_up) - time.monotonic()):
                if on_busy is None or time.monotonic() > give_up:
                    raise DeadlineExceeded(
                        f"Database {name} was busy for {patience_s:g} s.",
                        code="deadline_exceeded",
                        hint="A call or a client's transaction is open on it; try again when it's done.",
                    )
                await self._end_holders(connection, shared, on_busy)
                busy_at = time.monotonic() + 0.2
            try:
                yield Inside(connection, lambda: self._hand(name))
            finally:
                await asyncio.shield(self._unlock(connection))

    async def disk(self) -> Disk | None:
        """Room on the file system that holds the data; None where it isn't this machine's."""
        host = urlsplit(self._dsn).hostname or dict(parse_qsl(urlsplit(self._dsn).query)).get("host", "")
        if not self._folder or not (unquote(host).startswith("/") or host in ("", "localhost", "127.0.0.1", "::1")):
            return None
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return None
        return Disk(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    # -- steps ---------------------------------------------------------------------------------------

    async def _probe(self, connection: Any) -> bool:
        """Whether a copy can share its blocks here: one is made."""
        name = f"mm_probe_{secrets.token_hex(8)}"
        try:
            await connection.execute("set file_copy_method = clone")
            async with self._lock_cluster(connection):
                await connection.execute(
                    f"create database {ident(name)} template template0 strategy file_copy allow_connections false"
                )
            return True
        except asyncpg.PostgresError as error:
            log.info("state cluster %s: no clone copy: %s", self.name, error)
            return False
        finally:
            await connection.execute("reset file_copy_method")
            await connection.execute(f"drop database if exists {ident(name)}")

    async def _copy(self, connection: Any, source_name: str, target: str) -> None:
        try:
            await connection.execute(f"set file_copy_method = {'clone' if self.reflink else 'copy'}")
            await connection.execute(
                f"create database {ident(target)} template {ident(source_name)} strategy file_copy"
                " allow_connections false"
            )
        except asyncpg.DiskFullError as error:
            raise Unavailable(
                f"The disk of state cluster {self.name} is full: no copy of {source_name} was made.",
                code="disk_full",
                hint="Release rollouts and checkpoints, or give the cluster more room.",
            ) from error
        except asyncpg.DuplicateDatabaseError as error:
            raise Conflict(f"There is a database {target} already.", code="database_exists") from error

    async def _clean(self, connection: Any, target: str, login: str | None) -> None:
        """What belonged to the source's login is the owner's here, and what it was granted is no more."""
        rows = await connection.fetch(
            "select distinct r.rolname from pg_shdepend s join pg_roles r on r.oid = s.refobjid"
            " where s.dbid = (select oid from pg_database where datname = $1) and s.refclassid = 'pg_authid'::regclass"
            " and not r.rolsuper and r.oid >= 16384 and r.rolname <> all ($2::text[])",
            target,
            [logins.OWNER, logins.HANDS, login or ""],
        )
        if not rows:
            return
        await connection.execute(f"alter database {ident(target)} with allow_connections true")
        async with self._session(target) as admin, admin.transaction():
            for row in rows:
                await self._disown_role(admin, row["rolname"])
        await self._shut(connection, target)

    async def _disown(self, admin: Any) -> None:
        """The same in a database that is being built."""
        rows = await admin.fetch(
            "select distinct r.rolname from pg_shdepend s join pg_roles r on r.oid = s.refobjid"
            " where s.dbid = (select oid from pg_database where datname = current_database())"
            " and s.refclassid = 'pg_authid'::regclass and not r.rolsuper and r.oid >= 16384 and r.rolname <> $1",
            logins.OWNER,
        )
        for row in rows:
            await self._disown_role(admin, row["rolname"])

    async def _disown_role(self, admin: Any, role: str) -> None:
        await admin.execute("set local event_triggers = off") if admin.is_in_transaction() else None
        await admin.execute(f"reassign owned by {ident(role)} to {logins.OWNER}")
        await admin.execute(f"drop owned by {ident(role)}")

    async def _drain(self, connection: Any, name: str, patience_s: float, on_busy: OnBusy | None) -> None:
        """Wait for the work that is open, let nobody in, end every session."""
        async with self.hold(name, patience_s=patience_s, on_busy=on_busy) as held:
            # Under the lock, so that who is ended has nothing open, or waits for its turn and has done nothing yet.
            await connection.execute(f"alter database {ident(name)} with allow_connections false")
            await failpoint("drain.closed")
            await self._end_sessions(connection, name, [held.connection.get_server_pid()])
        await self._end_sessions(connection, name, [])

    async def _shut(self, connection: Any, name: str) -> None:
        """The same without waiting for anybody."""
        await connection.execute(f"alter database {ident(name)} with allow_connections false")
        await self._end_sessions(connection, name, [])

    async def _end_sessions(self, connection: Any, name: str, but: list[int]) -> None:
        """CREATE and DROP DATABASE look for sessions every 100 ms only, so they are waited for here."""
        if not but:
            await self._sessions.forget(name)
        give_up = time.monotonic() + _GONE_S
        while await connection.fetch(_TERMINATE, name, but):
            if time.monotonic() > give_up:
                raise DeadlineExceeded(f"Sessions of database {name} don't end.", code="sessions_remain")
            await asyncio.sleep(0.001)

    async def _locked(self, connection: Any, shared: bool, wait_s: float) -> bool:
        function = "pg_advisory_lock_shared" if shared else "pg_advisory_lock"
        try:
            await connection.execute(
                f"set local lock_timeout = {max(1, int(wait_s * 1000))}; select {function}({LOCK})"
            )
        except asyncpg.LockNotAvailableError:
            return False
        return True

    async def _unlock(self, connection: Any) -> None:
        try:
            await connection.execute("select pg_advisory_unlock_all()")
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            connection.terminate()

    async def _end_holders(self, connection: Any, shared: bool, on_busy: OnBusy) -> None:
        holders = await connection.fetch(_HOLDERS, not shared)
        calls = [row["application_name"].partition(" ") for row in holders]
        await on_busy([nonce for kind, _, nonce in calls if kind == "call"])
        for row in holders:
            await connection.execute("select pg_terminate_backend($1, 1000)", row["pid"])

    async def _drop_role(self, connection: Any, role: str) -> None:
        try:
            await connection.execute(f"drop role if exists {ident(role)}")
        except asyncpg.DependentObjectsStillExistError:
            # It was granted something in another database, or that database is a copy which was not cleaned.
            log.warning("state cluster %s: role %s is still used and stays", self.name, role)

    # -- connections ---------------------------------------------------------------------------------

    def _dsn_of(self, database: str) -> str:
        parts = urlsplit(self._dsn)
        options = [(key, value) for key, value in parse_qsl(parts.query) if key != "dbname"]
        return urlunsplit((parts.scheme, parts.netloc, "/" + quote(database, safe=""), urlencode(options), ""))

    @asynccontextmanager
    async def _maintenance(self) -> AsyncIterator[Any]:
        try:
            async with self._sessions.use("", self._dsn) as connection:
                yield connection
        except (OSError, asyncpg.CannotConnectNowError, asyncpg.ConnectionDoesNotExistError) as error:
            raise Unavailable(
                f"State cluster {self.name} can't be reached ({type(error).__name__}).",
                code="state_cluster_unavailable",
            ) from error

    @asynccontextmanager
    async def _session(self, name: str) -> AsyncIterator[Any]:
        async with contextlib.AsyncExitStack() as stack:
            yield await self._let_in(stack, name)

    async def _let_in(self, stack: contextlib.AsyncExitStack, name: str) -> Any:
        """A connection; waits for a while where a copy of the database is being made."""
        give_up = time.monotonic() + _COPIED_S
        while True:
            try:
                return await stack.enter_async_context(self._sessions.use(name, self._dsn_of(name)))
            except asyncpg.InvalidCatalogNameError as error:
                raise NotFound(f"There is no database {name}.", code="database_not_found") from error
            except asyncpg.ObjectNotInPrerequisiteStateError as error:
                if "not currently accepting connections" not in str(error):
                    raise
                if time.monotonic() > give_up:
                    raise Conflict(f"Database {name} takes no connections now.", code="database_sealed") from error
            await asyncio.sleep(0.003)

    @asynccontextmanager
    async def _hand(self, name: str) -> AsyncIterator[Any]:
        """A connection of the database's hand, which is made when it's first needed."""
        role = logins.hand(name)
        if name in self._hands:
            with contextlib.suppress(asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError):
                async with self._sessions.use(name, self.dsn_for(name, role, self._hands[name])) as connection:
                    yield connection
                    return
        password = secrets.token_hex(32)
        async with self._maintenance() as admin:
            exists = await admin.fetchval("select exists (select from pg_roles where rolname = $1)", role)
            await admin.execute(logins.hand_login(name, password, exists=exists))
        self._hands[name] = password
        async with self._sessions.use(name, self.dsn_for(name, role, password)) as connection:
            yield connection

    @asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[Any]:
        async with self._cloning, self._maintenance() as connection, self._lock_cluster(connection):
            yield connection

    @asynccontextmanager
    async def _lock_cluster(self, connection: Any) -> AsyncIterator[None]:
        await connection.execute(f"select pg_advisory_lock({_CLONING})")
        try:
            yield
        finally:
            if not connection.is_closed():
                await asyncio.shield(connection.execute(f"select pg_advisory_unlock({_CLONING})"))

    async def _exists(self, connection: Any, name: str) -> bool:
        return bool(await connection.fetchval("select exists (select from pg_database where datname = $1)", name))

    async def _sealed(self, connection: Any, name: str) -> bool:
        found = await connection.fetchval("select not datallowconn from pg_database where datname = $1", name)
        if found is None:
            raise NotFound(f"There is no database {name}.", code="database_not_found")
        return bool(found)

    @staticmethod
    def _check(name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"a database of ours is called mm_…, lower case, at most 53 characters: {name!r}")
