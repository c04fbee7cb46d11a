"""An environment's code stays in its state, whatever SQL it manages to run: roles of its own, no superuser's rights."""

import uuid

import asyncpg
import pytest

from megamcp import state as states
from megamcp.state import rights
from tests.integration.overlay.conftest import World, options

DDL = """
create domain named as text check (value <> '');
create function dear(p int) returns bool language sql immutable return p > 10;
create table a (id int primary key, name named, price int check (not dear(price)));
create index on a ((dear(price)));
create view cheap as select id from a where not dear(price);
"""
SEED = "insert into a values (1, 'x', 1)"
HOSTILE = (
    "select * from megamcp.secrets",
    "select megamcp.secret()",
    "select megamcp.mac('x')",
    "select megamcp.bind('{1}', 1, 1, now(), true)",
    "create temp table mine as select 1; copy mine from program 'id'",
    "create temp table mine as select 'x'; copy mine to '/tmp/megamcp-stolen'",
    "select pg_read_file('PG_VERSION')",
    "select * from pg_authid",
    "create role mine superuser",
    "alter role postgres password 'x'",
    "create schema mine",
)
ESCAPES = ("set role none", "set session authorization default", "reset role", "set local role postgres")


async def _confined(world, state):
    await world.control.execute(
        rights.confined(state.hidden_schema, state.visible_schema, state.owner_role, state.view_role)
    )


@pytest.mark.parametrize("run", [rights.as_owner, rights.as_view])
async def test_code_of_an_environment_reaches_nothing_outside_its_state(world, run):
    state, other = await world.load(DDL, SEED), await world.load(DDL + "-- other", SEED)
    schema = state.hidden_schema if run is rights.as_owner else state.visible_schema
    foreign = (
        f"select * from {other.hidden_schema}.a",
        f"select * from {other.visible_schema}.a",
        f"select {other.visible_schema}.random()",
        f'select "{other.hidden_schema}"."~draw"()',
    )
    outer = world.control.transaction()
    await outer.start()
    await world.control.execute(f"grant create on schema {state.visible_schema} to {state.view_role}")
    await _confined(world, state)
    for sql in HOSTILE + foreign:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with world.control.transaction():
                await run(world.control, schema, sql)
    for sql in (*ESCAPES, "select set_config('role', 'none', true)"):
        with pytest.raises(asyncpg.PostgresError) as refused:
            async with world.control.transaction():
                await run(world.control, schema, sql + "; create schema mine")
        assert refused.value.sqlstate in {"42501", "0A000"}
    await outer.rollback()


async def test_the_view_role_sees_rows_through_the_policy_only(world):
    state = await world.load(DDL, SEED)
    victim = await world.open(state)
    await victim.run("insert into a values (2, 'secret', 2)")
    outer = world.control.transaction()
    await outer.start()
    await world.control.execute(f"grant create on schema {state.visible_schema} to {state.view_role}")
    await _confined(world, state)
    for table, code in (("a", "42501"), ("a~base", "42501"), ("~counters", "42501"), ("~queue", "42501")):
        with pytest.raises(asyncpg.PostgresError) as refused:
            async with world.control.transaction():
                await rights.as_view(
                    world.control, state.visible_schema, f'select * from {state.hidden_schema}."{table}"'
                )
        assert refused.value.sqlstate == code
    await outer.rollback()


async def test_everything_of_a_state_belongs_to_its_own_roles(world):
    state = await world.load(DDL, SEED)
    owners = await world.control.fetch(
        "select n.nspname, x.owner::regrole::text, count(*) from pg_namespace n join ("
        " select relnamespace, relowner from pg_class union all select pronamespace, proowner from pg_proc"
        " union all select typnamespace, typowner from pg_type) x (space, owner) on x.space = n.oid"
        " where nspname in ($1, $2) and owner <> current_user::regrole group by 1, 2",
        state.hidden_schema,
        state.visible_schema,
    )
    ours = (
        "select proname from pg_proc where pronamespace = $1::text::regnamespace and proowner = current_user::regrole"
    )
    assert [row[0] for row in await world.control.fetch(ours, state.hidden_schema)] == ["~kept"]
    assert {(row[0][:2], row[1]) for row in owners} == {
        ("s_", state.owner_role),
        ("v_", state.owner_role),  # clock, chance and sequences
        ("v_", state.view_role),
    }
    plain = await world.control.fetch(
        "select rolname from pg_roles where rolname = any ($1::name[]) and not rolsuper and not rolcreaterole"
        " and not rolcreatedb and not rolreplication and not rolbypassrls",
        [state.owner_role, state.view_role, state.tool_role, state.query_role],
    )
    assert len(plain) == 4
    helpers = "select count(*) from pg_proc where proname in ('~as owner', '~as view')"
    assert await world.control.fetchval(helpers) == 0
    create = "select has_schema_privilege($1, $2, 'create')"
    assert not await world.control.fetchval(create, state.view_role, state.visible_schema)


async def test_unloading_leaves_no_role(world):
    state = await world.load(DDL + "-- unloaded", SEED)
    mine = "select count(*) from pg_roles where rolname like '%' || $1 || '%'"
    assert await world.control.fetchval(mine, state.hash) == 4
    await states.unload(world.control, state)
    assert await world.control.fetchval(mine, state.hash) == 0


async def test_events_that_a_tool_leaves_behind_act_on_nobody(world):
    state = await world.load(
        "create table boss (id int primary key, up int references boss on delete cascade)",
        "insert into boss values (1, null), (2, 1), (3, null), (4, 3)",
    )
    hostile, next_on_the_connection = await world.open(state), await world.open(state)
    async with hostile.call() as db:
        await db.execute("select set_config('megamcp.draining', '<>', true)")  # as if the queue were being worked off
        await db.execute("delete from boss where id = 1")
    queued = f'select count(*) from {state.hidden_schema}."~queue"'
    assert await world.control.fetchval(queued) == 1
    await next_on_the_connection.run("delete from boss where id = 3")
    assert await next_on_the_connection.read("select id from boss order by id") == [(1,), (2,)]


async def test_a_login_that_is_no_superuser_loads_and_unloads_the_same(world):
    login = f"overlay_login_{uuid.uuid4().hex[:8]}"
    server = await asyncpg.connect(**options())
    await server.execute(f"create role {login} login createrole password 'x'")
    await server.execute(f"create database {login} owner {login}")
    login_options = {**options(login), "user": login, "password": "x"}
    control, tool = await asyncpg.connect(**login_options), await asyncpg.connect(**login_options)
    try:
        await control.execute("create schema megamcp; create sequence megamcp.layer_seq")
        await control.execute(states.state_sql())
        own = World(control, tool)
        state = await own.load(
            "create type pair as (n int, word text);"
            "create table k (id int primary key deferrable initially deferred, p pair);"
            "create table bag (n int, note text default 'x'); create unique index on bag ((n + 1)) where n > 5;"
            "create table up (id int primary key, k int references up deferrable initially deferred);",
            "insert into k values (1, row(1, 'a')); insert into bag values (1), (1)",
            "insert into up values (1, 2), (2, 1)",
            "copy k from stdin;\n2\t(2,b)\n\\.\n",
        )
        rollout = await own.open(state)
        assert await rollout.status("update bag set note = 'y'") == "UPDATE 2"
        assert await rollout.run("insert into up values (3, 1), (4, 3) returning id") == [(3,), (4,)]
        assert await rollout.read("select (p).word from k order by id") == [("a",), ("b",)]
        with pytest.raises(asyncpg.UniqueViolationError):
            await rollout.run("insert into k values (1, null)")
        with pytest.raises(asyncpg.ForeignKeyViolationError):
            await rollout.run("delete from up where id = 1")
        await states.unload(control, state)
        left = "select count(*) from pg_roles where rolname like '%' || $1 || '%'"
        assert await control.fetchval(left, state.hash) == 0
    finally:
        await control.close()
        await tool.close()
        await server.execute(f"drop database {login} with (force)")
        for row in await server.fetch(
            "select roleid::regrole::text as name from pg_auth_members where member = $1::text::regrole", login
        ):
            await server.execute(f"drop role {row['name']}")
        await server.execute(f"drop role {login}")
        await server.close()
