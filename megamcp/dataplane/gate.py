"""The queue in front of a rollout: one writer or a few readers at a time, first come, first served.

It keeps calls that could only wait for the rollout's lock from holding a database connection meanwhile. It is
no correctness device: with several gateway processes the lock in PostgreSQL decides. An idle rollout has no
entry here at all.
"""

import asyncio
from collections import deque

from megamcp.errors import NoCapacity


class _Gate:
    __slots__ = ("readers", "waiting", "writing")

    def __init__(self) -> None:
        self.readers = 0
        self.writing = False
        self.waiting: deque[tuple[asyncio.Future[None], bool]] = deque()


class Gates:
    """All rollouts' queues. `enter` and `leave` come in pairs; a failed `enter` needs no `leave`."""

    def __init__(self, readers: int, waiting: int) -> None:
        self._gates: dict[str, _Gate] = {}
        self._readers = readers
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._gates)

    @property
    def waiting(self) -> int:
        """Calls in all queues."""
        return sum(len(gate.waiting) for gate in self._gates.values())

    def enter_now(self, rollout: str, *, writes: bool) -> bool:
        """Takes the turn if it is free. With True, a `leave` is owed."""
        gate = self._gates.get(rollout)
        if gate is None:
            gate = self._gates[rollout] = _Gate()
        return not gate.waiting and self._admit(gate, writes)

    async def enter(self, rollout: str, *, writes: bool) -> None:
        """Waits for the turn. Raises NoCapacity when too many are waiting already."""
        if self.enter_now(rollout, writes=writes):
            return
        gate = self._gates[rollout]
        if len(gate.waiting) >= self._waiting:
            raise NoCapacity(
                f"{len(gate.waiting)} calls of this rollout are waiting for their turn already.",
                code="rollout_busy",
                hint="Calls that may write run one after another; wait for the earlier ones.",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, writes)
        gate.waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave(rollout, writes=writes)
            else:
                if entry in gate.waiting:
                    gate.waiting.remove(entry)
                self._wake(rollout, gate)
            raise

    def leave(self, rollout: str, *, writes: bool) -> None:
        gate = self._gates[rollout]
        if writes:
            gate.writing = False
        else:
            gate.readers -= 1
        self._wake(rollout, gate)

    def away(self, rollout: str, *, away: bool) -> None:
        """A reader's call waits for its client, who may need others of its calls to answer; and is back, whatever the
        bound."""
        if away:
            self.leave(rollout, writes=False)
        else:
            self._gates.setdefault(rollout, _Gate()).readers += 1

    def _admit(self, gate: _Gate, writes: bool) -> bool:
        if gate.writing or (gate.readers if writes else gate.readers >= self._readers):
            return False
        if writes:
            gate.writing = True
        else:
            gate.readers += 1
        return True

    def _wake(self, rollout: str, gate: _Gate) -> None:
        while gate.waiting:
            turn, writes = gate.waiting[0]
            if turn.cancelled():
                gate.waiting.popleft()
                continue
            if not self._admit(gate, writes):
                return
            gate.waiting.popleft()
            turn.set_result(None)
        if not gate.writing and not gate.readers and self._gates.get(rollout) is gate:
            del self._gates[rollout]
