"""Sandboxes: how long a fork, a checkpoint and a rollback take, and what memory they need, by the size of the server.

    python -m benchmarks.sandbox [--quick] [--runtime fork] [--heap 25] [--docker-image NAME]

Through the keeper, as a gateway uses it, on a tool server of our SDK with a heap of 25, 100 and 500 MB of small
objects. For each runtime and size:

- `…_fork_p50_ms`, `…_fork_p99_ms`: from asking for a sandbox from an image to the answer of its first tool call;
- `…_checkpoint_…`: a sandbox that has written a file since becomes an image;
- `…_rollback_…`: a sandbox is ended, and one from an image has answered its first call;
- `…_pss_mb`, `…_private_mb`: of a fork after three calls, one of ten that live, from smaps_rollup; `…_private_pct` is
  of its resident memory;
- `…_warm_s`: what a template takes, once per environment.

Beside it, in the same run: `cold_…`, the same server as a child process, from its start to the answer of `initialize`;
and `docker_…`, the same by `docker run` in an image that has what this machine's Python needs (`--docker-image`, where
an engine is at hand). `hundred_pss_mb` is the proportional memory of 100 live rollouts of a 50 MB server with all that
they share, their image and the zygote.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.footprint import temporary_folder
from benchmarks.report import Target, report, say
from sandboxes.client import Client
from sandboxes.types import Kind, Limits, Pipes, Spec

ROOT = Path(__file__).parents[1]
HEAPS = (25, 100, 500)
ALIVE = 10
CROWD = 100
CROWD_HEAP = 50
INITIALIZE = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "benchmark", "version": "1"},
}
TARGETS = [
    Target("fork_25mb_fork_p50_ms", "<=", 10.0),
    Target("fork_25mb_private_pct", "<=", 15.0),
    Target("fork_hundred_pss_mb", "<=", 1024.0),
]


def spec_of(kind: Kind, heap: int) -> Spec:
    """The heap server for a runtime."""
    environ = {"MEGAMCP_HEAP_MB": str(heap)}
    limits = Limits(memory=4 << 30)
    if kind is Kind.FORK:
        return Spec(
            kind=kind,
            entry="megamcp.sdk.lines:Lines",
            argument="benchmarks.heap_server:server",
            python=sys.executable,
            pythonpath=(str(ROOT),),
            environ=environ,
            limits=limits,
        )
    command = (sys.executable, "-m", "benchmarks.heap_server")
    return Spec(kind=kind, command=command, environ={**environ, "PYTHONPATH": str(ROOT)}, limits=limits)


KEPT = (Kind.FORK, Kind.CRIU)
"""What keeps memory; Docker is compared by how it starts one."""


class Conversation:
    """JSON-RPC with a server over two descriptors."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._number = 0

    async def ask(self, method: str, **params: object) -> None:
        """Returns when it has answered. Raises RuntimeError for a bad answer."""
        self._number += 1
        message = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": params}
        os.write(self._stdin, json.dumps(message).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            await _readable(self._stdout)
            chunk = os.read(self._stdout, 1 << 16)
            if not chunk:
                raise RuntimeError(f"the server ended instead of answering {method}")
            line += chunk
        if "result" not in json.loads(line):
            raise RuntimeError(f"{method} was answered by {line!r}")

    async def touch(self, order: int) -> None:
        await self.ask("tools/call", name="touch", arguments={"order": order})


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


@dataclass(eq=False)
class Box:
    """A sandbox that runs."""

    name: str
    pipes: Pipes
    talk: Conversation

    def close(self) -> None:
        for descriptor in self.pipes.all:
            os.close(descriptor)


class Bench:
    """One template of one runtime."""

    def __init__(self, client: Client, spec: Spec) -> None:
        self._client, self._spec = client, spec
        self._number = 0

    def _name(self, prefix: str) -> str:
        self._number += 1
        return f"{prefix}{self._number}"

    async def start(self, origin: str | None = None) -> Box:
        name = self._name("s")
        pipes = await self._client.start(self._spec, name, origin)
        return Box(name, pipes, Conversation(pipes.stdin, pipes.stdout))

    async def freeze(self, box: Box) -> str:
        return (await self._client.freeze(box.name, self._name("i"))).image

    async def end(self, box: Box) -> None:
        box.close()
        await self._client.remove(box.name)

    async def measure(self, turns: int) -> dict[str, float]:
        """All figures of one size, without their prefix."""
        began = time.perf_counter()
        await self._client.prepare(self._spec)
        figures = {"warm_s": time.perf_counter() - began}
        box = await self.start()
        await box.talk.ask("initialize", **INITIALIZE)
        await box.talk.touch(1)
        image = await self.freeze(box)
        figures |= await self._forks(image, turns) | await self._memory(image)

        frozen = []
        for turn in range(turns):
            await box.talk.touch(turn)
            began = time.perf_counter()
            taken = await self.freeze(box)
            frozen.append(time.perf_counter() - began)
            await self._client.drop(taken)
        figures |= _spread("checkpoint", frozen)
        back = []
        for turn in range(turns):
            began = time.perf_counter()
            await self.end(box)
            box = await self.start(image)
            await box.talk.touch(turn)
            back.append(time.perf_counter() - began)
        await self.end(box)
        await self._client.drop(image)
        return figures | _spread("rollback", back)

    async def _forks(self, image: str, turns: int) -> dict[str, float]:
        taken = []
        for turn in range(turns):
            began = time.perf_counter()
            box = await self.start(image)
            await box.talk.touch(turn)
            taken.append(time.perf_counter() - began)
            await self.end(box)
        return _spread("fork", taken)

    async def _memory(self, image: str) -> dict[str, float]:
        boxes = [await self.start(image) for _ in range(ALIVE)]
        for box in boxes:
            for order in (1, 1000, 10_000):
                await box.talk.touch(order)
        pids = {info.sandbox: info.pid for info in (await self._client.inventory()).sandboxes}
        seen = [memory(pids[box.name]) for box in boxes]
        for box in boxes:
            await self.end(box)
        rss, pss, private = (statistics.mean(column) for column in zip(*seen, strict=True))
        return {"rss_mb": rss, "pss_mb": pss, "private_mb": private, "private_pct": 100 * private / rss}

    async def crowd(self, count: int) -> float:
        """Megabytes of so many live rollouts and of what they share."""
        first = await self.start()
        await first.talk.ask("initialize", **INITIALIZE)
        image = await self.freeze(first)
        boxes = await asyncio.gather(*(self.start(image) for _ in range(count - 1)))
        for number, box in enumerate(boxes):
            await box.talk.touch(number)
        pid = (await self._client.inventory()).sandboxes[0].pid
        total = sum(memory(inhabitant)[1] for inhabitant in inhabitants(pid))
        for box in (first, *boxes):
            await self.end(box)
        await self._client.drop(image)
        return total


def memory(pid: int) -> tuple[float, float, float]:
    """Resident, proportional and private megabytes."""
    told: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        told[name] = int(value.split()[0])
    private = told["Private_Clean"] + told["Private_Dirty"]
    return told["Rss"] / 1024, told["Pss"] / 1024, private / 1024


def inhabitants(pid: int) -> list[int]:
    """All processes of a process's pid namespace."""
    wanted, found = os.readlink(f"/proc/{pid}/ns/pid"), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{name}/ns/pid") == wanted:
                found.append(int(name))
    return found


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"{name}_p50_ms": 1000 * statistics.median(ordered),
        f"{name}_p99_ms": 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
    }


@contextlib.asynccontextmanager
async def keeper(folder: Path) -> AsyncIterator[Client]:
    """Of a keeper that runs."""
    path = folder / "s"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sandboxes", "--socket", str(path), "--state", str(folder / "state")),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    client = Client(str(path))
    try:
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError("the keeper did not start")
        yield client
    finally:
        await client.aclose()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def cold(command: Sequence[str], heap: int, turns: int, first: str) -> dict[str, float]:
    """A child process, from its start to the answer of `initialize`."""
    taken = []
    for _ in range(turns):
        ours, theirs = os.pipe(), os.pipe()
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=ours[0],
            stdout=theirs[1],
            cwd=ROOT,
            env={**os.environ, "MEGAMCP_HEAP_MB": str(heap), "PYTHONPATH": str(ROOT)},
        )
        os.close(ours[0])
        os.close(theirs[1])
        try:
            await Conversation(ours[1], theirs[0]).ask("initialize", **INITIALIZE)
            taken.append(time.perf_counter() - began)
        finally:
            os.close(ours[1])
            os.close(theirs[0])
            await process.wait()
    return _spread(first, taken)


async def docker_command(image: str | None) -> list[str] | None:
    """`docker run` of the server, or None, with the reason said."""
    if image is None:
        say("docker: no --docker-image, so nothing is compared with it")
        return None
    with contextlib.suppress(OSError):
        process = await asyncio.create_subprocess_exec(
            "docker", "image", "inspect", image, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        if await process.wait() == 0:
            prefixes = {str(ROOT), sys.prefix, os.path.realpath(sys.base_prefix), str(Path(sys.executable).parent)}
            shown = [word for prefix in sorted(prefixes) for word in ("-v", f"{prefix}:{prefix}:ro")]
            environ = ["-e", "MEGAMCP_HEAP_MB", "-e", f"PYTHONPATH={ROOT}", "-w", str(ROOT)]
            run = ["docker", "run", "-i", "--rm", "--network", "none", *shown, *environ]
            return [*run, image, sys.executable, "-m", "benchmarks.heap_server"]
    say(f"docker: there is no engine here, or no image {image}, so nothing is compared with it")
    return None


async def measure(kinds: Sequence[Kind], heaps: Sequence[int], image: str | None, quick: bool) -> dict[str, float]:
    """All figures. A runtime that doesn't work here is said and left out."""
    turns, starts = (10, 2) if quick else (100, 5)
    figures: dict[str, float] = {}
    docker = await docker_command(image)
    with temporary_folder() as folder:
        async with keeper(folder) as client:
            reports = {found.kind: found for found in await client.reports()}
            for kind in kinds:
                if kind not in reports or not reports[kind].works:
                    say(f"{kind}: {reports[kind].reason if kind in reports else 'not in this version'}")
                    continue
                for heap in heaps:
                    say(f"{kind}: {heap} MB")
                    found = await Bench(client, spec_of(kind, heap)).measure(turns)
                    figures |= {f"{kind}_{heap}mb_{name}": value for name, value in found.items()}
                if kind is Kind.FORK:
                    say(f"{kind}: {CROWD} rollouts of {CROWD_HEAP} MB")
                    crowd = Bench(client, spec_of(kind, CROWD_HEAP))
                    figures["fork_hundred_pss_mb"] = await crowd.crowd(CROWD)
    for heap in heaps:
        say(f"cold start: {heap} MB")
        command = [sys.executable, "-m", "benchmarks.heap_server"]
        figures |= {f"cold_{heap}mb_{k}": v for k, v in (await cold(command, heap, starts, "start")).items()}
        if docker is not None:
            figures |= {f"docker_{heap}mb_{k}": v for k, v in (await cold(docker, heap, starts, "start")).items()}
    return figures


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument(
        "--runtime", type=Kind, choices=KEPT, action="append", help="all that work, where none is named"
    )
    parser.add_argument("--heap", type=int, action="append", help="megabytes; 25, 100 and 500 where none is named")
    parser.add_argument("--docker-image", help="compare with `docker run` in this image")
    options = parser.parse_args()
    kinds, heaps = options.runtime or KEPT, options.heap or HEAPS
    figures = asyncio.run(measure(kinds, heaps, options.docker_image, options.quick))
    report("sandbox", figures, [target for target in TARGETS if target.figure in figures])


if __name__ == "__main__":
    main()
