"""DISCARD ALL gives away the lock that keeps moves out: nothing of the client's runs until it is taken again."""

import asyncio

import pytest

from megamcp.relay.discards import is_discard
from megamcp.relay.memory import WHOLE_LIMIT
from megamcp.relay.messages import SYNC, Client, Server, message, parse
from tests.integration.relay.house import LOCK, House
from tests.integration.relay.raw import Raw, bind, execute, logged_in, named, query

HELD = f"select count(*) from pg_locks where objid = {LOCK} and pid = pg_backend_pid()"
ASKED = parse("", HELD) + bind("", "") + execute("")
PADDING = "/*" + "x" * WHOLE_LIMIT + "*/"

DISCARDS = {
    "query": query("discard all"),
    "query with comments": query("-- a\n/* b /* c */ */ DISCARD/**/ALL ; ;"),
    "query that is too long to be read": query(PADDING + "discard all"),
    "behind another query": query("select 1") + query("discard all"),
    "behind the end of a transaction": query("begin") + query("commit") + query("discard all"),
    "batch": parse("", "discard all") + bind("", "") + named(Client.DESCRIBE, "P", "") + execute("") + SYNC,
    "batch that goes on": parse("", "discard all") + bind("", "") + execute(""),
    "statement with a name": parse("d", "discard all") + SYNC + bind("p", "d") + execute("p"),
    "portal that outlives its statement": (
        parse("", "discard all") + bind("p", "") + parse("", "select 1") + execute("p")
    ),
    "behind a commit in one batch": (
        query("begin")
        + parse("", "commit")
        + parse("d", "discard all")
        + bind("c", "")
        + execute("c")
        + bind("", "d")
        + execute("")
    ),
    "statement that is too long to be read": parse("", PADDING + "discard all") + bind("", "") + execute(""),
    "behind what was not synced": parse("x", "select 1") + query("discard all"),
}


async def client(home: House) -> Raw:
    return await logged_in(("127.0.0.1", home.port), home.user, home.password, "rollout")


@pytest.mark.parametrize("sent", DISCARDS.values(), ids=DISCARDS)
async def test_what_is_sent_behind_a_discard_runs_under_the_lock(home: House, sent: bytes) -> None:
    async with await client(home) as raw:
        raw.writer.write(sent + ASKED + SYNC + query("select 'the end'"))
        rows, tags = [], []
        while b"the end" not in b"".join(rows):
            kind, body = await raw.next()
            if kind == Server.DATA_ROW:
                rows.append(body)
            elif kind == Server.COMMAND_COMPLETE:
                tags.append(body)
        assert b"DISCARD ALL\0" in tags
        assert rows[-2][6:] == b"1"


async def test_a_discard_that_is_refused_keeps_the_lock(home: House) -> None:
    async with await client(home) as raw:
        raw.writer.write(query("begin") + query("discard all") + query("rollback") + query(HELD))
        await raw.until(Server.ERROR)
        rows = await raw.until(Server.DATA_ROW)
        assert rows[-1][1][6:] == b"1"


@pytest.mark.parametrize(
    "sent",
    [query("discard all"), parse("", "discard all") + bind("", "") + execute("") + SYNC],
    ids=["query", "batch"],
)
async def test_a_move_before_the_answer_is_not_noticed(home: House, sent: bytes) -> None:
    async with await client(home) as raw, home.inside() as admin:
        await raw.query("set datestyle to german")
        await raw.query("create temporary table scratch (x int)")
        schema = await admin.fetchval("select relnamespace::regnamespace::text from pg_class where relname = 'scratch'")
        async with admin.transaction():
            await admin.execute(f"lock table {schema}.scratch")
            raw.writer.write(sent + query("insert into ledger (who, n) values ('a', 1)") + query("show datestyle"))
            while not await admin.fetchval("select count(*) from pg_locks where relation is not null and not granted"):
                await asyncio.sleep(0.001)
            assert await admin.fetchval(f"select pg_try_advisory_xact_lock({LOCK})")  # it is given away already
            assert await home.end_backends() == 1
        got = [await raw.next()]
        while got[-1][0] != Server.DATA_ROW:
            got.append(await raw.next())
        assert Server.ERROR not in [kind for kind, _ in got]
        assert [body for kind, body in got if kind == Server.COMMAND_COMPLETE] == [b"DISCARD ALL\0", b"INSERT 0 1\0"]
        assert got[-1][1][6:] == b"ISO, MDY"
        assert (b"DateStyle", b"ISO, MDY") in [
            tuple(body.split(b"\0")[:2]) for kind, body in got if kind == Server.PARAMETER_STATUS
        ]
    assert await home.written() == [("a", 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("discard all", True),
        (" \t\n\v\f\rDISCARD\nall;;", True),
        ("/* -- */ discard /* ' */ all -- ;", True),
        ("--/*\ndiscard all", True),
        ("discard all; select 1", False),
        ("discard temp", False),
        ("discardall", False),
        ("discard; all", False),
        ("select 'discard all'", False),
        ("/* discard all", False),
        ("-- discard all", False),
    ],
)
def test_it_is_told_from_other_texts(text: str, expected: bool) -> None:
    assert is_discard(text.encode()) == expected
    assert is_discard(message(Client.QUERY, text.encode() + b"\0")[5:]) == expected
