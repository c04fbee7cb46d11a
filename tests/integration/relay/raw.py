"""A client that knows nothing but bytes, to compare the relay with the server behind it."""

import asyncio
import contextlib
import struct
from dataclasses import dataclass, field
from typing import Self

from megamcp.relay import messages
from megamcp.relay.messages import Client, Server, message, zero_ended
from megamcp.relay.scram import ScramClient


@dataclass
class Raw:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: bytes = b""
    reported: dict[bytes, bytes] = field(default_factory=dict)

    async def next(self) -> tuple[int, bytes]:
        """Letter and body; raises IncompleteReadError at the end."""
        head = await self.reader.readexactly(5)
        return head[0], await self.reader.readexactly(int.from_bytes(head[1:], "big") - 4)

    async def until(self, kind: int) -> list[tuple[int, bytes]]:
        got = [await self.next()]
        while got[-1][0] != kind:
            got.append(await self.next())
        return got

    async def query(self, sql: str) -> list[tuple[int, bytes]]:
        self.writer.write(query(sql))
        return await self.until(Server.READY)

    async def rest(self) -> bytes:
        """All that comes until the other side closes."""
        return await self.reader.read()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def query(sql: str) -> bytes:
    return message(Client.QUERY, zero_ended(sql))


def bind(portal: str, statement: str) -> bytes:
    return message(Client.BIND, zero_ended(portal) + zero_ended(statement) + b"\0\0\0\0\0\0")


def execute(portal: str, rows: int = 0) -> bytes:
    return message(Client.EXECUTE, zero_ended(portal) + struct.pack("!I", rows))


def named(kind: int, which: str, name: str) -> bytes:
    """Describe or Close of a statement (S) or portal (P)."""
    return message(kind, which.encode() + zero_ended(name))


def failure(response: bytes) -> dict[str, str]:
    assert response[:1] == b"E", response
    return messages.error_fields(response[5:])


async def opened(address: str | tuple[str, int]) -> Raw:
    if isinstance(address, str):
        return Raw(*await asyncio.open_unix_connection(address))
    return Raw(*await asyncio.open_connection(*address))


async def logged_in(
    address: str | tuple[str, int], user: str, password: str, database: str, protocol: int = messages.PROTOCOL_3_2
) -> Raw:
    """Raises PermissionError with the fields of the server's error."""
    raw = await opened(address)
    raw.writer.write(messages.startup({"user": user, "database": database}, protocol))
    scram = ScramClient("", password)
    while True:
        kind, body = await raw.next()
        if kind == Server.ERROR:
            await raw.__aexit__()
            raise PermissionError(messages.error_fields(body))
        if kind == Server.AUTHENTICATION:
            match int.from_bytes(body[:4], "big"):
                case 10:
                    first = scram.first()
                    reply = zero_ended("SCRAM-SHA-256") + struct.pack("!I", len(first)) + first
                    raw.writer.write(message(Client.PASSWORD, reply))
                case 11:
                    raw.writer.write(message(Client.PASSWORD, scram.final(body[4:])))
                case 12:
                    scram.check(body[4:])
        elif kind == Server.BACKEND_KEY:
            raw.key = body
        elif kind == Server.PARAMETER_STATUS:
            name, value = messages.strings(body, 2)
            raw.reported[name] = value
        elif kind == Server.READY:
            return raw
