"""Checkpoint, fork and rollback of a server that keeps its state in a process and in files."""

import asyncio
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megamcp import store as sql
from megamcp.client import Conflict, Rollout, UpstreamError
from megamcp.handles import new_id
from megamcp.store import Store
from tests.integration.sandboxed.conftest import Sandboxed, environment, left


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
            sql.FORK, [new_id("ro")], point.id, new_id("gr"), [None], {}, timedelta(minutes=5), "default", None
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


async def ended(running: Sandboxed, rollout: Rollout) -> None:
    """SIGKILL of its sandbox; returns when that is booked."""
    services = running.gateway.services
    query = "select name from megamcp.sandboxes where rollout = $1 and status = $2"
    name = await services.store.value(query, rollout.id, "ready")
    keeper, _ = await services.tender._host.keeper()
    (pid,) = [info.pid for info in (await keeper.inventory()).sandboxes if info.sandbox == name]
    os.kill(pid, signal.SIGKILL)
    while await services.store.value(query, rollout.id, "lost") != name:
        await asyncio.sleep(0.01)


async def test_an_answer_that_is_being_booked_when_its_sandbox_ends_is_not_lost_unsaid(running: Sandboxed) -> None:
    rollout, store = await running.client.open("memo"), running.gateway.services.store
    await rollout.call("put", key="a", value="kept")
    point = await rollout.checkpoint()
    call = asyncio.create_task(rollout.call("put", key="b", value="lost", pause=1))
    lock = "select 1 from megamcp.events where rollout = $1 and state = 'running' for update"
    waits = "select exists (select 1 from pg_stat_activity where $1 = any (pg_blocking_pids(pid)))"
    async with store.transaction() as connection:
        while not await connection.fetch(lock, rollout.id):
            await asyncio.sleep(0.01)
        own = await connection.fetchval("select pg_backend_pid()")
        while not await store.value(waits, own):  # its answer is there
            await asyncio.sleep(0.01)
        await ended(running, rollout)
        other = asyncio.create_task(rollout.call("put", key="c", value="of the next one"))
        await asyncio.wait({other}, timeout=2)
    assert (await call).structured == {"result": 2}
    with pytest.raises(Conflict) as told:
        await other
    assert told.value.code == "state_lost"
    await rollout.rollback(point)
    assert (await rollout.call("items")).structured == {"a": "kept"}


async def test_an_answer_that_is_booked_after_its_sandbox_was_made_again_is_not_given(
    running: Sandboxed, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, store = await running.client.open("notes"), running.gateway.services.store
    arrived, go, value = asyncio.Event(), asyncio.Event(), store.value

    async def late(query: str, *arguments: Any) -> Any:
        if query == sql.CALL_OUTCOME_IN and "first" in arguments[3]:
            arrived.set()
            await go.wait()
        return await value(query, *arguments)

    monkeypatch.setattr(Store, "value", lambda self, *arguments: late(*arguments))
    call = asyncio.create_task(rollout.call("add", text="first", idempotency_key="k"))
    await arrived.wait()
    await ended(running, rollout)
    await rollout.call("add", text="second")
    go.set()
    for again in (call, rollout.call("add", text="first", idempotency_key="k")):
        with pytest.raises(UpstreamError, match="ended right after its answer"):
            await again
    assert await seen(rollout) == ["second"]


async def test_a_tool_whose_call_is_left_is_stopped_and_its_sandbox_lives_on(running: Sandboxed) -> None:
    rollout = await running.client.open("memo")
    await rollout.call("put", key="k", value="kept")
    assert (await left(rollout, "wait"))["error"]["data"]["code"] == "cancelled"
    assert (await rollout.call("items")).structured == {"k": "kept", "wait": "cancelled"}


async def test_a_blocking_tool_whose_call_is_left_is_waited_for_and_its_sandbox_lives_on(running: Sandboxed) -> None:
    rollout = await running.client.open("memo")
    await rollout.call("put", key="k", value="kept")
    assert (await left(rollout, "doze", seconds=3))["error"]["data"]["code"] == "cancelled"
    assert (await rollout.call("items")).structured == {"k": "kept"}


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


async def test_a_checkpoint_that_died_is_refused_and_the_last_one_that_is_there_is_named(running: Sandboxed) -> None:
    rollout, store = await running.client.open("memo"), running.gateway.services.store
    await rollout.call("put", key="k", value="kept")
    kept = await rollout.checkpoint()
    await rollout.call("put", key="k", value="of the second")
    died = await rollout.checkpoint()
    query = "update megamcp.images i set status = 'lost' from megamcp.image_points p where p.image = i.name"
    await store.value(f"{query} and p.checkpoint = $1", died.id)
    await rollout.call("put", key="k", value="lost")
    await ended(running, rollout)
    for ask in (rollout.call("items"), rollout.rollback(died), died.fork()):
        with pytest.raises(Conflict) as told:
            await ask
        assert told.value.code == "state_lost"
        assert kept.id in str(told.value.hint)
    (event,) = [event for event in await rollout.events() if event.kind == "state_lost"]
    assert event.data["checkpoint"] == kept.id
    await rollout.rollback(kept)
    assert (await rollout.call("items")).structured == {"k": "kept"}
    await store.value(f"{query} and p.checkpoint = $1", kept.id)
    with pytest.raises(Conflict, match=kept.id) as told:
        await kept.fork()
    assert "open a new rollout" in str(told.value.hint)
