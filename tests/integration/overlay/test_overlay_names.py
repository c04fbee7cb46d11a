"""Tables, columns and aliases with the names that the overlay's own code and its rewriting use."""

import pytest

from megamcp.errors import UnsupportedStatement
from megamcp.state import rewrites
from tests.integration.overlay.conftest import Compare, World

# Variables and parameters of generated functions, and PL/pgSQL's own.
WORDS = """found rows digest head below names restart cascading late what layer layers chain new old tg_op tg_argv row
tg_level sqlstate sqlerrm value name setting state event before after deleted excluded body clock seed stage _count
_part _name _table _row _head _bytes _bound _restart _all _level _done u v x y d c k n"""
_COLUMNS = ", ".join(f'"{word}" int default {n}' for n, word in enumerate(WORDS.split()))
DDL = f"""
create table home (id int primary key, {_COLUMNS}, unique ("found", "rows"), check ("head" < 100),
  unique ("new") deferrable);
create table child ({_COLUMNS}, id serial primary key, "of" int references home on delete cascade on update cascade,
  foreign key ("found", "rows") references home ("found", "rows") on delete set null ("rows") deferrable);
create table loose ({_COLUMNS});
create table excluded (id int primary key, v text);
create table u (id int primary key, u text unique, excluded text, "new" text, "old" text, names text);
"""
TABLES = ["home", "child", "loose", "excluded", "u"]
SEEDS = [
    'insert into home (id, "found", "new") values (1, 5, 1), (2, 6, 2)',
    'insert into child ("of", "found") values (1, 5), (2, 6), (2, null)',
    'insert into loose ("found") values (1), (1), (2)',
    "insert into excluded values (1, 'a')",
    "insert into u values (1, 'a', 'b', 'c', 'd')",
]


def test_columns_may_have_the_names_of_variables(compare: Compare) -> None:
    compare(
        DDL,
        TABLES,
        SEEDS,
        [
            'insert into home (id, "found", "new") values (3, 7, 3) returning *',
            'update home set "found" = "found" + 10, "rows" = 3, "old" = "new" where id < 3 returning *',
            'update home set "head" = 200',
            'update home set id = id + 10, "below" = "head" + "digest"',
            'update child set "digest" = "rows" + 1, "new" = "old" where "of" = 11 returning *',
            'insert into child ("found", "rows") values (99, 99)',
            'insert into home (id, "found", "names") values (11, 1, 77) on conflict (id)'
            ' do update set "names" = excluded."names" + home."found", "row" = excluded."excluded" returning home.*',
            'insert into home (id, "found", "rows") values (50, 15, 3) on conflict ("found", "rows") do nothing',
            'insert into home (id, "found", "new") values (51, 1, 3)',
            'update loose set "found" = "found" + 1, "layer" = 5, "deleted" = 1 where "found" = 1 returning *',
            'delete from loose where "found" = 2',
            "delete from home where id = 12",
            'merge into home h using child c on h.id = c."of" when matched then update set "row" = c."found"'
            ' when not matched then insert (id, "found", "new") values (60, 60, 60)',
            "truncate child restart identity",
            'insert into child ("of") values (11) returning *',
        ],
    )


@pytest.mark.support("INSERT … ON CONFLICT into a table named or called `excluded`", "exact")
def test_a_table_may_be_called_excluded(compare: Compare) -> None:
    compare(
        DDL,
        TABLES,
        SEEDS,
        [
            "insert into excluded values (1, 'b'), (2, 'c') on conflict do nothing returning excluded.id, excluded, v",
            "insert into excluded values (1, 'b') on conflict (id) do update set v = 'x' returning *",
            "insert into excluded values (1, 'b') on conflict (id) do update set v = excluded.v",
            "insert into excluded values (1, 'b') on conflict (id) do update set v = 'q' where excluded.id > 0",
            "insert into excluded values (1, 'b') on conflict (id) do update set v = v || 'q'",
            "insert into excluded as e values (1, 'b') on conflict (id) do update set v = e.v || excluded.v"
            " returning e.*, e",
            "insert into excluded values (1, 'b') on conflict (id) do update"
            " set v = (select max(excluded.v) from excluded) || 'm' returning excluded.v, excluded",
            "insert into u as excluded values (1, 'b') on conflict (id) do update set u = 'x' returning excluded.u",
            "insert into u as excluded values (1, 'b') on conflict (id) do update set u = excluded.u",
            "with excluded as (select 'w'::text as v) insert into u (id) values (1) on conflict (id)"
            " do update set u = (select v from excluded) returning *",
            "with u as (select 1 as id, 'w'::text as v) insert into u (id, u) select id, v from u on conflict (id)"
            " do update set u = excluded.u || u.u returning *",
            "insert into u values (1, 'e', 'f', 'g', 'h') on conflict (id) do update set (excluded, \"new\", \"old\") ="
            ' row(excluded.excluded || u.u, u."old", excluded."new"), names = u.excluded returning u, *',
            "insert into u values (1, 'e') on conflict (id) do update set names = excluded::text",
            "insert into u as row values (1, 'e') on conflict (id) do update set names = row::text",
            "insert into u as x values (1, 'e') on conflict (id) do update set names = x::text || excluded::text"
            " returning names, x",
            "insert into u as old values (1, 'e') on conflict (id) do update set names = old.u returning old.names",
            "insert into u as new values (1, 'e') on conflict (id) do update set names = new.u returning new.names",
            "insert into u as new values (3, 'u') on conflict do nothing returning new.id, new",
            "insert into u values (1, 'e') on conflict (id) do update set names = u.u"
            " where u.u = any (select u from u u)",
        ],
    )


@pytest.mark.parametrize(
    "sql",
    [
        "insert into u as _mm_w values (1, 'e') on conflict (id) do update set names = 'k'",
        "with _mm_0 as (select 1 as id) insert into u (id) select id from _mm_0 on conflict (id) do nothing",
        "insert into u (id) select id from home as _mm_0 on conflict (id) do nothing",
    ],
)
async def test_a_name_that_the_rewriting_uses_is_refused(world: World, sql: str) -> None:
    rollout = await world.open(await world.load(DDL))
    async with rollout.call() as db:
        with pytest.raises(UnsupportedStatement, match="_mm_"):
            await rewrites.Rewriter().rewrite(sql, db.fetch)
