"""G3: rollback is exact: rows, counters, clock and random position."""

import asyncio

import pytest

from megamcp.errors import Conflict, Gone, MegaMCPError, NotFound
from tests.integration.promises.world import ToolFailed, World


async def test_rollback_restores_rows_digest_sequence_and_random_position(world: World) -> None:
    rollout = await world.one()
    await world.call(rollout, "book", account_id=1, amount=3)
    first_draw = await world.call(rollout, "draw")
    point = await world.checkpoint(rollout)
    before, counters = await world.digest(rollout), await world.counters(rollout)
    next_draw = await world.call(rollout, "draw")
    entry = await world.call(rollout, "book", account_id=2, amount=4)
    await world.call(rollout, "delete", key="base-1")
    await world.call(rollout, "put", key="base-2", value="changed")
    assert await world.digest(rollout) != before

    await world.roll_back(rollout, point["id"])
    assert await world.digest(rollout) == before == point["digest"]
    assert await world.counters(rollout) == counters
    assert await world.call(rollout, "draw") == next_draw != first_draw
    assert await world.call(rollout, "book", account_id=2, amount=4) == entry
    assert (await world.call(rollout, "items"))["base-2"] == "seeded"


async def test_undoing_by_hand_gives_the_old_digest_back(world: World) -> None:
    rollout = await world.one()
    start = await world.digest(rollout)
    await world.call(rollout, "put", key="x", value="1")
    await world.call(rollout, "put", key="base-1", value="other")
    assert await world.digest(rollout) != start
    await world.checkpoint(rollout)
    await world.call(rollout, "delete", key="x")
    await world.call(rollout, "put", key="base-1", value="seeded")
    assert await world.digest(rollout) == start


async def test_equal_states_on_different_paths_have_equal_digests(world: World) -> None:
    a, b = await world.open(2)
    await world.call(a, "put", key="x", value="1")
    await world.call(a, "put", key="y", value="2")
    await world.call(b, "put", key="y", value="9")
    await world.checkpoint(b)
    await world.call(b, "put", key="x", value="1")
    await world.call(b, "put", key="y", value="2")
    assert await world.digest(a) == await world.digest(b)


async def test_rollback_ends_calls_in_flight_and_they_leave_nothing(world: World) -> None:
    rollout = await world.one()
    point = await world.checkpoint(rollout)
    running = asyncio.create_task(world.call(rollout, "hang", key="late"))
    await world.held(rollout)
    queued = asyncio.create_task(world.call(rollout, "put", key="queued", value="x"))
    await asyncio.sleep(0)
    await world.roll_back(rollout, point["id"])
    for task in (running, queued):
        with pytest.raises((MegaMCPError, ToolFailed)):
            await asyncio.wait_for(task, 20)
    assert set(await world.call(rollout, "items")) == {f"base-{n}" for n in range(1, 6)}


async def test_rollback_is_an_event_and_deletes_no_history(world: World) -> None:
    rollout = await world.one()
    point = await world.checkpoint(rollout)
    await world.call(rollout, "put", key="x", value="1")
    await world.roll_back(rollout, point["id"])
    kinds = [row["kind"] for row in await world.journal(rollout)]
    assert kinds == ["open", "checkpoint", "call", "rollback"]
    seqs = [row["seq"] for row in await world.journal(rollout)]
    assert seqs == [1, 2, 3, 4]


async def test_rollback_to_a_checkpoint_of_an_abandoned_line_brings_it_back(world: World) -> None:
    rollout = await world.one()
    first = await world.checkpoint(rollout)
    await world.call(rollout, "put", key="x", value="1")
    second = await world.checkpoint(rollout)
    await world.roll_back(rollout, first["id"])
    await world.roll_back(rollout, second["id"])
    assert (await world.call(rollout, "items"))["x"] == "1"


async def test_another_rollouts_checkpoint_is_refused(world: World) -> None:
    mine, other = await world.open(2)
    point = await world.checkpoint(other)
    with pytest.raises(Conflict, match="belongs to rollout") as refused:
        await world.roll_back(mine, point["id"])
    assert refused.value.code == "foreign_checkpoint"
    with pytest.raises(NotFound):
        await world.roll_back(mine, "cp_" + "0" * 32)
    await world.services.rollouts.release_checkpoint(point["id"])
    with pytest.raises(Gone):
        await world.roll_back(other, point["id"])


async def test_a_diff_tells_rows_added_removed_and_changed(world: World) -> None:
    rollout = await world.one()
    await world.call(rollout, "put", key="new", value="1")
    await world.call(rollout, "put", key="base-1", value="2")
    await world.call(rollout, "delete", key="base-2")
    point = await world.checkpoint(rollout)
    await world.call(rollout, "delete", key="new")
    there = (await world.services.points.diff(rollout, "base", point["id"]))["ledger"].tables["item"]
    assert there.added == ({"key": "new", "value": "1"},)
    assert there.removed == ({"key": "base-2", "value": "seeded"},)
    assert [(c.before["value"], c.after["value"]) for c in there.changed] == [("seeded", "2")]
    back = (await world.services.points.diff(rollout, point["id"], "head"))["ledger"].tables
    assert set(back) == {"item"}
    assert back["item"].removed == ({"key": "new", "value": "1"},)
    assert back["item"].total == 1
