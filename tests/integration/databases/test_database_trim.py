"""The log of a rollout that lives long is bounded, and no live checkpoint misses what was trimmed."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from megamcp.errors import Gone
from tests.integration.databases.shop import Shop

pytestmark = pytest.mark.asyncio(loop_scope="session")
BOUND = 200_000
CHANGE = "update big set v = md5(v || id)"
LOG = "select pg_table_size('megamcp.log')"


@pytest_asyncio.fixture(loop_scope="session")
async def short_log(shop: Shop) -> AsyncIterator[None]:
    settings = shop.services.settings
    before, settings.database_log = settings.database_log, BOUND
    yield
    settings.database_log = before


async def big(shop: Shop) -> str:
    rollout = await shop.one()
    await shop.run(rollout, "create table big (id int primary key, v text)")
    await shop.run(rollout, "insert into big select n, md5(n::text) from generate_series(1, 1000) n")
    return rollout


async def name_of(shop: Shop, rollout: str) -> str:
    return str(await shop.services.store.value("select name from megamcp.databases where rollout = $1", rollout))


async def keep(shop: Shop, rollout: str) -> int:
    """A round of the reaper, and one of the keeper for one rollout's database; entries that this trimmed."""
    keeper = shop.services.keeper
    await shop.services.reaper.once()
    await shop.services.store.value("update megamcp.databases set bytes = 1 << 30 where rollout = $1", rollout)
    keeper._cut = float("-inf")
    return (await keeper.once())["trimmed"]


async def inside(shop: Shop, rollout: str, sql: str) -> Any:
    async with shop.services.databases.clusters.opened[0].inside(await name_of(shop, rollout)) as there:
        return await there.connection.fetchval(sql)


async def values(shop: Shop, rollout: str) -> Any:
    return (await shop.read(rollout, "select md5(string_agg(v, '' order by id)) from big"))[0][0]


async def test_the_log_of_a_rollout_whose_checkpoints_are_released_is_bounded(shop: Shop, short_log: None) -> None:
    rollout = await big(shop)
    sizes, previous = [], await shop.checkpoint(rollout)
    for _ in range(16):
        await shop.run(rollout, CHANGE)
        point = await shop.checkpoint(rollout)
        await shop.services.rollouts.release_checkpoint(previous["id"])
        previous = point
        await keep(shop, rollout)
        sizes.append(await inside(shop, rollout, LOG))
    assert max(sizes[8:]) <= max(sizes[:8])
    assert await inside(shop, rollout, "select count(*) from megamcp.log") < 12
    assert await inside(shop, rollout, "select count(*) from megamcp.marks") < 12
    expected = await values(shop, rollout)
    await shop.run(rollout, CHANGE)
    await shop.roll_back(rollout, point["id"])
    assert await values(shop, rollout) == expected


async def test_a_live_checkpoint_keeps_what_it_needs_of_the_log(shop: Shop, short_log: None) -> None:
    rollout = await big(shop)
    points, expected = [], []
    for _ in range(8):
        await shop.run(rollout, CHANGE)
        points.append(await shop.checkpoint(rollout))
        expected.append((await values(shop, rollout), await shop.digest(rollout)))
    for n in (0, 1, 2, 4):
        await shop.services.rollouts.release_checkpoint(points[n]["id"])
    await keep(shop, rollout)
    assert await inside(shop, rollout, "select trimmed from megamcp.here") > 0  # by this round or the gateway's own
    await shop.run(rollout, "alter table big add w int")  # from here on, older ones are made from copies
    await shop.checkpoint(rollout)
    await keep(shop, rollout)
    for n in (3, 5, 6, 7):
        (fork,) = await shop.fork(points[n]["id"])
        assert (await values(shop, fork), await shop.digest(fork)) == expected[n]
    await shop.roll_back(rollout, points[3]["id"])
    assert (await values(shop, rollout), await shop.digest(rollout)) == expected[3]


async def test_what_is_before_a_trimmed_log_is_still_compared_and_come_back_to(shop: Shop, short_log: None) -> None:
    rollout = await shop.one()
    start = await shop.checkpoint(rollout)  # the environment's own beginning
    await shop.run(rollout, "update books set stock = 4444")
    await shop.run(rollout, "create table big (id int primary key, v text)")
    await shop.run(rollout, "insert into big select n, md5(n::text) from generate_series(1, 1000) n")
    await shop.checkpoint(rollout)
    await keep(shop, rollout)
    assert await inside(shop, rollout, "select trimmed from megamcp.here") > 0
    diff = await shop.diff(rollout, "base", "head")
    assert (diff["big"].total, {change.after["stock"] for change in diff["books"].changed}) == (1000, {4444})
    before = await shop.digest(rollout, "base")
    await shop.roll_back(rollout, start["id"])
    assert await shop.digest(rollout) == before
    assert (await shop.read(rollout, "select count(*) from books where stock = 4444"))[0][0] == 0


async def test_calls_go_on_while_the_log_is_trimmed(shop: Shop, short_log: None) -> None:
    rollout = await big(shop)
    await shop.run(rollout, CHANGE)
    await shop.checkpoint(rollout)
    cluster, name = shop.services.databases.clusters.opened[0], await name_of(shop, rollout)
    async with cluster.inside(name) as there, there.connection.transaction():
        mark = await there.connection.fetchval("select max(position) from megamcp.marks")
        await there.connection.execute("select megamcp.begin_trim($1)", mark)
        assert await there.connection.fetchval("select megamcp.trim(1000)") > 0
        await shop.run(rollout, CHANGE)  # while that is not yet committed


MUCH = "update big set v = (select string_agg(md5(v || id || n), '') from generate_series(1, 20) n)"


async def test_much_is_not_undone_where_a_copy_of_before_is_at_hand(shop: Shop) -> None:
    rollout = await big(shop)
    await shop.checkpoint(rollout)  # DDL lies before it, so it is a copy
    await shop.run(rollout, CHANGE)
    point = await shop.checkpoint(rollout)
    expected, name = (await values(shop, rollout), await shop.digest(rollout)), await name_of(shop, rollout)
    await shop.run(rollout, CHANGE)
    await shop.roll_back(rollout, point["id"])
    assert await values(shop, rollout) == expected[0]
    assert await name_of(shop, rollout) == name  # it was little
    for _ in range(2):
        await shop.run(rollout, MUCH)
    (fork,) = await shop.fork(point["id"])
    assert (await values(shop, fork), await shop.digest(fork)) == expected
    assert await inside(shop, fork, "select count(*) from megamcp.log") < 10  # it never had what the rollout did
    await shop.roll_back(rollout, point["id"])
    assert (await values(shop, rollout), await shop.digest(rollout)) == expected
    assert await name_of(shop, rollout) != name


async def test_much_is_undone_where_the_disk_has_no_room_for_a_copy(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = await big(shop)
    point = await shop.checkpoint(rollout)
    expected, name = (await values(shop, rollout), await shop.digest(rollout)), await name_of(shop, rollout)
    for _ in range(3):
        await shop.run(rollout, MUCH)
    monkeypatch.setattr(shop.services.settings, "disk_reserve", 1 << 60)
    await shop.roll_back(rollout, point["id"])
    assert (await values(shop, rollout), await shop.digest(rollout)) == expected
    assert await name_of(shop, rollout) == name


async def test_what_a_copy_of_before_does_not_lead_to_is_undone_however_much_it_is(shop: Shop) -> None:
    rollout = await big(shop)
    await shop.run(rollout, "create table mode (m text primary key)")
    await shop.run(rollout, "create function allowed() returns bool language sql return (select m = 'x' from mode)")
    await shop.run(rollout, "create table strict (s int primary key check (allowed()))")
    await shop.run(rollout, "insert into mode values ('x')")
    await shop.checkpoint(rollout)
    await shop.run(rollout, "insert into strict values (1)")
    await shop.run(rollout, "update mode set m = 'y'")  # from here on, the row before would not be taken
    point = await shop.checkpoint(rollout)
    expected = await values(shop, rollout), await shop.digest(rollout)
    for _ in range(2):
        await shop.run(rollout, MUCH)
    (fork,) = await shop.fork(point["id"])
    await shop.roll_back(rollout, point["id"])
    for one in (fork, rollout):
        assert (await values(shop, one), await shop.digest(one)) == expected
        assert await shop.read(one, "select s from strict") == [[1]]


async def test_what_stands_on_a_copy_that_somebody_dropped_is_undone_or_told_as_lost(shop: Shop) -> None:
    rollout = await big(shop)
    sealed = await shop.checkpoint(rollout)  # DDL lies before it, so it is a copy
    await shop.run(rollout, CHANGE)
    point = await shop.checkpoint(rollout)
    expected = await values(shop, rollout), await shop.digest(rollout)
    for _ in range(2):
        await shop.run(rollout, MUCH)
    copy = await shop.services.store.value("select sealed from megamcp.snapshots where checkpoint = $1", point["id"])
    await shop.services.databases.clusters.opened[0].drop(copy, copy)
    (fork,) = await shop.fork(point["id"])
    await shop.roll_back(rollout, point["id"])
    for one in (fork, rollout):
        assert (await values(shop, one), await shop.digest(one)) == expected
    await shop.run(rollout, "truncate big")
    (fork,) = await shop.fork(sealed["id"])
    with pytest.raises(Gone) as lost:
        await values(shop, fork)
    assert lost.value.code == "state_lost"
