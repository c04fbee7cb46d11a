"""What random schemas and programs are made of: one entry a construct, each with a probe.

The generator draws from every construct of the lists; the loader and the statement check say which they take.
So a construct joins the search on the day it is accepted, and the report names those that are refused still.
"""

import asyncpg

from megamcp import state as overlay
from megamcp.errors import UnsupportedSchema, UnsupportedStatement
from megamcp.state.statements import check_statement
from tests.integration.overlay.differential_schema import CLOCK_AT

_PARENT = "create table parent (id int primary key, a int, b int, unique (a, b));"
_TWICE = "create function twice(n int) returns int language sql immutable return n * 2;"
_WRITER = "create table log (id int primary key, line text);"

SCHEMA = {
    "table without a key": "create table t (a int, b text);",
    "table with only UNIQUE NOT NULL": "create table t (a int not null unique, b text);",
    "PRIMARY KEY deferrable": "create table t (a int primary key deferrable);",
    "UNIQUE nulls not distinct": "create table t (id int primary key, a int, unique nulls not distinct (a));",
    "UNIQUE partial": "create table t (id int primary key, a int); create unique index on t (a) where a > 1;",
    "UNIQUE over an expression": "create table t (id int primary key, a text); create unique index on t (lower(a));",
    "UNIQUE include": "create table t (id int primary key, a int, b int, unique (a) include (b));",
    "UNIQUE deferrable": "create table t (id int primary key, a int unique deferrable);",
    "UNIQUE initially deferred": "create table t (id int primary key, a int unique initially deferred);",
    "UNIQUE nulls not distinct, deferrable": (
        "create table t (id int primary key, a int, unique nulls not distinct (a) deferrable);"
    ),
    "UNIQUE partial over an expression, nulls not distinct": (
        "create table t (id int primary key, a text);"
        " create unique index on t (lower(a)) nulls not distinct where a <> '';"
    ),
    "FOREIGN KEY of another type": f"{_PARENT} create table t (id int primary key, r bigint references parent);",
    "FOREIGN KEY deferrable": f"{_PARENT} create table t (id int primary key, r int references parent deferrable);",
    "FOREIGN KEY initially deferred": (
        f"{_PARENT} create table t (id int primary key, r int references parent initially deferred);"
    ),
    "FOREIGN KEY match full": (
        f"{_PARENT} create table t (id int primary key, a int, b int,"
        " foreign key (a, b) references parent (a, b) match full);"
    ),
    "FOREIGN KEY set null (columns)": (
        f"{_PARENT} create table t (id int primary key, a int, b int,"
        " foreign key (a, b) references parent (a, b) on delete set null (b));"
    ),
    "cycle of FOREIGN KEYs": (
        "create table t (id int primary key, r int); create table u (id int primary key, r int references t);"
        " alter table t add foreign key (r) references u;"
    ),
    "composite type": "create type pair as (n int, word text); create table t (id int primary key, p pair);",
    "array of composite type": (
        "create type pair as (n int, word text); create table t (id int primary key, p pair[]);"
    ),
    "domain over an array": (
        "create domain tags as text[] check (cardinality(value) < 4); create table t (id int primary key, p tags);"
    ),
    "range type of its own": (
        "create type span as range (subtype = numeric); create table t (id int primary key, p span);"
    ),
    "multirange": "create table t (id int primary key, p int4multirange);",
    "domain over a domain": (
        "create domain a as int check (value > 0); create domain b as a check (value < 9);"
        " create table t (id int primary key, p b);"
    ),
    "domain over an enum": (
        "create type mood as enum ('sad', 'ok'); create domain calm as mood check (value <> 'ok');"
        " create table t (id int primary key, p calm);"
    ),
    "domain that is NOT NULL": "create domain w as text not null; create table t (id int primary key, p w);",
    "domain over a composite type": (
        "create type pair as (n int, word text); create domain w as pair check ((value).n > 0);"
        " create table t (id int primary key, p w);"
    ),
    "composite type in a composite type": (
        "create type pair as (n int, word text); create type two as (p pair, n int[]);"
        " create table t (id int primary key, p two);"
    ),
    "COLLATE": "create table t (id int primary key, a text collate \"C\");",
    "tsvector": "create table t (id int primary key, p tsvector);",
    "bytea": "create table t (id int primary key, p bytea);",
    "json": "create table t (id int primary key, p json);",
    "point": "create table t (id int primary key, p point);",
    "GENERATED stored": "create table t (id int primary key, g int generated always as (id * 2) stored);",
    "GENERATED virtual": "create table t (id int primary key, g int generated always as (id * 2) virtual);",
    "identity": "create table t (id int generated always as identity primary key);",
    "shared sequence": (
        "create sequence numbers; create table t (id int primary key default nextval('numbers'));"
        " create table u (id int primary key default nextval('numbers'));"
    ),
    "sequence with options": "create table t (id int primary key); create sequence s maxvalue 7 increment 2 cycle;",
    "index over an expression": "create table t (id int primary key, a text); create index on t (lower(a));",
    "index partial": "create table t (id int primary key, a text); create index on t (a) where a <> '';",
    "view over a view": (
        "create table t (id int primary key); create view v as select id from t;"
        " create view w as select * from v where id > 1;"
    ),
    "view that joins": (
        "create table t (id int primary key, r int references t);"
        " create view v as select c.*, p.id as parent from t c left join t p on p.id = c.r;"
    ),
    "function in DEFAULT": f"{_TWICE} create table t (id int primary key, a int default twice(2));",
    "function in CHECK": f"{_TWICE} create table t (id int primary key, a int check (twice(a) > 2));",
    "function in a generated column": (
        f"{_TWICE} create table t (id int primary key, a int generated always as (twice(id)) stored);"
    ),
    "function in an index": f"{_TWICE} create table t (id int primary key); create unique index on t (twice(id));",
    "function in SQL": "create function twice(n int) returns int language sql immutable return n * 2;",
    "function in PL/pgSQL": (
        "create function clamp(n int) returns int language plpgsql immutable as"
        " $$ begin if n > 3 then return 3; end if; return n; end $$;"
    ),
    "function that reads": (
        "create table t (id int primary key); create function many() returns bigint language sql stable"
        " as 'select count(*) from t';"
    ),
    "function in SQL that writes": (
        f"{_WRITER} create function note(n int) returns void language sql as 'insert into log values (n)';"
    ),
    "function in PL/pgSQL that writes": (
        f"{_WRITER} create function note(n int) returns int language plpgsql as"
        " $$ begin insert into log values (n); return n; end $$;"
    ),
    "function in PL/pgSQL that changes rows": (
        f"{_WRITER} create function f() returns int language plpgsql as $$ declare n int; begin"
        " update log set line = ''; get diagnostics n = row_count; delete from log; return n; end $$;"
    ),
    "function with ON CONFLICT": (
        f"{_WRITER} create function f() returns void language sql as"
        " 'insert into log values (1) on conflict (id) do update set line = excluded.line';"
    ),
    "function with EXCEPTION": (
        f"{_WRITER} create function f() returns text language plpgsql as $$ begin insert into log values (1);"
        " return ''; exception when unique_violation then return sqlstate; end $$;"
    ),
    "function that returns rows": (
        "create table t (id int primary key); create function f() returns table (a int) language sql stable"
        " as 'select id from t';"
    ),
    "several triggers of one event": (
        f"{_WRITER} create function f() returns trigger language plpgsql as $$ begin return new; end $$;"
        " create trigger t before insert on log for each row execute function f();"
        " create trigger u before insert on log for each row execute function f();"
    ),
    "trigger that writes by ON CONFLICT": (
        f"{_WRITER} create table t (id int primary key);"
        " create function f() returns trigger language plpgsql as $$ begin"
        " insert into log values (1, tg_argv[0]) on conflict do nothing; return null; end $$;"
        " create trigger t after insert on t for each row execute function f('x');"
    ),
    "trigger before row": (
        f"{_WRITER} create function f() returns trigger language plpgsql as $$ begin return new; end $$;"
        " create trigger t before insert on log for each row execute function f();"
    ),
    "trigger after row": (
        f"{_WRITER} create function f() returns trigger language plpgsql as $$ begin return null; end $$;"
        " create trigger t after insert on log for each row execute function f();"
    ),
    "trigger with WHEN": (
        f"{_WRITER} create function f() returns trigger language plpgsql as $$ begin return new; end $$;"
        " create trigger t before update on log for each row when (new.line is distinct from old.line)"
        " execute function f();"
    ),
    "trigger for each statement": (
        f"{_WRITER} create function f() returns trigger language plpgsql as $$ begin return null; end $$;"
        " create trigger t after insert on log for each statement execute function f();"
    ),
}  # fmt: skip

STATEMENTS = {
    "writing CTE": "with x as (insert into t (a) values (1) returning a) select * from x",
    "ON CONFLICT DO NOTHING": "insert into t (a) values (1) on conflict do nothing",
    "ON CONFLICT DO UPDATE": "insert into t (a) values (1) on conflict (a) do update set a = 2",
    "OVERRIDING": "insert into t (a) overriding system value values (1)",
    "TRUNCATE": "truncate t",
    "FOR UPDATE": "select * from t for update",
    "cursor": "declare c cursor for select 1",
    "ON CONFLICT in WITH": (
        "with x as (insert into t (a) values (1) on conflict do nothing returning a) select * from x"
    ),
    "INSERT in WITH and after it": (
        "with x as (insert into t (a) values (1) returning a) insert into u (a) select a from x"
    ),
    "COPY": "copy t from stdin",
    "MERGE": "merge into t using u on t.a = u.a when matched then delete",
    "SET CONSTRAINTS": "set constraints all deferred",
    "keyword time": "select current_timestamp",
    "sequence functions": "select nextval('s')",
}


async def accepted(conn: asyncpg.Connection) -> tuple[frozenset[str], dict[str, str]]:
    """Names of the constructs that are taken, and the reason for each that is not."""
    taken: set[str] = set()
    refused: dict[str, str] = {}
    for name, ddl in SCHEMA.items():
        transaction = conn.transaction()
        await transaction.start()
        try:
            await overlay.load(
                conn, ddl=ddl, seeds=[], clock=CLOCK_AT, seed=7, tool_password="probe", query_password="probe"
            )
            taken.add(name)
        except UnsupportedSchema as error:
            refused[name] = str(error)
        finally:
            await transaction.rollback()
    for name, sql in STATEMENTS.items():
        try:
            check_statement(sql)
            taken.add(name)
        except UnsupportedStatement as error:
            refused[name] = str(error)
    return frozenset(taken), refused
