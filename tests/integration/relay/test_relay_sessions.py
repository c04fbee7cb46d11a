"""What of a session is there on the next backend, and what a client may rely on while backends come and go."""

import asyncio
import io
import threading
from collections.abc import AsyncIterator

import asyncpg
import psycopg
import pytest
import pytest_asyncio
import uvloop

from megamcp.relay import Relay, Route
from megamcp.relay.messages import SYNC, Client, Server, message, parse
from tests.integration.relay.house import LOCK, House
from tests.integration.relay.raw import bind, execute, logged_in, named

LOST = (
    asyncpg.AdminShutdownError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # where the end comes between a command and the driver's next step
)
"""What the driver may say of a connection that was ended."""


@pytest_asyncio.fixture(loop_scope="session")
async def client(home: House) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(**home.connect, server_settings={"application_name": "first"})
    yield connection
    await connection.close()


async def settled(home: House) -> None:
    """Waits until no client holds the lock: the relay has looked and left."""
    async with home.inside() as watcher:
        while await watcher.fetchval("select count(*) from pg_locks where locktype = 'advisory'"):
            await asyncio.sleep(0.002)


async def pid(client: asyncpg.Connection) -> int:
    return int(await client.fetchval("select pg_backend_pid()"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("application_name", "another"),
        ("DateStyle", "SQL, DMY"),
        ("TimeZone", "Asia/Tokyo"),
        ("search_path", '"$user", pg_temp, "Odd ""name"'),
        ("work_mem", "5MB"),
        ("statement_timeout", "17s"),
        ("default_transaction_isolation", "serializable"),
        ("app.user_id", "42"),
        ("role", "pg_monitor"),
    ],
)
async def test_a_setting_of_the_session_is_taken_along(
    home: House, client: asyncpg.Connection, name: str, value: str
) -> None:
    await home.admin.execute(f"grant pg_monitor to {home.user}")
    quoted = value if name == "search_path" else f"'{value}'"
    await client.execute(f"set {name} to {quoted}")
    before = await client.fetchval("select current_setting($1)", name)
    await settled(home)
    for _ in range(2):
        first = await pid(client)
        await home.end_backends()
        assert await client.fetchval("select current_setting($1)", name) == before
        assert await pid(client) != first
    await client.execute(f"reset {name}")
    default = await client.fetchval("select current_setting($1)", name)
    assert default != before
    await settled(home)
    await home.end_backends()
    assert await client.fetchval("select current_setting($1, true)", name) in (default, None)


async def test_what_only_a_transaction_set_is_not_taken_along(home: House, client: asyncpg.Connection) -> None:
    async with client.transaction():
        await client.execute("set local work_mem to '5MB'")
        await client.execute("set local timezone to 'Asia/Tokyo'")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await client.execute("begin; set work_mem to '6MB'; select 1 / 0")
    await client.execute("rollback")
    expected = await client.fetchval("select current_setting('work_mem') || current_setting('timezone')")
    await settled(home)
    await home.end_backends()
    assert await client.fetchval("select current_setting('work_mem') || current_setting('timezone')") == expected


async def test_startup_parameters_are_said_again(home: House, client: asyncpg.Connection) -> None:
    await home.end_backends()
    assert await client.fetchval("select current_setting('application_name')") == "first"
    await client.execute("set application_name to 'second'")
    await client.execute("reset application_name")
    assert await client.fetchval("select current_setting('application_name')") == "first"


async def test_discarded_settings_stay_discarded(home: House, client: asyncpg.Connection) -> None:
    await client.execute("set work_mem to '5MB'")
    await settled(home)
    await client.execute("discard all")
    await home.end_backends()
    assert await client.fetchval("select current_setting('work_mem')") != "5MB"


async def test_prepared_statements_are_there_again_and_closed_ones_are_not(home: House) -> None:
    async with await logged_in(("127.0.0.1", home.port), home.user, home.password, "rollout") as raw:
        raw.writer.write(
            parse("kept", "select 'kept'") + parse("closed", "select 1") + parse("", "select 'no name'") + SYNC
        )
        raw.writer.write(named(Client.CLOSE, "S", "closed") + SYNC)
        raw.writer.write(parse("failed", "selec") + parse("skipped", "select 1") + SYNC)
        for _ in range(3):
            await raw.until(Server.READY)
        await home.end_backends()
        raw.writer.write(bind("", "") + execute("") + bind("", "kept") + execute("") + SYNC)
        rows = [body for kind, body in await raw.until(Server.READY) if kind == Server.DATA_ROW]
        assert [row[6:] for row in rows] == [b"no name", b"kept"]
        for gone in ("closed", "failed", "skipped"):
            raw.writer.write(bind("", gone) + SYNC)
            assert [kind for kind, _ in await raw.until(Server.READY)] == [Server.ERROR, Server.READY]
        await raw.query("select 1")  # a simple query is the end of the statement without a name
        await home.end_backends()
        raw.writer.write(bind("", "") + SYNC)
        assert (await raw.until(Server.READY))[0][0] == Server.ERROR


async def test_statements_that_sql_prepared_are_there_again(home: House, client: asyncpg.Connection) -> None:
    await client.execute("prepare one as select 'one'")
    await client.execute("insert into ledger (who, n) values ('x', 1); prepare two as select 'two'")
    await client.execute("prepare three as select 'three'")
    await client.execute("deallocate three")
    await settled(home)
    await home.end_backends()
    assert await client.fetch("execute one") == [("one",)]
    with pytest.raises(asyncpg.InvalidSQLStatementNameError):
        await client.execute("execute three")
    # A PREPARE among other commands can't be repeated alone, and they aren't repeated.
    assert await home.written() == [("x", 1)]


async def test_deallocate_is_noticed(home: House, client: asyncpg.Connection) -> None:
    async with await psycopg.AsyncConnection.connect(home.dsn, autocommit=True, prepare_threshold=0) as connection:
        assert await (await connection.execute("select 1")).fetchone() == (1,)
        found = await (await connection.execute("select name from pg_prepared_statements", prepare=False)).fetchone()
        assert found is not None
        await connection.execute(f"deallocate {found[0]}".encode(), prepare=False)
        await settled(home)
        await home.end_backends()
        left = await (await connection.execute("select name from pg_prepared_statements", prepare=False)).fetchall()
        assert found not in left


async def test_a_listener_goes_on_listening(home: House, client: asyncpg.Connection) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    await client.add_listener('Odd "channel', lambda *found: heard.put_nowait(str(found[3])))
    await settled(home)
    for number in range(3):
        await home.end_backends()
        async with home.inside() as other, asyncio.timeout(10):
            while heard.empty():  # the relay connects by itself, since a listener sends nothing
                await other.execute("select pg_notify($1, $2)", 'Odd "channel', str(number))
                await asyncio.sleep(0.01)
        while not heard.empty():
            assert heard.get_nowait() == str(number)


async def test_a_transaction_that_loses_its_backend_is_told_and_rolled_back(home: House) -> None:
    client = await asyncpg.connect(**home.connect)
    await client.execute("begin")
    await client.execute("insert into ledger (who, n) values ('x', 1)")
    await home.end_backends()
    with pytest.raises(LOST):
        await client.execute("commit")
    assert client.is_closed()
    assert await home.written() == []


async def test_the_error_of_a_lost_transaction_is_postgresqls_own(home: House) -> None:
    async with await logged_in(("127.0.0.1", home.port), home.user, home.password, "rollout") as raw:
        await raw.query("begin")
        await home.end_backends()
        kind, body = await raw.next()
        assert kind == Server.ERROR
        assert b"C57P01\0" in body
        assert await raw.rest() == b""


async def test_a_session_with_too_much_to_take_along_is_told(home: House) -> None:
    client = await asyncpg.connect(**home.connect)
    await client.prepare(f"select '{'x' * 300_000}'")
    assert await client.fetchval("select 1") == 1
    await home.end_backends()
    with pytest.raises(LOST):
        await client.fetchval("select 1")
    assert client.is_closed()


async def test_a_timeout_of_the_clients_own_does_not_keep_it_out(home: House, client: asyncpg.Connection) -> None:
    """`enter` runs under the client's settings; waiting for a mover longer than they allow is repeated."""
    await client.execute("set statement_timeout to '300ms'; set lock_timeout to '200ms'")
    await settled(home)
    async with home.inside() as holder:
        await holder.execute(f"select pg_advisory_lock({LOCK})")
        asking = asyncio.create_task(client.fetchval("select 1"))
        done, _ = await asyncio.wait([asking], timeout=1.0)
        assert not done
        await holder.execute(f"select pg_advisory_unlock({LOCK})")
    assert await asking == 1


async def test_a_large_result_waits_for_a_slow_reader(home: House) -> None:
    """Neither side is buffered whole: 200 MB go through, and this process grows by a fraction of that."""
    before = resident()
    async with await logged_in(("127.0.0.1", home.port), home.user, home.password, "rollout") as raw:
        raw.writer.write(
            message(Client.QUERY, b"copy (select repeat('x', 1000000) from generate_series(1, 200)) to stdout\0")
        )
        await raw.reader.readexactly(1000)
        await asyncio.sleep(0.3)
        assert resident() - before < 40 << 20
        size = 0
        while not (data := await raw.reader.read(1 << 20)).endswith(b"Z\0\0\0\5I"):
            size += len(data)
        assert size > 199_000_000
        assert resident() - before < 60 << 20


async def test_a_large_upload_waits_for_a_slow_backend(home: House) -> None:
    before = resident()
    async with home.inside() as admin:
        await admin.execute("create table big (t text); grant all on big to public")
        async with await logged_in(("127.0.0.1", home.port), home.user, home.password, "rollout") as raw:
            raw.writer.write(message(Client.QUERY, b"copy big from stdin\0"))
            assert (await raw.next())[0] == Server.COPY_IN
            holder = asyncio.create_task(admin.execute("begin; lock big; select pg_sleep(0.3); commit"))
            row = message(Client.COPY_DATA, b"x" * 1_000_000 + b"\n")
            for _ in range(100):
                raw.writer.write(row)
                await raw.writer.drain()
            raw.writer.write(message(Client.COPY_DONE))
            await raw.until(Server.READY)
            await holder
        assert await admin.fetchval("select sum(length(t)) from big") == 100_000_000
    assert resident() - before < 60 << 20


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


async def test_a_cancel_reaches_the_backend_of_the_moment(home: House, client: asyncpg.Connection) -> None:
    await home.end_backends()
    with pytest.raises(TimeoutError):
        await client.execute("select pg_sleep(30)", timeout=0.2)
    assert await client.fetchval("select 1") == 1


async def test_the_lock_is_taken_again_when_a_client_discards_it(home: House) -> None:
    async with await logged_in(("127.0.0.1", home.port), home.user, home.password, "rollout") as raw:
        held = f"select count(*) from pg_locks where objid = {LOCK} and pid = pg_backend_pid()"
        for _ in range(3):
            await raw.query("discard all")
            rows = [body for kind, body in await raw.query(held) if kind == Server.DATA_ROW]
            assert rows[0][6:] == b"1"


async def test_what_was_sent_before_good_bye_is_done(home: House) -> None:
    async with await logged_in(("127.0.0.1", home.port), home.user, home.password, "rollout") as raw:
        work = message(Client.QUERY, b"insert into ledger (who, n) select 'x', 1 from pg_sleep(0.1)\0")
        raw.writer.write(work + message(Client.TERMINATE))
        assert await raw.rest() in (b"",)
    async with asyncio.timeout(5):
        while not await home.written():
            await asyncio.sleep(0.01)


async def test_a_server_is_reached_over_tcp_as_well(home: House) -> None:
    """The server behind this relay is the other relay: SCRAM, protocol 3.2, results and cancelling over TCP."""

    async def resolve(user: str, database: str) -> Route:
        return Route("127.0.0.1", home.port, "rollout", home.user, home.password)

    outer = Relay(resolve)
    connection = await asyncpg.connect(**{**home.connect, "port": await outer.listen("127.0.0.1", 0)})
    rows = await connection.fetch("select n, repeat('x', 1000) from generate_series(1, 5000) n")
    assert [row[0] for row in rows] == list(range(1, 5001))
    with pytest.raises(TimeoutError):
        await connection.execute("select pg_sleep(30)", timeout=0.2)
    async with connection.transaction():
        assert await connection.fetchval("select $1::int + 1", 41) == 42
    await connection.close()
    await outer.close()


async def test_it_runs_on_the_loop_that_serves_the_gateway(home: House) -> None:
    """uvloop, in a thread of its own, while the database moves."""
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    here = asyncio.get_running_loop()
    over = threading.Event()

    async def resolve(user: str, database: str) -> Route:
        return Route(home.socket_dir, 5432, home.database, home.user, home.password)

    async def serve() -> None:
        relay = Relay(resolve)
        port = await relay.listen("127.0.0.1", 0)
        here.call_soon_threadsafe(ready.set_result, port)
        await asyncio.to_thread(over.wait)
        await relay.close()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    try:
        connection = await asyncpg.connect(**{**home.connect, "port": await ready})
        for number in range(1, 4):
            await connection.execute("insert into ledger (who, n) values ($1, $2)", "u", number)
            await home.move()
            assert await connection.fetchval("select max(n) from ledger") == number
            sink = io.BytesIO()
            await connection.copy_from_query("select repeat('x', 1000) from generate_series(1, 3000)", output=sink)
            assert len(sink.getvalue()) == 3_003_000
        await connection.close()
    finally:
        over.set()
        await asyncio.to_thread(thread.join)
