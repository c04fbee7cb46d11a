"""PostgreSQL's protocol, version 3: names of messages, their limits, and how the few that the relay writes are made.

Client and server use the same letters for different messages, hence two namespaces. Lengths include themselves and
not the letter. What is here raises `ProtocolViolation` for what no PostgreSQL would accept, and keeps no state.
"""

import struct
from collections.abc import Iterable, Mapping
from typing import Final

from megamcp import errors

PROTOCOL_3_0: Final = 3 << 16
PROTOCOL_3_2: Final = PROTOCOL_3_0 | 2
SSL_REQUEST: Final = 80877103
GSS_REQUEST: Final = 80877104
CANCEL_REQUEST: Final = 80877102

STARTUP_LIMIT: Final = 10_000  # bytes; PostgreSQL's own limit of a startup packet
SMALL_LIMIT: Final = 10_000  # of messages that hold no data
LARGE_LIMIT: Final = (1 << 30) - 2


class ProtocolViolation(Exception):
    """The other side sent what the protocol doesn't have (SQLSTATE 08P01)."""


class Client:
    """Letters of what clients send."""

    BIND: Final = ord("B")
    CLOSE: Final = ord("C")
    COPY_DATA: Final = ord("d")
    COPY_DONE: Final = ord("c")
    COPY_FAIL: Final = ord("f")
    DESCRIBE: Final = ord("D")
    EXECUTE: Final = ord("E")
    FLUSH: Final = ord("H")
    FUNCTION_CALL: Final = ord("F")
    PARSE: Final = ord("P")
    PASSWORD: Final = ord("p")
    QUERY: Final = ord("Q")
    SYNC: Final = ord("S")
    TERMINATE: Final = ord("X")


class Server:
    """Letters of what servers send."""

    AUTHENTICATION: Final = ord("R")
    BACKEND_KEY: Final = ord("K")
    BIND_COMPLETE: Final = ord("2")
    CLOSE_COMPLETE: Final = ord("3")
    COMMAND_COMPLETE: Final = ord("C")
    COPY_DATA: Final = ord("d")
    COPY_IN: Final = ord("G")
    DATA_ROW: Final = ord("D")
    EMPTY_QUERY: Final = ord("I")
    ERROR: Final = ord("E")
    NEGOTIATE: Final = ord("v")
    NO_DATA: Final = ord("n")
    NOTICE: Final = ord("N")
    NOTIFICATION: Final = ord("A")
    PARAMETER_STATUS: Final = ord("S")
    PARSE_COMPLETE: Final = ord("1")
    PORTAL_SUSPENDED: Final = ord("s")
    READY: Final = ord("Z")
    ROW_DESCRIPTION: Final = ord("T")


_LARGE = frozenset(b"BFPQd")
_SMALL = frozenset(b"CcDEfHSX")


def check_client_message(kind: int, length: int) -> None:
    """Raises ProtocolViolation for a letter or a length that PostgreSQL ends a connection for."""
    if kind in _LARGE:
        limit = LARGE_LIMIT
    elif kind in _SMALL:
        limit = SMALL_LIMIT
    else:
        raise ProtocolViolation(f"invalid frontend message type {kind}")
    if not 4 <= length <= limit:
        raise ProtocolViolation("invalid message length")


def message(kind: int, body: bytes = b"") -> bytes:
    return bytes((kind,)) + (len(body) + 4).to_bytes(4, "big") + body


def zero_ended(text: str | bytes) -> bytes:
    data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
    if b"\0" in data:
        raise ValueError("a text of the protocol can't hold a zero byte")
    return data + b"\0"


def untagged(code: int, body: bytes) -> bytes:
    """A startup packet: these have no letter."""
    return struct.pack("!II", len(body) + 8, code) + body


def startup(parameters: Mapping[str, str], protocol: int = PROTOCOL_3_2) -> bytes:
    pairs = b"".join(zero_ended(key) + zero_ended(value) for key, value in parameters.items())
    return untagged(protocol, pairs + b"\0")


def parse_startup(body: bytes) -> dict[str, str]:
    """Parameters of a startup packet, after its version. Raises ProtocolViolation."""
    if not body.endswith(b"\0"):
        raise ProtocolViolation("invalid startup packet layout: expected terminator as last byte")
    parts = body[:-1].split(b"\0")
    if parts.pop() or len(parts) % 2:
        raise ProtocolViolation("invalid startup packet layout")
    try:
        texts = [part.decode() for part in parts]
    except UnicodeDecodeError:
        raise ProtocolViolation("the startup packet is not in UTF-8") from None
    if "" in texts[::2]:
        raise ProtocolViolation("invalid startup packet layout: a parameter has no name")
    return dict(zip(texts[::2], texts[1::2], strict=True))


def negotiate(options: Iterable[str]) -> bytes:
    """NegotiateProtocolVersion: 3.2 is the newest here, and these `_pq_.` options are unknown."""
    names = [zero_ended(option) for option in options]
    return message(Server.NEGOTIATE, struct.pack("!II", PROTOCOL_3_2, len(names)) + b"".join(names))


def authentication(code: int, rest: bytes = b"") -> bytes:
    return message(Server.AUTHENTICATION, code.to_bytes(4, "big") + rest)


def parameter_status(name: str, value: str) -> bytes:
    return message(Server.PARAMETER_STATUS, zero_ended(name) + zero_ended(value))


def ready(status: bytes = b"I") -> bytes:
    return message(Server.READY, status)


def error_response(sqlstate: str, text: str, *, hint: str | None = None, severity: str = "FATAL") -> bytes:
    fields = [("S", severity), ("V", severity), ("C", sqlstate), ("M", text)]
    if hint:
        fields.append(("H", hint))
    body = b"".join(zero_ended(letter + value.replace("\0", "")) for letter, value in fields)
    return message(Server.ERROR, body + b"\0")


def error_fields(body: bytes) -> dict[str, str]:
    """Fields of an ErrorResponse by their letters."""
    return {part[:1].decode("latin-1"): part[1:].decode(errors="replace") for part in body.split(b"\0") if part}


def strings(body: bytes, count: int) -> list[bytes]:
    """The first zero-ended texts of a message. Raises ProtocolViolation when there are fewer."""
    parts = body.split(b"\0", count)
    if len(parts) <= count:
        raise ProtocolViolation("invalid string in message")
    return parts[:count]


def row_values(body: bytes) -> list[bytes | None]:
    """Columns of a DataRow."""
    count, position, values = int.from_bytes(body[:2], "big"), 2, list[bytes | None]()
    for _ in range(count):
        (size,) = struct.unpack_from("!i", body, position)
        position += 4
        values.append(None if size < 0 else body[position : position + size])
        position += max(size, 0)
    return values


def parse(name: str, sql: str) -> bytes:
    return message(Client.PARSE, zero_ended(name) + zero_ended(sql) + b"\0\0")


def bind(statement: str, values: Iterable[str]) -> bytes:
    """Bind with parameters and results in text, to the unnamed portal."""
    encoded = [value.encode(errors="surrogateescape") for value in values]
    arguments = b"".join(len(value).to_bytes(4, "big") + value for value in encoded)
    head = b"\0" + zero_ended(statement) + b"\0\0" + len(encoded).to_bytes(2, "big")
    return message(Client.BIND, head + arguments + b"\0\0")


EXECUTE = message(Client.EXECUTE, b"\0\0\0\0\0")
SYNC = message(Client.SYNC)
FLUSH = message(Client.FLUSH)


def close_statement(name: str) -> bytes:
    return message(Client.CLOSE, b"S" + zero_ended(name))


def function_call(oid: int, argument: bytes) -> bytes:
    """Call of a function of one `bytea`. It leaves statements and portals alone, as no query would."""
    head = struct.pack("!IHHHI", oid, 1, 1, 1, len(argument))
    return message(Client.FUNCTION_CALL, head + argument + b"\0\1")


_SQLSTATES: Final[tuple[tuple[type[errors.MegaMCPError], str], ...]] = (
    (errors.NotFound, "3D000"),
    (errors.Gone, "57P04"),
    (errors.Unauthorized, "28000"),
    (errors.NoCapacity, "53300"),
    (errors.Conflict, "55006"),
    (errors.Unprocessable, "0A000"),
    (errors.BadRequest, "08P01"),
    (errors.Unavailable, "57P03"),
    (errors.DeadlineExceeded, "57P03"),
    (errors.UpstreamError, "08006"),
)


def refusal(error: errors.MegaMCPError) -> bytes:
    """One of our errors as PostgreSQL's clients read it."""
    sqlstate = next((code for kind, code in _SQLSTATES if isinstance(error, kind)), "XX000")
    return error_response(sqlstate, error.message, hint=error.hint)
