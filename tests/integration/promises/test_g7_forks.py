"""G7: forks are independent: of their siblings, of their parent, and of what becomes of the checkpoint."""

import asyncio

import pytest

from megamcp.errors import BadRequest, Conflict, Gone, NoCapacity, NotFound
from tests.integration.promises.world import World


async def test_forks_start_equal_and_go_different_ways(world: World) -> None:
    root = await world.one()
    await world.call(root, "put", key="shared", value="root")
    point = await world.checkpoint(root)
    forks = await world.fork(point["id"], count=8)
    assert {await world.digest(fork) for fork in forks} == {point["digest"]}
    await asyncio.gather(*(world.call(fork, "put", key="shared", value=fork) for fork in forks))
    await world.call(root, "delete", key="shared")
    for fork in forks:
        assert (await world.call(fork, "items"))["shared"] == fork
    assert "shared" not in await world.call(root, "items")


async def test_forks_draw_the_same_numbers_unless_asked_otherwise(world: World) -> None:
    root = await world.one()
    await world.call(root, "draw")
    point = await world.checkpoint(root)
    a, b = await world.fork(point["id"], count=2)
    assert await world.call(a, "draw") == await world.call(b, "draw") == await world.call(root, "draw")
    c, d = await world.fork(point["id"], count=2, seed="fresh")
    assert await world.call(c, "draw") != await world.call(d, "draw")
    (e,), (f,) = await world.fork(point["id"], seed=7), await world.fork(point["id"], seed=7)
    assert await world.call(e, "draw") == await world.call(f, "draw")


async def test_sequences_fork_without_gaps(world: World) -> None:
    root = await world.one()
    await world.call(root, "book", account_id=1, amount=1)
    point = await world.checkpoint(root)
    forks = await world.fork(point["id"], count=3)
    ids = [(await world.call(fork, "book", account_id=1, amount=1))["id"] for fork in forks]
    assert ids == [2, 2, 2]


async def test_a_fork_outlives_its_parent_and_its_checkpoint(world: World) -> None:
    root = await world.one()
    await world.call(root, "put", key="k", value="v")
    point = await world.checkpoint(root)
    (fork,) = await world.fork(point["id"])
    await world.services.rollouts.close(root)
    await world.services.rollouts.release_checkpoint(point["id"])
    await world.services.reaper.once()
    assert (await world.call(fork, "items"))["k"] == "v"
    with pytest.raises(Gone):
        await world.fork(point["id"])


async def test_a_checkpoint_can_be_forked_after_its_rollout_was_released(world: World) -> None:
    root = await world.one()
    await world.call(root, "put", key="k", value="v")
    point = await world.checkpoint(root)
    await world.services.rollouts.close(root)
    await world.services.reaper.once()
    (fork,) = await world.fork(point["id"])
    assert (await world.call(fork, "items"))["k"] == "v"


async def test_the_reaper_never_takes_a_checkpoint_that_is_being_forked(world: World) -> None:
    for _ in range(10):
        root = await world.one()
        await world.call(root, "put", key="k", value="v")
        point = await world.checkpoint(root, ttl_s=0.05)
        await world.services.rollouts.close(root)
        forked, _ = await asyncio.gather(
            world.fork(point["id"], count=3), _reap_for(world, 0.15), return_exceptions=True
        )
        if isinstance(forked, Gone | NotFound):
            continue
        assert not isinstance(forked, BaseException), forked
        for fork in forked:
            assert (await world.call(fork, "items"))["k"] == "v"


async def _reap_for(world: World, seconds: float) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        await world.services.reaper.once()


async def test_a_pin_holds_a_checkpoint_beyond_its_lease(world: World) -> None:
    root = await world.one()
    point = await world.checkpoint(root, ttl_s=0.05)
    await world.services.rollouts.pin(point["id"], "trainer", 60)
    await asyncio.sleep(0.1)
    await world.services.reaper.once()
    assert len(await world.fork(point["id"])) == 1
    with pytest.raises(Conflict, match="pinned by trainer"):
        await world.services.rollouts.release_checkpoint(point["id"])
    await world.services.rollouts.unpin(point["id"], "trainer")
    await world.services.reaper.once()
    with pytest.raises((Gone, NotFound)):
        await world.fork(point["id"])


async def test_an_expired_rollout_is_released_by_the_reaper(world: World) -> None:
    (rollout,) = await world.open(ttl_s=0.05)
    await world.call(rollout, "put", key="k", value="v")
    await asyncio.sleep(0.1)
    await world.services.reaper.once()
    assert (await world.services.rollouts.get(rollout))["status"] == "expired"
    with pytest.raises(Gone) as gone:
        await world.call(rollout, "items")
    assert gone.value.code == "rollout_expired"


async def test_limits_are_told(world: World) -> None:
    root = await world.one()
    point = await world.checkpoint(root)
    with pytest.raises(BadRequest, match="1000 rollouts"):
        await world.fork(point["id"], count=1001)
    with pytest.raises(BadRequest, match="lease"):
        await world.fork(point["id"], ttl_s=1e9)
    world.services.rollouts.open_count = world.services.settings.max_rollouts
    with pytest.raises(NoCapacity) as full:
        await world.fork(point["id"])
    assert full.value.code == "too_many_rollouts"
    await world.services.reaper.once()
    assert len(await world.fork(point["id"])) == 1


async def test_the_journal_of_a_fork_begins_with_its_ancestors_part(world: World) -> None:
    root = await world.one()
    await world.call(root, "put", key="a", value="1")
    point = await world.checkpoint(root)
    await world.call(root, "put", key="b", value="2")
    (fork,) = await world.fork(point["id"])
    await world.call(fork, "put", key="c", value="3")
    journal = await world.journal(fork)
    assert [(row["kind"], row["rollout"] == fork) for row in journal] == [
        ("open", False),
        ("call", False),
        ("fork", True),
        ("call", True),
    ]
    assert [row["seq"] for row in journal] == [1, 2, 3, 4]
    assert point["seq"] == 2
