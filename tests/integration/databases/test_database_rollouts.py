"""Rollouts on databases of their own: calls, checkpoints, forks, rollbacks, DDL, reading points."""

import asyncio
from datetime import timedelta

import pytest

from megamcp import store
from megamcp.errors import Conflict, Gone, NoCapacity, Unprocessable
from megamcp.handles import new_id
from tests.integration.databases.shop import Shop, SqlFailed

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def stock(shop: Shop, rollout: str, isbn: str = "978-0000007919") -> int:
    return int((await shop.read(rollout, f"select stock from books where isbn = '{isbn}'"))[0][0])


async def test_a_rollout_reads_and_writes_a_database_of_its_own(shop: Shop) -> None:
    one, two = await shop.open(2)
    assert (await shop.run(one, "update books set stock = 77 where isbn = '978-0000007919' returning stock")) == [[77]]
    assert await stock(shop, one) == 77
    assert await stock(shop, two) == 13


async def test_a_fork_starts_where_the_checkpoint_stands(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "update books set stock = 1")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "update books set stock = 2")
    forks = await shop.fork(point["id"], 2)
    assert [await stock(shop, fork) for fork in forks] == [1, 1]
    await shop.run(forks[0], "update books set stock = 3")
    assert [await stock(shop, r) for r in (rollout, *forks)] == [2, 3, 1]


async def test_a_fork_that_meets_the_release_of_its_checkpoint_has_what_that_had(shop: Shop) -> None:
    rollout, services = await shop.one(), shop.services
    await shop.run(rollout, "update books set stock = 1")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "update books set stock = 2")
    await shop.checkpoint(rollout)
    fork = new_id("ro")
    async with services.store.transaction() as connection:  # a fork that has not committed yet
        values = ([fork], point["id"], new_id("gr"), [None], {}, timedelta(minutes=5), None, None)
        await connection.fetch(store.FORK, *values)
        await services.rollouts.release_checkpoint(point["id"])
        await services.keeper.once()
    assert await stock(shop, fork) == 1


async def test_a_rollback_restores_rows_and_sequences(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "insert into customers (name, email) values ('A', 'a@x') returning customer_id")
    point = await shop.checkpoint(rollout)
    first = await shop.run(rollout, "insert into customers (name, email) values ('B', 'b@x') returning customer_id")
    await shop.run(rollout, "delete from order_lines")
    await shop.roll_back(rollout, point["id"])
    assert (await shop.read(rollout, "select count(*) from order_lines"))[0][0] > 0
    again = await shop.run(rollout, "insert into customers (name, email) values ('C', 'c@x') returning customer_id")
    assert again == first


async def test_a_rollback_over_ddl_gives_the_old_table_back(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "update books set stock = 5")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "alter table books drop column stock")
    await shop.run(rollout, "create table notes (id int primary key, body text)")
    await shop.run(rollout, "insert into notes values (1, 'x')")
    later = await shop.checkpoint(rollout)
    await shop.run(rollout, "insert into notes values (2, 'y')")
    await shop.roll_back(rollout, point["id"])
    assert await stock(shop, rollout) == 5
    with pytest.raises(SqlFailed, match="42P01"):
        await shop.read(rollout, "select * from notes")
    fork = (await shop.fork(later["id"]))[0]
    assert await shop.read(fork, "select id from notes") == [[1]]


async def test_a_checkpoint_after_one_that_was_cut_off_behind_ddl_can_be_come_back_to(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "create table kept (n integer primary key)")
    place = await shop.services.databases.settled(rollout, (await shop.services.environments.find("sql")).server("sql"))
    assert place is not None
    async with (await shop.services.databases.clusters.named(place["cluster"])).inside(place["name"]) as inside:
        await inside.mark()  # as the gateway does that dies before it publishes the checkpoint
    await shop.run(rollout, "insert into kept values (1)")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "drop table kept")
    await shop.roll_back(rollout, point["id"])
    assert await shop.read(rollout, "select n from kept") == [[1]]


async def test_a_checkpoint_before_truncate_can_be_forked_after_it(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "update order_lines set quantity = 9")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "truncate order_lines")
    fork = (await shop.fork(point["id"]))[0]
    assert await shop.read(fork, "select distinct quantity from order_lines") == [[9]]
    assert await shop.read(rollout, "select count(*) from order_lines") == [[0]]


async def test_equal_states_have_equal_digests(shop: Shop) -> None:
    one, two = await shop.open(2)
    empty = await shop.digest(one)
    assert empty == await shop.digest(two) == await shop.digest(one, "base")
    await shop.run(one, "update books set stock = stock + 1")
    changed = await shop.digest(one)
    assert changed != empty
    await shop.run(two, "update books set stock = stock + 1 where isbn < '978-05'")
    await shop.run(two, "update books set stock = stock + 1 where isbn >= '978-05'")
    assert await shop.digest(two) == changed
    point = await shop.checkpoint(one)
    assert point["digest"] == changed
    await shop.run(one, "update books set stock = stock - 1")
    assert await shop.digest(one) == empty


async def test_states_of_another_shape_have_other_digests_and_taking_it_back_gives_the_old_one(shop: Shop) -> None:
    rollout = await shop.one()
    before = await shop.digest(rollout)
    await shop.run(rollout, "alter table books add constraint few check (stock < 10000)")
    point = await shop.checkpoint(rollout)
    changed = await shop.digest(rollout)
    assert changed != before
    fork = (await shop.fork(point["id"]))[0]
    assert await shop.digest(fork) == await shop.digest(rollout, point["id"]) == changed
    await shop.run(rollout, "alter table books drop constraint few")
    assert await shop.digest(rollout) == before


async def test_a_diff_shows_rows_by_table(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "update books set stock = 99 where isbn = '978-0000007919'")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "insert into authors (name) values ('New')")
    found = await shop.diff(rollout, "base", "head")
    assert set(found) == {"public.books", "public.authors"} or set(found) == {"books", "authors"}
    later = await shop.diff(rollout, point["id"], "head")
    assert [table.total for table in later.values()] == [1]


async def test_evaluators_read_any_point(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "update books set stock = 1")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "update books set stock = 2")
    question = "select distinct stock from books"
    assert await shop.query(rollout, question) == [[2]]
    assert await shop.query(rollout, question, point["id"]) == [[1]]
    assert len(await shop.query(rollout, question, "base")) > 10


async def test_a_repeated_call_has_one_effect(shop: Shop) -> None:
    rollout = await shop.one()
    sql = "update books set stock = stock + 1 where isbn = '978-0000007919' returning stock"
    assert await shop.run(rollout, sql, "key") == await shop.run(rollout, sql, "key") == [[14]]
    assert await stock(shop, rollout) == 14


async def test_calls_are_in_the_journal_in_order(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "update books set stock = 1")
    await shop.checkpoint(rollout)
    await shop.read(rollout, "select 1")
    assert [row["kind"] for row in await shop.journal(rollout)] == ["open", "call", "checkpoint", "call"]


async def test_a_call_in_flight_over_a_rollback_ends_in_an_error(shop: Shop) -> None:
    rollout = await shop.one()
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "update books set stock = 1")
    slow = asyncio.create_task(shop.run(rollout, "update books set stock = 2 where pg_sleep(0.01) is not null"))
    await asyncio.sleep(0.3)
    await shop.roll_back(rollout, point["id"])
    with pytest.raises((Conflict, SqlFailed)):
        await slow
    assert await stock(shop, rollout) == 13


async def test_a_released_rollout_takes_no_calls(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "select 1")
    await shop.close(rollout)
    with pytest.raises(Gone):
        await shop.run(rollout, "select 1")


async def test_what_nothing_needs_is_dropped(shop: Shop) -> None:
    keeper = shop.services.keeper
    rollout = await shop.one()
    await shop.run(rollout, "select 1")
    name = await shop.services.store.value("select name from megamcp.databases where rollout = $1", rollout)
    await shop.close(rollout)
    for _ in range(3):
        await keeper.once()
    assert not await shop.services.store.value("select count(*) from megamcp.databases where name = $1", name)
    cluster = shop.services.databases.clusters.opened[0]
    assert name not in await cluster.names()


async def test_a_rollout_over_its_quota_can_only_go_back(shop: Shop) -> None:
    keeper, settings = shop.services.keeper, shop.services.settings
    rollout = await shop.one()
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "create table big as select repeat(md5(n::text), 20) from generate_series(1, 40000) n")
    await shop.services.store.value(
        "update megamcp.databases set created_at = '2000-01-01' where rollout = $1", rollout
    )
    before, settings.database_quota = settings.database_quota, 20 << 20
    try:
        await keeper.once()
    finally:
        settings.database_quota = before
    shop.services.databases.forget(rollout)
    with pytest.raises(NoCapacity, match="to itself"):
        await shop.run(rollout, "select 1")
    with pytest.raises(NoCapacity):
        await shop.checkpoint(rollout)
    await shop.roll_back(rollout, point["id"])
    assert await stock(shop, rollout) == 13


async def test_loading_what_is_loaded_already_gives_the_same_version(shop: Shop) -> None:
    environments = shop.services.environments
    before = await environments.find("sql")
    again = await environments.load(before.folder)
    assert (again.id, again.hash) == (before.id, before.hash)


async def test_an_evaluators_query_may_name_any_schema_and_only_reads(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "create schema annex create table note (body text)")
    await shop.run(rollout, "insert into annex.note values ('x')")
    assert await shop.query(rollout, "select body from annex.note") == [["x"]]
    for sql in (
        "delete from annex.note",
        "select 1; select 2",
        "with gone as (delete from annex.note returning 1) table gone",
    ):
        with pytest.raises(Unprocessable):
            await shop.query(rollout, sql)
    assert await shop.query(rollout, "select count(*) from annex.note") == [[1]]
