"""Brings a database to this version: alembic's revisions, then the functions, under one advisory lock.

Revisions hold data and are applied once. The SQL files of functions are re-applied whenever their text changes.
A fingerprint of both is kept in the database's comment on the schema, so that a start with nothing to do costs one
query. This module doesn't create the database or its login.
"""

import hashlib
import secrets
from pathlib import Path

import asyncpg

from megamcp.errors import Unprocessable
from megamcp.handles import Signer

PACKAGE = Path(__file__).parent
# In this order: the second and third take from everyone what they need not execute, the second grants the rest by name.
FUNCTIONS = (
    PACKAGE / "state" / "sql" / "state.sql",
    PACKAGE / "sql" / "handles.sql",
    PACKAGE / "sql" / "control.sql",
    PACKAGE / "sql" / "documents.sql",
    PACKAGE / "sql" / "hardening.sql",
)
SHARED_ROLES = ("megamcp_tools", "megamcp_queries")
"""Group roles without login; a cluster has them once."""
LOCK = 0x6D656761  # "mega"


def migrations_folder() -> Path:
    """Inside the package when installed, beside it in a checkout."""
    inside = PACKAGE / "migrations"
    return inside if inside.is_dir() else PACKAGE.parent / "migrations"


def fingerprint() -> str:
    """Hash of everything that migrating would apply."""
    digest = hashlib.sha256()
    for path in [
        *sorted(migrations_folder().rglob("*.py")),
        *sorted(migrations_folder().rglob("*.sql")),
        *FUNCTIONS,
    ]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


async def migrate(dsn: str) -> Signer:
    """Apply what is missing and return the deployment's signer.

    Raises `Unprocessable` (`insufficient_rights`) when the login may not create schemas or roles.
    """
    connection = await asyncpg.connect(dsn)
    try:
        wanted = fingerprint()
        await connection.execute("select pg_advisory_lock($1)", LOCK)
        found = await connection.fetchval("select obj_description(to_regnamespace('megamcp'), 'pg_namespace')")
        if found != wanted:
            await _check_rights(connection)
            await connection.execute("create schema if not exists megamcp")
            await _run_revisions(dsn)
            async with connection.transaction():
                for path in FUNCTIONS:
                    await connection.execute(path.read_text(encoding="utf-8"))
                await connection.execute(f"comment on schema megamcp is '{wanted}'")
        return await _signer(connection)
    finally:
        await connection.close()


async def _check_rights(connection: asyncpg.Connection) -> None:
    rights = await connection.fetchrow(
        "select rolsuper or rolcreaterole as roles, has_database_privilege(current_database(), 'create') as schemas"
        " from pg_roles where rolname = current_user"
    )
    missing = [
        name for name, right in (("CREATEROLE", "roles"), ("CREATE on the database", "schemas")) if not rights[right]
    ]
    if missing:
        raise Unprocessable(
            f"The login of MEGAMCP_DATABASE_URL lacks {' and '.join(missing)}.",
            code="insufficient_rights",
            hint="Grant it, or use the embedded PostgreSQL (leave MEGAMCP_DATABASE_URL unset).",
        )
    foreign = await connection.fetch(
        "select rolname from pg_roles where rolname = any($1::text[])"
        " and not (select rolsuper from pg_roles where rolname = current_user)"
        " and not pg_has_role(current_user, oid, 'usage with admin option')",
        list(SHARED_ROLES),
    )
    if foreign:
        names = ", ".join(row["rolname"] for row in foreign)
        raise Unprocessable(
            f"The roles {names} of this cluster were made by another login, for another MegaMCP.",
            code="insufficient_rights",
            hint=f"As a superuser: GRANT {names} TO the login of MEGAMCP_DATABASE_URL WITH ADMIN OPTION.",
        )


async def _run_revisions(dsn: str) -> None:
    # Here, because a start with nothing to do is quicker without them.
    from alembic import command
    from alembic.config import Config
    from sqlalchemy import pool
    from sqlalchemy.engine import Connection
    from sqlalchemy.ext.asyncio import create_async_engine

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))

    def upgrade(connection: Connection) -> None:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")

    engine = create_async_engine(sqlalchemy_url(dsn), poolclass=pool.NullPool)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(upgrade)
    finally:
        await engine.dispose()


async def _signer(connection: asyncpg.Connection) -> Signer:
    secret = secrets.token_bytes(32)
    inner, outer = Signer.pads(secret)
    kept = await connection.fetchval(
        "with made as (insert into megamcp.keys values ('handle', $1, $2, $3) on conflict do nothing returning secret)"
        " select secret from made union all select secret from megamcp.keys where name = 'handle'",
        inner,
        outer,
        secret,
    )
    return Signer(bytes(kept))


def sqlalchemy_url(dsn: str) -> str:
    """The DSN as SQLAlchemy wants it for asyncpg."""
    scheme, rest = dsn.split("://", 1)
    return f"postgresql+asyncpg://{rest}" if scheme in ("postgres", "postgresql") else dsn
