"""What a checkpoint keeps of a rollout's sandboxes.

Invariants:
- nothing is frozen while a call to a sandbox runs: the rollout's row is locked, so none can begin, and those that run
  are waited for;
- a sandbox that was called since it was last frozen gives a new image, any other one keeps its own;
- an image that no checkpoint was published with is the tender's to take away.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg

from megamcp.environments import LoadedEnvironment, LoadedServer
from megamcp.errors import DeadlineExceeded, Unavailable, Unprocessable
from megamcp.failpoints import failpoint
from megamcp.sandboxed import journal as sql
from megamcp.sandboxed.boxes import Boxes, demand_host
from megamcp.sandboxed.host import Host, translated
from megamcp.sandboxed.lost import box_lost, image_lost
from megamcp.store import Store
from sandboxes.client import Client
from sandboxes.types import Frozen, Kind, SandboxError

QUIET_S = 3.0
"""How long a sandbox may have something under way in its pipes when it is to be frozen."""
_TRY_EACH_S = 0.02


@dataclass(frozen=True, slots=True)
class Kept:
    """What a checkpoint keeps of one server. `sandbox` is the one that stands so now, where there is one."""

    image: str
    sandbox: str | None
    digest: str | None
    """Of the files."""
    memory: bool
    """Whether there is more to its state than files."""


class BoxFreezer:
    """Freezes what `Boxes` finds."""

    def __init__(self, store: Store, host: Host, boxes: Boxes, owner: Callable[[], int]) -> None:
        self._store = store
        self._host = host
        self._boxes = boxes
        self._owner = owner

    async def busy(self, connection: asyncpg.Connection, rollout: str, environment: LoadedEnvironment) -> bool:
        """Whether a call to a sandbox of the rollout runs. `connection` has locked the rollout's row."""
        servers = [server.name for server in environment.servers if server.process]
        return bool(await connection.fetchval(sql.RUNNING, rollout, servers))

    @asynccontextmanager
    async def frozen(
        self, connection: asyncpg.Connection, row: asyncpg.Record, environment: LoadedEnvironment
    ) -> AsyncIterator[dict[str, Kept]]:
        """What is to be kept of each server that has a sandbox. Several are frozen side by side."""
        kept: dict[str, Kept] = {}
        images: list[str] = []

        async def one(server: LoadedServer, head: asyncpg.Record | None, point: asyncpg.Record | None) -> None:
            found = await self._keep(row, server, environment, head, point, images)
            if found is not None:
                kept[server.name] = found

        try:
            found = []
            for server in environment.servers:
                if server.process:
                    head = await connection.fetchrow(sql.HEAD, row["id"], server.name)
                    point = row["checkpoint"] and await connection.fetchrow(sql.POINT, row["checkpoint"], server.name)
                    found.append((server, head, point))
            async with asyncio.TaskGroup() as group:
                for arguments in found:
                    group.create_task(one(*arguments))
            yield kept
        except BaseException as error:
            for image in images:
                with contextlib.suppress(Exception):  # else the tender does it
                    await asyncio.shield(self._store.value(sql.CONDEMN_IMAGE, image))
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from error
            raise

    async def _keep(
        self,
        row: asyncpg.Record,
        server: LoadedServer,
        environment: LoadedEnvironment,
        head: asyncpg.Record | None,
        point: asyncpg.Record | None,
        images: list[str],
    ) -> Kept | None:
        if head is None:
            if point is not None and point["status"] != "ready":
                raise await image_lost(self._store.value, row["id"], server.name, row["checkpoint"])
            return point and Kept(point["name"], None, point["digest"], point["memory"])
        if not head["called"]:  # also one that is just being made
            if head["image"] is None:
                return None
            known = await self._store.row(sql.IMAGE, head["image"])
            assert known is not None
            if known["status"] == "ready":
                return Kept(head["image"], head["name"], known["digest"], known["memory"])
            if head["status"] != "ready":
                raise await image_lost(self._store.value, row["id"], server.name, row["checkpoint"])
        elif head["status"] == "lost":
            words = f" ({head['reason']}); there is nothing to keep."
            raise await box_lost(self._store.value, row["id"], server.name, words)
        if head["status"] == "creating":
            raise Unavailable(
                f"The sandbox of tool server {server.name!r} is just being made.", code="sandbox_not_ready"
            )
        keeper, host = await self._host.keeper()
        demand_host(head, host, server.name)
        image = f"im_{secrets.token_hex(8)}"
        await self._store.value(sql.PLAN_IMAGE, image, head["name"], self._owner())
        images.append(image)
        await failpoint("image.planned")
        try:
            return await self._freeze(keeper, server, head["name"], image)
        except Unprocessable as error:
            await self._boxes.unfit(server, environment, Kind(head["runtime"]), error)
            raise

    async def _freeze(self, keeper: Client, server: LoadedServer, sandbox: str, image: str) -> Kept:
        with translated(server.name):
            frozen = await frozen_soon(keeper, sandbox, image)
        await failpoint("image.frozen")
        done = await self._store.value(sql.FROZEN, image, frozen.memory, frozen.digest, frozen.bytes)
        if done is None:
            raise Unavailable("The gateway lost its place in the control database.", code="image_not_made")
        return Kept(image, sandbox, frozen.digest, frozen.memory)

    async def publish(
        self, connection: asyncpg.Connection, checkpoint: asyncpg.Record, kept: Mapping[str, Kept]
    ) -> None:
        """In the transaction that publishes the checkpoint."""
        for server, found in kept.items():
            if await connection.fetchval(sql.IMAGE_READY, found.image) is None:
                raise Unavailable("The gateway lost its place in the control database.", code="image_not_made")
            await connection.execute(sql.KEEP_POINT, checkpoint["id"], server, found.image)
            if found.sandbox is not None:
                await connection.execute(sql.STANDS_AS, found.sandbox, found.image, checkpoint["seq"])


async def frozen_soon(keeper: Client, sandbox: str, image: str) -> Frozen:
    """Freezes a sandbox between two lines: what it says of its own accord is waited for. Raises `SandboxError`, and
    `DeadlineExceeded` (`rollout_busy`)."""
    give_up = time.monotonic() + QUIET_S
    while True:
        try:
            return await keeper.freeze(sandbox, image)
        except SandboxError as error:
            if error.code != "busy":
                raise
            if time.monotonic() > give_up:
                raise DeadlineExceeded(
                    error.message,
                    code="rollout_busy",
                    hint="Try again when the tool server is quiet, or roll back, which ends it.",
                ) from error
        await asyncio.sleep(_TRY_EACH_S)
