"""What loads and what is refused: each refusal names its construct, and all of a schema's come at once."""

import pytest

from megamcp.errors import UnsupportedSchema

REFUSED = {
    "copy": "copy x from program 'id'",
    "do": "do $$ begin end $$",
    "create_extension": "create extension citext",
    "create_role": "create role r",
    "create_schema": "create schema other",
    "create_table_as": "create table b as select 1 as x",
    "transaction": "begin",
    "schema name": "create table public.a (id int primary key)",
    "temporary or unlogged table": "create temp table a (id int primary key)",
    "current user": "create table a (id int primary key, who text default current_user)",
    "clock literal": "create table a (id int primary key, at timestamptz default 'now')",
    "function with SECURITY": "create function f() returns int language sql security definer as $$ select 1 $$",
    "function name": "create function random() returns int language sql as $$ select 4 $$",
    "partitioned or inherited table": "create table a (id int primary key) partition by list (id)",
    "exclusion constraint": "create table a (id int primary key, r int4range, exclude using gist (r with &&))",
    "WITHOUT OVERLAPS or PERIOD": "create table a (r int4range, v daterange, primary key (r, v without overlaps))",
    "row-level security": "create table a (id int primary key); alter table a enable row level security",
    "security_barrier view that takes writes": "create table a (id int primary key);"
    " create view b with (security_barrier = on) as select * from a where id > 5",
    "column type regclass": "create table a (id int primary key, r regclass)",
    "column name": "create table a (id int primary key, _mm_layer int)",
    "expression over a whole row": "create table a (id int primary key, check (a is not null))",
    "constraint not valid or not enforced": "create table a (id int primary key, n int); "
    "alter table a add check (n > 0) not valid",
    "key over a domain of an enum": "create type e as enum ('x'); create domain d as e; create domain f as d;"
    " create table a (id f primary key)",
    "syntax": "create tabel a (id int)",
}


@pytest.mark.parametrize("construct", REFUSED)
async def test_a_refusal_names_the_construct(world, construct):
    with pytest.raises(UnsupportedSchema) as refused:
        await world.load(REFUSED[construct])
    problems = refused.value.extra["problems"]
    assert construct in [problem["construct"] for problem in problems]
    assert all(problem["reason"] and problem["hint"] and problem["object"] for problem in problems)
    assert await world.control.fetchval("select count(*) from pg_namespace where nspname ~ '^[sv]_[0-9a-f]{16}$'") == 0


async def test_all_problems_come_at_once(world):
    with pytest.raises(UnsupportedSchema) as refused:
        await world.load(
            "create table a (id int, _mm_layer int); create table b (id int primary key, check (b is not null));"
        )
    assert {p["construct"] for p in refused.value.extra["problems"]} == {
        "column name",
        "expression over a whole row",
    }


async def test_a_seed_that_breaks_a_constraint_loads_nothing(world):
    import asyncpg

    with pytest.raises(asyncpg.UniqueViolationError):
        await world.load("create table a (id int primary key)", "insert into a values (1), (1)")


RICH = """
create type mood as enum ('sad', 'ok');
create domain positive as int check (value > 0);
create domain label as text not null default 'none';
create sequence tickets start 100 increment 5;
create table "Odd ""Name" (
  "select" int primary key, "Mixed Case" text, "new" int default 1, "old" int, "table" mood default 'ok',
  amount positive default 3, title label default 'a', many int[] default '{1}', doc jsonb default '{}',
  ticket bigint default nextval('tickets'), code text default 'T' || nextval('tickets'),
  day date default current_date, at timestamp(0) default localtimestamp,
  total int generated always as ("new" + 1) virtual,
  constraint "Odd check" check ("new" < 100 and "Mixed Case" <> ''), unique ("Mixed Case", "old")
);
create table prices (
  shop varchar(8), sku numeric(8, 2), currency char(3) not null default 'EUR', price numeric(10, 2) check (price >= 0),
  primary key (shop, sku)
);
create table sales (
  id uuid primary key default gen_random_uuid(), shop varchar(8), sku numeric(8, 2),
  at timestamptz not null default now(),
  foreign key (shop, sku) references prices on update cascade on delete set null (sku)
);
create index on sales using gin ((array[shop]));
create index on sales (lower(shop)) where sku > 1;
create function total_of(s text) returns numeric language sql stable
  as $$ select sum(price) from prices where shop = s $$;
create function dear(p numeric) returns bool language sql immutable return p > 10;
create function newest() returns timestamptz language sql stable begin atomic select max(at) from sales; end;
create view cheap (place, price) as
  select shop, price from prices where not dear(price) and now() > timestamptz '2000-01-01';
create view counted as select place, count(*) as n from cheap group by place;
alter table prices add constraint dear_enough check (not dear(price / 100));
"""
RICH_SEED = """
insert into prices values ('a', 1, default, 5), ('a', 2, 'USD', 20);
insert into sales (shop, sku) values ('a', 1);
insert into "Odd ""Name" ("select", "Mixed Case") values (1, 'x');
"""


async def test_a_rich_schema_loads_and_works(world):
    rollout = await world.open(await world.load(RICH, RICH_SEED))
    odd = '"Odd ""Name"'
    assert await rollout.read(f"select ticket, code, total, day::text, at::text from {odd}") == [
        (100, "T105", 2, "2026-01-15", "2026-01-15 09:00:00")
    ]
    made = await rollout.run(
        f'insert into {odd} ("select") values (2) returning ticket, code, total, amount, title, "table", day'
    )
    assert made[0][:6] == (110, "T115", 2, 3, "a", "ok")
    assert await rollout.run(f'update {odd} set "new" = 5, "old" = 6 where "select" = 1 returning total') == [(6,)]
    assert await rollout.read("select place, price::text from cheap") == [("a", "5.00")]
    assert await rollout.read("select * from counted") == [("a", 1)]
    assert await rollout.read("select total_of('a')::text, newest() = now()") == [("25.00", True)]
    await rollout.run("update prices set price = 6 where sku = 1.00")
    assert await rollout.read("select place, price::text from cheap") == [("a", "6.00")]
    await rollout.run("update prices set shop = 'b' where sku = 1")
    assert await rollout.read("select shop from sales") == [("b",)]
    await rollout.run("delete from prices where shop = 'b'")
    assert await rollout.read("select shop, sku from sales") == [("b", None)]
    assert await rollout.run(
        "select nextval('tickets'), currval('tickets'), setval('tickets', 200), nextval('tickets')"
    ) == [(120, 120, 200, 205)]


@pytest.mark.parametrize(
    ("sql", "code", "name"),
    [
        ("insert into prices values ('a', 9, 'EUR', -1)", "23514", "prices_price_check"),
        ("insert into prices values ('a', 9, 'EUR', 5000)", "23514", "dear_enough"),
        ("insert into prices values ('a', 1.00, 'EUR', 1)", "23505", "prices_pkey"),
        ("insert into prices values ('123456789', 1, 'EUR', 1)", "22001", None),
        ("insert into sales (shop, sku) values ('zz', 1)", "23503", "sales_shop_sku_fkey"),
        ('insert into "Odd ""Name" ("select", amount) values (5, 0)', "23514", "positive_check"),
        ('insert into "Odd ""Name" ("select", title) values (5, null)', "23502", None),
        ('insert into "Odd ""Name" ("select", "new") values (5, 100)', "23514", "Odd check"),
        ('insert into "Odd ""Name" ("select", "table") values (5, \'angry\')', "22P02", None),
    ],
)
async def test_violations_of_a_rich_schema_are_postgresql_s(world, sql, code, name):
    import asyncpg

    rollout = await world.open(await world.load(RICH, RICH_SEED))
    with pytest.raises(asyncpg.PostgresError) as refused:
        await rollout.run(sql)
    assert (refused.value.sqlstate, refused.value.constraint_name) == (code, name)


async def test_a_sequence_ends_and_cycles(world):
    import asyncpg

    rollout = await world.open(
        await world.load(
            "create sequence short maxvalue 2; create sequence round minvalue 5 maxvalue 6 cycle; "
            "create table a (id int primary key)"
        )
    )
    assert await rollout.run("select nextval('round'), nextval('round'), nextval('round')") == [(5, 6, 5)]
    await rollout.run("select nextval('short'), nextval('short')")
    with pytest.raises(asyncpg.SequenceGeneratorLimitExceededError) as refused:
        await rollout.run("select nextval('short')")
    assert str(refused.value) == 'nextval: reached maximum value of sequence "short" (2)'
