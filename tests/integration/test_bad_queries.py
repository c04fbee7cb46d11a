"""An evaluator's SQL is foreign text: it reads its rollout's rows only, changes nothing, and ends in time."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from megamcp.testing import running_gateway
from tests.integration.conftest import copy_of
from tests.integration.promises.world import World
from tests.integration.rest import Rest


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def curious(postgres_dsn: str, ledger_template: str) -> AsyncIterator[World]:
    """A gateway with little patience for queries."""
    async with (
        copy_of(postgres_dsn, ledger_template, f"mm_curious_{secrets.token_hex(4)}") as dsn,
        running_gateway(
            dsn,
            query_timeout_s=1,
            query_rows=250,
            query_connections=2,
            max_result_bytes=300_000,
            reap_interval_s=3600,
        ) as running,
    ):
        yield World(running.services, running.url, dsn)


@pytest_asyncio.fixture(loop_scope="session")
async def rest(curious: World) -> AsyncIterator[Rest]:
    async with httpx.AsyncClient(base_url=curious.url, timeout=20) as http:
        yield Rest(http)


REFUSED = [
    "select 1; select 2",
    "select 1; commit; delete from item",
    "insert into item values ('x', '1')",
    "update item set value = '1'",
    "delete from item",
    "with gone as (delete from item returning *) select * from gone",
    "select * into stolen from item",
    "create temp table stolen as select * from item",
    "select * from item for update",
    "begin",
    "commit",
    "rollback",
    "savepoint x",
    "set role postgres",
    "reset role",
    "reset all",
    "set session authorization default",
    "set statement_timeout = 0",
    "set transaction read write",
    "show all",
    "select set_config('megamcp.binding', '', true)",
    "select set_config('statement_timeout', '0', false)",
    "select pg_catalog.set_config('statement_timeout', '0', false)",
    "select pg_advisory_lock(1)",
    "select pg_try_advisory_xact_lock(1)",
    "select pg_advisory_unlock_all()",
    "select pg_sleep(60)",
    "select pg_sleep_for('1 minute')",
    "select pg_terminate_backend(1)",
    "select pg_cancel_backend(1)",
    "select pg_notify('megamcp_cancellations', '[]')",
    "listen megamcp_cancellations",
    "copy item to stdout",
    "copy item to program 'id'",
    "copy item from '/etc/passwd'",
    "select lo_create(0)",
    "select lo_import('/etc/passwd')",
    "select pg_read_file('/etc/passwd')",
    "select pg_ls_dir('.')",
    "select pg_stat_file('.')",
    "select nextval('entry_id_seq')",
    "select setval('entry_id_seq', 100)",
    "select * from megamcp.rollouts",
    "select secret from megamcp.keys",
    "select megamcp.bind('{}', 0, 0, now(), true)",
    "select megamcp.query_begin('x')",
    "select * from pg_authid",
    "select * from pg_stat_activity",
    "select query_to_xml('select 1', true, true, '')",
    "select database_to_xml(true, true, '')",
    "do $$ begin perform 1; end $$",
    "call something()",
    "prepare x as select 1",
    "execute x",
    "declare c cursor with hold for select 1",
    "explain analyze delete from item",
    "explain analyze select 1",
    "lock table item",
    "vacuum",
    "truncate item",
    "drop table item",
    "grant all on item to public",
    "select " + "(" * 5000 + "1" + ")" * 5000,
    "select " + "1+" * 40_000 + "1",
    "select 'a\0b'",
    " ",
    " ; -- nothing",
]


@pytest.mark.parametrize("sql", REFUSED, ids=lambda sql: sql[:60].replace("\0", "NUL"))
async def test_what_is_no_plain_query_is_refused_by_name(rest: Rest, sql: str) -> None:
    rollout = await rest.open()
    told = await rest.refused(422, "unsupported_statement", "POST", f"/v1/rollouts/{rollout}/query", {"sql": sql})
    assert told["construct"]
    assert told["reason"]
    assert told["hint"]


@pytest.mark.parametrize(
    ("sql", "sqlstate"),
    [
        ("selec 1", "42601"),
        ("select 1/0", "22012"),
        ("select * from nowhere", "42P01"),
        ("select nothing from item", "42703"),
        ("select 'x'::integer", "22P02"),
        ("select value::integer from item", "22P02"),
        ("select nowhere()", "42883"),
        ("select $1", None),
    ],
)
async def test_an_error_of_postgresql_comes_with_its_state(rest: Rest, sql: str, sqlstate: str | None) -> None:
    rollout = await rest.open()
    told = await rest.refused(422, "query_failed", "POST", f"/v1/rollouts/{rollout}/query", {"sql": sql})
    assert told.get("sqlstate") == sqlstate
    again = await rest.done("POST", f"/v1/rollouts/{rollout}/query", {"sql": "select count(*) from item"})
    assert again["rows"] == [[5]]


async def test_the_query_role_has_no_right_that_the_check_alone_would_withhold(curious: World, rest: Rest) -> None:
    """Behind the check stands the role: what is asked through a rewritten name or a catalogue shows nothing either."""
    rollout, stranger = await rest.open(), await rest.open()
    await rest.call(stranger, "put", key="foreign", value="f0reign-value")
    (visible,) = await curious.execute("select nspname from pg_namespace where nspname like 'v\\_%'")
    path = f"/v1/rollouts/{rollout}/query"
    for sql in (
        f"select * from {visible['nspname']}.item",
        "select * from pg_stats",
        "select most_common_vals::text, histogram_bounds::text from pg_catalog.pg_stats",
        "select * from information_schema.tables",
        "select table_to_xml('item'::regclass, true, true, '')",
        "select * from item where value::text like '%f0reign%' or 1 = 1",
        "select current_setting('megamcp.binding')",
        "select string_agg(value, ',') from (table item) as all_of_it",
    ):
        answer = await rest.http.post(path, json={"sql": sql})
        assert answer.status_code in (200, 422), answer.text
        assert "f0reign" not in answer.text.replace("%f0reign%", ""), sql
    rights = await curious.execute(
        "select r.rolname, r.rolsuper, r.rolcreaterole, r.rolcreatedb, r.rolbypassrls, r.rolreplication,"
        " has_schema_privilege(r.oid, 'megamcp', 'usage') and has_table_privilege(r.oid, 'megamcp.keys', 'select')"
        " from pg_roles r where r.rolname like 'megamcp\\_query\\_%'"
    )
    assert rights
    for row in rights:
        assert not any(list(row.values())[1:]), row


@pytest.mark.parametrize(
    "sql",
    [
        "select count(*) from generate_series(1, 1000000000000)",
        "with recursive r(n) as (select 1 union all select n + 1 from r) select count(*) from r",
        "select * from item a, generate_series(1, 1000000000) as g(n) where a.value || g.n = '!'",
    ],
    ids=["aggregate", "recursion", "cross join"],
)
async def test_a_query_that_takes_too_long_is_ended_and_leaves_no_lock(curious: World, rest: Rest, sql: str) -> None:
    rollout = await rest.open()
    running = [
        asyncio.create_task(rest.http.post(f"/v1/rollouts/{rollout}/query", json={"sql": sql})) for _ in range(2)
    ]
    await asyncio.sleep(0.2)
    other = await rest.open()
    await rest.call(other, "put", key="meanwhile", value="1")
    for task in running:
        answer = await asyncio.wait_for(task, 10)
        assert (answer.status_code, answer.json()["code"]) == (504, "query_timeout")
    await rest.call(rollout, "put", key="after", value="1")
    held = await curious.execute(
        "select a.application_name from pg_locks l join pg_stat_activity a using (pid)"
        " where l.locktype = 'advisory' and a.datname = current_database() and a.application_name = 'megamcp query'"
    )
    assert held == []


async def test_more_queries_than_connections_wait_or_are_429(rest: Rest) -> None:
    rollouts = [await rest.open() for _ in range(6)]
    sql = "select count(*) from generate_series(1, 1000000000000)"
    answers = await asyncio.gather(
        *(rest.http.post(f"/v1/rollouts/{rollout}/query", json={"sql": sql}) for rollout in rollouts)
    )
    assert {(answer.status_code, answer.json()["code"]) for answer in answers} <= {
        (504, "query_timeout"),
        (429, "queries_busy"),
    }
    for rollout in rollouts:
        assert (await rest.done("POST", f"/v1/rollouts/{rollout}/query", {"sql": "select 1"}))["rows"] == [[1]]


async def test_a_query_may_group_by_a_primary_key(rest: Rest) -> None:
    rollout = await rest.open()
    sql = "select key, value from item group by key order by key limit 2"
    found = await rest.done("POST", f"/v1/rollouts/{rollout}/query", {"sql": sql})
    same = await rest.done("POST", f"/v1/rollouts/{rollout}/query", {"sql": sql.replace("group by key ", "")})
    assert found["rows"] == same["rows"] != []


async def test_a_huge_result_is_cut_by_rows_and_by_bytes(rest: Rest) -> None:
    path = f"/v1/rollouts/{await rest.open()}/query"
    for rows, truncated in [(249, False), (250, False), (251, True), (100_000, True)]:
        result = await rest.done("POST", path, {"sql": f"select n from generate_series(1, {rows}) as g(n)"})
        assert result["rows"] == [[n] for n in range(1, min(rows, 250) + 1)]
        assert result["truncated"] is truncated
    result = await rest.done("POST", path, {"sql": "select repeat('x', 100000) from generate_series(1, 100)"})
    assert (len(result["rows"]), result["truncated"]) == (2, True)
    result = await rest.done("POST", path, {"sql": "select repeat('x', 10000000)"})
    assert (result["columns"], result["rows"], result["truncated"]) == (["repeat"], [], True)


async def test_a_query_changes_nothing_that_a_reader_can_see(rest: Rest) -> None:
    rollout = await rest.open()
    await rest.call(rollout, "draw")
    digest = await rest.done("GET", f"/v1/rollouts/{rollout}/digest")
    path = f"/v1/rollouts/{rollout}/query"
    for sql in ("select random(), gen_random_uuid(), now()", "select * from item", "select count(*) from entry"):
        await rest.http.post(path, json={"sql": sql})
    assert await rest.done("GET", f"/v1/rollouts/{rollout}/digest") == digest
    assert len(await rest.calls(rollout)) == 1
    assert (await rest.done("POST", path, {"sql": "select now()"}))["rows"] == [["2026-01-15T09:00:00Z"]]
