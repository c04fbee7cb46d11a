"""What both sides of the data plane mean by the same names: revisions, keys of `_meta`, a tool call, a lost server.

No behaviour but the encoding of header values.
"""

import binascii
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from megamcp.dataplane.wire import Reply
from megamcp.errors import UpstreamError

MODERN = "2026-07-28"
HANDSHAKE = ("2025-11-25", "2025-06-18", "2025-03-26")
HANDLE_HEADER = b"MegaMCP-Handle"
DATABASE_HEADER = b"MegaMCP-Database"

PROTOCOL_KEY = "io.modelcontextprotocol/protocolVersion"
CLIENT_KEY = "io.modelcontextprotocol/clientInfo"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"

Progress = Callable[[bytes], Awaitable[None]]
"""Gets whole `notifications/progress` messages, with the client's own token."""


class Era(StrEnum):
    MODERN = "modern"
    """2026-07-28: every request stands alone."""
    HANDSHAKE = "handshake"
    """2025-11-25 and before: initialize, then a session."""


CHECK_DOCUMENT = "io.megamcp/check_document"
"""A method of children whose state is a document: whether they can load one."""


class UpstreamLost(UpstreamError):
    """The connection broke. `sent` says whether the server may have seen the request."""

    default_code = "tool_server_lost"

    def __init__(self, message: str, *, sent: bool, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, code=code, hint=hint)
        self.sent = sent


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A `tools/call` in the client's bytes. `meta` is its `_meta` object (empty: none), `modern` the era that
    wrote it, `more` further members of params as JSON text (`,"key":value…`), `headers` those mirrored from
    arguments, `progress_token` the token in `meta`."""

    name: str
    arguments: bytes
    meta: bytes = b""
    modern: bool = False
    more: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    progress_token: bytes | None = None


class Upstream(Protocol):
    """A client of one tool server, however it is reached.

    Every method may raise UpstreamLost and UpstreamError; the caller sets the deadline. Leaving a request (its task is
    cancelled) cancels it at the server, and returns when that is settled.
    """

    sandbox: str | None
    """Name of the one that the server lives in."""

    async def call(
        self,
        call: ToolCall,
        *,
        handle: str | None = None,
        database: str | None = None,
        progress: Progress | None = None,
        deadline: float | None = None,
    ) -> Reply:
        """One tool call. `handle` and `database` (a DSN) are for servers on our SDK. `deadline` (of the loop) is
        when the caller leaves by itself: how long settling may take where the server would be harmed by an end."""
        ...

    async def request(self, method: str, params: Mapping[str, object]) -> Reply:
        """Any other request, with parameters of ours."""
        ...

    async def instructions(self) -> str | None:
        """What the server says about its use."""
        ...


def header_value(value: str) -> str:
    """A value as an HTTP field carries it: plain where that is safe, else the Base64 form of 2026-07-28."""
    plain = value.isascii() and value.isprintable() and value == value.strip()
    if plain and not value.startswith("=?base64?"):
        return value
    return "=?base64?" + binascii.b2a_base64(value.encode(), newline=False).decode() + "?="
