"""Makes a source: an environment's SQL in a database of its own, with the log and the functions for calls put in.

The SQL runs as a login of that database alone, working as `mm_owner`: it has the rights that agents will have, and may
make trusted extensions besides.
"""

from collections.abc import Callable, Sequence
from importlib.resources import files

import asyncpg

from megamcp.errors import Unprocessable
from megamcp.failpoints import failpoint
from megamcp.state.clones import logins
from megamcp.state.clones.types import Keys
from megamcp.state.names import ident

Progress = Callable[[str, int, int], None]
ORDER = ("log", "calls", "ddl", "marks", "rights", "events")


def sql(name: str) -> str:
    """A file of `sql/`."""
    return files("megamcp.state.clones").joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")


async def fill(
    admin: asyncpg.Connection,
    dsn: str,
    *,
    ddl: str,
    seeds: Sequence[str],
    progress: Progress,
) -> None:
    """Run the environment's SQL over `dsn`. Raises `Unprocessable` with PostgreSQL's words and the place."""
    await admin.execute(f"alter schema public owner to {logins.OWNER}")
    connection = await asyncpg.connect(dsn, server_settings={"application_name": "megamcp build", "jit": "off"})
    try:
        texts = [("schema", ddl), *((f"seed {n}", text) for n, text in enumerate(seeds, 1))]
        for done, (what, text) in enumerate(texts):
            progress("run", done, len(texts))
            try:
                await connection.execute(text)
            except asyncpg.PostgresError as error:
                raise _refused(what, text, error) from error
            except (ValueError, asyncpg.InterfaceError) as error:
                raise Unprocessable(f"The {what} can't be sent: {error}", code="environment_sql_failed") from error
            if connection.is_in_transaction():
                raise Unprocessable(
                    f"The {what} ends within a transaction.", code="environment_sql_failed", hint="Add COMMIT."
                )
        progress("run", len(texts), len(texts))
    finally:
        await connection.close()


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


def _refused(what: str, text: str, error: asyncpg.PostgresError) -> Unprocessable:
    position = getattr(error, "position", None)
    line = f", line {text[: int(position) - 1].count(chr(10)) + 1}" if position and str(position).isdigit() else ""
    words = f"{error} ({error.sqlstate})"
    if detail := getattr(error, "detail", None):
        words += f" {detail}"
    return Unprocessable(
        f"The {what}{line}: {words}",
        code="environment_sql_failed",
        hint=getattr(error, "hint", None) or "Correct the environment's SQL file; nothing of it was kept.",
        sqlstate=error.sqlstate,
    )


def database_rights(name: str) -> str:
    """Nobody connects but who is granted it; who is in may make schemas and temporary tables."""
    return (
        f"revoke all on database {ident(name)} from public;grant create, temporary on database {ident(name)} to public;"
    )
