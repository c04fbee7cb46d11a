"""Makes a source: an environment's SQL in a database of its own, with the log and the functions for calls put in.

The SQL runs as a login of that database alone, working as `mm_owner`: it has the rights that agents will have, and may
make trusted extensions besides.
"""

import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from importlib.resources import files

import asyncpg

from megamcp import outages
from megamcp.errors import MegaMCPError, Unavailable, Unprocessable
from megamcp.failpoints import failpoint
from megamcp.loading import Script, copying, dumps
from megamcp.loading.split import Rows
from megamcp.loading.units import Inserts, Progress, Reading, Sql, place
from megamcp.state.clones import logins
from megamcp.state.clones.types import Keys
from megamcp.state.names import ident

ORDER = ("log", "calls", "handles", "ddl", "marks", "shape", "compare", "rights", "events")


def sql(name: str) -> str:
    """A file of `sql/`; the check of handles is the control plane's own."""
    package = "megamcp" if name == "handles" else "megamcp.state.clones"
    return files(package).joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


INSIDE = hashlib.sha256("".join(map(sql, ORDER)).encode()).hexdigest()[:8]
"""What tells databases of this version of schema megamcp from others: nothing in there is ever brought up to date."""


async def fill(
    admin: asyncpg.Connection, dsn: str, scripts: Sequence[Script], progress: Progress, *, statement_s: float
) -> None:
    """Run the environment's SQL over `dsn`, each file as one transaction unless it says COMMIT itself.

    `statement_s` bounds each statement. Raises `Unprocessable` with PostgreSQL's words and the place, `Unavailable`
    (`disk_full`).
    """
    await admin.execute(f"alter schema public owner to {logins.OWNER}")
    connection = await asyncpg.connect(
        dsn,
        server_settings={
            "application_name": "megamcp build",
            "jit": "off",
            "statement_timeout": str(int(statement_s * 1000)),
        },
    )
    try:
        for script in scripts:
            reading = Reading(script, progress)
            await _perform(connection, Sql("begin" + (_AS_PG_DUMP if script.dump else ""), 0), script.name)
            async with aclosing(reading.units()) as units:
                async for unit in units:
                    if not connection.is_in_transaction():
                        await _perform(connection, _BEGIN, script.name)
                    if isinstance(unit, Inserts):
                        await _insert(connection, unit, script.name)
                    else:
                        if isinstance(unit, Rows):
                            reading.at(_table(unit))
                        await _perform(connection, unit, script.name)
            if connection.is_in_transaction():
                await _perform(connection, _COMMIT, script.name)
            if script.dump and not await connection.fetchval(_TABLES):
                raise dumps.empty(script.name, "")
            await failpoint("load.script")
    finally:
        await connection.close()


_TABLES = """select count(*) from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where relkind in ('r', 'p') and nspname !~ '^pg_' and nspname <> 'information_schema'"""
_BEGIN, _COMMIT = Sql("begin", 0), Sql("commit", 0)
# What its own settings would say, which are left out.
_AS_PG_DUMP = "; set local check_function_bodies = off; set local xmloption = content"


def _table(rows: Rows) -> str:
    return rows.text.decode(errors="replace").split("(")[0].split()[1]


async def _perform(connection: asyncpg.Connection, unit: Sql | Rows, name: str) -> None:
    try:
        if isinstance(unit, Rows):
            await copying.copy(connection, copying.target(unit.text, name, unit.line), unit.chunks)
            await failpoint("load.copied")
        else:
            await connection.execute(unit.text)
    except asyncpg.PostgresError as error:
        raise _refused(place(error, name, unit), error) from error
    except (ValueError, *outages.BROKEN) as error:
        if connection.is_closed() or outages.lost(error):
            raise _lost() from error
        raise Unprocessable(
            f"{name}, line {unit.line}: this can't be sent: {error}", code="environment_sql_failed"
        ) from error


async def _insert(connection: asyncpg.Connection, batch: Inserts, name: str) -> None:
    """All at once; when one fails, one by one, to say which."""
    # By hand, as the transaction was begun: the file's own COMMIT may end it.
    try:
        await connection.execute(f"savepoint mm_batch;{batch.text};release savepoint mm_batch")
    except asyncpg.PostgresError as error:
        if connection.is_closed():
            raise _lost() from error
        await connection.execute("rollback to savepoint mm_batch")
        for part in batch.parts:
            await _perform(connection, part, name)
        raise _refused(place(error, name, batch.parts[0]), error) from error


async def install(admin: asyncpg.Connection, keys: Keys) -> None:
    """Put schema megamcp in, in one transaction, and mark the state as it is."""
    await failpoint("build.filled")
    async with admin.transaction():
        for name in ORDER[:-1]:
            await admin.execute(sql(name))
        await admin.execute("insert into megamcp.keys values ('handle', $1, $2)", keys.inner_pad, keys.outer_pad)
        try:
            await admin.execute("select megamcp.watch()")
        except asyncpg.FeatureNotSupportedError as error:
            raise Unprocessable(
                f"The schema holds what can't be checkpointed: {error}. {error.detail}",
                code="environment_sql_failed",
                hint=error.hint,
            ) from error
        await admin.execute(
            "insert into megamcp.marks (position, segment, call, sequences, sum)"
            " select 0, h.segment, 0, megamcp.sequence_values(), megamcp.whole_sum() from megamcp.here h"
        )
        await admin.execute(sql("events"))
    await failpoint("build.installed")
    # Frozen, so that no clone has to: autovacuum in hundreds of clones would rewrite the same pages in each.
    await admin.execute("vacuum (freeze, analyze)")


def temporary(name: str) -> str:
    """The name under which a database is built."""
    return f"{name}_new"


def is_temporary(name: str) -> bool:
    """Whether a database of this name is being built, or was when its builder was killed. `drop` of the real name takes
    it away."""
    return name.endswith("_new")


def builder(name: str) -> str:
    """The login that runs the environment's SQL."""
    return f"{name}_builder"


_TOO_LONG = "57014"


def _lost() -> Unavailable:
    return Unavailable(
        "The state cluster went away while the environment's SQL ran; nothing of it was kept.",
        code="state_cluster_unavailable",
        hint="Load the environment again.",
    )


def _refused(where: str, error: asyncpg.PostgresError) -> MegaMCPError:
    if error.sqlstate != _TOO_LONG and (error.sqlstate or "")[:2] in ("08", "57"):
        return _lost()
    words = f"{error.args[0]} ({error.sqlstate})"
    if detail := getattr(error, "detail", None):
        words += f" {detail}"
    if isinstance(error, asyncpg.DiskFullError):
        return Unavailable(
            f"The disk of the state cluster is full: {where}: {words}",
            code="disk_full",
            hint="Nothing of it was kept. Give the cluster more room and load again.",
        )
    return Unprocessable(
        f"{where}: {words}",
        code="environment_sql_failed",
        hint=getattr(error, "hint", None) or "Correct the environment's SQL file; nothing of it was kept.",
        sqlstate=error.sqlstate,
    )


def database_rights(name: str) -> str:
    """Nobody connects but who is granted it; who is in may make schemas and temporary tables."""
    return (
        f"revoke all on database {ident(name)} from public;grant create, temporary on database {ident(name)} to public;"
    )
