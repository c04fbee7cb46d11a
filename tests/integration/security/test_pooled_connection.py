"""What a call leaves in a pooled connection is nothing to the next rollout that is served there."""

import asyncpg
import pytest

from tests.integration.security.conftest import Attack, refused


async def test_a_cursor_ends_with_its_call(attack: Attack, tool: asyncpg.Connection) -> None:
    mine, victim = await attack.open(2)
    async with attack.call(tool, victim):
        await tool.execute("insert into secret (word) values ('under the cursor')")
        await tool.execute("declare c cursor for select * from secret")
    async with attack.call(tool, mine):
        await refused(tool, "fetch all from c", state="34000")


async def test_a_cursor_with_hold_shows_its_own_call_only(attack: Attack, tool: asyncpg.Connection) -> None:
    """It keeps the rows that its call saw: the tool could have kept them as well. It shows none of a later call."""
    first, second = await attack.open(2)
    async with attack.call(tool, first):
        await tool.execute("declare held cursor with hold for select word from secret order by id")
    async with attack.call(tool, second):
        await tool.execute("insert into secret (word) values ('of the second')")
        rows = await tool.fetch("fetch all from held")
        assert [row["word"] for row in rows] == [f"base{n}" for n in range(1, 21)]
        await tool.execute("close held")


@pytest.mark.parametrize("mode", ["force_generic_plan", "force_custom_plan", "auto"])
async def test_a_prepared_statement_reads_the_rollout_of_the_call_that_runs_it(
    attack: Attack, tool: asyncpg.Connection, mode: str
) -> None:
    first, second = await attack.open(2)
    await tool.execute(f"set plan_cache_mode = {mode}; prepare mine as select count(*) from secret where word = $1")
    for _ in range(7):
        async with attack.call(tool, first):
            await tool.execute("insert into secret (word) values ('x')")
            seen = await tool.fetchval("execute mine ('x')")
        async with attack.call(tool, second):
            assert await tool.fetchval("execute mine ('x')") == 0
    assert seen == 7
    await refused(tool, "execute mine ('x')")


async def test_events_of_a_call_are_not_taken_by_the_next_one(attack: Attack, tool: asyncpg.Connection) -> None:
    """A delete whose cascade was held back by a forged setting deletes nothing in the next rollout."""
    mine, victim = await attack.open(2)
    async with attack.call(tool, mine):
        await tool.execute("select set_config('megamcp.draining', 'on', true)")
        await tool.execute("delete from secret where id = 5")
    async with attack.call(tool, victim):
        await tool.execute("delete from secret where id = 6")
        assert await tool.fetchval("select count(*) from clue where secret_id = 5") == 1
        assert await tool.fetchval("select count(*) from clue where secret_id = 6") == 0


async def test_session_settings_of_a_call_do_not_bind_the_next(attack: Attack, tool: asyncpg.Connection) -> None:
    mine, victim = await attack.open(2)
    async with attack.call(tool, mine):
        await tool.execute("set session characteristics as transaction read only")
        await tool.execute("set search_path = pg_catalog")
        await tool.execute("select set_config('megamcp.now', '0', false), set_config('megamcp.c2', '0:900', false)")
    await tool.execute("reset all; set session characteristics as transaction read write")
    async with attack.call(tool, victim):
        assert await tool.fetchval("select nextval('secret_id_seq')") == 21
        assert (await tool.fetchval("select now()")).year == 2026


async def test_discard_and_reset_leave_a_call_unbound_not_bound_to_more(
    attack: Attack, tool: asyncpg.Connection
) -> None:
    (mine,) = await attack.open()
    for sql in ("reset all", "discard plans", "discard sequences", "set megamcp.binding to default"):
        async with attack.call(tool, mine):
            binding = await tool.fetchval("select current_setting('megamcp.binding')")
            await tool.execute(sql)
            if await tool.fetchval("select current_setting('megamcp.binding', true)") != binding:
                await refused(tool, "select count(*) from secret")
            else:
                assert await tool.fetchval("select count(*) from secret") == 20
