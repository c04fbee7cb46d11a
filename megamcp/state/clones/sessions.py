"""Connections to many databases of one cluster: a bounded number, the least used closed first.

A database that is to be cloned or dropped may have none, so all of one database's can be let go of at once. An empty
search path, since what runs here runs with the superuser's rights and the databases' public schema is the agent's.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from megamcp import outages
from megamcp.errors import NoCapacity

APPLICATION = "megamcp clones"
_SETTINGS = {
    "application_name": APPLICATION,
    "search_path": "pg_catalog, pg_temp",
    "jit": "off",
    "client_connection_check_interval": "1s",
}
# What a role may set for itself; code of an agent's that ran as this one may have.
_SETTINGS_FIXED = {
    "role": "none",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "transaction_timeout": "0",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "datestyle": "ISO, MDY",
    "timezone": "UTC",
    "intervalstyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
}


class Sessions:
    """Hands out connections by (database, DSN). A connection whose use failed is closed, not kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle: OrderedDict[int, tuple[str, str, asyncpg.Connection]] = OrderedDict()
        self._out: Counter[str] = Counter()
        self._count = 0
        self._generation: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def use(
        self, database: str, dsn: str, *, wait_s: float = 30.0, shared: bool = False
    ) -> AsyncIterator[asyncpg.Connection]:
        """A connection for the block; `shared` with code of an agent's.

        Raises `NoCapacity` when none gets free, else what connecting raises.
        """
        generation = self._generation[database]
        connection = await self._take(database, dsn, wait_s, shared)
        clean = False
        try:
            yield connection
            clean = True
        except asyncpg.PostgresError:
            clean = not connection.is_closed()
            raise
        finally:
            stale = generation != self._generation[database]
            await self._give(database, dsn, connection, keep=clean and not stale)

    async def forget(self, database: str) -> None:
        """Close what is idle of a database, and what is in use when its use ends."""
        self._generation[database] += 1
        doomed = [key for key, (name, _, _) in self._idle.items() if name == database]
        for connection in [self._idle.pop(key)[2] for key in doomed]:
            await self._end(connection)

    async def close(self) -> None:
        """Close everything that is idle; what is in use is closed after it."""
        for database in {name for name, _, _ in self._idle.values()} | set(self._out):
            await self.forget(database)

    async def _take(self, database: str, dsn: str, wait_s: float, shared: bool) -> asyncpg.Connection:
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    for key in reversed(self._idle):
                        if self._idle[key][:2] == (database, dsn):
                            _, _, connection = self._idle.pop(key)
                            if not connection.is_closed():
                                self._out[database] += 1
                                return connection
                            self._count -= 1
                            break
                    else:
                        if self._count < self._most:
                            return await self._connect(database, dsn, shared)
                        if self._idle:
                            _, (_, _, oldest) = self._idle.popitem(last=False)
                            await self._end(oldest)
                            continue
                        async with self._changed:
                            await self._changed.wait()
        except TimeoutError as error:
            raise NoCapacity(
                f"All {self._most} connections to the state cluster are busy.", code="clone_connections_busy"
            ) from error

    async def _connect(self, database: str, dsn: str, shared: bool) -> asyncpg.Connection:
        self._count += 1
        try:
            connection = await asyncpg.connect(
                dsn,
                server_settings=_SETTINGS | (_SETTINGS_FIXED if shared else {}),
                timeout=20.0,
                statement_cache_size=0 if shared else 100,
            )
        except BaseException:
            await self._freed()
            raise
        self._out[database] += 1
        return connection

    async def _give(self, database: str, dsn: str, connection: Any, *, keep: bool) -> None:
        self._out[database] -= 1
        if not self._out[database]:
            del self._out[database]
        if keep and not connection.is_closed() and not connection.is_in_transaction():
            self._idle[id(connection)] = (database, dsn, connection)
            async with self._changed:
                self._changed.notify()
        else:
            await self._end(connection)

    async def _end(self, connection: Any) -> None:
        try:
            if not connection.is_closed():
                async with asyncio.timeout(2):
                    await connection.close()
        except outages.DRIVER:
            connection.terminate()
        finally:
            await self._freed()

    async def _freed(self) -> None:
        self._count -= 1
        async with self._changed:
            self._changed.notify()
