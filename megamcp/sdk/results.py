"""The result of a call as text: made once, recorded and sent as the very same bytes.

Whatever goes wrong inside a tool becomes a tool *result* with `isError` (the agent can read it and do
better), with a stable `code` in its structured content. What is wrong around it (a forged handle, a database
that is away) is `CallRefused` and leaves as a JSON-RPC error.

Tracebacks, SQL text and bound parameters never get into a result; they go to the log.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.exc import DBAPIError

from megamcp.errors import MegaMCPError

COMPLETE = b',"resultType":"complete"}'  # demanded by 2026-07-28, ignored by older peers


class ToolError(Exception):
    """Raise it in a tool for a refusal by business rules: the call is rolled back, the agent reads `message`.

    `code` is stable (snake case), for evaluators and tests; `data` is JSON shown beside it.
    """

    def __init__(self, code: str, message: str, **data: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class CallRefused(Exception):
    """The call could not be made, for a reason that is not the tool's. Leaves as a JSON-RPC error."""

    def __init__(self, code: str, message: str, *, rpc: int = -32603, **data: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.rpc = rpc
        self.data = {"code": code, **data}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished call: the JSON text of its CallToolResult."""

    result: bytes
    is_error: bool

    @property
    def text(self) -> str:
        return self.result.decode()


def success(value: Any, output: TypeAdapter[Any] | None, wraps: bool) -> Outcome:
    """Checks the value against the advertised type, so that an agent never gets what the schema forbids.

    Raises ValidationError or PydanticSerializationError.
    """
    if output is None:
        return Outcome(b'{"content":[{"type":"text","text":"Done."}]' + COMPLETE, is_error=False)
    body = output.dump_json(output.validate_python(value, from_attributes=True), by_alias=True)
    body.decode()  # a lone surrogate would break the wire later, with a worse message
    text = body if wraps and body[:1] == b'"' else msgspec.json.encode(body.decode())
    structured = b'{"result":' + body + b"}" if wraps else body
    parts = (b'{"content":[{"type":"text","text":', text, b'}],"structuredContent":', structured, COMPLETE)
    return Outcome(b"".join(parts), is_error=False)


def failure(code: str, message: str, **data: Any) -> Outcome:
    """A tool's error as its result."""
    structured = {"code": code, "message": message, **data}
    result = {
        "content": [{"type": "text", "text": message}],
        "structuredContent": structured,
        "isError": True,
        "resultType": "complete",
    }
    return Outcome(msgspec.json.encode(result), is_error=True)


def invalid_arguments(tool: str, error: ValidationError) -> Outcome:
    """Every problem with its path, in the words of the schema, without repeating what was sent."""
    problems = [
        {"path": _path(item["loc"]), "message": item["msg"]}
        for item in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    lines = "".join(f"\n- {problem['path'] or 'arguments'}: {problem['message']}" for problem in problems)
    return failure("invalid_arguments", f"Invalid arguments for tool {tool}:{lines}", errors=problems)


def from_exception(error: Exception) -> tuple[Outcome, bool]:
    """(tool result, whether it was expected: an unexpected one goes into the log with its traceback)."""
    if isinstance(error, ToolError):
        return failure(error.code, error.message, **error.data), True
    if isinstance(error, MegaMCPError):
        text = error.message if error.hint is None else f"{error.message} {error.hint}"
        return failure(error.code, text), True
    if isinstance(error, DBAPIError) and error.orig is not None:
        return _sql_failure(error), False
    return failure("tool_failed", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__), False


def _sql_failure(error: DBAPIError) -> Outcome:
    # SQLAlchemy's own text repeats the statement; the driver's exception is what PostgreSQL said.
    cause = error.orig.__cause__ or error.orig if error.orig is not None else error
    said = getattr(cause, "message", None) or str(cause.args[0] if cause.args else cause)
    sqlstate = getattr(cause, "sqlstate", None)
    data = {"sqlstate": sqlstate} if sqlstate else {}
    if constraint := getattr(cause, "constraint_name", None):
        data["constraint"] = constraint
    prefix = f"{type(cause).__name__} ({sqlstate})" if sqlstate else type(cause).__name__
    return failure("sql_error", f"{prefix}: {said}", **data)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
