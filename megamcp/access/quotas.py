"""What a key may use, counted: live rollouts in the database and exactly, the rest by each process for itself.

So behind n gateway processes a key can have up to n times its calls and bytes. Sharing those counts would cost a call
a round trip, which is more than the quota is worth; what must not be exceeded anywhere (rollouts hold state) is exact.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

import asyncpg
from starlette.types import Message, Receive, Send

from megamcp.access.principal import CALLER, Principal
from megamcp.errors import NoCapacity

_DAY_S = 86400
_REMEMBERED = 10_000
# The lock is held to the end of the transaction, so the next one that counts sees what this one opens.
_LOCK = "select pg_advisory_xact_lock(hashtextextended($1, 7728))"
_COUNT = """select count(*) from megamcp.rollouts
    where key = $1 and status = 'open' and expires_at > clock_timestamp()"""


def exceeded(quota: str, limit: float, retry_after: float, what: str) -> NoCapacity:
    """The error for a quota that is used up."""
    return NoCapacity(
        f"This key's quota is used up: {what}.",
        code="key_quota_exceeded",
        retry_after=retry_after,
        quota=quota,
        limit=limit,
    )


def counts_rollouts() -> bool:
    """Whether the caller may not open as many rollouts as it likes."""
    caller = CALLER.get()
    return caller is not None and caller.quotas.rollouts is not None


async def demand_room(connection: asyncpg.Connection, count: int) -> None:
    """In the transaction that opens them. Raises `NoCapacity` where the caller's key would have too many rollouts."""
    caller = CALLER.get()
    if caller is None or caller.quotas.rollouts is None:
        return
    await connection.execute(_LOCK, f"key {caller.id}")
    live = await connection.fetchval(_COUNT, caller.id)
    if live + count > (limit := caller.quotas.rollouts):
        raise exceeded("rollouts", limit, 5, f"{live} of {limit} rollouts are open, {count} more were asked for")


class _Meter:
    __slots__ = ("at", "bytes", "day", "running", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.tokens = tokens
        self.at = at
        self.running = 0
        self.day = 0
        self.bytes = 0


class Meters:
    """What keys have used in this process. A second's worth of calls may come at once."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._meters: OrderedDict[str, _Meter] = OrderedDict()

    def _meter(self, principal: Principal) -> _Meter:
        meter = self._meters.get(principal.id)
        if meter is None:
            burst = max(1.0, principal.quotas.calls_per_s or 1.0)
            meter = self._meters[principal.id] = _Meter(burst, self._monotonic())
            if len(self._meters) > _REMEMBERED:
                idle = next((name for name, one in self._meters.items() if not one.running and one is not meter), None)
                if idle is not None:
                    del self._meters[idle]
        return meter

    def demand_bytes(self, principal: Principal) -> None:
        """Raises `NoCapacity` where the key has had its day's bytes."""
        meter, most, wall = self._meter(principal), principal.quotas.bytes_per_day, self._wall()
        if meter.day != (today := int(wall // _DAY_S)):
            meter.day, meter.bytes = today, 0
        if most is not None and meter.bytes >= most:
            raise exceeded("bytes_per_day", most, _DAY_S - wall % _DAY_S, f"{meter.bytes} bytes today")

    def begin_call(self, principal: Principal) -> None:
        """A tool call, or a message to an MCP endpoint. Raises `NoCapacity`; else `end_call` has to follow."""
        meter, quotas = self._meter(principal), principal.quotas
        if (most := quotas.concurrent_calls) is not None and meter.running >= most:
            raise exceeded("concurrent_calls", most, 1, f"{meter.running} calls at once")
        if (rate := quotas.calls_per_s) is not None:
            now = self._monotonic()
            meter.tokens = min(max(1.0, rate), meter.tokens + (now - meter.at) * rate)
            meter.at = now
            if meter.tokens < 1:
                raise exceeded("calls_per_s", rate, (1 - meter.tokens) / rate, f"{rate:g} calls a second")
            meter.tokens -= 1
        meter.running += 1

    def end_call(self, principal: Principal) -> None:
        """It was answered, or left."""
        self._meter(principal).running -= 1

    def counted(self, principal: Principal, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """The same channels; what goes through them is counted against the key's bytes."""
        meter = self._meter(principal)

        async def taken() -> Message:
            message = await receive()
            meter.bytes += len(message.get("body", b""))
            return message

        async def given(message: Message) -> None:
            meter.bytes += len(message.get("body", b""))
            await send(message)

        return taken, given
