"""Checkpoint, fork and rollback of a server that keeps its state in a process and in files."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megamcp import store as sql
from megamcp.client import Conflict, Rollout, UpstreamError
from megamcp.handles import new_id
from tests.integration.sandboxed.conftest import Sandboxed, environment


async def seen(rollout: Rollout) -> Any:
    """What its memory holds; the file must hold the same."""
    found = (await rollout.call("notes")).structured
    assert found["memory"] == found["file"]
    return found["memory"]


async def test_what_a_sandbox_knows_is_its_rollouts_own(running: Sandboxed) -> None:
    a, b = await running.client.open_many("notes", 2)
    await asyncio.gather(a.call("add", text="one"), b.call("add", text="two"))
    assert await seen(a) == ["one"]
    assert await seen(b) == ["two"]


async def test_a_fork_starts_as_the_checkpoint_and_goes_its_own_way(running: Sandboxed) -> None:
    rollout = await running.client.open("notes")
    await rollout.call("add", text="one")
    point = await rollout.checkpoint()
    await rollout.call("add", text="of the parent")
    left, right = await point.fork(count=2)
    await left.call("add", text="left")
    assert await seen(left) == ["one", "left"]
    assert await seen(right) == ["one"]
    assert await seen(rollout) == ["one", "of the parent"]
    grandchild = (await (await left.checkpoint()).fork())[0]
    await grandchild.call("add", text="deep")
    assert await seen(grandchild) == ["one", "left", "deep"]
    assert await seen(left) == ["one", "left"]


async def test_a_fork_that_meets_the_release_of_its_checkpoint_holds_what_that_held(running: Sandboxed) -> None:
    rollout = await running.client.open("notes")
    await rollout.call("add", text="one")
    point = await rollout.checkpoint()
    await rollout.call("add", text="later")
    await rollout.checkpoint()
    services = running.gateway.services
    async with services.store.transaction() as connection:  # a fork that has not committed yet
        forked = await connection.fetchrow(
            sql.FORK, [new_id("ro")], point.id, new_id("gr"), [None], {}, timedelta(minutes=5)
        )
        await point.release()
        await services.tender.once()
    fork = await running.client.rollout(forked["id"])
    assert await seen(fork) == ["one"]


async def test_a_rollback_restores_memory_and_files(running: Sandboxed) -> None:
    rollout = await running.client.open("notes")
    await rollout.call("add", text="kept")
    point = await rollout.checkpoint()
    for attempt in ("first", "second"):
        await rollout.call("add", text=attempt)
        assert await seen(rollout) == ["kept", attempt]
        await rollout.rollback(point)
        assert await seen(rollout) == ["kept"]


async def test_a_sandbox_that_dies_is_told_until_its_rollout_goes_back(running: Sandboxed) -> None:
    rollout = await running.client.open("notes")
    await rollout.call("add", text="kept")
    point = await rollout.checkpoint()
    await rollout.call("add", text="lost")
    with pytest.raises(UpstreamError, match="ended"):
        await rollout.call("crash")
    for _ in range(2):
        with pytest.raises(Conflict) as told:
            await rollout.call("notes")
        assert told.value.code == "state_lost"
        assert point.id in str(told.value.hint)
    await rollout.rollback(point)
    assert await seen(rollout) == ["kept"]
    assert "state_lost" in [event.kind for event in await rollout.events()]


async def test_a_tool_whose_call_is_left_is_stopped_and_its_sandbox_lives_on(running: Sandboxed) -> None:
    rollout = await running.client.open("notes")
    await rollout.call("add", text="kept")
    call = asyncio.create_task(rollout.call("spin"))
    await asyncio.sleep(0.5)  # it runs by now, or else is stopped before it does
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await seen(rollout) == ["kept"]
    assert "state_lost" not in [event.kind for event in await rollout.events()]


async def test_a_new_version_of_a_servers_code_is_what_its_rollouts_run(running: Sandboxed, tmp_path: Path) -> None:
    toml = 'name = "versions"\n[servers.v]\nentry = "version_server:server"\nstate = { kind = "process" }\n'
    code = 'from megamcp.sdk import Server\nserver = Server("v")\n@server.tool\ndef version() -> int:\n    return {}\n'
    rollouts = []
    for number in (1, 2):
        environment(tmp_path, toml)
        (tmp_path / "version_server.py").write_text(code.format(number))
        await running.client.load_environment(tmp_path)
        rollouts.append(await running.client.open("versions"))
        assert (await rollouts[-1].call("version")).structured == {"result": number}
    assert (await rollouts[0].call("version")).structured == {"result": 1}
