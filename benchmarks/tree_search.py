"""A tree search over states: ten workers grow a tree of a thousand nodes on a TPC-C-like database.

    python -m benchmarks.tree_search [--quick] [--kind schema|database]

For both kinds of state, over the gateway's REST. Each step picks a node, forks it, does one DML transaction and one
analytical query, checkpoints the result as a new node and releases the rollout; with probability 0.1 it then prunes a
leaf. Fan-out is at most ten, depth at most 25; the database is about 10 MB. For kind `database` the state cluster is on
a file system with reflink where this machine can make one (root and mkfs.xfs: a loop-mounted file), else on plain
copies; the line of figures says which.
"""

import argparse
import asyncio
import json
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.file_systems import with_reflink
from benchmarks.processes import gateway
from benchmarks.report import Target, report, say

WORKERS = 10
STEPS = 100
FAN_OUT = 10
DEPTH = 25
PRUNE = 0.1
TPCC = Path(__file__).parent / "tpcc"


@dataclass(slots=True)
class Node:
    """A checkpoint in the tree."""

    checkpoint: str
    depth: int
    children: int = 0
    parent: "Node | None" = None


@dataclass(slots=True)
class Search:
    """One run on one gateway."""

    http: aiohttp.ClientSession
    random: random.Random
    nodes: list[Node] = field(default_factory=list)
    pruned: int = 0
    steps: int = 0
    waits: list[float] = field(default_factory=list)

    async def _post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        async with self.http.post(path, json=body) as answer:
            found: dict[str, object] = await answer.json()
            if answer.status >= 300:
                raise RuntimeError(f"{path}: {found}")
            return found

    async def _delete(self, path: str) -> None:
        async with self.http.delete(path) as answer:
            if answer.status not in (200, 204, 404):
                raise RuntimeError(f"{path}: {await answer.text()}")

    async def _call(self, rollout: str, tool: str, **arguments: object) -> dict[str, object]:
        found = await self._post(f"/v1/rollouts/{rollout}/call", {"tool": tool, "arguments": arguments})
        if found.get("isError"):
            raise RuntimeError(f"{tool}: {found}")
        return dict(found["structuredContent"])  # type: ignore[call-overload]

    async def root(self, environment: str) -> None:
        opened = await self._post("/v1/rollouts", {"environment": environment})
        rollout = opened["rollouts"][0]["id"]  # type: ignore[index]
        await self._call(rollout, "stock_level", district=1)
        point = await self._post(f"/v1/rollouts/{rollout}/checkpoints", {})
        self.nodes.append(Node(str(point["id"]), 0))
        await self._delete(f"/v1/rollouts/{rollout}")

    async def step(self) -> None:
        """One expansion."""
        parent = self._pick()
        parent.children += 1
        began = time.perf_counter()
        forked = await self._post(f"/v1/checkpoints/{parent.checkpoint}/fork", {})
        rollout = forked["rollouts"][0]["id"]  # type: ignore[index]
        district, customer = self.random.randint(1, 10), self.random.randint(1, 600)
        if self.random.random() < 0.5:
            items = self.random.sample(range(1, 10_001), 10)
            await self._call(rollout, "new_order", district=district, customer=customer, items=items)
        else:
            await self._call(rollout, "payment", district=district, customer=customer, amount=12.5)
        self.waits.append(time.perf_counter() - began)
        await self._call(rollout, "stock_level", district=district)
        point = await self._post(f"/v1/rollouts/{rollout}/checkpoints", {})
        await self._delete(f"/v1/rollouts/{rollout}")
        self.nodes.append(Node(str(point["id"]), parent.depth + 1, parent=parent))
        self.steps += 1
        if self.random.random() < PRUNE:
            await self._prune()

    def _pick(self) -> Node:
        """A node that may have another child; as a search does, deeper ones more often."""
        able = [node for node in self.nodes if node.children < FAN_OUT and node.depth < DEPTH]
        return self.random.choices(able, [1 + node.depth for node in able])[0]

    async def _prune(self) -> None:
        leaves = [node for node in self.nodes if not node.children and node.parent]
        if leaves:
            leaf = self.random.choice(leaves)
            self.nodes.remove(leaf)
            assert leaf.parent is not None
            leaf.parent.children -= 1
            self.pruned += 1
            await self._delete(f"/v1/checkpoints/{leaf.checkpoint}")

    async def worker(self, steps: int) -> None:
        for _ in range(steps):
            await self.step()


def environment(folder: Path, kind: str) -> Path:
    """The TPC-C environment with state of a kind."""
    target = folder / kind
    target.mkdir()
    for name in ("schema.sql", "seed.sql"):
        shutil.copy(TPCC / name, target / name)
    (target / "environment.toml").write_text(
        f'name = "tpcc-{kind}"\n[servers.tpcc]\nentry = "benchmarks.tpcc.server:server"\n'
        f'[servers.tpcc.state]\nkind = "{kind}"\nschema = "schema.sql"\nseed = ["seed.sql"]\n'
    )
    return target


async def measure(kind: str, steps: int, state: Path, folder: Path) -> dict[str, float]:
    """Seconds of one run, and what a step waited for its fork and first transaction."""
    where = environment(folder, kind)
    data = folder / f"data-{kind}"
    data.mkdir()
    async with (
        gateway(
            None,
            MEGAMCP_DATA_DIR=str(data),
            MEGAMCP_STATE_DIR=str(state / "state"),
            MEGAMCP_ENVIRONMENTS=json.dumps([str(where)]),
            MEGAMCP_BUNDLED_ENVIRONMENTS="false",
        ) as (url, _),
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(600)) as http,
    ):
        say(f"{kind}: growing the tree")
        search = Search(http, random.Random(7))
        await search.root(f"tpcc-{kind}")
        began = time.perf_counter()
        await asyncio.gather(*(search.worker(steps) for _ in range(WORKERS)))
        seconds = time.perf_counter() - began
    waits = sorted(search.waits)
    deepest = max(node.depth for node in search.nodes)
    say(f"{kind}: {search.steps} steps in {seconds:.1f} s, {search.pruned} pruned, deepest {deepest}")
    return {
        f"{kind}_steps": search.steps,
        f"{kind}_s": seconds,
        f"{kind}_fork_and_write_p50_ms": waits[len(waits) // 2] * 1000,
        f"{kind}_fork_and_write_p99_ms": waits[len(waits) * 99 // 100] * 1000,
    }


async def run(kinds: list[str], steps: int) -> tuple[dict[str, float], str]:
    """Figures, and what the state cluster's files are on."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="mm-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        async with with_reflink(folder) as (state, system):
            for kind in kinds:
                figures |= await measure(kind, steps, state, folder)
    return figures, system


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--kind", choices=["schema", "database"], help="one kind only")
    options = parser.parse_args()
    kinds = [options.kind] if options.kind else ["schema", "database"]
    steps = STEPS // 10 if options.quick else STEPS
    figures, system = asyncio.run(run(kinds, steps))
    targets = []
    for kind, limit in (("schema", 60), ("database", 180)):
        if kind in kinds:
            targets += [Target(f"{kind}_steps", ">=", WORKERS * steps), Target(f"{kind}_s", "<=", limit)]
    report("tree_search", figures, targets, state_files=system)


if __name__ == "__main__":
    main()
