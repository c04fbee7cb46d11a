"""Makes an environment's folder from a PostgreSQL that is there: pg_dump's text and an `environment.toml` beside it.

pg_dump reads in one transaction, so the folder is one consistent moment. What would fail later is asked first: does the
schema exist, may every table be read, is anything in it. The folder appears whole, by a rename, or not at all; the
password goes to pg_dump in its environment and is in no file, no argument and no log.
"""

import asyncio
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import asyncpg

from megamcp import outages
from megamcp.errors import BadRequest, Conflict, MegaMCPError, NotFound, Unavailable, Unprocessable
from megamcp.loading.dumps import NEWEST
from megamcp.loading.units import Progress
from megamcp.postgres.layout import binaries

DUMP = "dump.sql"
SQL_SERVER = "tool_servers.sql.server:server"
_OLDEST = 9_02_00
_CONNECT_S = 10.0
_LOOK_S = 0.2
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9]+")
_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to take, and what to make of it."""

    dsn: str
    schema: str | None = None
    """None: `public` for kind schema and for chosen tables, else every schema."""
    tables: tuple[str, ...] = ()
    kind: str = "schema"
    name: str | None = None
    entry: str | None = None


@dataclass(frozen=True, slots=True)
class _Relation:
    name: str
    kind: str
    size: int
    readable: bool
    owner_table: str | None
    """Of a sequence: the table that it belongs to."""


async def export(wanted: Wanted, into: Path | None, progress: Progress) -> Path:
    """The new folder. Raises `BadRequest`, `Unavailable`, `NotFound`, `Unprocessable`, `Conflict` (`folder_exists`)."""
    wanted = _checked(wanted)
    name = wanted.name or _default_name(wanted)
    folder = (into or Path(name)).absolute()
    if folder.exists():
        raise Conflict(
            f"{folder} is there already.", code="folder_exists", hint="Name another with --into, or load that one."
        )
    if not folder.parent.is_dir():
        raise BadRequest(f"There is no folder {folder.parent}.", hint="Make it first, or name another with --into.")
    relations = await _look(wanted)
    try:
        growing = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise Unavailable(f"The folder can't be written: {error}", code="folder_not_written") from error
    try:
        await _dump(wanted, relations, growing / DUMP, progress)
        (growing / "environment.toml").write_text(_definition(wanted, name), encoding="utf-8")
        growing.chmod(0o755)
        growing.rename(folder)
    except OSError as error:
        raise Unavailable(f"The folder can't be written: {error}", code="folder_not_written") from error
    finally:
        shutil.rmtree(growing, ignore_errors=True)
    return folder


def _checked(wanted: Wanted) -> Wanted:
    if wanted.kind not in ("schema", "database"):
        raise BadRequest(f"There is no state kind {wanted.kind!r} here.", hint="--kind schema or --kind database.")
    if urlsplit(wanted.dsn).scheme not in ("postgresql", "postgres"):
        raise BadRequest("The DSN is no URL of PostgreSQL.", hint="postgresql://user@host:5432/database")
    if wanted.entry is None and wanted.kind == "schema":
        raise BadRequest(
            "State of kind schema needs a tool server on megamcp.sdk.",
            hint="Name it with --server-entry module:object, or take --kind database, which has a server for SQL.",
        )
    if wanted.name is not None and (not NAME.fullmatch(wanted.name) or "__" in wanted.name):
        raise BadRequest(f"{wanted.name!r} can't be a name.", hint="Letters, digits, - and _, no double underscore.")
    if wanted.entry is not None and not _ENTRY.fullmatch(wanted.entry):
        raise BadRequest(f"{wanted.entry!r} is no entry.", hint="It looks like shop_server:server.")
    one = wanted.kind == "schema" or bool(wanted.tables)
    return replace(wanted, entry=wanted.entry or SQL_SERVER, schema=wanted.schema or ("public" if one else None))


def _default_name(wanted: Wanted) -> str:
    parts = urlsplit(wanted.dsn)
    database = unquote(parts.path.lstrip("/")) or dict(parse_qsl(parts.query)).get("dbname", "") or parts.username
    return _NOT_IN_NAMES.sub("-", database or "environment").strip("-")[:63] or "environment"


async def _look(wanted: Wanted) -> list[_Relation]:
    """What is there. Raises what would keep it from being read."""
    connection = await _connect(wanted.dsn)
    try:
        number = int(await connection.fetchval("select current_setting('server_version_num')"))
        version = await connection.fetchval("select current_setting('server_version')")
        if number < _OLDEST or number // 10_000 > NEWEST:
            too = "old" if number < _OLDEST else "new"
            raise Unprocessable(
                f"That server is PostgreSQL {version}: too {too} to be read (9.2 to {NEWEST}).",
                code="postgres_too_old" if number < _OLDEST else "postgres_too_new",
                hint="Load a dump that was restored on a version between.",
            )
        if wanted.schema is not None:
            await _check_schema(connection, wanted.schema)
        relations = [_Relation(**dict(row)) for row in await connection.fetch(_RELATIONS, wanted.schema)]
        await _check_choice(connection, wanted, relations)
    except asyncpg.PostgresError as error:
        raise Unprocessable(f"That server doesn't say what it holds: {error}", code="source_failed") from error
    finally:
        await connection.close()
    chosen = [r for r in relations if not wanted.tables or r.name in wanted.tables]
    if unreadable := [r.name for r in chosen if not r.readable]:
        raise _no_right(", ".join(unreadable), "SELECT")
    if not any(r.kind in "rp" for r in chosen):
        raise Unprocessable(
            f"The schema {wanted.schema} holds no table." if wanted.schema else "That database holds no table.",
            code="empty_schema",
            hint="Name another with --schema.",
        )
    return relations


_RELATIONS = """
select c.relname::text as name, c.relkind::text as kind, coalesce(pg_relation_size(c.oid), 0) as size,
  case when c.relkind = 'S' then has_sequence_privilege(c.oid, 'select') else has_table_privilege(c.oid, 'select') end
    and has_schema_privilege(n.oid, 'usage') as readable,
  (select t.relname::text from pg_depend d join pg_class t on t.oid = d.refobjid
    where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.refclassid = 'pg_class'::regclass
      and d.deptype in ('a', 'i') and c.relkind = 'S' limit 1) as owner_table
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p', 'v', 'm', 'f', 'S') and ($1::text is null or n.nspname = $1)
  and n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
  and not exists (select from pg_depend e
    where e.classid = 'pg_class'::regclass and e.objid = c.oid and e.deptype = 'e')
order by c.oid"""


async def _check_schema(connection: Any, schema: str) -> None:
    usable = await connection.fetchval(
        "select has_schema_privilege(oid, 'usage') from pg_namespace where nspname = $1", schema
    )
    if usable is None:
        found = await connection.fetch(
            "select nspname from pg_namespace where nspname !~ '^pg_' and nspname <> 'information_schema' order by 1"
        )
        raise NotFound(
            f"That database has no schema {schema!r}.",
            code="schema_not_found",
            hint=f"It has: {', '.join(row[0] for row in found)}.",
        )
    if not usable:
        raise _no_right(f"schema {schema}", "USAGE")


async def _check_choice(connection: Any, wanted: Wanted, relations: list[_Relation]) -> None:
    if not wanted.tables:
        return
    there = {relation.name for relation in relations if relation.kind != "S"}
    if missing := [name for name in wanted.tables if name not in there]:
        raise NotFound(
            f"The schema {wanted.schema} has no table {', '.join(missing)}.",
            code="table_not_found",
            hint=f"It has: {', '.join(sorted(there)) or 'none'}.",
        )
    leaving = await connection.fetch(
        "select c.relname::text as child, p.relname::text as parent from pg_constraint f"
        " join pg_class c on c.oid = f.conrelid join pg_class p on p.oid = f.confrelid"
        " join pg_namespace n on n.oid = c.relnamespace"
        " where f.contype = 'f' and n.nspname = $1 and c.relname = any ($2) and not p.relname = any ($2)",
        wanted.schema,
        list(wanted.tables),
    )
    if leaving:
        raise Unprocessable(
            "Foreign keys lead out of the chosen tables: "
            + ", ".join(f"{row['child']} to {row['parent']}" for row in leaving),
            code="tables_incomplete",
            hint="Choose their targets too: "
            + " ".join(f"--tables {p}" for p in sorted({r["parent"] for r in leaving})),
        )


async def _connect(dsn: str) -> asyncpg.Connection:
    where = _place(dsn)
    try:
        return await asyncpg.connect(dsn, timeout=_CONNECT_S)
    except asyncpg.InvalidCatalogNameError as error:
        raise NotFound(f"{where}: {error}", code="database_not_found", hint="Check the DSN's database.") from error
    except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as error:
        raise Unprocessable(
            f"{where} doesn't let this login in: {error}",
            code="login_refused",
            hint="Check the user and the password (in the DSN, PGPASSWORD or ~/.pgpass), and the server's pg_hba.conf.",
        ) from error
    except (ValueError, *outages.DRIVER) as error:
        told = str(error) or "no answer in time"
        raise Unavailable(
            f"{where} can't be reached: {told}",
            code="source_unreachable",
            hint="Check host and port, and that PostgreSQL listens there.",
        ) from error


async def _dump(wanted: Wanted, relations: list[_Relation], file: Path, progress: Progress) -> None:
    dsn, environment = _without_password(wanted.dsn)
    arguments = [
        "--no-password",
        "--no-owner",
        "--no-privileges",
        "--encoding=UTF8",
        f"--file={file}",
        f"--dbname={dsn}",
    ]
    arguments += [
        "--no-publications",
        "--no-subscriptions",
        "--no-security-labels",
        "--no-tablespaces",
        "--lock-wait-timeout=60s",
    ]
    if wanted.schema is not None:
        arguments.append(f"--schema={_pattern(wanted.schema)}")
    if wanted.tables and wanted.schema is not None:
        left = [
            r.name
            for r in relations
            if (r.owner_table or r.name) not in wanted.tables and (r.kind != "S" or r.owner_table)
        ]
        arguments += [f"--exclude-table={_pattern(wanted.schema)}.{_pattern(name)}" for name in left]
    program = await asyncio.create_subprocess_exec(
        binaries() / "pg_dump",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment, "LC_ALL": "C"},
    )
    total = sum(relation.size for relation in relations if relation.kind != "S") or 1
    talk = asyncio.create_task(program.communicate())
    try:
        while not talk.done():
            written = file.stat().st_size if file.exists() else 0
            progress(f"reading {_place(wanted.dsn)}", min(written, total), total)
            await asyncio.wait([talk], timeout=_LOOK_S)
        _, complaints = talk.result()
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    if program.returncode != 0:
        raise _failed(complaints.decode(errors="replace"))


def _failed(complaints: str) -> MegaMCPError:
    told = " ".join(complaints.replace("pg_dump: ", "").split())[:2000]
    if "No space left" in told:
        return Unavailable(f"The disk is full: {told}", code="disk_full", hint="Nothing was kept.")
    return Unprocessable(f"pg_dump gave up: {told}", code="source_failed", hint="Nothing was kept.")


def _no_right(what: str, right: str) -> Unprocessable:
    return Unprocessable(
        f"The login may not read {what}.",
        code="source_rights",
        hint=f"Grant it {right} there, or choose what it may read with --tables.",
    )


def _pattern(name: str) -> str:
    """A name as pg_dump's patterns take it: exactly this one."""
    return '"' + name.replace('"', '""') + '"'


def _without_password(dsn: str) -> tuple[str, dict[str, str]]:
    """The DSN as it may be seen, and the environment variable that holds the rest."""
    parts = urlsplit(dsn)
    options = parse_qsl(parts.query, keep_blank_values=True)
    password = unquote(parts.password) if parts.password is not None else dict(options).get("password")
    user, at, host = parts.netloc.rpartition("@")
    netloc = user.partition(":")[0] + at + host
    query = urlencode([(key, value) for key, value in options if key != "password"], quote_via=quote)
    return urlunsplit(("postgresql", netloc, parts.path, query, "")), {} if password is None else {
        "PGPASSWORD": password
    }


def _place(dsn: str) -> str:
    parts = urlsplit(dsn)
    options = dict(parse_qsl(parts.query))
    host = parts.netloc.rpartition("@")[2] or options.get("host", "localhost")
    return f"{host}{parts.path}"


def _definition(wanted: Wanted, name: str) -> str:
    return f"""name = "{name}"

[servers.{name}]
entry = "{wanted.entry}"

[servers.{name}.state]
kind = "{wanted.kind}"
dump = "{DUMP}"
""" + (f"source_schema = {_toml(wanted.schema)}\n" if wanted.kind == "schema" and wanted.schema else "")


def _toml(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
