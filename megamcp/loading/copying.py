"""COPY … FROM stdin as a command of the driver: the table, the columns and the options that mean something here."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import postgast
from postgast import pg_query_pb2 as pb

from megamcp.loading.script import bad

_TEXTS = {"format", "delimiter", "null", "quote", "escape", "encoding"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where rows go, and how they are written."""

    table: str
    schema: str | None
    columns: tuple[str, ...]
    """Empty: all that can be given."""
    options: dict[str, Any]
    """As `asyncpg.Connection.copy_to_table` takes them."""


def target(statement: bytes, name: str, line: int) -> Target:
    """Reads a COPY. Raises `Unprocessable` (`invalid_environment`) for one that isn't rows into a table."""

    def refused(problem: str, hint: str) -> Exception:
        return bad(name, f"line {line}: {problem}", hint)

    try:
        copy = postgast.parse(statement.decode()).stmts[0].stmt.copy_stmt
    except (postgast.PgQueryError, UnicodeDecodeError) as error:
        raise refused(str(error), "Correct the file.") from error
    if not copy.is_from or copy.is_program or copy.filename or not copy.HasField("relation"):
        raise refused("this COPY doesn't take rows from the file", "Write COPY table FROM stdin.")
    if copy.HasField("where_clause"):
        raise refused("COPY … WHERE isn't followed", "Leave out the rows, or DELETE them afterwards.")
    options: dict[str, Any] = {}
    for option in (node.def_elem for node in copy.options):
        value = _value(option)
        if option.defname in _TEXTS and isinstance(value, str):
            options[option.defname] = value
        elif option.defname == "header" and value in (True, False):
            options["header"] = value
        elif option.defname != "freeze":
            raise refused(f"COPY's option {option.defname} isn't followed", "Leave it out.")
    if options.get("format") not in (None, "text", "csv"):
        raise refused("only COPY's formats text and csv are read", "Dump as text.")
    return Target(
        table=copy.relation.relname,
        schema=copy.relation.schemaname or None,
        columns=tuple(node.string.sval for node in copy.attlist),
        options=options,
    )


async def copy(connection: Any, to: Target, rows: AsyncIterator[bytes]) -> None:
    """Raises PostgresError with the table, the line and the column in its context."""
    await connection.copy_to_table(
        to.table, source=rows, columns=list(to.columns) or None, schema_name=to.schema, timeout=None, **to.options
    )


def _value(option: pb.DefElem) -> object:
    if not option.HasField("arg"):
        return True
    match option.arg.WhichOneof("node"):
        case "string":
            text = option.arg.string.sval
            return {"true": True, "on": True, "false": False, "off": False}.get(text.lower(), text)
        case "boolean":
            return option.arg.boolean.boolval
        case "integer":
            return bool(option.arg.integer.ival)
    return None
