"""What another version of MegaMCP put into a database is never mixed with this one's: it is told, and loaded anew."""

import shutil
from pathlib import Path

import pytest

from megamcp.errors import Gone
from tests.integration.databases.conftest import SQL
from tests.integration.databases.shop import Shop

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_what_another_version_loaded_is_told_and_loaded_anew(shop: Shop, tmp_path: Path) -> None:
    folder = tmp_path / "older"
    shutil.copytree(SQL, folder)
    text = (folder / "environment.toml").read_text().replace('name = "sql"', 'name = "older"')
    (folder / "environment.toml").write_text(text)
    environments, store = shop.services.environments, shop.services.store
    old = await environments.load(folder)
    rollout = (await shop.services.rollouts.open("older"))[0]["id"]
    await shop.run(rollout, "select 1")
    point = await shop.checkpoint(rollout)
    # As if a gateway with other SQL had loaded it.
    await store.value("update megamcp.environments set hash = 'another' where id = $1", old.id)
    await store.value(
        "update megamcp.servers set descriptor = jsonb_build_object('database', $2::text) where environment = $1",
        old.id,
        f"{(old.servers[0].database or '').partition('-')[0]}-another",
    )
    environments._by_id.clear()

    for refused in (
        shop.services.rollouts.open("older"),
        shop.run(rollout, "select 1"),
        shop.checkpoint(rollout),
        shop.roll_back(rollout, point["id"]),
        shop.digest(rollout, point["id"]),
    ):
        with pytest.raises(Gone) as told:
            await refused
        assert told.value.code == "state_outdated"

    new = await environments.load(folder)
    assert new.id != old.id
    again = (await shop.services.rollouts.open("older"))[0]["id"]
    assert await shop.run(again, "select 1 as one") == [[1]]
    assert await shop.close(rollout)
