"""The gateway over CRIU: a server of ours that no fork can freeze, and sandboxes that wait on disk, memory and all."""

import asyncio
from pathlib import Path

import pytest

from tests.integration.criu.conftest import Host
from tests.integration.sandboxed.conftest import database_with, environment, gateway_on, left

AUTO = 'name = "auto"\n[servers.auto]\nentry = "threaded_server:server"\n[servers.auto.state]\nkind = "process"\n'


@pytest.mark.criu
async def test_a_server_with_a_thread_is_frozen_parked_and_stopped_in_a_call_with_its_memory(
    host: Host, postgres_dsn: str, tmp_path: Path
) -> None:
    top = tmp_path / "private"  # below /tmp, of which each sandbox has its own, and nobody else may read it
    top.mkdir(mode=0o700)
    async with (
        database_with(postgres_dsn, environment(top, AUTO, "memo_server", "threaded_server")) as dsn,
        gateway_on(dsn, sandbox_dir=tmp_path / "keeper", sandbox_park_s=0.5) as running,
    ):
        rollout = await running.client.open("auto")
        await rollout.call("put", key="k", value="v")
        store = running.gateway.services.store
        query = "select runtime, status from megamcp.sandboxes where rollout = $1"
        async with asyncio.timeout(60):
            while tuple(await store.row(query, rollout.id)) != ("criu", "parked"):
                await asyncio.sleep(0.1)
        assert (await rollout.call("items")).structured == {"k": "v"}
        point = await rollout.checkpoint()
        await rollout.call("put", key="k", value="later")
        (fork,) = await point.fork()
        assert (await fork.call("items")).structured == {"k": "v"}
        await rollout.rollback(point)
        assert (await rollout.call("items")).structured == {"k": "v"}
        assert (await left(rollout, "wait"))["error"]["data"]["code"] == "cancelled"
        assert (await rollout.call("items")).structured == {"k": "v", "wait": "cancelled"}
