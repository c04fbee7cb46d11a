"""G4, G5 and G6 under fire: the gateway, tool servers and PostgreSQL are killed with -9 at random moments under load.

Each worker books entries, one after another, each with an idempotency key of its own, and repeats a call until it is
acknowledged; others do so on documents, with checkpoints and forks between. At the end every acknowledged entry is
there once, and nothing else is. CI runs one short storm; `make soak` lasts `SOAK_SECONDS`.
"""

import asyncio
import contextlib
import logging
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

log = logging.getLogger(__name__)
LEDGER = Path(__file__).parent.parent / "environments" / "ledger"
SHELF = LEDGER.parent / "shelf_server.py"
SHELF_TOML = """
name = "shelf"
[servers.shelf]
entry = "shelf_server:Shelf"
[servers.shelf.state]
kind = "document"
"""
STORM_S = float(os.environ.get("SOAK_SECONDS", "12"))
WORKERS = 6
KEEPERS = 3
"""Of documents."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Fortress:
    """A gateway process on a data folder, and the ways to kill parts of it."""

    folder: Path
    port: int
    workers: int
    process: asyncio.subprocess.Process | None = None
    kills: dict[str, int] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        shelf = self.folder / "shelf"
        if not shelf.exists():
            shelf.mkdir()
            (shelf / "environment.toml").write_text(SHELF_TOML)
            shutil.copy(SHELF, shelf)
        with (self.folder / "gateway.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "megamcp", "serve", "--port", str(self.port)),
                *("--data-dir", str(self.folder / "data"), "--workers", str(self.workers)),
                env={
                    **os.environ,
                    "MEGAMCP_ENVIRONMENTS": f'["{LEDGER}", "{shelf}"]',
                    "MEGAMCP_BUNDLED_ENVIRONMENTS": "false",
                    "MEGAMCP_REAP_INTERVAL_S": "1",
                    "MEGAMCP_CALL_TIMEOUT_S": "20",
                },
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def ready(self, patience_s: float = 60) -> None:
        async with aiohttp.ClientSession() as http:
            end = time.monotonic() + patience_s
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(f"{self.url}/readyz", timeout=aiohttp.ClientTimeout(2)) as answer:
                        if answer.status == 200:
                            return
                assert time.monotonic() < end, (self.folder / "gateway.log").read_text()[-4000:]
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
            await asyncio.wait_for(self.process.wait(), 60)

    def family(self) -> list[psutil.Process]:
        """Everything that runs on this data folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if str(self.folder) in words or str(self.folder) in str(process.environ().get("MEGAMCP_DATA_DIR", "")):
                    found.append(process)
        return found

    async def kill(self, victim: str) -> None:
        assert self.process is not None
        gateway = psutil.Process(self.process.pid)
        with contextlib.suppress(psutil.Error, OSError, IndexError):
            match victim:
                case "gateway":
                    gateway.kill()
                    await self.process.wait()
                    await self.start()
                case "worker":
                    workers = [p for p in gateway.children() if "megamcp.serve" in " ".join(p.cmdline())]
                    if not workers:
                        return
                    random.choice(workers).kill()
                case "tool server":
                    servers = [p for p in gateway.children(recursive=True) if "megamcp.sdk" in " ".join(p.cmdline())]
                    if not servers:
                        return
                    random.choice(servers).kill()
                case "postgres":
                    lock = next(self.folder.rglob("postmaster.pid"), None)
                    if lock is None:  # it is being started
                        return
                    os.kill(int(lock.read_text().split()[0]), signal.SIGKILL)
            self.kills[victim] = self.kills.get(victim, 0) + 1


@asynccontextmanager
async def fortress(folder: Path, workers: int) -> AsyncIterator[Fortress]:
    made = Fortress(folder, free_port(), workers)
    await made.start()
    try:
        await made.ready()
        yield made
    except BaseException:
        log.error("the gateway's log ends with\n%s", (folder / "gateway.log").read_text()[-6000:])
        raise
    finally:
        await made.stop()


async def request(http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
    """Repeat until it is answered with success. Only for what may be repeated."""
    end = time.monotonic() + 90
    last: object = None
    while time.monotonic() < end:
        try:
            async with http.request(method, path, json=body, timeout=aiohttp.ClientTimeout(30)) as answer:
                text = await answer.text()
                if answer.status < 300:
                    return await answer.json() if text else None
                last = text
                assert answer.status != 422, text
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            last = repr(error)
        await asyncio.sleep(0.05)
    raise AssertionError(f"no success in time for {method} {path}: {last}")


async def opened_shelf(http: aiohttp.ClientSession) -> str:
    opened = await request(http, "POST", "/v1/rollouts", {"environment": "shelf"})
    return str(opened["rollouts"][0]["id"])


@dataclass(slots=True)
class Shelf:
    """A rollout with a document that counts its calls, and what was acknowledged: so many calls, and the digest and the
    fork of each checkpoint."""

    http: aiohttp.ClientSession
    rollout: str
    count: int = 0
    points: list[tuple[str, str, int]] = field(default_factory=list)
    forks: list[tuple[str, int]] = field(default_factory=list)

    async def call(self, rollout: str, tool: str, once: str, **arguments: Any) -> Any:
        body = {"tool": tool, "arguments": arguments, "idempotency_key": once}
        result = await request(self.http, "POST", f"/v1/rollouts/{rollout}/call", body)
        assert not result.get("isError"), result
        return result["structuredContent"]

    async def put(self, rollout: str, number: int) -> None:
        """The call of that number: any that was lost or done twice shows in what it gives."""
        given = await self.call(rollout, "put", f"put {number}", key=f"k{number % 50}", value=str(number) * 40)
        assert given == {"result": number}

    async def work(self, stormed: asyncio.Event) -> None:
        while not stormed.is_set() or not self.forks:
            await self.put(self.rollout, self.count + 1)
            self.count += 1
            if self.count % 5 == 0:
                made = await request(self.http, "POST", f"/v1/rollouts/{self.rollout}/checkpoints", {})
                self.points.append((made["id"], made["digest"], self.count))
                (fork,) = (await request(self.http, "POST", f"/v1/checkpoints/{made['id']}/fork", {}))["rollouts"]
                await self.put(fork["id"], self.count + 1)
                self.forks.append((fork["id"], self.count + 1))

    async def holds(self) -> None:
        last = len(self.points) - 1
        for checkpoint, digest, count in (self.points[0], self.points[last // 2], self.points[last]):
            (fork,) = (await request(self.http, "POST", f"/v1/checkpoints/{checkpoint}/fork", {}))["rollouts"]
            assert (await request(self.http, "GET", f"/v1/rollouts/{fork['id']}/digest"))["digest"] == digest
            await self.agrees(fork["id"], count)
        for rollout, count in (self.forks[0], self.forks[-1], (self.rollout, self.count)):
            await self.agrees(rollout, count)

    async def agrees(self, rollout: str, count: int) -> None:
        """It holds what so many calls make, and has a row for each that says so."""
        things = {f"k{number % 50}": str(number) * 40 for number in range(1, count + 1)}
        assert await self.call(rollout, "all", "all") == {"things": {"first": "seeded", **things}, "count": count}
        after, done = 0, 0
        while after is not None:
            page = await request(self.http, "GET", f"/v1/rollouts/{rollout}/events?after={after}&limit=1000")
            calls = [event for event in page["events"] if event["kind"] == "call" and event["tool"] == "put"]
            done += sum(call["state"] == "done" and not call["is_error"] for call in calls)
            after = page["next_after"]
        assert done == count


@pytest.mark.e2e
@pytest.mark.timeout(0)
@pytest.mark.parametrize("workers", [1, 2], ids=["one worker", "two workers"])
async def test_no_acknowledged_call_is_lost_and_none_is_done_twice(scratch_folder: Path, workers: int) -> None:
    folder = scratch_folder / f"kill-{workers}"
    folder.mkdir()
    folder.chmod(0o755)
    async with fortress(folder, workers) as gateway, aiohttp.ClientSession(gateway.url) as http:
        opened = await request(http, "POST", "/v1/rollouts", {"environment": "ledger", "count": WORKERS})
        rollouts = [rollout["id"] for rollout in opened["rollouts"]]
        acknowledged: dict[str, list[tuple[str, int]]] = {rollout: [] for rollout in rollouts}
        checkpoints: list[tuple[str, str, int]] = []
        end = time.monotonic() + STORM_S
        stormed = asyncio.Event()

        async def work(rollout: str) -> None:
            number = 0
            while not stormed.is_set() or number < 4:
                number += 1
                key = f"{rollout}-{number}"
                result = await request(
                    http,
                    "POST",
                    f"/v1/rollouts/{rollout}/call",
                    {
                        "tool": "book",
                        "arguments": {"account_id": 1 + number % 10, "amount": 1, "pause": 0.002},
                        "idempotency_key": key,
                    },
                )
                if result.get("isError"):
                    raise AssertionError(result)
                acknowledged[rollout].append((key, result["structuredContent"]["id"]))
                if number % 25 == 0:
                    made = await request(http, "POST", f"/v1/rollouts/{rollout}/checkpoints", {})
                    checkpoints.append((made["id"], made["digest"], number))

        async def storm() -> None:
            dice = random.Random(workers)
            victims = ["gateway", "tool server", "tool server", "postgres"] + (["worker"] * 2 if workers > 1 else [])
            while time.monotonic() < end - 2 or sum(gateway.kills.values()) < 5:
                await asyncio.sleep(dice.uniform(0.5, 3.5))
                await gateway.kill(dice.choice(victims))
            await asyncio.sleep(2)
            stormed.set()

        shelves = [Shelf(http, await opened_shelf(http)) for _ in range(KEEPERS)]
        await asyncio.gather(storm(), *map(work, rollouts), *(shelf.work(stormed) for shelf in shelves))
        await gateway.ready()
        assert sum(gateway.kills.values()) >= 5, gateway.kills

        for rollout, done in acknowledged.items():
            assert len(done) > 3
            # Numbers come from the rollout's own sequence: 1, 2, 3 … means each call was done once, and no other.
            assert [number for _, number in done] == list(range(1, len(done) + 1))
            sums = await request(http, "POST", f"/v1/rollouts/{rollout}/call", {"tool": "sums", "arguments": {}})
            assert sums["structuredContent"] == {"balances": len(done), "entries": len(done)}
            await journal_agrees(http, rollout, dict(done))
        for checkpoint, digest, number in checkpoints:
            (fork,) = (await request(http, "POST", f"/v1/checkpoints/{checkpoint}/fork", {}))["rollouts"]
            assert (await request(http, "GET", f"/v1/rollouts/{fork['id']}/digest"))["digest"] == digest
            sums = await request(http, "POST", f"/v1/rollouts/{fork['id']}/call", {"tool": "sums", "arguments": {}})
            assert sums["structuredContent"]["entries"] == number
        for shelf in shelves:
            await shelf.holds()
        log.info("calls %d, kills %s", sum(map(len, acknowledged.values())), gateway.kills)
    await asyncio.sleep(0.5)
    assert gateway.family() == [], "something outlived the gateway"


async def journal_agrees(http: aiohttp.ClientSession, rollout: str, done: dict[str, int]) -> None:
    """Every acknowledged call has exactly one row that says so, and no row is left running."""
    after, events = 0, []
    while after is not None:
        page = await request(http, "GET", f"/v1/rollouts/{rollout}/events?after={after}&limit=1000")
        events += page["events"]
        after = page["next_after"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    calls = [event for event in events if event["kind"] == "call" and event["tool"] == "book"]
    assert not [call for call in calls if call["state"] == "running"]
    booked = [call["result"]["structuredContent"]["id"] for call in calls if call["state"] == "done"]
    assert sorted(booked) == sorted(done.values())
