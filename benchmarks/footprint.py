"""What the gateway needs when nothing happens: memory of a rollout that is open and idle, and the time of a start.

    python -m benchmarks.footprint [--quick]

`idle_rollout_kib` is what the gateway process's private resident memory grew by, divided by the rollouts that were
opened over REST meanwhile; one in ten was used too (`initialize`, `tools/list`, a tool call), half of those on a
pass-through server and half on `retail`'s rows. Nothing is subtracted from it, so it holds whatever the allocator keeps
as well. `closed_rollout_kib` is the control, measured right after it: the same requests again, with rollouts that are
closed at the end. The difference is what an open rollout is worth.

`start_s` is from starting `megamcp serve` on an existing data folder (embedded PostgreSQL, bundled environments loaded
by an earlier start, files in the page cache) to the first good answer of `/readyz`; `start_cpu_s` the CPU time that
the gateway process has used by then. `first_start_s` is the same with no data folder. `stop_s` is for information.
"""

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway import CUSTOMER, WEATHER, pass_through
from benchmarks.peers.agent import McpClient
from benchmarks.peers.servers import tool_server
from benchmarks.processes import cpu_s, gateway, resident_kib
from benchmarks.report import Target, report, say

BATCH = 100
USED = 10
AT_ONCE = 16


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A short path that the embedded PostgreSQL's user may enter."""
    with tempfile.TemporaryDirectory(prefix="mm-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


class Traffic:
    """Requests of agents and their trainer, against one gateway."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def open(self, environment: str, count: int) -> list[str]:
        """Opens rollouts and uses one in `USED`; gives the ids of all."""
        opened: list[dict[str, str]] = []
        while len(opened) < count:
            body = {"environment": environment, "count": min(BATCH, count - len(opened))}
            async with self._http.post(f"{self._url}/v1/rollouts", json=body) as answer:
                answer.raise_for_status()
                opened += (await answer.json())["rollouts"]
        await _few_at_once([self._use(rollout["url"], environment) for rollout in opened[::USED]])
        return [rollout["id"] for rollout in opened]

    async def _use(self, url: str, environment: str) -> None:
        agent = await McpClient(self._http, url).open()
        await agent.tools()
        if environment == "echo":
            await agent.call("weather", WEATHER)
        else:
            await agent.call("get_customer", {"customer_id": CUSTOMER})

    async def close(self, rollouts: list[str]) -> None:
        """Releases them."""
        await _few_at_once([self._close(rollout) for rollout in rollouts])

    async def _close(self, rollout: str) -> None:
        async with self._http.delete(f"{self._url}/v1/rollouts/{rollout}") as answer:
            answer.raise_for_status()


async def _few_at_once(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(job: Coroutine[Any, Any, None]) -> None:
        async with turns:
            await job

    await asyncio.gather(*map(one, work))


async def memory(url: str, pid: int, quick: bool) -> dict[str, float]:
    """Kibibytes of a rollout, in a gateway that has served nobody yet."""
    count, settle_s = (200, 0.5) if quick else (10_000, 8)
    environments = ["echo"] if quick else ["echo", "retail"]
    async with aiohttp.ClientSession() as http:
        traffic = Traffic(http, url)

        async def grown(*, keep: bool) -> float:
            before = resident_kib(pid)
            for environment in environments:
                opened = await traffic.open(environment, count // len(environments))
                if not keep:
                    await traffic.close(opened)
            await asyncio.sleep(settle_s)
            return (resident_kib(pid) - before) / count

        for environment in environments:
            await traffic.close(await traffic.open(environment, 20 * USED))
        await asyncio.sleep(settle_s)
        say(f"memory: {count} rollouts that stay open")
        kept = await grown(keep=True)
        say(f"memory: {count} more that are closed")
        closed = await grown(keep=False)
        return {"idle_rollout_kib": kept, "closed_rollout_kib": closed, "gateway_mib": resident_kib(pid) / 1024}


@dataclass(frozen=True, slots=True)
class Started:
    """A gateway that has just answered `/readyz`."""

    url: str
    pid: int
    seconds: float
    cpu_s: float


@contextlib.asynccontextmanager
async def started(*options: str) -> AsyncIterator[Started]:
    """Starts a gateway and takes the time."""
    began = time.perf_counter()
    async with gateway(None, *options) as (url, pid), aiohttp.ClientSession() as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        break
            await asyncio.sleep(0.01)
        yield Started(url, pid, time.perf_counter() - began, cpu_s([pid]))


async def measure(quick: bool) -> dict[str, float]:
    """All figures: memory in the gateway of the first start, then the other starts on its data folder."""
    taken, used, stops = [], [], []
    with temporary_folder() as folder:
        async with tool_server() as echo:
            options = ("--data-dir", str(folder / "data"), "--environment", pass_through(folder, "echo", echo.url))
            say("start: without a data folder")
            async with started(*options) as first:
                figures = await memory(first.url, first.pid, quick)
        for turn in range(1 if quick else 5):
            say(f"start {turn + 1}: on the data folder")
            async with started(*options) as again:
                taken.append(again.seconds)
                used.append(again.cpu_s)
                stopping = time.perf_counter()
            stops.append(time.perf_counter() - stopping)
    return {
        **figures,
        "start_s": statistics.median(taken),
        "start_cpu_s": statistics.median(used),
        "first_start_s": first.seconds,
        "stop_s": statistics.median(stops),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rollouts (without retail), fewer starts")
    quick = parser.parse_args().quick
    report(
        "footprint", asyncio.run(measure(quick)), [Target("idle_rollout_kib", "<=", 4.0), Target("start_s", "<=", 3.0)]
    )


if __name__ == "__main__":
    main()
