"""The pool is bounded and loses nothing: not a connection, not a rollout's lock, however calls end."""

import asyncio
import contextlib
import random

import httpx
import pytest

from megamcp.sdk import database
from tests.integration.sdk.conftest import Client
from tests.integration.sdk.counter_database import CounterDatabase
from tests.integration.sdk.counter_server import server


@pytest.fixture
async def narrow(counters: CounterDatabase):  # type: ignore[no-untyped-def]
    """A client of a server with two connections."""
    app = server.asgi_app(counters.dsn, pool_size=2)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tool") as http:
        yield Client(http)
    await app.aclose()


async def test_calls_beyond_the_pool_wait_for_a_connection(narrow: Client, counters: CounterDatabase) -> None:
    rollouts = [await counters.rollout() for _ in range(8)]
    replies = await asyncio.gather(*(narrow.call("add", {"name": "a"}, handle=counters.handle(r)) for r in rollouts))
    assert not any(reply.result.get("isError") for reply in replies)
    used = await counters.admin.fetchval(
        "select count(*) from pg_stat_activity"
        " where application_name = 'megamcp tool server' and datname = current_database()"
    )
    assert used == 2


async def test_a_full_pool_is_said_after_the_longest_wait(
    counters: CounterDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "POOL_WAIT_S", 0.2)
    app = server.asgi_app(counters.dsn, pool_size=1)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tool") as http:
        client = Client(http)
        first, second = [await counters.rollout() for _ in range(2)]
        holder = asyncio.create_task(client.call("wait", {"seconds": 0.6}, handle=counters.handle(first)))
        await asyncio.sleep(0.1)
        reply = await client.call("add", {"name": "a"}, handle=counters.handle(second))
        assert (reply.code, reply.message["error"]["code"]) == ("no_capacity", -32005)
        await holder
    await app.aclose()


async def test_calls_cancelled_at_any_moment_leak_no_connection(narrow: Client, counters: CounterDatabase) -> None:
    chance = random.Random(4)
    rollouts = [await counters.rollout() for _ in range(6)]

    async def one(number: int) -> None:
        tool, arguments = chance.choice([("add", {"name": "b"}), ("wait", {"seconds": 0.02, "name": "b"})])
        call = narrow.call(tool, arguments, handle=counters.handle(rollouts[number % 6]))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call, chance.uniform(0.001, 0.2))

    await asyncio.gather(*(one(number) for number in range(150)))
    async with asyncio.timeout(30):
        began = asyncio.get_running_loop().time()
        waits = [{"seconds": 2.0, "name": name} for name in "ab"]
        await asyncio.gather(
            *(narrow.call("wait", w, handle=counters.handle(r)) for w, r in zip(waits, rollouts, strict=False))
        )
        assert asyncio.get_running_loop().time() - began < 3.8, "the pool has lost a connection"
    done = await counters.admin.fetchval(
        "select count(*) from megamcp.events where rollout = any ($1) and state = 'done' and arguments like '%\"b\"%'",
        rollouts,
    )
    assert await counters.value("b") == 10 + done
    locks = await counters.admin.fetchval(
        "select count(*) from pg_locks where locktype = 'advisory'"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    assert locks == 0
