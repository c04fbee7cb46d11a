"""A database's login is its agent's: what it can't reach, tried as the login, as its owner and after RESET ROLE."""

import asyncio
import secrets

import asyncpg
import pytest
import pytest_asyncio

from megamcp.errors import Unprocessable
from megamcp.state.clones import logins
from tests.integration.clones.conftest import KEYS, Database, World

DDL = "create table secret (id int primary key, word text); create function one() returns int language sql return 1"
SEED = "insert into secret values (1, 'mine')"
ROLES = ("reset role", "set role none", "set role mm_owner")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(cluster: object) -> object:
    world = World(cluster)  # type: ignore[arg-type]
    source = await world.source(DDL, SEED)
    yield await world.clone(source), await world.clone(source)
    await world.close()


DENIED = [
    # schema megamcp
    "select * from megamcp.keys",
    "select * from megamcp.log",
    "select * from megamcp.calls",
    "select * from megamcp.here",
    "delete from megamcp.log",
    "insert into megamcp.open_calls (nonce) values (gen_random_uuid())",
    "select megamcp.mark()",
    "select megamcp.put(0, 0)",
    "select megamcp.take_by_hash(0, '{}')",
    "select megamcp.is_back(0)",
    "select megamcp.images('{}')",
    "select megamcp.leap(0)",
    "select megamcp.plan('{[0,9]}', true, '{}')",
    "select megamcp.restore_sequences(0)",
    "select megamcp.open_handle('x')",
    "select megamcp.end_call(gen_random_uuid())",
    "select megamcp.watch()",
    "create table megamcp.mine (x int)",
    "create function megamcp.gate() returns void language sql as ''",
    "alter function megamcp.gate() security invoker",
    "drop schema megamcp cascade",
    "drop table megamcp.log",
    "drop event trigger megamcp_after_ddl",
    "alter event trigger megamcp_after_ddl disable",
    "create trigger t after insert on megamcp.open_calls for each row execute function megamcp.demand_result()",
    "set event_triggers = off",
    "set session_replication_role = replica",
    # other sessions
    "select pg_cancel_backend(1)",
    "select pg_terminate_backend(1)",
    "select pg_stat_get_activity(null)",
    "select pg_stat_get_backend_activity(1)",
    "select pg_stat_get_backend_idset()",
    "select pg_lock_status()",
    "select pg_blocking_pids(1)",
    "select pg_advisory_lock(7723)",
    "select pg_advisory_lock_shared(7723)",
    "select pg_advisory_unlock(7723)",
    "select pg_advisory_unlock_shared(7723)",
    "select pg_advisory_xact_lock(7723)",
    "select pg_try_advisory_lock(7723)",
    "select pg_try_advisory_xact_lock_shared(7723)",
    # the server
    "select pg_read_file('PG_VERSION')",
    "select pg_read_binary_file('PG_VERSION')",
    "select pg_ls_dir('.')",
    "select pg_stat_file('PG_VERSION')",
    "copy secret to '/tmp/megamcp_clone_out'",
    "copy secret from program 'true'",
    "copy secret to program 'true'",
    "select lo_create(4711)",
    "select lo_import('/etc/passwd')",
    "select lo_from_bytea(0, 'x')",
    "select pg_reload_conf()",
    "select * from pg_authid",
    "alter system set fsync = on",
    "select pg_logical_emit_message(true, 'a', 'b')",
    "select pg_export_snapshot()",
    # roles, databases, extensions
    "create role other",
    "create database other",
    "alter role mm_owner superuser",
    "grant mm_owner to public",
    "set role mm_hands",
    "set session authorization postgres",
    "create extension plpgsql",
    "create extension vector",
    "drop extension plpgsql",
    "create language plperlu",
    "create function f() returns int language c as 'libc', 'abs'",
    "create function f() returns int language internal as 'int4abs'",
    "create foreign data wrapper w",
    "create subscription s connection '' publication p",
    "create publication p for table secret",
    "create event trigger e on ddl_command_end execute function megamcp.after_ddl()",
    "create or replace view pg_catalog.pg_locks as select 1",
    "create table pg_catalog.x (x int)",
    "create tablespace t location '/tmp'",
    "create unlogged table u (x int)",
]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("statement", DENIED)
async def test_the_login_may_not(pair: tuple[Database, Database], statement: str, role: str) -> None:
    await pair[0].user.execute(role)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await pair[0].user.execute(statement)
    assert refused.value.sqlstate in ("42501", "0A000", "55000", "58P01", "42704", "42710"), refused.value


async def test_another_database_can_not_be_connected_to(pair: tuple[Database, Database]) -> None:
    a, b = pair
    for database in (b.name, "postgres", "template1"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await asyncpg.connect(a.cluster.dsn_for(database, a.login, a.password))


async def test_the_owner_and_the_hands_have_no_login(pair: tuple[Database, Database]) -> None:
    a, _ = pair
    for role in ("mm_owner", "mm_hands"):
        with pytest.raises(asyncpg.PostgresError):
            await asyncpg.connect(a.cluster.dsn_for(a.name, role, a.password))


@pytest.mark.parametrize("role", ROLES)
async def test_sessions_and_locks_of_others_are_not_seen(pair: tuple[Database, Database], role: str) -> None:
    a, b = pair
    await a.user.execute(role)
    async with a.hold(shared=True), b.user.transaction():
        await b.user.execute("lock table secret")
        seen = await a.user.fetch("select pid, usename, datname, query from pg_stat_activity")
        assert {row["usename"] for row in seen} == {a.login}
        pids = {row["pid"] for row in seen}
        assert {row["pid"] for row in await a.user.fetch("select pid from pg_locks")} <= pids
        assert [row["datname"] for row in await a.user.fetch("select datname from pg_stat_database")] == [a.name]
        for view in ("pg_stat_ssl", "pg_stat_progress_vacuum", "pg_prepared_xacts", "pg_replication_slots"):
            assert {row["pid"] for row in await a.user.fetch(f"select * from {view}") if "pid" in row} <= pids


async def test_notifications_stay_in_their_database(pair: tuple[Database, Database]) -> None:
    a, b = pair
    heard: list[str] = []
    await b.user.add_listener("channel", lambda *arguments: heard.append(arguments[-1]))
    await a.user.execute("notify channel, 'from a'")
    await b.user.execute("notify channel, 'from b'")
    await b.user.fetchval("select 1")
    await asyncio.sleep(0)
    assert heard == ["from b"]


async def test_what_a_user_of_a_database_of_his_own_expects(pair: tuple[Database, Database]) -> None:
    a, _ = pair
    await a.user.execute("reset role")
    for statement in (
        "create schema mine",
        "create table mine.t (id serial primary key, x text)",
        "create temporary table scratch (x int)",
        "create type mood as enum ('good', 'bad')",
        "create function two() returns int language plpgsql as 'begin return 2; end'",
        "create view v as select * from secret",
        "create materialized view m as select * from secret",
        "insert into mine.t (x) values ('a')",
        "vacuum mine.t",
        "analyze",
        "create index concurrently on mine.t (x)",
        "select pg_advisory_unlock_all()",
        "alter default privileges in schema mine grant select on tables to public",
        "discard all",
    ):
        await a.user.execute(statement)
    assert await a.user.fetchval("select current_user") == "mm_owner"
    assert await a.user.fetchval("select count(*) from information_schema.tables where table_schema = 'mine'") == 1


async def test_the_logs_triggers_can_not_be_put_out_of_work(world: World) -> None:
    shop = await world.start(DDL, SEED)
    for statement in (
        "alter table secret disable trigger user",
        "alter table secret disable trigger megamcp_update",
        "drop trigger megamcp_update on secret",
        "alter trigger megamcp_update on secret rename to x",
        "alter table secret enable trigger megamcp_update",
        "alter table secret enable replica trigger megamcp_update",
    ):
        await shop.user.execute(statement)
        mark = await shop.mark()
        await shop.user.execute("update secret set word = 'changed'")
        assert (await shop.mark()).written, statement
        await shop.rewind(mark.position)
        assert await shop.user.fetchval("select word from secret") == "mine", statement


async def test_ddl_by_way_of_a_function_is_noticed(world: World) -> None:
    shop = await world.start(DDL, SEED)
    mark = await shop.mark()
    await shop.user.execute("do $$ begin execute 'alter table secret add x int'; end $$")
    async with shop.hold() as inside:
        assert not await inside.reachable(mark.position)


HOSTILE = """
create table trap (id int primary key, x int);
create function evil(x int) returns int language plpgsql immutable as $$
begin
    begin
        execute 'set role postgres';
    exception when others then null; end;
    begin
        execute 'reset session authorization';
    exception when others then null; end;
    begin
        execute 'select count(*) from megamcp.keys';
        raise exception 'the keys were read by %', current_user;
    exception when insufficient_privilege or undefined_table then null; end;
    if (select rolsuper from pg_catalog.pg_roles where rolname = current_user) then
        raise exception 'ran as superuser %', current_user;
    end if;
    return x;
end $$;
create index on trap (evil(x));
create domain careful as int check (evil(value) is not null);
alter table trap add y careful, add constraint c check (evil(x) is not null);
create function as_text(trap) returns text language plpgsql as $$ begin perform public.evil(1); return 'forged'; end $$;
create cast (trap as text) with function as_text(trap);
create function as_trap(text) returns trap language plpgsql as $$ begin perform public.evil(1); return null; end $$;
create cast (text as trap) with function as_trap(text) as assignment;
create type rate as (n int);
create function as_json(rate) returns json language plpgsql as $$
begin perform public.evil(1); return '"forged"'; end $$;
create cast (rate as json) with function as_json(rate);
create table rates (id int primary key, r rate);
create function public.count(anyelement) returns bigint language sql as 'select 0::bigint';
create function public.max(bigint) returns bigint language sql as 'select 0::bigint';
create operator public.= (leftarg = int, rightarg = bigint, function = int48eq);
"""


async def test_functions_of_the_users_never_run_with_our_rights(world: World) -> None:
    """In indexes, checks, domains and casts they run while rows are put back; as the hand, which may nothing here."""
    shop = await world.start(HOSTILE, "insert into trap values (1, 1, 1); insert into rates values (1, row(1))")
    mark = await shop.mark()
    await shop.user.execute("update trap set x = 2; insert into trap values (2, 2, 2); update rates set r = row(2)")
    later = await shop.mark()
    async with shop.hold() as inside:
        assert await inside.digest() == later.digest
        found = await inside.changes(mark.position, later.position, 10)
        assert found is not None
        await inside.rewind(mark.position)
        assert await inside.digest() == mark.digest
    assert [tuple(row) for row in await shop.user.fetch("select * from trap")] == [(1, 1, 1)]


async def test_row_security_hides_nothing_from_a_rewind(world: World) -> None:
    shop = await world.start(
        DDL + "; alter table secret enable row level security; alter table secret force row level security;"
        "create policy p on secret using (id > 10) with check (true)",
    )
    mark = await shop.mark()
    await shop.user.execute("insert into secret values (1, 'hidden'), (11, 'seen')")
    later = await shop.mark()
    await shop.rewind(mark.position)
    async with shop.hold() as inside:
        assert await inside.digest() == mark.digest
        await inside.rewind(later.position)
        assert await inside.digest() == later.digest


async def test_a_password_is_in_no_statement(world: World) -> None:
    shop = await world.start(DDL)
    async with shop.cluster._access.maintenance() as connection:
        await connection.execute("set log_min_error_statement = error")
        text = await connection.fetchval("select rolpassword from pg_authid where rolname = $1", shop.login)
    assert text.startswith("SCRAM-SHA-256$")
    assert KEYS.inner_pad.hex() not in repr(KEYS)


GRANTS = (
    "grant select on secret to {other}",
    "grant select (word) on secret to {other} with grant option",
    "grant usage on schema public to {other}",
    "grant execute on function one() to {other}",
    "alter default privileges grant select on tables to {other}",
    "alter default privileges in schema public grant usage on sequences to {other}",
    "create policy p on secret to {other} using (true)",
    "create policy p on secret using (true); alter policy p on secret to {other}",
    "create schema theirs grant usage on schema theirs to {other}",
    "create temporary table t (x int); grant select on t to {other}",
    "do $do$ begin execute 'grant select on secret to {other}'; end $do$",
    "alter table secret owner to {other}",
    "create schema theirs authorization {other}",
    "reassign owned by mm_owner to {other}",
    "grant {other} to mm_owner",
    "grant mm_owner to {other}",
    "grant {own} to {other}",
)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("statement", GRANTS)
async def test_nothing_can_be_given_to_the_login_of_another_database(
    pair: tuple[Database, Database], statement: str, role: str
) -> None:
    """It would keep that login alive after its rollout's end: PostgreSQL drops no role that something names."""
    a, b = pair
    await a.user.execute(role)
    for other in (b.login, f"{b.name}_hand", f"{a.name}_hand"):
        with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedObjectError)):
            async with a.user.transaction():
                await a.user.execute(statement.format(own=f'"{a.login}"', other=f'"{other}"'))
    async with a.cluster._access.maintenance() as connection:
        assert a.name not in await logins.places(connection, b.login)


async def test_no_policy_can_be_made_for_the_own_login_since_a_copy_has_another(
    pair: tuple[Database, Database],
) -> None:
    database = pair[0]
    for role in (f'"{database.login}"', "session_user", "mm_owner, session_user"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with database.user.transaction():
                await database.user.execute(f"create policy p on secret to {role} using (true)")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with database.user.transaction():
                await database.user.execute(
                    f"create policy p on secret using (true); alter policy p on secret to {role}"
                )
    await database.user.execute(
        "set role mm_owner; create policy p on secret to current_user using (true); drop policy p on secret"
    )


@pytest.mark.parametrize("what", ["policy p on secret to session_user", "policy p on secret to mm_owner, session_user"])
async def test_an_environment_makes_no_policy_for_the_login_that_builds_it(world: World, what: str) -> None:
    with pytest.raises(Unprocessable, match=r"policy p on table public\.secret") as refused:
        await world.source(f"{DDL}; create {what} using (true)")
    assert "mm_owner" in (refused.value.hint or "")


async def test_what_names_a_role_from_before_goes_with_the_role(world: World) -> None:
    """Grants that an older version let be made, in databases that are open and that are sealed."""
    source = await world.source(DDL, SEED)
    gone, other, sealed = await world.clone(source), await world.clone(source), await world.clone(source)
    left = f'"{gone.login}"'
    for place in (other, sealed):
        async with world.cluster.inside(place.name) as inside:
            await inside.connection.execute(
                f"set event_triggers = off; grant select on public.secret to {left};"
                f"create schema theirs authorization {left}; create table theirs.t as select 1 as x;"
                f"alter table theirs.t owner to {left}; reset event_triggers"
            )
    await world.cluster.seal(sealed.name)
    await world.cluster.drop(gone.name, gone.login)
    async with world.cluster._access.maintenance() as connection:
        assert not await connection.fetchval("select count(*) from pg_roles where rolname = $1", gone.login)
        assert await connection.fetchval("select not datallowconn from pg_database where datname = $1", sealed.name)
    assert await other.user.fetchval("select x from theirs.t") == 1


async def test_roles_without_a_database_are_swept(world: World) -> None:
    source = await world.source(DDL)
    stray = f"mm_stray_{secrets.token_hex(4)}"
    async with world.cluster._access.maintenance() as connection:
        for name in (stray, f"{stray}_hand", f"{stray}_builder"):
            await connection.execute(f'create role "{name}" login')
        await world.cluster.clone(source, f"{stray}_b", login=f"{stray}_b", password="p")
        found = await world.cluster.drop_stray_roles(stray)
        assert sorted(found) == [stray, f"{stray}_builder", f"{stray}_hand"]
        await world.cluster.drop(f"{stray}_b", f"{stray}_b")
        assert await world.cluster.drop_stray_roles(stray) == []
