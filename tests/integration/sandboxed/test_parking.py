"""Sandboxes that wait on disk, and servers that get another runtime; the second runtime here keeps files only."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from megamcp.client import Rollout, Unprocessable
from sandboxes.forkserver.runtime import ForkServer
from sandboxes.keeper import Keeper
from sandboxes.runtime import Folders, Runtime
from sandboxes.types import Kind
from tests.integration.sandboxed.conftest import MEMO, Sandboxed, database_with, environment, gateway_on, left
from tests.unit.test_sandbox_keeper import FilesOnly


@dataclass(frozen=True, slots=True)
class Parked:
    """A gateway whose tender is also run by hand, and the runtime below it."""

    running: Sandboxed
    runtime: FilesOnly

    async def park(self, rollout: Rollout) -> str:
        """Makes the rollout's sandbox old, as this gateway has it open, and has it parked; gives its name."""
        services = self.running.gateway.services
        name: str = await services.store.value("select name from megamcp.sandboxes where rollout = $1", rollout.id)
        for query in (
            "update megamcp.events set ended_at = ended_at - interval '1 hour' where rollout = $1",
            "update megamcp.sandboxes set used_at = used_at - interval '1 hour' where rollout = $1",
        ):
            await services.store.value(query, rollout.id)
        async with asyncio.timeout(60):
            while await services.store.value("select status from megamcp.sandboxes where name = $1", name) == "ready":
                await services.tender.once()  # or the gateway's own round does it
        return name

    async def status(self, rollout: Rollout) -> str:
        query = "select status from megamcp.sandboxes where rollout = $1"
        found: str = await self.running.gateway.services.store.value(query, rollout.id)
        return found


@asynccontextmanager
async def keeping(state: Path, *kinds: Kind) -> AsyncIterator[tuple[str, FilesOnly]]:
    """A keeper in this process with some runtimes; its socket, and the one that keeps files only."""
    for name in ("templates", "sandboxes", "images"):
        (state / name).mkdir(parents=True)
    folders = Folders(state)
    keeper: Keeper
    files = FilesOnly(folders, lambda exited: keeper.died(exited))
    known: dict[Kind, Runtime] = {Kind.FORK: ForkServer(folders, lambda exited: keeper.died(exited)), Kind.CRIU: files}
    keeper = Keeper("parking", {kind: known[kind] for kind in kinds})
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(state / "s"))
    listener.listen()
    serving = asyncio.create_task(keeper.serve(listener))
    try:
        yield str(state / "s"), files
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        listener.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def parked(
    postgres_dsn: str, scratch_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Parked]:
    top = tmp_path_factory.mktemp("environments")
    folders = [
        environment(top / "memo", MEMO + 'runtime = "criu"\n', "memo_server"),
        environment(
            top / "auto",
            'name = "auto"\n[servers.auto]\nentry = "threaded_server:server"\n[servers.auto.state]\nkind = "process"\n',
            "memo_server",
            "threaded_server",
        ),
        environment(top / "later", MEMO.replace('"memo"', '"later"', 1), "memo_server"),
        environment(top / "fork", MEMO.replace('"memo"', '"fork"', 1) + 'runtime = "fork"\n', "memo_server"),
    ]
    async with (
        keeping(scratch_folder / "parking", Kind.FORK, Kind.CRIU) as (path, files),
        database_with(postgres_dsn, *folders) as dsn,
        gateway_on(dsn, sandbox_socket=path, sandbox_park_s=600) as running,
    ):
        yield Parked(running, files)


async def test_an_idle_sandbox_waits_on_disk_and_comes_back_at_the_next_call(parked: Parked) -> None:
    rollout = await parked.running.client.open("memo")
    await rollout.call("put", key="k", value="v")
    name = await parked.park(rollout)
    assert await parked.status(rollout) == "parked"
    assert name not in parked.runtime.processes
    assert (await rollout.call("stored")).structured == {"k": "v"}
    assert await parked.status(rollout) == "ready"


async def test_what_is_in_use_is_not_parked(parked: Parked) -> None:
    rollout = await parked.running.client.open("memo")
    await rollout.call("put", key="k", value="v")
    services = parked.running.gateway.services
    query = "update megamcp.sandboxes set used_at = used_at - interval '1 hour' where rollout = $1"
    await services.store.value(query, rollout.id)
    await services.tender.once()
    assert await parked.status(rollout) == "ready"


async def test_a_call_that_comes_while_it_is_being_parked_waits_and_goes_on(parked: Parked) -> None:
    rollout = await parked.running.client.open("memo")
    await rollout.call("put", key="k", value="v")
    parked.runtime.freezing.clear()
    parking = asyncio.create_task(parked.park(rollout))
    query = "select exists (select 1 from megamcp.images where status = 'creating')"
    while not await parked.running.gateway.services.store.value(query):
        await asyncio.sleep(0.01)
    calling = asyncio.create_task(rollout.call("write", path="x", text="y"))
    await asyncio.sleep(0.1)
    assert not calling.done()
    parked.runtime.freezing.set()
    await parking
    assert (await calling).structured["result"] == "x"
    assert (await rollout.call("stored")).structured == {"k": "v"}


async def test_a_server_of_ours_that_no_fork_server_runs_hears_that_a_call_was_left(parked: Parked) -> None:
    rollout = await parked.running.client.open("memo")
    await rollout.call("put", key="k", value="kept")
    assert (await left(rollout, "wait"))["error"]["data"]["code"] == "cancelled"
    assert (await rollout.call("items")).structured == {"k": "kept", "wait": "cancelled"}


async def test_a_parked_sandbox_is_checkpointed_forked_and_rolled_back(parked: Parked) -> None:
    rollout = await parked.running.client.open("memo")
    await rollout.call("put", key="k", value="v")
    await parked.park(rollout)
    point = await rollout.checkpoint()
    assert await parked.status(rollout) == "parked"  # a checkpoint wakes nobody
    await rollout.call("write", path="items.json", text='{"k": "changed"}')
    (fork,) = await point.fork()
    assert (await fork.call("stored")).structured == {"k": "v"}
    await rollout.rollback(point)
    assert (await rollout.call("stored")).structured == {"k": "v"}


async def test_a_parked_sandbox_goes_with_its_rollout(parked: Parked) -> None:
    rollout = await parked.running.client.open("memo")
    await rollout.call("put", key="k", value="v")
    await parked.park(rollout)
    image = await parked.running.gateway.services.store.value(
        "select image from megamcp.sandboxes where rollout = $1", rollout.id
    )
    assert image in parked.runtime.images()
    await rollout.close()
    store = parked.running.gateway.services.store
    await store.value("update megamcp.images set created_at = created_at - interval '1 minute' where name = $1", image)
    await parked.running.gateway.services.tender.once()
    assert image not in parked.runtime.images()


async def test_a_parked_sandbox_that_still_runs_is_ended(parked: Parked) -> None:
    rollout = await parked.running.client.open("memo")
    await rollout.call("put", key="k", value="v")
    services = parked.running.gateway.services
    name = await services.store.value(
        "update megamcp.sandboxes set status = 'parked' where rollout = $1 returning name", rollout.id
    )
    services.tender._swept = float("-inf")
    await services.tender.once()
    assert name not in parked.runtime.processes


async def test_auto_falls_back_once_where_a_server_can_not_be_forked_and_says_so(
    parked: Parked, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        rollout = await parked.running.client.open("auto")
        await rollout.call("put", key="k", value="v")
        query = "select runtime from megamcp.sandboxes where rollout = $1"
        assert await parked.running.gateway.services.store.value(query, rollout.id) == "criu"
    (told,) = [record.getMessage() for record in caplog.records if "from now on" in record.getMessage()]
    assert "stays" in told
    point = await rollout.checkpoint()
    (fork,) = await point.fork()
    assert (await fork.call("stored")).structured == {"k": "v"}


async def test_a_server_that_shows_at_a_checkpoint_that_it_can_not_be_forked_gets_another_runtime_next_time(
    parked: Parked,
) -> None:
    rollout = await parked.running.client.open("later")
    await rollout.call("thread")
    with pytest.raises(Unprocessable) as told:
        await rollout.checkpoint()
    assert told.value.code == "not_forkable"
    other = await parked.running.client.open("later")
    await other.call("thread")
    await other.checkpoint()


async def test_a_runtime_that_was_asked_for_by_name_is_not_replaced(parked: Parked) -> None:
    for _ in range(2):
        rollout = await parked.running.client.open("fork")
        await rollout.call("thread")
        with pytest.raises(Unprocessable) as told:
            await rollout.checkpoint()
        assert told.value.code == "not_forkable"


async def test_a_host_without_any_runtime_says_why_there_is_none(
    postgres_dsn: str, scratch_folder: Path, tmp_path: Path
) -> None:
    folder = environment(tmp_path / "memo", MEMO, "memo_server")
    async with (
        keeping(scratch_folder / "nothing") as (path, _),
        database_with(postgres_dsn, folder) as dsn,
        gateway_on(dsn, sandbox_socket=path) as running,
    ):
        rollout = await running.client.open("memo")
        with pytest.raises(Unprocessable) as told:
            await rollout.call("items")
        assert told.value.code == "no_runtime"
        assert "doctor" in str(told.value.hint)
