"""Dedicated servers: one process for each rollout and server, started at the rollout's first use.

The control plane says which process that is (`ControlPort.dedicated`, asked before each call). A process ends when it
has been idle for long, when its rollout ends, when the target has changed, or when another rollout needs its place and
it is the one that was used least recently; then the next call starts another. When its rollout is rolled back a process
that is idle is kept, unless its server says that it can't be; one that still works on a call of before is killed, since
what it does next would be done to the state of after.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from megamcp.dataplane.piped import StdioChild
from megamcp.dataplane.ports import ControlPort, Limits, RolloutView, SandboxTarget, StdioTarget
from megamcp.dataplane.protocol import Client, Upstream
from megamcp.dataplane.sandboxed import SandboxChild
from megamcp.errors import Conflict, NoCapacity, UpstreamError

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class DedicatedServer:
    """A dedicated server of an environment, without its processes. `starts` bounds how many start at once."""

    name: str
    restart_on_move: bool
    list_changed: Callable[[], None]
    starts: asyncio.Semaphore


@dataclass(eq=False, slots=True)
class Seat:
    """A rollout's place at one server: its process, over all lives of one target."""

    rollout: RolloutView
    server: DedicatedServer
    target: StdioTarget | SandboxTarget
    child: StdioChild | SandboxChild
    used: float
    waiting: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set each time it may have become idle."""
    stopping: "asyncio.Task[None] | None" = None
    urgent: bool = False
    """It stops without waiting for what it is doing."""

    @property
    def key(self) -> _Key:
        return self.rollout.id, self.server.name

    @property
    def busy(self) -> bool:
        return self.waiting > 0 or self.child.busy

    def outdated(self, generation: int) -> bool:
        """Whether it can't be kept in this generation."""
        return self.target.generation < generation and (self.server.restart_on_move or self.busy)


class Dedicated:
    """All dedicated processes of this gateway process."""

    def __init__(self, control: ControlPort, limits: Limits) -> None:
        self._control = control
        self._limits = limits
        self._seats: OrderedDict[_Key, Seat] = OrderedDict()  # least recently used first
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._seats)

    def way(self, rollout: RolloutView, server: DedicatedServer) -> "Place":
        return Place(self, rollout, server)

    def seat(self, key: _Key) -> Seat | None:
        return self._seats.get(key)

    async def upstream(self, place: "Place") -> Upstream:
        """A client of the rollout's process as the control plane wants it now. Raises NoCapacity, Conflict,
        UpstreamError, DeadlineExceeded, and what `ControlPort.dedicated` raises."""
        while True:
            target = await self._control.dedicated(place.rollout, place.server.name)
            seat = await self._taken(place, target)
            async with self._in_use(seat):
                try:
                    if seat.child.running is not None:
                        return await seat.child.upstream()
                    async with place.server.starts:
                        return await seat.child.upstream()
                except UpstreamError:
                    if seat.stopping is None:
                        raise  # else it was stopped for a reason that may not be this call's: ask again

    async def _taken(self, place: "Place", target: StdioTarget | SandboxTarget) -> Seat:
        """The rollout's seat for this target."""
        while not self._closed:
            seat = self._seats.get(place.key)
            if seat is None and len(self._seats) < self._limits.dedicated_processes:
                return self._new_seat(place, target)
            if seat is None:
                await self._make_room()
            elif seat.stopping is not None:
                await asyncio.wait({seat.stopping})
            elif target.generation < seat.target.generation:
                raise Conflict("The rollout was rolled back before the call was sent.", code="rolled_back")
            elif seat.target == target and not seat.outdated(target.generation):
                seat.target = target
                return seat
            else:
                await asyncio.wait({self._stop(seat, "its rollout has moved", now=True)})
        raise UpstreamError(f"Tool server {place.server.name!r} has been stopped.", code="tool_server_stopped")

    def _new_seat(self, place: "Place", target: StdioTarget | SandboxTarget) -> Seat:
        child = (StdioChild if isinstance(target, StdioTarget) else SandboxChild)(
            place.server.name,
            target,  # type: ignore[arg-type]
            self._limits,
            used=lambda: self._touch(seat),
            list_changed=place.server.list_changed,
        )
        seat = Seat(place.rollout, place.server, target, child, asyncio.get_running_loop().time())
        self._seats[seat.key] = seat
        self._watch_idle()
        return seat

    @contextlib.asynccontextmanager
    async def _in_use(self, seat: Seat) -> AsyncIterator[None]:
        seat.waiting += 1
        try:
            yield
        finally:
            seat.waiting -= 1
            self._touch(seat)

    def _touch(self, seat: Seat) -> None:
        seat.used = asyncio.get_running_loop().time()
        seat.idle.set()
        if self._seats.get(seat.key) is seat:
            self._seats.move_to_end(seat.key)

    async def _make_room(self) -> None:
        stopping = [seat.stopping for seat in self._seats.values() if seat.stopping is not None]
        idle = next((seat for seat in self._seats.values() if not seat.busy and seat.stopping is None), None)
        if not stopping and idle is None:
            raise NoCapacity(
                f"All {len(self._seats)} processes of dedicated servers are busy.",
                code="dedicated_capacity",
                hint="Try again, or raise MEGAMCP_DEDICATED_PROCESSES.",
            )
        if not stopping and idle is not None:
            stopping.append(self._stop(idle, "its place was needed"))
        await asyncio.wait(stopping, return_when=asyncio.FIRST_COMPLETED)

    # Ends

    def _stop(self, seat: Seat, reason: str, *, now: bool = False) -> "asyncio.Task[None]":
        if seat.stopping is None:
            seat.stopping = asyncio.create_task(self._stopped(seat, reason, now=now), name=f"stop {seat.key}")
        elif now:
            seat.urgent = True
            seat.idle.set()
        return seat.stopping

    async def _stopped(self, seat: Seat, reason: str, *, now: bool) -> None:
        try:
            await seat.child.aclose(reason, now=now)
        finally:
            del self._seats[seat.key]

    def _watch_idle(self) -> None:
        if self._timer is None and self._seats:
            loop = asyncio.get_running_loop()
            first = next(iter(self._seats.values()))
            self._timer = loop.call_at(first.used + self._limits.dedicated_idle_s, self._stop_idle)

    def _stop_idle(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for seat in list(self._seats.values()):
            if seat.used + self._limits.dedicated_idle_s > now:
                break
            if seat.busy:
                self._touch(seat)
            else:
                self._stop(seat, "it was idle")
                self._seats.move_to_end(seat.key)
        if any(seat.stopping is None for seat in self._seats.values()):
            self._watch_idle()

    async def interrupt(self, rollout_id: str) -> None:
        """A rollout is about to be moved: what its processes are doing ends now."""
        await self._end(lambda seat: seat.rollout.id == rollout_id and seat.busy, "its rollout is being rolled back")

    async def moved(self, rollout_id: str, epoch: int | None) -> None:
        """A rollout began an epoch: processes that can't be kept end, whatever they are doing. Without an epoch it is
        over, and so are all its processes."""
        await self._end(
            lambda seat: seat.rollout.id == rollout_id and (epoch is None or seat.outdated(epoch)),
            "its rollout is over" if epoch is None else "its rollout was rolled back",
        )

    def let_go(self, sandbox: str) -> bool:
        """See `Dataplane.let_go`. Calls that come meanwhile wait until the sandbox can be had again."""
        for seat in self._seats.values():
            if isinstance(seat.target, SandboxTarget) and seat.target.sandbox == sandbox:
                if seat.stopping is None:
                    seat.stopping = asyncio.create_task(self._left(seat), name=f"let go {seat.key}")
                return True
        return False

    async def _left(self, seat: Seat) -> None:
        while seat.busy and not seat.urgent:
            seat.idle.clear()
            await seat.idle.wait()
        await self._stopped(seat, "it was idle, or another gateway process wants it", now=seat.urgent)

    async def forget(self, environment_id: int) -> None:
        """An environment was unloaded."""
        await self._end(
            lambda seat: seat.rollout.environment_id == environment_id,
            "its environment was unloaded",
        )

    async def _end(self, which: Callable[[Seat], bool], reason: str) -> None:
        if stopping := [self._stop(seat, reason, now=True) for seat in filter(which, list(self._seats.values()))]:
            await asyncio.wait(stopping)

    def leave(self) -> None:
        """The gateway is about to stop: sandboxes are let go of as they stand, for the next one to find them."""
        self._closed = True
        for seat in list(self._seats.values()):
            if isinstance(seat.child, SandboxChild):
                self._stop(seat, "the gateway is shutting down", now=True)

    async def aclose(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if stopping := [self._stop(seat, "the gateway is shutting down") for seat in list(self._seats.values())]:
            await asyncio.wait(stopping)


class Place:
    """The way of one rollout to one dedicated server: see `ways.Way`."""

    comes_back = True

    __slots__ = ("_dedicated", "key", "rollout", "server")

    def __init__(self, dedicated: Dedicated, rollout: RolloutView, server: DedicatedServer) -> None:
        self._dedicated = dedicated
        self.rollout = rollout
        self.server = server
        self.key = rollout.id, server.name

    async def warm(self) -> None:
        """Takes a place and starts the process, unless there is one."""
        seat = self._seat
        if seat is None or seat.stopping is not None or seat.child.running is None:
            await self.upstream()

    async def upstream(self) -> Upstream:
        return await self._dedicated.upstream(self)

    @property
    def modern(self) -> bool:
        client = self._seat.child.client if self._seat is not None else None
        return client is not None and client.modern

    async def tell(self, method: str, client: Client) -> None:
        if (seat := self._seat) is not None and (running := seat.child.client) is not None:
            await running.tell(method, client)

    async def lost(self) -> None:
        if (seat := self._seat) is not None:
            await seat.child.end()

    def seems_stuck(self) -> bool:
        """A call that did not end when it was cancelled has ended with its process by now."""
        return (seat := self._seat) is None or seat.child.running is None

    @property
    def tail(self) -> str:
        return seat.child.tail if (seat := self._seat) is not None else ""

    @property
    def _seat(self) -> Seat | None:
        return self._dedicated.seat(self.key)
