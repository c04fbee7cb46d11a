"""What the everything-server knows: of itself, and of each session of the handshake era."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import get_args

from mcp.server.subscriptions import InMemorySubscriptionBus
from mcp_types import LoggingLevel

from tests.conformance.asking import Context

LEVELS: tuple[str, ...] = get_args(LoggingLevel)
"""From the least to the most severe."""


@dataclass(slots=True)
class Server:
    """One for the process."""

    bus: InMemorySubscriptionBus = field(default_factory=InMemorySubscriptionBus)
    extra_tool: bool = False
    extra_prompt: bool = False
    watched_version: int = 1


@dataclass(slots=True)
class State:
    """Of a session; a modern request has a fresh one, that nobody else sees."""

    server: Server
    level: LoggingLevel = "debug"
    subscribed: set[str] = field(default_factory=set)

    def wants(self, level: LoggingLevel) -> bool:
        return LEVELS.index(level) >= LEVELS.index(self.level)


class Sessions:
    """The state of each, by the id that the transport gave it; over stdio there is one session, without an id."""

    def __init__(self) -> None:
        self.server = Server()
        self._states: defaultdict[str | None, State] = defaultdict(lambda: State(self.server))

    def of(self, ctx: Context) -> State:
        headers = getattr(ctx.request, "headers", None) or {}
        return self._states[headers.get("mcp-session-id")]
