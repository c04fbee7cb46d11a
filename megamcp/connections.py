"""The control role's connections to PostgreSQL: asyncpg's pool, with a short way for connections that are at hand.

asyncpg's pool spends more CPU on handing a connection out and taking it back (a proxy, two timeouts, a shielded task,
a second round trip for `RESET ALL`) than a small query costs. So connections that were given back clean are kept in
front of it and handed out again at once; the pool still makes them, counts them, and is where callers wait.

Sessions aren't reset between uses: the control plane never changes one. Its settings are `set local`, its advisory
locks are the transaction's, nothing here listens. An open transaction is still rolled back.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    def get_reset_query(self) -> str:
        return ""


def reusable(connection: asyncpg.Connection) -> bool:
    """Whether a connection lives and has no transaction open. Never raises."""
    try:
        return not (connection.is_closed() or connection.is_in_transaction())
    except asyncpg.InterfaceError:  # it died while it was out, and the pool has taken it back by itself
        return False


class Connections:
    """Up to `most` connections, made when they are needed and again after an outage."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._at_hand: list[asyncpg.Connection] = []
        self._waiting = 0
        self._closing = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls, dsn: str, most: int, *, init: Callable[[asyncpg.Connection], Awaitable[None]], settings: dict[str, str]
    ) -> AsyncIterator["Connections"]:
        """Connections for as long as the block lasts; one is made at once."""
        async with asyncpg.create_pool(
            dsn,
            min_size=1,
            max_size=most,
            max_inactive_connection_lifetime=300,
            init=init,
            connection_class=_Connection,
            server_settings=settings,
        ) as pool:
            connections = cls(pool)
            try:
                yield connections
            finally:
                connections._closing = True  # the pool waits for what is still out, so nothing is kept from here on
                await connections.rest()

    @property
    def used(self) -> int:
        """Those that are out now."""
        return int(self._pool.get_size() - self._pool.get_idle_size()) - len(self._at_hand)

    @property
    def most(self) -> int:
        return int(self._pool.get_max_size())

    @property
    def waiting(self) -> int:
        """Callers that wait for one."""
        return self._waiting

    async def take(self, wait_s: float) -> asyncpg.Connection:
        """A connection, which is owed to `give`. TimeoutError: none got free; else what connecting raises."""
        while self._at_hand:
            connection = self._at_hand.pop()
            if reusable(connection):
                return connection
            await self._pool.release(connection)
        self._waiting += 1
        try:
            return await self._pool.acquire(timeout=wait_s)
        finally:
            self._waiting -= 1

    async def give(self, connection: asyncpg.Connection, *, clean: bool) -> None:
        """Takes a connection back. `clean`: its last use came to its end; nothing is left to be cancelled or rolled
        back."""
        if not clean or self._waiting or self._closing:
            await self._pool.release(connection)
        else:
            self._at_hand.append(connection)

    async def rest(self) -> None:
        """Hands what is at hand to the pool, which closes connections that are idle for long or have worked enough."""
        while self._at_hand:
            await self._pool.release(self._at_hand.pop())
