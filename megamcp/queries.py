"""Read-only SQL of evaluators on a rollout's state.

The statement is foreign text: it runs on a connection of the state's own query role (SELECT on the views, nothing
else), as one statement of the extended protocol, in a READ ONLY transaction bound to one point, with a timeout and a
row cap. What is refused before it is sent is in `state.statements.check_query`.
"""

import asyncio
import time
from typing import Any

import asyncpg

from megamcp.control import role_dsn
from megamcp.environments import Environments, LoadedServer
from megamcp.errors import DeadlineExceeded, NoCapacity, Unprocessable
from megamcp.handles import Mode, Signer
from megamcp.rollouts import HEAD, Rollouts
from megamcp.settings import Settings
from megamcp.state.statements import check_query
from megamcp.store import translated


class Queries:
    """A small pool per loaded state, made on first use."""

    def __init__(
        self, rollouts: Rollouts, environments: Environments, signer: Signer, settings: Settings, dsn: str
    ) -> None:
        self._rollouts = rollouts
        self._environments = environments
        self._signer = signer
        self._settings = settings
        self._dsn = dsn
        self._pools: dict[str, asyncpg.Pool] = {}
        self._making = asyncio.Lock()

    async def close(self) -> None:
        """End every connection."""
        for pool in self._pools.values():
            pool.terminate()

    async def run(
        self, rollout: str, server: str | None, sql: str, at: str | None
    ) -> tuple[list[str], list[list[Any]], bool]:
        """Columns, rows, and whether there were more rows than the cap.

        Raises `Unprocessable` (`query_failed` with the SQLSTATE, `unsupported_statement`), `DeadlineExceeded`.
        """
        check_query(sql)
        row = await self._rollouts.get(rollout)
        target = (await self._environments.by_id(row["environment"])).server(server)
        point = await self._rollouts.point(row, at or HEAD)
        handle = self._signer.mint(
            rollout=rollout,
            server=target.name,
            epoch=row["epoch"],
            mode=Mode.QUERY,
            deadline=time.time() + self._settings.query_timeout_s,
            point="" if point.name == HEAD else point.name,
        )
        pool = await self._pool(target)
        with translated():
            try:
                connection = await pool.acquire(timeout=self._settings.query_timeout_s)
            except TimeoutError as error:
                raise NoCapacity("All query connections are busy.", code="queries_busy") from error
            try:
                return await self._fetch(connection, handle, sql)
            finally:
                await pool.release(connection)

    async def _fetch(
        self, connection: asyncpg.Connection, handle: str, sql: str
    ) -> tuple[list[str], list[list[Any]], bool]:
        limit = self._settings.query_rows
        async with connection.transaction(readonly=True):
            await connection.execute("select megamcp.query_begin($1)", handle)
            await connection.execute(f"set local statement_timeout = {int(self._settings.query_timeout_s * 1000)}")
            try:
                statement = await connection.prepare(sql)
                rows = await (await statement.cursor()).fetch(limit + 1)
            except asyncpg.QueryCanceledError as error:
                raise DeadlineExceeded(
                    f"The query took longer than {self._settings.query_timeout_s:g} s.", code="query_timeout"
                ) from error
            except asyncpg.PostgresError as error:
                if (error.sqlstate or "")[:2] in ("57", "08"):
                    raise
                raise Unprocessable(
                    f"The query failed: {error}",
                    code="query_failed",
                    sqlstate=error.sqlstate,
                    hint=error.hint,
                ) from error
        columns = [attribute.name for attribute in statement.get_attributes()]
        return columns, [[plain(value) for value in row.values()] for row in rows[:limit]], len(rows) > limit

    async def _pool(self, target: LoadedServer) -> asyncpg.Pool:
        assert target.schema is not None
        role = target.schema.query_role
        async with self._making:
            if role not in self._pools:
                with translated():
                    self._pools[role] = await asyncpg.create_pool(
                        role_dsn(self._dsn, role, self._signer.password("query")),
                        min_size=0,
                        max_size=self._settings.query_connections,
                        server_settings={"application_name": "megamcp query", "jit": "off"},
                    )
            return self._pools[role]


def plain(value: Any) -> Any:
    """A column's value as JSON has it; what JSON has no form for becomes text."""
    match value:
        case asyncpg.Record():
            return [plain(item) for item in value.values()]
        case list() | tuple():
            return [plain(item) for item in value]
        case bytes():
            return "\\x" + value.hex()
        case asyncpg.Range():
            return str(value)
    return value
