"""Forks, checkpoints and rollbacks of a database of 100 MB, with hundreds of live copies.

    python -m benchmarks.database [--quick] [--live N] [--rounds N]

Over the gateway's REST, with the `sql` tool server. A *fork* is timed from the request to the answer of the new
rollout's first query; the rollout that it is forked from was used just before, so its connections have to be
drained. A *checkpoint* follows a call that wrote one row; a *rollback* undoes a call that changed 1,000 rows. Beside
it, in the same run, forks on a cluster that copies in full. The state cluster is on a file system with reflink where
this machine can make one (root and mkfs.xfs: a loop-mounted file); the line of figures says which.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.file_systems import with_reflink
from benchmarks.processes import gateway
from benchmarks.report import Target, report, say
from benchmarks.rest import Rest
from megamcp.databases.clusters import OwnCluster
from megamcp.settings import Settings

SCHEMA = """create table account (
    id integer primary key,
    branch integer not null,
    balance integer not null,
    filler text not null
);
create index on account (branch);
create table payment (id bigint generated always as identity primary key, account integer not null references account,
    amount integer not null);
"""
ROWS_PER_MB = 7_600
SEED = """insert into account select n, n % 100, 0, repeat('x', 84) from generate_series(1, {rows}) n;
"""


class Gateway(Rest):
    """A gateway's REST, for rollouts of the bank."""

    async def call(self, rollout: str, tool: str, sql: str) -> Any:
        found = await self.post(f"/v1/rollouts/{rollout}/call", {"tool": tool, "arguments": {"sql": sql}})
        if found.get("isError"):
            raise RuntimeError(str(found))
        return found

    async def open(self) -> str:
        rollout: str = (await self.post("/v1/rollouts", {"environment": "bank", "ttl_s": 7200}))["rollouts"][0]["id"]
        await self.call(rollout, "query", "select count(*) from payment")
        return rollout

    async def checkpoint(self, rollout: str) -> str:
        return str((await self.post(f"/v1/rollouts/{rollout}/checkpoints", {}))["id"])

    async def fork(self, checkpoint: str) -> str:
        made = await self.post(f"/v1/checkpoints/{checkpoint}/fork", {"ttl_s": 7200})
        rollout: str = made["rollouts"][0]["id"]
        await self.call(rollout, "query", "select balance from account where id = 1")
        return rollout


async def timed(work: Any) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    await work
    return (time.perf_counter() - began) * 1000


async def forks(gateway: Gateway, count: int) -> list[float]:
    """Milliseconds of each fork of a rollout that works on."""
    rollout = await gateway.open()
    taken = []
    for n in range(count):
        await gateway.call(rollout, "execute", f"update account set balance = {n} where id = 1")
        point = await gateway.checkpoint(rollout)
        taken.append(await timed(gateway.fork(point)))
    return taken


async def moves(gateway: Gateway, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of checkpoints, and of rollbacks of 1,000 changed rows."""
    rollout = await gateway.open()
    checkpoints, rollbacks = [], []
    for n in range(count):
        await gateway.call(rollout, "execute", f"update account set balance = {n} where id = 1")
        began = time.perf_counter()
        point = await gateway.checkpoint(rollout)
        checkpoints.append((time.perf_counter() - began) * 1000)
        await gateway.call(rollout, "execute", "update account set balance = balance + 1 where id between 1 and 1000")
        rollbacks.append(await timed(gateway.post(f"/v1/rollouts/{rollout}/rollback", {"checkpoint": point})))
    return checkpoints, rollbacks


def percentile(values: list[float], share: float) -> float:
    """Value below which that share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def used(folder: Path) -> int:
    """Bytes of the file system that are in use."""
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def size(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


async def measure(megabytes: int, live: int, rounds: int) -> tuple[dict[str, float], str]:
    """All figures, and what the state cluster's files are on."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="mm-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        bank = folder / "bank"
        bank.mkdir()
        (bank / "schema.sql").write_text(SCHEMA)
        (bank / "seed.sql").write_text(SEED.format(rows=megabytes * ROWS_PER_MB))
        (bank / "environment.toml").write_text(
            'name = "bank"\n[servers.sql]\nentry = "tool_servers.sql.server:server"\n'
            '[servers.sql.state]\nkind = "database"\nseed = ["seed.sql"]\n'
        )
        plain_folder = folder / "plain"
        plain_folder.mkdir()
        async with with_reflink(folder) as (state, system):
            for label, where, copies in (("", state, live), ("plain_", plain_folder, 0)):
                say(f"{label or 'shared_'}copies of {megabytes} MB")
                found = await one_cluster(folder, where, bank, copies, rounds if copies else min(rounds, 20))
                figures |= {f"{label}{figure}": value for figure, value in found.items()}
                if system == "plain copies":
                    break
    return figures, system


async def one_cluster(folder: Path, where: Path, bank: Path, live: int, rounds: int) -> dict[str, float]:
    """Figures on one state cluster."""
    figures: dict[str, float] = {}
    async with (
        OwnCluster(Settings(state_dir=where / "cluster")) as cluster,
        gateway(
            None,
            MEGAMCP_DATA_DIR=str(folder / f"data-{where.name}"),
            MEGAMCP_STATE_URLS=json.dumps([cluster.dsn]),
            MEGAMCP_ENVIRONMENTS=json.dumps([str(bank)]),
            MEGAMCP_BUNDLED_ENVIRONMENTS="false",
        ) as (url, _),
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(600)) as http,
    ):
        rest = Gateway(http)
        first = await rest.open()
        await asyncio.sleep(3)  # the first spares are made
        if live:
            before, log_before = used(where), size(where / "cluster" / "cluster" / "pg_wal")
            rollouts = [first]
            for n in range(live):
                rollouts.append(await rest.open())
                if n % 100 == 99:
                    say(f"  {n + 1} live copies")
            figures["disk_per_idle_copy_mb"] = (used(where) - before) / live / 1e6
            figures["of_it_write_ahead_log_mb"] = (
                (size(where / "cluster" / "cluster" / "pg_wal") - log_before) / live / 1e6
            )
        taken = await forks(rest, rounds)
        figures["fork_p50_ms"] = percentile(taken, 0.5)
        figures["fork_p99_ms"] = percentile(taken, 0.99)
        if live:
            checkpoints, rollbacks = await moves(rest, rounds)
            figures["checkpoint_p50_ms"] = statistics.median(checkpoints)
            figures["rollback_1000_rows_p50_ms"] = statistics.median(rollbacks)
    return figures


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 MB, 20 live copies")
    parser.add_argument("--live", type=int, help="live copies, instead of 500 (20)")
    parser.add_argument("--rounds", type=int, help="forks, checkpoints and rollbacks, instead of 100 (10)")
    given = parser.parse_args()
    megabytes, live, rounds = (16, 20, 10) if given.quick else (100, 500, 100)
    live, rounds = given.live or live, given.rounds or rounds
    figures, system = asyncio.run(measure(megabytes, live, rounds))
    targets = [
        Target("fork_p50_ms", "<=", 60),
        Target("fork_p99_ms", "<=", 250),
        Target("checkpoint_p50_ms", "<=", 2),
        Target("rollback_1000_rows_p50_ms", "<=", 40),
        Target("disk_per_idle_copy_mb", "<=", 0.5),
    ]
    report("database", figures, targets, state_files=system, live_copies=live, megabytes=megabytes)


if __name__ == "__main__":
    main()
