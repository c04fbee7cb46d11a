"""Differences that the random search found between rollouts and plain tables, each as small as it gets.

A find is added with its schema, its base rows and its statements; both sides run it as `differential_run` does.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest

from megamcp.errors import UnsupportedSchema
from tests.integration.overlay.differential_database import Database
from tests.integration.overlay.differential_programs import Openness, Statement
from tests.integration.overlay.differential_run import Call, Checkpoint, Fork, Pair, Rollback, Step

Compare = Callable[[str, Sequence[str], Sequence[str], Sequence[Step]], None]


@pytest.fixture(scope="module")
def compare(postgres_dsn: str) -> Iterator[Compare]:
    """Runs steps on both sides: (DDL, tables, base rows, steps)."""
    with asyncio.Runner() as runner:
        database = runner.run(Database.create(postgres_dsn))
        made = 0

        def run(ddl: str, tables: Sequence[str], seeds: Sequence[str], steps: Sequence[Step]) -> None:
            nonlocal made
            made += 1
            pair = runner.run(Pair.load(database, f"found_{made}", ddl, tables, seeds))
            try:
                runner.run(pair.run(steps))
            finally:
                runner.run(pair.unload())
            assert not pair.report.refused, "a statement of this test is refused"

        yield run
        runner.run(database.drop())


def call(*statements: str, rollout: int = 0, openness: Openness = Openness.EXACT) -> Call:
    return Call(rollout, tuple(Statement(sql, openness) for sql in statements))


NODES = "create table node (id int primary key, name text, parent int references node (id){actions});"
NODE_ROWS = ["insert into node values (1, 'a', null), (2, 'b', 1), (3, 'c', 1), (4, 'd', 2), (5, 'e', 4)"]


@pytest.mark.parametrize("action", ["set null", "set default", "cascade", "no action", "restrict"])
def test_rows_that_come_to_refer_to_a_key_that_left_earlier_in_the_update(compare: Compare, action: str) -> None:
    """The event of a key that left is fired after the statement: it meets rows that referred to it only later."""
    ddl = NODES.format(actions=f" on update {action}")
    rows = ["insert into node values (1, 'a', null), (2, 'b', null), (3, 'c', 2), (4, 'd', 3)"]
    first = "update node set id = case id when 1 then 10 else id end, parent = case id when 1 then null else 1 end"
    second = "update node set id = case id when 4 then 40 else id end, parent = case id when 4 then null else 4 end"
    # The base is read in the order of its rows on both sides; rows of layers need not be.
    later = call(second, rollout=1, openness=Openness.EVENT_ORDER)
    compare(ddl, ["node"], rows, [call(first), Checkpoint(0), Fork(1), later])


@pytest.mark.parametrize("action", ["set null", "cascade", "no action", "restrict"])
def test_merge_that_deletes_a_row_and_then_points_another_at_it(compare: Compare, action: str) -> None:
    ddl = NODES.format(actions=f" on delete {action}")
    merge = (
        "merge into node using (values (1), (2), (3), (4), (5)) s(id) on node.id = s.id"
        " when matched and node.id = 1 then delete when matched then update set parent = 1"
    )
    compare(ddl, ["node"], NODE_ROWS, [call(merge, openness=Openness.EVENT_ORDER)])


def test_a_value_for_an_always_identity_or_generated_column_is_refused_by_an_update_of_no_row(
    compare: Compare,
) -> None:
    ddl = (
        "create table line (id int generated always as identity primary key, a int,"
        " twice int generated always as (a * 2) stored);"
    )
    statements = [
        "update line set id = 7 where false",
        "update line set twice = 7 where false",
        "update line set id = id",
        "update line set id = default, a = 3 where a = 1",
        "update line set twice = default, a = 4",
    ]
    compare(ddl, ["line"], ["insert into line (a) values (1), (2)"], [call(sql) for sql in statements])


def test_a_row_of_values_for_an_always_identity_column_is_refused(compare: Compare) -> None:
    ddl = "create table line (id int generated always as identity primary key, a int);"
    compare(
        ddl, ["line"], ["insert into line (a) values (1), (2)"], [call("update line set (id, a) = row(line.id, 3)")]
    )


def test_a_value_for_an_always_identity_or_generated_column_is_refused_beside_parameters(compare: Compare) -> None:
    ddl = (
        "create table line (id int generated always as identity primary key, a int,"
        " twice int generated always as (a * 2) stored);"
    )
    statements = [
        Statement("update line set id = $1::int where a = $2::int", arguments=(7, 1)),
        Statement("update line set a = $1::int, id = default where a in ($2::int, $1) returning id", arguments=(7, 1)),
        Statement("insert into line values ($1::int, 3)", arguments=(7,)),
        Statement("insert into line values (default, $1::int), (default, $2::int) returning *", arguments=(7, 8)),
        Statement("insert into line (twice) select $1::int where false", arguments=(7,)),
        Statement("insert into line (a, twice) values ($1, default) returning *", arguments=(7,)),
    ]
    compare(ddl, ["line"], ["insert into line (a) values (1), (2)"], [Call(0, tuple(statements))])


def test_setval_of_a_number_still_to_come_draws_none(compare: Compare) -> None:
    ddl = "create sequence counter; create table line (id int primary key);"
    statements = ["select setval('counter', 5, false)", "select currval('counter')", "select nextval('counter')"]
    compare(ddl, ["line"], [], [call(sql) for sql in statements[:1]] + [call(*statements)])


def test_a_failed_statement_gives_back_what_it_wrote_and_the_numbers_it_drew(compare: Compare) -> None:
    ddl = "create table line (id serial primary key, a int unique check (a > 0));"
    compare(
        ddl,
        ["line"],
        ["insert into line (a) values (1)"],
        [
            call("insert into line (a) values (2), (1)", "insert into line (a) values (3) returning id"),
            Checkpoint(0),
            call("insert into line (a) values (4), (-1)", "insert into line (a) values (5) returning id"),
            Rollback(0),
            call("insert into line (a) values (6) returning id"),
        ],
    )


def test_nulls_not_distinct_over_layers(compare: Compare) -> None:
    ddl = "create table line (id int primary key, a int, b text, unique nulls not distinct (a, b));"
    compare(
        ddl,
        ["line"],
        ["insert into line values (1, null, 'x'), (2, null, null)"],
        [
            call("insert into line values (3, null, 'x')"),
            call("update line set b = null where id = 1"),
            call("delete from line where id = 2", "update line set b = null where id = 1"),
            Checkpoint(0),
            call("insert into line values (4, null, null)", "insert into line values (5, null, 'x')"),
        ],
    )


def test_set_constraints_immediate_takes_what_is_immediate_anyway(compare: Compare) -> None:
    ddl = "create table line (id int primary key, a int constraint once unique, b int unique deferrable);"
    statements = [
        "set constraints once immediate",
        "set constraints once deferred",
        "set constraints line_pkey, line_b_key immediate",
        "set constraints line_b_key, once deferred",
        "set constraints nowhere immediate",
    ]
    compare(ddl, ["line"], [], [call(*statements)])


def test_a_composite_value_of_nulls_is_no_null(compare: Compare) -> None:
    ddl = """create type pair as (n int, word text);
    create table line (id int primary key, p pair not null, q pair unique, r pair);
    create table child (id int primary key, q pair references line (q) on update cascade on delete set null);"""
    statements = [
        "insert into line values (2, '(,)', '(,)', '(,)')",
        "insert into line values (3, null, '(1,)', '(,)')",
        "insert into line values (4, '(,)', '(,)', null)",
        "insert into child values (1, '(,)'), (2, '(1,)')",
        "insert into child values (1, '(,)')",
        "insert into line values (5, '(1,a)', '(,)', null) on conflict (q) do update set r = excluded.p",
        "insert into line values (6, '(1,a)', '(,)', null) on conflict do nothing",
        "update line set q = '(,a)' where id = 2",
        "delete from line where q = '(,a)' returning *",
        "insert into child values (9, '(,)')",
    ]
    compare(ddl, ["line", "child"], ["insert into line values (1, '(1,a)', '(1,a)', null)"], [call(*statements)])


def test_a_duplicate_is_told_with_the_names_quoted_that_have_to_be(compare: Compare) -> None:
    ddl = 'create table line ("order" int, "A b" int, plain int, "größe" int, unique ("order", "A b", plain, "größe"));'
    row = "insert into line values (1, 2, 3, 4)"
    compare(ddl, ["line"], [row], [call(row)])


def test_the_row_at_fault_is_told_without_its_virtual_columns(compare: Compare) -> None:
    ddl = "create table line (id int primary key, g int generated always as (id * 2) virtual, a int not null);"
    compare(ddl, ["line"], [], [call("insert into line values (1, default, null)")])


def test_on_conflict_sets_a_composite_column_to_a_row_that_names_its_type(compare: Compare) -> None:
    ddl = """create type pair as (n int, word varchar(3)); create type nested as (p pair, n int[]);
    create table line (id int primary key, p pair, q nested);"""
    insert = "insert into line values (1, '(1,b)') on conflict (id) do update set"
    statements = [
        f"{insert} p = row(2, 'c')::pair, q = row(row(1, 'a'), array[2])::nested returning *",
        f"{insert} q = (excluded.p, array[6 / line.id])::nested returning q",
        f"{insert} p = row(1, 'toolong')::pair",
        f"{insert} (p, q) = row(row(7, 'x')::pair, null)",
    ]
    compare(ddl, ["line"], ["insert into line values (1, '(1,a)')"], [call(*statements)])


def test_a_cursor_of_a_name_that_another_had_gives_its_own_columns(compare: Compare) -> None:
    """The SDK's connection keeps statements prepared, and what FETCH gives is not said by its text."""
    ddl = "create table line (id int primary key, name text, n numeric);"
    one, two = ("declare c cursor for select id from line", "declare c cursor for select name, n from line")
    statements = [one, "fetch 1 from c", "close c", two, "fetch 1 from c", "/* x */ FETCH 1 from c"]
    compare(ddl, ["line"], ["insert into line values (1, 'a', 2), (2, 'b', 3)"], [call(*statements), call(two)])


def test_a_statement_trigger_that_cascades_would_fire_is_refused(compare: Compare) -> None:
    """PostgreSQL fires it once for all rows that a command cascades to; here each is a statement of its own."""
    ddl = """create table parent (id int primary key);
    create table child (id int primary key, r int references parent on delete cascade);
    create table log (what text);
    create function told() returns trigger language plpgsql as
      $$ begin insert into log values (tg_op || tg_when); return null; end $$;
    create trigger a before delete on child for each statement execute function told();
    create trigger b after delete on child for each statement execute function told();"""
    rows = ["insert into parent values (1), (2), (3)", "insert into child values (1, 1), (2, 2), (3, 3)"]
    with pytest.raises(UnsupportedSchema, match="statement trigger on a table that foreign keys act on"):
        compare(ddl, ["parent", "child", "log"], rows, [call("delete from parent where id < 3")])


@pytest.mark.parametrize("when", ["deferrable initially deferred", "match full deferrable initially deferred"])
def test_a_deferred_foreign_key_of_a_row_whose_own_key_changes_before_the_commit(compare: Compare, when: str) -> None:
    ddl = f"""create table parent (id int primary key);
    create table child (id int primary key, r int references parent {when}, note text);"""
    dangling = "insert into child values (1, 7, 'a')"
    moved = "update child set id = 2 where id = 1"
    steps = [
        call(dangling, moved),
        call(dangling, "update child set note = 'b'", moved, "insert into parent values (7)"),
        Checkpoint(0),
        call("update child set id = 3", "insert into child values (4, 8, 'c')", "update child set id = id + 5"),
        call("update child set r = 9 where id = 2", "update child set id = 3 where id = 2"),
    ]
    compare(ddl, ["parent", "child"], [], steps)


@pytest.mark.parametrize("when", ["deferrable", "deferrable initially deferred"])
def test_a_deferred_unique_key_of_a_row_whose_own_key_changes_before_the_commit(compare: Compare, when: str) -> None:
    ddl = f"""create table t (id int primary key, a text unique {when}, n int unique nulls not distinct {when});
    create table c (r int primary key references t on update cascade, b text unique {when});"""
    rows = ["insert into t values (1, 'a', 1), (2, 'b', null)", "insert into c values (1, 'x'), (2, 'y')"]
    steps = [
        call("insert into t values (3, 'a', 3)", "update t set id = id + 10 where id = 3"),
        call("set constraints all deferred", "update t set n = null where id = 1", "update t set id = 5 where id = 1"),
        call("set constraints all deferred", "update c set b = 'x' where r = 2", "update t set id = 7 where id = 2"),
        call("insert into t values (3, 'a', 3)", "update t set id = 4 where id = 3", "update t set a = 'c'"),
        call("set constraints all deferred", "update t set a = 'b' where id = 1", "update t set id = 6 where id = 1",
             "set constraints all immediate"),
        call("update t set id = -id"),
    ]  # fmt: skip
    compare(ddl, ["t", "c"], rows, steps)


def test_a_foreign_key_of_a_row_whose_own_key_a_trigger_changes_before_it_is_checked(compare: Compare) -> None:
    ddl = """create table parent (id int primary key);
    create table child (id int primary key, r int references parent);
    create function moved() returns trigger language plpgsql as
      $$ begin update child set id = id + 10 where id = new.id; return null; end $$;
    create trigger "A_moved" after insert on child for each row execute function moved();"""
    steps = [call("insert into child values (1, 7)"), call("insert into child values (1, 5), (2, null)")]
    compare(ddl, ["parent", "child"], ["insert into parent values (5)"], steps)
