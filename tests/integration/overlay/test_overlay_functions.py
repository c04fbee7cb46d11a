"""Functions of an environment, in SQL and PL/pgSQL, compared with plain tables."""

from collections.abc import Callable

import pytest

from megamcp.errors import UnsupportedSchema

DDL = """
create table account (id int primary key, owner text unique, cents int not null default 0 check (cents >= 0));
create table entry (id serial primary key, account int not null references account on delete cascade on update cascade,
  cents int not null, day date default now()::date, note text);
create table total (account int primary key, n int not null default 1, cents int not null);
create function open_account(_owner text, _cents int) returns int language plpgsql as $$
declare made int;
begin
  select coalesce(max(id), 0) + 1 into made from account;
  insert into account values (made, _owner, _cents);
  if _cents > 0 then
    insert into entry (account, cents, note) values (made, _cents, 'opened ' || now()::date);
  end if;
  return made;
exception when unique_violation then
  return -1;
end $$;
create function move(_from int, _to int, _cents int) returns setof account language plpgsql as $$
#variable_conflict use_column
declare rows int; line record;
begin
  update account set cents = cents - _cents where id = _from;
  get diagnostics rows = row_count;
  if not found or rows <> 1 then raise exception 'no account %', _from using errcode = 'P0002'; end if;
  update account set cents = cents + _cents where id = _to;
  for line in select * from account where id in (_from, _to) order by id loop
    insert into entry (account, cents) values (line.id, line.cents) returning id into rows;
    insert into total (account, cents) values (line.id, line.cents) on conflict (account)
      do update set n = total.n + 1, cents = excluded.cents returning n into rows;
    return next line;
  end loop;
  return;
end $$;
create function drop_account(_id int) returns bigint language sql as $$
  delete from account where id = _id;
  insert into total (account, cents) values (-1, 0) on conflict (account) do nothing;
  select count(*) from entry;
$$;
create function rename(_id int, _owner text) returns account language sql as
  'update account set owner = _owner where id = _id returning *';
create function entries(_id int) returns bigint language plpgsql volatile as
  $$ begin return (select count(*) from entry where account = _id); end $$;
create function entries_then(_id int) returns bigint language plpgsql stable as
  $$ begin return (select count(*) from entry where account = _id); end $$;
create function bad() returns int language plpgsql stable as $$ begin delete from entry; return 1; end $$;
create function touch_self(_id int) returns int language plpgsql as
  $$ begin update account set cents = cents + 1 where id = _id; return _id; end $$;
create function clamp(n int) returns int language plpgsql immutable as $$ begin return greatest(n, 0); end $$;
alter table entry add constraint sane check (clamp(cents) < 100000);
"""
TABLES = ["account", "entry", "total"]
SEEDS = [
    "insert into account values (1, 'ann', 100), (2, 'bob', 50)",
    "insert into entry (account, cents) values (1, 100), (2, 50)",
]
STATEMENTS = [
    "select open_account('cid', 30)",
    "select open_account('ann', 30)",
    "select open_account('dan', -1)",
    "select * from move(1, 2, 20)",
    "select * from move(1, 2, 500)",
    "select * from move(9, 2, 1)",
    "select id, cents from move(2, 3, 1)",
    "select drop_account(3)",
    "select (rename(1, 'eve')).*",
    "select rename(1, 'bob')",
    "select id, entries(id) from account order by id",
    "insert into entry (account, cents) select id, entries(id) from account, generate_series(1, 2) order by id"
    " returning cents",
    "insert into entry (account, cents) select id, entries_then(id) from account, generate_series(1, 2) order by id"
    " returning cents",
    "insert into entry (account, cents) values (1, 100000)",
    "select bad()",
    "insert into entry (account, cents) values (open_account('fay', 5), 7) returning account",
    "update entry set note = 'moved' where account = open_account('gil', 0)",
    "with a as (insert into total (account, cents) values (open_account('hal', 0), 1) returning account)"
    " insert into entry (account, cents) select account, 2 from a returning account",
    "delete from account where id = touch_self(2) - 1",
    "select touch_self(2)",
    "select max(day), min(note) from entry",
]


@pytest.mark.support(
    "functions in PL/pgSQL and SQL: volatile, stable, immutable; that write; with ON CONFLICT", "exact"
)
def test_functions_read_and_write_as_on_plain_tables(compare: Callable[..., None]) -> None:
    statements = [
        sql for sql in STATEMENTS if "touch_self(2) - 1" not in sql and "entry (account, cents) values (open" not in sql
    ]
    compare(DDL, TABLES, SEEDS, statements)


@pytest.mark.support(
    "a function that writes the table that its caller writes", "refused: which part touched a row can't be told"
)
async def test_a_function_may_not_write_the_table_of_its_caller(world) -> None:
    import asyncpg

    rollout = await world.open(await world.load(DDL, *SEEDS))
    for sql in (
        "update account set cents = 1 where id = touch_self(1)",
        "insert into entry (account, cents) values (open_account('x', 5), 7)",
    ):
        with pytest.raises(asyncpg.FeatureNotSupportedError, match="two parts of one command write"):
            await rollout.run(sql)


HEAD = "create table t (a int primary key); create function f() returns int language plpgsql as $$ "
REFUSED = {
    "EXECUTE in PL/pgSQL": HEAD + "begin execute 'delete from t'; return 1; end $$",
    "transaction control": HEAD + "begin commit; return 1; end $$",
    "MERGE in a function": HEAD
    + "begin merge into t using t s on t.a = s.a when matched then delete; return 1; end $$",
    "TRUNCATE in a function": HEAD + "begin truncate t; return 1; end $$",
    "OVERRIDING in a function": HEAD + "begin insert into t overriding user value values (1); return 1; end $$",
    "SELECT … FOR UPDATE/SHARE in a function": HEAD + "begin perform a from t for update; return 1; end $$",
    "function with another kind of statement": HEAD + "begin create table u (a int); return 1; end $$",
    "WHERE CURRENT OF": HEAD + "declare c cursor for select * from t; begin open c; move c;"
    " delete from t where current of c; return 1; end $$",
    "a command in a function that writes several tables": HEAD
    + "begin with x as (insert into t values (1) returning a) delete from t; return 1; end $$",
    "function with SECURITY": "create function f() returns int security definer language sql as 'select 1'",
    "table in schema 'megamcp'": HEAD + "begin return (select count(*) from megamcp.rollouts); end $$",
    "set_config": HEAD + "begin perform set_config('megamcp.binding', 'x', true); return 1; end $$",
    "writes in BEGIN ATOMIC": "create table t (a int primary key); create function f() returns int begin atomic"
    " insert into t values (1) returning a; end",
    "'now', 'today', 'tomorrow' or 'yesterday' as a time": HEAD
    + "declare x timestamptz := 'now'; begin return 1; end $$",
    "procedure": "create procedure p() language sql as 'select 1'",
    "function in c": "create function f() returns int language c as 'x', 'y'",
}


@pytest.mark.parametrize("construct", REFUSED)
async def test_a_function_that_could_not_be_exact_is_refused_by_name(world, construct: str) -> None:
    with pytest.raises(UnsupportedSchema) as refused:
        await world.load(REFUSED[construct])
    problems = refused.value.extra["problems"]
    expected = "SET megamcp.binding" if construct == "set_config" else construct
    assert expected in [problem["construct"] for problem in problems]
    assert all(problem["reason"] and problem["hint"] and problem["object"] for problem in problems)
