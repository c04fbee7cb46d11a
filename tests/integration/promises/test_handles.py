"""A state handle is good for one call: forged, expired, replayed and foreign ones are refused, and the ways around."""

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from megamcp.handles import Mode, Signer
from megamcp.migrate import migrate
from megamcp.targets import role_dsn
from tests.integration.promises.world import World

BEGIN = "select * from megamcp.call_begin($1, 'put', '{}')"
FINISH = "select megamcp.call_finish($1, 'put', '{}', $2, false)"


@pytest_asyncio.fixture(loop_scope="session")
async def signer(world: World) -> Signer:
    return await migrate(world.dsn)


@pytest_asyncio.fixture(loop_scope="session")
async def tool(world: World, signer: Signer) -> AsyncIterator[asyncpg.Connection]:
    """A connection as the ledger's tool server has it."""
    loaded = await world.services.environments.find("ledger")
    assert loaded.servers[0].schema is not None
    connection = await asyncpg.connect(role_dsn(world.dsn, loaded.servers[0].schema.tool_role, signer.password("tool")))
    yield connection
    await connection.close()


def handle(signer: Signer, rollout: str, **changes: Any) -> str:
    fields = {
        "rollout": rollout,
        "server": "ledger",
        "epoch": 0,
        "mode": Mode.WRITE,
        "deadline": time.time() + 20,
        "request": b"\0" * 32,
        **changes,
    }
    return signer.mint(**fields)


async def refused(connection: asyncpg.Connection, token: str, state: str) -> None:
    with pytest.raises(asyncpg.PostgresError) as error:
        await connection.fetchrow(BEGIN, token)
    assert error.value.sqlstate == state


async def test_a_forged_handle_is_refused(world: World, tool: asyncpg.Connection, signer: Signer) -> None:
    mine, other = await world.open(2)
    good = handle(signer, mine)
    for token in (
        good.replace(mine, other),
        good[:-1] + ("0" if good[-1] != "0" else "1"),
        good.replace(".w.", ".r."),
        handle(Signer(b"guessed" * 5), mine),
        "",
        "v1",
        "." * 10,
        "v1." + "x" * 5000,
    ):
        await refused(tool, token, "MM401")


async def test_an_expired_handle_is_refused(world: World, tool: asyncpg.Connection, signer: Signer) -> None:
    await refused(tool, handle(signer, await world.one(), deadline=time.time() - 0.1), "MM402")


async def test_a_handle_is_good_for_one_call(world: World, tool: asyncpg.Connection, signer: Signer) -> None:
    token = handle(signer, await world.one())
    async with tool.transaction():
        await tool.fetchrow(BEGIN, token)
        await tool.execute("insert into item values ('once', 'x')")
        await tool.fetchval(FINISH, token, "{}")
    await refused(tool, token, "MM403")


async def test_a_read_handle_is_good_for_one_call_too(world: World, tool: asyncpg.Connection, signer: Signer) -> None:
    token = handle(signer, await world.one(), mode=Mode.READ)
    async with tool.transaction():
        await tool.fetchrow(BEGIN, token)
        await tool.fetchval(FINISH, token, "{}")
    await refused(tool, token, "MM403")


async def test_handles_of_other_servers_and_kinds_are_refused(
    world: World, tool: asyncpg.Connection, signer: Signer
) -> None:
    rollout = await world.one()
    await refused(tool, handle(signer, rollout, server="other"), "MM401")
    await refused(tool, handle(signer, rollout, mode=Mode.QUERY), "MM401")
    await refused(tool, handle(signer, "ro_" + "0" * 32), "MM404")
    await refused(tool, handle(signer, rollout, epoch=5), "MM409")


async def test_a_binding_ends_with_its_transaction_and_its_backend(
    world: World, tool: asyncpg.Connection, signer: Signer
) -> None:
    rollout = await world.one()
    token = handle(signer, rollout)
    transaction = tool.transaction()
    await transaction.start()
    await tool.fetchrow(BEGIN, token)
    binding = await tool.fetchval("select current_setting('megamcp.binding')")
    await tool.fetchval(FINISH, token, "{}")
    await transaction.commit()
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await tool.fetch("select * from item")
    async with tool.transaction():
        await tool.execute("select set_config('megamcp.binding', $1, true)", binding)
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await tool.fetch("select * from item")


async def test_the_tool_role_reaches_nothing_but_its_views(world: World, tool: asyncpg.Connection) -> None:
    hidden = await world.execute("select nspname from pg_namespace where nspname like 's\\_%'")
    forbidden = [
        "select * from megamcp.rollouts",
        "select * from megamcp.keys",
        "select * from megamcp.secrets",
        "select megamcp.bind('{}', 1, 1, now(), true)",
        "select megamcp.call_outcome('a', 1, null, '', false, 'done')",
        "set role postgres",
        "create table t (x int)",
        "create schema s",
        "select pg_read_file('/etc/passwd')",
        "copy (select 1) to program 'true'",
        f'select * from "{hidden[0]["nspname"]}"."item~base"',
        f'create function "{hidden[0]["nspname"]}".f() returns int language sql return 1',
    ]
    for statement in forbidden:
        with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedTableError)):
            await tool.execute(statement)


async def test_an_error_of_a_call_that_is_gone_is_recorded_once(
    world: World, tool: asyncpg.Connection, signer: Signer
) -> None:
    rollout = await world.one()
    token = handle(signer, rollout, nonce=uuid.uuid4())
    for _ in range(2):
        row = await tool.fetchrow("select * from megamcp.call_fail($1, 'put', '{}', '{\"lost\": true}')", token)
        assert row["is_error"] is True
        assert row["result"] == '{"lost": true}'
    await refused(tool, token, "MM403")
    assert [e["state"] for e in await world.journal(rollout) if e["kind"] == "call"] == ["failed"]
