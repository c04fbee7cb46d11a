"""The same DDL on plain tables and on a rollout; every call runs on both, and all that a client sees must be equal."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from tests.integration.overlay.conftest import CLOCK, Rollout, World

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client sees of one statement, or of COMMIT."""

    sql: str
    tag: str = ""
    rows: tuple[str, ...] = ()
    sqlstate: str = ""
    constraint: str | None = None
    message: str = ""
    detail: str | None = None


def _failed(sql: str, error: asyncpg.PostgresError) -> Seen:
    return Seen(
        sql,
        sqlstate=error.sqlstate or "",
        constraint=error.constraint_name,
        message=str(error.args[0]),
        detail=error.detail,
    )


async def _run(conn: Any, sql: str) -> Seen:
    try:
        async with conn.transaction():
            statement = await conn.prepare(sql)
            rows = [repr(tuple(map(str, row))) for row in await statement.fetch()]
            return Seen(sql, statement.get_statusmsg(), tuple(rows if " order by " in sql else sorted(rows)))
    except asyncpg.PostgresError as error:
        return _failed(sql, error)


@dataclass
class Twins:
    plain: Any
    name: str
    rollout: Rollout
    tables: tuple[str, ...]
    seen: list[Seen] = field(default_factory=list)

    @classmethod
    async def make(cls, world: World, ddl: str, *seeds: str) -> "Twins":
        name = f"plain_{next(_numbers)}"
        await world.control.execute(f"create schema {name}")
        await world.control.execute(f"set search_path = {name}, pg_catalog")
        await world.control.execute(
            f"create function {name}.now() returns timestamptz stable return '{CLOCK.isoformat()}'::timestamptz"
        )
        await world.control.execute(ddl)
        for seed in seeds:
            async with world.control.transaction():
                await world.control.execute(seed)
        tables = await world.control.fetch(
            "select quote_ident(relname) as name from pg_class where relnamespace = $1::text::regnamespace"
            " and relkind = 'r' order by relname",
            name,
        )
        await world.control.execute("reset search_path")
        state = await world.load(ddl, *seeds)
        twins = cls(world.control, name, await world.open(state), tuple(row["name"] for row in tables))
        await twins.compare_rows()
        return twins

    async def call(self, *statements: str) -> list[Seen]:
        """One transaction of `statements`, each in a savepoint, on both sides; what was seen, COMMIT's part last."""
        expected = await self._plain(statements)
        found = await self._overlay(statements)
        for one, other in zip(expected, found, strict=True):
            assert one == other, f"\nplain:   {one}\noverlay: {other}"
        await self.compare_rows()
        return expected

    async def _plain(self, statements: Sequence[str]) -> list[Seen]:
        seen: list[Seen] = []
        try:
            async with self.plain.transaction():
                await self.plain.execute(f"set local search_path = {self.name}, pg_catalog")
                seen += [await _run(self.plain, sql) for sql in statements]
        except asyncpg.PostgresError as error:
            seen.append(_failed("commit", error))
        else:
            seen.append(Seen("commit"))
        return seen

    async def _overlay(self, statements: Sequence[str]) -> list[Seen]:
        seen: list[Seen] = []
        try:
            async with self.rollout.call() as db:
                seen += [await _run(db, sql) for sql in statements]
        except asyncpg.PostgresError as error:
            seen.append(_failed("commit", error))
        else:
            seen.append(Seen("commit"))
        return seen

    async def compare_rows(self) -> None:
        for table in self.tables:
            sql = f"select t::text from {table} t"
            async with self.plain.transaction():
                await self.plain.execute(f"set local search_path = {self.name}, pg_catalog")
                expected = sorted(row[0] for row in await self.plain.fetch(sql))
            assert sorted(row[0] for row in await self.rollout.read(sql)) == expected, table
