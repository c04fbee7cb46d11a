"""SQL clients on a rollout's own database, by its DSN, while the rollout is checkpointed, forked and rolled back."""

import asyncio

import asyncpg
import pytest

from megamcp.errors import Gone, Unprocessable
from tests.integration.databases.shop import Shop

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def dsn(shop: Shop, rollout: str) -> str:
    return str((await shop.services.door.dsn(rollout, None))["dsn"])


async def test_a_client_sees_what_the_tools_did_and_the_other_way_round(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "update books set stock = 41")
    connection = await asyncpg.connect(await dsn(shop, rollout))
    assert await connection.fetchval("select distinct stock from books") == 41
    await connection.execute("update books set stock = stock + 1")
    await connection.close()
    assert await shop.read(rollout, "select distinct stock from books") == [[42]]


async def test_an_open_connection_follows_the_rollout_through_moves(shop: Shop) -> None:
    rollout = await shop.one()
    pool = await asyncpg.create_pool(await dsn(shop, rollout), min_size=2, max_size=2)
    await pool.execute("update books set stock = 1")
    first = await shop.checkpoint(rollout)
    await pool.execute("update books set stock = 2")
    fork = (await shop.fork(first["id"]))[0]
    assert await shop.read(fork, "select distinct stock from books") == [[1]]
    await pool.execute("alter table books add column note text")
    await shop.roll_back(rollout, first["id"])
    assert await pool.fetchval("select distinct stock from books") == 1
    with pytest.raises(asyncpg.UndefinedColumnError):
        await pool.execute("select note from books")
    await pool.close()


async def test_a_checkpoint_waits_for_a_clients_transaction(shop: Shop) -> None:
    rollout = await shop.one()
    connection = await asyncpg.connect(await dsn(shop, rollout))
    async with connection.transaction():
        await connection.execute("update books set stock = 3")
        making = asyncio.create_task(shop.checkpoint(rollout))
        _, waiting = await asyncio.wait({making}, timeout=0.3)
        assert waiting
    point = await making
    await connection.close()
    assert await shop.query(rollout, "select distinct stock from books", point["id"]) == [[3]]


async def test_each_rollout_has_a_password_of_its_own(shop: Shop) -> None:
    one, two = await shop.open(2)
    stolen = (await dsn(shop, one)).replace(one, two)
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(stolen)
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect((await dsn(shop, one)).replace(one, "ro_0"))


async def test_a_dsn_ends_with_its_rollout(shop: Shop) -> None:
    rollout = await shop.one()
    given = await dsn(shop, rollout)
    connection = await asyncpg.connect(given)
    await shop.close(rollout)
    with pytest.raises(Gone):
        await dsn(shop, rollout)
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(given)
    for _ in range(2):
        await shop.services.keeper.once()
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await connection.execute("select 1")


async def test_a_server_without_a_database_is_told(shop: Shop) -> None:
    with pytest.raises(Unprocessable, match="no server 'other'"):
        await shop.services.door.dsn(await shop.one(), "other")


async def test_a_dsn_names_the_port_that_clients_come_in_by(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shop.services.settings, "relay_public_port", 7654)
    given = await shop.services.door.dsn(await shop.one(), None)
    assert given["port"] == 7654
    assert ":7654/" in given["dsn"]
