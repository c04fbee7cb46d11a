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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import asyncpg

from megamcp import outages
from megamcp.errors import Conflict, DeadlineExceeded, NotFound, Unavailable, Unprocessable
from megamcp.failpoints import failpoint
from megamcp.loading import Script, as_script
from megamcp.loading.units import Progress
from megamcp.state.clones import disk, fitness, lock, logins, source
from megamcp.state.clones.access import Access
from megamcp.state.clones.inside import Inside
from megamcp.state.clones.lock import OnBusy
from megamcp.state.clones.types import Disk, Keys, Standing
from megamcp.state.names import ident

log = logging.getLogger(__name__)

PREFIX = "mm_"
_CLONING = 7730
_NAME = re.compile(r"mm_[a-z0-9_]{1,49}")
_LINE_S = 45.0  # below what a control connection may be idle in a transaction
_GONE_S = 10.0  # how long an ended backend may take to be gone
_TERMINATE = "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1 and not (pid = any ($2::int[]))"


class Cluster:
    """Raises `Unavailable` where the server can't be reached, `NoCapacity` where its connections are used up."""

    def __init__(self, name: str, dsn: str, *, admin_connections: int = 32, statement_s: float = 600) -> None:
        self.name = name
        self._statement_s = statement_s
        self.reflink = False
        self._access = Access(name, dsn, admin_connections)
        self._cloning = asyncio.Lock()
        # Each holds a connection while it waits for its source, and needs another one to copy.
        self._live_copies = asyncio.Semaphore(max(1, admin_connections // 4))
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._folder: str | None = None
        self._sound: dict[str, str] = {}

    async def open(self, control: str | None = None) -> None:
        """Look whether the server can do this. Raises `Unprocessable` (`postgres_too_old`, `postgres_rights`).

        `control` names the control plane's database where that is on the same cluster: rollouts' logins are kept out.
        """
        async with self._one_at_a_time() as connection:
            self._folder = await fitness.examine(connection, self._access.place)
            await fitness.close_others(connection, self.name, PREFIX, control)
            self.reflink = await fitness.shares_blocks(
                connection, self.name, Path(self._folder) if self._access.is_local else None
            )

    async def close(self) -> None:
        """Close every connection."""
        await self._access.sessions.close()

    def dsn_for(self, database: str, user: str, password: str) -> str:
        """DSN of a login. It holds the password: don't log it."""
        return self._access.dsn_for(database, user, password)

    async def names(self, prefix: str = PREFIX) -> set[str]:
        """All databases that are there whose name begins with `prefix`, but for those that are being built.

        Several deployments may share a cluster: use a prefix of one's own before dropping what one doesn't know.
        """
        async with self._access.maintenance() as connection:
            rows = await connection.fetch("select datname from pg_database where starts_with(datname, $1)", prefix)
        return {row["datname"] for row in rows if not source.is_temporary(row["datname"])}

    async def build(
        self,
        name: str,
        *,
        ddl: Script | str,
        seeds: Sequence[Script | str],
        keys: Keys,
        progress: Progress | None = None,
    ) -> None:
        """Make a source: sealed, with the environment's tables and rows. Whole or not at all.

        Raises `Unprocessable` (`environment_sql_failed`) with PostgreSQL's words, `Conflict` where the name is taken.
        """
        self._check(name)
        scripts = [as_script(ddl, "schema"), *(as_script(one, f"seed {n}") for n, one in enumerate(seeds, 1))]
        made, builder, password = source.temporary(name), source.builder(name), secrets.token_hex(32)
        try:
            async with self._access.maintenance() as connection:
                if await exists(connection, name):
                    raise Conflict(f"There is a database {name} already.", code="database_exists")
                await self._drop(connection, made, [builder])  # what a killed build left
                await connection.execute(
                    f"create database {ident(made)} template template0 encoding 'UTF8' locale_provider builtin"
                    " builtin_locale 'C.UTF-8' locale 'C.UTF-8'"
                )
                await connection.execute(
                    source.database_rights(made) + logins.login(made, builder, password, exists=False)
                )
            async with self._access.session(made) as admin:
                await source.fill(
                    admin,
                    self.dsn_for(made, builder, password),
                    scripts,
                    progress or (lambda *_: None),
                    statement_s=self._statement_s,
                )
                if what := await logins.policy_for(admin, builder):
                    raise Unprocessable(
                        f"The environment's SQL makes a policy for the login that runs it: {what}.",
                        code="environment_sql_failed",
                        hint=f"Name {logins.OWNER} (which is CURRENT_USER) or PUBLIC.",
                    )
                await logins.disown(admin, await logins.strangers(admin, made))
                await source.install(admin, keys)
            await self._access.sessions.forget(made)
            # A fresh session leaves PostgreSQL's file of what it knows of the catalog, which is copied with the rest:
            # the first session of each copy need not find it all out again.
            async with self._access.session(made):
                pass
            async with self._access.maintenance() as connection:
                await self._shut(connection, made)
                await connection.execute(f"alter database {ident(made)} rename to {ident(name)}")
            await failpoint("build.renamed")
        except BaseException:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._cleared(made, builder))
            raise
        async with self._access.maintenance() as connection:
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
        at: int | None = None,
    ) -> Standing | None:
        """Copy a database. Without a login the copy stays sealed. Says how it stands to the position `at`, or None.

        Where the source takes connections, its lock is waited for (see `hold`) and all its sessions are ended; so what
        is asked of the source then is true of the copy. Of a sealed source nothing can be asked.
        Raises `NotFound`, `Conflict` (`database_exists`), `Unavailable` (`disk_full`).
        """
        self._check(target)
        async with self._access.maintenance() as connection:
            sealed = await self._sealed(connection, source_name)
        if sealed:  # or being copied just now
            async with self._one_at_a_time() as connection:
                if sealed := await self._sealed(connection, source_name):
                    await self._copy_sealed(connection, source_name, target)
        standing = None if sealed else await self._copy_live(source_name, target, patience_s, on_busy, at)
        # What follows is the copy's own business; the next one may be made meanwhile.
        await failpoint("clone.created")
        async with self._access.maintenance() as connection:
            await self._clean(connection, target, login)
            await failpoint("clone.cleaned")
            if login is None:
                await connection.execute(source.database_rights(target))
            else:
                await self._admit(connection, target, login, password, source.database_rights(target))
        await failpoint("clone.admitted")
        return standing

    async def mend_logins(self, prefix: str, password: Callable[[str], str]) -> list[str]:
        """Gives logins back what they were given, where they changed their own password or settings; says which.

        For databases whose login has their name. Sessions that are open keep the settings that they began with.
        """
        async with self._access.maintenance() as connection:
            found = await logins.strayed(connection, prefix, password, self._sound)
            for name in found:
                await connection.execute(logins.login(name, name, password(name), exists=True))
        return found

    async def seal(self, name: str, *, patience_s: float = 10.0, on_busy: OnBusy | None = None) -> None:
        """Let nobody in any more, after the work that is open. Idempotent."""
        async with self._access.maintenance() as connection:
            if not await self._sealed(connection, name):
                await self._drain(connection, name, patience_s, on_busy)

    async def unseal(self, name: str) -> None:
        """Let its login in again."""
        async with self._access.maintenance() as connection:
            await self._sealed(connection, name)
            await connection.execute(f"alter database {ident(name)} with allow_connections true")

    async def doors(self) -> dict[str, bool]:
        """Our databases, and whether each takes connections."""
        async with self._access.maintenance() as connection:
            rows = await connection.fetch(
                "select datname, datallowconn from pg_database where starts_with(datname, $1)", PREFIX
            )
        return {row["datname"]: row["datallowconn"] for row in rows}

    async def reopen(self, name: str) -> None:
        """Let its login in again where whoever was copying it has been killed. Waits for a copy that is being made."""
        async with self._one_at_a_time() as connection:
            if await exists(connection, name):
                await connection.execute(f"alter database {ident(name)} with allow_connections true")

    async def drop(self, name: str, login: str | None = None) -> None:
        """Take a database away with its login and its hand, whatever they are doing. Idempotent."""
        self._check(name)
        self._access.forget_hand(name)
        self._sound.pop(name, None)
        async with self._access.maintenance() as connection:
            await self._drop(connection, source.temporary(name), [])
            await self._drop(connection, name, [*filter(None, [login]), logins.hand(name), source.builder(name)])

    async def drop_stray_roles(self, prefix: str) -> list[str]:
        """Take away roles of databases that are gone; says which."""
        async with self._access.maintenance() as connection:
            found = await logins.strays(connection, prefix)
            for role in found:
                await self._drop_role(connection, role)
        return found

    @asynccontextmanager
    async def inside(self, name: str) -> AsyncIterator[Inside]:
        """A look inside, without the lock. Raises `Conflict` (`database_sealed`), `NotFound`."""
        async with self._access.session(name) as connection:
            yield Inside(connection, lambda: self._access.hand(name))

    @asynccontextmanager
    async def hold(
        self, name: str, *, shared: bool = False, patience_s: float, on_busy: OnBusy | None = None
    ) -> AsyncIterator[Inside]:
        """A look inside with the database's lock: no call and no client's transaction is open (`shared`: no call that
        writes). Each thing done inside is a transaction of its own.

        When patience ends, `on_busy` is told the nonces of the calls that have the lock, and their backends are ended.
        Without it: `DeadlineExceeded`. Those of this process take turns, as they came; patience begins with the turn.
        """
        async with contextlib.AsyncExitStack() as stack:
            await self._turn(stack, name)
            give_up = time.monotonic() + patience_s + (_GONE_S if on_busy else 0)
            busy_at = time.monotonic() + patience_s
            session = await stack.enter_async_context(contextlib.AsyncExitStack())
            connection = await session.enter_async_context(self._access.session(name))
            while True:
                try:
                    if await lock.taken(connection, min(busy_at, give_up), shared=shared):
                        break
                except outages.DRIVER as error:
                    # Who drains a database ends those that wait for its lock, other gateways' too.
                    if not outages.lost(error) or time.monotonic() > give_up:
                        raise
                    connection.terminate()
                    await session.aclose()
                    connection = await session.enter_async_context(self._access.session(name))
                    continue
                if on_busy is None or time.monotonic() > give_up:
                    raise DeadlineExceeded(
                        f"Database {name} was busy for {patience_s:g} s.",
                        code="deadline_exceeded",
                        hint="A call or a client's transaction is open on it; try again when it's done.",
                    )
                await lock.end_holders(connection, on_busy, shared=shared)
                busy_at = time.monotonic() + 0.2
            try:
                yield Inside(connection, lambda: self._access.hand(name))
            finally:
                await asyncio.shield(lock.let_go(connection))

    async def disk(self) -> Disk | None:
        """Room on the file system that holds the data; None where it isn't this machine's."""
        if not self._folder or not self._access.is_local:
            return None
        try:
            found = os.statvfs(self._folder)
        except OSError:
            return None
        return Disk(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    async def own_bytes(self, name: str) -> int:
        """Disk that a database has to itself: its size less what its files share with others."""
        async with self._access.maintenance() as connection:
            row = await connection.fetchrow("select oid from pg_database where datname = $1", name)
            if row is None:
                return 0
            if self._folder and self._access.is_local:
                found = await asyncio.to_thread(disk.own_bytes, Path(self._folder) / "base" / str(row["oid"]))
                if found is not None:
                    return found
            return int(await connection.fetchval("select pg_database_size($1::oid)", row["oid"]))

    # -- steps ---------------------------------------------------------------------------------------

    async def _turn(self, stack: contextlib.AsyncExitStack, name: str) -> None:
        """Waits for those of this process who came before. In PostgreSQL's own line a copy drives out who waits."""
        turn = self._turns.setdefault(name, asyncio.Lock())
        try:
            async with asyncio.timeout(_LINE_S):
                await turn.acquire()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"Too much is to be done with database {name}: its turn did not come in {_LINE_S:g} s.",
                code="deadline_exceeded",
                hint="Send fewer forks, checkpoints and reads of one rollout at once, or try again.",
            ) from error
        stack.callback(turn.release)

    async def _copy_live(
        self, source_name: str, target: str, patience_s: float, on_busy: OnBusy | None, at: int | None
    ) -> Standing | None:
        """Copy a database that is in use. It is waited for before the others are kept waiting."""
        async with self._live_copies, contextlib.AsyncExitStack() as stack:
            try:
                held = await stack.enter_async_context(self.hold(source_name, patience_s=patience_s, on_busy=on_busy))
            except Conflict:  # unless another gateway has sealed it meanwhile, for good
                async with self._one_at_a_time() as connection:
                    if not await self._sealed(connection, source_name):
                        raise
                    await self._copy_sealed(connection, source_name, target)
                return None
            standing = None if at is None else await held.standing(at)
            async with self._one_at_a_time() as connection:
                try:
                    await self._close(connection, source_name, held)
                    held.connection.terminate()  # which gives the lock back, and is gone by the next line
                    await stack.aclose()
                    await self._end_sessions(connection, source_name, [])
                    await failpoint("clone.drained")
                    await self._copy(connection, source_name, target)
                finally:
                    reopen = f"alter database {ident(source_name)} with allow_connections true"
                    await asyncio.shield(connection.execute(reopen))
            return standing

    async def _copy_sealed(self, connection: Any, source_name: str, target: str) -> None:
        """Nobody gets in; but a drain that was cut off has ended nobody, and one session inside forbids a copy."""
        await self._end_sessions(connection, source_name, [])
        await self._copy(connection, source_name, target)

    async def _copy(self, connection: Any, source_name: str, target: str) -> None:
        try:
            await connection.execute(f"set file_copy_method = {'clone' if self.reflink else 'copy'}")
            await connection.execute(
                f"create database {ident(target)} template {ident(source_name)} strategy file_copy"
                " allow_connections false"
            )
        except (asyncpg.DiskFullError, asyncpg.InternalServerError) as error:
            # The other one is of the checkpoint that PostgreSQL makes first: why that failed is in its log only.
            told = "is full" if isinstance(error, asyncpg.DiskFullError) else f"seems to be full ({error})"
            raise Unavailable(
                f"The disk of state cluster {self.name} {told}: no copy of {source_name} was made.",
                code="disk_full",
                hint="Release rollouts and checkpoints, or give the cluster more room.",
            ) from error
        except asyncpg.DuplicateDatabaseError as error:
            raise Conflict(f"There is a database {target} already.", code="database_exists") from error

    async def _admit(self, connection: Any, name: str, login: str, password: str, first: str = "") -> None:
        last = f"alter database {ident(name)} with allow_connections true"
        try:
            await connection.execute(first + logins.login(name, login, password, exists=False) + last)
        except asyncpg.DuplicateObjectError:
            await connection.execute(first + logins.login(name, login, password, exists=True) + last)

    async def _clean(self, connection: Any, target: str, login: str | None) -> None:
        """What belonged to the source's login is the owner's here, and what it was granted is no more."""
        strangers = await logins.strangers(connection, target, but=login)
        if not strangers:
            return
        await connection.execute(
            source.database_rights(target) + f"alter database {ident(target)} with allow_connections true"
        )
        async with self._access.session(target) as admin, admin.transaction():
            await admin.execute("set local event_triggers = off")
            await logins.disown(admin, strangers)
        await self._shut(connection, target)

    async def _drain(self, connection: Any, name: str, patience_s: float, on_busy: OnBusy | None) -> None:
        """Wait for the work that is open, let nobody in, end every session."""
        async with self.hold(name, patience_s=patience_s, on_busy=on_busy) as held:
            await self._close(connection, name, held)
        await self._end_sessions(connection, name, [])

    async def _close(self, connection: Any, name: str, held: Inside) -> None:
        """Under the lock, so that who is ended has nothing open, or waits for its turn and has done nothing yet."""
        await connection.execute(f"alter database {ident(name)} with allow_connections false")
        await failpoint("drain.closed")
        await self._end_sessions(connection, name, [held.connection.get_server_pid()])

    async def _shut(self, connection: Any, name: str) -> None:
        """The same without waiting for anybody."""
        await connection.execute(f"alter database {ident(name)} with allow_connections false")
        await self._end_sessions(connection, name, [])

    async def _end_sessions(self, connection: Any, name: str, but: list[int]) -> None:
        """CREATE and DROP DATABASE look for sessions every 100 ms only, so they are waited for here."""
        if not but:
            await self._access.sessions.forget(name)
        give_up = time.monotonic() + _GONE_S
        while await connection.fetch(_TERMINATE, name, but):
            if time.monotonic() > give_up:
                raise DeadlineExceeded(f"Sessions of database {name} don't end.", code="sessions_remain")
            await asyncio.sleep(0.001)

    async def _cleared(self, name: str, role: str) -> None:
        async with self._access.maintenance() as connection:
            await self._drop(connection, name, [role])

    async def _drop(self, connection: Any, name: str, roles: Sequence[str]) -> None:
        invalid = await connection.fetchval("select datconnlimit = -2 from pg_database where datname = $1", name)
        if invalid is not None:
            if not invalid:  # else PostgreSQL was killed while it dropped it, and takes nothing but another DROP
                await self._shut(connection, name)
            await failpoint("drop.shut")
            await connection.execute(f"drop database if exists {ident(name)} with (force)")
        await failpoint("drop.database")
        found = await connection.fetch("select rolname from pg_roles where rolname = any ($1::text[])", list(roles))
        for row in found:
            await self._drop_role(connection, row["rolname"])

    async def _drop_role(self, connection: Any, role: str) -> None:
        try:
            await connection.execute(f"drop role if exists {ident(role)}")
        except asyncpg.DependentObjectsStillExistError:
            # Something in another database names it: a copy that was not cleaned, what an older version let be granted.
            async with self._one_at_a_time() as alone:
                for database in await logins.places(alone, role):
                    await self._disown(alone, database, role)
            await connection.execute(f"drop role if exists {ident(role)}")

    async def _disown(self, connection: Any, database: str, role: str) -> None:
        sealed = await self._sealed(connection, database)
        if sealed:
            await connection.execute(f"alter database {ident(database)} with allow_connections true")
        async with self._access.session(database) as admin, admin.transaction():
            await admin.execute("set local event_triggers = off")
            await logins.disown(admin, [role])
        if sealed:
            await self._shut(connection, database)

    @asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[Any]:
        async with self._cloning, self._access.maintenance() as connection, self._lock_cluster(connection):
            yield connection

    @asynccontextmanager
    async def _lock_cluster(self, connection: Any) -> AsyncIterator[None]:
        await connection.execute(f"select pg_advisory_lock({_CLONING})")
        try:
            yield
        finally:
            if not connection.is_closed():
                await asyncio.shield(connection.execute(f"select pg_advisory_unlock({_CLONING})"))

    async def _sealed(self, connection: Any, name: str) -> bool:
        found = await connection.fetchval("select not datallowconn from pg_database where datname = $1", name)
        if found is None:
            raise NotFound(f"There is no database {name}.", code="database_not_found")
        return bool(found)

    @staticmethod
    def _check(name: str) -> None:
        if not _NAME.fullmatch(name) or source.is_temporary(name):
            raise ValueError(f"a database of ours is called mm_…, lower case, at most 52 characters: {name!r}")


async def exists(connection: Any, name: str) -> bool:
    """Whether there is a database of this name."""
    return bool(await connection.fetchval("select exists (select from pg_database where datname = $1)", name))
