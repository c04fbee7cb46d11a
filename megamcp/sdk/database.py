"""The tool server's connections: a bounded pool, and the guard around what tool code does with one.

SQLAlchemy's engine gives tools the API they know; the SDK itself talks to the asyncpg connection below it.
The engine is in AUTOCOMMIT, so SQLAlchemy sends no BEGIN, COMMIT or ROLLBACK of its own: the transaction is
the SDK's.

Invariants:
- a connection goes back into the pool only after its transaction ended as expected; else it is closed;
- after its call has ended, a connection that tool code kept runs nothing (closed, or refused by the guard);
- a tool can't end the transaction through SQLAlchemy or by SQL text; by other means, it is noticed;
- the DSN never gets into a message.

Not covered: tool code that digs out the asyncpg connection and keeps it. It is bound by PostgreSQL alone,
which lets a transaction touch only the state that its own `call_begin` bound.
"""

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import asyncpg
from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.util import await_only

from megamcp import outages
from megamcp.errors import MegaMCPError
from megamcp.sdk.results import CallRefused
from megamcp.state import rewrites
from megamcp.state.statements import check_statement

log = logging.getLogger(__name__)

POOL_WAIT_S = 60.0
"""Longest wait for a free connection. The call's own deadline is usually shorter: the gateway hangs up."""
CLOSE_S = 2.0
_KEY = "megamcp.call"


# What FETCH gives depends on the cursor, so a prepared one must not serve another cursor of the same name.
_FETCH = re.compile(r"(?:\s|--[^\n]*\n|/\*.*?\*/)*fetch\b", re.IGNORECASE | re.DOTALL)


class ToolTransactionError(MegaMCPError):
    """Tool code tried to end the call's transaction."""

    default_code = "tool_committed"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The transaction belongs to the call, a tool may not {what} it; nothing of this call was kept.",
            hint="Return normally to keep the changes, raise to undo them; use db.begin_nested() for a part.",
        )


@dataclass(slots=True)
class Guarded:
    """One call's hold on one connection. `spoiled`: the tool tried to end the transaction; its result is an
    error."""

    driver: Any
    ended: bool = False
    spoiled: ToolTransactionError | None = None
    streamed: bool = False
    read_only: bool = False

    def in_transaction(self) -> bool:
        return not self.driver.is_closed() and bool(self.driver.is_in_transaction())

    def spoil(self, what: str) -> ToolTransactionError:
        self.spoiled = self.spoiled or ToolTransactionError(what)
        return self.spoiled


@dataclass(slots=True)
class Lease:
    """A connection for one call: `db` for the tool, `driver` (asyncpg) for the SDK."""

    db: AsyncConnection
    driver: Any
    guard: Guarded
    keep: bool = field(default=False)
    """Set when the transaction has ended as it should; without it the connection is closed, not pooled."""


class Database:
    """Raises CallRefused (`database_unavailable`, `no_capacity`) from `lease`."""

    _statements_kept: ClassVar[int] = 100
    """Prepared statements that each connection keeps."""

    def __init__(self, dsn: str, pool_size: int) -> None:
        self.pool_size = pool_size
        self._dsn = dsn
        self._engine: AsyncEngine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=self._connect,
            isolation_level="AUTOCOMMIT",
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=POOL_WAIT_S,
            hide_parameters=True,
            connect_args={"prepared_statement_cache_size": self._statements_kept},
        )
        engine = self._engine.sync_engine
        event.listen(engine, "checkout", _replace_dead)
        event.listen(engine, "before_cursor_execute", self._before_statement, retval=True)
        event.listen(engine, "after_cursor_execute", _after_statement)
        event.listen(engine, "commit", _on_commit)
        event.listen(engine, "rollback", _on_rollback)
        self._closing: set[asyncio.Task[None]] = set()
        self._rewriter = rewrites.Rewriter()
        self._fetches = itertools.count()

    async def _connect(self) -> Any:
        return await asyncpg.connect(
            self._dsn,
            timeout=10.0,
            server_settings={
                "application_name": "megamcp tool server",
                # A tool server killed in the middle of a statement must not hold its rollout until the end of
                # it.
                "client_connection_check_interval": "1s",
                "jit": "off",
            },
        )

    def _before_statement(
        self, connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> tuple[str, Any]:
        """Checks a statement, and rewrites it where the views need another form. Runs in SQLAlchemy's greenlet."""
        guard = admitted(connection, context)
        check_statement(statement, savepoints=True)
        if _FETCH.match(statement):
            return f"{statement}\n-- {next(self._fetches)}", parameters
        if not rewrites.candidate(statement):
            return statement, parameters

        async def fetch(sql: str, *arguments: Any) -> Any:
            async with guard.driver.transaction():
                return await guard.driver.fetch(sql, *arguments)

        path = getattr(guard.driver.get_settings(), "search_path", "")  # PostgreSQL 18 reports it
        text, same = await_only(self._rewriter.rewrite(statement, fetch, path, read_only=guard.read_only))
        return text, parameters if same else ([()] if many else ())

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Lease]:
        lease = await self._checkout()
        try:
            yield lease
        finally:
            lease.guard.ended = True
            if lease.keep and not lease.guard.streamed and not lease.driver.is_closed() and await self._tidy(lease):
                await lease.db.close()
            else:
                # Shielded, since this is also the way of a cancelled call; asyncpg first waits for the cancel
                # request.
                task = asyncio.create_task(self._discard(lease))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
                await asyncio.shield(task)

    async def aside(self, query: str, *arguments: Any) -> None:
        """Runs one query on a connection of its own, besides those of the pool: who holds one of these can't wait for
        another."""
        connection = await self._connect()
        try:
            await connection.execute(query, *arguments)
        finally:
            await connection.close(timeout=CLOSE_S)

    async def _tidy(self, lease: Lease) -> bool:
        """Whether a connection may serve another call. Statements of a `schema` state leave nothing in a session."""
        return True

    @property
    def idle(self) -> bool:
        """Whether no call holds a connection."""
        pool: Any = self._engine.pool
        return bool(pool.checkedout() == 0)

    async def _checkout(self) -> Lease:
        try:
            db = await self._engine.connect()
            fairy = await db.get_raw_connection()
        except PoolTimeout as error:
            raise CallRefused(
                "no_capacity",
                f"All {self.pool_size} database connections of the tool server are busy.",
                rpc=-32005,
            ) from error
        except Exception as error:
            if not is_lost(error):
                raise
            if "53300" in _states(error):
                raise CallRefused("database_busy", "PostgreSQL has no connection left.", rpc=-32005) from error
            raise unavailable("The tool server can't reach its database.", error) from error
        driver: Any = fairy.driver_connection
        guard = Guarded(driver)
        fairy.info[_KEY] = guard
        return Lease(db, driver, guard)

    async def _discard(self, lease: Lease) -> None:
        try:
            async with asyncio.timeout(CLOSE_S * 2):
                if not lease.driver.is_closed():
                    await lease.driver.close(timeout=CLOSE_S)
        except Exception:  # whatever is wrong with it, it must not come back
            log.debug("a connection could not be closed in order", exc_info=True)
        lease.driver.terminate()
        try:
            await lease.db.invalidate()
            await lease.db.close()
        except Exception:
            log.debug("a connection could not be returned in order", exc_info=True)

    async def aclose(self) -> None:
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_S)
        await self._engine.dispose()


def unavailable(message: str, error: BaseException | None, **data: Any) -> CallRefused:
    log.warning("%s (%s)", message, type(error).__name__ if error else "connection closed")
    return CallRefused("database_unavailable", message, rpc=-32007, **data)


def _states(error: BaseException | None) -> Iterator[str | None]:
    """The SQLSTATEs of an error and of what caused it."""
    while error is not None:
        yield getattr(error, "sqlstate", None)
        error = error.__cause__


def is_lost(error: BaseException) -> bool:
    """Whether the connection, not the statement, failed."""
    seen: BaseException | None = error
    while seen is not None:
        if outages.lost(seen) or getattr(seen, "sqlstate", None) == "53300":
            return True
        if isinstance(seen, DBAPIError) and seen.connection_invalidated:
            return True
        seen = seen.__cause__
    return False


def _replace_dead(dbapi_connection: Any, record: Any, proxy: Any) -> None:
    # asyncpg notices a closed socket by itself, so this costs nothing. If one is dead, its elders are
    # suspect.
    if dbapi_connection.driver_connection.is_closed():
        raise InvalidatePoolError("connection closed")


def _guard(connection: Connection) -> Guarded:
    guard = connection.info.get(_KEY)
    if not isinstance(guard, Guarded) or guard.ended:
        raise InvalidRequestError("`db` belongs to one call and that call has ended; it can't be kept.")
    return guard


def admitted(connection: Connection, context: Any) -> Guarded:
    """The call's hold on the connection, if a statement may run on it now."""
    guard = _guard(connection)
    if guard.spoiled:
        raise guard.spoiled
    if not guard.in_transaction() and not guard.driver.is_closed():
        raise guard.spoil("end")
    if context is not None and context.execution_options.get("stream_results"):
        guard.streamed = True
    return guard


def _after_statement(
    connection: Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
) -> None:
    guard = connection.info.get(_KEY)
    if isinstance(guard, Guarded) and not guard.ended and not guard.in_transaction():
        guard.spoil("end")


def _on_commit(connection: Connection) -> None:
    raise _guard(connection).spoil("commit")


def _on_rollback(connection: Connection) -> None:
    guard = connection.info.get(_KEY)
    if isinstance(guard, Guarded) and not guard.ended:
        raise guard.spoil("roll back")
