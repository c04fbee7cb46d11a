"""The first minute of a client: its startup packet and its proof that it knows the password.

What an unauthenticated peer can cost is bounded here by size, and by the caller in time. Nothing that is answered tells
whether a login exists. Encryption is declined ('N'): the relay is for the loopback interface or a private network.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Final

from megamcp.relay import messages
from megamcp.relay.messages import ProtocolViolation
from megamcp.relay.scram import MECHANISM, ScramBroken, ScramFailed, ScramServer
from megamcp.relay.wire import Wire

_SASL_LIMIT: Final = 2048  # bytes of one message


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request to cancel what another connection does."""

    process: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a client asked for. `parameters` go on to the server: all but user and database."""

    user: str
    database: str
    parameters: dict[str, str]
    protocol: int


class Turned(Exception):
    """A client that is sent away with this ErrorResponse."""

    def __init__(self, response: bytes) -> None:
        super().__init__("the client was sent away")
        self.response = response


def turned(sqlstate: str, text: str, hint: str | None = None) -> Turned:
    return Turned(messages.error_response(sqlstate, text, hint=hint))


async def greeting(wire: Wire) -> Greeting | Cancel:
    """Raises Turned, ProtocolViolation, ConnectionError."""
    asked = set[int]()
    while True:
        length = int.from_bytes(await wire.exactly(4), "big")
        if not 8 <= length <= messages.STARTUP_LIMIT:
            raise ProtocolViolation("invalid length of startup packet")
        body = await wire.exactly(length - 4)
        code, rest = int.from_bytes(body[:4], "big"), body[4:]
        match code:
            case messages.SSL_REQUEST | messages.GSS_REQUEST if not rest and code not in asked:
                asked.add(code)
                wire.write(b"N")
            case messages.CANCEL_REQUEST:
                if not 8 <= len(rest) <= 260:
                    raise ProtocolViolation("invalid length of cancel request")
                return Cancel(int.from_bytes(rest[:4], "big"), rest[4:])
            case _:
                return _greeting(code, rest, wire)


def _greeting(protocol: int, rest: bytes, wire: Wire) -> Greeting:
    if protocol >> 16 != 3:
        raise turned("0A000", f"unsupported frontend protocol {protocol >> 16}.{protocol & 0xFFFF}: supported is 3")
    parameters = messages.parse_startup(rest)
    unknown = [name for name in parameters if name.startswith("_pq_.")]
    if unknown or protocol > messages.PROTOCOL_3_2:
        wire.write(messages.negotiate(unknown))
    for name in unknown:
        del parameters[name]
    user = parameters.pop("user", "")
    database = parameters.pop("database", "") or user
    if not user:
        raise turned("28000", "no PostgreSQL user name specified in startup packet")
    if parameters.pop("replication", "false").lower() not in ("false", "off", "no", "0", "f", "n", "of"):
        raise turned("0A000", "The relay passes no replication on.", "Connect without the parameter `replication`.")
    return Greeting(user, database, parameters, min(protocol, messages.PROTOCOL_3_2))


async def authenticate(wire: Wire, user: str, password: str | None, secret: bytes) -> None:
    """SCRAM-SHA-256. `password` None: a login that doesn't exist; `secret` makes its salt, and all others.

    Raises Turned (28P01), ProtocolViolation, ConnectionError. Ends before AuthenticationOk.
    """
    salt = hmac.digest(secret, user.encode(), hashlib.sha256)[:16]
    server = ScramServer(password, salt)
    wire.write(messages.authentication(10, messages.zero_ended(MECHANISM) + b"\0"))
    try:
        body = await _password_message(wire)
        mechanism, separator, rest = body.partition(b"\0")
        if mechanism != MECHANISM.encode() or not separator or len(rest) < 4:
            raise ProtocolViolation("client selected an invalid SASL authentication mechanism")
        (size,) = struct.unpack_from("!i", rest)
        if size == -1 and len(rest) == 4:  # no initial response: it is asked for by an empty challenge
            wire.write(messages.authentication(11))
            first = await _password_message(wire)
        elif size == len(rest) - 4:
            first = rest[4:]
        else:
            raise ProtocolViolation("malformed SASL message")
        wire.write(messages.authentication(11, server.first(first)))
        proof = server.final(await _password_message(wire))
    except ScramBroken as error:
        raise ProtocolViolation(str(error)) from None
    except ScramFailed:
        raise turned("28P01", f'password authentication failed for user "{user}"') from None
    wire.write(messages.authentication(12, proof))


async def _password_message(wire: Wire) -> bytes:
    kind, body = await wire.message(_SASL_LIMIT)
    if kind != messages.Client.PASSWORD:
        raise ProtocolViolation(f"expected SASL response, got message type {kind}")
    return body
