"""Commands of a raw login that would reach files, programs, other sessions or the time after its call."""

import asyncio

import asyncpg
import pytest

from megamcp import store
from megamcp.targets import tool_dsn
from tests.integration.security.conftest import ENVIRONMENTS, Attack, refused


async def test_files_and_programs_are_out_of_reach(
    attack: Attack, tool: asyncpg.Connection, query: asyncpg.Connection
) -> None:
    for conn in (tool, query):
        for sql in (
            "copy (select 1) to program 'id'",
            "copy (select 1) to '/tmp/megamcp_attack'",
            "copy secret from '/etc/hostname'",
            "copy secret from program 'id'",
            "load 'auto_explain'",
            "alter system set log_statement = 'all'",
            "create language plpython3u",
            "create function f() returns int language c as 'libc', 'system'",
            "create foreign data wrapper w",
            "create subscription s connection 'x' publication p",
            "create publication p for all tables",
            "create event trigger e on ddl_command_end execute function suppress_redundant_updates_trigger()",
            "checkpoint",
            "set session_replication_role = replica",
            "set log_statement = 'none'",
            "set allow_in_place_tablespaces = on",
            "show config_file",
            "show data_directory",
            "select * from pg_hba_file_rules",
            "security label on view secret is 'x'",
        ):
            await refused(conn, sql, state=("42501", "22023", "55P02", "42704", "42809", "0A000"))


async def test_several_statements_in_one_parameterised_text_are_refused(tool: asyncpg.Connection) -> None:
    """The extended protocol, which the SDK uses, takes one; the simple one stacks them, with no more rights."""
    await refused(tool, "select $1::int; select 2", 1, state="42601")
    try:
        await tool.execute("select 1; reset role; select * from megamcp.secrets")
    except asyncpg.PostgresError as error:
        refusal = error.sqlstate
    assert refusal == "42501"


async def test_what_gateways_tell_each_other_can_not_be_overheard_or_forged(
    attack: Attack, tool: asyncpg.Connection
) -> None:
    """Any login may listen and notify: the name of the channel is a secret of the deployment."""
    heard: list[str] = []
    for name in ("megamcp", "megamcp_cancellations", "megamcp_moves", "cancellations", "moves", "*"):
        await tool.add_listener(name, lambda *args: heard.append(args[-1]))
    gateway = await asyncpg.connect(attack.world.dsn)
    for purpose in (store.CANCELLATIONS, store.MOVES):
        told = asyncio.Event()
        channel = await gateway.fetchval(store.CHANNEL, purpose)
        await gateway.add_listener(channel, lambda *_, told=told: told.set())
        await gateway.execute("select pg_notify($1, '[]')", channel)
        async with asyncio.timeout(10):
            await told.wait()
        await refused(tool, store.CHANNEL, purpose)
        assert await tool.fetch("select 1 from pg_proc where prosrc like '%' || $1 || '%'", channel) == []
    await tool.execute("select 1")  # whatever had come would be here
    assert heard == []
    await refused(tool, "select pg_notify('x', '')")
    await gateway.close()
    await tool.reset()


async def test_a_login_spoils_no_one_but_itself_and_loading_again_repairs_it(attack: Attack) -> None:
    """PostgreSQL lets every role change its own password and settings, whatever else it may do."""
    conn = await attack.login()
    await refused(conn, "alter role current_user connection limit 0")
    await refused(conn, "alter role current_user superuser")
    await refused(conn, "alter role current_user nologin")
    await refused(conn, "alter role current_user valid until '2000-01-01'")
    await refused(conn, f"alter role {attack.state.query_role} password 'mine'")
    await refused(conn, "alter role all set search_path = public")
    await conn.execute("alter role current_user password 'mine'")
    await conn.execute("alter role current_user set default_transaction_read_only = on")
    await conn.execute("alter role current_user set search_path = pg_catalog")
    await conn.close()
    await attack.world.services.environments.load(ENVIRONMENTS / "vault")
    again = await asyncpg.connect(await tool_dsn(attack.world.dsn, "vault"))
    assert await again.fetchval("select current_setting('default_transaction_read_only')") == "off"
    assert attack.state.visible_schema in await again.fetchval("select current_setting('search_path')")
    await again.close()


async def test_a_call_that_lifts_its_time_limits_is_still_ended(attack: Attack, tool: asyncpg.Connection) -> None:
    """It holds its own rollout only, and gives it up when the rollout has to move."""
    mine, other = await attack.open(2)
    point = await attack.world.checkpoint(mine)
    lost = asyncio.Event()
    tool.add_termination_listener(lambda _: lost.set())
    transaction = tool.transaction()
    await transaction.start()
    await tool.fetchrow("select * from megamcp.call_begin($1, 'raw', '{}')", attack.handle(mine))
    await tool.execute(
        "set local transaction_timeout = 0; set local statement_timeout = 0; set local lock_timeout = 0;"
        " set local idle_in_transaction_session_timeout = 0; set local application_name = 'nobody'"
    )
    conn = await attack.login()
    async with attack.call(conn, other):
        assert await conn.fetchval("select count(*) from secret") == 20
    await conn.close()
    async with asyncio.timeout(60):
        await attack.world.roll_back(mine, point["id"])
        await lost.wait()


async def test_other_sessions_of_the_login_can_not_be_ended_or_watched(
    attack: Attack, tool: asyncpg.Connection
) -> None:
    (mine,) = await attack.open()
    other = await attack.login()
    async with attack.call(other, mine):
        pid = await other.fetchval("select pg_backend_pid()")
        await refused(tool, "select pg_terminate_backend($1)", pid)
        await refused(tool, "select pg_cancel_backend($1)", pid)
        await refused(tool, "select query from pg_stat_activity where pid = $1", pid)
    await other.close()


async def test_prepared_transactions_and_snapshots_take_nothing_out_of_a_call(
    attack: Attack, tool: asyncpg.Connection
) -> None:
    (mine,) = await attack.open()
    async with attack.call(tool, mine):
        await refused(tool, "select pg_export_snapshot()")
    transaction = tool.transaction()
    await transaction.start()
    await tool.fetchrow("select * from megamcp.call_begin($1, 'raw', '{}')", attack.handle(mine))
    await refused_and_over(tool, "prepare transaction 'kept'", ("MM424", "55000"))


async def refused_and_over(conn: asyncpg.Connection, sql: str, states: tuple[str, ...]) -> None:
    """As `refused`, for a command that ends the transaction even when it fails."""
    try:
        await conn.execute(sql)
    except asyncpg.PostgresError as error:
        found = error.sqlstate
    assert found in states
    assert await conn.fetchval("select count(*) from pg_prepared_xacts") == 0


async def test_a_commit_without_a_result_keeps_nothing(attack: Attack, tool: asyncpg.Connection) -> None:
    (mine,) = await attack.open()
    transaction = tool.transaction()
    await transaction.start()
    await tool.fetchrow("select * from megamcp.call_begin($1, 'raw', '{}')", attack.handle(mine))
    await tool.execute("insert into secret (word) values ('kept?')")
    await refused(tool, "set constraints all immediate", state="MM424")
    with pytest.raises(asyncpg.PostgresError, match="may not commit"):
        await transaction.commit()
    async with attack.call(tool, mine):
        assert await tool.fetchval("select count(*) from secret where word = 'kept?'") == 0
