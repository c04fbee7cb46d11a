"""A database that moves while its clients stay: the relay's other side, with a stand-in for the clone engine's lock."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from sqlalchemy.engine import make_url

from megamcp.relay import Relay, Route
from megamcp.state.names import ident, literal

LOCK = 4711
INSIDE = f"""
create schema megamcp;
grant usage on schema megamcp to public;
create function megamcp.key(proof bytea) returns bigint language sql immutable
    as $$ select ('x' || substr(md5(proof), 1, 16))::bit(64)::bigint $$;
create function megamcp.enter(proof bytea) returns void language sql security definer
    as 'select pg_catalog.pg_advisory_lock_shared({LOCK}), pg_catalog.pg_advisory_lock_shared(megamcp.key(proof))';
create function megamcp.leave(proof bytea) returns void language sql security definer
    as 'select case when pg_catalog.pg_advisory_unlock_shared(megamcp.key(proof))
                    then pg_catalog.pg_advisory_unlock_shared({LOCK}) end';
create table public.ledger (id bigint generated always as identity, who text not null, n bigint not null);
grant all on public.ledger to public;
-- asyncpg calls it whenever a connection goes back to its pool; the lock has to stay until the transaction is over
alter function pg_catalog.pg_advisory_unlock_all() rename to mm_unlock_all;
create function pg_catalog.pg_advisory_unlock_all() returns void language sql as 'select';
"""


@dataclass
class House:
    """One login, its database of the moment, and those who move it."""

    server: str
    admin: asyncpg.Connection
    socket_dir: str
    user: str
    password: str
    database: str = ""
    moves: int = 0
    resolved: int = 0
    before_resolve: Callable[[], Awaitable[None]] | None = None
    refusal: Exception | None = None
    port: int = 0
    relay: Relay = field(default=None)  # type: ignore[assignment]

    async def resolve(self, user: str, database: str) -> Route:
        self.resolved += 1
        if self.before_resolve is not None:
            await self.before_resolve()
        if self.refusal is not None:
            raise self.refusal
        return Route(self.socket_dir, 5432, self.database, self.user, self.password)

    @property
    def connect(self) -> dict[str, Any]:
        """How asyncpg gets in through the relay."""
        return {
            "host": "127.0.0.1",
            "port": self.port,
            "user": self.user,
            "password": self.password,
            "database": "rollout",
            "ssl": False,
        }

    @property
    def dsn(self) -> str:
        return f"postgresql://{self.user}:{self.password}@127.0.0.1:{self.port}/rollout"

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[asyncpg.Connection]:
        """A superuser's connection to the database of the moment, past the relay."""
        connection = await asyncpg.connect(make_url(self.server).set(database=self.database).render_as_string(False))
        try:
            yield connection
        finally:
            await connection.close()

    async def end_backends(self) -> int:
        """Ends the backends of all clients, whatever they do."""
        ended = await self.admin.fetch(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = $1 and usename = $2",
            self.database,
            self.user,
        )
        return len(ended)

    async def move(self, how: str = "clone", *, patient: bool = True) -> None:
        """Drains the database and lets the login lead to a clone of it, or to itself under another name."""
        old, new = self.database, f"mm_{secrets.token_hex(6)}"
        async with self.inside() as holder:
            if patient:
                await holder.execute(f"select pg_advisory_lock({LOCK})")
            await self.admin.execute(f"alter database {ident(old)} allow_connections false")
            await self.end_backends()
        await self.admin.fetch("select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = $1", old)
        if how == "clone":
            await self.admin.execute(f"create database {ident(new)} template {ident(old)} strategy file_copy")
            self.database = new
            await self.admin.execute(f"drop database {ident(old)} with (force)")
        else:
            await self.admin.execute(f"alter database {ident(old)} rename to {ident(new)}")
            await self.admin.execute(f"alter database {ident(new)} allow_connections true")
            self.database = new
        self.moves += 1

    async def written(self) -> list[tuple[str, int]]:
        async with self.inside() as connection:
            return [tuple(row) for row in await connection.fetch("select who, n from ledger order by id")]


@asynccontextmanager
async def house(server: str, **options: Any) -> AsyncIterator[House]:
    admin = await asyncpg.connect(server)
    mark = secrets.token_hex(6)
    socket_dir = str(make_url(server).query["host"])
    home = House(server, admin, socket_dir, f"agent_{mark}", secrets.token_urlsafe(12), f"mm_{mark}")
    await admin.execute(f"create role {ident(home.user)} login password {literal(home.password)}")
    await admin.execute(f"create database {ident(home.database)} owner {ident(home.user)} template template0")
    async with home.inside() as connection:
        await connection.execute(INSIDE)
    home.relay = Relay(home.resolve, **options)
    home.port = await home.relay.listen("127.0.0.1", 0)
    try:
        yield home
    finally:
        await home.relay.close()
        await admin.execute(f"drop database if exists {ident(home.database)} with (force)")
        await admin.execute(f"drop role {ident(home.user)}")
        await admin.close()
