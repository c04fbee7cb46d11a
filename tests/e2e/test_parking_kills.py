"""A gateway is killed, fails or is stopped while it puts an idle sandbox on disk: what was acknowledged comes back, and
nothing is left over. On CRIU, since only its images are on disk."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from megamcp.sandboxed.own import socket_path
from sandboxes.client import Client
from tests.e2e.test_sandbox_kills import PARKING, TOML, House, Refused, cut, house

CRIU = TOML.replace('kind = "process"', 'kind = "process"\nruntime = "criu"')
WAITED_S = 90


async def parking(house: House) -> AsyncIterator[None]:
    rollout = await house.opened()
    yield
    await house.put(rollout)
    await house.until("select status = 'parked' from megamcp.sandboxes where rollout = $1", rollout)
    await house.holds(rollout)
    await house.put(rollout, "later")
    await house.until("select status = 'parked' from megamcp.sandboxes where rollout = $1", rollout)
    await house.holds(rollout)


async def agrees(house: House) -> None:
    """Rows, the keeper's inventory and its folders name the same sandboxes and images."""
    client = Client(str(socket_path(house.state)))
    end = time.monotonic() + WAITED_S
    try:
        while True:
            wanted, there = set(), set()
            for table, folder in (("sandboxes", "sandboxes"), ("images", "images")):
                query = f"select coalesce(array_agg(name), '{{}}') from megamcp.{table} where status = 'ready'"
                wanted.update(await house.ask(query))
                there.update(path.name for path in (house.state / "criu" / folder).iterdir())
            inventory = await client.inventory()
            told = {*(info.sandbox for info in inventory.sandboxes), *inventory.images}
            if wanted == there == told:
                return
            assert time.monotonic() < end, (wanted, there, told)
            await asyncio.sleep(0.2)
    finally:
        await client.aclose()


@pytest.mark.e2e
@pytest.mark.criu
@pytest.mark.timeout(0)
async def test_a_sandbox_is_there_when_its_way_to_the_disk_was_cut_off_or_its_gateway_stopped(
    scratch_folder: Path,
) -> None:
    idle = {"MEGAMCP_SANDBOX_PARK_S": "1", "MEGAMCP_DEDICATED_IDLE_S": "0.5"}
    async with house(scratch_folder / "parking-kills", CRIU, **idle) as made:
        try:
            await made.begun()
        except Refused as refused:
            if refused.code == "no_runtime":
                pytest.skip(str(refused))
            raise
        for point, way in ((PARKING[0], "kill"), (PARKING[0], "error"), (PARKING[1], "kill")):
            await cut(made, parking, point, way)
            await agrees(made)
        # Stopped, and the next one comes when the keeper has ended too.
        rollouts = [await made.begun() for _ in range(2)]
        await made.castle.stop()
        made.keeper().kill()
        await made.castle.raise_again()
        await made.castle.ready()
        await made.holds(*rollouts)
        await agrees(made)
