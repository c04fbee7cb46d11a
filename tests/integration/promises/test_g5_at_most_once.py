"""G5: a retried call has at most one effect; a key belongs to a rollout and its path."""

import asyncio

import pytest

from megamcp.errors import MegaMCPError, Unprocessable
from tests.integration.promises.world import ToolFailed, World


async def test_the_same_key_gives_the_recorded_result_and_no_second_effect(world: World) -> None:
    rollout = await world.one()
    first = await world.call(rollout, "book", once="k", account_id=1, amount=5)
    assert await world.call(rollout, "book", once="k", account_id=1, amount=5) == first
    assert await world.call(rollout, "sums") == {"balances": 5, "entries": 5}


async def test_calls_with_one_key_at_once_have_one_effect_and_one_answer(world: World) -> None:
    rollout = await world.one()
    answers = await asyncio.gather(
        *(world.call(rollout, "book", once="k", account_id=1, amount=5, pause=0.05) for _ in range(8))
    )
    assert all(answer == answers[0] for answer in answers)
    assert await world.call(rollout, "sums") == {"balances": 5, "entries": 5}


async def test_a_recorded_tool_error_is_replayed_too(world: World) -> None:
    rollout = await world.one()
    for _ in range(2):
        with pytest.raises(ToolFailed, match="The ledger refuses"):
            await world.call(rollout, "refuse_after_write", once="k", key="x")
    rows = [row for row in await world.journal(rollout) if row["kind"] == "call"]
    assert len(rows) == 1
    assert rows[0]["is_error"] is True


async def test_a_key_with_other_arguments_is_refused(world: World) -> None:
    rollout = await world.one()
    await world.call(rollout, "book", once="k", account_id=1, amount=5)
    with pytest.raises(Unprocessable) as refused:
        await world.call(rollout, "book", once="k", account_id=1, amount=6)
    assert refused.value.code == "idempotency_key_reused"


async def test_reads_take_keys_too(world: World) -> None:
    rollout = await world.one()
    before = await world.call(rollout, "items", once="k")
    await world.call(rollout, "put", key="new", value="x")
    assert await world.call(rollout, "items", once="k") == before


async def test_a_key_used_after_the_restored_checkpoint_is_forgotten(world: World) -> None:
    rollout = await world.one()
    await world.call(rollout, "book", once="before", account_id=1, amount=1)
    point = await world.checkpoint(rollout)
    await world.call(rollout, "book", once="after", account_id=1, amount=10)
    await world.roll_back(rollout, point["id"])
    await world.call(rollout, "book", once="before", account_id=1, amount=1)
    assert await world.call(rollout, "sums") == {"balances": 1, "entries": 1}
    await world.call(rollout, "book", once="after", account_id=1, amount=10)
    assert await world.call(rollout, "sums") == {"balances": 11, "entries": 11}
    await world.call(rollout, "book", once="after", account_id=1, amount=10)
    assert await world.call(rollout, "sums") == {"balances": 11, "entries": 11}


async def test_a_key_comes_back_with_its_line(world: World) -> None:
    rollout = await world.one()
    first = await world.checkpoint(rollout)
    await world.call(rollout, "book", once="k", account_id=1, amount=1)
    second = await world.checkpoint(rollout)
    await world.roll_back(rollout, first["id"])
    await world.roll_back(rollout, second["id"])
    await world.call(rollout, "book", once="k", account_id=1, amount=1)
    assert await world.call(rollout, "sums") == {"balances": 1, "entries": 1}


async def test_forks_do_not_inherit_keys(world: World) -> None:
    rollout = await world.one()
    await world.call(rollout, "book", once="k", account_id=1, amount=1)
    point = await world.checkpoint(rollout)
    (fork,) = await world.fork(point["id"])
    await world.call(fork, "book", once="k", account_id=1, amount=1)
    assert await world.call(fork, "sums") == {"balances": 2, "entries": 2}


@pytest.mark.parametrize("tool", ["refuse_after_write", "crash_after_write", "commit_after_write"])
async def test_a_tool_that_fails_leaves_its_error_and_nothing_else(world: World, tool: str) -> None:
    rollout = await world.one()
    start = await world.digest(rollout)
    with pytest.raises((ToolFailed, MegaMCPError)):
        await world.call(rollout, tool, key="x")
    assert await world.digest(rollout) == start
    (row,) = [row for row in await world.journal(rollout) if row["kind"] == "call"]
    assert row["is_error"] is True
    assert row["state"] in ("done", "failed")
