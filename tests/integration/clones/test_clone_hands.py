"""Code of an agent's runs as the database's hand while rows are put back: it forges nothing and opens nothing.

Functions in checks, domains, indexes and casts are called then, by sessions that work for the gateway.
"""

import asyncio
from typing import Any

import asyncpg
import pytest

from megamcp.errors import Conflict
from megamcp.state.clones import logins
from tests.integration.clones.conftest import Database, World

# Does something when rows are put back, and is an ordinary table before.
TRAP = """create table other (x int); insert into other values (1);
create function spring() returns void language plpgsql as $f$ begin {action} end $f$;
create function sprung(x int) returns boolean language plpgsql as $f$
begin
    if current_setting('session_replication_role') = 'replica' then perform public.spring(); end if;
    return true;
end $f$;
create table trap (id int primary key, x int, check (sprung(x)))"""


async def trapped(world: World, action: str) -> tuple[Database, int, Any]:
    """A database whose way back to the position goes through the trap, and the digest at it."""
    db = await world.start(TRAP.format(action=action), "insert into trap select n, n from generate_series(1, 5) n")
    mark = await db.mark()
    await db.user.execute("update trap set x = x + 1")
    return db, mark.position, mark.digest


REACHES = (
    "select * from megamcp.log",
    "select * from megamcp.calls",
    "select * from megamcp.keys",
    "delete from megamcp.log",
    "update megamcp.here set epoch = 99, hand = pg_backend_pid()",
    "update megamcp.segments set call = 0",
    "select megamcp.leap(0)",
    "select megamcp.head()",
    "select megamcp.mark()",
    "select megamcp.plan('{[0,9]}', true, '{}')",
    "select megamcp.net('{[0,9]}')",
    "select megamcp.sums('{[0,9]}')",
    "select megamcp.images('{2049}')",
    "select * from megamcp.moves",
    "select megamcp.clear_moves()",
    "select megamcp.way_back(0)",
    "select megamcp.reachable(0)",
    "select megamcp.set_sequences('{}')",
    "select megamcp.restore_sequences(0)",
    "select megamcp.append_call(null, 't', '{}', '{}', false, 'done', now())",
    "select megamcp.open_handle('x')",
    "select megamcp.end_call(gen_random_uuid())",
    "select megamcp.watch()",
    "select megamcp.log_barrier('x')",
    "select pg_advisory_unlock(7723)",
    "set role postgres",
    "set session_replication_role = origin",
    "alter function megamcp.is_back(bigint) security invoker",
)


async def test_the_hand_reaches_nothing_of_the_bookkeeping(world: World) -> None:
    attempts = (
        f"""begin execute $s${statement}$s$; raise exception 'this was possible: %', $s${statement}$s$;
        exception when insufficient_privilege then null; end;"""
        for statement in REACHES
    )
    db, position, digest = await trapped(world, "\n".join(attempts))
    async with db.hold() as inside:
        await inside.rewind(position)
        assert await inside.digest() == digest


MEDDLES = {
    "a row elsewhere": "insert into public.other values (2);",
    "DDL": "create table if not exists public.kept (x text);",
    "a comment": "comment on table public.other is 'kept over the rollback';",
    "a cursor that is run at COMMIT": """
        if not exists (select from pg_cursors where name = 'late') then
            execute 'declare late cursor with hold for select public.late()';
        end if;""",
}
LATE = """create function late() returns int language plpgsql as $f$
begin
    insert into public.other values (3);
    return 1;
end $f$;"""


@pytest.mark.parametrize("action", MEDDLES.values(), ids=MEDDLES)
async def test_a_rewind_that_was_meddled_with_is_none(world: World, action: str) -> None:
    """Whatever it did, the state does not count as the mark's, and a copy is made from what the log says."""
    db, _, _ = await trapped(world, "null;")
    spring = f"create or replace function spring() returns void language plpgsql as $f$ begin {action} end $f$"
    await db.user.execute(LATE + spring)
    async with db.hold() as inside:
        mark, digest = await inside.mark(), await inside.digest()
    await db.user.execute("update trap set x = x + 1")
    log = await world.clone(db.name)
    async with db.hold() as inside:
        with pytest.raises(Conflict) as refused:
            await inside.rewind(mark.position)
        assert refused.value.code == "not_exact"
        if await inside.go_back(mark.position):  # where only what came at the end was left to undo
            assert await inside.digest() == digest
    async with log.hold() as inside:
        assert not await inside.go_back(mark.position)


async def test_a_deferred_trigger_that_always_fires_is_noticed(world: World) -> None:
    db = await world.start(
        "create table t (id int primary key, x int); create table other (x int);"
        "create function late() returns trigger language plpgsql as"
        " 'begin insert into public.other values (1); return null; end';"
        "create constraint trigger late after insert on t deferrable initially deferred for each row"
        " execute function late(); alter table t enable always trigger late",
        "insert into t values (1, 1)",
    )
    mark = await db.mark()
    await db.user.execute("delete from t")
    async with db.hold() as inside:
        assert not await inside.go_back(mark.position)


async def test_what_is_played_on_is_compared_with_what_should_have_been(world: World) -> None:
    source = await world.source(TRAP.format(action="insert into public.other values (2);"))
    db, fresh = await world.clone(source), await world.clone(source)
    await db.user.execute("insert into trap values (1, 1)")
    mark = await db.mark()
    async with db.hold() as log, fresh.hold() as inside:
        with pytest.raises(Conflict) as refused:
            await inside.redo(log, 0, mark.position)
        assert refused.value.code == "not_exact"


ERRORS = {
    **{
        state: f"raise exception using errcode = '{state}', message = 'mine';"
        for state in ("57014", "53200", "58030", "08006", "57P01")
    },
    "a timeout": "set statement_timeout = 1;",
    "a timeout for good": "execute format('alter role %I set statement_timeout = 1', session_user);"
    " raise exception 'and now';",
    "at COMMIT": "execute 'declare late cursor with hold for select 1 / (random() * 0)::int';",
}


@pytest.mark.parametrize("action", ERRORS.values(), ids=ERRORS)
async def test_no_error_of_an_agents_keeps_the_rollout_from_going_back(world: World, action: str) -> None:
    """A copy takes the place of what can't be put back; only a server that is gone is no answer."""
    db, position, _ = await trapped(world, action)
    async with db.hold() as inside:
        assert not await inside.go_back(position)


async def test_a_hand_whose_password_an_agent_knows_is_kept_out_by_the_gate(world: World) -> None:
    verifier = logins.scram_verifier("known")
    db, _, _ = await trapped(world, "null;")
    action = f"execute format('alter role %I password %L', session_user, '{verifier}');"
    await db.user.execute(
        f"create or replace function spring() returns void language plpgsql as $f$ begin {action} end $f$"
    )
    mark = await db.mark()
    await db.user.execute("update trap set x = x + 1")
    await db.rewind(mark.position)
    intruder = await asyncpg.connect(db.cluster.dsn_for(db.name, logins.hand(db.name), "known"))
    async with db.hold() as inside:
        write = asyncio.create_task(intruder.execute("insert into other values (9)"))
        waits = "select count(*) from pg_lock_status() where objid = 7723 and not granted"
        while not await inside.connection.fetchval(waits):
            await asyncio.sleep(0.001)
        assert not write.done()
        intruder.terminate()
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
            await write
    await db.user.execute("update trap set x = x + 1")
    await db.rewind(mark.position)  # and the gateway finds its way back in


FORGING = """
create type rate as (n int);
create table rates (id int primary key, r rate);
create table zebras (id int primary key, x int);
create function row_to_json(anyelement) returns json language sql as $$ select '{"id": 666}'::json $$;
create function as_json(rate) returns json language plpgsql as $$
begin
    perform set_config('search_path', 'public, pg_catalog', false);
    execute 'deallocate all';
    execute 'create temporary table if not exists pg_class (oid oid, relname name, relnamespace oid)';
    return json_build_object('n', ($1).n);
exception when others then return json_build_object('n', ($1).n);
end $$;
create cast (rate as json) with function as_json(rate)"""


async def test_a_cast_to_json_shows_its_own_value_otherwise_and_no_other(world: World) -> None:
    db = await world.start(FORGING)
    mark = await db.mark()
    await db.user.execute("insert into rates values (1, row(7)); insert into zebras values (1, 8)")
    later = await db.mark()
    async with db.hold() as inside:
        for _ in range(2):
            found = await inside.changes(mark.position, later.position, 10)
            assert found is not None
            assert [dict(row) for row in found["zebras"].added] == [{"id": 1, "x": 8}]
            assert [dict(row) for row in found["rates"].added] == [{"id": 1, "r": {"n": 7}}]


async def test_statements_that_an_agent_left_in_the_hands_session_are_gone(world: World) -> None:
    """asyncpg's names can be guessed: what is prepared under one would be run in the place of what is meant."""
    names = ", ".join(f"'__asyncpg_stmt_{n:x}__'" for n in range(1, 40))
    action = f"""declare n text; begin
        foreach n in array array[{names}] loop
            begin execute format('deallocate %I', n); exception when others then null; end;
            begin execute format('prepare %I(bigint) as select true', n); exception when others then null; end;
        end loop;
        execute 'set search_path = public';
        exception when others then null; end;"""
    db, position, digest = await trapped(world, action)
    for _ in range(3):
        async with db.hold() as inside:
            await inside.rewind(position)
            assert await inside.digest() == digest
        await db.user.execute("update trap set x = x + 1")
