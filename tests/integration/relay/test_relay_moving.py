"""Real clients work while their database is drained, cloned, renamed: no lost commit, no duplicate, no error."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.integration.relay.house import House

MOVES = 4


@contextlib.asynccontextmanager
async def moving(home: House, *, patient: bool = True, moves: int = MOVES) -> AsyncIterator[asyncio.Event]:
    """Moves all the time; the event is set when there were enough of it."""
    enough = asyncio.Event()

    async def move() -> None:
        try:
            for number in range(moves):
                await home.move("clone" if number % 3 else "rename", patient=patient)
        finally:
            enough.set()

    task = asyncio.create_task(move())
    try:
        yield enough
    finally:
        await task


async def check(home: House, acknowledged: list[tuple[str, int]]) -> None:
    """Each acknowledged row is there, each once, and no other."""
    assert len(acknowledged) > MOVES
    assert sorted(await home.written()) == sorted(acknowledged)


async def asyncpg_pool(home: House, enough: asyncio.Event, done: list[tuple[str, int]]) -> None:
    async with asyncpg.create_pool(**home.connect, min_size=2, max_size=4) as pool:

        async def work(who: str) -> None:
            n = 0
            while not enough.is_set() or len(done) <= MOVES:
                n += 1
                if n % 2:
                    async with pool.acquire() as connection, connection.transaction():
                        await connection.execute("insert into ledger (who, n) values ($1, $2)", who, n)
                        assert await connection.fetchval("select count(*) from ledger where who = $1", who) == n
                else:
                    await pool.execute("insert into ledger (who, n) values ($1, $2)", who, n)
                done.append((who, n))

        await asyncio.gather(*(work(f"w{number}") for number in range(6)))


async def asyncpg_kept(home: House, enough: asyncio.Event, done: list[tuple[str, int]]) -> None:
    """Connections that are never given back, with prepared statements that were made once."""

    async def work(who: str) -> None:
        connection = await asyncpg.connect(**home.connect)
        statement = await connection.prepare("insert into ledger (who, n) values ($1, $2) returning n")
        n = 0
        while not enough.is_set() or len(done) <= MOVES:
            n += 1
            assert await statement.fetchval(who, n) == n
            done.append((who, n))
        await connection.close()

    await asyncio.gather(*(work(f"w{number}") for number in range(3)))


async def psycopg_pipeline(home: House, enough: asyncio.Event, done: list[tuple[str, int]]) -> None:
    async def work(who: str) -> None:
        async with await psycopg.AsyncConnection.connect(home.dsn, autocommit=True, prepare_threshold=1) as connection:
            n = 0
            while not enough.is_set() or len(done) <= MOVES:
                async with connection.pipeline() as pipeline:
                    for _ in range(5):
                        n += 1
                        await connection.execute("insert into ledger (who, n) values (%s, %s)", (who, n))
                        if n % 2:
                            await pipeline.sync()
                done.extend((who, number) for number in range(n - 4, n + 1))

    await asyncio.gather(*(work(f"w{number}") for number in range(3)))


async def psycopg_transactions(home: House, enough: asyncio.Event, done: list[tuple[str, int]]) -> None:
    async with await psycopg.AsyncConnection.connect(home.dsn, prepare_threshold=0) as connection:
        n = 0
        while not enough.is_set() or len(done) <= MOVES:
            n += 1
            async with connection.transaction():
                await connection.execute("insert into ledger (who, n) values ('a', %s)", (n,))
                with contextlib.suppress(psycopg.errors.DivisionByZero):
                    async with connection.transaction():
                        await connection.execute("insert into ledger (who, n) select 'b', 1 / %s", (0,))
            done.append(("a", n))


async def psycopg_copy(home: House, enough: asyncio.Event, done: list[tuple[str, int]]) -> None:
    async with await psycopg.AsyncConnection.connect(home.dsn, autocommit=True) as connection:
        n = 0
        while not enough.is_set() or len(done) <= MOVES:
            first = n + 1
            async with connection.cursor().copy("copy ledger (who, n) from stdin") as copy:
                for _ in range(50):
                    n += 1
                    await copy.write_row(("c", n))
            done.extend(("c", number) for number in range(first, n + 1))
            async with connection.cursor().copy("copy (select n from ledger where who = 'c') to stdout") as copy:
                assert len([row async for row in copy.rows()]) == n


async def sqlalchemy_engine(home: House, enough: asyncio.Event, done: list[tuple[str, int]]) -> None:
    engine = create_async_engine(home.dsn.replace("postgresql:", "postgresql+asyncpg:"), pool_size=3)

    async def work(who: str) -> None:
        n = 0
        while not enough.is_set() or len(done) <= MOVES:
            n += 1
            async with engine.begin() as connection:
                await connection.execute(text("insert into ledger (who, n) values (:who, :n)"), {"who": who, "n": n})
            done.append((who, n))

    await asyncio.gather(*(work(f"w{number}") for number in range(4)))
    await engine.dispose()


LOST = (  # how asyncpg tells it, which depends on what it was waiting for
    asyncpg.AdminShutdownError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
CLIENTS: list[Callable[[House, asyncio.Event, list[tuple[str, int]]], Awaitable[Any]]] = [
    asyncpg_pool,
    asyncpg_kept,
    psycopg_pipeline,
    psycopg_transactions,
    psycopg_copy,
    sqlalchemy_engine,
]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
async def test_a_client_does_not_notice_that_its_database_moves(home: House, client: Any) -> None:
    done: list[tuple[str, int]] = []
    async with moving(home) as enough:
        await client(home, enough, done)
    assert home.moves == MOVES
    await check(home, done)


async def test_a_mover_without_patience_costs_open_transactions_only(home: House) -> None:
    """Backends are ended without the lock: who is told so was in a transaction; what was acknowledged stays."""
    done: list[tuple[str, int]] = []
    doubtful: list[tuple[str, int]] = []

    async def work(who: str) -> None:
        connection, n = await asyncpg.connect(**home.connect), 0
        while not enough.is_set() or len(done) <= MOVES:
            n += 1
            try:
                async with connection.transaction():
                    await connection.execute("insert into ledger (who, n) values ($1, $2)", who, n)
                done.append((who, n))
            except LOST:
                doubtful.append((who, n))
                connection.terminate()
                connection = await asyncpg.connect(**home.connect)
        await connection.close()

    async with moving(home, patient=False) as enough:
        await asyncio.gather(*(work(f"w{number}") for number in range(4)))
    written = await home.written()
    assert len(set(written)) == len(written)
    assert set(done) <= set(written) <= {*done, *doubtful}


async def test_idle_clients_outlive_backends_that_are_ended(home: House) -> None:
    connections = [await asyncpg.connect(**home.connect) for _ in range(3)]
    for _ in range(10):
        await home.end_backends()
        assert [await each.fetchval("select 1 + 1") for each in connections] == [2, 2, 2]
    for each in connections:
        await each.close()


async def test_a_transaction_keeps_the_mover_waiting(home: House) -> None:
    connection = await asyncpg.connect(**home.connect)
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute("insert into ledger (who, n) values ('x', 1)")
    move = asyncio.create_task(home.move())
    async with home.inside() as watcher:
        while not await watcher.fetchval("select count(*) from pg_locks where locktype = 'advisory' and not granted"):
            await asyncio.sleep(0.005)
    assert not move.done()
    await connection.execute("insert into ledger (who, n) values ('x', 2)")
    await transaction.commit()
    await move
    assert await connection.fetchval("select count(*) from ledger") == 2
    await connection.close()


async def test_a_client_that_never_rests_lets_the_mover_in(home: House) -> None:
    """Transactions one behind the other, and pipelines that never run dry, leave a gap all the same."""
    connection = await psycopg.AsyncConnection.connect(home.dsn, autocommit=True)
    stop = asyncio.Event()

    async def hurry() -> int:
        count = 0
        async with connection.pipeline() as pipeline:
            while not stop.is_set():
                for _ in range(20):
                    await connection.execute("insert into ledger (who, n) values ('p', 1)")
                    await pipeline.sync()
                count += 20
        return count

    task = asyncio.create_task(hurry())
    for _ in range(3):
        await asyncio.wait_for(home.move(), 10)
    stop.set()
    assert len(await home.written()) <= await task
    await connection.execute("select 1")
    assert len(await home.written()) == await task
    await connection.close()
