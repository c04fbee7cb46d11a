"""The digest covers the shape of a state as well as its rows, whichever way led there."""

import time

import asyncpg
import pytest

from tests.integration.clones.conftest import Database, World

DDL = """create table t (id int primary key, x int default 1);
create table part (id int, v int) partition by range (id);
create table part_1 partition of part for values from (0) to (10);
create view v as select id from t;
create sequence s;
create type mood as enum ('low', 'high');
create domain positive as int check (value > 0);
create function f(a int) returns int language sql as 'select a';
create function noop() returns trigger language plpgsql as 'begin return new; end'"""
SEED = "insert into t select n from generate_series(1, 5) n"

# Each with what takes it back.
CHANGES = [
    ("alter table t add y int", "alter table t drop y"),
    ("alter table part add y text", "alter table part drop y"),
    ("alter table t alter x set default 2", "alter table t alter x set default 1"),
    ("alter table t alter x type bigint", "alter table t alter x type int"),
    ("alter table t alter x set not null", "alter table t alter x drop not null"),
    ("alter table t add constraint c check (x > 0)", "alter table t drop constraint c"),
    ("alter table t rename x to z", "alter table t rename z to x"),
    ("alter table t rename to u", "alter table u rename to t"),
    ("create table empty (a int)", "drop table empty"),
    ("create table empty ()", "drop table empty"),
    ("create table part_2 partition of part for values from (10) to (20)", "drop table part_2"),
    ("create unique index i on t (x, id)", "drop index i"),
    ("create index i on t ((1 / x))", "drop index i"),
    ("create or replace view v as select id from t where x = 1", "create or replace view v as select id from t"),
    ("alter view v set (security_invoker = on)", "alter view v reset (security_invoker)"),
    ("alter sequence s increment 5", "alter sequence s increment 1"),
    ("create sequence s2", "drop sequence s2"),
    (
        "create or replace function f(a int) returns int language sql as 'select a + 1'",
        "create or replace function f(a int) returns int language sql as 'select a'",
    ),
    ("create function g() returns int language sql as 'select 1'", "drop function g"),
    ("create aggregate total (int) (sfunc = int4pl, stype = int)", "drop aggregate total (int)"),
    ("create trigger n before insert on t for each row execute function noop()", "drop trigger n on t"),
    ("create rule r as on delete to t do also nothing", "drop rule r on t"),
    ("alter table t enable row level security", "alter table t disable row level security"),
    ("create policy p on t using (id > 1)", "drop policy p on t"),
    ("create type mood2 as enum ('a')", "drop type mood2"),
    ("create type pair as (a int, b text)", "drop type pair"),
    ("alter domain positive add constraint c check (value < 100)", "alter domain positive drop constraint c"),
    ("create schema annex", "drop schema annex"),
    ("revoke delete on t from mm_owner", "grant delete on t to mm_owner"),
    ("grant select on t to public", "revoke select on t from public"),
    ("create operator === (leftarg = int, rightarg = int, procedure = int4eq)", "drop operator === (int, int)"),
    ("create cast (mood as int) with inout as implicit", "drop cast (mood as int)"),
]
# What changes no later statement's outcome.
SAME = [
    "create index i on t (x)",
    "comment on table t is 'words'",
    "alter table t set (fillfactor = 50)",
    "create statistics st on id, x from t",
    "select nextval('s')",
    "create temporary table scratch (a int)",
    "truncate part",
]


async def digest(db: Database) -> int:
    async with db.hold() as inside:
        return await inside.digest()


async def test_each_change_of_the_shape_is_in_the_digest_and_taking_it_back_is_too(world: World) -> None:
    db = await world.start(DDL, SEED)
    first, seen = await digest(db), {}
    for change, back in CHANGES:
        await db.user.execute(change)
        seen[change] = await digest(db)
        await db.user.execute(back)
        assert await digest(db) == first, back
    assert first not in seen.values(), [change for change, found in seen.items() if found == first]
    assert len(set(seen.values())) == len(CHANGES)


async def test_what_changes_no_later_statement_is_not_in_the_digest(world: World) -> None:
    db = await world.start(DDL, SEED)
    first = await digest(db)
    for change in SAME:
        await db.user.execute(change)
        assert await digest(db) == first, change


async def test_a_copy_has_the_digest_of_its_source_whoever_owns_its_tables(world: World) -> None:
    db = await world.start(DDL, SEED)
    await db.user.execute(
        f"set role none; create schema mine; create table mine.own (x int); reset role;"
        f'grant select on t to "{db.login}"'
    )
    fork = await world.clone(db.name)
    assert await digest(fork) == await digest(db)


async def test_the_shape_of_a_hundred_tables_is_read_in_a_moment(world: World) -> None:
    tables = (f"create table t{n} (id int primary key, a text, b text unique, check (a <> b))" for n in range(100))
    db = await world.start(";".join(tables))
    async with db.hold() as inside:
        began = time.monotonic()
        await inside.digest()
        assert time.monotonic() - began < 20


TEMPORARY = "create type pg_temp.mood as enum ('a'); create temp sequence ts; create temp table tt (a int);"


@pytest.mark.parametrize(
    "statement",
    [
        "alter table t add m pg_temp.mood",
        "create table u (m pg_temp.mood[])",
        "alter table t alter x set default nextval('ts')",
        "create table u (x int check (pg_temp.tf(x)))",
        "create function g(a pg_temp.mood) returns int language sql as 'select 1'",
        "create domain d as pg_temp.mood",
        "create index i on t (pg_temp.tf(x))",
        "create table u as select 'a'::pg_temp.mood as m",
    ],
)
async def test_what_lasts_may_not_use_what_ends_with_a_session(world: World, statement: str) -> None:
    db = await world.start(DDL, SEED)
    await db.user.execute(
        TEMPORARY + "create function pg_temp.tf(a int) returns boolean language sql immutable as 'select true'"
    )
    mark = await db.mark()
    with pytest.raises(asyncpg.FeatureNotSupportedError, match="would use") as refused:
        await db.user.execute(statement)
    assert refused.value.hint == "Make what it uses permanent, or make both temporary."
    assert (await db.mark()).position == mark.position


async def test_what_is_temporary_may_use_anything(world: World) -> None:
    db = await world.start(DDL, SEED)
    await db.user.execute(
        TEMPORARY + "create temp table tu (id int primary key, m pg_temp.mood default 'a', x int default nextval('ts'),"
        " p positive references pg_temp.tu, check (m < 'a')); create temp view tv as select * from tt, t;"
        "create temp table child () inherits (t); create index on tt (a);"
        "create function pg_temp.tg() returns trigger language plpgsql as 'begin return new; end';"
        "create trigger tg before insert on tt for each row execute function pg_temp.tg();"
        "create function pg_temp.h(a tt) returns pg_temp.mood language sql as $$ select 'a'::pg_temp.mood $$"
    )
