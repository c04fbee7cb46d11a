"""Triggers of an environment, compared with plain tables: what they see, change, leave out, and in which order."""

from collections.abc import Callable

import pytest

DDL = """
create table parent (id int primary key, name text, n int default 0);
create table item (
  id int primary key, p int references parent on delete cascade on update cascade, a int check (a < 100), b text,
  twice int generated always as (a * 2) stored, stamp timestamptz default now(), unique (b)
);
create table log (id serial primary key, what text, old_row text, new_row text);
create table only_statements (id int primary key, v int);

create function note() returns trigger language plpgsql as $$
begin
  insert into log (what, old_row, new_row) values (
    concat_ws(' ', tg_name, tg_when, tg_level, tg_op, tg_table_name, tg_relname, tg_nargs, tg_argv[0], tg_argv[1]),
    old::text, new::text);
  return null;
end $$;
create function tidy() returns trigger language plpgsql as $$
begin
  if tg_op = 'DELETE' then
    if old.a = 7 then return null; end if;
    return old;
  end if;
  if new.b = 'skip' then return null; end if;
  if new.b = 'bad' then raise exception 'bad b' using errcode = 'P0001'; end if;
  new.b := lower(new.b);
  if tg_op = 'UPDATE' and new.a = old.a then new.a := new.a + 1; end if;
  return new;
end $$;
create function more() returns trigger language plpgsql as $$
begin
  new.a := new.a + coalesce(tg_argv[0]::int, 0);
  insert into log (what) values (tg_name || ' ' || coalesce(new.a::text, 'null') || coalesce(new.twice::text, '-'));
  return new;
end $$;
create function count_items() returns trigger language plpgsql as $$
begin
  update parent set n = (select count(*) from item where p = parent.id) where id in (new.p, old.p);
  return null;
end $$;
create trigger a_tidy before insert or update or delete on item for each row execute function tidy();
create trigger b_more before insert or update of a on item for each row when (new.a > 5)
  execute function more('10', 'x');
create trigger "AFTER_FIRST" after insert or update or delete on item for each row
  execute function note('early', 'q"o\\t');
create trigger z_note after insert or delete on item for each row execute function note();
create trigger z_changed after update of a, b on item for each row when (old.* is distinct from new.*)
  execute function note('late');
create trigger z_count after insert or update of p or delete on item for each row execute function count_items();
create trigger parent_note after update on parent for each row when (old.n <> new.n) execute function note();
create trigger s_before before insert or update or delete on only_statements for each statement
  execute function note('s');
create trigger s_after after insert or update of v or delete on only_statements for each statement
  execute function note('t');
create trigger s_row after insert or update or delete on only_statements for each row execute function note('r');
"""
TABLES = ["parent", "item", "log", "only_statements"]
SEEDS = [
    "insert into parent values (1, 'one'), (2, 'two'), (3, 'three')",
    "insert into item (id, p, a, b) values (1, 1, 1, 'A'), (2, 1, 6, 'B'), (3, 2, null, 'C')",
    "insert into only_statements values (1, 1)",
]
STATEMENTS = [
    "insert into item (id, p, a, b) values (10, 1, 2, 'Ten'), (11, 2, 8, 'skip'), (12, null, 9, 'Twelve') returning *",
    "insert into item (id, p, a, b) values (13, 99, 2, 'x')",
    "insert into item (id, p, a, b) values (14, 1, 95, 'y')",
    "insert into item (id, p, a, b) values (14, 1, 2, 'BAD')",
    "insert into item (id, p, a, b) values (14, 1, 2, 'ten')",
    "insert into item (id, p, a, b) values (1, 1, 2, 'dup')",
    "insert into item (id, p, a, b) values (1, 1, 2, 'skip')",
    "update item set a = a where id in (1, 2) returning id, a, b, twice",
    "update item set a = 20 where id = 1 returning id, a, twice",
    "update item set b = 'UP' where id = 1 returning id, a, b, twice",
    "update item set b = b where id = 3 returning *",
    "update item set p = 3 where p = 1",
    "update item set b = 'skip' where id = 2",
    "update item set a = item.a + v.x from (values (1), (2)) v(x) where item.id = 1 returning item.a",
    "update parent set id = 30 where id = 3",
    "update item set a = 7 where id = 10",
    "update item set a = -3 where id = 10 returning a",
    "delete from item where id = 1 returning id",  # of several rows, each side may meet another first
    "delete from item where id = 12 returning id",
    "delete from parent where id = 2",
    "delete from parent where id = 30",
    "merge into item using (values (3, 4), (40, 5)) s(id, a) on item.id = s.id"
    " when matched then update set a = s.a when not matched then insert (id, a, b) values (s.id, s.a, 'M' || s.id)",
    "insert into parent values (50, 'fifty')",
    "insert into item (id, p, a, b) values (50, 50, 1, 'F'), (51, 50, 9, 'G') on conflict (id) do update"
    " set a = excluded.a returning id, a, b",
    "insert into item (id, p, a, b) values (50, 50, 3, 'F2'), (52, 50, 9, 'skip') on conflict (id) do update"
    " set a = excluded.a, b = excluded.b returning id, a, b, twice",
    "insert into item (id, p, a, b) values (51, 50, 3, 'g') on conflict do nothing returning id",
    "insert into item (id, p, a, b) values (60, 50, 3, 'f2') on conflict (b) do update set p = null returning id, p",
    "with d as (delete from item where id = 50 returning id) insert into parent select id + 10, 'w' from d",
    "insert into only_statements values (2, 2), (3, 3)",
    "update only_statements set v = 5",
    "update only_statements set id = id + 10 where id = 3",
    "delete from only_statements where false",
    "merge into only_statements o using (values (1, 1), (9, 9)) s(id, v) on o.id = s.id"
    " when matched then delete when not matched then insert values (s.id, s.v)",
    "truncate log",
    "truncate item",
]


@pytest.mark.support("triggers: BEFORE and AFTER ROW, WHEN, UPDATE OF, arguments, FOR EACH STATEMENT", "exact")
def test_triggers_fire_as_on_plain_tables(compare: Callable[..., None]) -> None:
    compare(DDL, TABLES, SEEDS, STATEMENTS)


RECURSIVE = """
create table tree (id int primary key, up int references tree on delete cascade, depth int);
create table log (id serial primary key, what text);
create function down() returns trigger language plpgsql as $$
begin
  insert into log (what) values ('in ' || new.id);
  if new.depth < 3 then
    insert into tree values (new.id * 10, new.id, new.depth + 1), (new.id * 10 + 1, new.id, new.depth + 1);
  end if;
  insert into log (what) values ('out ' || new.id);
  return null;
end $$;
create function gone() returns trigger language plpgsql as $$
begin insert into log (what) values (tg_name || old.id); delete from tree where id = old.id + 1; return old; end $$;
create trigger down after insert on tree for each row execute function down();
create trigger gone after delete on tree for each row execute function gone();
create trigger "A" after delete on tree for each row execute function gone();
"""


def test_a_trigger_that_fires_itself_goes_depth_first(compare: Callable[..., None]) -> None:
    compare(
        RECURSIVE,
        ["tree", "log"],
        ["insert into tree values (1, null, 2)"],
        [
            "insert into tree values (5, null, 1), (7, 5, 3)",
            "delete from tree where id in (10, 500)",
            "delete from tree where id = 5",
        ],
    )


def test_triggers_of_a_table_without_a_key(compare: Callable[..., None]) -> None:
    ddl = """
    create table bag (a int, b int); create table log (id serial primary key, what text);
    create function f() returns trigger language plpgsql as $$ begin
      insert into log (what) values (concat(tg_when, tg_op, new::text, old::text));
      if tg_op = 'DELETE' then return old; end if; new.b := coalesce(new.b, 0) + 1; return new; end $$;
    create trigger x before insert or update or delete on bag for each row execute function f();
    create trigger y after insert or update or delete on bag for each row execute function f();
    """
    compare(
        ddl,
        ["bag", "log"],
        ["insert into bag values (1, 1), (1, 1)"],
        [
            "insert into bag values (2, null), (2, null) returning *",
            "update bag set a = 3 where a = 1",
            "update bag set a = 4 from (values (1), (2)) v where bag.a = 2",
            "delete from bag where a = 3",
        ],
    )


async def test_triggers_run_as_the_view_role_and_go_round_on_conflict_only_for_statements(world) -> None:
    import asyncpg

    ddl = """
    create table t (a int primary key, who text);
    create table u (a int primary key);
    create function f() returns trigger language plpgsql as $$ begin new.who := current_user; return new; end $$;
    create function g() returns trigger language plpgsql as $$ begin
      if current_user <> 'x' then insert into t values ((select count(*) from t) + 100) on conflict do nothing; end if;
      return null; end $$;
    create trigger f before insert on t for each row execute function f();
    create trigger g after delete on u for each statement execute function g();
    """
    state = await world.load(ddl)
    rollout = await world.open(state)
    assert await rollout.run("insert into t values (1) returning who") == [(state.view_role,)]
    await rollout.run("delete from u")
    assert await rollout.read("select a, who from t where a > 1") == [(101, state.view_role)]
    function = await world.control.fetchval(
        "select p.oid::regprocedure from pg_proc p"
        " where p.pronamespace = $1::text::regnamespace and proname = 't~fire 1'",
        state.visible_schema,
    )
    async with rollout.call() as db:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await db.execute(f"select {function.split('(')[0]}(null, null, '', '', '', '', 0, '', '', '', 0, null)")


@pytest.mark.support(
    "ON CONFLICT or OVERRIDING on a table with triggers FOR EACH STATEMENT",
    "refused: the rows go through another view, which has no such triggers",
)
async def test_on_conflict_does_not_pass_by_statement_triggers(world) -> None:
    from megamcp.errors import UnsupportedStatement
    from megamcp.state.rewrites import Rewriter

    ddl = "create table t (a int generated always as identity primary key); create function f() returns trigger"
    ddl += " language plpgsql as 'begin return null; end'; create trigger x after insert on t execute function f()"
    rollout = await world.open(await world.load(ddl))
    async with rollout.call() as db:
        for sql in (
            "insert into t default values on conflict do nothing",
            "insert into t overriding user value values (1)",
        ):
            with pytest.raises(UnsupportedStatement, match="FOR EACH STATEMENT"):
                await Rewriter().rewrite(sql, db.fetch)


TABLE = "create table t (a int primary key, b int generated always as (a) stored); create function f() returns trigger"
TABLE += " language plpgsql as 'begin return null; end'; "
REFUSED = {
    "constraint trigger": TABLE + "create constraint trigger x after insert on t for each row execute function f()",
    "trigger with transition tables": TABLE
    + "create trigger x after insert on t referencing new table as n for each statement execute function f()",
    "TRUNCATE trigger": TABLE + "create trigger x after truncate on t for each statement execute function f()",
    "trigger that is not simply enabled": TABLE
    + "create trigger x after insert on t for each row execute function f(); alter table t disable trigger x",
    "statement trigger on a table that foreign keys act on": TABLE
    + "create table u (a int primary key, t int references t on delete cascade);"
    " create trigger x after insert on u for each statement execute function f()",
    "trigger name": TABLE + 'create trigger "~x" after insert on t for each row execute function f()',
    "UPDATE OF a generated column": TABLE + "create trigger x after update of b on t for each row execute function f()",
    "INSTEAD OF trigger": TABLE
    + "create view w as select * from t; create trigger x instead of insert on w for each row execute function f()",
}


@pytest.mark.parametrize("construct", REFUSED)
async def test_a_trigger_that_could_not_be_exact_is_refused_by_name(world, construct: str) -> None:
    from megamcp.errors import UnsupportedSchema

    with pytest.raises(UnsupportedSchema) as refused:
        await world.load(REFUSED[construct])
    assert construct in [problem["construct"] for problem in refused.value.extra["problems"]]


def test_a_function_writes_rows_whose_triggers_write_before_and_after(compare: Callable[..., None]) -> None:
    compare(
        """create table t (id int primary key, a int); create table log (n int, what text);
        create function noted() returns trigger language plpgsql as $$ begin
          insert into log values (new.a, tg_when); return new; end $$;
        create trigger b before update on t for each row execute function noted();
        create trigger c after update on t for each row execute function noted();
        create function more() returns text language plpgsql as $$ declare n int; begin
          update t set a = a + 1; get diagnostics n = row_count; update t set a = a + 1 where id < 3; return n; end $$;
        create function each() returns setof t language sql as 'update t set a = a * 2 returning *';""",
        ["t", "log"],
        ["insert into t values (1, 1), (2, 2), (3, 3)"],
        ["select more()", "select * from each() order by id", ("select more()", "update t set a = 0", "select more()")],
    )


def test_a_function_that_writes_the_target_of_its_merge_fails(compare: Callable[..., None]) -> None:
    compare(
        """create table t (id int primary key, n int); create table s (id int primary key, n int);
        create function own(k int) returns int language sql as 'update t set n = n + k where id = k returning k';
        create function other(k int) returns int language sql as 'update s set n = n + k where id = k returning k';""",
        ["t", "s"],
        ["insert into t values (1, 1), (2, 2)", "insert into s values (1, 1), (2, 2)"],
        [
            "merge into t using s on t.id = s.id when matched then update set n = other(1)",
            "merge into t using (values (1), (9)) s (id) on t.id = s.id when matched then update set n = other(1)"
            " when not matched then insert values (s.id, other(2)) returning merge_action(), t.*",
        ],
    )
