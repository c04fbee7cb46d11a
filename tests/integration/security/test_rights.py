"""All that the logins may execute, read and write, by name: a new right is a failing test before it is a hole."""

import asyncpg
import pytest

from tests.integration.security.conftest import Attack, hidden, refused

EXECUTABLE = """
select p.oid::regprocedure::text as name from pg_proc p join pg_namespace n on n.oid = p.pronamespace
where n.nspname <> 'pg_catalog' and n.nspname <> 'information_schema'
  and has_schema_privilege(n.oid, 'usage') and has_function_privilege(p.oid, 'execute')
"""
RELATIONS = """
select c.oid::regclass::text as name, array_remove(array[
    case when has_table_privilege(c.oid, 'select') then 'select' end,
    case when has_table_privilege(c.oid, 'insert') then 'insert' end,
    case when has_table_privilege(c.oid, 'update') then 'update' end,
    case when has_table_privilege(c.oid, 'delete') then 'delete' end,
    case when has_table_privilege(c.oid, 'truncate, references, trigger, maintain') then 'more' end], null) as rights
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.relkind in ('r', 'p', 'v', 'm', 'f') and n.nspname <> 'pg_catalog' and n.nspname <> 'information_schema'
  and (has_table_privilege(c.oid, 'select, insert, update, delete, truncate, references, trigger, maintain')
       or has_any_column_privilege(c.oid, 'select, insert, update, references'))
"""
# What a state gives its logins in v_<h>: the environment's clock, chance and counters, and its own functions.
VISIBLE = {
    "age(timestamp with time zone)",
    "age(timestamp without time zone)",
    '"current_date"()',
    '"current_time"()',
    '"current_time"(integer)',
    '"current_timestamp"()',
    '"current_timestamp"(integer)',
    '"localtime"()',
    '"localtime"(integer)',
    '"localtimestamp"()',
    '"localtimestamp"(integer)',
    "clock_timestamp()",
    "currval(regclass)",
    "currval(text)",
    "gen_random_uuid()",
    "initials()",
    "lastval()",
    "megamcp_advance_clock(bigint)",
    "megamcp_draw()",
    "nextval(regclass)",
    "nextval(text)",
    "now()",
    "pg_get_serial_sequence(text,text)",
    "random()",
    "random(bigint,bigint)",
    "random(integer,integer)",
    "random(numeric,numeric)",
    "random_normal(double precision,double precision)",
    "setval(regclass,bigint,boolean)",
    "setval(text,bigint,boolean)",
    "statement_timestamp()",
    "timeofday()",
    "transaction_timestamp()",
    "uuidv4()",
    "uuidv7(interval)",
}
# What the policies call as whoever reads, and what verifies a handle by itself.
SHARED = {
    "megamcp.chain()",
    "megamcp.chain_with_base()",
    "megamcp.dear(bigint,bigint)",
    "megamcp.prf(bigint,bigint)",
}
CALLS = {
    "megamcp.call_begin(text,text,text)",
    "megamcp.call_fail(text,text,text,text)",
    "megamcp.call_finish(text,text,text,text,boolean)",
}


async def _names(conn: asyncpg.Connection, sql: str) -> set[str]:
    return {row["name"] for row in await conn.fetch(sql)}


async def test_the_tool_login_executes_these_functions_and_no_other(attack: Attack, tool: asyncpg.Connection) -> None:
    beside = {
        f'w_{attack.state.hash}."~truncate"(text[],boolean,boolean)',
        f'w_{attack.state.hash}."~constraints"(text[],boolean)',
        f'w_{attack.state.hash}."~sequence"(text)',
    }
    assert await _names(tool, EXECUTABLE) == VISIBLE | SHARED | CALLS | beside


async def test_the_query_login_executes_these_functions_and_no_other(attack: Attack, query: asyncpg.Connection) -> None:
    assert await _names(query, EXECUTABLE) == VISIBLE | SHARED | {"megamcp.query_begin(text)"}


async def test_the_logins_have_the_views_of_their_environment_and_nothing_else(
    attack: Attack, tool: asyncpg.Connection, query: asyncpg.Connection
) -> None:
    writable = ["select", "insert", "update", "delete"]
    found = {row["name"]: row["rights"] for row in await tool.fetch(RELATIONS)}
    # Beside the views: what ON CONFLICT and OVERRIDING are rewritten to; none of it holds a row.
    parts = ("secret", '"secret~conflict"', '"secret~proposed"', '"secret~system"', '"secret~user"')
    parts += ("clue", '"clue~conflict"', '"clue~proposed"')
    beside = {f"w_{attack.state.hash}.{part}": ["select", "insert"] for part in parts}
    sequence = {"secret_id_seq": ["select"]}
    assert found == {"secret": writable, "clue": writable, "hint": writable} | sequence | beside
    for name in beside:
        (mine,) = await attack.open()
        async with attack.call(tool, mine):
            assert await tool.fetchval(f"select count(*) from {name}") == 0
    found = {row["name"]: row["rights"] for row in await query.fetch(RELATIONS)}
    assert found == {"secret": ["select"], "clue": ["select"], "hint": ["select"]} | sequence


@pytest.mark.parametrize("login", ["tool", "query"])
async def test_a_login_owns_nothing_and_makes_nothing(attack: Attack, login: str) -> None:
    conn = await attack.login(login)
    for table, owner in (("pg_class", "relowner"), ("pg_proc", "proowner"), ("pg_namespace", "nspowner")):
        assert await conn.fetchval(f"select count(*) from {table} where {owner} = current_user::regrole") == 0
    assert await conn.fetch("select nspname from pg_namespace where has_schema_privilege(oid, 'create')") == []
    assert not await conn.fetchval("select has_database_privilege(current_database(), 'create, temporary')")
    role = await conn.fetchrow("select * from pg_roles where rolname = current_user")
    for right in ("rolsuper", "rolcreaterole", "rolcreatedb", "rolreplication", "rolbypassrls"):
        assert not role[right]
    for sql in (
        "create table mine (id int)",
        "create temp table secret (id int)",
        "create temp view secret as select 1",
        "create schema mine",
        "create function pg_temp.now() returns int language sql as 'select 1'",
        "create extension pgcrypto",
        "create role mine",
        "create database mine",
        "select 1 as id into temp secret",
    ):
        await refused(conn, sql, state=("42501", "0A000"))
    await conn.close()


async def test_system_functions_that_reach_others_are_taken_from_everyone(
    attack: Attack, tool: asyncpg.Connection, query: asyncpg.Connection
) -> None:
    """With a superuser as control login; docs/security.md says what stays open without."""
    rest = "select p.oid::regprocedure::text as name from pg_proc p where pronamespace = 'pg_catalog'::regnamespace \
        and has_function_privilege(p.oid, 'execute') and p.proname ~ '{}'"
    for conn in (tool, query):
        assert (
            await _names(
                conn, rest.format("advisory_(xact_)?lock|^lo_|^lo(read|write)$|terminate_backend|cancel_backend")
            )
            == set()
        )
        assert (
            await _names(conn, rest.format("^pg_(read|ls_|stat_file|file_|rotate|reload|switch|create_restore|backup)"))
            == set()
        )
        for sql in (
            "select pg_advisory_lock(1)",
            "select pg_try_advisory_xact_lock_shared(1, 2)",
            "select pg_terminate_backend(pg_backend_pid())",
            "select pg_cancel_backend(pg_backend_pid())",
            "select lo_create(0)",
            "select lo_from_bytea(0, 'x')",
            "select lo_import('/etc/hostname')",
            "select lo_export(1, '/tmp/x')",
            "select pg_read_file('/etc/hostname')",
            "select pg_ls_dir('.')",
            "select pg_stat_reset()",
            "select pg_reload_conf()",
            "select pg_switch_wal()",
            "select * from pg_locks",
            "select * from pg_stat_activity",
            "select * from pg_stat_get_activity(null)",
        ):
            await refused(conn, sql)


async def test_the_gateway_keeps_its_advisory_locks(attack: Attack) -> None:
    assert await attack.world.execute("select pg_try_advisory_xact_lock(42), count(*) from pg_locks group by 1")


async def test_base_delta_and_control_tables_are_out_of_reach(
    attack: Attack, tool: asyncpg.Connection, query: asyncpg.Connection
) -> None:
    s = attack.state.hidden_schema
    for conn in (tool, query):
        for relation in (
            f"{s}.secret",
            hidden(attack.state, "secret", "base"),
            hidden(attack.state, "secret"),
            f'{s}."~counters"',
            f'{s}."~queue"',
            f"{attack.other.visible_schema}.item",
            f"{attack.other.hidden_schema}.item",
            "megamcp.secrets",
            "megamcp.keys",
            "megamcp.api_keys",
            "megamcp.rollouts",
            "megamcp.events",
            "megamcp.checkpoints",
            "megamcp.open_calls",
            "megamcp.servers",
            "pg_authid",
            "pg_statistic",
            "pg_largeobject",
            "pg_user_mapping",
        ):
            await refused(conn, f"select count(*) from {relation}")
            async with conn.transaction():
                await refused(conn, f"lock table {relation} in access exclusive mode", state=("42501", "42809"))
        for call in (
            "megamcp.secret()",
            "megamcp.mac('x')",
            "megamcp.bind('{1}', 1, 1, now(), true)",
            "megamcp.verified(false)",
            "megamcp.head()",
            "megamcp.open_handle('x')",
            "megamcp.event_result(null)",
            f"{s}.\"~store\"(0, 'random', 5)",
            f"{s}.\"~read\"(0, 'random')",
            f'{s}."~drain"()',
            f"{s}.\"~freeze\"('{{}}', 1)",
            "pg_catalog.nextval('megamcp.layer_seq'::regclass)",
            "pg_catalog.setval('megamcp.layer_seq'::regclass, 1)",
            "pg_catalog.setval('megamcp.stamp_seq'::regclass, 1)",
        ):
            await refused(conn, f"select {call}", state=("42501", "3F000"))


async def test_role_changes_lead_nowhere(attack: Attack, tool: asyncpg.Connection, query: asyncpg.Connection) -> None:
    names = await attack.world.execute(
        "select rolname from pg_roles where rolname ~ '^megamcp_(tools|queries)$' or rolsuper"
        " or rolname ~ ('^megamcp_.*_' || $1 || '$')",  # those of this database: others come and go
        attack.state.deployment,
    )
    for conn in (tool, query):
        own = await conn.fetchval("select session_user::text")
        for name in (row["rolname"] for row in names):
            may = await conn.fetchval("select pg_has_role($1, 'set')", name)
            # The group of all tool logins may execute the calls and has no rollout: they ask for session_user.
            assert may == (name in (own, "megamcp_tools" if conn is tool else "megamcp_queries")), name
            await refused(conn, f'grant "{name}" to "{own}"') if name != own else None
            if not may:
                await refused(conn, f'set role "{name}"')
                await refused(conn, f'set session authorization "{name}"')
                await refused(conn, f"alter role \"{name}\" password 'stolen'")
                await refused(conn, f'alter role "{name}" set search_path = public')
                await refused(conn, f'drop role "{name}"')
    group = await attack.login()
    await group.execute("set role megamcp_tools")
    await refused(group, f"select * from {attack.state.visible_schema}.secret")
    (mine,) = await attack.open()
    transaction = group.transaction()
    await transaction.start()
    await group.fetchrow("select * from megamcp.call_begin($1, 'raw', '{}')", attack.handle(mine))
    await refused(group, f"select * from {attack.state.visible_schema}.secret")
    await transaction.rollback()
    group.terminate()


async def test_definitions_can_not_be_changed(attack: Attack, tool: asyncpg.Connection) -> None:
    for sql in (
        "alter view secret set (security_invoker = true)",
        "alter view secret alter word set default 'x'",
        "alter view secret rename to other",
        "alter view secret owner to current_user",
        "create or replace view secret as select 1 as id",
        "create trigger t after insert on secret for each statement execute function tsvector_update_trigger()",
        "create rule r as on insert to secret do also select 1",
        "drop view secret cascade",
        "comment on view secret is 'x'",
        "alter function initials() volatile",
        "drop function now()",
        f"drop schema {attack.state.visible_schema} cascade",
    ):
        await refused(tool, sql, state=("42501", "0A000", "2BP01"))
    # A GRANT of what one may not give on is a warning, and gives nothing.
    await tool.execute("grant select on secret to public")
    assert not await tool.fetchval("select has_table_privilege($1, 'secret', 'select')", attack.other.tool_role)
