"""What squashing and sweeping do, and what they leave alone: calls in flight, other rollouts, readers."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from megamcp import failpoints
from megamcp.errors import Gone
from megamcp.testing import running_gateway
from tests.integration.conftest import copy_of
from tests.integration.promises.world import World

MOST = 4
SWAPPING = """select pid from pg_stat_activity
    where wait_event_type = 'Lock' and query like '%replaced_chains%' and datname = current_database()"""
IN_CALL = """select pid from pg_stat_activity where application_name like 'call %' and state = 'idle in transaction'
    and datname = current_database()"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(postgres_dsn: str, ledger_template: str) -> AsyncIterator[World]:
    """A gateway that squashes and sweeps only when it is told to."""
    async with (
        copy_of(postgres_dsn, ledger_template, f"mm_squash_{secrets.token_hex(4)}") as dsn,
        running_gateway(
            dsn, chain_layers=MOST, squash_interval_s=3600, reap_interval_s=3600, rollback_grace_s=5
        ) as running,
    ):
        yield World(running.services, running.url, dsn)


async def trajectory(world: World, rollout: str, turns: int) -> list[asyncpg.Record]:
    """A checkpoint after each write; the last ones of ten keys stay visible."""
    points = []
    for turn in range(turns):
        await world.call(rollout, "put", key=f"k{turn % 10}", value=f"{turn}")
        points.append(await world.checkpoint(rollout))
    return points


async def squash(world: World) -> None:
    while await world.services.squasher.once():
        pass


async def sweep(world: World) -> None:
    for _ in range(3):  # replaced chains are noted, forgotten, and their layers found dead
        await world.services.reaper.once()


async def layers_with_rows(world: World) -> set[int]:
    (state,) = await world.execute("select state from megamcp.servers where state is not null")
    rows = await world.execute(
        f'select distinct _mm_layer as n from s_{state["state"]}."item~delta" where _mm_layer > 0'
    )
    return {row["n"] for row in rows}


async def test_a_chain_of_a_hundred_checkpoints_stays_short(world: World) -> None:
    rollout = await world.one()
    longest = 0
    for _ in range(25):
        points = await trajectory(world, rollout, 4)
        await squash(world)
        longest = max(longest, len(await world.chain(rollout)))
    assert longest <= MOST
    assert await world.digest(rollout) == points[-1]["digest"]
    held = await world.call(rollout, "items")
    assert {key: value for key, value in held.items() if key.startswith("k")} == {f"k{n}": str(n % 4) for n in range(4)}
    (fork,) = await world.fork(points[-1]["id"])
    assert await world.call(fork, "items") == held


async def test_a_call_that_is_bound_to_the_old_chain_goes_on_over_the_swap(world: World) -> None:
    rollout = await world.one()
    points = await trajectory(world, rollout, 8)
    (fork,) = await world.fork(points[-1]["id"])
    old = await world.chain(fork)
    call = asyncio.create_task(world.call(fork, "increment", owner="owner-1", by=5, pause=2.5))
    reader = asyncio.create_task(world.call(rollout, "slow_items", seconds=2.5))
    while len(await world.execute(IN_CALL)) < 2:
        await asyncio.sleep(0.01)
    await squash(world)
    await sweep(world)
    assert await world.chain(fork) == old  # it is in a call, so it stays
    assert not call.done()
    assert await call == 105
    assert (await reader)["items"]["k7"] == "7"
    (late,) = await world.fork(points[-1]["id"])
    assert len(await world.chain(late)) <= MOST
    await squash(world)  # what the call wrote names the old layers: it is put onto the new one
    assert len(await world.chain(fork)) <= MOST
    assert await world.call(fork, "increment", owner="owner-1", by=0) == 105
    assert (await world.call(fork, "items"))["k7"] == "7"


async def test_a_rollout_that_is_never_idle_moves_at_its_next_checkpoint(world: World) -> None:
    rollout = await world.one()
    (point,) = (await trajectory(world, rollout, 8))[-1:]
    await world.call(rollout, "put", key="k0", value="dirty")
    assert await world.services.squasher.squash(point["id"])
    assert len(await world.chain(rollout)) == 8
    made = await world.checkpoint(rollout)
    assert len(made["chain"]) <= MOST + 1
    assert (await world.call(rollout, "items"))["k0"] == "dirty"
    assert await world.digest(rollout) == made["digest"]


async def test_layers_of_released_checkpoints_go_while_their_descendant_lives(world: World) -> None:
    await sweep(world)
    before = await layers_with_rows(world)
    rollout = await world.one()
    points = await trajectory(world, rollout, 12)
    await squash(world)
    for point in points[:-1]:
        await world.services.rollouts.release_checkpoint(point["id"])
    await sweep(world)
    assert await layers_with_rows(world) - before == set(await world.chain(rollout))
    assert (await world.call(rollout, "items"))["k9"] == "9"
    assert await world.digest(rollout) == points[-1]["digest"]
    with pytest.raises(Gone):
        await world.fork(points[3]["id"])
    await world.services.rollouts.close(rollout)
    await world.services.rollouts.release_checkpoint(points[-1]["id"])
    await sweep(world)
    assert await layers_with_rows(world) <= before
    assert not await world.execute("select id from megamcp.checkpoints where rollout = $1", rollout)


async def test_rows_stay_while_a_transaction_may_read_by_them(world: World) -> None:
    rollout = await world.one()
    (point,) = await trajectory(world, rollout, 1)
    (layer,) = await world.chain(rollout)
    reader = await asyncpg.connect(world.dsn)
    async with reader.transaction():
        await reader.execute("select 1")
        await world.services.rollouts.close(rollout)
        await world.services.rollouts.release_checkpoint(point["id"])
        await sweep(world)
        assert layer in await layers_with_rows(world)
    await reader.close()
    await sweep(world)
    assert layer not in await layers_with_rows(world)


async def test_a_squash_that_dies_leaves_nothing(world: World) -> None:
    rollout = await world.one()
    points = await trajectory(world, rollout, 8)
    (before,) = await world.execute("select count(*) as n from megamcp.squashed_layers")
    held = await world.call(rollout, "items")
    blocker = await asyncpg.connect(world.dsn)
    async with blocker.transaction():  # the swap, its last step, waits for this lock
        await blocker.execute("select 1 from megamcp.checkpoints where id = $1 for no key update", points[-1]["id"])
        squashing = asyncio.create_task(world.services.squasher.squash(points[-1]["id"]))
        while not (waiting := await world.execute(SWAPPING)):
            await asyncio.sleep(0.01)
        await blocker.execute("select pg_terminate_backend($1)", waiting[0]["pid"])
        with pytest.raises(Exception, match="away"):
            await squashing
    await blocker.close()
    (after,) = await world.execute("select count(*) as n from megamcp.squashed_layers")
    assert after["n"] == before["n"]
    assert len(await world.chain(rollout)) == 8
    await squash(world)
    assert len(await world.chain(rollout)) <= MOST
    assert await world.call(rollout, "items") == held


@pytest.mark.parametrize("place", ["squash.built", "squash.swapped", "squash.moved"])
async def test_a_squash_that_fails_anywhere_is_done_by_the_next_round(
    world: World, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = await world.one()
    points = await trajectory(world, rollout, 8)
    await world.call(rollout, "put", key="k0", value="dirty")
    monkeypatch.setenv(failpoints.VARIABLE, f"{place}=error")
    with pytest.raises(failpoints.FailpointError):
        await squash(world)
    monkeypatch.delenv(failpoints.VARIABLE)
    assert (await world.call(rollout, "items"))["k0"] == "dirty"
    await squash(world)
    assert len(await world.chain(rollout)) <= MOST
    assert (await world.call(rollout, "items"))["k7"] == "7"
    (fork,) = await world.fork(points[-1]["id"])
    assert await world.digest(fork) == points[-1]["digest"]


@pytest.mark.parametrize("place", ["layers.void", "layers.marked", "layers.discarded"])
async def test_a_sweep_that_fails_anywhere_is_done_by_the_next_round(
    world: World, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sweep(world)
    before = await layers_with_rows(world)
    rollout = await world.one()
    points = await trajectory(world, rollout, 8)
    await squash(world)
    for point in points[:-1]:
        await world.services.rollouts.release_checkpoint(point["id"])
    for _ in range(3):
        monkeypatch.setenv(failpoints.VARIABLE, f"{place}=error")
        with contextlib.suppress(failpoints.FailpointError):
            await world.services.reaper.once()
        monkeypatch.delenv(failpoints.VARIABLE)
        assert await world.digest(rollout) == points[-1]["digest"]
        assert (await world.call(rollout, "items"))["k7"] == "7"
    await sweep(world)
    left = await layers_with_rows(world) - before
    assert left <= {*await world.chain(rollout), *await heads(world, rollout)}


async def test_two_checkpoints_that_end_with_one_layer_are_squashed_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both want the number after that layer; who comes second leaves it to another round."""
    rollout = await world.one()
    points = await trajectory(world, rollout, 8)
    (fork,) = await world.fork(points[-1]["id"])
    same = await world.checkpoint(fork)  # nothing was written: the chain is the same
    monkeypatch.setenv(failpoints.VARIABLE, "squash.built=sleep:0.3@1")
    failpoints.reset()
    both = [world.services.squasher.squash(point["id"]) for point in (points[-1], same)]
    assert sorted(await asyncio.gather(*both)) == [False, True]
    monkeypatch.delenv(failpoints.VARIABLE)
    await squash(world)
    for one in (rollout, fork):
        assert len(await world.chain(one)) <= MOST
        assert await world.digest(one) == points[-1]["digest"]
        assert (await world.call(one, "items"))["k7"] == "7"


async def heads(world: World, rollout: str) -> list[int]:
    return [row["layer"] for row in await world.execute("select layer from megamcp.rollouts where id = $1", rollout)]


async def test_a_checkpoint_given_up_during_its_squash_stays_given_up(world: World) -> None:
    rollout = await world.one()
    points = await trajectory(world, rollout, 8)
    last = points[-1]["id"]
    blocker = await asyncpg.connect(world.dsn)
    async with blocker.transaction():
        await blocker.execute("update megamcp.checkpoints set void = true where id = $1", last)
        squashing = asyncio.create_task(world.services.squasher.squash(last))
        while not await world.execute(SWAPPING):
            await asyncio.sleep(0.01)
    await blocker.close()
    assert await squashing is False
    await world.execute("update megamcp.checkpoints set void = false where id = $1", last)


async def test_many_idle_forks_move_without_their_doing(world: World) -> None:
    rollout = await world.one()
    (point,) = (await trajectory(world, rollout, 8))[-1:]
    forks = await world.fork(point["id"], count=350)
    await squash(world)
    (long,) = await world.execute("select count(*) as n from megamcp.rollouts where layers > $1", MOST)
    assert long["n"] == 0
    assert (await world.call(forks[-1], "items"))["k7"] == "7"


async def test_a_diff_looks_only_at_what_was_written_since_the_common_point(world: World) -> None:
    rollout = await world.one()
    await world.call(rollout, "run_sql", sql="insert into item select 'n' || n, 'x' from generate_series(1, 300) n")
    points = await trajectory(world, rollout, 12)
    await squash(world)
    await world.call(rollout, "put", key="last", value="one")
    found = (await world.services.points.diff(rollout, points[9]["id"], "head"))["ledger"].tables["item"]
    assert {row["key"] for row in found.added} == {"last"}
    assert {change.after["key"] for change in found.changed} == {"k0", "k1"}


async def test_thousands_that_end_at_once_keep_nothing_else_waiting(world: World) -> None:
    opened = [rollout for _ in range(3) for rollout in await world.open(600)]
    point = await world.checkpoint(await world.one())
    await world.execute("update megamcp.rollouts set expires_at = now() where id = any($1::text[])", opened)
    await world.execute("update megamcp.checkpoints set expires_at = now() where id = $1", point["id"])
    first = await world.services.reaper.once()
    assert first["rollouts"] >= 500
    assert first["leases"] == 1
    ended = first["rollouts"]
    while done := (await world.services.reaper.once())["rollouts"]:
        ended += done
    assert ended == len(opened)
