"""A copy becomes its rollout's by the deed that the first call brings."""

import asyncio
from typing import Any

import pytest_asyncio

from megamcp.handles import Mode
from megamcp.sdk.calls import run_recorded
from megamcp.sdk.database import Database as Pool
from megamcp.sdk.results import CallRefused
from tests.integration.clones.conftest import SIGNER, Database, World
from tests.integration.clones.test_clone_calls import DDL, SEED, add, call


@pytest_asyncio.fixture(loop_scope="session")
async def origin(world: World) -> Database:
    return await world.start(DDL, SEED)


async def fresh(world: World, origin: Database) -> Database:
    """A copy that nobody has bound: inside it still says whose it was copied from."""
    copy = await world.clone(origin.name)
    async with copy.hold() as inside:
        await inside.bind(origin.rollout, "shop", 7)
    return copy


def deed_of(copy: Database, *, epoch: int = 1, **other: Any) -> str:
    return SIGNER.deed(**{"database": copy.name, "rollout": copy.rollout, "server": "shop", "epoch": epoch, **other})


async def called(copy: Database, handle: str, deed: str) -> str:
    """`done`, or the code of the refusal."""
    dsn = copy.cluster.dsn_for(copy.name, copy.login, copy.password)
    pool = Pool(f"{dsn}{'&' if '?' in dsn else '?'}megamcp.deed={deed}", 1)
    try:
        await run_recorded(pool, call(handle), add(1))
    except CallRefused as error:
        return str(error.code)
    finally:
        await pool.aclose()
    return "done"


async def owner(copy: Database) -> tuple[str, int]:
    async with copy.hold() as inside:
        bound = await inside.bound()
    assert bound is not None
    return bound.rollout, bound.epoch


async def test_the_first_call_makes_a_copy_its_rollouts(world: World, origin: Database) -> None:
    copy = await fresh(world, origin)
    assert await called(copy, copy.handle(), deed_of(copy)) == "done"
    assert await owner(copy) == (copy.rollout, 1)
    assert await copy.user.fetchval("select balance from account where id = 1") == 11
    assert await called(copy, copy.handle(), "") == "done"  # it is needed once
    assert await called(copy, origin.handle(epoch=7), "") == "handle_foreign"


async def test_calls_that_come_at_once_all_bring_it(world: World, origin: Database) -> None:
    copy = await fresh(world, origin)
    modes = [Mode.WRITE, Mode.READ, Mode.READ, Mode.WRITE]
    found = await asyncio.gather(*(called(copy, copy.handle(mode), deed_of(copy)) for mode in modes))
    assert found == ["done"] * 4
    assert await owner(copy) == (copy.rollout, 1)


async def test_a_deed_of_another_database_or_of_nobody_is_worth_nothing(world: World, origin: Database) -> None:
    copy = await fresh(world, origin)
    good = deed_of(copy)
    bad = {
        "": "handle_foreign",
        deed_of(copy, database=origin.name): "handle_foreign",
        deed_of(copy, rollout="ro_other"): "handle_foreign",
        deed_of(copy, server="other"): "handle_foreign",
        copy.handle(point=copy.name): "handle_foreign",  # a call's handle is no deed
        good[:-1] + ("0" if good[-1] != "0" else "1"): "handle_forged",
        "x": "handle_forged",
    }
    for deed, code in bad.items():
        copy = await fresh(world, origin) if (await owner(copy))[0] != origin.rollout else copy
        assert await called(copy, copy.handle(), deed) == code, deed
    assert await owner(copy) == (origin.rollout, 7)


async def test_a_deed_is_no_handle(world: World, origin: Database) -> None:
    copy = await fresh(world, origin)
    assert await called(copy, deed_of(copy), deed_of(copy)) == "handle_forged"


async def test_a_deed_does_not_take_back_a_rollback(world: World, origin: Database) -> None:
    copy = await fresh(world, origin)
    async with copy.hold() as inside:
        await inside.bind(copy.rollout, "shop", 2)
    assert await called(copy, copy.handle(epoch=1), deed_of(copy)) == "rolled_back"
    assert await owner(copy) == (copy.rollout, 2)
    assert await called(copy, copy.handle(epoch=2), deed_of(copy)) == "done"


async def test_a_copy_of_the_rollouts_own_earlier_database_is_bound_anew(world: World, origin: Database) -> None:
    copy = await fresh(world, origin)
    async with copy.hold() as inside:
        await inside.bind(copy.rollout, "shop", 1)
    assert await called(copy, copy.handle(epoch=2), deed_of(copy, epoch=2)) == "done"
    assert await called(copy, copy.handle(epoch=1), deed_of(copy, epoch=1)) == "rolled_back"


async def test_a_handle_of_before_the_deed_is_refused(world: World, origin: Database) -> None:
    copy = await fresh(world, origin)
    assert await called(copy, copy.handle(epoch=3), deed_of(copy, epoch=4)) == "rolled_back"


async def test_a_call_that_never_arrived_is_recorded_as_failed_in_an_unbound_copy(
    world: World, origin: Database
) -> None:
    copy = await fresh(world, origin)
    handle = copy.handle()
    async with copy.cluster.inside(copy.name) as inside:
        await inside.call_fail(handle, "add", "{}", '{"isError":true}', deed=deed_of(copy))
        assert [row.outcome for row in await inside.calls(0)] == ["failed"]
    assert await called(copy, handle, deed_of(copy)) == "handle_replayed"


async def test_what_the_source_says_under_its_lock_is_true_of_the_copy(world: World, origin: Database) -> None:
    async def copied(at: int) -> bool:
        name = f"{origin.name}_{at}_{len(made)}"
        made.append(name)
        standing = await origin.cluster.clone(origin.name, name, login=None, at=at)
        assert standing is not None
        return standing.there

    made: list[str] = []
    first = (await origin.mark()).position
    assert await copied(first)
    user = await origin.connect()
    await user.execute("update account set balance = 3 where id = 2")
    await user.close()
    assert not await copied(first)
    second = (await origin.mark()).position
    assert await copied(second)
    await origin.rewind(first)
    assert await copied(first)
    assert not await copied(second)
    for name in made:
        await origin.cluster.drop(name)
