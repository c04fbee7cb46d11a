"""The process of a document's server is killed with -9: no acknowledged call is lost, none is done twice."""

import asyncio
import contextlib
import os
import signal
from typing import Any

from megamcp.client import Rollout, ToolResult, UpstreamError
from tests.integration.documents.conftest import Library


async def patient(rollout: Rollout, tool: str, **arguments: Any) -> ToolResult:
    """Calls until it is done: a server that was killed often is left alone for a moment, and a call that was cut
    is recorded as one that changed nothing."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(UpstreamError):
                answer = await rollout.call(tool, **arguments)
                if not answer.is_error:
                    return answer
            await asyncio.sleep(0.2)


async def kill(rollout: Rollout) -> None:
    os.kill((await patient(rollout, "process")).value, signal.SIGKILL)


async def marked(library: Library, key: str) -> None:
    """A slow call has changed its object."""
    async with asyncio.timeout(30):
        while not (library.marks / key).exists():
            await asyncio.sleep(0.01)


async def test_what_was_acknowledged_is_there_after_a_kill(library: Library) -> None:
    rollout = await library.client.open("shelf")
    for number in range(3):
        await patient(rollout, "fill", count=100 * (number + 1), size=20)
        await rollout.call("put", key=f"k{number}", value=str(number))
        before = (await rollout.call("all")).value
        await kill(rollout)
        assert (await patient(rollout, "all")).value == before
    assert (await rollout.call("put", key="x", value="1")).value == 4


async def test_a_call_that_a_kill_cut_is_done_once_when_retried(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await patient(rollout, "put", key="x", value="1")
    for round_ in range(3):
        once: dict[str, Any] = {"key": f"cut-{round_}", "seconds": 0.5, "idempotency_key": f"once-{round_}"}
        number = (await patient(rollout, "process")).value
        cut = asyncio.create_task(rollout.call("slow", **once))
        await marked(library, f"cut-{round_}")
        os.kill(number, signal.SIGKILL)
        await asyncio.gather(cut, return_exceptions=True)
        for _ in range(2):
            assert (await patient(rollout, "slow", **once)).value == round_ + 2
    found = (await rollout.call("all")).value
    assert found["count"] == 4
    assert set(found["things"]) == {"first", "x", "cut-0", "cut-1", "cut-2"}


async def test_a_rollback_ends_a_call_that_runs(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await patient(rollout, "process")
    point = await rollout.checkpoint()
    running = asyncio.create_task(rollout.call("slow", key="ended", seconds=3))
    await marked(library, "ended")
    await rollout.rollback(point)
    ended = (await asyncio.gather(running, return_exceptions=True))[0]
    assert isinstance(ended, BaseException) or ended.is_error
    assert (await patient(rollout, "all")).value == {"things": {"first": "seeded"}, "count": 0}
