"""Several state clusters, and one that is gone."""

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
from megamcp.databases.clusters import SETTINGS
from megamcp.errors import Gone
from megamcp.postgres import EmbeddedPostgres
from megamcp.settings import Settings
from megamcp.testing import running_gateway
from tests.integration.databases.conftest import SQL
from tests.integration.databases.shop import Shop

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second_dsn(scratch_folder: Path) -> AsyncIterator[str]:
    async with EmbeddedPostgres(scratch_folder / "state-2", max_connections=100, settings=SETTINGS) as postgres:
        yield postgres.dsn


@pytest_asyncio.fixture(loop_scope="session")
async def control_dsn(postgres_dsn: str) -> AsyncIterator[str]:
    name = f"mm_clusters_{secrets.token_hex(4)}"
    connection = await asyncpg.connect(postgres_dsn)
    await connection.execute(f'create database "{name}"')
    dsn = make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    await prepare(Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=[SQL]), dsn)
    yield dsn
    await connection.execute(f'drop database "{name}" with (force)')
    await connection.close()


async def cluster_of(shop: Shop, rollout: str) -> str:
    return str(await shop.services.store.value("select cluster from megamcp.databases where rollout = $1", rollout))


async def test_rollouts_are_spread_over_clusters_and_forks_stay(
    control_dsn: str, state_dsn: str, second_dsn: str
) -> None:
    urls = [state_dsn, second_dsn]
    async with running_gateway(control_dsn, state_urls=urls, spare_databases=0, disk_reserve=0) as running:
        shop = Shop(running.services, running.url, control_dsn, state_dsn)
        rollouts = await shop.open(4)
        for rollout in rollouts:
            await shop.run(rollout, "update books set stock = 5")
        homes = [await cluster_of(shop, rollout) for rollout in rollouts]
        assert sorted(homes.count(home) for home in set(homes)) == [2, 2]
        point = await shop.checkpoint(rollouts[0])
        forks = await shop.fork(point["id"], 2)
        await asyncio.gather(*(shop.read(fork, "select 1") for fork in forks))
        assert {await cluster_of(shop, fork) for fork in forks} == {homes[0]}


async def test_a_rollout_of_a_cluster_that_was_taken_away_is_told_so(
    control_dsn: str, state_dsn: str, second_dsn: str
) -> None:
    async with running_gateway(control_dsn, state_urls=[second_dsn], disk_reserve=0) as running:
        shop = Shop(running.services, running.url, control_dsn, second_dsn)
        rollout = await shop.one()
        await shop.run(rollout, "update books set stock = 5")
        calls = len(await shop.journal(rollout))
    async with running_gateway(control_dsn, state_urls=[state_dsn], disk_reserve=0) as running:
        shop = Shop(running.services, running.url, control_dsn, state_dsn)
        with pytest.raises(Gone, match="lost"):
            await shop.read(rollout, "select 1")
        assert len(await shop.journal(rollout)) == calls
        assert await shop.read(await shop.one(), "select count(*) > 0 from books") == [[True]]
        await shop.close(rollout)
        for _ in range(3):
            await shop.services.keeper.once()
        assert not await shop.services.store.value(
            "select count(*) from megamcp.databases where kind = 'clone' and rollout is null"
        )
