"""What is told when a rollout's database is taken from under a call: released, rolled back, full."""

import asyncio
import dataclasses
import uuid

import asyncpg
import pytest

from megamcp import control
from megamcp.control import Instance
from megamcp.errors import Conflict, DeadlineExceeded, Gone, NoCapacity
from megamcp.state.clones import Cluster, Inside
from megamcp.testing import running_gateway
from tests.integration.databases.shop import Shop, SqlFailed


async def running(shop: Shop, rollout: str) -> None:
    """Until a call of the rollout's is at its statement."""
    name = await shop.services.store.value("select name from megamcp.databases where rollout = $1", rollout)
    admin = await asyncpg.connect(shop.state_dsn)
    query = "select count(*) from pg_stat_activity where datname = $1 and query like 'select pg_sleep%'"
    async with asyncio.timeout(10):
        while not await admin.fetchval(query, name):
            await asyncio.sleep(0.01)
    await admin.close()


async def test_a_call_cut_off_by_a_release_is_told_of_the_release(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "select 1")
    slow = asyncio.create_task(shop.run(rollout, "select pg_sleep(20)"))
    await running(shop, rollout)
    await shop.close(rollout)
    await shop.services.keeper.once()
    with pytest.raises((Gone, SqlFailed), match="released"):
        await slow


async def test_a_call_that_ends_after_the_release_is_told_of_the_release(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "select 1")
    slow = asyncio.create_task(shop.run(rollout, "select pg_sleep(0.5)"))
    await running(shop, rollout)
    await shop.close(rollout)
    with pytest.raises(Gone, match="released") as told:
        await slow
    assert told.value.code == "rollout_closed"


async def test_a_call_that_ends_after_a_rollback_is_told_of_the_rollback(shop: Shop) -> None:
    rollout = await shop.one()
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "select 1")
    slow = asyncio.create_task(shop.run(rollout, "select pg_sleep(20)"))
    await running(shop, rollout)
    await shop.roll_back(rollout, point["id"])
    with pytest.raises((Conflict, SqlFailed), match="rolled back"):
        await slow


async def test_every_gateway_process_learns_that_a_database_is_full(shop: Shop) -> None:
    rollout = await shop.one()
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "create table big as select repeat(md5(n::text), 20) from generate_series(1, 40000) n")
    async with running_gateway(shop.dsn, state_urls=[shop.state_dsn], spare_databases=0, disk_reserve=0) as other:
        assert await Shop(other.services, other.url, shop.dsn, shop.state_dsn).read(rollout, "select 1") == [[1]]
        await shop.services.store.value(
            "update megamcp.databases set created_at = '2000-01-01' where rollout = $1", rollout
        )
        settings = shop.services.settings
        before, settings.database_quota = settings.database_quota, 20 << 20
        try:
            await shop.services.keeper.once()
        finally:
            settings.database_quota = before
        async with asyncio.timeout(10):  # it is told by a notification
            while any(key[0] == rollout for key in other.services.databases._places):
                await asyncio.sleep(0.01)
        for services in (shop.services, other.services):
            place = Shop(services, shop.url, shop.dsn, shop.state_dsn)
            with pytest.raises(NoCapacity, match="to itself"):
                await place.run(rollout, "select 1")
        await shop.roll_back(rollout, point["id"])


async def test_what_can_not_be_put_back_for_want_of_a_right_names_the_right(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "create table t (a int primary key)")
    await shop.run(rollout, "revoke delete on t from mm_owner")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "insert into t values (1)")
    await shop.roll_back(rollout, point["id"])
    assert "GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE t TO mm_owner" in caplog.text


async def test_an_instance_owns_nothing_before_it_holds_its_mark(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control.secrets, "randbits", lambda bits: 41)
    other = await asyncpg.connect(postgres_dsn)
    await other.execute("select pg_advisory_lock(42)")
    instance = Instance(postgres_dsn)
    holding = asyncio.create_task(instance.hold())
    waiting = "select count(*) from pg_locks where locktype = 'advisory' and objid = 42 and not granted"
    async with asyncio.timeout(10):
        while not await other.fetchval(waiting):
            await asyncio.sleep(0.01)
    assert instance.owner == 0
    await other.close()
    async with asyncio.timeout(10):
        while instance.owner != 42:
            await asyncio.sleep(0.01)
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)


@pytest.mark.parametrize("released", [False, True])
async def test_a_late_call_is_settled_though_the_session_that_settles_it_is_ended(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "select 1")
    end_call, ended = Inside.end_call, 0

    async def interrupted(inside: Inside, nonce: uuid.UUID) -> None:
        nonlocal ended
        ended += 1
        if ended == 1:
            if released:  # which seals the database
                await shop.close(rollout)
                await shop.services.keeper.once()
            await inside.connection.execute("select pg_terminate_backend(pg_backend_pid())")
        await end_call(inside, nonce)

    monkeypatch.setattr(Inside, "end_call", interrupted)
    calls = shop.services.dataplane._calls
    monkeypatch.setattr(calls, "_limits", dataclasses.replace(calls._limits, call_timeout_s=1.5))
    with pytest.raises(Gone if released else DeadlineExceeded, match="released" if released else None):
        await shop.run(rollout, "select pg_sleep(20)")
    assert ended


async def test_two_rounds_that_find_a_database_full_give_it_up_once(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "select 1")
    name = await shop.services.store.value(
        "update megamcp.databases set created_at = '2000-01-01' where rollout = $1 returning name", rollout
    )
    (cluster,) = shop.services.databases.clusters.opened
    both = asyncio.Barrier(2)

    async def much(database: str) -> int:
        if database == name:
            await both.wait()
            return 1 << 50
        return 0

    monkeypatch.setattr(cluster, "own_bytes", much)
    retire, retired = shop.services.databases.retire, []

    async def counted(of: Cluster, database: str) -> None:
        retired.append(database)
        await retire(of, database)

    monkeypatch.setattr(shop.services.databases, "retire", counted)
    await asyncio.gather(shop.services.keeper._measure(), shop.services.keeper._measure())
    assert retired.count(name) == 1  # who comes second may find it sealed, which is an error
    with pytest.raises(NoCapacity, match="to itself"):
        await shop.run(rollout, "select 1")


@pytest.mark.parametrize("times", [1, 6])
async def test_a_call_whose_wait_for_the_lock_is_ended_is_made_once_and_answered(shop: Shop, times: int) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "create table t (a int)")
    name = await shop.services.store.value("select name from megamcp.databases where rollout = $1", rollout)
    admin = await asyncpg.connect(shop.state_dsn)
    inside = await asyncpg.connect(shop.state_dsn, database=name)
    await inside.execute(
        "select pg_advisory_lock(7723)"
    )  # calls of one gateway would line up before they are seen here
    call = asyncio.create_task(shop.run(rollout, "insert into t values (1) returning a"))
    waiting = """select pg_terminate_backend(l.pid, 2000) from pg_locks l join pg_stat_activity a using (pid)
        where a.datname = $1 and not l.granted"""
    ended = 0
    async with asyncio.timeout(30):
        while ended < times:
            ended += len(await admin.fetch(waiting, name))
            await asyncio.sleep(0.02)
    await inside.close()
    await admin.close()
    assert await call == [[1]]
    assert await shop.read(rollout, "select a from t") == [[1]]
    assert [row["is_error"] for row in await shop.journal(rollout) if row["tool"] == "execute"] == [False, False]
