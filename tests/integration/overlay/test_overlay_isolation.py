"""Attacks: no expression sees another rollout's row, no binding can be made, replayed or borrowed."""

import asyncpg
import pytest

from tests.integration.overlay.conftest import options

DDL = """
create table secrets (id int primary key, word text not null, n int not null, amount numeric not null default 1);
create index on secrets (word);
create view words as select word from secrets where n > 0;
create function shout(t text) returns text language sql immutable as $$ select upper(t) $$;
"""
SEED = "insert into secrets select i, '12', 1 from generate_series(1, 200) i;"

ATTACKS = [
    "select count(*) from secrets where word::int > 0",
    "select count(*) from secrets where 1 / n > 0",
    "select count(*) from secrets where (1 / amount) > 0 and id > 0",
    "select max(word::int) from secrets",
    "select word::int from secrets order by word::int limit 1",
    "select count(*) from secrets a join secrets b on a.word::int = b.word::int and a.id = b.id",
    "select count(*) from words where word::int > 0",
    "select count(*) from (select * from secrets where case when n = 0 then 1 / n > 0 else true end) q",
    "select count(*) from secrets where id in (select id from secrets where 1 / n > 0)",
    "update secrets set n = 1 / n where word::int > 0",
    "delete from secrets where 1 / n < 0",
]


@pytest.mark.parametrize("foreign", [1, 5000])
async def test_no_expression_meets_a_foreign_row(world, foreign):
    state = await world.load(DDL, SEED)
    victim, attacker = await world.open(state), await world.open(state)
    await victim.run(f"insert into secrets select 1000 + i, 'password' || i, 0, 0 from generate_series(1, {foreign}) i")
    await victim.run("update secrets set word = 'changed', n = 0, amount = 0 where id <= 100")
    await world.control.execute(f"analyze {state.hidden_schema}.secrets")
    for sql in ATTACKS:
        await attacker.run(sql)


async def test_a_cheap_leaking_function_sees_own_rows_only(world):
    state = await world.load(DDL, SEED)
    victim, attacker = await world.open(state), await world.open(state)
    await victim.run("insert into secrets select 5000 + i, 'hidden', 0 from generate_series(1, 300) i")
    v = state.visible_schema
    await world.control.execute(
        f"create function {v}.leak(t text) returns bool language plpgsql cost 0.0000001 as "
        "$$ begin raise notice '%', t; return true; end $$; "
        f"grant execute on function {v}.leak to {state.tool_role}"
    )
    heard: list[str] = []
    attacker.tool.add_log_listener(lambda _, message: heard.append(message.message))
    assert await attacker.run("select count(*) from secrets where leak(word)") == [(200,)]
    assert await attacker.run("select count(*) from words where leak(word)") == [(200,)]
    assert set(heard) == {"12"}


async def test_the_tool_role_reaches_nothing_hidden(world):
    state = await world.load(DDL, SEED)
    rollout = await world.open(state)
    hidden = state.hidden_schema
    for sql in (
        f"select * from {hidden}.secrets",
        f'select * from {hidden}."secrets~delta"',
        f'select * from {hidden}."~counters"',
        "select * from megamcp.secrets",
        "select megamcp.secret()",
        "select megamcp.mac('x')",
        "select megamcp.bind('{1}', 1, 1, now(), true)",
        "select megamcp.verified(false)",
        f"select {hidden}.\"~store\"(0, 'random', 5)",
        f"insert into {hidden}.\"~queue\" (number, event) values (1, 'd')",
        "create table mine (id int)",
        "create temp table mine (id int)",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await rollout.run(sql)
    await rollout.read("select megamcp.chain_with_base()")


async def test_bindings_can_not_be_forged_or_replayed(world):
    state = await world.load(DDL, SEED)
    victim, attacker = await world.open(state), await world.open(state)
    await victim.run("insert into secrets values (900, 'mine', 1)")
    query = "select count(*) from secrets"
    async with victim.call() as db:
        binding = await db.fetchval("select current_setting('megamcp.binding')")
    forged = binding.replace(str(victim.head), str(attacker.head))
    for stolen in (binding, forged, "", "x", "{0,1}|1|1|1|w|" + "0" * 64):
        for sql in (query, "insert into secrets values (901, 'x', 1)"):
            async with attacker.call() as db:
                await db.execute("select set_config('megamcp.binding', $1, true)", stolen)
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    async with db.transaction():
                        await db.execute(sql)


async def test_a_hostile_search_path_changes_nothing(world, database):
    state = await world.load(DDL, SEED)
    rollout = await world.open(state)
    await world.control.execute(
        "create schema if not exists hostile; create or replace function hostile.current_setting(text, bool) "
        "returns text language sql as $$ select '{0,1,2,3,4,5}' $$; "
        "create or replace function hostile.split_part(text, text, int) returns text language sql "
        "as $$ select '{0,1,2,3}' $$; "
        f"grant usage on schema hostile to {state.tool_role}"
    )
    async with rollout.call() as db:
        await db.execute(f"set local search_path = hostile, pg_catalog, {state.visible_schema}")
        assert await db.fetchval("select count(*) from secrets") == 200
        await db.execute("insert into secrets values (300, 'x', 1)")
        assert await db.fetchval("select count(*) from secrets") == 201
    await world.control.execute("drop schema hostile cascade")


async def test_the_query_role_reads_and_can_not_write(world, database):
    state = await world.load(DDL, SEED)
    conn = await asyncpg.connect(**{**options(database), "user": state.query_role, "password": "q"})
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await conn.fetch("select * from secrets")
    with pytest.raises(asyncpg.PostgresError):
        await conn.execute("delete from secrets")
    await conn.close()
