"""Sources, clones and their way back."""

import asyncio
from decimal import Decimal
from typing import Any

import asyncpg
import pytest

from megamcp.errors import Conflict, DeadlineExceeded, NotFound, Unprocessable
from megamcp.state.clones import Cluster
from tests.integration.clones.conftest import KEYS, World, content

SHOP = """
create table item (id serial primary key, name text not null, price numeric(10, 2), tag text[]);
create table line (id int generated always as identity primary key, item int not null references item on delete cascade,
    quantity int check (quantity > 0), double int generated always as (quantity * 2) stored);
create table note (body text, data json);
"""
SEED = """
insert into item (name, price) select 'item ' || n, n from generate_series(1, 50) n;
insert into line (item, quantity) select n, n from generate_series(1, 50) n;
insert into note values ('twice', '{"a": 1}'), ('twice', '{"a": 1}'), (null, null);
"""
TABLES = ("item", "line", "note")


async def test_a_clone_has_the_rows_of_its_source_and_its_changes_stay_its_own(world: World) -> None:
    source = await world.source(SHOP, SEED)
    a, b = await world.clone(source), await world.clone(source)
    await a.user.execute("delete from item where id < 10; insert into note values ('a', '1')")
    assert await b.user.fetchval("select count(*) from item") == 50
    assert await a.user.fetchval("select count(*) from line") == 41
    c = await world.clone(source)
    assert await content(c.user, TABLES) == await content(b.user, TABLES)


async def test_rewind_restores_rows_and_sequences(world: World) -> None:
    shop = await world.start(SHOP, SEED)
    before, mark = await content(shop.user, TABLES), await shop.mark()
    await shop.user.execute(
        "update item set price = price + 1, tag = '{x,\"y z\"}'; delete from item where id % 3 = 0;"
        "insert into item (name) values ('new'); insert into line (item, quantity) values (1, 7);"
        "delete from note where ctid = '(0,1)'; update note set body = 'x' where body is null"
    )
    after = await content(shop.user, TABLES)
    later = await shop.mark()
    await shop.rewind(mark.position)
    assert await content(shop.user, TABLES) == before
    async with shop.hold() as inside:
        assert (await inside.mark()).digest == mark.digest == await inside.digest()
        assert await inside.sequences() == {"item_id_seq": 50, "line_id_seq": 50}
    assert await shop.user.fetchval("insert into item (name) values ('again') returning id") == 51
    await shop.rewind(later.position)  # no position is ever lost
    assert await content(shop.user, TABLES) == after
    async with shop.hold() as inside:
        assert (await inside.mark()).digest == later.digest == await inside.digest()


async def test_a_fork_at_an_earlier_mark_is_a_clone_that_is_rewound(world: World) -> None:
    shop = await world.start(SHOP, SEED)
    before, mark = await content(shop.user, TABLES), await shop.mark()
    await shop.user.execute("update item set name = 'x'")
    fork = await world.clone(shop.name)
    await fork.rewind(mark.position)
    assert await content(fork.user, TABLES) == before
    again = await shop.connect()  # its sessions were ended to copy it; it takes new ones
    assert await again.fetchval("select count(*) from item where name = 'x'") == 50
    await again.close()


async def test_ddl_and_truncate_make_earlier_marks_unreachable(world: World) -> None:
    for statement in ("alter table item add column extra int", "truncate note", "create index on item (name)"):
        shop = await world.start(SHOP, SEED)
        mark = await shop.mark()
        assert mark.digest is not None
        await shop.user.execute(statement)
        later = await shop.mark()
        assert (later.exact, later.written, later.digest) == (False, True, None)
        async with shop.hold() as inside:
            assert not await inside.reachable(mark.position)
            assert await inside.reachable(later.position)
            with pytest.raises(Conflict) as refused:
                await inside.rewind(mark.position)
            assert refused.value.code == "not_reachable"
            assert await inside.changes(mark.position, later.position, 10) is None


async def test_redo_brings_a_sealed_copy_to_a_later_mark(world: World) -> None:
    shop = await world.start(SHOP, SEED)
    await shop.user.execute("alter table note add column n int")
    first = await shop.mark()
    sealed = await world.sealed(shop.name)
    shop.user = await shop.connect()
    await shop.user.execute(
        "update note set n = 5; delete from item where id = 1; insert into item (name) values ('z')"
    )
    wanted, second = await content(shop.user, TABLES), await shop.mark()
    await shop.user.execute("drop table note")  # from here on there's no way back to `second`
    copy = await world.clone(sealed)
    async with shop.hold() as source, copy.hold() as target:
        await target.redo(source, first.position, second.position)
    assert await content(copy.user, TABLES) == wanted
    assert await copy.user.fetchval("insert into item (name) values ('next') returning id") == 52
    await shop.user.close()


async def test_changes_are_net_and_by_key(world: World) -> None:
    shop = await world.start(SHOP, SEED)
    first = await shop.mark()
    await shop.user.execute("update item set price = 0.1000 where id = 2; update line set quantity = 9 where id = 1")
    await shop.user.execute("update line set quantity = 1 where id = 1; insert into item (name) values ('n')")
    second = await shop.mark()
    async with shop.hold() as inside:
        found: Any = await inside.changes(first.position, second.position, 10)
        assert list(found) == ["item"]
        assert [change.after["price"] for change in found["item"].changed] == [Decimal("0.10")]
        assert [row["name"] for row in found["item"].added] == ["n"]
        back: Any = await inside.changes(second.position, first.position, 1)
        assert (back["item"].total, back["item"].truncated) == (2, True)


async def test_a_mark_is_reused_where_nothing_happened(world: World) -> None:
    shop = await world.start(SHOP, SEED)
    first = await shop.mark()
    assert (await shop.mark()).position == first.position
    await shop.user.fetchval("select nextval('item_id_seq')")
    second = await shop.mark()
    assert (second.written, second.exact, second.position > first.position) == (True, True, True)
    assert second.digest == first.digest


async def test_an_environment_whose_sql_fails_leaves_nothing(cluster: Cluster) -> None:
    before = await cluster.names()
    with pytest.raises(Unprocessable) as refused:
        await cluster.build("mm_src_bad", ddl=SHOP, seeds=["select 1;\ninsert into item (price) values (1)"], keys=KEYS)
    assert refused.value.code == "environment_sql_failed"
    assert 'null value in column "name"' in refused.value.message
    with pytest.raises(Unprocessable) as refused:
        await cluster.build("mm_src_bad", ddl="create table a (x int);\ncreat table b ()", seeds=[], keys=KEYS)
    assert "line 2" in refused.value.message
    with pytest.raises(Unprocessable) as refused:
        await cluster.build("mm_src_bad", ddl="create unlogged table a (x int)", seeds=[], keys=KEYS)
    assert "UNLOGGED" in refused.value.message
    assert await cluster.names() == before
    await cluster.build("mm_src_bad", ddl="create table a (x int)", seeds=[], keys=KEYS)
    await cluster.drop("mm_src_bad")


async def test_clone_and_drop_say_what_is_wrong(world: World) -> None:
    shop = await world.start(SHOP)
    with pytest.raises(NotFound):
        await world.cluster.clone("mm_src_none", "mm_db_none", login="mm_db_none_u")
    with pytest.raises(Conflict):
        await world.cluster.clone(shop.name, shop.name, login="mm_db_none_u")
    await world.cluster.drop("mm_db_none", "mm_db_none_u")
    await world.cluster.drop(shop.name, shop.login)
    await world.cluster.drop(shop.name, shop.login)
    assert shop.name not in await world.cluster.names()


async def test_a_sealed_database_takes_nobody_in(world: World) -> None:
    shop = await world.start(SHOP)
    await world.cluster.seal(shop.name)
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError):
        await shop.connect()
    with pytest.raises(Conflict):
        await shop.mark()
    await world.cluster.unseal(shop.name)
    await (await shop.connect()).close()


async def test_hold_waits_for_a_clients_transaction_and_ends_it_when_patience_ends(world: World) -> None:
    shop = await world.start(SHOP, SEED)
    await shop.user.execute("select megamcp.enter('way in')")
    await shop.user.execute("begin; delete from note")
    with pytest.raises(DeadlineExceeded):
        async with shop.hold(patience_s=0.05):
            pass
    told: list[list[str]] = []

    async def busy(calls: list[str]) -> None:
        told.append(calls)

    async with shop.hold(patience_s=0.05, on_busy=busy) as inside:
        assert not (await inside.mark()).written
    assert told == [[]]
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, ConnectionError)):
        await shop.user.execute("commit")


async def test_clones_asked_for_at_once_are_all_made(world: World) -> None:
    source = await world.source(SHOP, SEED)
    made = await asyncio.gather(*(world.clone(source) for _ in range(4)))
    assert [await one.user.fetchval("select count(*) from item") for one in made] == [50] * 4
