"""Unique keys of every form, checked at once or late, beside plain tables."""

from collections.abc import Callable

import pytest

from tests.integration.overlay.twins import Twins


@pytest.mark.support("UNIQUE: partial, INCLUDE, NULLS NOT DISTINCT", "exact")
async def test_a_partial_key_counts_rows_that_meet_its_predicate(world):
    twins = await Twins.make(
        world,
        "create table t (id int primary key, name text, live bool, n int);"
        "create unique index t_live on t (name) include (n) where live;"
        "create unique index t_n on t (n, name) nulls not distinct where n is null or n > 5;",
        "insert into t values (1, 'a', true, 1), (2, 'a', false, 1), (3, 'b', false, null)",
    )
    await twins.call("insert into t values (4, 'a', false, 1)", "insert into t values (5, 'a', true, 1)")
    await twins.call("update t set live = true where id = 2", "update t set live = true where id = 3")
    await twins.call("update t set live = false where id = 1", "update t set live = true where id = 2")
    await twins.call("insert into t values (6, 'b', null, null)", "insert into t values (7, 'c', null, null)")
    await twins.call("update t set n = 6, name = 'z'", "update t set n = 6 where id < 3")
    await twins.rollout.checkpoint()
    await twins.call("insert into t values (8, 'a', true, 3)", "delete from t where live")
    await twins.call("insert into t values (8, 'a', true, 3)", "update t set n = null, name = 'b' where id = 1")


@pytest.mark.support("UNIQUE: on expressions", "exact")
async def test_a_key_over_expressions_counts_what_they_give(world):
    twins = await Twins.make(
        world,
        "create function plain(t text) returns text language sql immutable return lower(replace(t, ' ', ''));"
        "create table t (id int primary key, a text, b int, c int, at timestamptz);"
        "create unique index on t (plain(a));"
        "create unique index t_sum on t ((b + c), lower(a) text_pattern_ops);"
        "create unique index t_share on t ((10 / b)) where b is distinct from 7;",
        "insert into t values (1, 'A b', 1, 2), (2, null, 2, 2)",
    )
    await twins.call("insert into t values (3, 'aB', 5, 5)", "insert into t values (3, null, 3, 1)")
    await twins.call("insert into t values (4, 'x', 0, 1)", "insert into t values (4, 'x', 7, 0)")
    await twins.call("update t set a = 'a B' where id = 1", "update t set a = 'AB' where id = 4")
    await twins.call("update t set b = 1 where id = 2", "update t set b = 10 where id = 3 returning *")
    await twins.rollout.checkpoint()
    await twins.call("insert into t values (9, 'ab', 9, 9)", "delete from t where id = 1")
    await twins.call("insert into t values (9, 'ab', 10, 10)", "insert into t values (9, 'ab', -9, 9)")


async def test_a_key_with_an_operator_class_whose_equality_is_the_same(world):
    twins = await Twins.make(
        world,
        "create table t (id int primary key, a text, b varchar(9), c char(4));"
        "create unique index on t (a text_pattern_ops); create unique index on t (b varchar_pattern_ops desc);"
        'create unique index on t (c bpchar_pattern_ops); create unique index on t (a collate "C", b);',
        "insert into t values (1, 'a', 'b', 'c')",
    )
    await twins.call("insert into t values (2, 'a', 'x', 'x')", "insert into t values (2, 'x', 'b', 'x')")
    await twins.call("insert into t values (2, 'x', 'x', 'c ')", "insert into t values (2, 'x', 'x', 'x')")


LATE = """
create table t (
  id int primary key deferrable, a int unique deferrable initially deferred, b int, c text,
  constraint t_b unique (b) deferrable initially immediate
);
"""


@pytest.mark.support("PRIMARY KEY and UNIQUE: DEFERRABLE, INITIALLY IMMEDIATE or DEFERRED", "exact")
async def test_a_deferrable_key_is_checked_at_the_end_of_the_statement(world):
    twins = await Twins.make(world, LATE, "insert into t select i, i, i, 'x' from generate_series(1, 5) i")
    await twins.call("update t set id = id + 1", "update t set b = b + 1, c = 'y' returning id, b")
    await twins.call("update t set id = 3 where id = 2", "insert into t values (9, 9, 9), (9, 10, 10)")
    await twins.call("update t set b = 6 - b", "update t set b = 2 where id = 6", "delete from t where id = 3")
    await twins.rollout.checkpoint()
    await twins.call("update t set id = id + 1", "insert into t values (4, 100, 100)", "insert into t values (5, 101)")
    await twins.call("insert into t values (null, 1, 1)", "update t set id = null where b = 1")


async def test_a_deferred_key_is_checked_at_commit(world):
    twins = await Twins.make(world, LATE, "insert into t select i, i, i, 'x' from generate_series(1, 5) i")
    seen = await twins.call("update t set a = 2 where id = 1", "update t set c = 'y' where id = 1")
    assert (seen[-1].sqlstate, seen[-1].constraint) == ("23505", "t_a_key")
    await twins.call("update t set a = 2 where id = 1", "update t set a = 1 where id = 2")
    await twins.call("update t set a = 2 where id = 2", "delete from t where id = 1")
    await twins.call("insert into t values (7, 3, 7)", "insert into t values (8, 3, 8)", "delete from t where a = 3")
    seen = await twins.call("insert into t values (7, 4, 7)", "update t set b = 2 where id = 7")
    assert seen[1].sqlstate == "23505"


@pytest.mark.support("SET CONSTRAINTS name, …", "exact")
async def test_set_constraints_moves_the_check(world):
    twins = await Twins.make(world, LATE, "insert into t select i, i, i, 'x' from generate_series(1, 5) i")
    await twins.call(
        "set constraints t_a_key immediate", "update t set a = 2 where id = 1", "set constraints t_a_key deferred",
        "update t set a = 2 where id = 1", "set constraints t_a_key immediate", "update t set a = 9 where id = 1",
        "set constraints t_a_key immediate", "update t set a = 3 where id = 1",
    )  # fmt: skip
    seen = await twins.call(
        "set constraints t_pkey, t_b deferred", "insert into t values (1, 20, 20)", "insert into t values (20, 21, 2)",
        "update t set id = 30 where a = 20", "set constraints t_pkey immediate", "update t set id = 2 where id = 1",
    )  # fmt: skip
    assert (seen[-1].sqlstate, seen[-1].constraint) == ("23505", "t_b")
    await twins.call("insert into t values (1, 20, 20)", "set constraints nothing deferred")


async def test_rows_of_a_table_with_a_late_key_are_told_apart(world):
    twins = await Twins.make(
        world,
        "create table t (id int primary key deferrable initially deferred, n int, note text);"
        "create table u (n int unique deferrable initially deferred);",
        "insert into t values (1, 1), (2, 2)",
    )
    await twins.call(
        "insert into t values (1, 1)", "insert into t values (1, 1, 'a')", "update t set n = n + 1 where id = 1",
        "update t set id = id + 10 where note = 'a'", "delete from t where id = 1", "select * from t order by id, n",
        "insert into t values (1, 5)",
    )  # fmt: skip
    await twins.call("insert into u values (1), (1), (2)", "update u set n = n + 1", "delete from u where n = 2")


FOREIGN = """
create table a (id int primary key, b int);
create table b (id int primary key, a int references a deferrable initially deferred);
alter table a add constraint a_b foreign key (b) references b deferrable initially deferred;
create table c (id int primary key, a int constraint c_a references a on delete cascade on update cascade deferrable);
create table d (id int primary key, a int constraint d_a references a on delete restrict deferrable initially deferred);
create table e (id int primary key, up int references e on delete set null deferrable initially deferred);
"""


@pytest.mark.support("FOREIGN KEY: DEFERRABLE, INITIALLY IMMEDIATE or DEFERRED, cycles", "exact")
async def test_a_cycle_of_deferred_foreign_keys_is_seeded_and_checked_at_commit(world):
    twins = await Twins.make(world, FOREIGN, "insert into a values (1, 1), (2, 1); insert into b values (1, 2);")
    await twins.call("insert into a values (3, 3)", "insert into b values (3, 3)")
    seen = await twins.call("insert into a values (4, 4)")
    assert (seen[-1].sqlstate, seen[-1].constraint) == ("23503", "a_b")
    seen = await twins.call("delete from a where id = 2", "select count(*) from a")
    assert seen[-1].sqlstate == "23503"
    await twins.call("delete from a where id = 2", "delete from b where id = 1", "update a set b = null where b = 1")
    await twins.call("insert into b values (9, 9)", "update b set a = 8", "insert into a values (8)")
    await twins.call("insert into b values (10, 10)", "delete from b where id = 10")


async def test_actions_of_deferrable_foreign_keys_are_not_put_off(world):
    twins = await Twins.make(
        world,
        FOREIGN,
        "insert into a values (1), (2), (3); insert into c values (1, 1), (2, 2); insert into d values (1, 3);"
        "insert into e values (1, 2), (2, 1)",
    )
    await twins.call("delete from a where id = 1", "update a set id = 20 where id = 2", "delete from a where id = 3")
    await twins.call("insert into c values (5, 5)", "set constraints c_a deferred", "insert into c values (5, 5)")
    await twins.call("set constraints c_a deferred", "insert into c values (5, 5)", "insert into a values (5)")
    await twins.call("delete from e where id = 1", "insert into e values (5, 6), (6, 5)", "delete from e where id = 6")
    await twins.call("insert into d values (7, 7)", "set constraints d_a immediate", "insert into a values (7)")


async def test_late_checks_of_a_row_come_in_the_order_of_postgresql_s_triggers(world):
    twins = await Twins.make(
        world,
        "create table p (id int primary key);"
        "create table t (id int primary key deferrable, u int unique deferrable, p int references p);",
        "insert into p values (1); insert into t values (1, 1, 1)",
    )
    seen = await twins.call("insert into t values (2, 1, 9)", "insert into t values (1, 1, 9)")
    assert [one.constraint for one in seen[:2]] == ["t_p_fkey", "t_pkey"]
    await twins.call("update t set u = 1, p = 9", "insert into t values (3, 1, 1), (4, 5, 9)")


@pytest.mark.support("FOREIGN KEY: MATCH FULL", "exact")
async def test_match_full_takes_all_or_nothing(world):
    twins = await Twins.make(
        world,
        "create table p (a int, b int, primary key (a, b));"
        "create table f (id int primary key, a int, b int, foreign key (a, b) references p match full"
        "  on update cascade on delete set null);"
        "create table g (a int, b int, foreign key (b, a) references p (b, a) match full on delete set null (a)"
        "  deferrable initially deferred);"
        "create table h (a int references p2 match full);".replace("references p2", "references f"),
        "insert into p values (1, 1), (2, 2); insert into f values (1, 1, 1), (2, null, null)",
    )
    await twins.call("insert into f values (3, 1, null)", "insert into f values (3, null, 1), (4, null, null)")
    await twins.call("insert into f values (3, 1, 2)", "insert into f values (3, 2, 2)", "update f set a = null")
    await twins.call("update p set a = 5 where a = 1", "delete from p where a = 2", "update f set a = null, b = null")
    await twins.call("insert into g values (1, null)", "update g set a = null")
    seen = await twins.call("insert into g values (1, null)")
    assert seen[-1].detail == "MATCH FULL does not allow mixing of null and nonnull key values."
    await twins.call("insert into g values (5, 1)")
    await twins.call("delete from p")
    await twins.call("insert into h values (null), (9)", "insert into h values (null), (1)")


def test_on_conflict_takes_every_form_of_key(compare: Callable[..., None]) -> None:
    ddl = (
        "create table t (id int primary key, name text, live bool default true, n int, hits int default 0);"
        "create unique index t_live on t (name) where live; create unique index t_low on t (lower(name), n);"
        "create table bag (name text unique, n int unique nulls not distinct, note text default 'x');"
        "create table late (id int primary key deferrable, code text unique, n int);"
    )
    compare(
        ddl,
        ["t", "bag", "late"],
        ["insert into t values (1, 'a', true, 1), (2, 'a', false, 2)", "insert into bag values ('a', 1), (null, null)"],
        [
            "insert into t values (3, 'a') on conflict (name) where live do nothing returning id",
            "insert into t values (3, 'b'), (4, 'a') on conflict (name) where live do update set hits = t.hits + 1"
            " returning *",
            "insert into t values (5, 'A', false, 1), (6, 'A', false, 3) on conflict (lower(name), n) do update"
            " set hits = t.hits + 10, n = 9 returning id, hits, n",
            "insert into t values (7, 'B', true, 3) on conflict do nothing",
            "insert into t values (7, 'b', false, 3) on conflict (name) do nothing",
            "insert into bag values ('a', 2), ('b', 1), ('c', 5) on conflict do nothing returning name",
            "insert into bag values ('a', 7), ('d', 8) on conflict (name) do update set note = excluded.n::text"
            " where bag.n < 5 returning *",
            "insert into bag values ('a', 7), ('a', 8) on conflict (name) do update set note = 'y'",
            "insert into bag values ('e', null) on conflict (n) do update set note = 'z', n = 77 returning *",
            "insert into bag values ('a', 1), ('a', 2) on conflict (name) do update set note = 'n' where false",
            "insert into late values (1, 'a', 1), (1, 'b', 2) on conflict (code) do nothing",
            "insert into late values (2, 'c', 1), (3, 'c', 2) on conflict (code) do nothing returning id",
            "insert into late values (4, 'c', 5) on conflict (code) do update set n = late.n + excluded.n returning *",
            "insert into late values (4, 'd', 5) on conflict (id) do nothing",
            "insert into late values (4, 'd', 5) on conflict do nothing",
        ],
    )
