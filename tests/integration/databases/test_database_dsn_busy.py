"""Pools of real clients on a rollout's DSN, busy while it is checkpointed with its schema changed, and forked."""

import asyncio

import asyncpg
import psycopg
import pytest

from tests.integration.databases.shop import Shop

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_busy_clients_notice_nothing_of_checkpoints_and_forks(shop: Shop) -> None:
    rollout = await shop.one()
    dsn = str((await shop.services.door.dsn(rollout, None))["dsn"])
    enough = asyncio.Event()
    done: list[tuple[str, int]] = []
    async with asyncpg.create_pool(dsn, min_size=2, max_size=4) as pool:
        await pool.execute("create table ledger (who text, n int, primary key (who, n))")

        async def pooled(who: str) -> None:
            n = 0
            while not enough.is_set():
                n += 1
                async with pool.acquire() as connection, connection.transaction():
                    await connection.execute("insert into ledger values ($1, $2)", who, n)
                    assert await connection.fetchval("select count(*) from ledger where who = $1", who) == n
                done.append((who, n))

        async def pipelined(who: str) -> None:
            n = 0
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=1) as connection:
                while not enough.is_set():
                    async with connection.pipeline():
                        for _ in range(5):
                            n += 1
                            await connection.execute("insert into ledger values (%s, %s)", (who, n))
                    done.extend((who, number) for number in range(n - 4, n + 1))

        async def checkpoints() -> None:
            try:
                for number in range(5):
                    await pool.execute(f"create table extra_{number} (a int)")  # so the checkpoint is a copy
                    point = await shop.checkpoint(rollout)
                    await shop.fork(point["id"])
            finally:
                enough.set()

        await asyncio.gather(checkpoints(), *(pooled(f"w{n}") for n in range(5)), pipelined("p"))
        written = [tuple(row) for row in await pool.fetch("select who, n from ledger")]
    assert sorted(written) == sorted(done)


async def test_a_client_does_not_let_go_of_its_lock_within_a_transaction(shop: Shop) -> None:
    rollout = await shop.one()
    connection = await asyncpg.connect(str((await shop.services.door.dsn(rollout, None))["dsn"]))
    watcher = await asyncpg.connect(shop.state_dsn)
    held = "select count(*) from pg_locks where objid = 7723 and mode = 'ShareLock' and pid = $1"
    async with connection.transaction():
        backend = await connection.fetchval("select pg_backend_pid()")
        await connection.execute("select pg_advisory_unlock_all()")
        await connection.execute("SELECT pg_advisory_unlock_all(); CLOSE ALL; UNLISTEN *; RESET ALL")  # a pool does so
        await connection.execute("do $$ begin perform pg_advisory_unlock_all(); end $$")
        assert await watcher.fetchval(held, backend) == 1
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute("select mm_unlock_all()")
    await connection.close()
    await watcher.close()
