"""The two sides of the differential test: copied-on-write rollouts, and plain tables with a full copy a
rollout.

Both run a statement in a savepoint of the call's transaction. Two things of plain PostgreSQL are brought in
line, since the environment promises more: `now()` is the environment's clock, and a statement that fails
gives back the sequence numbers it drew (counters are state: they roll back).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import asyncpg

from megamcp import state as overlay
from tests.integration.overlay.differential_schema import CLOCK

Dump = tuple[tuple[str, ...], tuple[tuple[str, int, bool], ...]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client sees of one statement: rows in the order they came, or the error's identity."""

    tag: str = ""
    rows: tuple[str, ...] = ()
    sqlstate: str = ""
    broken: str = ""
    """The constraint, or the column for NOT NULL."""
    message: str = field(default="", compare=False)


class Rejected(Exception):
    """Raised inside a savepoint to undo it."""


async def _run(conn: asyncpg.Connection, sql: str) -> Outcome:
    statement = await conn.prepare(sql)
    rows = await statement.fetch()
    return Outcome(statement.get_statusmsg(), tuple(repr(tuple(map(str, row))) for row in rows))


def _failure(error: asyncpg.PostgresError) -> Outcome:
    broken = error.constraint_name or (error.column_name if error.sqlstate == "23502" else "") or ""
    return Outcome(sqlstate=error.sqlstate or "", broken=broken, message=str(error))


async def execute(conn: asyncpg.Connection, sql: str) -> Outcome:
    """Run one statement in a savepoint; undo it when it fails."""
    try:
        async with conn.transaction():
            return await _run(conn, sql)
    except asyncpg.PostgresError as error:
        return _failure(error)


async def contents(conn: asyncpg.Connection, tables: Sequence[str]) -> dict[str, list[str]]:
    """Every row of every table as text, sorted."""
    found = {}
    for table in tables:
        rows = await conn.fetch(f"select t::text as row from {table} t")
        found[table] = sorted(row["row"] for row in rows)
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
        self._inserts: dict[str, tuple[str, str]] = {}

    async def make(self) -> str:
        """An empty copy of the schema."""
        if self._free:
            return self._free.pop()
        name = f"{self._prefix}_{self._made}"
        self._made += 1
        async with self.conn.transaction():
            await self.conn.execute(f"drop schema if exists {name} cascade; create schema {name}")
            await self.enter(name)
            await self.conn.execute(
                f"create function {name}.now() returns timestamptz stable parallel safe "
                f"return '{CLOCK}'::timestamptz; {self.ddl}"
            )
        return name

    async def enter(self, name: str) -> None:
        await self.conn.execute(f"set local search_path = {name}, pg_catalog")

    def give_back(self, name: str) -> None:
        self._free.append(name)

    async def drop(self) -> None:
        for number in range(self._made):
            await self.conn.execute(f"drop schema {self._prefix}_{number} cascade")

    async def sequences(self, name: str) -> tuple[tuple[str, int, bool], ...]:
        """State of each sequence: a failed statement gives it back, a dump carries it."""
        rows = await self.conn.fetch(
            """
            select c.relname, s.last_value, s.is_called
            from pg_class c join pg_namespace n on n.oid = c.relnamespace
            cross join lateral pg_get_sequence_data(c.oid) s
            where c.relkind = 'S' and n.nspname = $1
            """,
            name,
        )
        return tuple((row[0], row[1], row[2]) for row in rows)

    async def set_sequences(self, name: str, states: Sequence[tuple[str, int, bool]]) -> None:
        for sequence, value, called in states:
            await self.conn.execute(
                f"select pg_catalog.setval('{name}.{sequence}', {value}, {'true' if called else 'false'})"
            )

    async def execute(self, name: str, sql: str) -> Outcome:
        before = await self.sequences(name)
        outcome = await execute(self.conn, sql)
        if outcome.sqlstate:
            await self.set_sequences(name, before)
        return outcome

    async def dump(self, name: str) -> Dump:
        """INSERT statements that give back every row, and the sequences."""
        statements = []
        for table in self.tables:
            select, insert = await self._columns(name, table)
            rows = [row[0] for row in await self.conn.fetch(f"select {select} from {name}.{table}")]
            if rows:
                statements.append(f"{insert} values {', '.join(rows)}")
        return tuple(statements), await self.sequences(name)

    async def restore(self, name: str, dump: Dump) -> None:
        statements, sequences = dump
        await self.enter(name)
        await self.conn.execute("set local session_replication_role = replica")
        await self.conn.execute("; ".join([*(f"delete from {table}" for table in self.tables), *statements]))
        await self.conn.execute("set local session_replication_role = origin")
        await self.set_sequences(name, sequences)

    async def _columns(self, name: str, table: str) -> tuple[str, str]:
        if table not in self._inserts:
            rows = await self.conn.fetch(
                """
                select quote_ident(attname) from pg_attribute
                where attrelid = $1::text::regclass and attnum > 0 and not attisdropped and attgenerated = ''
                order by attnum
                """,
                f"{name}.{table}",
            )
            names = [row[0] for row in rows]
            quoted = " || ', ' || ".join(f"quote_nullable({column}::text)" for column in names)
            insert = f"insert into {table} ({', '.join(names)}) overriding system value"
            self._inserts[table] = (f"'(' || {quoted} || ')'", insert)
        return self._inserts[table]


@dataclass(slots=True)
class Layers:
    """A rollout on the overlay side: frozen layers from the root, and the one that is written."""

    chain: list[int]
    head: int


class CopyOnWrite:
    """The same schema, loaded once; a rollout is a list of layers."""

    def __init__(self, conn: asyncpg.Connection, state: Any) -> None:
        self.conn = conn
        self.state = state

    @classmethod
    async def load(cls, conn: asyncpg.Connection, ddl: str, seeds: Sequence[str]) -> "CopyOnWrite":
        async with conn.transaction():
            state = await overlay.load(
                conn,
                ddl=ddl,
                seeds=seeds,
                clock=datetime.fromisoformat(CLOCK),
                seed=7,
                tool_password="differential",
                query_password="differential",
            )
        return cls(conn, state)

    async def unload(self) -> None:
        async with self.conn.transaction():
            await overlay.unload(self.conn, self.state)

    async def layer(self) -> int:
        number: int = await self.conn.fetchval("select nextval('megamcp.layer_seq')")
        return number

    async def enter(self, rollout: Layers, writable: bool = True) -> None:
        """Bind the transaction to the rollout and become the tool."""
        await self.conn.execute("reset role")
        await self.conn.execute(
            "select megamcp.bind($1, $2, $3, $4, $5)",
            [*rollout.chain, rollout.head],
            rollout.head,
            7,
            datetime.fromisoformat(CLOCK),
            writable,
        )
        await self.conn.execute(f"set local search_path = v_{self.state.hash}, pg_catalog")
        await self.conn.execute(f"set local role {self.state.tool_role}")

    async def freeze(self, rollout: Layers) -> None:
        """A checkpoint: the head joins the chain unless it holds nothing."""
        async with self.conn.transaction():
            frozen = await overlay.freeze(self.conn, self.state, [*rollout.chain, rollout.head], rollout.head)
        if frozen.rows:
            rollout.chain.append(rollout.head)
            rollout.head = await self.layer()

    async def digest(self, rollout: Layers) -> int:
        value: int = await overlay.digest(self.conn, self.state, [*rollout.chain, rollout.head])
        return value
