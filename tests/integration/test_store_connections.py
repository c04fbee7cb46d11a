"""Connections are handed on without a reset, so nothing may stay behind on one; and who waits is never forgotten."""

import asyncio

import asyncpg
import pytest

from megamcp.errors import NoCapacity, Unavailable
from megamcp.store import Store


async def test_many_queries_share_a_few_connections(postgres_dsn: str) -> None:
    async with Store.open(postgres_dsn, 2) as store:
        pids = await asyncio.gather(*(store.value("select pg_backend_pid() from pg_sleep(0.001)") for _ in range(100)))
    assert len(set(pids)) == 2


async def test_whoever_waits_gets_the_connection_that_comes_back(postgres_dsn: str) -> None:
    async with Store.open(postgres_dsn, 1) as store:
        assert await store.value("select 1") == 1
        async with store.connection():
            waiting = asyncio.create_task(store.value("select 2"))
            await asyncio.sleep(0.05)
            assert not waiting.done()
        assert await asyncio.wait_for(waiting, 5) == 2


async def test_waiting_too_long_is_no_capacity(postgres_dsn: str) -> None:
    async with Store.open(postgres_dsn, 1) as store, store.connection():
        with pytest.raises(NoCapacity):
            async with store.connection(wait_s=0.05):
                pass


async def test_a_transaction_that_fails_leaves_nothing_on_its_connection(postgres_dsn: str) -> None:
    async with Store.open(postgres_dsn, 1) as store:

        async def fail() -> None:
            async with store.transaction() as connection:
                await connection.execute("set local lock_timeout = '1s'; select pg_advisory_xact_lock(77)")
                raise LookupError

        with pytest.raises(LookupError):
            await fail()
        locks = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
        assert await store.value(locks) == 0
        assert await store.value("show lock_timeout") == "30s"


async def test_a_cancelled_query_does_not_reach_the_next_one(postgres_dsn: str) -> None:
    async with Store.open(postgres_dsn, 1) as store:
        task = asyncio.create_task(store.value("select 1 from pg_sleep(30)"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.wait_for(store.value("select 3"), 5) == 3


async def test_a_connection_that_died_at_hand_is_replaced(postgres_dsn: str) -> None:
    async with Store.open(postgres_dsn, 2) as store:
        pid = await store.value("select pg_backend_pid()")
        other = await asyncpg.connect(postgres_dsn)
        await other.execute("select pg_terminate_backend($1::int)", pid)
        await other.close()
        await asyncio.sleep(0.1)
        assert await store.value("select pg_backend_pid()") != pid


async def test_closing_waits_for_what_is_out_and_leaves_no_backend(postgres_dsn: str) -> None:
    async with Store.open(postgres_dsn, 2) as store:
        pid = await store.value("select pg_backend_pid()")
        slow = asyncio.create_task(store.value("select 4 from pg_sleep(0.1)"))
        await asyncio.sleep(0.02)
    assert await slow == 4
    other = await asyncpg.connect(postgres_dsn)
    assert await other.fetchval("select count(*) from pg_stat_activity where pid = $1", pid) == 0
    await other.close()


async def test_a_connection_that_dies_at_any_moment_is_an_outage_and_nothing_else(postgres_dsn: str) -> None:
    """PostgreSQL's last word crosses whatever is sent: asyncpg has a handful of errors for that, by the moment."""
    admin = await asyncpg.connect(postgres_dsn)

    async def end(pid: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        await admin.execute("select pg_terminate_backend($1)", pid)

    async def use(store: Store) -> None:
        while True:
            await store.value("select $1::int", 1)
            async with store.transaction() as connection:
                await connection.execute("select 1; select 2")

    async with Store.open(postgres_dsn, 1) as store:
        for turn in range(150):
            pid = await store.value("select pg_backend_pid()")
            killer = asyncio.create_task(end(pid, (turn % 30) * 0.0001))
            with pytest.raises(Unavailable):
                await use(store)
            await killer
    await admin.close()
