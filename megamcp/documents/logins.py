"""The login of a tool server that keeps documents: it may make calls, and has no other right anywhere."""

import hashlib

import asyncpg

from megamcp.state import rights
from megamcp.state.names import ident, literal

_FUNCTIONS = (
    "megamcp.document_head(text, bigint[]), megamcp.document_base(text, bytea),"
    " megamcp.document_splice(text, bigint, integer[], integer[], bytea[]),"
    " megamcp.document_replace(text, bigint, bytea)"
)


async def make(connection: asyncpg.Connection, content: str, password: str) -> str:
    """The login for the server of that content (its environment's hash and its name)."""
    deployment = await connection.fetchval("select megamcp.deployment()")
    name = f"megamcp_tool_{hashlib.sha256(f'document {content}'.encode()).hexdigest()[:16]}_{deployment}"
    await rights.patiently(connection, rights.role(name, "login") + rights.membership((name,)))
    await connection.execute(f"grant megamcp_tools to {ident(name)}")
    await rights.no_temporary_tables(connection, name)
    await reset(connection, name, password)
    return name


async def reset(connection: asyncpg.Connection, name: str, password: str) -> None:
    """Rights, password and settings as if just made: a login may change its own password."""
    role = ident(name)
    await connection.execute(f"grant execute on function {_FUNCTIONS} to {role}")
    await rights.patiently(
        connection,
        f"alter role {role} reset all; alter role {role} password {literal(password)};"
        f"alter role {role} set search_path = pg_catalog, pg_temp; alter role {role} set jit = off;",
    )
