"""Large results are kept apart, once; what is too old or too much goes, and says so."""

import pytest

from megamcp import store
from megamcp.errors import Unprocessable
from tests.integration.promises.world import World

BIG = "x" * 50_000


async def big(world: World, rollout: str, once: str | None = None) -> str:
    rows = await world.call(rollout, "run_sql", once=once, sql=f"select repeat('x', {len(BIG)})")
    return str(rows[0][0])


async def test_a_large_result_is_stored_once_and_comes_back_whole(world: World) -> None:
    a, b = await world.open(2)
    assert await big(world, a) == await big(world, b) == BIG
    (kept,) = await world.execute("select count(*) as n, sum(bytes) as bytes from megamcp.blobs")
    assert kept["n"] == 1
    (row,) = [row for row in await world.journal(a) if row["kind"] == "call"]
    assert BIG in row["result"]
    (inline,) = await world.execute("select result from megamcp.events where rollout = $1 and kind = 'call'", a)
    assert inline["result"] is None


async def test_a_dropped_result_is_told_and_the_call_not_run_again(world: World) -> None:
    rollout = await world.one()
    await big(world, rollout, once="k")
    await world.execute(store.DROP_BLOBS, 0)
    with pytest.raises(Unprocessable) as expired:
        await big(world, rollout, once="k")
    assert expired.value.code == "result_expired"
    assert len([row for row in await world.journal(rollout) if row["kind"] == "call"]) == 1


async def test_the_oldest_results_go_first(world: World) -> None:
    rollout = await world.one()
    for size in (40_000, 41_000, 42_000):
        await world.call(rollout, "run_sql", sql=f"select repeat('y', {size})")
    await world.execute(store.DROP_BLOBS, 90_000 * 2)
    left = [row["bytes"] for row in await world.execute("select bytes from megamcp.blobs order by created_at")]
    assert len(left) == 2
    assert left == sorted(left)


async def test_journals_of_ended_rollouts_go_when_no_checkpoint_is_left(world: World) -> None:
    rollout, with_checkpoint, alive = await world.open(3)
    for each in (rollout, with_checkpoint, alive):
        await world.call(each, "put", key="k", value="v")
    point = await world.checkpoint(with_checkpoint)
    for each in (rollout, with_checkpoint):
        await world.services.rollouts.close(each)
    await world.execute("update megamcp.rollouts set closed_at = closed_at - interval '40 days' where status <> 'open'")
    await world.services.reaper.once()
    assert await world.journal(rollout) == []
    assert len(await world.journal(with_checkpoint)) == 4
    assert len(await world.journal(alive)) == 2
    assert len(await world.fork(point["id"])) == 1
