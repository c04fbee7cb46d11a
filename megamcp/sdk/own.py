"""Databases that belong to one rollout each: a few connections to each of those in use.

The gateway names the database with every call. Before it copies one it ends the connections to it and lets none in for
as long: a new connection is tried again until the copy is made. Nothing of a session is left to the next call
(DISCARD ALL), so what a call sees does not hang on which connection it gets. SQL is not checked here: the database is
the rollout's alone, and PostgreSQL's rights of its login are the border.
"""

import asyncio
import time
from typing import Any

import asyncpg
from sqlalchemy.engine import Connection

from megamcp import outages
from megamcp.sdk.database import Database, Lease, admitted

POOLS_KEPT = 64
_POOL_SIZE = 4
_PATIENCE_S = 20.0
_PAUSE_S = 0.003
_MOVING = ("55000", "57P03")  # not accepting connections just now: it is being copied, or PostgreSQL starts


class OwnDatabase(Database):
    """Connections to one rollout's database."""

    _statements_kept = 0  # DISCARD ALL takes prepared statements with it

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn, _POOL_SIZE)

    def _before_statement(
        self, connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> tuple[str, Any]:
        admitted(connection, context)
        return statement, parameters

    async def _connect(self) -> Any:
        give_up = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await asyncpg.connect(
                    self._dsn,
                    timeout=_PATIENCE_S,
                    statement_cache_size=0,
                    server_settings={
                        "application_name": "megamcp tool server",
                        "client_connection_check_interval": "1s",
                    },
                )
            except outages.DRIVER as error:  # lost: ended while it came in
                moving = outages.lost(error) or getattr(error, "sqlstate", None) in _MOVING
                if not moving or time.monotonic() > give_up:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def _tidy(self, lease: Lease) -> bool:
        try:
            await lease.driver.execute("discard all")
        except Exception:  # ended meanwhile, for a copy to be made: the call is done, its connection is not kept
            return False
        return True


class OwnDatabases:
    """The databases of the rollouts that have lately made calls."""

    def __init__(self) -> None:
        self._databases: dict[str, OwnDatabase] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, dsn: str) -> OwnDatabase:
        """By DSN; the one that was used longest ago is let go where there are too many."""
        found = self._databases.pop(dsn, None) or OwnDatabase(dsn)
        self._databases[dsn] = found
        if len(self._databases) > POOLS_KEPT:
            for key, database in list(self._databases.items())[:-POOLS_KEPT]:
                if database.idle:
                    del self._databases[key]
                    task = asyncio.create_task(database.aclose())
                    self._closing.add(task)
                    task.add_done_callback(self._closing.discard)
        return found

    async def aclose(self) -> None:
        """Closes every connection."""
        await asyncio.gather(*(database.aclose() for database in self._databases.values()), *self._closing)
