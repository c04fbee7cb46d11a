"""Who gets in, what a stranger learns, and what hostile clients can't do to others."""

import asyncio
import logging
import struct

import asyncpg
import pytest
from hypothesis import strategies as st

from megamcp import errors
from megamcp.relay import messages
from megamcp.relay.messages import Client, Server, message
from tests.integration.drawing import drawn
from tests.integration.relay.house import LOCK, House, house
from tests.integration.relay.raw import Raw, failure, logged_in, opened, query


async def through(home: House, password: str | None = None) -> Raw:
    return await logged_in(("127.0.0.1", home.port), home.user, password or home.password, "rollout")


async def fields(home: House, user: str, password: str) -> dict[str, str]:
    with pytest.raises(PermissionError) as refused:
        await logged_in(("127.0.0.1", home.port), user, password, "rollout")
    return dict(refused.value.args[0])


async def test_a_wrong_password_and_an_unknown_login_look_the_same(home: House) -> None:
    wrong = await fields(home, "somebody", "wrong")
    home.refusal = errors.NotFound("There is no such rollout: ro_secret.")
    unknown = await fields(home, "somebody", "wrong")
    home.refusal = errors.Gone("It was released.")
    gone = await fields(home, "somebody", home.password)
    assert wrong == unknown == gone
    assert wrong["C"] == "28P01"


async def test_an_unknown_login_has_a_salt_that_stays(home: House) -> None:
    async def salt(user: str) -> bytes:
        raw = await opened(("127.0.0.1", home.port))
        async with raw:
            raw.writer.write(messages.startup({"user": user}))
            await raw.next()
            first = b"n,,n=,r=abcdef"
            raw.writer.write(message(Client.PASSWORD, b"SCRAM-SHA-256\0" + struct.pack("!I", len(first)) + first))
            _, body = await raw.next()
            return body.split(b",")[1]

    known = await salt("a")
    home.refusal = errors.NotFound("no")
    assert await salt("a") == await salt("a") == known
    assert await salt("b") != known


async def test_an_authenticated_client_is_told_why_its_database_is_gone(home: House) -> None:
    async with await through(home) as raw:
        home.refusal = errors.Gone("Rollout ro_1 was released.", hint="Open another.")
        await home.end_backends()
        raw.writer.write(query("select 1"))
        told = failure(await raw.rest())
        assert (told["C"], told["M"], told["H"]) == ("57P04", "Rollout ro_1 was released.", "Open another.")


async def test_the_servers_own_words_are_kept_from_the_client(postgres_dsn: str) -> None:
    """They name databases and roles that the client has never heard of."""
    async with house(postgres_dsn, patience_s=0.3) as home:
        kept, home.database = home.database, "mm_of_somebody_else"
        told = await fields(home, home.user, home.password)
        home.database = kept
        assert told["C"] == "57P03"
        assert "mm_" not in str(told)
        assert home.resolved > 3


async def test_a_client_that_waits_for_anothers_transaction_is_told_so(postgres_dsn: str) -> None:
    async with house(postgres_dsn, patience_s=0.3) as home, home.inside() as mover, await through(home) as raw:
        await mover.execute(f"select pg_advisory_lock({LOCK})")
        raw.writer.write(query("select 1"))
        told = failure(await raw.rest())
        assert (told["C"], told["M"]) == ("55P03", "The rollout's database is kept by another transaction or call.")


async def test_a_database_without_the_two_functions_is_refused(home: House) -> None:
    async with home.inside() as admin:
        await admin.execute("drop schema megamcp cascade")
    told = await fields(home, home.user, home.password)
    assert told["C"] == "58000"


async def test_a_clients_bad_parameter_is_its_own_to_read(home: House) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await asyncpg.connect(**home.connect, server_settings={"no_such_setting": "1"})
    assert refused.value.sqlstate == "42704"
    assert "no_such_setting" in str(refused.value)


async def cancel(home: House, key: bytes) -> None:
    async with await opened(("127.0.0.1", home.port)) as raw:
        raw.writer.write(messages.untagged(messages.CANCEL_REQUEST, key))
        assert await raw.rest() == b""


async def test_only_the_owner_of_a_key_cancels(home: House) -> None:
    async with await through(home) as victim, await through(home) as other:
        victim.writer.write(query("select pg_sleep(20)"))
        async with home.inside() as watcher:
            while not await watcher.fetchval(
                "select count(*) from pg_stat_activity where query like '%pg_sleep(20)%' and pid <> pg_backend_pid()"
            ):
                await asyncio.sleep(0.005)
            for key in (other.key, victim.key[:4] + other.key[4:], victim.key[:8], victim.key[:-1] + b"\0\0"):
                await cancel(home, key)
            assert await watcher.fetchval(
                "select count(*) from pg_stat_activity where query like '%pg_sleep(20)%' and pid <> pg_backend_pid()"
            )
        await cancel(home, victim.key)
        _, body = (await victim.until(Server.ERROR))[-1]
        assert messages.error_fields(body)["C"] == "57014"
        assert len(victim.key) == 4 + 32


async def test_a_cancel_between_transactions_harms_nothing(home: House) -> None:
    async with await through(home) as raw:
        for _ in range(30):
            cancelling = asyncio.create_task(cancel(home, raw.key))
            got = await raw.query("select 1")
            await cancelling
            assert got[-1] == (Server.READY, b"I")
        await home.move()
        assert (await raw.query("select 1"))[-1] == (Server.READY, b"I")


async def test_keys_of_old_clients_are_four_bytes(home: House) -> None:
    async with await logged_in(
        ("127.0.0.1", home.port), home.user, home.password, "rollout", messages.PROTOCOL_3_0
    ) as raw:
        assert len(raw.key) == 8


async def test_clients_are_counted(postgres_dsn: str) -> None:
    async with house(postgres_dsn, max_clients=3, max_clients_per_login=2) as home:
        first, second = await through(home), await through(home)
        assert (await fields(home, home.user, home.password))["C"] == "53300"
        await first.__aexit__()
        while home.relay.clients == 2:
            await asyncio.sleep(0.002)
        third = await through(home)
        await asyncio.gather(second.__aexit__(), third.__aexit__())


async def test_slow_strangers_keep_nobody_out(postgres_dsn: str) -> None:
    async with house(postgres_dsn, max_clients=8, startup_s=0.5) as home:
        strangers = [await opened(("127.0.0.1", home.port)) for _ in range(60)]
        for stranger in strangers[::2]:
            stranger.writer.write(b"\0\0")
        async with await through(home) as raw:
            await raw.query("select 1")
        for stranger in strangers:
            async with stranger, asyncio.timeout(5):
                assert (await stranger.rest())[:1] in (b"", b"E")


async def test_an_idle_client_is_ended_and_a_busy_one_is_not(postgres_dsn: str) -> None:
    async with (
        house(postgres_dsn, idle_s=0.2) as home,
        await through(home) as idle,
        await through(home) as busy,
        await through(home) as inside,
    ):
        await inside.query("begin")
        assert (await busy.query("select pg_sleep(0.8)"))[-1] == (Server.READY, b"I")
        assert failure(await idle.rest())["C"] == "57P05"
        assert failure(await inside.rest())["C"] == "25P03"


@pytest.mark.parametrize(
    "garbage",
    [b"\0\0\0\0\0", b"Q\0\0\0\0", b"Q\xff\xff\xff\xff", b"S\0\1\0\0", b"z\0\0\0\4", message(Client.PASSWORD, b"x\0")],
)
async def test_what_is_no_message_ends_the_connection(home: House, garbage: bytes) -> None:
    async with await through(home) as raw:
        await raw.query("select 1")
        raw.writer.write(garbage)
        assert failure(await raw.rest())["C"] == "08P01"


async def test_no_bytes_harm_another_client(home: House) -> None:
    async with await through(home) as neighbour:

        async def attack(login: bool, data: bytes) -> None:
            raw = await (through(home) if login else opened(("127.0.0.1", home.port)))
            async with raw, asyncio.timeout(30):
                raw.writer.write(data)
                raw.writer.write_eof()
                await raw.rest()
            assert (await neighbour.query("select 1"))[-1] == (Server.READY, b"I")

        letters = st.sampled_from(b"BCcDdEFfHPpQSX\0")
        framed = st.builds(lambda kind, body: message(kind, body), letters, st.binary(max_size=30))
        data = st.one_of(st.binary(max_size=200), st.lists(framed, max_size=10).map(b"".join))

        await drawn(attack, st.booleans(), data, examples=60)


async def test_no_password_is_logged(home: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with await through(home) as raw:
        await raw.query("select 1")
        await home.end_backends()
        await raw.query("select 1")
    await fields(home, home.user, "another-secret")
    assert home.password not in caplog.text
    assert "another-secret" not in caplog.text


async def test_closing_tells_the_clients(home: House) -> None:
    async with await through(home) as raw:
        await home.relay.close()
        assert failure(await raw.rest())["C"] == "57P01"
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await through(home)
