"""One rollout's failure never shows in another, however many of them fail at once."""

import asyncio
import time

import pytest

from megamcp.errors import MegaMCPError
from tests.integration.promises.world import ToolFailed, World


async def test_checkpoints_that_wait_for_stuck_calls_leave_room_for_other_rollouts(world: World) -> None:
    stuck = await world.open(6)
    healthy = await world.one()
    await world.call(healthy, "items")
    hanging = [asyncio.create_task(world.call(rollout, "hang", key="x")) for rollout in stuck]
    await asyncio.sleep(0.5)
    waiting = [asyncio.create_task(world.checkpoint(rollout)) for rollout in stuck for _ in range(5)]
    digests = [asyncio.create_task(world.digest(rollout)) for rollout in stuck for _ in range(3)]
    await asyncio.sleep(0.3)
    for number in range(10):
        began = time.monotonic()
        await world.call(healthy, "put", key="k", value=str(number))
        await world.checkpoint(healthy)
        assert time.monotonic() - began < 3
    done = await asyncio.gather(*waiting, *digests, return_exceptions=True)
    assert all(isinstance(d, MegaMCPError) or not isinstance(d, BaseException) for d in done), done
    assert sum(not isinstance(d, BaseException) for d in done) >= len(stuck)
    for task in hanging:
        with pytest.raises((MegaMCPError, ToolFailed)):
            await asyncio.wait_for(task, 30)


async def test_a_tool_that_blocks_its_process_harms_no_other_rollout_for_good(world: World) -> None:
    blocking, other = await world.open(2)
    task = asyncio.create_task(world.call(blocking, "block", key="x", seconds=1.5))
    await asyncio.sleep(0.2)
    await world.call(other, "put", key="k", value="v")
    assert (await world.call(other, "items"))["k"] == "v"
    await task
