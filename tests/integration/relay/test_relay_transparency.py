"""A client gets through the relay what the server says, byte for byte; and the relay knows when it may let go."""

import asyncio
import itertools
import random
import re
from collections.abc import Iterator

import asyncpg
import pytest
from hypothesis import strategies as st

from megamcp.relay import session
from megamcp.relay.messages import SYNC, Client, message, parse, zero_ended
from tests.integration.drawing import drawn
from tests.integration.relay.house import LOCK, House
from tests.integration.relay.raw import Raw, bind, execute, logged_in, named, query

QUERIES = [
    "select 1",
    "select 1; select 2",
    "select 1 / 0",
    "select 1; select 1 / 0; select 2",
    "",
    "selec",
    "begin",
    "commit",
    "rollback",
    "savepoint a",
    "rollback to a",
    "insert into thing values (1)",
    "insert into thing select generate_series(10, 400) returning id",
    "insert into late values (1, 2)",
    "copy thing from stdin",
    "copy thing to stdout",
    "copy thing from stdin; select 5; copy thing to stdout",
    "declare c cursor for select * from thing",
    "declare c cursor with hold for select * from thing",
    "fetch 2 from c",
    "prepare a as select 7",
    "execute a",
    "deallocate a",
    "deallocate all",
    "discard all",
    "set datestyle to german",
    "set local timezone to 'Asia/Tokyo'",
    "set search_path to public, pg_temp",
    "listen ears",
    "do $$ begin raise notice 'hello'; end $$",
]
NAMES = ["", "a", "b"]
FUNCTION = message(Client.FUNCTION_CALL, (1610).to_bytes(4, "big") + bytes(6))  # pi()
STATEMENTS = [text for text in QUERIES if ";" not in text or text.startswith("do")]

names = st.sampled_from(NAMES)
small = st.one_of(
    st.sampled_from(QUERIES).map(query),
    st.builds(parse, names, st.sampled_from(STATEMENTS)),
    st.builds(bind, names, names),
    st.builds(execute, names, st.sampled_from([0, 0, 1])),
    st.builds(named, st.sampled_from([Client.DESCRIBE, Client.CLOSE]), st.sampled_from("SP"), names),
    st.sampled_from([SYNC, SYNC, message(Client.FLUSH), FUNCTION]),
    st.sampled_from(
        [
            message(Client.COPY_DATA, b"77\n"),
            message(Client.COPY_DATA, b"no number\n"),
            message(Client.COPY_DONE),
            message(Client.COPY_FAIL, zero_ended("no more")),
        ]
    ),
)
extended = st.builds(
    lambda name, sql, end: parse(name, sql) + bind("", name) + named(Client.DESCRIBE, "P", "") + execute("") + end,
    names,
    st.sampled_from(STATEMENTS),
    st.sampled_from([SYNC, SYNC, message(Client.FLUSH), b""]),
)
copying = st.builds(
    lambda start, data, end: start + data + end,
    st.sampled_from([query("copy thing from stdin"), parse("", "copy thing from stdin") + bind("", "") + execute("")]),
    st.sampled_from([b"", SYNC, message(Client.COPY_DATA, b"78\n79\n"), message(Client.COPY_DATA, b"x\n")]),
    st.sampled_from([message(Client.COPY_DONE), message(Client.COPY_DONE) + SYNC, SYNC, b""]),
)
programs = st.lists(st.one_of(small, small, extended, copying), min_size=1, max_size=14)
ENDING = (
    message(Client.COPY_FAIL, zero_ended("end"))
    + SYNC
    + query("rollback")
    + SYNC
    + query("deallocate all; select 'the end'")
)


def chunks(data: bytes, seed: int) -> Iterator[bytes]:
    """Cuts at places that no protocol knows, most of them in one stretch; now and then it is all one piece."""
    dice = random.Random(seed)
    size = dice.choice([1, 3, 7, 40, 100_000])
    stretch = dice.randint(0, len(data))
    for number in itertools.count():
        if not data:
            return
        # Each chunk wakes three processes, which is slow on some machines.
        cut = max(1, stretch) if number == 0 else dice.randint(1, size) if number < 50 else len(data)
        yield data[:cut]
        data = data[cut:]


def behind_data(parts: list[bytes]) -> bool:
    """The one thing that the relay refuses: COPY data with something else behind it than more of it, or its end."""
    program, letters = b"".join(parts) + ENDING, ""
    while program:
        letters += chr(program[0])
        program = program[1 + int.from_bytes(program[1:5], "big") :]
    return re.search("dH*[^dcfH]", letters) is not None


async def answers(client: Raw, program: bytes, seed: int, pause_s: float = 0) -> bytes | None:
    """All that the server says up to the last ReadyForQuery. None: it hung up, and what it said last may be lost."""
    got = bytearray()

    async def write() -> None:
        for chunk in chunks(program, seed):
            client.writer.write(chunk)
            if (pause_s and len(chunk) > 2) or seed % 3 == 0:
                await asyncio.sleep(pause_s)
            await client.writer.drain()

    writing = asyncio.create_task(write())
    while not (got.endswith(b"Z\0\0\0\5I") and b"the end" in got):
        try:
            data = await client.reader.read(65536)
        except ConnectionError:
            data = b""
        if not data:
            break
        got += data
    else:
        await writing
        return bytes(got)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    return None


TABLES = (
    "create table thing (id int primary key);"
    "create table late (a int, b int references thing deferrable initially deferred);"
    "grant all on thing, late to public"
)


async def compare(home: House, admin: asyncpg.Connection, parts: list[bytes], seed: int, restless: bool) -> None:
    """A program past the relay and through it. `restless`: meanwhile, backends are ended between transactions."""
    program = b"".join(parts) + ENDING
    await admin.execute("truncate thing, late")
    straight = await logged_in(f"{home.socket_dir}/.s.PGSQL.5432", home.user, home.password, home.database)
    async with straight:
        expected = await answers(straight, program, seed)
    if restless and expected is not None and b"CXX000" in expected:
        return  # a simple query amid an extended one: PostgreSQL 18.4 stumbles over it at its next command
    await admin.execute("truncate thing, late")
    async with await logged_in(("127.0.0.1", home.port), home.user, home.password, "rollout") as relayed:
        over = asyncio.Event()
        ending = asyncio.create_task(end_backends(home, admin, over)) if restless else None
        try:
            got = await answers(relayed, program, seed, 0.003 if restless else 0)
        finally:
            over.set()
            if ending:
                await ending
        if got is None and expected is not None:
            assert behind_data(parts), f"seed {seed}, program {parts}: ended, and not {expected!r}"
            return
        assert got == expected, f"seed {seed}, program {parts}: {got!r} and not {expected!r}"
        async with asyncio.timeout(30):  # whatever was said, the relay knows that it is over
            while await admin.fetchval("select count(*) from pg_locks where locktype = 'advisory'"):
                await asyncio.sleep(0.002)


async def end_backends(home: House, admin: asyncpg.Connection, over: asyncio.Event) -> None:
    while not over.is_set():
        await admin.execute(f"select pg_advisory_lock({LOCK})")
        await admin.fetch("select pg_terminate_backend(pid) from pg_stat_activity where usename = $1", home.user)
        await admin.execute(f"select pg_advisory_unlock({LOCK})")
        await asyncio.sleep(0.004)


async def search(home: House, examples: int, programs: st.SearchStrategy[list[bytes]], restless: bool) -> None:
    async with home.inside() as admin:
        await admin.execute(TABLES)

        async def agree(parts: list[bytes], seed: int) -> None:
            await compare(home, admin, parts, seed, restless)

        await drawn(agree, programs, st.integers(0, 1000), examples=examples)


@pytest.mark.parametrize("hold_s", [0.05, 0.0], ids=["patient", "leaves after each transaction"])
async def test_every_program_gets_the_servers_own_bytes(
    home: House, hold_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_HOLD_S", hold_s)
    await search(home, 60, programs, restless=False)


async def test_every_program_gets_the_same_bytes_while_backends_are_ended(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_HOLD_S", 0.0)
    # What is not taken along, or not from the middle of other commands.
    lost = (b"with hold", b"prepare a")
    kept = programs.filter(lambda parts: not any(word in part for part in parts for word in lost))
    await search(home, 15, kept, restless=True)
    assert home.resolved > 15 * 3  # two are the login's
