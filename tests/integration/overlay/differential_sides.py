"""The two sides of the differential test: copied-on-write rollouts, and plain tables with a full copy a
rollout.

Each side has a connection and real transactions of its own. The overlay's statements take the way of a tool's: the
SDK's connection with its check, as the tool's role. Two things of plain PostgreSQL are brought in line, since the
environment promises more: `now()` is the environment's clock, and a statement that fails gives back the sequence
numbers it drew (counters are state: they roll back).
"""

import io
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
from sqlalchemy.exc import DBAPIError

from megamcp import state as overlay
from megamcp.layers import SPACING as _SPACING
from megamcp.sdk.database import Database as ToolDatabase
from megamcp.sdk.database import Lease
from megamcp.state import squash
from megamcp.state.names import ident
from tests.integration.overlay.differential_openness import UNREADABLE, Outcome
from tests.integration.overlay.differential_schema import CLOCK, CLOCK_AT

Sequences = tuple[tuple[str, int, bool], ...]


@dataclass(frozen=True, slots=True)
class Dump:
    """Rows of each table in COPY's text form, and the sequences."""

    rows: tuple[bytes, ...]
    sequences: Sequences


def unquoted(name: str) -> str:
    return name.strip('"').replace('""', '"')


_MOST_CHANGES = 100_000


def _outcome(count: int, rows: Sequence[Any], columns: Iterable[tuple[str, int]]) -> Outcome:
    """Types of the environment's own have other numbers on each side."""
    named = (f"{name} {oid if oid < _FIRST_OWN else 'own'}" for name, oid in columns)
    return Outcome(count, tuple(repr(tuple(map(str, row))) for row in rows), tuple(named))


_FIRST_OWN = 16_384
"""The first oid that PostgreSQL gives to an object that a user makes."""


def _failure(error: asyncpg.PostgresError) -> Outcome:
    broken = error.constraint_name or (error.column_name if error.sqlstate == "23502" else "") or ""
    state = error.sqlstate or ""
    # Checks of a domain name it with its schema where that is not on the path, as in the triggers' functions.
    told = re.sub(r"\bv_[0-9a-f]{16}\.", "", str(error)) if state.startswith(("23", "P0001", "21000")) else ""
    return Outcome(sqlstate=state, broken=broken, told=told, message=str(error))


_UNREADABLE = Outcome(sqlstate=UNREADABLE, message="the driver can't read this result")
_CANT_READ = (asyncpg.UnsupportedClientFeatureError, asyncpg.InternalClientError)
"""asyncpg can't read composite types that hold a tsvector, nor records without a type that hold a range."""


def _contents_query(tables: Sequence[str]) -> str:
    arms = (f"select {n} as n, t::text as row from {table} t" for n, table in enumerate(tables))
    return f"select n, row from ({' union all '.join(arms)}) u order by 1, 2"


Contents = dict[str, list[str]]


def _contents(tables: Sequence[str], rows: Sequence[asyncpg.Record]) -> Contents:
    """Every row of every table as text, sorted."""
    found: Contents = {table: [] for table in tables}
    for row in rows:
        found[tables[row["n"]]].append(row["row"])
    return found


class Plain:
    """Plain tables: one PostgreSQL schema a rollout, kept between examples and refilled."""

    def __init__(self, conn: asyncpg.Connection, prefix: str, ddl: str, tables: Sequence[str]) -> None:
        self.conn = conn
        self.tables = tuple(tables)
        self._prefix = prefix
        self.ddl = ddl
        self._made = 0
        self._free: list[str] = []
        self._columns: dict[str, list[str]] = {}
        self._steps: dict[str, int] | None = None
        """Of each sequence, once a copy is made."""

    async def make(self) -> str:
        """An empty copy of the schema."""
        if self._free:
            return self._free.pop()
        name = f"{self._prefix}_{self._made}"
        self._made += 1
        async with self.conn.transaction():
            await self.conn.execute(f"drop schema if exists {name} cascade; create schema {name}")
            await self.conn.execute(f"set local search_path = {name}, pg_catalog")
            await self.conn.execute(
                f"create function {name}.now() returns timestamptz stable parallel safe "
                f"return '{CLOCK}'::timestamptz; {self.ddl}"
            )
        if self._steps is None:
            steps = "select sequencename, increment_by from pg_sequences where schemaname = $1"
            self._steps = dict(await self.conn.fetch(steps, name))
        return name

    @asynccontextmanager
    async def entered(self, name: str) -> AsyncIterator[Any]:
        """A transaction on this copy; the caller ends it."""
        transaction = self.conn.transaction()
        await transaction.start()
        await self.conn.execute(f"set local search_path = {name}, pg_catalog; discard sequences")
        try:
            yield transaction
        finally:
            if self.conn.is_in_transaction():
                await transaction.rollback()

    async def execute(self, sql: str, arguments: Sequence[object] = ()) -> Outcome:
        """In the caller's savepoint."""
        try:
            statement = await self.conn.prepare(sql)
            rows = await statement.fetch(*arguments)
        except asyncpg.PostgresError as error:
            return _failure(error)
        except _CANT_READ:
            return _UNREADABLE
        found = re.match(r"(?:SELECT|UPDATE|DELETE|INSERT \d+) (\d+)", statement.get_statusmsg())
        columns = ((a.name, a.type.oid) for a in statement.get_attributes())
        return _outcome(int(found[1]) if found else -1, rows, columns)

    async def commit(self, transaction: Any) -> Outcome:
        try:
            await transaction.commit()
        except asyncpg.PostgresError as error:
            return _failure(error)
        return Outcome()

    async def contents(self, name: str) -> Contents:
        tables = [f"{name}.{table}" for table in self.tables]
        return _contents(self.tables, await self.conn.fetch(_contents_query(tables)))

    async def as_json(self, name: str) -> Contents:
        """Every row of every table as a diff shows it."""
        arms = (f"select {n} as n, row_to_json(t)::text as row from {name}.{t} t" for n, t in enumerate(self.tables))
        return _contents(self.tables, await self.conn.fetch(" union all ".join(arms)))

    def give_back(self, name: str) -> None:
        self._free.append(name)

    async def drop(self) -> None:
        for number in range(self._made):
            await self.conn.execute(f"drop schema {self._prefix}_{number} cascade")

    async def sequences(self, name: str) -> Sequences:
        """State of each sequence: a failed statement gives it back, a dump carries it."""
        if self._steps == {}:
            return ()
        rows = await self.conn.fetch(
            """
            select c.relname, s.last_value, s.is_called
            from pg_class c join pg_namespace n on n.oid = c.relnamespace
            cross join lateral pg_get_sequence_data(c.oid) s
            where c.relkind = 'S' and n.nspname = $1 order by 1
            """,
            name,
        )
        return tuple((row[0], row[1], row[2]) for row in rows)

    async def set_sequences(self, name: str, states: Sequences) -> None:
        if states != await self.sequences(name):
            calls = (f"setval('{name}.{ident(s)}', {value}, {str(called).lower()})" for s, value, called in states)
            await self.conn.execute(f"select {', '.join(calls)}")

    async def counters(self, name: str) -> dict[str, int]:
        """The number each sequence handed out last, as the overlay keeps it."""
        steps = self._steps or {}
        return {s: value if called else value - steps[s] for s, value, called in await self.sequences(name)}

    async def dump(self, name: str) -> Dump:
        rows = []
        for table in self.tables:
            columns = ", ".join(f'"{c}"' for c in await self._names(name, table))
            output = io.BytesIO()
            await self.conn.copy_from_query(f"select {columns} from {name}.{table}", output=output)
            rows.append(output.getvalue())
        return Dump(tuple(rows), await self.sequences(name))

    async def restore(self, name: str, dump: Dump) -> None:
        async with self.conn.transaction():
            await self.conn.execute("set local session_replication_role = replica")
            await self.conn.execute("; ".join(f"delete from {name}.{table}" for table in self.tables))
            for table, rows in zip(self.tables, dump.rows, strict=True):
                if rows:
                    await self.conn.copy_to_table(
                        unquoted(table),
                        schema_name=name,
                        columns=await self._names(name, table),
                        source=io.BytesIO(rows),
                    )
        await self.set_sequences(name, dump.sequences)

    async def _names(self, name: str, table: str) -> list[str]:
        if table not in self._columns:
            rows = await self.conn.fetch(
                "select attname from pg_attribute where attrelid = $1::text::regclass and attnum > 0"
                " and not attisdropped and attgenerated = '' order by attnum",
                f"{name}.{table}",
            )
            self._columns[table] = [row[0] for row in rows]
        return self._columns[table]


@dataclass(slots=True)
class Layers:
    """A rollout on the overlay side: frozen layers from the root, and the one that is written."""

    chain: list[int]
    head: int

    @property
    def all(self) -> list[int]:
        return [*self.chain, self.head]


class CopyOnWrite:
    """The same schema, loaded once; a rollout is a list of layers."""

    def __init__(self, conn: asyncpg.Connection, tools: ToolDatabase, state: Any) -> None:
        self.conn = conn
        self.tools = tools
        self.state = state
        self._squashed: dict[int, int] = {}
        """The last number taken between two that `layer` gives."""

    @classmethod
    async def load(cls, conn: asyncpg.Connection, tools: ToolDatabase, ddl: str, seeds: Sequence[str]) -> "CopyOnWrite":
        async with conn.transaction():
            state = await overlay.load(
                conn,
                ddl=ddl,
                seeds=seeds,
                clock=CLOCK_AT,
                seed=7,
                tool_password="differential",
                query_password="differential",
            )
        return cls(conn, tools, state)

    async def unload(self) -> None:
        async with self.conn.transaction():
            await overlay.unload(self.conn, self.state)

    async def layer(self) -> int:
        number: int = await self.conn.fetchval("select nextval('megamcp.layer_seq')")
        return number

    @asynccontextmanager
    async def entered(self, rollout: Layers, *, writable: bool = True) -> AsyncIterator[tuple[Lease, Any]]:
        """A transaction that is bound to the rollout and acts as its tool; the caller ends it."""
        async with self.tools.lease() as lease:
            transaction = lease.driver.transaction()
            await transaction.start()
            try:
                await lease.driver.execute(
                    "select megamcp.bind($1, $2, $3, $4, $5)", rollout.all, rollout.head, 7, CLOCK_AT, writable
                )
                await lease.driver.execute(
                    f"set local search_path = {self.state.visible_schema}, pg_catalog, pg_temp;"
                    f"set local role {self.state.tool_role}"
                )
                yield lease, transaction
            finally:
                if lease.driver.is_in_transaction():
                    await transaction.rollback()
                lease.keep = True

    async def execute(self, lease: Lease, sql: str, arguments: Sequence[object] = ()) -> Outcome:
        """In the caller's savepoint. Raises UnsupportedStatement."""
        try:
            result = await lease.db.exec_driver_sql(sql, tuple(arguments))
            described = result.cursor.description or () if result.cursor else ()
            columns = [(name, oid) for name, oid, *_ in described]
            rows = result.fetchall() if result.returns_rows else []
        except DBAPIError as error:
            cause = error.orig.__cause__ if error.orig else None
            if isinstance(cause, _CANT_READ):
                return _UNREADABLE
            if not isinstance(cause, asyncpg.PostgresError):
                raise
            return _failure(cause)
        return _outcome(result.rowcount, rows, columns)

    async def commit(self, transaction: Any) -> Outcome:
        try:
            await transaction.commit()
        except asyncpg.PostgresError as error:
            return _failure(error)
        return Outcome()

    async def contents(self, rollout: Layers, tables: Sequence[str]) -> Contents:
        async with self.entered(rollout, writable=False) as (lease, _):
            return _contents(tables, await lease.driver.fetch(_contents_query(tables)))

    async def freeze(self, rollout: Layers) -> None:
        """A checkpoint: the head joins the chain unless it holds nothing."""
        async with self.conn.transaction():
            frozen = await overlay.freeze(self.conn, self.state, rollout.all, rollout.head)
        if frozen.rows:
            rollout.chain.append(rollout.head)
            rollout.head = await self.layer()

    async def squash(self, rollout: Layers, first: int) -> None:
        """As the gateway's squasher does it: a layer with a number of its own, and a head that is moved over."""
        replaced = rollout.chain[first:]
        into = self._squashed.get(replaced[-1] // _SPACING, replaced[-1]) + 1
        self._squashed[into // _SPACING] = into
        async with self.conn.transaction():
            await squash.build(self.conn, self.state, replaced, into)
            await squash.move_head(self.conn, self.state, rollout.head, replaced, into)
        rollout.chain = [*rollout.chain[:first], into]

    async def digest(self, chain: Sequence[int]) -> int:
        value: int = await overlay.digest(self.conn, self.state, chain)
        return value

    async def diff(self, a: Sequence[int], b: Sequence[int]) -> dict[str, overlay.TableDiff]:
        return await overlay.diff(self.conn, self.state, a, b, _MOST_CHANGES)

    async def counters(self, chain: Sequence[int]) -> dict[str, int]:
        found = await overlay.counters(self.conn, self.state, chain)
        return {k.removeprefix("sequence:"): v for k, v in found.items() if k.startswith("sequence:")}
