"""An in-memory `ControlPort`: for tests of the data plane, and for trying it without a database.

It keeps the port's promises within one process (idempotency keys, handles that die when their call is ended, intents
without an outcome), and records everything in `journal`. It has no locks: nothing here ever waits.
"""

import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from megamcp.dataplane.ports import (
    EnvironmentView,
    Intent,
    Recorded,
    RolloutView,
    SandboxTarget,
    StdioTarget,
)
from megamcp.errors import Conflict, Gone, NotFound, Unavailable, Unprocessable


@dataclass(slots=True)
class Entry:
    """One call in the journal. `result` is None while its outcome is unknown."""

    rollout: str
    server: str
    tool: str
    arguments: bytes
    key: str | None = None
    result: bytes | None = None
    is_error: bool = False


@dataclass(slots=True)
class Handle:
    """What the fake minted; `dead` once the call was ended."""

    rollout: str
    server: str
    tool: str
    arguments: bytes
    writable: bool
    key: str | None
    deadline: float
    dead: bool = False
    recorded: Recorded | None = None


@dataclass(slots=True)
class FakeControl:
    """`away` makes every method that would need the database raise Unavailable. `targets` says for a server's name how
    the process of a rollout is started."""

    environments: dict[int, EnvironmentView] = field(default_factory=dict)
    rollouts: dict[str, RolloutView] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    keys: dict[str, str] = field(default_factory=dict)
    journal: list[Entry] = field(default_factory=list)
    handles: dict[str, Handle] = field(default_factory=dict)
    relayed: list[tuple[str, str, str]] = field(default_factory=list)
    targets: dict[str, Callable[[RolloutView], StdioTarget | SandboxTarget]] = field(default_factory=dict)
    away: bool = False
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def add(self, view: EnvironmentView) -> EnvironmentView:
        self.environments[view.id] = view
        return view

    def open(self, environment: EnvironmentView) -> str:
        """A new rollout's id."""
        rollout_id = f"ro_{secrets.token_hex(8)}"
        self.rollouts[rollout_id] = RolloutView(rollout_id, environment.id, 1)
        return rollout_id

    def release(self, rollout_id: str) -> None:
        del self.rollouts[rollout_id]
        self.released.add(rollout_id)

    def roll_back(self, rollout_id: str) -> None:
        """A new epoch; the journal keeps what it has."""
        view = self.rollouts[rollout_id]
        self.rollouts[rollout_id] = RolloutView(view.id, view.environment_id, view.epoch + 1)

    def _reach(self) -> None:
        if self.away:
            raise Unavailable("The database is away.", retry_after=1)

    async def rollout(self, rollout_id: str) -> RolloutView:
        self._reach()
        if rollout_id in self.released:
            raise Gone(f"Rollout {rollout_id} was released.", code="rollout_released")
        if (view := self.rollouts.get(rollout_id)) is None:
            raise NotFound(f"There is no rollout {rollout_id}.", code="rollout_not_found")
        return view

    async def rollout_for_call(self, rollout_id: str) -> RolloutView:
        return await self.rollout(rollout_id)

    async def environment(self, environment_id: int) -> EnvironmentView:
        return self.environments[environment_id]

    async def environment_named(self, name: str) -> EnvironmentView:
        self._reach()
        for view in self.environments.values():
            if name in (view.name, f"{view.name}@{view.version}"):
                return view
        raise NotFound(f"There is no environment {name!r}.", code="environment_not_found")

    async def open_for_session(self, environment: str, *, key: str | None) -> str:
        view = await self.environment_named(environment)
        if key is None:
            return self.open(view)
        return self.keys.setdefault(key, self.open(view))

    async def session_ended(self, rollout_id: str) -> None:
        if rollout_id in self.rollouts:
            self.release(rollout_id)

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
        handle = f"fake.{next(self._numbers)}.{rollout.id}"
        self.handles[handle] = Handle(rollout.id, server, tool, arguments, writable, idempotency_key, deadline)
        return handle

    async def database(self, rollout: RolloutView, server: str) -> str:
        self._reach()
        return f"postgresql:///{rollout.id}_{server}_{rollout.epoch}"

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
        self._reach()
        known = self.handles[handle]
        self.journal.append(Entry(rollout.id, known.server, tool, arguments, known.key, result, is_error))

    async def end_call(
        self, rollout: RolloutView, handle: str, *, tool: str, arguments: bytes, error: bytes | None
    ) -> Recorded | None:
        self._reach()
        entry = self.handles[handle]
        entry.dead = True
        if entry.recorded is None and error is not None:
            self.journal.append(Entry(rollout.id, entry.server, tool, arguments, entry.key, error, True))
        return entry.recorded

    async def call_intent(
        self, rollout: RolloutView, server: str, *, tool: str, arguments: bytes, idempotency_key: str | None
    ) -> Intent:
        self._reach()
        if idempotency_key is not None:
            for number, entry in enumerate(self.journal):
                if (entry.rollout, entry.key) != (rollout.id, idempotency_key):
                    continue
                if (entry.server, entry.tool, entry.arguments) != (server, tool, arguments):
                    raise Unprocessable("This key was used for another call.", code="idempotency_key_reused")
                if entry.result is None:
                    raise Conflict("Whether the first call took effect is unknown.", code="outcome_unknown")
                return Intent(number, Recorded(entry.result, entry.is_error))
        self.journal.append(Entry(rollout.id, server, tool, arguments, idempotency_key))
        return Intent(len(self.journal) - 1)

    async def call_outcome(
        self, intent: Intent, result: bytes, is_error: bool, *, answered: bool, sandbox: str | None = None
    ) -> int:
        self._reach()
        entry = self.journal[intent.id]
        entry.result, entry.is_error = result, is_error
        return intent.id

    async def call_refused(self, intent: Intent, error: bytes) -> None:
        await self.call_outcome(intent, error, True, answered=False)
        self.journal[intent.id].key = None

    peer = "0fa4e000"

    async def peer_address(self, peer: str) -> str | None:
        return None

    async def session_said(self, session: str, method: str, value: str) -> None:
        pass

    async def dedicated(self, rollout: RolloutView, server: str) -> StdioTarget | SandboxTarget:
        return self.targets[server](await self.rollout(rollout.id))

    async def cancel_elsewhere(self, rollout_id: str, session: str, request_id: str) -> None:
        self.relayed.append((rollout_id, session, request_id))
