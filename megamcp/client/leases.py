"""Keeps leases from ending, for as long as the client is open: one task for all of them.

A lease is renewed when half of it has gone by. One that the gateway says has ended is dropped and never comes back: the
next use of that rollout raises `Gone`, which says why. A gateway that is away is asked again until it is back.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from megamcp.errors import Gone, MegaMCPError, NotFound

log = logging.getLogger(__name__)

AT_ONCE = 16
AGAIN_S = 1.0


class Leased(Protocol):
    """What can be kept: something with an id and a lease that can be renewed."""

    @property
    def id(self) -> str: ...

    @property
    def expires_at(self) -> datetime: ...

    def renew(self, ttl_s: float | None = None) -> Awaitable[object]:
        """Raises `Gone` or `NotFound` when it is too late."""


@dataclass(slots=True)
class _Kept:
    lease: Leased
    ttl_s: float
    due: float
    """Monotonic time of the next renewal."""


class Leases:
    """The leases that one client keeps. `stop` must be awaited."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def keep(self, lease: Leased, ttl_s: float) -> None:
        """Renew it by `ttl_s` seconds again and again, until `drop` or `stop`."""
        self._kept[lease.id] = _Kept(lease, ttl_s, time.monotonic() + ttl_s / 2)
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="megamcp leases")

    def drop(self, identifier: str) -> None:
        """Let its lease run out. One that isn't kept is no error."""
        self._kept.pop(identifier, None)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._kept

    async def stop(self) -> None:
        """Renew nothing any more."""
        self._kept.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            now = time.monotonic()
            due = sorted((kept for kept in self._kept.values() if kept.due <= now), key=lambda kept: kept.due)
            if due:
                await asyncio.gather(*(self._renew(kept) for kept in due[:AT_ONCE]))
                continue
            wait = min((kept.due for kept in self._kept.values()), default=now + 3600) - now
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                continue

    async def _renew(self, kept: _Kept) -> None:
        identifier = kept.lease.id
        try:
            await kept.lease.renew(kept.ttl_s)
        except (Gone, NotFound) as error:
            log.warning("the lease of %s could not be kept: %s", identifier, error)
            self.drop(identifier)
        except MegaMCPError as error:
            log.warning("the lease of %s was not renewed, trying again: %s", identifier, error)
            kept.due = time.monotonic() + min(AGAIN_S, kept.ttl_s / 4)
        else:
            kept.due = time.monotonic() + kept.ttl_s / 2
