"""Run SQL that an agent wrote, on a database of the rollout's own: one statement, bounded results, values as JSON.

The statement goes through the extended protocol, which takes one and no second. The transaction is the call's, so
statements that would end it are refused; so are those on roles and databases, which belong to the cluster and not to
the state that a rollback restores. Everything else is PostgreSQL's to allow.
"""

from dataclasses import dataclass
from typing import Any

import asyncpg
import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.errors import UnsupportedStatement
from megamcp.plain import plain, read_exactly
from megamcp.sdk.results import ToolError
from megamcp.state.statements import kinds_of

BATCH = 200
_OWNED_BY_THE_CALL = frozenset({"TransactionStmt"})
_OF_THE_CLUSTER = {
    "CreateRoleStmt": "CREATE ROLE",
    "AlterRoleStmt": "ALTER ROLE",
    "AlterRoleSetStmt": "ALTER ROLE … SET",
    "DropRoleStmt": "DROP ROLE",
    "GrantRoleStmt": "GRANT of a role",
    "CreatedbStmt": "CREATE DATABASE",
    "DropdbStmt": "DROP DATABASE",
    "AlterDatabaseStmt": "ALTER DATABASE",
    "AlterDatabaseSetStmt": "ALTER DATABASE … SET",
    "CreateTableSpaceStmt": "CREATE TABLESPACE",
    "DropTableSpaceStmt": "DROP TABLESPACE",
    "AlterSystemStmt": "ALTER SYSTEM",
    "ReassignOwnedStmt": "REASSIGN OWNED",
    "DropOwnedStmt": "DROP OWNED",
    "ListenStmt": "LISTEN",
    "NotifyStmt": "NOTIFY",
}
_encode = msgspec.json.Encoder(decimal_format="number").encode


@dataclass(frozen=True, slots=True)
class Result:
    """Columns and rows of a statement that has any, and PostgreSQL's word for what it did (`UPDATE 3`)."""

    status: str
    columns: list[str]
    rows: list[list[Any]]
    truncated: bool


async def run_foreign(db: AsyncConnection, sql: str, *, rows: int = 1000, room: int = 1 << 20) -> Result:
    """At most `rows` rows and `room` bytes of their JSON. Raises `ToolError` with what PostgreSQL said."""
    _judge(sql)
    fairy = await db.get_raw_connection()
    driver: Any = fairy.driver_connection
    await read_exactly(driver)
    try:
        statement = await driver.prepare(sql)
        if parameters := statement.get_parameters():
            raise ToolError(
                "invalid_sql", f"The statement has {len(parameters)} parameters ($1 …); write the values into it."
            )
        columns = [attribute.name for attribute in statement.get_attributes()]
        if not columns:
            await statement.fetch()
            return Result(statement.get_statusmsg(), [], [], False)
        return await _fetch(statement, columns, rows, room)
    except asyncpg.UnsupportedClientFeatureError as error:
        raise ToolError("invalid_sql", f"A column can't be read: {error}. Cast it to text.") from error
    except asyncpg.PostgresError as error:
        if (error.sqlstate or "")[:2] in ("57", "08", "25"):
            raise
        told = [f"{error.sqlstate}: {error.message}"]
        told += [f"{name}: {text}" for name in ("detail", "hint") if (text := getattr(error, name, None))]
        if position := getattr(error, "position", None):
            told.append(f"position: {position}")
        raise ToolError("sql_error", "\n".join(told), sqlstate=error.sqlstate) from error


async def _fetch(statement: Any, columns: list[str], limit: int, room: int) -> Result:
    found: list[list[Any]] = []
    cursor = await statement.cursor()
    truncated = False
    while not truncated:
        batch = await cursor.fetch(min(BATCH, limit + 1 - len(found)))
        if not batch:
            break
        for record in batch:
            row = [plain(value) for value in record.values()]
            room -= len(_encode(row))
            if len(found) == limit or room < 0:
                truncated = True
                break
            found.append(row)
    status = statement.get_statusmsg() or ""
    return Result(status, columns, [msgspec.json.decode(_encode(row)) for row in found], truncated)


def _judge(sql: str) -> None:
    """A syntax error is PostgreSQL's to tell."""
    try:
        kinds = kinds_of(sql)
    except UnsupportedStatement as refused:
        raise ToolError("invalid_sql", f"{refused.message} {refused.hint or ''}".strip()) from refused
    if len(kinds) > 1:
        raise ToolError("several_statements", f"These are {len(kinds)} statements; send one a call.")
    for kind in kinds:
        if kind in _OWNED_BY_THE_CALL:
            raise ToolError(
                "transaction_control",
                "Each call is one transaction, which begins and ends by itself: leave transaction control out.",
            )
        if kind in _OF_THE_CLUSTER:
            raise ToolError(
                "not_in_this_database",
                f"{_OF_THE_CLUSTER[kind]} reaches out of this database: a rollback could not restore it.",
            )
