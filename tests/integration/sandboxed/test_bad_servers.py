"""Servers that misbehave: each time the error names the server and says what it printed, and others go on."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from megamcp.client import (
    Client,
    Conflict,
    DeadlineExceeded,
    MegaMCPError,
    NoCapacity,
    Rollout,
    Unprocessable,
    UpstreamError,
)
from sandboxes import layers
from sandboxes.confine import kernel
from tests.integration.sandboxed.conftest import MEMO, Sandboxed, database_with, environment, gateway_on

ENTRIES = {
    "missing": "no_such_module:server",
    "attribute": "memo_server:nothing",
    "dies": "dies_server:server",
    "threaded": "threaded_server:server",
}
DIES = """
import sys
print("loading the model", file=sys.stderr)
print("the model file is corrupt", file=sys.stderr)
sys.exit(7)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bad(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sandboxed]:
    top = tmp_path_factory.mktemp("bad")
    folders = []
    for name, entry in {"memo": "memo_server:server", **ENTRIES}.items():
        toml = f'name = "{name}"\n[servers.{name}]\nentry = "{entry}"\n[servers.{name}.state]\n'
        toml += 'kind = "process"\nruntime = "fork"\n'
        folders.append(environment(top / name, toml, "memo_server", "threaded_server"))
        (top / name / "dies_server.py").write_text(DIES)
    async with (
        database_with(postgres_dsn, *folders) as dsn,
        gateway_on(
            dsn, sandbox_dir=tmp_path_factory.mktemp("keeper"), quiesce_timeout_s=0.5, call_timeout_s=12
        ) as running,
    ):
        yield running


async def refused(client: Client, environment: str) -> MegaMCPError:
    """The error of a call to a rollout of this environment; it comes soon."""
    rollout = await client.open(environment)
    with pytest.raises(MegaMCPError) as told:
        await rollout.call("items")
    assert told.value.code != "deadline_exceeded"
    return told.value


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("missing", "tool_server_start_failed", "no_such_module"),
        ("attribute", "tool_server_start_failed", "nothing"),
        ("dies", "tool_server_start_failed", "the model file is corrupt"),
        ("threaded", "not_forkable", "stays"),
    ],
)
async def test_a_server_that_can_not_be_started_is_named_with_its_last_words(
    bad: Sandboxed, name: str, code: str, words: str
) -> None:
    for _ in range(2):  # the second try is not answered otherwise
        error = await refused(bad.client, name)
        assert error.code == code
        assert repr(name) in str(error)
        assert words in str(error)
    healthy = await bad.client.open("memo")
    await healthy.call("put", key="k", value="v")


async def test_a_load_that_is_watched_tells_that_an_entry_can_not_be_imported(bad: Sandboxed) -> None:
    told: list[str] = []
    for name in ("missing", "memo"):
        folder = (await bad.gateway.services.environments.find(name)).folder
        await bad.client.load_environment(folder, progress=lambda what, *_: told.append(what))
    problem, _, ready = [what for what in told if "is got ready" not in what or "memo" in what]
    assert "is loaded, but missing does not work yet" in problem
    assert "no_such_module" in problem
    assert "memo: ready after" in ready


async def test_a_call_in_which_the_server_dies_shows_its_last_words(bad: Sandboxed) -> None:
    rollout, other = await bad.client.open_many("memo", 2)
    await other.call("put", key="k", value="v")
    for _ in range(2):  # at the first call nothing is lost that anybody was told of: the next finds it as it began
        with pytest.raises(UpstreamError) as told:
            await rollout.call("crash", words="out of marbles")
        assert "'memo'" in str(told.value)
        assert "out of marbles" in f"{told.value} {told.value.hint}"
    await rollout.call("put", key="k", value="lost")
    assert "state_lost" not in [event.kind for event in await rollout.events()]
    with pytest.raises(UpstreamError):
        await rollout.call("crash", words="out of marbles")
    with pytest.raises(Conflict) as lost:
        await rollout.call("items")
    assert lost.value.code == "state_lost"
    assert "'memo'" in str(lost.value)
    assert "out of marbles" in str(lost.value)
    assert (await other.call("items")).structured == {"k": "v"}


async def test_junk_on_stdout_and_a_flood_on_stderr_are_for_the_log(bad: Sandboxed) -> None:
    rollout = await bad.client.open("memo")
    assert (await rollout.call("flood", lines=5000)).structured["result"] == 5000
    await rollout.call("put", key="k", value="v")
    point = await rollout.checkpoint()
    (fork,) = await point.fork()
    assert (await fork.call("items")).structured == {"k": "v"}


async def test_a_checkpoint_while_a_call_hangs_is_refused_in_time_and_nothing_is_kept(bad: Sandboxed) -> None:
    rollout, other = await bad.client.open_many("memo", 2)
    await rollout.call("put", key="k", value="v")
    point = await rollout.checkpoint()
    hanging = asyncio.create_task(rollout.call("hang"))
    await _running(rollout, bad)
    images = await _images(bad)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded) as told:
        await rollout.checkpoint()
    assert told.value.code == "rollout_busy"
    assert time.monotonic() - began < 10
    assert [made.id for made in await rollout.checkpoints()] == [point.id]
    assert await _images(bad) == images
    await other.call("put", key="k", value="v")  # others are not held up
    await other.checkpoint()
    await rollout.rollback(point)
    await asyncio.gather(hanging, return_exceptions=True)
    assert (await rollout.call("items")).structured == {"k": "v"}


async def test_a_call_that_never_ends_is_ended_with_its_sandbox(bad: Sandboxed) -> None:
    rollout, other = await bad.client.open_many("memo", 2)
    await other.call("put", key="k", value="v")
    point = await rollout.checkpoint()
    await rollout.call("put", key="k", value="lost")
    with pytest.raises(DeadlineExceeded):
        await rollout.call("hang")
    with pytest.raises(Conflict) as told:
        await rollout.call("items")
    assert told.value.code == "state_lost"
    await rollout.rollback(point)
    assert (await rollout.call("items")).structured == {}
    assert (await other.call("items")).structured == {"k": "v"}


async def test_a_thread_that_stays_is_told_by_name_and_the_rollout_goes_on(bad: Sandboxed) -> None:
    rollout = await bad.client.open("memo")
    await rollout.call("put", key="k", value="v")
    await rollout.call("thread")
    with pytest.raises(Unprocessable) as told:
        await rollout.checkpoint()
    assert told.value.code == "not_forkable"
    assert "'memo'" in str(told.value)
    assert "stays" in str(told.value)
    assert (await rollout.call("items")).structured == {"k": "v"}


async def test_what_a_tool_has_started_ends_with_its_rollout(bad: Sandboxed) -> None:
    def there(name: str) -> bool:
        lines = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
        found = False
        for line in lines:
            with contextlib.suppress(OSError):
                found = found or f"name = {name!r}".encode() in line.read_bytes()
        return found

    rollout, other = await bad.client.open_many("memo", 2)
    for each in (rollout, other):
        await each.call("daemon", name=f"leftover of {each.id}")
        assert there(f"leftover of {each.id}")
    await rollout.close()
    assert not there(f"leftover of {rollout.id}")
    assert there(f"leftover of {other.id}")
    await other.close()
    assert not there(f"leftover of {other.id}")


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is made by mounting one, as root")
async def test_a_full_disk_is_said_and_nothing_half_kept(postgres_dsn: str, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    kernel.mount("tmpfs", small, "tmpfs", 0, "size=12m,mode=755")
    try:
        folder = environment(tmp_path / "memo", MEMO, "memo_server")
        async with database_with(postgres_dsn, folder) as dsn, gateway_on(dsn, sandbox_dir=small / "keeper") as full:
            rollout, other = await full.client.open_many("memo", 2)
            await rollout.call("put", key="k", value="v")
            await rollout.call("fill", path="large", megabytes=8)
            await other.call("put", key="k", value="other")
            with pytest.raises(NoCapacity) as told:
                await rollout.checkpoint()
            assert told.value.code == "disk_full"
            assert "'memo'" in str(told.value)
            assert await rollout.checkpoints() == []
            assert (await rollout.call("items")).structured == {"k": "v"}
            (fork,) = await (await other.checkpoint()).fork()
            assert (await fork.call("items")).structured == {"k": "other"}
            await rollout.call("remove", path="large")
            await rollout.checkpoint()
    finally:
        layers.unmount(small)


async def test_a_keeper_that_is_not_there_is_said(postgres_dsn: str, tmp_path: Path) -> None:
    folder = environment(
        tmp_path / "e",
        'name = "memo"\n[servers.memo]\nentry = "memo_server:server"\nstate = {kind="process"}\n',
        "memo_server",
    )
    async with (
        database_with(postgres_dsn, folder) as dsn,
        gateway_on(dsn, sandbox_socket=tmp_path / "nobody.sock") as running,
    ):
        rollout = await running.client.open("memo")
        with pytest.raises(MegaMCPError) as told:
            await rollout.call("items")
        assert told.value.code == "sandboxes_unavailable"
        assert "MEGAMCP_SANDBOX_SOCKET" in str(told.value.hint)


async def _running(rollout: Rollout, gateway: Sandboxed) -> None:
    query = "select exists (select 1 from megamcp.events where rollout = $1 and state = 'running')"
    while not await gateway.gateway.services.store.value(query, rollout.id):
        await asyncio.sleep(0.01)


async def _images(gateway: Sandboxed) -> Any:
    return await gateway.gateway.services.store.value("select count(*) from megamcp.images")
