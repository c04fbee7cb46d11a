"""Runs the files of an environment in v_<h>, as the role that owns nothing outside of it.

Statements go through `refuse` first, all of them, so that every problem is told at once and before any row is loaded:
each file is read twice. Rows of COPY can't go through a function, as everything else of the environment does:
they are copied to a table of built-in types without any rule, where nothing of the environment is evaluated, and
inserted from there as the environment's role, which checks them.
"""

import contextlib
import re
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import asyncpg

from megamcp.failpoints import failpoint
from megamcp.loading import Script, copying, dumps
from megamcp.loading.script import bad
from megamcp.loading.split import Rows
from megamcp.loading.units import Inserts, Progress, Reading, Sql, place
from megamcp.state import refuse, rights
from megamcp.state.names import ident, idents
from megamcp.state.queries import named

_COLUMNS = named("catalog.sql")["staging"]
_DEFERRABLE = """select string_agg(format('%I.%I', $1::text, conname), ', ') from pg_constraint
 where connamespace = $1::text::regnamespace and condeferrable"""
_TABLES = "select count(*) from pg_class where relnamespace = $1::text::regnamespace and relkind in ('r', 'p')"
_MAKES = re.compile(r"(?:create|alter|comment)\b", re.I)
_UNCHECKED = "set local check_function_bodies = off;\n"


class Places(Protocol):
    """Of a state: where its rows go and who may do it."""

    @property
    def hidden_schema(self) -> str: ...
    @property
    def visible_schema(self) -> str: ...
    @property
    def view_role(self) -> str: ...


async def run(conn: Any, made: Places, scripts: Sequence[Script], progress: Progress) -> list[refuse.Problem]:
    """Gives what was refused: then no row was loaded, and of the rest what can be made is made, to be judged too.

    Raises PostgresError with a note of the place (file and line), `Unprocessable` for a file that isn't SQL.
    """
    judged, problems = await _judge(scripts, progress)
    v = made.visible_schema
    if problems:
        await _sketch(conn, v, judged)
        return problems
    for script in scripts:
        before = await _functions(conn, v) if script.dump else {}
        reading = Reading(script, progress)
        async with aclosing(reading.units()) as units:
            async for unit in units:
                if isinstance(unit, Sql):
                    for statement in judged.popleft():
                        await _statement(conn, v, Sql(statement, unit.line), script)
                elif isinstance(unit, Inserts):
                    await _inserts(conn, v, unit, script.name)
                else:
                    to = copying.target(unit.text, script.name, unit.line)
                    reading.at(to.table)
                    await _rows(conn, made, unit, to, script)
        if script.dump:
            await _checked(conn, v, before, script.name)
            if not await conn.fetchval(_TABLES, v):
                raise dumps.empty(script.name, script.schema)
        await failpoint("load.script")
    late = await conn.fetchval(_DEFERRABLE, v)
    if late:
        await rights.as_view(conn, v, f"set constraints {late} immediate")
    await conn.execute("set local search_path = ''")
    return []


async def _sketch(conn: Any, v: str, judged: Collection[tuple[str, ...]]) -> None:
    """Makes of a schema that is refused what doesn't hang on what is refused."""
    for statement in (one for some in judged for one in some if _MAKES.match(one)):
        with contextlib.suppress(asyncpg.PostgresError):
            async with conn.transaction():
                await rights.as_view(conn, v, _UNCHECKED + statement)


async def _judge(scripts: Sequence[Script], progress: Progress) -> tuple[deque[tuple[str, ...]], list[refuse.Problem]]:
    """What to run for each statement that is no plain INSERT, and what is wrong with them."""
    judged: deque[tuple[str, ...]] = deque()
    problems: list[refuse.Problem] = []
    for script in scripts:
        async with aclosing(Reading(script, progress, "checking ").units()) as units:
            async for unit in units:
                if isinstance(unit, Sql):
                    prepared = refuse.prepare(unit.text, f"{script.name}, line {unit.line}")
                    problems += prepared.problems
                    judged.append(prepared.statements)
                elif isinstance(unit, Rows):
                    copying.target(unit.text, script.name, unit.line)
    return judged, problems


async def _statement(conn: Any, v: str, sql: Sql, script: Script) -> None:
    # A dump has its functions before the tables that they read, so their bodies are checked at its end.
    lead = _UNCHECKED if script.dump else ""
    try:
        await rights.as_view(conn, v, lead + sql.text)
    except asyncpg.PostgresError as error:
        error.add_note(place(error, script.name, Sql(lead + sql.text, sql.line - lead.count("\n"))))
        raise


async def _inserts(conn: Any, v: str, batch: Inserts, name: str) -> None:
    """All at once; when one fails, one by one, to say which."""
    try:
        async with conn.transaction():
            await rights.as_view(conn, v, batch.text)
    except asyncpg.PostgresError:
        for part in batch.parts:
            try:
                await rights.as_view(conn, v, part.text)
            except asyncpg.PostgresError as error:
                error.add_note(place(error, name, part))
                raise
        raise


async def _rows(conn: Any, made: Places, rows: Rows, to: copying.Target, script: Script) -> None:
    if to.schema is not None and to.schema != script.schema:
        raise bad(
            script.name,
            f"line {rows.line}: rows for a table of the schema {to.schema}",
            "A server has one PostgreSQL schema: name it as source_schema, or use state kind 'database'.",
        )
    v, staging = made.visible_schema, f"{ident(made.hidden_schema)}.{ident(to.table)}"
    try:
        columns = await conn.fetch(_COLUMNS, v, to.table, list(to.columns) or None)
        if not columns:
            raise asyncpg.UndefinedTableError(f'relation "{to.table}" does not exist or is no table')
        if made_here := [row["name"] for row in columns if row["generated"]]:
            raise asyncpg.InvalidColumnReferenceError(f'column "{made_here[0]}" is a generated column')
        names = tuple(row["name"] for row in columns)
        shape = ", ".join(f"{ident(row['name'])} {row['staged']}" for row in columns)
        await conn.execute(f"create unlogged table {staging} ({shape})")
        into = copying.Target(to.table, made.hidden_schema, to.columns or names, to.options)
        await copying.copy(conn, into, rows.chunks)
        await failpoint("load.copied")
        await conn.execute(f"grant select on {staging} to {ident(made.view_role)}")
        chosen = ", ".join(ident(row["name"]) + (f"::{row['cast']}" if row["cast"] else "") for row in columns)
        await rights.as_view(
            conn,
            v,
            f"insert into {ident(to.table)} ({idents(names)}) overriding system value select {chosen} from {staging}",
        )
        await conn.execute(f"drop table {staging}")
    except asyncpg.PostgresError as error:
        error.add_note(place(error, script.name, rows))
        raise


async def _functions(conn: Any, v: str) -> dict[str, str]:
    """Definitions by signature."""
    rows = await conn.fetch(
        "select p.oid::regprocedure::text as name, pg_get_functiondef(p.oid) as definition from pg_proc p"
        " where p.pronamespace = $1::text::regnamespace and p.prokind = 'f'",
        v,
    )
    return {row["name"]: row["definition"] for row in rows}


async def _checked(conn: Any, v: str, before: Collection[str], name: str) -> None:
    """Makes a dump's functions again, now that what they read is there."""
    for function, definition in (await _functions(conn, v)).items():
        if function in before:
            continue
        try:
            await rights.as_view(conn, v, definition)
        except asyncpg.PostgresError as error:
            error.add_note(f"{name}, function {function}")
            raise
