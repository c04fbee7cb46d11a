"""What both sides of the data plane mean by the same names: revisions, keys of `_meta`, a tool call, a lost server.

No behaviour but the encoding of header values.
"""

import binascii
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from megamcp.dataplane.wire import Reply
from megamcp.errors import UpstreamError

MODERN = "2026-07-28"
HANDSHAKE = ("2025-11-25", "2025-06-18", "2025-03-26")
HANDLE_HEADER = b"MegaMCP-Handle"
DATABASE_HEADER = b"MegaMCP-Database"

PROTOCOL_KEY = "io.modelcontextprotocol/protocolVersion"
CLIENT_KEY = "io.modelcontextprotocol/clientInfo"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"

LEVEL_KEY = "io.modelcontextprotocol/logLevel"
SUBSCRIPTION_KEY = "io.modelcontextprotocol/subscriptionId"

Sink = Callable[[bytes], Awaitable[None]]
"""Gets whole messages of a server."""


class Client(Protocol):
    """Who asked, as a tool server may speak to it while it works on a request."""

    session: str
    """Whose session it uses at a server of the handshake era: the client's own, or its rollout's."""
    capabilities: bytes
    """JSON text of its ClientCapabilities."""
    resumes: bool
    """It takes `input_required` results and comes back with the answers; others are asked while their request waits."""
    level: str | None
    """The least level of log messages that it wants with this request."""

    async def notify(self, message: bytes) -> None:
        """A notification that belongs to its request: progress (with its own token), log messages. May be dropped."""
        ...

    async def ask(self, method: str, params: bytes) -> Reply:
        """Sampling, elicitation, roots. What it can't do is a failed reply. Waits for people, so it may take long."""
        ...


class Through:
    """What is the same of a client that is seen through something."""

    def __init__(self, client: Client) -> None:
        self.session = client.session
        self.capabilities = client.capabilities
        self.resumes = client.resumes
        self.level = client.level


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


@dataclass(frozen=True, slots=True)
class About:
    """What a server says about itself at the handshake. `capabilities` by name, as it declares them."""

    instructions: str | None = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)


class Upstream(Protocol):
    """A client of one tool server, however it is reached.

    Every method may raise UpstreamLost and UpstreamError; the caller sets the deadline. Leaving a request (its task is
    cancelled) cancels it at the server, and returns when that is settled.
    """

    sandbox: str | None
    """Name of the one that the server lives in."""

    @property
    def modern(self) -> bool:
        """Whether it speaks 2026-07-28."""
        ...

    async def call(
        self,
        call: ToolCall,
        *,
        handle: str | None = None,
        database: str | None = None,
        client: Client | None = None,
        deadline: float | None = None,
    ) -> Reply:
        """One tool call. `handle` and `database` (a DSN) are for servers on our SDK. `deadline` (of the loop) is
        when the caller leaves by itself: how long settling may take where the server would be harmed by an end."""
        ...

    async def request(self, method: str, params: Mapping[str, object], client: Client | None = None) -> Reply:
        """Any other request. Values of type `msgspec.Raw` stay as they are; `_meta` is taken for the client's own."""
        ...

    async def about(self) -> About:
        """What the server says about itself."""
        ...

    async def tell(self, method: str, client: Client) -> None:
        """A notification of a client, if the server knows that client's session."""
        ...

    async def end(self, session: str) -> None:
        """A client's session is over."""
        ...

    async def listen(self, wants: Mapping[str, object], client: Client, sink: Sink) -> None:
        """Hands what the server says outside of requests to `sink`, until the caller leaves or the server won't go on.

        `wants` is a subscription filter of 2026-07-28.
        """
        ...


def header_value(value: str) -> str:
    """A value as an HTTP field carries it: plain where that is safe, else the Base64 form of 2026-07-28."""
    plain = value.isascii() and value.isprintable() and value == value.strip()
    if plain and not value.startswith("=?base64?"):
        return value
    return "=?base64?" + binascii.b2a_base64(value.encode(), newline=False).decode() + "?="
