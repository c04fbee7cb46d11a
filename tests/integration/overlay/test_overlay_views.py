"""An environment's own views, written through as PostgreSQL does, and sequences that are read as tables."""

import pytest

from megamcp.errors import UnsupportedStatement
from megamcp.state import rewrites
from tests.integration.overlay.conftest import Compare, World

DDL = """
create table kind (name text primary key);
create table item (
  id int generated always as identity primary key, name text not null default 'new', price numeric check (price >= 0),
  kind text references kind on update cascade, twice numeric generated always as (price * 2) stored, unique (name)
);
create view cheap as select id as number, name as title, price, kind, twice from item where price < 10;
create view tools as select * from cheap where kind = 'tool' with cascaded check option;
create view toys as select * from cheap where kind = 'toy' with local check option;
create view strict as select * from cheap with check option;
create view own with (security_invoker = true) as select name, price from item where price is not null;
create view barred with (security_barrier) as select distinct name, price from item where price > 5;
create view summed as select kind, sum(price) as total from item group by kind;
create view both_ as select i.name, k.name as kind from item i join kind k on k.name = i.kind;
create view half as select id, upper(name) as loud, price, name from item;
"""
TABLES = ["kind", "item"]
SEEDS = [
    "insert into kind values ('tool'), ('toy')",
    "insert into item (name, price, kind) values ('saw', 8, 'tool'), ('car', 5, 'toy'), ('gold', 900, null),"
    " ('kite', 3, 'toy'), ('void', null, null)",
]


@pytest.mark.support("writes through an environment's views", "exact")
def test_a_view_over_one_table_takes_writes_as_in_postgresql(compare: Compare) -> None:
    compare(
        DDL,
        TABLES,
        SEEDS,
        [
            "insert into cheap (title, price, kind) values ('peg', 1, 'tool') returning number, title, twice",
            "insert into cheap default values returning *",
            "update cheap set price = price + 4 where kind = 'toy' returning title, price, twice",
            "delete from cheap where title = 'saw' returning *",
            "update cheap set title = 'gold' where title = 'kite'",
            "update cheap set price = -1 where title = 'kite'",
            "insert into cheap (title, kind) values ('x', 'nope')",
            "insert into cheap (title) values (null)",
            "update cheap set price = 4000 where title = 'kite' returning *",
            "update own set price = 7 where name = 'kite'",
            "insert into own values ('own', 3)",
            "delete from own where name = 'own'",
            "update cheap c set price = k.n from (values ('kite', 2), ('car', 3)) k(name, n) where c.title = k.name",
            "delete from cheap using kind where kind.name = cheap.kind and cheap.price < 3",
            "merge into cheap c using (values ('car', 6), ('lamp', 4)) s(n, p) on c.title = s.n"
            " when matched then update set price = s.p when not matched then insert (title, price) values (n, p)",
            "merge into own o using (values ('car', 1), ('car', 2)) s(n, p) on o.name = s.n"
            " when matched then update set price = s.p",
            "with gone as (delete from cheap where title = 'lamp' returning title, price)"
            " insert into kind select title from gone returning *",
            ("insert into cheap (title, price) values ('a', 1), ('b', 2)", "select * from cheap order by number"),
            "update half set price = price + 1 where id = 2 returning *",
            "update half set loud = 'X'",
            "insert into half (name, price) values ('whisper', 1) returning loud",
        ],
    )


@pytest.mark.support("views WITH LOCAL and CASCADED CHECK OPTION", "exact")
def test_the_check_option_is_kept_at_each_level_that_has_it(compare: Compare) -> None:
    compare(
        DDL,
        TABLES,
        SEEDS,
        [
            "insert into tools (title, price, kind) values ('peg', 1, 'tool') returning title",
            "insert into tools (title, price, kind) values ('peg2', 100, 'tool')",
            "insert into tools (title, price, kind) values ('peg3', 1, 'toy')",
            "insert into toys (title, price, kind) values ('yo', 100, 'toy')",
            "insert into toys (title, price, kind) values ('yo2', 1, 'tool')",
            "update toys set price = 100",
            "update toys set kind = 'tool' where title = 'car'",
            "update tools set price = 11",
            "update strict set price = 11 where title = 'saw'",
            "update strict set price = 9, kind = 'toy' where title = 'saw' returning *",
            "insert into strict (title, price, kind) values ('both', 100, 'nope')",
            "insert into strict (title, price) values ('gold', 100)",
            "insert into strict (title, price) values ('cost', -1)",
            "insert into strict (title) values ('free')",
            "select * from barred where length(name) < 9",
            "merge into strict c using (values ('kite', 60)) s(n, p) on c.title = s.n"
            " when matched then update set price = s.p",
        ],
    )


@pytest.mark.support("views that PostgreSQL does not write through", "exact")
def test_a_view_that_postgresql_does_not_update_is_told_in_its_words(compare: Compare) -> None:
    compare(
        DDL,
        TABLES,
        SEEDS,
        [
            "insert into summed values ('tool', 1)",
            "update summed set total = 0",
            "delete from both_",
            "truncate cheap",
            "truncate summed",
            "select * from summed order by kind",
        ],
    )


def test_triggers_and_cascades_of_the_table_are_the_views_too(compare: Compare) -> None:
    compare(
        "create table p (id int primary key); create table log (n int generated always as identity, what text);"
        "create table t (id int primary key, p int references p on delete cascade, a int, b int);"
        "create function note() returns trigger language plpgsql as $$ begin insert into log (what)"
        " values (tg_op || ' ' || coalesce(new.id, old.id)); return coalesce(new, old); end $$;"
        "create function bump() returns trigger language plpgsql as $$ begin new.b := coalesce(new.b, 0) + 1;"
        " return new; end $$;"
        "create trigger note after insert or update of a or delete on t for each row execute function note();"
        "create trigger bump before insert or update on t for each row execute function bump();"
        "create view v as select id as k, a as x, b, p from t where a < 10 with check option;",
        ["p", "log", "t"],
        ["insert into p values (1), (2)", "insert into t values (1, 1, 1, 0), (2, 2, 2, 0)"],
        [
            "insert into v values (3, 3, null, 1) returning *",
            "update v set x = x + 1 returning k, b",
            "update v set p = 2 where k = 1 returning *",
            "update v set x = 10",
            "delete from p where id = 1",
            "delete from v returning k",
        ],
    )


def test_functions_write_through_views(compare: Compare) -> None:
    compare(
        "create table t (id int primary key, a int);"
        "create view v as select id, a from t where a > 0 with check option;"
        "create function put(i int, n int) returns int language plpgsql as $$ declare d int; begin"
        " insert into v values (i, n) returning a into d; update v set a = a + 1 where id = i; return d; end $$;"
        "create function drop_all() returns setof int language sql as $$ delete from v returning id $$;",
        ["t"],
        ["insert into t values (1, 1), (2, -2)"],
        ["select put(3, 4)", "select put(4, -4)", "select * from drop_all() order by 1", "select put(1, 1)"],
    )


async def test_a_view_defaults_and_triggers_of_its_own_are_refused(world: World) -> None:
    with pytest.raises(Exception, match="default of a view's column"):
        await world.load(
            "create table t (a int primary key); create view v as select a from t;"
            "alter view v alter column a set default 3"
        )


SEQUENCES = """
create sequence plain; create sequence wide start 10 minvalue 5 maxvalue 14 increment 2 cycle;
create sequence down increment -3 start -1; create table t (id serial primary key, a int);
create view last_id as select last_value + 1 as next from t_id_seq;
create function peek() returns bigint language sql as $$ select last_value from plain $$;
"""


@pytest.mark.support("SELECT last_value, is_called FROM a sequence", "exact")
def test_a_sequence_can_be_read_as_a_table(compare: Compare) -> None:
    read = [f"select last_value, is_called from {name}" for name in ("plain", "wide", "down", "t_id_seq")]
    steps: list[str] = [
        "select nextval('plain'), nextval('wide'), nextval('down')",
        "insert into t (a) values (1), (2) returning id",
        "select setval('plain', 7), setval('wide', 8, false), setval('down', -7, false)",
        "select nextval('wide')",
        "select nextval('plain'::regclass), currval('plain'::regclass), setval('t_id_seq'::regclass, 20)",
        "select nextval('wide') from generate_series(1, 4)",
        "select setval('wide', 6)",
        "select setval('wide', 6, false)",
        "select setval('wide', 12, false)",
        "select setval('wide', 10, true)",
        "select nextval('wide') from generate_series(1, 5)",
        "select setval('plain', 100, false)",
        "truncate t restart identity",
        "select next from last_id",
        "select peek(), s.last_value, t.is_called from plain s, wide t",
        "insert into t (a) values (5) returning id",
        "select nextval('down') from generate_series(1, 3)",
    ]
    writes = [
        "insert into plain values (1)",
        "insert into plain (nope) values (1)",
        "insert into t_id_seq default values on conflict do nothing",
        "update plain set last_value = 3 where false",
        "update plain p set nope = 3",
        "delete from plain where false",
        "merge into plain using t on true when matched then delete",
        "with gone as (delete from plain returning *) select * from gone",
        "truncate plain",
    ]
    compare(SEQUENCES, ["t"], [], [one for step in steps for one in (step, *read)] + writes)


def test_the_sequence_of_a_column_is_found_by_its_name(compare: Compare) -> None:
    compare(
        """create table t (id serial primary key, n bigint generated always as identity, a int);
        create table "T x" ("Id" serial primary key)""",
        ["t", '"T x"'],
        [],
        [
            ("insert into t (a) values (1)", "select currval(pg_get_serial_sequence('t', 'id'))"),
            "select nextval(pg_get_serial_sequence('t', 'n')), nextval(pg_get_serial_sequence('\"T x\"', 'Id'))",
            "select pg_get_serial_sequence('t', 'a')",
            "select pg_get_serial_sequence('t', 'nope')",
            "select pg_get_serial_sequence('nope', 'id')",
            "select setval(pg_get_serial_sequence('t', 'id'), coalesce(max(id), 1)) from t",
        ],
    )


async def test_what_a_sequence_shows_is_forked_and_rolled_back_with_it(world: World) -> None:
    rollout = await world.open(await world.load("create sequence q start 5; create table t (a int primary key)"))
    read = "select last_value, log_cnt, is_called from q"
    assert await rollout.read(read) == [(5, 0, False)]
    await rollout.run("select nextval('q')")
    chain = await rollout.checkpoint()
    await rollout.run("select setval('q', 50, false)")
    assert await rollout.read(read) == [(50, 0, False)]
    assert await (await rollout.fork(chain)).read(read) == [(5, 0, True)]


@pytest.mark.support("ON CONFLICT or OVERRIDING into a view of the environment", "refused: name the table")
@pytest.mark.parametrize(
    "sql", ["insert into v values (1) on conflict do nothing", "insert into v overriding system value values (1)"]
)
async def test_what_needs_the_tables_keys_is_refused_on_a_view(world: World, sql: str) -> None:
    rollout = await world.open(await world.load("create table t (a int primary key); create view v as select a from t"))
    rewriter = rewrites.Rewriter()
    async with rollout.call() as db:
        with pytest.raises(UnsupportedStatement, match="into a view of the environment") as refused:
            await rewriter.rewrite(sql, db.fetch)
    assert refused.value.hint == "Name the table."
