"""What the data plane needs from the control plane, and nothing more.

`ControlPort` is implemented over PostgreSQL by the control plane and in memory by `megamcp.dataplane.fake`.
The views are snapshots that the control plane may cache: whether a call may still take effect is decided
where the effect happens (the state handle, the intent row), never by a view.

Every method may raise `Unavailable` (503) while the database is away; what else it raises is listed with it.
Errors outside `MegaMCPError` are bugs and reach the client as an internal error without details.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from megamcp.dataplane.protocol import About

SOCKET = "{socket}"
"""Stands in a child's command for the path of the unix socket that it must listen on."""


@dataclass(frozen=True, slots=True)
class ChildTarget:
    """A tool server that the gateway starts and supervises: MCP 2026-07-28 at `/mcp` on a unix socket."""

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Left out of what is told of it: see `StdioTarget`."""

    @classmethod
    def sdk(
        cls,
        entry: str,
        environ: Mapping[str, str] | None = None,
        cwd: str | None = None,
        secrets: tuple[str, ...] = (),
    ) -> "ChildTarget":
        """A server written with `megamcp.sdk`; `entry` is `package.module:attribute`."""
        return cls((sys.executable, "-m", "megamcp.sdk", entry, "--socket", SOCKET), environ or {}, cwd, secrets)


@dataclass(frozen=True, slots=True)
class SocketTarget:
    """A tool server of ours that already listens on a unix socket (`inline` servers of tests)."""

    path: str


class Authority(Protocol):
    """What a server at a URL is shown of who calls it: secrets by reference, or a token."""

    async def fields(self) -> bytes:
        """Header lines for a request. Cheap: a token is renewed here when its time is over, and kept otherwise. Raises
        UpstreamError."""
        ...

    async def challenged(self, sent: bytes, status: int, challenge: str | None) -> bytes | None:
        """The server refused a request with these header lines, by 401 or 403 and its `WWW-Authenticate`.

        Header lines to repeat it with; None where its answer stands. Raises AuthorizationRequired where a person has to
        consent first, UpstreamError where nothing helps.
        """
        ...


@dataclass(frozen=True, slots=True)
class UrlTarget:
    """Anyone's tool server; the protocol era is negotiated. `headers` are sent with every request."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    authority: Authority | None = field(default=None, compare=False)
    sse: bool = False
    """By the transport of 2024-11-05: an event stream that names where messages go."""


@dataclass(frozen=True, slots=True)
class DedicatedTarget:
    """A server that each rollout has a process of its own of: `ControlPort.dedicated` says which.

    `restart_on_move`: it can't be kept when its rollout is rolled back, since it remembers what it read.
    """

    restart_on_move: bool = False


@dataclass(frozen=True, slots=True)
class StdioTarget:
    """One rollout's process of a dedicated server: MCP, one message a line, over its stdin and stdout.

    A process serves one target; another target is another process. `generation` is the rollout's epoch: it says which
    of two targets is out of date, and that calls of an older one may not go on. `secrets` are texts (passwords, DSNs)
    that are left out of everything that is logged or told of what the process prints.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    generation: int = field(default=0, compare=False)
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spoken:
    """What a handshake found: whether the server is of 2026-07-28, and what it said about itself."""

    modern: bool
    about: About


@dataclass(frozen=True, slots=True)
class Opened:
    """The pipes of a sandbox, as descriptors that are the receiver's now.

    `clean` is False when they were left in the middle of something. `spoken` is what the handshake found that was done
    with the process before, or with the one that it was frozen from.
    """

    stdin: int
    stdout: int
    stderr: int
    clean: bool
    spoken: Spoken | None


class SandboxDoor(Protocol):
    """How the data plane reaches sandboxes. A sandbox that has ended never comes back: what is to be done then, the
    next `ControlPort.dedicated` says."""

    async def open(self, sandbox: str) -> Opened:
        """Takes its pipes, from whoever has them. Raises UpstreamError, Conflict, DeadlineExceeded."""
        ...

    async def spoke(self, sandbox: str, spoken: Spoken) -> None:
        """The handshake was done."""
        ...

    async def close(self, sandbox: str, *, clean: bool) -> None:
        """The pipes are closed: others may open it. `clean`: nothing was under way in them."""
        ...

    async def kill(self, sandbox: str, reason: str) -> None:
        """Ends it now: what it does could still take effect."""
        ...

    async def obituary(self, sandbox: str) -> str | None:
        """Why it has ended, where that is known soon."""
        ...

    async def last_words(self, sandbox: str, words: str) -> None:
        """What it printed last, of one that has ended."""
        ...


@dataclass(frozen=True, slots=True)
class SandboxTarget:
    """One rollout's process in a sandbox, which has a name for as long as it lives. See also `StdioTarget`."""

    sandbox: str
    door: SandboxDoor = field(compare=False)
    generation: int = field(default=0, compare=False)
    secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerView:
    """One tool server of an environment.

    `exactly_once`: the server settles its calls itself by the state handle (kinds `schema` and `document`);
    else the gateway keeps an intent row, and a call is done at most once; or none, where it isn't `journaled`.
    `call_timeout_s`: else the default. `own_database`: each rollout has a database of its own, which the server is told
    with the handle; it records calls there, and the gateway copies them to the journal.
    """

    name: str
    target: ChildTarget | SocketTarget | UrlTarget | DedicatedTarget
    exactly_once: bool
    call_timeout_s: float | None = None
    own_database: bool = False
    journaled: bool = True


@dataclass(frozen=True, slots=True)
class EnvironmentView:
    """What the data plane knows of an environment. Tool lists are cached by `id`: never reuse one."""

    id: int
    name: str
    version: str
    servers: tuple[ServerView, ...]
    instructions: str | None = None


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A live rollout. `epoch` is for the port's own `mint`: it changes with every rollback."""

    id: str
    environment_id: int
    epoch: int
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A result in the journal: the JSON text of a CallToolResult, byte for byte."""

    result: bytes
    is_error: bool


@dataclass(frozen=True, slots=True)
class Intent:
    """A call of an at-most-once server that is about to run, or the result of the one that did run."""

    id: int
    replayed: Recorded | None = None


class ControlPort(Protocol):
    """Narrow door to the control plane."""

    async def rollout(self, rollout_id: str) -> RolloutView:
        """Raises NotFound, Gone. Called once per request: cache the part that does not change."""
        ...

    async def rollout_for_call(self, rollout_id: str) -> RolloutView:
        """The same for one tool call. May be what it was at an earlier call where nothing but `call_intent`
        decides: no server of the rollout's environment is `exactly_once`."""
        ...

    async def environment(self, environment_id: int) -> EnvironmentView:
        """Raises NotFound. Called once per request: cache it."""
        ...

    async def environment_named(self, name: str) -> EnvironmentView:
        """For `/e/{environment}/mcp`: `name` or `name@version`. Raises NotFound."""
        ...

    async def open_for_session(self, environment: str, *, key: str | None) -> str:
        """Opens a rollout for a client that knows only a fixed URL, and returns its id.

        With a `key` (the bearer token of a client without sessions) the same live rollout every time.
        Raises NotFound, Unauthorized, NoCapacity.
        """
        ...

    async def session_ended(self, rollout_id: str) -> None:
        """The session that opened a rollout was deleted by its client. An unknown rollout is no error."""
        ...

    def mint(
        self,
        rollout: RolloutView,
        server: str,
        *,
        tool: str,
        arguments: bytes,
        writable: bool,
        idempotency_key: str | None,
        deadline: float,
    ) -> str:
        """A state handle for one call, good until `deadline` (Unix time, seconds). No I/O."""
        ...

    async def database(self, rollout: RolloutView, server: str) -> str:
        """DSN of the rollout's database at this epoch; made now if there is none. Raises Gone, NoCapacity, Conflict."""
        ...

    async def record_call(
        self,
        rollout: RolloutView,
        handle: str,
        *,
        tool: str,
        arguments: bytes,
        result: bytes,
        is_error: bool,
        began: float,
    ) -> None:
        """The journal's row of a call that was done in the rollout's own database. `began` is Unix time.

        Durable when it returns. Raises Conflict when the rollout was rolled back meanwhile, Gone when it was released.
        """
        ...

    async def end_call(
        self, rollout: RolloutView, handle: str, *, tool: str, arguments: bytes, error: bytes | None
    ) -> Recorded | None:
        """Ends a call whose answer the gateway did not get (deadline, cancellation, dead server).

        Afterwards the handle can take no effect: a backend still running it has been ended, a transaction
        that was in flight is decided. Returns the result if the call had committed one. Else records `error`
        (the JSON text of a CallToolResult) as its result; with None nothing is recorded, so that the caller
        may mint a handle for the same idempotency key again.
        """
        ...

    async def call_intent(
        self, rollout: RolloutView, server: str, *, tool: str, arguments: bytes, idempotency_key: str | None
    ) -> Intent:
        """At most once: the durable intent row, or the recorded result of the same key.

        Raises Conflict(`outcome_unknown`) for a key whose first try never recorded an outcome, Unprocessable
        for a key with other arguments, Gone, Conflict. `arguments` is recorded byte for byte.
        """
        ...

    async def call_outcome(
        self, intent: Intent, result: bytes, is_error: bool, *, answered: bool, sandbox: str | None = None
    ) -> int:
        """Records the outcome, durable when it returns; gives the journal position. `answered`: it is the server's own
        answer, and not what became of a call that has none. `sandbox`: the one that gave it.

        Raises Conflict when the rollout was rolled back meanwhile, Gone when it was released; UpstreamError, with
        nothing recorded, when the sandbox has ended and another one took its place, which knows nothing of it.
        """
        ...

    async def call_refused(self, intent: Intent, error: bytes) -> None:
        """Records that the server refused the call before it began with it: another try with the same key may run."""
        ...

    async def dedicated(self, rollout: RolloutView, server: str) -> StdioTarget | SandboxTarget:
        """The process that serves a rollout now, its state ready to be used.

        Asked for each call of a dedicated server once its intent is durable, and before that when there is no process
        yet. `rollout` may be an older view. Raises NotFound, Gone, Unprocessable, NoCapacity, and for a sandbox
        Conflict (`state_lost`), UpstreamError.
        """
        ...

    @property
    def peer(self) -> str:
        """Name of this gateway process among the others: letters and digits."""
        ...

    async def peer_address(self, peer: str) -> str | None:
        """Where another gateway process takes requests: `unix:/path` or `http://host:port`. None for one that isn't."""
        ...

    async def session_said(self, session: str, method: str, value: str) -> None:
        """A handshake-era session set its log level, or what resources it wants: for the process that has its stream,
        which gets `Dataplane.session_said`. May do nothing."""
        ...

    async def cancel_elsewhere(self, rollout_id: str, session: str, request_id: str) -> None:
        """A cancellation for a request this process does not have: pass it on to the other gateway processes,
        which hand it to `Dataplane.cancel`. May do nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the data plane. Times in seconds, sizes in bytes."""

    body_bytes: int = 4 * 1024 * 1024
    response_bytes: int = 32 * 1024 * 1024
    depth: int = 128
    batch: int = 50
    body_timeout_s: float = 30.0
    call_timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    start_timeout_s: float = 30.0
    list_timeout_s: float = 30.0
    grace_s: float = 2.0
    probe_s: float = 5.0
    disconnect_check_s: float = 0.1
    readers_per_rollout: int = 16
    waiting_per_rollout: int = 64
    calls_in_flight: int = 4096
    connections_per_server: int = 64
    sessions_per_server: int = 10_000
    session_idle_s: float = 1800.0
    ask_timeout_s: float = 300.0
    dedicated_processes: int = 100
    dedicated_idle_s: float = 300.0
    dedicated_starts: int = 4
    tools_per_page: int = 500
    allowed_origins: tuple[str, ...] = ()
