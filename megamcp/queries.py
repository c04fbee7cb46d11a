"""Read-only SQL of evaluators on a rollout's state.

The statement is foreign text: it runs on a connection of the state's own query role (SELECT on the views, nothing
else), as one statement of the extended protocol, in a READ ONLY transaction bound to one point, with a timeout and a
row and a byte cap. What is refused before it is sent is in `state.statements.check_query`.
"""

import asyncio
import time
from typing import Any

import asyncpg
import msgspec

from megamcp.databases import Reads
from megamcp.demands import demand_open
from megamcp.environments import Environments, LoadedServer
from megamcp.errors import DeadlineExceeded, NoCapacity, Unprocessable
from megamcp.handles import Mode, Signer
from megamcp.plain import plain, read_exactly
from megamcp.points import BASE, HEAD
from megamcp.rollouts import Rollouts
from megamcp.settings import Settings
from megamcp.state.rewrites import Rewriter, clock_calls
from megamcp.state.statements import check_foreign_query, check_query
from megamcp.store import translated
from megamcp.targets import role_dsn

BATCH = 100
"""Rows that are fetched at once, so that a huge result is noticed before it fills the memory."""

_encode = msgspec.json.Encoder(decimal_format="number").encode


class Queries:
    """A small pool per loaded state, made on first use."""

    def __init__(
        self,
        rollouts: Rollouts,
        environments: Environments,
        databases: Reads,
        signer: Signer,
        settings: Settings,
        dsn: str,
    ) -> None:
        self._rollouts = rollouts
        self._environments = environments
        self._databases = databases
        self._signer = signer
        self._settings = settings
        self._dsn = dsn
        self._pools: dict[str, asyncpg.Pool] = {}
        self._rewriter = Rewriter()
        self._making = asyncio.Lock()

    async def close(self) -> None:
        """End every connection."""
        for pool in self._pools.values():
            pool.terminate()

    async def run(
        self, rollout: str, server: str | None, sql: str, at: str | None
    ) -> tuple[list[str], list[msgspec.Raw], bool]:
        """Columns, the JSON text of each row, and whether there were more rows or bytes than the caps.

        Raises `Unprocessable` (`query_failed` with the SQLSTATE, `unsupported_statement`), `DeadlineExceeded`.
        """
        row = await self._rollouts.get(rollout)
        target = (await self._environments.by_id(row["environment"])).server(server)
        if at and at not in (HEAD, BASE):
            await self._rollouts.same_environment(row, at)
        if target.database:
            check_foreign_query(sql)
            return await self._on_own_database(row, target, sql, at)
        check_query(sql)
        sql = clock_calls(sql)
        pool = await self._pool(target)
        with translated():
            try:
                connection = await pool.acquire(timeout=self._settings.query_timeout_s)
            except TimeoutError as error:
                raise NoCapacity("All query connections are busy.", code="queries_busy") from error
            try:
                # Made now, so that waiting for a connection doesn't use its time up.
                handle = self._signer.mint(
                    rollout=rollout,
                    server=target.name,
                    epoch=row["epoch"],
                    mode=Mode.QUERY,
                    deadline=time.time() + self._settings.query_timeout_s,
                    point="" if at in (None, HEAD) else at,
                )
                return await self._fetch(connection, handle, sql, target)
            finally:
                await pool.release(connection)

    async def _on_own_database(
        self, row: asyncpg.Record, target: LoadedServer, sql: str, at: str | None
    ) -> tuple[list[str], list[msgspec.Raw], bool]:
        """The database is the rollout's alone, so its login and READ ONLY are border enough."""
        environment = await self._environments.by_id(row["environment"])
        now, base = at in (None, HEAD), at == BASE
        if now:
            demand_open(row)
        checkpoint = None if base else row["checkpoint"] if now else at
        spot = await self._databases.spot(target, environment, rollout=row if now else None, checkpoint=checkpoint)
        with translated():
            async with self._databases.connection(spot) as connection:
                await read_exactly(connection)
                return await self._fetch(connection, None, sql)

    async def _fetch(
        self, connection: asyncpg.Connection, handle: str | None, sql: str, target: LoadedServer | None = None
    ) -> tuple[list[str], list[msgspec.Raw], bool]:
        async with connection.transaction():
            if handle is not None:
                await connection.execute("set transaction read write")
                await connection.execute("select megamcp.query_begin($1)", handle)
            # From here on nothing can be written, and nothing can change that.
            await connection.execute("set transaction read only")
            await connection.execute(f"set local statement_timeout = {int(self._settings.query_timeout_s * 1000)}")
            try:
                async with asyncio.timeout(self._settings.query_timeout_s + 1):  # all batches together
                    if target is not None and target.schema is not None:  # its tables are views
                        sql = await self._as_views_take(connection, sql, target.schema.visible_schema)
                    statement = await connection.prepare(sql)
                    if parameters := statement.get_parameters():
                        raise Unprocessable(
                            f"The query has {len(parameters)} parameters; this endpoint takes none.",
                            code="query_failed",
                            hint="Write the values into the text.",
                        )
                    rows, truncated = await self._rows(await statement.cursor())
            except (asyncpg.QueryCanceledError, TimeoutError) as error:
                raise DeadlineExceeded(
                    f"The query took longer than {self._settings.query_timeout_s:g} s.", code="query_timeout"
                ) from error
            except asyncpg.UnsupportedClientFeatureError as error:
                raise Unprocessable(
                    f"A column can't be read: {error}",
                    code="query_failed",
                    hint="Cast it to text.",
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
        return [attribute.name for attribute in statement.get_attributes()], rows, truncated

    async def _as_views_take(self, connection: asyncpg.Connection, sql: str, schema: str) -> str:
        async def fetch(sql: str, *arguments: Any) -> Any:
            async with connection.transaction():
                return await connection.fetch(sql, *arguments)

        text, _ = await self._rewriter.rewrite(sql, fetch, schema, read_only=True)
        return text

    async def _rows(self, cursor: Any) -> tuple[list[msgspec.Raw], bool]:
        limit, room = self._settings.query_rows, self._settings.max_result_bytes
        rows: list[msgspec.Raw] = []
        while True:
            wanted = min(BATCH, limit + 1 - len(rows))
            batch = await cursor.fetch(wanted)
            for record in batch:
                text = _encode([plain(value) for value in record.values()])
                room -= len(text)
                if len(rows) == limit or room < 0:
                    return rows, True
                rows.append(msgspec.Raw(text))
            if len(batch) < wanted:
                return rows, False

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
                        init=read_exactly,
                        server_settings={"application_name": "megamcp query", "jit": "off"},
                    )
            return self._pools[role]
