"""INSERT … ON CONFLICT, compared with plain tables in all its forms."""

import asyncio
from collections.abc import Callable

import pytest

from megamcp.state import refusals
from tests.integration.overlay.differential_database import Database
from tests.integration.overlay.differential_programs import Statement
from tests.integration.overlay.differential_run import Call, Pair

DDL = """
create type mood as enum ('sad', 'ok');
create domain positive as int check (value > 0);
create sequence tickets;
create table kind (id int primary key);
create table item (
  id int primary key, code varchar(3) unique, n numeric(6, 2) not null default 1.5 check (n < 1000), amount positive,
  feel mood default 'ok', tag text default 'T' || nextval('tickets'), k int references kind,
  twice numeric generated always as (n * 2) stored, doc jsonb default '{}', constraint pair unique (n, k)
);
create table "Odd ""One" (id int generated always as identity primary key, "Mixed" text, a int, b int,
  unique nulls not distinct ("Mixed", a));
create table note (id serial primary key, item int references item on delete cascade, body text unique);
"""
SEEDS = [
    "insert into kind values (1), (2), (3)",
    "insert into item (id, code, n, k) values (1, 'a', 1, 1), (2, 'b', 2, 2), (3, 'c', 3, null)",
    'insert into "Odd ""One" ("Mixed", a, b) values (\'x\', 1, 10), (\'y\', null, 20), (null, null, 30)',
    "insert into note (item, body) values (1, 'one'), (2, 'two')",
]
TABLES = ["kind", "item", '"Odd ""One"', "note"]

NOTHING = [
    "insert into item (id) values (1), (4), (4), (5) on conflict do nothing returning id, tag, n",
    "insert into item (id) values (1), (6) on conflict (id) do nothing returning *",
    "insert into item (id, code) values (7, 'a') on conflict (id) do nothing",
    "insert into item (id, code) values (7, 'a'), (8, 'h') on conflict (code) do nothing returning item.id, item.*",
    "insert into item (id, code) values (1, 'zz') on conflict on constraint item_code_key do nothing",
    "insert into item (id, n, k) values (9, 1.001, 1), (10, 2, null) on conflict on constraint pair"
    " do nothing returning n",
    "insert into item (id, n) values (11, null) on conflict do nothing",
    "insert into item (id, n) values (1, 5000) on conflict do nothing",
    "insert into item (id, amount) values (1, -1) on conflict do nothing",
    "insert into item (id, code) values (1, 'long') on conflict do nothing",
    "insert into item (id, feel) values (1, 'angry') on conflict do nothing",
    "insert into item (id, k) values (12, 99) on conflict do nothing",
    "insert into item (id, k) values (1, 99) on conflict do nothing",
    "insert into item select i + 13, 'x' || i from generate_series(0, 3) i on conflict do nothing returning id, tag",
    "insert into item as i default values on conflict do nothing",
    "insert into note (item, body) values (1, 'one'), (1, 'three') on conflict do nothing returning id",
    "insert into note (item, body) select id, code from item where id < 4 on conflict (body) do nothing returning *",
    'insert into "Odd ""One" ("Mixed", a) values (\'x\', 1), (null, null), (\'z\', 1) on conflict do nothing'
    " returning *",
    'insert into "Odd ""One" (id, a) values (5, 1) on conflict do nothing',
    "insert into item (id) values (1) on conflict (zz) do nothing",
    "insert into item (id) values (1) on conflict (n) do nothing",
    "insert into item (id) values (1) on conflict on constraint nope do nothing",
    "insert into item (id, nope) values (1, 2) on conflict do nothing",
    "insert into nope values (1) on conflict do nothing",
    "insert into item (id, twice) values (30, 2) on conflict do nothing",
]
UPDATES = [
    "insert into item (id, n) values (1, 7), (20, 8) on conflict (id) do update set n = excluded.n returning *",
    "insert into item as i (id, n) values (1, 3), (21, 4) on conflict (id) do update set n = i.n + excluded.n"
    " where i.n < 100 returning i.id, i.n, i.twice, tag",
    "insert into item (id, n) values (2, 1), (2, 2) on conflict (id) do update set n = excluded.n",
    "insert into item (id, n) values (22, 1), (22, 2) on conflict (id) do update set n = excluded.n",
    "insert into item (id, n) values (2, 1), (2, 2) on conflict (id) do update set n = excluded.n where false",
    "insert into item (id, n) values (2, 1), (2, 2) on conflict (id) do update set n = excluded.n where excluded.n < 2",
    "insert into item (id, code) values (40, 'a') on conflict (code) do update set code = 'zz', n = 9 returning id",
    "insert into item (id, code) values (41, 'b') on conflict (code) do update set id = excluded.id returning id, code",
    "insert into item (id, code) values (42, 'b') on conflict (id) do update set n = 1",
    "insert into item (id, code) values (3, 'b') on conflict (id) do update set code = excluded.code",
    "insert into item (id) values (3) on conflict (id) do update set n = 5000",
    "insert into item (id) values (3) on conflict (id) do update set n = null",
    "insert into item (id) values (3) on conflict (id) do update set k = 99",
    "insert into item (id, n) values (3, 2) on conflict (id) do update set (n, code) = (excluded.n + 1, 'q')"
    " returning n",
    "insert into item (id, n) values (3, 2) on conflict (id) do update set (n, code) = row(4, null) returning n, code",
    "insert into item (id) values (3) on conflict (id) do update set n = n + 1",
    "insert into item (id) values (3) on conflict (id) do update set n = (select max(n) + 1 from item) returning n",
    "insert into item (id) values (3) on conflict (id) do update set tag = excluded.tag, feel = 'sad'"
    " returning tag, feel",
    "insert into item (id, n) values (3, 5) on conflict (id) do update set n = '12.345' returning n",
    "insert into item (id) values (3) on conflict (id) do update set code = 'too long'",
    "insert into item (id) values (3) on conflict (id) do update set n = 1 / (excluded.id - 3)",
    "insert into item (id) values (3) on conflict (id) do update set n = 1 / (excluded.id - 3) where item.id <> 3",
    "insert into item (id, doc) values (3, '{\"a\": 1}') on conflict (id) do update set doc = item.doc || excluded.doc"
    " returning doc, to_jsonb(item) ->> 'code' as code",
    "insert into item (id) values (3) on conflict (id) do update set doc = to_jsonb(excluded) - 'tag' returning doc",
    "insert into item (id) values (3) on conflict (id) do update set twice = 3",
    "insert into item (id) values (3) on conflict (id) do update set nope = 3",
    "insert into item (id) values (3) on conflict do update set n = 3",
    "insert into item (id) values (3) on conflict (id) do update set n = 4 where nope > 1",
    "insert into item (id) values (3) on conflict (id) do update set amount = 0",
    "insert into item (id) values (50), (51), (1) on conflict (id) do update set tag = 'met' returning id, tag",
    "insert into item (id, n) select id, n + 1 from item on conflict (id) do update set n = excluded.n returning id, n",
    'insert into "Odd ""One" as o ("Mixed", a, b) values (\'x\', 1, 5), (null, null, 6) on conflict ("Mixed", a)'
    " do update set b = o.b + excluded.b returning *",
    'insert into "Odd ""One" ("Mixed", a) values (\'x\', 1) on conflict ("Mixed", a) do update set id = 4',
    "insert into note (item, body) values (2, 'one'), (3, 'new') on conflict (body) do update set item = excluded.item"
    " returning id, item, body",
    "with s as (select 1 as id union all select 60) insert into item (id, n) select id, 6 from s"
    " on conflict (id) do update set n = excluded.n + (select count(*) from s) returning id, n",
    "with i as (insert into item (id, n) values (1, 2), (61, 3) on conflict (id) do update set n = excluded.n"
    " returning id) insert into note (item, body) select id, 'via ' || id from i on conflict do nothing returning *",
    "with i as (insert into item (id) values (1), (62) on conflict do nothing returning id) select * from i",
    "insert into item (id) values (63) on conflict (id) do update set n = 1 returning item",
    "insert into item (id) values (1) on conflict (id) do update set n = count(*)",
    "insert into item (id, k) values (1, 3) on conflict (id) do update set k = excluded.k",
    "delete from kind where id = 3",
]


@pytest.mark.support("INSERT … ON CONFLICT DO NOTHING: without a key, by columns, ON CONSTRAINT", "exact")
def test_do_nothing_leaves_out_rows_that_meet_another(compare: Callable[..., None]) -> None:
    compare(DDL, TABLES, SEEDS, NOTHING)


@pytest.mark.support("INSERT … ON CONFLICT DO UPDATE: excluded, WHERE, RETURNING, 21000 for a row met twice", "exact")
def test_do_update_changes_the_row_that_was_met(compare: Callable[..., None]) -> None:
    compare(DDL, TABLES, SEEDS, UPDATES)


def test_a_key_over_an_operator_is_met(compare: Callable[..., None]) -> None:
    """Found by the random search: the operator of the key bound less than the comparison of keys."""
    compare(
        "create table t (a jsonb, b int); create unique index k on t ((a -> 'x'));"
        " create unique index l on t (b, (b + 1)) where b > 0 or b is null;",
        ["t"],
        ["""insert into t values ('{"x": 1}', 1)"""],
        [
            """insert into t values ('{"x": 1}', 2) on conflict ((a -> 'x')) do update set b = 5 returning b""",
            "insert into t values ('{}', 2) on conflict ((b + 1), b) where b > 0 or b is null do update set b = 3",
            "insert into t values ('{}', 3) on conflict (b, (b + 1)) where b > 0 do update set b = 4 returning *",
        ],
    )


def test_a_domain_is_checked_only_where_the_row_is_updated(compare: Callable[..., None]) -> None:
    """Found by the random search: the value for SET met its domain though nothing was in the way."""
    compare(
        "create domain score as int not null check (value > 0); create domain high as score check (value < 100);"
        " create table t (id int primary key, o score default 5, h high default 7);",
        ["t"],
        ["insert into t values (1, 1)"],
        [
            "insert into t (id) values (2) on conflict (id) do update set o = -1 returning *",
            "insert into t (id) values (2) on conflict (id) do update set o = -1",
            "insert into t (id) values (2) on conflict (id) do update set h = 500 returning *",
            "insert into t (id) values (2) on conflict (id) do update set h = 50, o = 3 where t.o > 9 returning *",
            "insert into t (id) values (2) on conflict (id) do update set o = null",
            "insert into t (id) values (3) on conflict (id) do update set o = null returning *",
        ],
    )


CLAUSES = {
    "insert into t values (1) on conflict do update set a = 1": None,  # a syntax error of PostgreSQL's own
    "insert into t values (1) on conflict (id) do update set (a, b) = (select 1, 2)": refusals.SET_OF_SUBSELECT,
    "insert into t values (1) on conflict (id) do update set l[1] = 2": refusals.SET_OF_PART,
    "insert into t values (1) on conflict (id) do update set p.n = 2": refusals.SET_OF_PART,
    "insert into t values (1) on conflict (id) do update set a = default": refusals.SET_TO_DEFAULT,
    "insert into t values (1) on conflict (id) do update set p = row(1, 'x')": refusals.SET_TO_ROW,
    "insert into t values (1) on conflict (id) do update set p = (1, 'x')": refusals.SET_TO_ROW,
    "insert into t values (1) on conflict (a) do update set b = 1": refusals.SEVERAL_KEYS,
    "insert into t values (1) on conflict (id) do update set a = 1 returning old.a": refusals.OLD_ROWS,
    "insert into t (id) values (1) on conflict (b) where b = $1::int do nothing": refusals.PARAMETER_IN_TARGET,
    "insert into i overriding user value values (1) on conflict do nothing": refusals.OVERRIDING_CONFLICT,
    "with x as (with y as (select 1 as id) insert into t (id) select id from y on conflict do nothing returning id)"
    " select * from x": refusals.NESTED_CONFLICT,
}


@pytest.mark.support("INSERT … ON CONFLICT DO UPDATE SET (…) = (SELECT …)", "refused: its columns can't be taken apart")
@pytest.mark.support(
    "INSERT … ON CONFLICT DO UPDATE SET of an element or field", "refused: only whole values are assigned"
)
@pytest.mark.support(
    "INSERT … ON CONFLICT DO UPDATE SET … = DEFAULT", "refused: the default is known to the table alone"
)
@pytest.mark.support("INSERT … ON CONFLICT DO UPDATE SET … = ROW(…)", "refused: the type of such a row would be lost")
@pytest.mark.support("INSERT … ON CONFLICT DO UPDATE over several keys at once", "refused: each may meet another row")
@pytest.mark.support("old and new in RETURNING of INSERT … ON CONFLICT", "refused: the row goes through another view")
@pytest.mark.support(
    "parameter in the target of INSERT … ON CONFLICT", "refused: which key is meant must be known before it runs"
)
@pytest.mark.support("OVERRIDING with INSERT … ON CONFLICT", "refused: they take different ways")
@pytest.mark.support("INSERT … ON CONFLICT in WITH, with a WITH of its own", "refused: both would have to come first")
def test_a_clause_that_cannot_be_rewritten_is_refused_with_its_reason(postgres_dsn: str) -> None:
    ddl = """create type pair as (n int, word text);
    create table t (id int primary key, a int unique, b int default 3, l int[], p pair);
    create unique index again on t (a);
    create table i (id int generated always as identity primary key);"""
    with asyncio.Runner() as runner:
        database = runner.run(Database.create(postgres_dsn))
        try:
            for sql, refusal in CLAUSES.items():
                pair = runner.run(Pair.load(database, "clauses", ddl, ["t", "i"], []))
                runner.run(pair.run([Call(0, (Statement(sql),))]))
                runner.run(pair.unload())
                wanted = [f"{refusal.construct} is not supported here: {refusal.reason}."] if refusal else []
                assert list(pair.report.reasons) == wanted, sql
        finally:
            runner.run(database.drop())
