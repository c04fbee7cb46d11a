"""What a tool may ask for besides its arguments: the environment's clock, its chance, and the call's context.

In a rollout's state, time and chance are state: they fork and roll back with it, and two forks that do the
same see the same. So `Clock` and `Random` read and write through the call's own transaction. On a server
without state they are the machine's own.
"""

import random as _random
import uuid as _uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

Item = TypeVar("Item")

FetchValue = Callable[..., Awaitable[Any]]


class Clock:
    """The environment's time. `now()` stands still during a call unless the tool advances it."""

    __slots__ = ("_fetch", "_now")

    def __init__(self, now: datetime | None = None, fetch: FetchValue | None = None) -> None:
        self._now = now
        self._fetch = fetch

    def now(self) -> datetime:
        """Aware, in UTC."""
        return self._now or datetime.now(UTC)

    async def advance(self, by: timedelta) -> datetime:
        """Moves the rollout's clock forward and returns the new time. Is undone by a rollback, and forks."""
        if self._fetch is None:
            raise RuntimeError("This tool server keeps no state, so its clock can't be moved.")
        if by < timedelta(0):
            raise ValueError("The clock only moves forward.")
        moved: datetime = await self._fetch("select megamcp_advance_clock($1)", by // timedelta(microseconds=1))
        self._now = moved.astimezone(UTC)
        return self._now


class Random:
    """Chance from the state's keyed generator: same seed and same order of draws, same values.

    Every draw is a write (the draw counter is state), so a read-only tool can't draw. Values are those that
    SQL's own random() and gen_random_uuid() would give in the tool's place.
    """

    __slots__ = ("_fetch",)

    def __init__(self, fetch: FetchValue | None = None) -> None:
        self._fetch = fetch

    async def uuid(self) -> _uuid.UUID:
        """A version 4 UUID."""
        if self._fetch is None:
            return _uuid.uuid4()
        return _uuid.UUID(bytes=(await self._draw())[:16], version=4)

    async def random(self) -> float:
        """Uniform in [0, 1)."""
        if self._fetch is None:
            return _random.random()
        return (int.from_bytes((await self._draw())[:7]) >> 3) / 2**53

    async def randint(self, a: int, b: int) -> int:
        """Uniform in [a, b], both included, as `random.randint`."""
        if b < a:
            raise ValueError(f"empty range [{a}, {b}]")
        if self._fetch is None:
            return _random.randint(a, b)
        # 24 of 32 bytes: the bias of the modulus is below 2**-128 for ranges up to 2**64.
        return a + int.from_bytes((await self._draw())[:24]) % (b - a + 1)

    async def choice(self, items: Sequence[Item]) -> Item:
        """One of `items`. IndexError where there is none."""
        if not items:
            raise IndexError("choice from an empty sequence")
        return items[await self.randint(0, len(items) - 1)]

    async def _draw(self) -> bytes:
        # The same bytes, used in the same way, as by the state's own random() and gen_random_uuid().
        assert self._fetch is not None
        return bytes(await self._fetch("select megamcp_draw()"))


ReportProgress = Callable[[float, float | None, str | None], Awaitable[None]]


class Context:
    """The call itself: the tool's name, and progress to whoever waits for it."""

    __slots__ = ("_report", "tool")

    def __init__(self, tool: str, report: ReportProgress | None = None) -> None:
        self.tool = tool
        self._report = report

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Tells the caller how far the call is. Does nothing where the caller did not ask for progress."""
        if self._report is not None:
            await self._report(progress, total, message)
