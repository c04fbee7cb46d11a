"""What a document costs: a call's overhead, a checkpoint, a fork, by the size and the make of the document.

    python -m benchmarks.document [--quick]

One gateway, one agent that speaks MCP, one run; the documents in turn in every round. Each tool call changes one value.

- `small`: a document of some hundred bytes, which the others are compared with.
- `records`: 1.4 MB of JSON in orders, 60,000 values in all: what packing has to walk through.
- `table`: the same orders in a `Table`.
- `text`: 1.4 MB of JSON in 2,400 pages of text.

`…_call_ms` is a call of an unbroken run, at the client; `…_overhead_ms` what it takes more than one of `small`, the
median of the differences between rounds. `…_read_overhead_ms`: of a read-only method; `…_trusted_overhead_ms`: with
MEGAMCP_TRUST_READ_ONLY=1. `…_checkpoint_ms` is over REST, after a call that wrote; `…_fork_ms` too, and
`…_first_call_ms` a fork's first call, which loads the document. `fork_bytes` is what 100 forks add to the tables of
documents.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg

from benchmarks.peers.agent import McpClient
from benchmarks.processes import gateway
from benchmarks.report import Target, report, say
from benchmarks.rest import Rest
from megamcp.postgres import EmbeddedPostgres

SERVER = Path(__file__).parent / "documents" / "shop.py"
MAKES = ("small", "records", "table", "text")
TABLES = ("documents", "document_deltas", "document_points", "document_blobs")


@dataclass(slots=True)
class Subject:
    """A rollout with a document of one make, and what was measured on it, in milliseconds."""

    name: str
    rollout: str
    client: McpClient
    waits: dict[str, list[float]] = field(default_factory=dict)
    medians: dict[str, list[float]] = field(default_factory=dict)

    async def time(self, figure: str, count: int, call: Callable[[int], Awaitable[Any]]) -> None:
        """So many calls, one after another."""
        found = []
        for number in range(count):
            began = time.perf_counter()
            await call(number)
            found.append((time.perf_counter() - began) * 1000)
        self.waits.setdefault(figure, []).extend(found)
        self.medians.setdefault(figure, []).append(statistics.median(found))


def environments(folder: Path) -> list[str]:
    """Folders of an environment for each make, and of one that trusts read-only methods."""
    made = []
    for make, extra in [*((make, "") for make in MAKES), ("records", 'MEGAMCP_TRUST_READ_ONLY = "1", ')]:
        name = f"trusted-{make}" if extra else make
        entry = "TableShop" if make == "table" else "Shop"
        where = folder / name
        where.mkdir()
        shutil.copy(SERVER, where / "shop.py")
        (where / "environment.toml").write_text(
            f'name = "{name}"\n[servers.shop]\nentry = "shop:{entry}"\nenv = {{ {extra}SHOP_MAKE = "{make}" }}\n'
            '[servers.shop.state]\nkind = "document"\n'
        )
        made.append(str(where))
    return made


async def measure(url: str, dsn: str, rounds: int, calls: int) -> dict[str, float]:
    """The figures."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(600)) as http:
        rest = Rest(http)
        subjects = [await subject(http, rest, name) for name in (*MAKES, "trusted-records")]
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for one in subjects:
                if not one.name.startswith("trusted"):
                    await one.time("call", calls, lambda n, one=one: one.client.call("mark", {"number": n}))  # type: ignore[misc]
                await one.time("read", calls, lambda n, one=one: one.client.call("look", {"number": n}))  # type: ignore[misc]
            for one in subjects[: len(MAKES)]:
                await checkpoints(http, rest, one, max(3, calls // 20))
        held = await taken(dsn)
        point = await rest.post(f"/v1/rollouts/{subjects[1].rollout}/checkpoints", {})
        standing = await taken(dsn)
        await rest.post(f"/v1/checkpoints/{point['id']}/fork", {"count": 100})
        figures = told(subjects)
        figures["records_json_mb"] = (await subjects[1].client.call("size", {}))["structuredContent"]["result"] / 1e6
        figures["text_json_mb"] = (await subjects[3].client.call("size", {}))["structuredContent"]["result"] / 1e6
        figures["checkpoint_bytes"] = standing - held
        figures["fork_bytes"] = await taken(dsn) - standing
        return figures


async def subject(http: aiohttp.ClientSession, rest: Rest, name: str) -> Subject:
    opened = await rest.post("/v1/rollouts", {"environment": name})
    rollout = opened["rollouts"][0]["id"]
    client = await McpClient(http, f"/r/{rollout}/mcp", stateless=True).open()
    for number in range(20):
        await client.call("mark", {"number": number})
    return Subject(name, rollout, client)


async def checkpoints(http: aiohttp.ClientSession, rest: Rest, one: Subject, count: int) -> None:
    """Checkpoints after a call each, forks of them, and the forks' first calls."""
    points = []

    async def checkpoint(_: int) -> None:
        points.append((await rest.post(f"/v1/rollouts/{one.rollout}/checkpoints", {}))["id"])

    forks = []

    async def fork(number: int) -> None:
        made = await rest.post(f"/v1/checkpoints/{points[number]}/fork", {})
        forks.append(McpClient(http, f"/r/{made['rollouts'][0]['id']}/mcp", stateless=True))

    for number in range(count):
        await one.client.call("mark", {"number": number})
        await one.time("checkpoint", 1, checkpoint)
    await one.time("fork", count, fork)
    for client in forks:
        await client.open()
    await one.time("first_call", count, lambda number: forks[number].call("mark", {"number": number}))


def told(subjects: list[Subject]) -> dict[str, float]:
    figures: dict[str, float] = {}
    small = subjects[0]
    for one in subjects:
        name = one.name
        for figure, waits in one.waits.items():
            figures[f"{name}_{figure}_ms"] = statistics.median(waits)
        if one is small:
            continue
        for figure in ("call", "read"):
            if figure in one.medians:
                pairs = zip(one.medians[figure], small.medians[figure], strict=True)
                word = "overhead" if figure == "call" else "read_overhead"
                figures[f"{name}_{word}_ms"] = statistics.median(mine - theirs for mine, theirs in pairs)
    return figures


async def taken(dsn: str) -> float:
    """Bytes in the tables of documents."""
    connection = await asyncpg.connect(dsn)
    try:
        sizes = [await connection.fetchval(f"select pg_total_relation_size('megamcp.{name}')") for name in TABLES]
        return float(sum(sizes))
    finally:
        await connection.close()


async def run(rounds: int, calls: int) -> dict[str, float]:
    """Measure on an embedded PostgreSQL."""
    with tempfile.TemporaryDirectory(prefix="mm-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        async with EmbeddedPostgres(folder / "pg", max_connections=200) as postgres:
            options = {
                "MEGAMCP_ENVIRONMENTS": json.dumps(environments(folder)),
                "MEGAMCP_BUNDLED_ENVIRONMENTS": "false",
                "MEGAMCP_DATA_DIR": str(folder / "data"),
            }
            async with gateway(postgres.dsn, **options) as (url, _):
                return await measure(url, postgres.dsn, rounds, calls)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds of fewer calls")
    options = parser.parse_args()
    figures = asyncio.run(run(3, 60) if options.quick else run(7, 200))
    targets = [
        Target("records_overhead_ms", "<=", 1.0),
        Target("table_overhead_ms", "<=", 1.0),
        Target("text_overhead_ms", "<=", 1.0),
        Target("records_checkpoint_ms", "<=", 20.0),
        Target("table_checkpoint_ms", "<=", 20.0),
        Target("text_checkpoint_ms", "<=", 20.0),
        Target("fork_bytes", "<=", 0.0),
    ]
    report("document", figures, targets)


if __name__ == "__main__":
    main()
