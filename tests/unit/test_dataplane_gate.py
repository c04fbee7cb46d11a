"""The queue in front of a rollout."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamcp.dataplane.gate import Gates
from megamcp.errors import NoCapacity


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_idle_rollout_leaves_nothing_behind():
    gates = Gates(2, 2)
    await gates.enter("a", writes=True)
    assert len(gates) == 1
    gates.leave("a", writes=True)
    assert len(gates) == 0


async def test_rollouts_do_not_wait_for_each_other():
    gates = Gates(2, 2)
    assert gates.enter_now("a", writes=True)
    assert gates.enter_now("b", writes=True)


async def test_a_reader_does_not_overtake_a_waiting_writer():
    gates = Gates(4, 4)
    await gates.enter("a", writes=False)
    order = []

    async def one(name, writes):
        await gates.enter("a", writes=writes)
        order.append(name)
        await settle()
        gates.leave("a", writes=writes)

    tasks = [asyncio.create_task(one("writer", True))]
    await settle()
    tasks.append(asyncio.create_task(one("reader", False)))
    await settle()
    assert order == []
    gates.leave("a", writes=False)
    await asyncio.gather(*tasks)
    assert order == ["writer", "reader"]
    assert len(gates) == 0


async def test_one_too_many_is_refused_and_told_when_to_come_back():
    gates = Gates(1, 1)
    await gates.enter("a", writes=True)
    waiting = asyncio.create_task(gates.enter("a", writes=True))
    await settle()
    with pytest.raises(NoCapacity) as refused:
        await gates.enter("a", writes=True)
    assert (refused.value.code, refused.value.retry_after) == ("rollout_busy", 1.0)
    gates.leave("a", writes=True)
    await waiting


async def test_one_who_leaves_the_queue_does_not_block_it():
    gates = Gates(1, 9)
    await gates.enter("a", writes=True)
    tasks = [asyncio.create_task(gates.enter("a", writes=True)) for _ in range(3)]
    await settle()
    tasks[0].cancel()
    await settle()
    gates.leave("a", writes=True)
    tasks[1].cancel()  # in the very moment in which its turn has come
    await settle()
    assert tasks[2].done()
    gates.leave("a", writes=True)
    assert len(gates) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.booleans()), min_size=1, max_size=25))
def test_never_a_writer_beside_another_and_all_get_their_turn(plan):
    async def run():
        gates = Gates(3, 100)
        inside = {True: 0, False: 0}
        done = 0

        async def one(writes, length):
            nonlocal done
            await gates.enter("a", writes=writes)
            inside[writes] += 1
            assert inside[True] <= 1
            assert not (inside[True] and inside[False])
            assert inside[False] <= 3
            try:
                for _ in range(length):
                    await asyncio.sleep(0)
            finally:
                inside[writes] -= 1
                gates.leave("a", writes=writes)
            done += 1

        tasks = [asyncio.create_task(one(writes, length)) for writes, length, _ in plan]
        await asyncio.sleep(0)
        for task, (_, _, cancelled) in zip(tasks, plan, strict=True):
            if cancelled:
                await asyncio.sleep(0)
                task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert done >= sum(not cancelled for *_, cancelled in plan)
        assert len(gates) == 0

    asyncio.run(run())
