"""How fast a checkpoint is forked: over REST and below it, with few and with many live rollouts. Always durable.

    python -m benchmarks.fork [--quick]

*Below REST* is `Rollouts.fork` in this process: the INSERT, its commit, and nothing else. Latencies are of one request
after another; rates are of 32 at once. The two population sizes are measured in turns on one database, so that the
ratio between them isn't the machine's mood.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
from pydantic import SecretStr

from benchmarks.processes import create_database, gateway
from benchmarks.report import Target, report, say
from megamcp.app import prepare
from megamcp.environments import Environments
from megamcp.migrate import migrate
from megamcp.postgres import EmbeddedPostgres
from megamcp.rollouts import Rollouts
from megamcp.settings import Settings
from megamcp.store import Store

FEW = 10
WORKERS = 32
Fork = Callable[[], Awaitable[None]]


async def latencies(fork: Fork, count: int) -> list[float]:
    """Milliseconds of `count` requests, one after another."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await fork()
        taken.append((time.perf_counter() - began) * 1000)
    return taken


async def rate(fork: Fork, count: int) -> float:
    """Requests per second with `WORKERS` at once."""

    async def work(share: int) -> None:
        for _ in range(share):
            await fork()

    began = time.perf_counter()
    await asyncio.gather(*(work(count // WORKERS) for _ in range(WORKERS)))
    return (count // WORKERS) * WORKERS / (time.perf_counter() - began)


def percentile(values: list[float], share: float) -> float:
    """Value below which that share of the values lies."""
    return statistics.quantiles(values, n=100)[round(share * 100) - 1]


async def measure(quick: bool) -> dict[str, float]:
    """All figures."""
    many, single, bulk = (1000, 200, 640) if quick else (10_000, 1000, 6400)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="mm-") as folder:
        Path(folder).chmod(0o755)
        async with EmbeddedPostgres(Path(folder) / "pg") as postgres:
            dsn = await create_database(postgres.dsn, "bench_fork")
            settings = Settings(database_url=SecretStr(dsn), max_rollouts=10**9)
            say("loading the environment")
            await prepare(settings, dsn)
            async with (
                Store.open(dsn, WORKERS) as store,
                gateway(dsn, MEGAMCP_MAX_ROLLOUTS=str(10**9)) as (url, _),
                aiohttp.ClientSession(url) as http,
            ):
                rollouts = Rollouts(store, Environments(store, await migrate(dsn)), settings)
                (root,) = await rollouts.open("retail")
                point = (await rollouts.make_checkpoint(root["id"]))["id"]

                async def below() -> None:
                    await rollouts.fork(point)

                async def rest() -> None:
                    async with http.post(f"/v1/checkpoints/{point}/fork", json={}) as answer:
                        assert answer.status == 201, await answer.text()
                        await answer.read()

                async def populate(size: int) -> None:
                    await store.value("delete from megamcp.events where rollout <> $1", root["id"])
                    await store.value("delete from megamcp.rollouts where id <> $1", root["id"])
                    await store.value("vacuum analyze megamcp.rollouts")
                    await store.value("vacuum analyze megamcp.events")
                    for begin in range(0, size, 1000):
                        await rollouts.fork(point, count=min(1000, size - begin))

                samples: dict[str, list[float]] = {}
                for turn in range(3):
                    for label, size in (("few", FEW), ("many", many)):
                        say(f"turn {turn + 1}: {size} live rollouts")
                        await populate(size)
                        for layer, fork in (("below", below), ("rest", rest)):
                            await latencies(fork, 20)
                            samples.setdefault(f"{layer}_{label}", []).extend(await latencies(fork, single // 3))
                            samples.setdefault(f"{layer}_{label}_rate", []).append(await rate(fork, bulk // 3))
                for name, values in samples.items():
                    if name.endswith("_rate"):
                        figures[f"{name}_per_s"] = statistics.median(values)
                    else:
                        figures[f"{name}_p50_ms"] = percentile(values, 0.5)
                        figures[f"{name}_p99_ms"] = percentile(values, 0.99)
    figures["rest_slowdown"] = figures["rest_many_p50_ms"] / figures["rest_few_p50_ms"]
    figures["below_slowdown"] = figures["below_few_rate_per_s"] / figures["below_many_rate_per_s"]
    return figures


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rollouts and requests")
    quick = parser.parse_args().quick
    figures = asyncio.run(measure(quick))
    targets = [
        Target("rest_few_p50_ms", "<=", 3.0),
        Target("rest_many_p50_ms", "<=", 3.0),
        Target("below_few_rate_per_s", ">=", 2000),
        Target("below_many_rate_per_s", ">=", 2000),
        Target("rest_slowdown", "<=", 1.3),
        Target("below_slowdown", "<=", 1.3),
    ]
    report("fork", figures, targets, live_rollouts=1000 if quick else 10_000)


if __name__ == "__main__":
    main()
