"""What the login of a document's server may do, and what it is refused even with a handle."""

import secrets
import time
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from megamcp.handles import Mode
from megamcp.migrate import migrate
from megamcp.targets import tool_dsn
from tests.integration.documents.conftest import Library
from tests.integration.security.test_rights import CALLS, EXECUTABLE, RELATIONS

OWN = {
    "megamcp.document_base(text,bytea)",
    "megamcp.document_head(text,bigint[])",
    "megamcp.document_replace(text,bigint,bytea)",
    "megamcp.document_splice(text,bigint,integer[],integer[],bytea[])",
}


@pytest_asyncio.fixture(loop_scope="session")
async def login(library: Library) -> AsyncIterator[asyncpg.Connection]:
    """As the server's process connects."""
    connection = await asyncpg.connect(await tool_dsn(library.dsn, "shelf"))
    yield connection
    await connection.close()


async def handle(library: Library, rollout: str, mode: Mode, server: str = "shelf") -> str:
    signer = await migrate(library.dsn)
    return signer.mint(rollout=rollout, server=server, epoch=0, mode=mode, deadline=time.time() + 30)


async def test_the_login_executes_these_functions_and_touches_no_table(login: asyncpg.Connection) -> None:
    assert {row["name"] for row in await login.fetch(EXECUTABLE)} == CALLS | OWN
    assert not await login.fetch(RELATIONS)
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await login.execute("create temporary table kept (x int)")


async def test_a_document_is_written_within_its_call_only(library: Library, login: asyncpg.Connection) -> None:
    rollout = (await library.client.open("shelf")).id
    token = await handle(library, rollout, Mode.WRITE)
    with pytest.raises(asyncpg.PostgresError, match="No call"):
        await login.execute("select megamcp.document_replace($1, 1, '')", token)
    with pytest.raises(asyncpg.PostgresError, match="No call"):
        await login.fetch("select * from megamcp.document_head($1, '{}')", token)


async def test_a_call_that_reads_writes_nothing(library: Library, login: asyncpg.Connection) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("put", key="x", value="1")
    token = await handle(library, rollout.id, Mode.READ)
    async with login.transaction():
        await login.fetch("select * from megamcp.call_begin($1, 'get', '{}')", token)
        head = await login.fetchrow("select version from megamcp.document_head($1, '{}')", token)
        assert head is not None
        with pytest.raises(asyncpg.PostgresError, match="No call"):
            async with login.transaction():
                await login.execute("select megamcp.document_replace($1, $2, '')", token, head["version"])


async def test_a_change_to_another_version_is_refused(library: Library, login: asyncpg.Connection) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("put", key="x", value="1")
    token = await handle(library, rollout.id, Mode.WRITE)
    transaction = login.transaction()
    await transaction.start()
    await login.fetch("select * from megamcp.call_begin($1, 'put', '{}')", token)
    with pytest.raises(asyncpg.PostgresError, match="not the one"):
        await login.execute("select megamcp.document_splice($1, 1, '{0}', '{0}', '{}')", token)
    await transaction.rollback()


async def test_another_servers_document_is_out_of_reach(library: Library, login: asyncpg.Connection) -> None:
    rollout = (await library.client.open("tower")).id
    for token in (await handle(library, rollout, Mode.WRITE, "tower"), secrets.token_hex(20)):
        for query in (
            "select * from megamcp.call_begin($1, 'build', '{}')",
            "select megamcp.document_base($1, '')",
            "select * from megamcp.document_head($1, '{}')",
        ):
            with pytest.raises(asyncpg.PostgresError, match=r"another tool server|not a state handle"):
                await login.fetch(query, token)
