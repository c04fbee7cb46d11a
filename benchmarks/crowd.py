"""A long trajectory and a crowd of rollouts, made as agents and trainers make them, with the background at work.

Calls go the way of a tool server: a handle, the rollout's lock, the binding, the journal row, one transaction, as the
state's own role. Only the processes in between are left out. Squasher and reaper run as in a gateway, at its pace.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

import asyncpg

from benchmarks.report import say
from megamcp.environments import Environments, LoadedEnvironment
from megamcp.handles import Mode, Signer
from megamcp.reaper import Reaper
from megamcp.rollouts import Rollouts
from megamcp.settings import Settings
from megamcp.squasher import Squasher
from megamcp.store import ROLLOUT_BY_ID, Store
from megamcp.targets import role_dsn

BATCH = 1000
PATIENCE_S = 300


class Crowd:
    """One environment's rollouts, on a store of this process."""

    def __init__(self, store: Store, signer: Signer, settings: Settings, loaded: LoadedEnvironment, dsn: str) -> None:
        self._store = store
        self._signer = signer
        self._loaded = loaded
        self._dsn = dsn
        self._environments = Environments(store, signer)
        self._settings = settings
        self.rollouts = Rollouts(store, self._environments, settings)
        (self.state,) = loaded.schemas

    @contextlib.asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """What a gateway process does beside serving, for as long as the block lasts."""
        squasher = Squasher(self._store, self._environments, self._settings)
        reaper = Reaper(self._store, self._environments, self.rollouts, self._settings)
        tasks = [asyncio.create_task(squasher.run()), asyncio.create_task(reaper.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def admin(self) -> contextlib.AbstractAsyncContextManager[asyncpg.Connection]:
        """A connection of the control role."""
        return self._store.connection()

    async def open(self, count: int = 1) -> list[str]:
        return [row["id"] for row in await self.rollouts.open(self._loaded.full_name, count=count, ttl_s=86400)]

    @contextlib.asynccontextmanager
    async def tool(self) -> AsyncIterator[asyncpg.Connection]:
        """A connection such as a tool server's."""
        dsn = role_dsn(self._dsn, self.state.tool_role, self._signer.password("tool"))
        path = f"v_{self.state.hash}, pg_catalog"
        connection = await asyncpg.connect(dsn, server_settings={"search_path": path})
        try:
            yield connection
        finally:
            await connection.close()

    async def call(self, tool: asyncpg.Connection, rollout: str, statements: Sequence[str]) -> None:
        """One recorded call."""
        handle = self._signer.mint(
            rollout=rollout, server=self._loaded.servers[0].name, epoch=0, mode=Mode.WRITE, deadline=time.time() + 60
        )
        async with tool.transaction():
            await tool.execute("select megamcp.call_begin($1, $2, $3)", handle, "write", "{}")
            for statement in statements:
                await tool.execute(statement)
            await tool.execute("select megamcp.call_finish($1, $2, $3, $4, $5)", handle, "write", "{}", "{}", False)

    async def trajectory(self, rollout: str, turns: int, write: Callable[[int], Sequence[str]]) -> list[str]:
        """Turns of a call and a checkpoint; gives the checkpoints."""
        made = []
        async with self.tool() as tool:
            for turn in range(turns):
                await self.call(tool, rollout, write(turn))
                made.append((await self.rollouts.make_checkpoint(rollout))["id"])
        return made

    async def fork(self, checkpoints: Sequence[str], count: int) -> list[str]:
        """That many rollouts, spread over the checkpoints."""
        made: list[str] = []
        while len(made) < count:
            for checkpoint in checkpoints[-max(1, min(len(checkpoints), (count - len(made)) // BATCH)) :]:
                rows = await self.rollouts.fork(checkpoint, count=min(BATCH, count - len(made)), ttl_s=86400)
                made += [row["id"] for row in rows]
                if len(made) >= count:
                    break
        return made

    async def position(self, rollout: str) -> tuple[tuple[int, ...], int]:
        """The layers that a rollout builds on, and its own; waits until the background has shortened them."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            row = await self._store.row(ROLLOUT_BY_ID, rollout)
            assert row is not None
            if len(row["chain"]) <= self._settings.chain_layers or time.monotonic() > give_up:
                return tuple(row["chain"]), row["layer"]
            await asyncio.sleep(0.1)

    async def settled(self) -> None:
        """Waits until no rollout is on a chain that is to be squashed."""
        began = time.monotonic()
        while await self._store.value(
            "select count(*) from megamcp.rollouts where layers > $1", self._settings.chain_layers
        ):
            await asyncio.sleep(0.2)
            if time.monotonic() - began > PATIENCE_S:
                raise RuntimeError("squashing did not come to an end")
        say(f"squashed {time.monotonic() - began:.1f} s later")
