"""The way to a PostgreSQL: log in by SCRAM, say the session again, find the two functions that mark a transaction.

The only ways of login are SCRAM-SHA-256 and trust: a password in clear or by MD5 is never sent. Messages of the server
are passed on to nobody from here: they may hold names that aren't the client's business.
"""

import asyncio
import secrets
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megamcp.relay import messages
from megamcp.relay.memory import Memory
from megamcp.relay.messages import ProtocolViolation, Server
from megamcp.relay.scram import MECHANISM, ScramClient, ScramFailed
from megamcp.relay.wire import Wire

_MESSAGE_LIMIT: Final = 1 << 20
_FUNCTIONS: Final = (
    "select 'megamcp.enter(pg_catalog.bytea)'::pg_catalog.regprocedure::pg_catalog.oid,"
    " 'megamcp.leave(pg_catalog.bytea)'::pg_catalog.regprocedure::pg_catalog.oid"
)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a client's login leads right now."""

    host_or_socket_dir: str
    port: int
    database: str
    user: str
    password: str = field(repr=False)
    secret: str | None = field(default=None, repr=False)
    """What the client has to know; None: the password."""


Resolve = Callable[[str, str], Awaitable[Route]]
"""(user, database as the client named them) → where that leads now. Raises MegaMCPError."""


class Refused(Exception):
    """The server sent an ErrorResponse instead of letting us in."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.sqlstate = fields.get("C", "XX000")
        self.text = fields.get("M", "")
        super().__init__(f"{self.sqlstate}: {self.text}")

    @property
    def by_parameters(self) -> bool:
        """The client's own startup parameters are to blame; trying again can't help."""
        return self.sqlstate[:2] in ("22", "0A") or self.sqlstate in ("42704", "42601", "42602", "55P02")


class Unusable(Exception):
    """What answers there is no server that the relay can use."""


class Gate:
    """The two functions that mark a transaction, each call as a message.

    A client's own SQL runs between the two and might call them too: it knows the bytes of neither way in, and only
    these open the way out.
    """

    def __init__(self, enter: int, leave: int) -> None:
        self._enter, self._leave = enter, leave
        self._proof = b""

    def enter(self) -> bytes:
        """With bytes that nobody has seen before. What `enter` was asked with last is what `leave` will say."""
        self._proof = secrets.token_bytes(16)
        return messages.function_call(self._enter, self._proof)

    def leave(self) -> bytes:
        return messages.function_call(self._leave, self._proof)


@dataclass(frozen=True, slots=True)
class Backend:
    """A logged-in connection, idle."""

    wire: Wire
    route: Route
    process: int
    key: bytes
    gate: Gate
    reported: dict[str, str]


async def connected(route: Route) -> Wire:
    """A connection to the server of a route. Raises OSError."""
    loop = asyncio.get_running_loop()
    if route.host_or_socket_dir.startswith("/"):
        path = Path(route.host_or_socket_dir) / f".s.PGSQL.{route.port}"
        return (await loop.create_unix_connection(Wire, str(path)))[1]
    return (await loop.create_connection(Wire, route.host_or_socket_dir, route.port))[1]


async def log_in(route: Route, parameters: Mapping[str, str], memory: Memory) -> Backend:
    """Raises OSError, Refused, Unusable; closes the connection then."""
    wire = await connected(route)
    try:
        own = {**parameters, "user": route.user, "database": route.database}
        wire.write(messages.startup(own))
        await _authenticate(wire, route)
        process, key, reported = await _first_ready(wire)
        gate = await _prepare(wire, memory, reported)
    except (ProtocolViolation, ScramFailed, struct.error) as error:
        wire.close()
        raise Unusable(str(error)) from None
    except BaseException:
        wire.close()
        raise
    return Backend(wire, route, process, key, gate, reported)


async def cancel(backend: Backend) -> None:
    """Asks the server to cancel what the backend does; returns when the server has taken notice. Raises OSError."""
    wire = await connected(backend.route)
    try:
        wire.write(messages.untagged(messages.CANCEL_REQUEST, struct.pack("!I", backend.process) + backend.key))
        await wire.exactly(1)  # the server says nothing and closes
    except ConnectionError:
        pass
    finally:
        wire.close()


async def _next(wire: Wire) -> tuple[int, bytes]:
    """The next message that isn't a notice. Raises Refused for an error."""
    while True:
        kind, body = await wire.message(_MESSAGE_LIMIT)
        if kind == Server.ERROR:
            raise Refused(messages.error_fields(body))
        if kind not in (Server.NOTICE, Server.NEGOTIATE):
            return kind, body


async def _authenticate(wire: Wire, route: Route) -> None:
    scram = ScramClient("", route.password)  # PostgreSQL takes the name from the startup packet
    while True:
        kind, body = await _next(wire)
        if kind != Server.AUTHENTICATION:
            raise Unusable("no authentication request came")
        code, rest = int.from_bytes(body[:4], "big"), body[4:]
        match code:
            case 0:
                return
            case 10 if MECHANISM.encode() in rest.split(b"\0"):
                first = scram.first()
                answer = messages.zero_ended(MECHANISM) + len(first).to_bytes(4, "big") + first
            case 11:
                answer = scram.final(rest)
            case 12:
                scram.check(rest)
                continue
            case _:
                raise Unusable("the server asks for another login than SCRAM-SHA-256; see its pg_hba.conf")
        wire.write(messages.message(messages.Client.PASSWORD, answer))


async def _first_ready(wire: Wire) -> tuple[int, bytes, dict[str, str]]:
    process, key, reported = 0, b"", dict[str, str]()
    while True:
        kind, body = await _next(wire)
        if kind == Server.PARAMETER_STATUS:
            name, value = messages.strings(body, 2)
            reported[name.decode()] = value.decode(errors="surrogateescape")
        elif kind == Server.BACKEND_KEY:
            process, key = int.from_bytes(body[:4], "big"), body[4:]
        elif kind == Server.READY:
            return process, key, reported


async def _prepare(wire: Wire, memory: Memory, reported: dict[str, str]) -> Gate:
    """One round trip for all that has to be said. A step that fails is left out: what it would have set up isn't
    there, as if it had been dropped."""
    steps = list(memory.steps(reported))
    lookup = messages.message(messages.Client.QUERY, messages.zero_ended(_FUNCTIONS))
    wire.write(lookup + b"".join(steps))
    row, left = b"", 1 + len(steps)
    while left:
        kind, body = await wire.message(_MESSAGE_LIMIT)
        if kind == Server.READY:
            left -= 1
        elif kind == Server.DATA_ROW and not row:
            row = body
        elif kind == Server.PARAMETER_STATUS:
            name, value = messages.strings(body, 2)
            reported[name.decode()] = value.decode(errors="surrogateescape")
        elif kind == Server.ERROR:
            fields = messages.error_fields(body)
            if fields.get("V") in ("FATAL", "PANIC"):
                raise Refused(fields)
            if not row:
                raise Unusable(f"the database has no megamcp.enter and leave for this login: {fields.get('M')}")
    return Gate(*(int(value or b"0") for value in messages.row_values(row)))
