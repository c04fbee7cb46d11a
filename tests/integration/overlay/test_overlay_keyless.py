"""Tables without a primary key: rows that look alike are counted, changed and deleted as on plain tables."""

import asyncpg
import pytest

from megamcp.state import schema, squash, tables
from tests.integration.overlay.twins import Twins

DDL = """
create table parent (id int primary key, code text unique);
create table log (
  n int, word text, amount numeric, doc json, at timestamptz default now(), p int references parent on delete cascade
  on update cascade
);
create table points (at point, x int default 1, tags text[]);
create table named (name text unique not null, other int unique, note text);
create table maybe (name text unique, note text);
"""
SEED = """
insert into parent values (1, 'a'), (2, 'b'), (3, 'c');
insert into log (n, word, amount, doc, p) values
  (1, 'x', 1.0, '{"a":1}', 1), (1, 'x', 1.0, '{"a":1}', 1), (1, 'x', 1.00, '{"a":1}', 1), (2, null, null, null, null),
  (2, null, null, null, null), (3, 'y', 0, '1', 2);
insert into points values ('(1,1)', 1, '{a}'), ('(1,1)', 1, '{a}'), (null, null, null);
insert into named values ('a', 1, 'x'), ('b', null, 'y');
insert into maybe values (null, 'x'), (null, 'x'), ('a', 'y');
"""


@pytest.fixture
async def twins(world):
    return await Twins.make(world, DDL, SEED)


@pytest.mark.support("tables without a primary key", "exact")
async def test_rows_that_look_alike_are_written_one_by_one(twins):
    await twins.call("update log set n = n + 1", "update log set n = n + 1 where word = 'x' returning n, word, amount")
    await twins.call("insert into log (n) values (4), (4), (4)", "delete from log where n = 4 returning n")
    await twins.rollout.checkpoint()
    await twins.call("update log set word = 'x', amount = 1.0, doc = '1'", "update log set amount = 1.00 where n = 3")
    await twins.call("delete from log where amount = 1.00", "insert into log select * from log", "delete from log")
    await twins.call("insert into log (n) values (1), (1)", "update log set n = 2", "update log set n = n + 1")


async def test_a_row_that_comes_to_look_like_one_to_be_changed_is_changed_once(twins):
    await twins.call("delete from log", "insert into log (n) values (1), (2), (2), (3)", "update log set n = n + 1")
    await twins.call("update log set n = 5 - n", "update log set n = case when n = 1 then 2 else n end returning n")


async def test_several_matches_touch_a_row_once(twins):
    await twins.call(
        "update log set word = 'z' from (values (1), (2), (3)) v where log.n = 1",
        "delete from log using (values (1), (2)) v where log.n = 2 returning log.n",
        "delete from points using (values (1), (2)) v",
    )
    await twins.call(
        "merge into log using (values (1, 'm')) s (n, w) on log.n = s.n when matched then update set word = s.w",
        "merge into log using (values (1, 'm'), (1, 'k')) s (n, w) on log.n = s.n when matched then delete",
        "merge into log using (values (3, 'm'), (9, 'k')) s (n, w) on log.n = s.n "
        "when matched then delete when not matched then insert (n, word) values (s.n, s.w)",
    )


async def test_foreign_keys_of_rows_that_look_alike_cascade_over_all(twins):
    await twins.call("update parent set id = 10 where id = 1", "insert into log (p) values (7)", "update log set p = 3")
    await twins.call(
        "insert into log (p) values (3), (3)", "delete from parent where id = 3", "select count(*) from log"
    )


async def test_types_without_a_hash_are_compared_all_the_same(twins):
    await twins.call("update points set x = 2 where tags = '{a}'", "update points set tags = tags || 'b'")
    await twins.call("delete from points where x = 2", "insert into points default values", "delete from points")


async def test_a_unique_key_of_columns_that_are_never_null_tells_rows_apart(twins, world):
    info = {table.name: table for table in twins.rollout.state.tables}
    assert info["named"].primary == ("name",)
    assert info["maybe"].keyless
    await twins.call("update named set name = name || 'x', note = 'z'", "insert into named values ('ax')")
    await twins.call("insert into named values ('n', 1)", "update named set other = 1", "delete from named")
    await twins.call("update maybe set name = 'a' where note = 'x'", "update maybe set note = 'z' where name is null")
    await twins.call("insert into maybe values ('a')", "update maybe set name = null", "delete from maybe")


async def test_the_hidden_column_shows_nowhere(twins):
    (columns,) = await twins.rollout.read(
        "select string_agg(column_name, ',' order by ordinal_position) from information_schema.columns "
        "where table_name = 'points' and table_schema like 'v!_%' escape '!'"
    )
    assert columns == ("at,x,tags",)
    for sql in ("select _mm_row from points", "update points set _mm_row = 1", "select points._mm_row from points"):
        with pytest.raises(asyncpg.UndefinedColumnError):
            await twins.rollout.run(sql)
    assert await twins.rollout.read("select row_to_json(p)::text from points p where x is null") == [
        ('{"at":null,"x":null,"tags":null}',)
    ]


async def test_digest_and_diff_count_rows_and_leave_the_hidden_column_out(world, twins):
    rollout, state = twins.rollout, twins.rollout.state

    async def digest(chain):
        return await schema.digest(world.control, state, chain)

    empty = await rollout.checkpoint()
    await rollout.run("delete from log where n = 1")
    assert await digest([*empty, rollout.head]) != 0
    await rollout.run(
        "insert into log (n, word, amount, doc, p) values (1, 'x', 1.0, '{\"a\":1}', 1), "
        "(1, 'x', 1.00, '{\"a\":1}', 1), (1, 'x', 1.0, '{\"a\":1}', 1)"
    )
    undone = await rollout.checkpoint()
    assert await digest(undone) == 0
    assert await schema.diff(world.control, state, empty, undone, 10) == {}
    await rollout.run("update log set n = 5 where word is null")
    await rollout.run("insert into log (n) values (6), (6)")
    changed = await rollout.checkpoint()
    found = (await schema.diff(world.control, state, empty, changed, 10))["log"]
    assert sorted(row["n"] for row in found.added) == [5, 5, 6, 6]
    assert [row["n"] for row in found.removed] == [2, 2]
    assert (found.changed, found.total, found.truncated) == ((), 6, False)
    assert "_mm_row" not in found.added[0]
    cut = (await schema.diff(world.control, state, empty, changed, 3))["log"]
    assert (len(cut.added) + len(cut.removed), cut.total, cut.truncated) == (3, 6, True)
    again = await schema.diff(world.control, state, changed, empty, 10)
    assert (len(again["log"].added), len(again["log"].removed)) == (2, 4)


async def test_a_delta_never_looks_empty_to_the_planner(world, twins):
    for table in ("log", "points", "named"):
        held = f'select count(*) from {twins.rollout.state.hidden_schema}."{table}~delta" where _mm_layer < 0'
        assert await world.control.fetchval(held) == tables.BALLAST


async def test_forks_write_their_own_rows(world, twins):
    first = twins.rollout
    point = await first.checkpoint()
    second = await first.fork(point)
    await first.run("delete from maybe where name is null")
    await second.run("update maybe set note = 'two' where name is null")
    assert await first.read("select count(*) from maybe") == [(1,)]
    assert await second.read("select name, note from maybe order by note") == [(None, "two"), (None, "two"), ("a", "y")]


async def test_squashed_layers_show_the_same_rows_and_can_be_written_on(world, twins):
    rollout = twins.rollout
    for sql in ("update maybe set note = 'two' where name is null", "delete from maybe where name = 'a'"):
        await twins.call(sql, "insert into maybe values (null, 'x'), (null, 'x')", "update log set n = n + 1")
        await rollout.checkpoint()
    await twins.call("delete from log where n > 3")
    chain = await rollout.checkpoint()
    into = await world.control.fetchval("select nextval('megamcp.layer_seq')")
    assert await squash.build(world.control, rollout.state, chain, into)
    digest = await schema.digest(world.control, rollout.state, chain)
    rollout.chain, rollout.head = [into], await world.control.fetchval("select nextval('megamcp.layer_seq')")
    await twins.compare_rows()
    assert await schema.digest(world.control, rollout.state, [into]) == digest
    assert await schema.diff(world.control, rollout.state, chain, [into], 10) == {}
    await twins.call("update maybe set note = note || '!'", "delete from log where n = 2", "update log set word = 'w'")


@pytest.mark.parametrize(
    "action",
    [
        "when matched then update set u = s.u",
        "when matched and s.u = 7 then delete when matched then update set u = s.u",
        "when matched and s.u = 2 then delete when matched then update set u = s.u",
    ],
)
@pytest.mark.parametrize("rows", ["(1, 7), (1, 2)", "(1, 2), (1, 7)", "(1, 1), (1, 2)"])
@pytest.mark.parametrize("key", ["u int unique, id int", "u int unique, id int primary key"])
async def test_a_merge_tells_of_a_row_met_twice_or_of_a_clash_by_which_comes_first(world, key, rows, action):
    """Two source rows meet row 1, one of them brings a value that row 2 has. A hash join would choose the order."""
    twins = await Twins.make(world, f"create table t ({key})", "insert into t (u, id) values (1, 1), (2, 2), (3, 3)")
    merge = f"merge into t using (values {rows}) s(id, u) on t.id = s.id {action}"
    await twins.call("set local enable_hashjoin = off", "set local enable_mergejoin = off", merge)
