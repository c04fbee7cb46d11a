"""Several gateway processes on one keeper: a rollout's sandbox goes to whoever has a call for it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from megamcp.client import Client, MegaMCPError
from megamcp.sandboxed.own import OwnKeeper
from megamcp.settings import Settings
from tests.integration.sandboxed.conftest import MEMO, Sandboxed, database_with, environment, gateway_on


@dataclass(frozen=True, slots=True)
class Both:
    """Two gateways that share a database and a keeper."""

    one: Sandboxed
    two: Sandboxed

    @property
    def clients(self) -> tuple[Client, Client]:
        return self.one.client, self.two.client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def both(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Both]:
    folder = environment(tmp_path_factory.mktemp("memo"), MEMO, "memo_server")
    async with (
        database_with(postgres_dsn, folder) as dsn,
        OwnKeeper(Settings(sandbox_dir=tmp_path_factory.mktemp("keeper"))) as keeper,
        gateway_on(dsn, sandbox_socket=keeper.socket) as one,
        gateway_on(dsn, sandbox_socket=keeper.socket) as two,
    ):
        yield Both(one, two)


async def test_a_sandbox_is_handed_over_for_each_call_and_forgets_nothing(both: Both) -> None:
    rollout = await both.one.client.open("memo")
    views = [rollout, await both.two.client.rollout(rollout.id)]
    for number in range(6):
        await views[number % 2].call("put", key=f"k{number}", value="v")
    for view in views:
        assert len((await view.call("items")).structured) == 6


async def test_calls_over_both_at_once_are_each_done_once(both: Both) -> None:
    rollout = await both.one.client.open("memo")
    views = [rollout, await both.two.client.rollout(rollout.id)]
    counts = await asyncio.gather(*(views[n % 2].call("put", key=f"k{n}", value="v") for n in range(30)))
    # Each call counts the items: a number that came twice would be a call that another one undid.
    assert sorted(found.structured["result"] for found in counts) == list(range(1, 31))
    assert len((await views[1].call("items")).structured) == 30


async def test_the_same_key_at_both_is_one_call(both: Both) -> None:
    rollout = await both.one.client.open("memo")
    views = [rollout, await both.two.client.rollout(rollout.id)]
    answers = await asyncio.gather(
        *(view.call("put", key="k", value="v", pause=0.05, idempotency_key="once") for view in views * 3)
    )
    assert len({found.structured["result"] for found in answers}) == 1
    events = await rollout.events()
    assert [event.tool for event in events if event.kind == "call"] == ["put"]


async def test_a_checkpoint_at_one_keeps_what_was_called_at_the_other(both: Both) -> None:
    rollout = await both.one.client.open("memo")
    there = await both.two.client.rollout(rollout.id)
    await there.call("put", key="k", value="kept")
    point = await rollout.checkpoint()
    await there.call("put", key="k", value="later")
    (fork,) = await (await both.two.client.checkpoint(point.id)).fork()
    assert (await fork.call("items")).structured == {"k": "kept"}
    await rollout.rollback(point)
    assert (await there.call("items")).structured == {"k": "kept"}


async def test_a_long_call_at_one_makes_the_other_wait_and_not_fail(both: Both) -> None:
    rollout = await both.one.client.open("memo")
    there = await both.two.client.rollout(rollout.id)
    await rollout.call("put", key="first", value="v")
    slow = asyncio.create_task(rollout.call("put", key="slow", value="v", pause=0.5))
    await _running(rollout.id, both)
    assert (await there.call("put", key="quick", value="v")).structured["result"] == 3
    assert (await slow).structured["result"] == 2


async def test_a_rollback_at_one_ends_a_call_at_the_other(both: Both) -> None:
    rollout = await both.one.client.open("memo")
    there = await both.two.client.rollout(rollout.id)
    await rollout.call("put", key="k", value="kept")
    point = await rollout.checkpoint()
    hanging = asyncio.create_task(there.call("hang"))
    await _running(rollout.id, both)
    async with asyncio.timeout(10):
        await rollout.rollback(point)
    assert (await asyncio.gather(hanging, return_exceptions=True))[0] is not None
    assert (await there.call("items")).structured == {"k": "kept"}


async def test_a_rollout_that_is_closed_where_its_keeper_is_not_keeps_its_row_until_its_sandbox_is_gone(
    postgres_dsn: str, tmp_path: Path
) -> None:
    folder = environment(tmp_path / "memo", MEMO, "memo_server")
    async with (
        database_with(postgres_dsn, folder) as dsn,
        gateway_on(dsn, sandbox_dir=tmp_path / "one") as here,
        gateway_on(dsn, sandbox_dir=tmp_path / "two") as there,
    ):
        rollout = await here.client.open("memo")
        await rollout.call("put", key="k", value="v")
        keeper, _ = await here.gateway.services.tender._host.keeper()
        assert (await keeper.inventory()).sandboxes
        elsewhere = await there.client.rollout(rollout.id)
        with pytest.raises(MegaMCPError, match="with another keeper"):
            await elsewhere.call("items")
        await elsewhere.close()
        while await here.gateway.services.store.rows("select 1 from megamcp.sandboxes"):
            await asyncio.sleep(0.05)
        assert not (await keeper.inventory()).sandboxes


async def _running(rollout: str, both: Both) -> None:
    """Returns when a call of the rollout runs."""
    query = "select exists (select 1 from megamcp.events where rollout = $1 and state = 'running')"
    while not await both.one.gateway.services.store.value(query, rollout):
        await asyncio.sleep(0.01)
