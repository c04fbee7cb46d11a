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


async def test_a_client_is_not_kept_out_by_another_ones_transaction_that_a_checkpoint_waits_for(shop: Shop) -> None:
    rollout = await shop.one()
    dsn = str((await shop.services.door.dsn(rollout, None))["dsn"])
    slow, quick, watcher = [await asyncpg.connect(one) for one in (dsn, dsn, shop.state_dsn)]
    await quick.execute("create table t (n int)")
    waits = (
        "select count(*) from pg_locks l join pg_database d on d.oid = l.database where objid = 7723 and not granted"
    )
    await slow.execute("begin; insert into t values (0)")
    checkpoint = asyncio.create_task(shop.checkpoint(rollout))
    for n in range(1, 3):
        while not await watcher.fetchval(waits):
            await asyncio.sleep(0.001)
        await quick.execute("insert into t values ($1)", n)
        assert not checkpoint.done()
    await slow.execute("commit")  # nobody has ended it meanwhile
    point = await checkpoint
    await quick.execute("delete from t")
    await shop.roll_back(rollout, point["id"])
    assert await shop.read(rollout, "select n from t order by n") == [[0], [1], [2]]
    for connection in (slow, quick, watcher):
        await connection.close()
