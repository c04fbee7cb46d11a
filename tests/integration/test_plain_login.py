"""A PostgreSQL of the user's own, with a login that is no superuser: the same promises, clear words about rights."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from megamcp.app import prepare
from megamcp.errors import MegaMCPError, Unprocessable
from megamcp.migrate import SHARED_ROLES, migrate
from megamcp.settings import Settings
from megamcp.testing import running_gateway
from tests.integration.promises.world import ToolFailed, World

LEDGER = Path(__file__).parent.parent / "environments" / "ledger"


@pytest_asyncio.fixture(loop_scope="session")
async def plain_login(postgres_dsn: str, ledger_template: str) -> AsyncIterator[tuple[asyncpg.Connection, str, str]]:
    """A superuser's connection, the login's name, and the DSN of a database that it owns."""
    name = f"mm_plain_{secrets.token_hex(4)}"
    server = await asyncpg.connect(postgres_dsn)
    await server.execute(f"create role {name} login createrole password 'secret'")
    await server.execute(f"create database {name} owner {name} template template0")
    url = make_url(postgres_dsn).set(username=name, password="secret", database=name)
    yield server, name, url.render_as_string(hide_password=False)
    await server.execute(f"drop database {name} with (force)")
    for row in await server.fetch(
        "select m.roleid::regrole::text as role from pg_auth_members m"
        " where m.grantor = $1::text::regrole or m.member = $1::text::regrole",
        name,
    ):
        if row["role"] not in SHARED_ROLES:
            await server.execute(f"drop role if exists {row['role']}")
    await server.execute(f"revoke {', '.join(SHARED_ROLES)} from {name} cascade")
    await server.execute(f"drop role {name}")
    await server.close()


async def test_roles_of_another_deployment_are_asked_for_by_name(
    plain_login: tuple[asyncpg.Connection, str, str],
) -> None:
    _, _, dsn = plain_login
    with pytest.raises(Unprocessable, match="megamcp_tools") as refused:
        await migrate(dsn)
    assert refused.value.code == "insufficient_rights"
    assert "WITH ADMIN OPTION" in (refused.value.hint or "")


async def test_a_login_that_may_not_create_roles_is_told(plain_login: tuple[asyncpg.Connection, str, str]) -> None:
    server, name, dsn = plain_login
    await server.execute(f"alter role {name} nocreaterole")
    with pytest.raises(Unprocessable, match="CREATEROLE"):
        await migrate(dsn)


async def test_a_login_without_superuser_serves_rollouts(plain_login: tuple[asyncpg.Connection, str, str]) -> None:
    server, name, dsn = plain_login
    await server.execute(f"grant {', '.join(SHARED_ROLES)} to {name} with admin option")
    await prepare(Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=[LEDGER]), dsn)
    async with running_gateway(
        dsn, quiesce_timeout_s=0.5, rollback_grace_s=0.1, chain_layers=4, squash_interval_s=3600
    ) as running:
        world = World(running.services, running.url, dsn)
        a, b = await world.open(2)
        await world.call(a, "put", key="k", value="a")
        await world.call(b, "put", key="k", value="b")
        point = await world.checkpoint(a)
        stuck = asyncio.create_task(world.call(a, "hang", key="stuck"))
        await asyncio.sleep(0.3)
        await world.roll_back(a, point["id"])
        with pytest.raises((MegaMCPError, ToolFailed)):
            await asyncio.wait_for(stuck, 20)
        assert await world.digest(a) == point["digest"]
        assert (await world.call(a, "items"))["k"] == "a"
        (fork,) = await world.fork(point["id"])
        rows = await running.services.queries.run(fork, None, "select value from item where key = 'k'", None)
        assert bytes(rows[1][0]) == b'["a"]'
        for turn in range(6):
            await world.call(a, "put", key=f"k{turn}", value="more")
            last = await world.checkpoint(a)
        assert await running.services.squasher.squash(last["id"])
        await world.services.rollouts.release_checkpoint(point["id"])
        await running.services.squasher.once()
        await running.services.reaper.once()
        assert len(await world.chain(a)) == 1
        assert await world.digest(a) == last["digest"]
