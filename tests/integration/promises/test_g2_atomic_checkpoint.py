"""G2: a checkpoint is atomic: it sees every call done or not begun, never half of one."""

import asyncio
import contextlib
import time

import pytest

from megamcp.errors import MegaMCPError
from tests.integration.promises.world import ToolFailed, World


async def test_a_checkpoint_between_calls_sees_entry_and_balance_or_neither(world: World) -> None:
    rollout = await world.one()

    async def write() -> None:
        for _ in range(15):
            await world.call(rollout, "book", account_id=1, amount=1, pause=0.003)

    writing = asyncio.create_task(write())
    points = []
    while not writing.done():
        points.append(await world.checkpoint(rollout))
        await asyncio.sleep(0.005)
    await writing
    assert len(points) > 3, "the checkpoints must have come between the calls"
    for point in points:
        (fork,) = await world.fork(point["id"])
        sums = await world.call(fork, "sums")
        assert sums["balances"] == sums["entries"]


async def test_a_checkpoint_waits_for_the_running_call(world: World) -> None:
    rollout = await world.one()
    running = asyncio.create_task(world.call(rollout, "book", account_id=1, amount=7, pause=0.4))
    await asyncio.sleep(0.15)
    point = await world.checkpoint(rollout)
    await running
    (fork,) = await world.fork(point["id"])
    assert await world.call(fork, "sums") == {"balances": 7, "entries": 7}


async def test_a_checkpoint_ends_a_call_that_never_returns(world: World) -> None:
    rollout = await world.one()
    stuck = asyncio.create_task(world.call(rollout, "hang", key="stuck"))
    await asyncio.sleep(0.3)
    began = time.monotonic()
    point = await world.checkpoint(rollout)
    assert time.monotonic() - began < 25
    with pytest.raises((MegaMCPError, ToolFailed)):
        await asyncio.wait_for(stuck, 20)
    (fork,) = await world.fork(point["id"])
    assert "stuck" not in await world.call(fork, "items")
    assert "stuck" not in await world.call(rollout, "items")


async def test_parallel_increments_lose_no_update(world: World) -> None:
    rollout = await world.one()
    await asyncio.gather(*(world.call(rollout, "increment", owner="owner-1", pause=0.005) for _ in range(20)))
    assert await world.call(rollout, "increment", owner="owner-1", by=0) == 120


async def test_parallel_inserts_of_one_key_leave_one_row(world: World) -> None:
    rollout = await world.one()
    outcomes = await asyncio.gather(
        *(world.call(rollout, "open_account", id=50 + n, owner="rival", pause=0.01) for n in range(6)),
        return_exceptions=True,
    )
    assert sum(not isinstance(outcome, Exception) for outcome in outcomes) == 1
    assert all("account_owner_key" in str(o) for o in outcomes if isinstance(o, ToolFailed))


async def test_a_delete_beside_an_insert_leaves_no_orphan(world: World) -> None:
    for _ in range(5):
        rollout = await world.one()
        await world.call(rollout, "open_account", id=99, owner="parent")
        outcomes = await asyncio.gather(
            world.call(rollout, "book", account_id=99, amount=1, pause=0.01),
            world.call(rollout, "close_account", id=99, pause=0.01),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, ToolFailed) for outcome in outcomes) == 1
        orphans = await world.call(
            rollout,
            "run_sql",
            sql="select count(*) from entry e where not exists (select 1 from account a where a.id = e.account_id)",
        )
        assert orphans == [[0]]


async def test_readers_run_at_the_same_time_and_writers_do_not(world: World) -> None:
    rollout = await world.one()
    readings = await asyncio.gather(*(world.call(rollout, "slow_items", seconds=0.3) for _ in range(3)))
    assert max(r["began"] for r in readings) < min(r["ended"] for r in readings)
    with contextlib.suppress(ToolFailed):
        began = time.monotonic()
        await asyncio.gather(*(world.call(rollout, "book", account_id=1, amount=1, pause=0.1) for _ in range(3)))
    assert time.monotonic() - began >= 0.3
