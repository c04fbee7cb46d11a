"""Keeps sandboxes in order: idle ones go to disk, what nobody needs goes altogether.

Every gateway process runs it for its host's keeper. Each round is bounded, and every step may be cut off: the next
round, here or elsewhere, takes it up from the rows.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

from megamcp.errors import MegaMCPError
from megamcp.failpoints import failpoint
from megamcp.sandboxed import journal as sql
from megamcp.sandboxed.host import Host
from megamcp.sandboxed.own import is_own
from megamcp.settings import Settings
from megamcp.store import Store
from sandboxes.client import Client
from sandboxes.types import SandboxError

log = logging.getLogger(__name__)

BATCH = 100
PAUSE_S = 1.0
LEAVING_S = 10.0
LEAVING_EACH_S = 0.05
ORPHANS_EACH_S = 30.0
GIVEN_UP = timedelta(minutes=15)
"""An image that was not kept by then is nobody's: whoever made it was cut off in between."""


class Tender:
    """Runs `once` every second until cancelled. Starts no keeper: where none runs there is nothing to keep."""

    def __init__(
        self,
        store: Store,
        host: Host,
        settings: Settings,
        owner: Callable[[], int],
        leave: Callable[[str], Awaitable[object]],
    ) -> None:
        """`leave` closes the pipes of a sandbox, where this process has them."""
        self._leave = leave
        self._store = store
        self._host = host
        self._settings = settings
        self._owner = owner
        self._swept = float("-inf")
        self._suspects: set[str] = set()

    async def run(self) -> None:
        """An outage stops nothing: the next round tries again."""
        while True:
            try:
                await self.once()
            except (MegaMCPError, SandboxError) as error:
                log.warning("tender of sandboxes: %s", error)
            except Exception:
                log.exception("tender of sandboxes")
            await asyncio.sleep(PAUSE_S)

    async def once(self) -> dict[str, int | None]:
        """One round; gives what was done, by step."""
        if not self._host.opened and not await self._store.value(sql.ANY):
            return {}
        keeper, host = await self._host.keeper()
        await self._store.value(sql.CONDEMN_ORPHANS)
        await self._store.value(sql.DROP_POINTS)
        await self._store.rows(sql.CONDEMN_IMAGES, BATCH, GIVEN_UP)
        return {
            "parked": await self._park(keeper, host, self._settings.sandbox_park_s),
            "removed": await self._remove(keeper, host),
            "orphans": await self._remove_orphans(keeper, host),
        }

    async def park_all(self) -> None:
        """At the gateway's end, when its own keeper won't wait for long: whatever can wait on disk does. What there is
        no time for, or is at something, is left to the keeper."""
        began = time.monotonic()
        try:
            if not self._host.opened or not is_own(self._settings):
                return
            async with asyncio.timeout(LEAVING_S):
                keeper, host = await self._host.keeper()
                while True:
                    if await self._park(keeper, host, time.monotonic() - began) is None:
                        return
                    await asyncio.sleep(LEAVING_EACH_S)
        except Exception as error:
            log.warning("sandboxes are left to their keeper: %s", str(error) or "there was no time for all of them")

    async def _park(self, keeper: Client, host: str, idle_s: float) -> int | None:
        """How many of those that were idle for so long; None where there was none."""
        parked = 0
        rows = await self._store.rows(sql.IDLE, host, timedelta(seconds=idle_s), BATCH)
        held = {info.sandbox for info in (await keeper.inventory()).sandboxes if info.held} if rows else set()
        for row in rows:
            if row["name"] in held:  # by this process or another, whose tender sees the same; a later round parks it
                await self._leave(row["name"])
                continue
            try:
                parked += await self._park_one(keeper, row["name"], row["rollout"], row["server"])
            except SandboxError as error:
                if error.code == "not_forkable":  # and won't be in a second
                    log.info("sandbox %s can't wait on disk: %s", row["name"], error)
                    await self._store.value(sql.USED, row["name"])
            except MegaMCPError:  # one that is busy now
                pass
        return parked if rows else None

    async def _park_one(self, keeper: Client, name: str, rollout: str, server: str) -> bool:
        made: list[str] = []
        try:
            if not await self._booked(keeper, name, rollout, server, made):
                return False
        except BaseException:
            for image in made:
                await asyncio.shield(self._store.value(sql.CONDEMN_IMAGE, image))
            raise
        await failpoint("park.booked")
        await keeper.remove(name)
        log.info("sandbox %s waits on disk", name)
        return True

    async def _booked(self, keeper: Client, name: str, rollout: str, server: str, made: list[str]) -> bool:
        """Its image is what its rollout goes on from. `made` gets the name of one that was made for it."""
        async with self._store.transaction() as connection:
            # No call can begin while the rollout's row is locked. Where it is locked already it isn't idle.
            if not await connection.fetchval(sql.LOCK_IDLE_ROLLOUT, rollout):
                return False
            head = await connection.fetchrow(sql.HEAD, rollout, server)
            if head is None or head["name"] != name or head["status"] != "ready":
                return False
            if await connection.fetchval(sql.RUNNING, rollout, [server]):
                return False
            image = head["image"]
            if head["called"] or image is None:
                image = await self._frozen(keeper, name)
                made.append(image)
                await failpoint("park.frozen")
                await connection.execute(sql.IMAGE_READY, image)
            await connection.execute(sql.PARK, name, image)
        return True

    async def _frozen(self, keeper: Client, sandbox: str) -> str:
        """A new image of a sandbox."""
        image = f"im_{secrets.token_hex(8)}"
        await self._store.value(sql.PLAN_IMAGE, image, sandbox, self._owner())
        try:
            frozen = await keeper.freeze(sandbox, image)
            await self._store.value(sql.FROZEN, image, frozen.memory, frozen.digest, frozen.bytes)
        except BaseException:
            await asyncio.shield(self._store.value(sql.CONDEMN_IMAGE, image))
            raise
        return image

    async def _remove(self, keeper: Client, host: str) -> int:
        removed = 0
        for row in await self._store.rows(sql.DROPPING, host, BATCH):
            await keeper.remove(row["name"])
            await self._store.value(sql.FORGET, row["name"], host)
            removed += 1
        for row in await self._store.rows(sql.DROPPING_IMAGES, host, BATCH):
            await keeper.drop(row["name"])
            await failpoint("image.dropped")
            await self._store.value(sql.FORGET_IMAGE, row["name"])
            removed += 1
        return removed

    async def _remove_orphans(self, keeper: Client, host: str) -> int:
        """What the keeper has and no row knows: there is none unless rows were lost. Looked at twice: the inventory is
        older than the rows. And what still runs although its row says that it doesn't."""
        if time.monotonic() - self._swept < ORPHANS_EACH_S:
            return 0
        self._swept = time.monotonic()
        there = await keeper.inventory()
        running = {info.sandbox for info in there.sandboxes}
        for row in await self._store.rows(sql.ENDED_HERE, host):
            if row["name"] in running:
                await keeper.remove(row["name"])
        names = running | set(there.images)
        known = {row["name"] for row in await self._store.rows(sql.KNOWN, host)}
        sure = (names - known) & self._suspects
        self._suspects = names - known
        for name in sure:
            log.warning("sandbox or image %s belongs to nothing and is removed", name)
            await keeper.remove(name)
            await keeper.drop(name)
        return len(sure)
