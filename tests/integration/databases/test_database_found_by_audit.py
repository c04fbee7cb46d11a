"""What an audit of rollouts' databases found, each by the way that it was shown."""

import asyncio
from pathlib import Path

import asyncpg
import pytest

from megamcp.databases import journal
from megamcp.errors import DeadlineExceeded, Unavailable
from tests.integration.databases.shop import Shop

pytestmark = pytest.mark.asyncio(loop_scope="session")
RENAMED = "do $do$ begin execute $$alter role mm_owner set application_name = 'a secret'$$; end $do$"


async def partitioned(shop: Shop) -> str:
    rollout = await shop.one()
    await shop.run(rollout, "create table part (k int primary key, v text) partition by range (k)")
    await shop.run(rollout, "create table low partition of part for values from (0) to (10)")
    await shop.run(rollout, "create table high partition of part for values from (10) to (100)")
    await shop.run(rollout, "insert into part values (1, 'a'), (2, 'b')")
    return rollout


async def test_a_merge_that_moves_rows_between_partitions_is_rolled_back(shop: Shop) -> None:
    rollout = await partitioned(shop)
    point = await shop.checkpoint(rollout)
    merge = "merge into part using (select 1 as k) s on part.k = s.k when matched then update set k = 15"
    await shop.run(rollout, merge)
    await shop.roll_back(rollout, point["id"])
    assert await shop.read(rollout, "select k, v from part order by k") == [[1, "a"], [2, "b"]]


async def test_a_row_that_a_trigger_keeps_from_arriving_in_a_partition_comes_back(shop: Shop) -> None:
    rollout = await partitioned(shop)
    await shop.run(rollout, "create function no() returns trigger language plpgsql as 'begin return null; end'")
    await shop.run(rollout, "create trigger no before insert on high for each row execute function no()")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "update part set k = 15 where k = 1")
    await shop.roll_back(rollout, point["id"])
    assert await shop.read(rollout, "select k from part order by k") == [[1], [2]]


async def test_rows_of_a_temporary_child_are_not_the_parents(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "create table t (a int, b int)")
    await shop.run(rollout, "insert into t values (1, 1)")
    point = await shop.checkpoint(rollout)
    connection = await asyncpg.connect((await shop.services.door.dsn(rollout, None))["dsn"])
    async with connection.transaction():
        await connection.execute("create temp table c () inherits (t)")
        await connection.execute("insert into c values (7, 7)")
        await connection.execute("delete from t where a = 7")
    await connection.close()
    await shop.roll_back(rollout, point["id"])
    assert await shop.read(rollout, "select a, b from only t") == [[1, 1]]


async def test_settings_of_the_role_that_all_rollouts_share_are_read_by_nobody(shop: Shop) -> None:
    one, two = await shop.open(2)
    await shop.run(one, RENAMED)
    for view in ("pg_roles where rolconfig::text ~ 'secret'", "pg_user where useconfig::text ~ 'secret'"):
        assert await shop.read(two, f"select count(*) from {view}") == [[0]]
    connection = await asyncpg.connect((await shop.services.door.dsn(two, None))["dsn"])
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.fetch("select * from pg_db_role_setting")
    await connection.close()


async def test_numbers_drawn_in_advance_do_not_outlive_a_rollback(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "create sequence s cache 10")
    connection = await asyncpg.connect((await shop.services.door.dsn(rollout, None))["dsn"])
    assert await connection.fetchval("select nextval('s')") == 1
    point = await shop.checkpoint(rollout)
    await connection.fetchval("select nextval('s')")
    await shop.roll_back(rollout, point["id"])
    again = [await connection.fetchval("select nextval('s')"), (await shop.run(rollout, "select nextval('s')"))[0][0]]
    assert again[0] != again[1]
    await connection.close()


async def test_many_rows_of_a_table_that_was_analyzed_empty_are_rolled_back(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "create table big (id int primary key, v text)")
    await shop.run(rollout, "analyze big")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "insert into big select n, 'x' from generate_series(1, 20000) n")
    await shop.roll_back(rollout, point["id"])
    assert await shop.read(rollout, "select count(*) from big") == [[0]]


async def test_a_rollout_whose_rows_can_not_be_put_back_gets_a_copy_instead(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "create table t (a int primary key)")
    await shop.run(rollout, "revoke delete on t from mm_owner")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "insert into t values (1)")
    await shop.roll_back(rollout, point["id"])
    assert await shop.read(rollout, "select count(*) from t") == [[0]]
    await shop.run(rollout, "insert into t values (2)")
    fork = (await shop.fork(point["id"]))[0]
    assert await shop.read(fork, "select count(*) from t") == [[0]]
    assert await shop.read(rollout, "select a from t") == [[2]]


async def test_a_rollback_that_takes_too_long_is_a_copy_instead(shop: Shop) -> None:
    settings, rollout = shop.services.settings, await shop.one()
    await shop.run(
        rollout,
        "create function slow(x int) returns boolean language plpgsql as"
        " $$ begin if current_setting('session_replication_role') = 'replica' then perform pg_sleep(60); end if;"
        " return true; end $$",
    )
    await shop.run(rollout, "create table t (a int check (slow(a)))")
    await shop.run(rollout, "insert into t values (1), (2)")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "delete from t where a = 1")
    before, settings.rewind_timeout_s = settings.rewind_timeout_s, 0.3
    try:
        await shop.roll_back(rollout, point["id"])
        assert await shop.read(rollout, "select a from t order by a") == [[1], [2]]
        await shop.run(rollout, "insert into t values (3)")
        later = await shop.checkpoint(rollout)
        await shop.run(rollout, "delete from t")
        await shop.roll_back(rollout, later["id"])
        with pytest.raises(DeadlineExceeded) as refused:  # rows are to be put in, whichever way
            await shop.read(rollout, "select a from t")
        assert refused.value.code == "rewind_too_slow"
        await shop.roll_back(rollout, point["id"])
        assert await shop.read(rollout, "select a from t order by a") == [[1], [2]]
    finally:
        settings.rewind_timeout_s = before


async def test_a_load_whose_database_others_took_away_can_be_tried_again(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the control database was away for so long that this gateway counted as dead."""
    folder = tmp_path / "taken"
    folder.mkdir()
    (folder / "schema.sql").write_text("create table t (id int primary key)")
    (folder / "environment.toml").write_text(
        'name = "taken"\n[servers.sql]\nentry = "tool_servers.sql.server:server"\n'
        '[servers.sql.state]\nkind = "database"\n'
    )
    wanted = tmp_path / "failpoint"
    wanted.write_text("build.filled=hold")
    monkeypatch.setenv("MEGAMCP_FAILPOINTS", f"@{wanted}")
    services = shop.services
    loading = asyncio.create_task(services.environments.load(folder, None, services.databases.sources.build))
    reached = tmp_path / "failpoint.reached"
    while not reached.exists():
        assert not loading.done(), loading
        await asyncio.sleep(0.01)
    state = await asyncpg.connect(shop.state_dsn)
    name = await state.fetchval("select datname from pg_database where datname ~ '^mm_.*_new$'")
    await services.store.value(journal.CONDEMN_UNMADE, [name.removesuffix("_new")])
    await state.execute(f'drop database "{name}" with (force)')
    await state.close()
    reached.unlink()
    with pytest.raises(Unavailable) as refused:
        await loading
    assert refused.value.code == "database_not_made"
    assert await services.environments.load(folder, None, services.databases.sources.build)
