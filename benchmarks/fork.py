"""How fast a checkpoint is forked: over REST and below it, with few and with many live rollouts. Always durable.

    python -m benchmarks.fork [--quick]

*Below REST* is `Rollouts.fork` in this process: the INSERT, its commit, and nothing else. Latencies are of one request
after another; rates are of 32 at once. Two databases with a gateway each: one with 10 open rollouts, whose checkpoint
is the first of its trajectory, and one with 100,000, whose checkpoint is the hundredth (`--quick`: 300, the tenth).
They are measured in turns, so that the ratio between them isn't the machine's mood. The long chain is squashed by the
gateway, as always.

`idle_rollout_many_bytes` is what the tables and indexes of the database grew by for each of those forks.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from pydantic import SecretStr

from benchmarks.crowd import Crowd
from benchmarks.processes import create_database, gateway
from benchmarks.report import Target, report, say
from megamcp.app import prepare
from megamcp.environments import Environments
from megamcp.migrate import migrate
from megamcp.postgres import EmbeddedPostgres
from megamcp.settings import Settings
from megamcp.store import Store

FEW = 10
TURNS = 100
WORKERS = 32
SIZE = """select sum(pg_total_relation_size(c.oid)) from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.relkind = 'r' and (n.nspname = 'megamcp' or n.nspname like 's\\_%')"""
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


@asynccontextmanager
async def population(
    server: str, label: str, size: int, turns: int, figures: dict[str, float]
) -> AsyncIterator[dict[str, Fork]]:
    """A database with a gateway, that many rollouts, and the two ways to fork the last of that many checkpoints."""
    dsn = await create_database(server, f"bench_fork_{label}")
    settings = Settings(database_url=SecretStr(dsn), max_rollouts=10**9)
    say(f"{label}: loading the environment")
    await prepare(settings, dsn)
    async with (
        Store.open(dsn, WORKERS) as store,
        gateway(dsn, MEGAMCP_MAX_ROLLOUTS=str(10**9)) as (url, _),
        aiohttp.ClientSession(url) as http,
    ):
        signer = await migrate(dsn)
        crowd = Crowd(store, signer, settings, await Environments(store, signer).find("retail"), dsn)
        (root,) = await crowd.open()
        say(f"{label}: {turns} checkpoints, {size} rollouts")
        touch = "update customers set phone = phone where id = (select min(id) + {} from customers)"
        points = await crowd.trajectory(root, turns, lambda turn: [touch.format(turn % 20)])
        before = await store.value(SIZE)
        await crowd.fork(points, size)
        figures[f"idle_rollout_{label}_bytes"] = float(await store.value(SIZE) - before) / size
        await crowd.settled()
        await store.value("vacuum analyze megamcp.rollouts")
        await store.value("vacuum analyze megamcp.events")

        async def below() -> None:
            await crowd.rollouts.fork(points[-1])

        async def rest() -> None:
            async with http.post(f"/v1/checkpoints/{points[-1]}/fork", json={}) as answer:
                assert answer.status == 201, await answer.text()
                await answer.read()

        yield {"below": below, "rest": rest}


async def measure(quick: bool) -> dict[str, float]:
    """All figures."""
    many, turns, single, bulk = (300, 10, 30, 96) if quick else (100_000, TURNS, 1000, 6400)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="mm-") as folder:
        Path(folder).chmod(0o755)
        async with (
            EmbeddedPostgres(Path(folder) / "pg") as postgres,
            population(postgres.dsn, "few", FEW, 1, figures) as few_forks,
            population(postgres.dsn, "many", many, turns, figures) as many_forks,
        ):
            del figures["idle_rollout_few_bytes"]  # of ten, it tells of pages
            samples: dict[str, list[float]] = {}
            for turn in range(3):
                say(f"turn {turn + 1}")
                for layer in ("below", "rest"):
                    for label, forks in (("few", few_forks), ("many", many_forks)):
                        await latencies(forks[layer], 20)
                        samples.setdefault(f"{layer}_{label}", []).extend(await latencies(forks[layer], single // 3))
                        samples.setdefault(f"{layer}_{label}_rate", []).append(await rate(forks[layer], bulk // 3))
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
        Target("idle_rollout_many_bytes", "<=", 1024),
    ]
    report("fork", figures, targets, live_rollouts=300 if quick else 100_000, checkpoints=10 if quick else TURNS)


if __name__ == "__main__":
    main()
