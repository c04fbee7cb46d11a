"""What the statement check accepts and refuses, and that no text harms the process."""

import subprocess
import sys
import threading
import timeit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamcp.errors import UnsupportedStatement
from megamcp.state.statements import MAX_BYTES, check_query, check_statement

ACCEPTED = [
    "select 1",
    "select o.id, c.name from orders o join customers c on c.id = o.customer where o.id = $1::integer",
    "select v_0123456789abcdef.orders.id from v_0123456789abcdef.orders",
    "with recursive t(n) as (values (1) union all select n + 1 from t where n < 9) select n from t",
    "select count(*) filter (where paid), sum(total) over (partition by customer order by id) from orders",
    "select a from t union all select b from u intersect select 3 order by 1 limit 2 offset 1",
    "table orders",
    "values (1, 'a'), (2, 'b')",
    "select now(), now()::date, random(), gen_random_uuid(), nextval('orders_id_seq')",
    "select age(now(), created), age(created), pg_catalog.age(a, b), timeofday(), uuidv7() from orders",
    "select extract(year from created), created at time zone 'UTC', substring(a from 1), trim(b) from t",
    "select 'now', 'today'::text, '2026-01-01'::date, date '2026-01-01', timestamptz '2026-01-01T00:00:00Z'",
    'select x::pg_catalog.int4, x::numeric(10, 2)[], x operator(pg_catalog.+) 1, x collate "C" from t',
    "select j ->> 'a', j @> '{\"b\": 1}', jsonb_path_query(j, '$.a[*]') from t",
    "select * from json_table(jsonb '[1]', '$[*]' columns (a int path '$'))",
    "select min(x) as xmin from t order by xmin",
    "select t.xmin from (select 1 as xmin) as t",
    "select s.ctid from (select 1) as s(ctid)",
    "select pg_typeof(a), pg_sleep(0) from t",
    "select c.relname from pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace",
    "select table_name from information_schema.tables",
    "insert into orders (id, total) values ($1::integer, default), (2, 3) returning *",
    "insert into orders select * from orders_new",
    "insert into orders default values",
    "insert into t overriding user value select 1",
    "insert into t (a) overriding system value values (1)",
    "declare c cursor for select * from t for update",
    "select * from t where a in (select b from u for key share)",
    "select * from t for update",
    "insert into t values (current_time)",
    "select localtimestamp",
    "select localtime, 1",
    "select current_date - 1",
    "select current_timestamp(3)",
    "select current_timestamp",
    "truncate t",
    "insert into t values (1) on conflict do nothing",
    "insert into t values (1) on conflict (a) do update set b = 1",
    "with n as (select 1 as id) insert into orders (id) select id from n returning id",
    "update orders o set a = a + i.b from items i where i.id = o.item returning old.a, new.a",
    "update orders set (a, b) = (select 1, 2), c = default",
    "delete from orders using customers c where c.id = customer and c.gone",
    "merge into orders o using incoming i on i.id = o.id when matched then update set total = i.total "
    "when not matched by source then delete when not matched then insert (id) values (i.id) "
    "returning merge_action(), o.*",
    "with d as (delete from t returning *) select * from d",
    "with d as (delete from t returning *) insert into u select * from d",
    "with m as (merge into t using s on true when matched then delete returning t.a) select * from m",
    "declare c cursor for select * from orders",
    "fetch 3 from c",
    "close c",
    "set constraints all deferred",
    "set constraints a, b immediate",
    "show statement_timeout",
    "set local statement_timeout = '5s'",
    "set local enable_seqscan to off",
    "select set_config('work_mem', '8MB', true)",
    "select 1;",
    "select current_user, current_schema",
    'select "Now"() from t',
    "",
    ";",
    "-- nothing",
]

REFUSED = {
    "select 1; select 2": "more than one statement",
    "begin": "transaction control",
    "commit": "transaction control",
    "rollback": "transaction control",
    "savepoint a": "transaction control",
    "rollback to a": "transaction control",
    "set transaction isolation level serializable": "SET or RESET",
    "set megamcp.binding = 'x'": "SET megamcp.binding",
    "set local megamcp.binding = 'x'": "SET megamcp.binding",
    "set search_path = public": "SET search_path",
    "set local search_path = public": "SET search_path",
    "set role postgres": "SET role",
    "set session authorization default": "SET session_authorization",
    "set local row_security = off": "SET row_security",
    "set local timezone = 'Asia/Tokyo'": "SET timezone",
    "set statement_timeout = 0": "SET statement_timeout",
    "reset all": "SET or RESET",
    "reset role": "SET or RESET",
    "select set_config('megamcp.binding', 'x', true)": "SET megamcp.binding",
    "select set_config('work_mem', '1MB', false)": "SET work_mem",
    "select set_config('mega' || 'mcp.binding', 'x', true)": "SET or RESET",
    "select pg_catalog.set_config(a, b, true) from t": "SET or RESET",
    "create table t (a int)": "CREATE TABLE",
    "create table t as select 1": "CREATE TABLE AS",
    "create temp table t (a int)": "CREATE TABLE",
    "create view v as select 1": "VIEW",
    "create function f() returns int language sql as 'select 1'": "CREATE FUNCTION",
    "alter table t add b int": "ALTER TABLE",
    "drop table t": "DROP",
    "comment on table t is 'x'": "COMMENT",
    "create role r": "CREATE ROLE",
    "grant select on t to r": "GRANT or REVOKE",
    "revoke r from s": "GRANT or REVOKE",
    "copy t from stdin": "COPY",
    "copy t to '/tmp/x'": "COPY",
    "copy (select 1) to program 'sh'": "COPY",
    "lock table t": "LOCK",
    "merge into t using s on true when not matched then insert (a) overriding user value values (1)": (
        "OVERRIDING in MERGE"
    ),
    "select * into u from t": "SELECT INTO",
    "declare c cursor with hold for select 1": "DECLARE … WITH HOLD",
    "update t set a = 1 where current of c": "WHERE CURRENT OF",
    "prepare p as select 1": "PREPARE",
    "execute p": "EXECUTE",
    "deallocate all": "DEALLOCATE",
    "listen x": "LISTEN",
    "notify x": "NOTIFY",
    "do 'begin end'": "DO",
    "call p()": "CALL",
    "vacuum": "VACUUM or ANALYZE",
    "analyze t": "VACUUM or ANALYZE",
    "discard all": "DISCARD",
    "explain select * from orders": "EXPLAIN",
    "explain (analyze, buffers) update orders set total = 1": "EXPLAIN",
    "with d as (delete from t returning *) update t set a = 1": "two parts of one command that write table t",
    "with d as (delete from t), e as (insert into t select 1) select 1": "two parts of one command that write table t",
    "with d as (delete from u returning *) merge into t using d on true when matched then delete": (
        "MERGE and another write in one command"
    ),
    "select pg_catalog.now()": "pg_catalog.now()",
    "select pg_catalog.random()": "pg_catalog.random()",
    "select pg_catalog.age(created) from t": "pg_catalog.age()",
    "select pg_catalog.uuidv7()": "pg_catalog.uuidv7()",
    "select setseed(0.5)": "setseed()",
    "select 'now'::timestamptz": "'now', 'today', 'tomorrow' or 'yesterday' as a time",
    "select date 'Today'": "'now', 'today', 'tomorrow' or 'yesterday' as a time",
    "select cast('tomorrow 10:00' as timestamp)": "'now', 'today', 'tomorrow' or 'yesterday' as a time",
    "select * from t tablesample system (10)": "TABLESAMPLE",
    "select pg_advisory_xact_lock(1)": "pg_advisory_xact_lock()",
    "select pg_try_advisory_lock(1)": "pg_try_advisory_lock()",
    "select lo_import('/etc/passwd')": "lo_import()",
    "select * from dblink('x', 'select 1') as t(a int)": "dblink()",
    "select pg_read_file('/etc/passwd')": "pg_read_file()",
    "select pg_terminate_backend(1)": "pg_terminate_backend()",
    "select pg_catalog.pg_ls_dir('.')": "pg_catalog.pg_ls_dir()",
    "select query_to_xml('select 1', true, true, '')": "query_to_xml()",
    "select txid_current()": "txid_current()",
    "select pg_notify('a', 'b')": "pg_notify()",
    "select * from megamcp.rollouts": "table in schema 'megamcp'",
    "select * from s_0123456789abcdef.orders": "table in schema 's_0123456789abcdef'",
    "select s_0123456789abcdef.orders.id from orders": "table in schema 's_0123456789abcdef'",
    "select * from public.orders": "table in schema 'public'",
    "delete from other.public.orders": "table in schema 'other'",
    "insert into s_0123456789abcdef.orders values (1)": "table in schema 's_0123456789abcdef'",
    "select megamcp.call_begin('x')": "function in schema 'megamcp'",
    "select null::public.mood": "type in schema 'public'",
    "select 1 operator(public.+) 1": "operator in schema 'public'",
    "select * from pg_stat_activity": "relation pg_stat_activity",
    "select * from pg_catalog.pg_locks": "relation pg_locks",
    "select ctid from t": "system column ctid",
    "select t.xmin from t": "system column xmin",
    "delete from t where ctid = '(0,1)'": "system column ctid",
    "select t.tableoid::regclass from t": "system column tableoid",
    "select 'a\0b'": "invalid text",
    "select '\ud800'": "invalid text",
}


@pytest.mark.parametrize("sql", ACCEPTED)
def test_an_exact_statement_is_accepted(sql: str) -> None:
    check_statement(sql)


@pytest.mark.parametrize(("sql", "construct"), REFUSED.items(), ids=range(len(REFUSED)))
def test_an_inexact_statement_is_refused_by_name(sql: str, construct: str) -> None:
    with pytest.raises(UnsupportedStatement) as caught:
        check_statement(sql)
    error = caught.value
    assert error.extra["construct"] == construct
    assert error.extra["reason"] in error.message
    assert error.hint
    assert error.code == "unsupported_statement"
    assert error.sqlstate == "0A000"


@pytest.mark.parametrize("sql", ["seelct 1", "select 'abc", "select $$", "update t", "select /* ", "insert into"])
def test_a_syntax_error_is_left_to_postgresql(sql: str) -> None:
    check_statement(sql)
    check_query(sql)


def test_savepoints_pass_when_asked_for() -> None:
    for sql in ("savepoint a", "release savepoint a", "rollback to savepoint a"):
        check_statement(sql, savepoints=True)
    for sql in ("commit", "rollback", "begin", "prepare transaction 'a'"):
        with pytest.raises(UnsupportedStatement):
            check_statement(sql, savepoints=True)


def test_only_the_named_visible_schema_passes() -> None:
    check_statement("select * from v_0123456789abcdef.t", visible="v_0123456789abcdef")
    with pytest.raises(UnsupportedStatement):
        check_statement("select * from v_fedcba9876543210.t", visible="v_0123456789abcdef")


QUERIES = [
    "select * from orders",
    "values (1)",
    "table orders",
    "with a as (select 1) select * from a",
]
NO_QUERIES = [
    "insert into t values (1)",
    "update t set a = 1",
    "delete from t",
    "merge into t using s on true when matched then delete",
    "explain select 1",
    "explain (format json) select 1",
    "explain analyze select 1",
    "explain (analyze true) select 1",
    "explain delete from t",
    "with d as (delete from t returning *) select * from d",
    "select * into u from t",
    "select 1 for update",
    "select nextval('s')",
    "select setval('s', 1)",
    "select pg_sleep(1)",
    "show all",
    "set local work_mem = '1MB'",
    "declare c cursor for select 1",
    "fetch c",
    "begin",
    "drop table t",
    "select 1; select 2",
    "select * from megamcp.rollouts",
]


@pytest.mark.parametrize("sql", QUERIES)
def test_a_query_is_accepted(sql: str) -> None:
    check_query(sql)


@pytest.mark.parametrize("sql", NO_QUERIES)
def test_what_is_no_query_is_refused(sql: str) -> None:
    with pytest.raises(UnsupportedStatement):
        check_query(sql)


def test_large_flat_statements_are_accepted() -> None:
    rows = ", ".join(f"(${i}::integer, ${i + 1}::varchar, now())" for i in range(1, 16_000, 2))
    check_statement(f"insert into t (a, b, c) values {rows}")
    check_statement("select * from t where " + " or ".join(["(a = 1 and b = 2)"] * 700))
    check_statement("select * from t where a in (" + ", ".join(["1"] * 20_000) + ")")


def test_a_few_hundred_chained_operators_are_accepted() -> None:
    check_statement("select " + " || ".join(["a"] * 200) + " from t")


HOSTILE = {
    "operators": "select " + "1+" * 200_000 + "1",
    "set operations": "select 1" + " union select 1" * 40_000,
    "parentheses": "select " + "(" * 200_000 + "1" + ")" * 200_000,
    "not": "select " + "not " * 200_000 + "true",
    "casts": "select 1" + "::int" * 100_000,
    "joins": "select 1 from t" + " cross join t" * 60_000,
    "indirection": "select a" + "[1]" * 200_000,
    "subselects": "select " + "(select " * 50_000 + "1" + ")" * 50_000,
    "functions": "select " + "f(1," * 100_000 + "1" + ")" * 100_000,
    "functions with chains": "select " + "1+f(1," * 60_000 + "1" + ")" * 60_000,
    "chains past commas": "select " + "f(1,2)+" * 100_000 + "1",
    "unary": "select " + "- " * 300_000 + "1",
    "huge": "select '" + "x" * (MAX_BYTES + 1) + "'",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_nesting_is_refused_and_harms_nothing(name: str) -> None:
    with pytest.raises(UnsupportedStatement) as caught:
        check_statement(HOSTILE[name])
    assert caught.value.extra["construct"] in {"statement nested too deep", "statement too long"}


def test_the_deepest_text_that_reaches_the_parser_fits_a_small_stack() -> None:
    """In a process of its own, since a stack overflow would be a crash."""
    program = (
        "import threading\n"
        "from megamcp.errors import UnsupportedStatement\n"
        "from megamcp.state.statements import check_statement\n"
        "def run():\n"
        "    for text in ('select ' + '1+' * 3995 + '1', 'select 1' + '::a' * 1990):\n"
        "        try: check_statement(text)\n"
        "        except UnsupportedStatement: pass\n"
        "threading.stack_size(4 * 1024 * 1024)\n"
        "thread = threading.Thread(target=run); thread.start(); thread.join()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


WORDS = "select from t a.b ( ) , + :: int now $1 ; -- /* */ $$ case when end".split()  # noqa: SIM905


def _has_a_verdict(sql: str) -> bool:
    for check in (check_statement, check_query):
        try:
            check(sql)
        except UnsupportedStatement as error:
            if not error.hint:
                return False
    return True


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS)))
def test_any_text_gives_a_verdict(words: list[str]) -> None:
    assert _has_a_verdict(" ".join(words))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_unicode_gives_a_verdict(text: str) -> None:
    assert _has_a_verdict(text)


def test_a_cached_verdict_takes_under_two_microseconds() -> None:
    sql = "select o.id, c.name from orders o join customers c on c.id = o.customer where o.id = $1::integer"
    check_statement(sql)
    best = min(timeit.repeat(lambda: check_statement(sql), number=2_000, repeat=20)) / 2_000
    assert best < 2e-6


def test_checks_from_many_threads_agree() -> None:
    verdicts: list[bool] = []

    def run(start: int) -> None:
        for i in range(start, start + 200):
            check_statement(f"select {i} from t")
            try:
                check_statement(f"select {i} into u from t")
            except UnsupportedStatement:
                verdicts.append(True)

    threads = [threading.Thread(target=run, args=(n * 1000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(verdicts) == 800
