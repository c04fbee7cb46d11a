"""Gateways and keepers of sandboxes are killed with -9, at each failpoint and at random: nothing is lost that was
promised, nothing is run twice, and what lives is what the journal says.

`SIEGE_ONLY="operation,point,way;…"` runs some of the cases.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import psutil
import pytest

from megamcp.outages import DRIVER
from megamcp.sandboxed.own import socket_path
from sandboxes.client import Client
from tests.e2e.siege import Keep
from tests.e2e.test_kill import free_port
from tests.e2e.test_soak import superuser

log = logging.getLogger(__name__)
MODULES = Path(__file__).parent.parent / "environments"
TOML = """
name = "memo"
[servers.memo]
entry = "memo_server:server"
[servers.memo.state]
kind = "process"
"""
REACHED_S = 60.0


class Refused(Exception):
    """An answer that repeating does not change."""

    def __init__(self, code: str, problem: dict[str, Any]) -> None:
        super().__init__(code)
        self.code = code
        self.problem = problem


@dataclass
class House:
    """A gateway with sandboxes, and rollouts with what they should hold."""

    castle: Keep
    http: aiohttp.ClientSession
    held: dict[str, dict[str, str]] = field(default_factory=dict)
    frozen: dict[str, dict[str, str]] = field(default_factory=dict)
    calls: int = 0

    @property
    def state(self) -> Path:
        return self.castle.folder / "data" / "sandboxes"

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """Repeat until it is answered, as a client would. Raises Refused."""
        end, last = time.monotonic() + 60, ""
        while time.monotonic() < end:
            await self.castle.raise_again()
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with self.http.request(method, path, json=body, timeout=aiohttp.ClientTimeout(30)) as answer:
                    last = await answer.text()
                    if answer.status < 300:
                        return json.loads(last) if last else None
                    if answer.status in (404, 409, 410, 422):
                        raise Refused(json.loads(last)["code"], json.loads(last))
            await asyncio.sleep(0.05)
        raise AssertionError(f"no answer in time for {method} {path}: {last}")

    async def opened(self) -> str:
        made = await self.request("POST", "/v1/rollouts", {"environment": "memo"})
        rollout: str = made["rollouts"][0]["id"]
        self.held[rollout] = {}
        return rollout

    async def call(self, rollout: str, tool: str, once: str | None = None, **arguments: Any) -> Any:
        self.calls += 1
        body = {"tool": tool, "arguments": arguments, "idempotency_key": once or f"call {self.calls}"}
        result = await self.request("POST", f"/v1/rollouts/{rollout}/call", body)
        assert not result.get("isError"), result
        return result["structuredContent"]

    async def put(self, rollout: str, key: str = "k") -> None:
        value = f"v{self.calls}"
        await self.call(rollout, "put", key=key, value=value)
        self.held[rollout][key] = value

    async def holds(self, *rollouts: str) -> None:
        for rollout in rollouts:
            assert await self.call(rollout, "items") == self.held[rollout], rollout

    async def begun(self) -> str:
        rollout = await self.opened()
        await self.put(rollout)
        return rollout

    async def point(self, rollout: str) -> str:
        made = await self.request("POST", f"/v1/rollouts/{rollout}/checkpoints", {})
        self.frozen[made["id"]] = dict(self.held[rollout])
        return str(made["id"])

    async def branch(self, checkpoint: str) -> str:
        made = await self.request("POST", f"/v1/checkpoints/{checkpoint}/fork", {})
        rollout: str = made["rollouts"][0]["id"]
        self.held[rollout] = dict(self.frozen[checkpoint])
        return rollout

    async def back(self, rollout: str, checkpoint: str) -> None:
        await self.request("POST", f"/v1/rollouts/{rollout}/rollback", {"checkpoint": checkpoint})
        self.held[rollout] = dict(self.frozen[checkpoint])

    async def close(self, rollout: str) -> None:
        with contextlib.suppress(Refused):
            await self.request("DELETE", f"/v1/rollouts/{rollout}")
        self.held.pop(rollout, None)

    async def ask(self, query: str, *arguments: Any) -> Any:
        connection = await asyncpg.connect(superuser(self.castle.folder / "data" / "postgres"))
        try:
            return await connection.fetchval(query, *arguments)
        finally:
            await connection.close()

    async def until(self, query: str, *arguments: Any) -> None:
        """Waits until a question to the control plane is answered with true."""
        end = time.monotonic() + 30
        while True:
            await self.castle.raise_again()
            with contextlib.suppress(*DRIVER):
                if await self.ask(query, *arguments):
                    return
            assert time.monotonic() < end, query
            await asyncio.sleep(0.05)

    def keeper(self) -> psutil.Process:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "sandboxes" in words and str(self.state) in words:
                    return process
        raise AssertionError("no keeper runs")

    async def is_as_the_journal_says(self) -> None:
        """Rows, the keeper's inventory, processes, mounts and folders name the same sandboxes and images."""
        client = Client(str(socket_path(self.state)))
        end = time.monotonic() + 30
        try:
            while True:
                found = await self._difference(client)
                if found is None:
                    return
                assert time.monotonic() < end, found
                await asyncio.sleep(0.1)
        finally:
            await client.aclose()

    async def _difference(self, client: Client) -> str | None:
        named = "select coalesce(array_agg(name), '{}') from megamcp."
        running = set(await self.ask(f"{named}sandboxes where status = 'ready'"))
        others = set(await self.ask(f"{named}sandboxes where status not in ('ready', 'parked', 'lost')"))
        images = set(await self.ask(f"{named}images where status = 'ready'"))
        unfinished = set(await self.ask(f"{named}images where status not in ('ready', 'lost')"))
        inventory = await client.inventory()
        there = {info.sandbox for info in inventory.sandboxes}
        if others or unfinished:
            return f"unfinished: {others | unfinished}"
        if there != running or set(inventory.images) != images:
            return f"keeper: {there ^ running}, {set(inventory.images) ^ images}"
        folders = {path.name for path in self.state.glob("templates/*/run/*")}
        if folders != running:
            return f"folders: {folders ^ running}"
        if left := {path.name for path in self.state.glob("templates/*/images/*")} - images:
            return f"layers of images: {left}"  # an image without files of its own has none
        zygotes = len([path for path in self.state.glob("templates/*") if path.is_dir()])
        drivers = sum(_is_driver(process) for process in self.keeper().children(recursive=True))
        if drivers != zygotes + len(running) + len(images):
            return f"{drivers} processes of {zygotes} templates, {len(running)} sandboxes, {len(images)} images"
        mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(self.state) in line]
        return f"mounts: {mounts}" if mounts else None

    async def leaves_nothing(self) -> None:
        """When every rollout and checkpoint is gone, so is every sandbox and image."""
        while page := (await self.request("GET", "/v1/rollouts?status=open"))["rollouts"]:
            for rollout in page:
                await self.close(rollout["id"])
        await self.ask("update megamcp.checkpoints set expires_at = now() - interval '1 s' where released_at is null")
        for table in ("sandboxes", "images", "image_points"):
            await self.until(f"select not exists (select 1 from megamcp.{table})")
        await self.is_as_the_journal_says()


def _is_driver(process: psutil.Process) -> bool:
    """A zygote, or what was forked off it."""
    with contextlib.suppress(psutil.Error):
        return "sandboxes.forkserver.driver" in process.cmdline()
    return False


Operation = Callable[[House], AsyncIterator[None]]


async def first_call(house: House) -> AsyncIterator[None]:
    rollout = await house.opened()
    yield
    await house.put(rollout)
    await house.holds(rollout)


async def call_of_a_fork(house: House) -> AsyncIterator[None]:
    rollout = await house.begun()
    fork = await house.branch(await house.point(rollout))
    yield
    await house.put(fork, "fork")
    await house.holds(fork, rollout)


async def checkpoint(house: House) -> AsyncIterator[None]:
    rollout = await house.begun()
    yield
    point = await house.point(rollout)
    await house.put(rollout, "later")
    fork = await house.branch(point)
    await house.holds(fork, rollout)


async def rollback(house: House) -> AsyncIterator[None]:
    rollout = await house.begun()
    point = await house.point(rollout)
    await house.put(rollout, "later")
    yield
    await house.back(rollout, point)
    await house.holds(rollout)


async def release(house: House) -> AsyncIterator[None]:
    rollout = await house.begun()
    yield
    await house.close(rollout)
    await house.until("select not exists (select 1 from megamcp.sandboxes where rollout = $1)", rollout)


async def last_checkpoint(house: House) -> AsyncIterator[None]:
    rollout = await house.begun()
    point = await house.point(rollout)
    image = await house.ask("select image from megamcp.image_points where checkpoint = $1", point)
    await house.close(rollout)
    yield
    await house.request("DELETE", f"/v1/checkpoints/{point}")
    await house.until("select not exists (select 1 from megamcp.images where name = $1)", image)


PASSES: dict[Operation, tuple[str, ...]] = {
    first_call: ("sandbox.planned", "sandbox.started"),
    call_of_a_fork: ("sandbox.planned", "sandbox.started"),
    checkpoint: ("image.planned", "image.frozen"),
    rollback: ("sandbox.condemned", "sandbox.removed"),
    release: ("sandbox.condemned", "sandbox.removed"),
    last_checkpoint: ("image.dropped",),
}
PARKING = ("park.frozen", "park.booked")
"""What only a runtime passes whose images are on disk."""
WAYS = ("kill", "error", "control")


@asynccontextmanager
async def house(folder: Path, toml: str = TOML, **options: str) -> AsyncIterator[House]:
    """A gateway that is stopped at the end, with nothing left of it."""
    folder.mkdir(mode=0o755)
    memo = folder / "memo"
    memo.mkdir()
    (memo / "environment.toml").write_text(toml)
    shutil.copy(MODULES / "memo_server.py", memo)
    castle = Keep(
        folder,
        free_port(),
        1,
        options={
            "MEGAMCP_ENVIRONMENTS": json.dumps([str(memo)]),
            "MEGAMCP_SPARE_DATABASES": "0",
            "MEGAMCP_QUIESCE_TIMEOUT_S": "3",
            **options,
        },
    )
    castle.failpoint = f"@{castle.file}"
    await castle.start()
    try:
        await castle.ready()
        async with aiohttp.ClientSession(castle.url) as http:
            made = House(castle, http)
            yield made
            await made.leaves_nothing()
    except BaseException:
        log.error("the gateway's log ends with\n%s", (folder / "gateway.log").read_text()[-8000:])
        raise
    finally:
        await castle.stop()
    await asyncio.sleep(0.5)
    assert castle.family() == [], "something outlived the gateway"


def cases() -> list[tuple[Operation, str, str]]:
    """Operation, point and way: a kill at every second point and another way at the others; with `SOAK_SECONDS` all."""
    every = [(operation, point) for operation, points in PASSES.items() for point in points]
    found = [
        (operation, point, way)
        for turn, (operation, point) in enumerate(every)
        for number, way in enumerate(WAYS)
        if "SOAK_SECONDS" in os.environ or number == (0, 1, 0, 2)[turn % 4]
    ]
    if only := os.environ.get("SIEGE_ONLY"):
        return [case for word in only.split(";") for case in found if f"{case[0].__name__},{case[1]},{case[2]}" == word]
    return found


async def cut(house: House, operation: Operation, point: str, way: str) -> None:
    """Runs an operation that is cut off once at a point. Fails where the operation doesn't pass it."""
    castle = house.castle
    castle.disarm()
    steps = aiter(operation(house))
    await anext(steps)
    castle.arm(point, way)
    rest = asyncio.ensure_future(anext(steps, None))
    try:
        end = time.monotonic() + REACHED_S
        while not castle.reached.exists():
            if rest.done():
                rest.result()
            assert time.monotonic() < end, f"{operation.__name__} does not pass {point}"
            await asyncio.sleep(0.005)
        if way == "control":
            castle.kill_cluster(way)
        elif way == "kill":
            assert castle.process is not None
            await asyncio.wait_for(castle.process.wait(), 60)
        castle.disarm()
        await castle.raise_again()
        await rest
    finally:
        rest.cancel()
        castle.disarm()


@pytest.mark.e2e
@pytest.mark.timeout(0)
async def test_a_step_of_a_sandbox_that_is_cut_off_is_taken_up(scratch_folder: Path) -> None:
    async with house(scratch_folder / "boxes") as made:
        bystander = await made.begun()
        failed: list[Exception] = []
        for operation, point, way in cases():
            began = time.monotonic()
            try:
                await cut(made, operation, point, way)
                await made.holds(bystander)
                await made.is_as_the_journal_says()
            except Exception as error:
                error.add_note(f"{operation.__name__}, {point}, {way}")
                failed.append(error)
                if len(failed) == 3:
                    break
            log.info("%s, %s, %s: %.2f s", operation.__name__, point, way, time.monotonic() - began)
        if failed:
            raise ExceptionGroup("cases that failed", failed)


@pytest.mark.e2e
@pytest.mark.timeout(0)
@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_gateway_that_is_killed_or_stopped_leaves_its_sandboxes_to_the_next(
    scratch_folder: Path, workers: str
) -> None:
    async with house(scratch_folder / f"killed-{workers}", MEGAMCP_WORKERS=workers) as made:
        rollouts = [await made.begun() for _ in range(4)]
        point = await made.point(rollouts[0])
        busy, cut_off = rollouts[1], rollouts[2]
        # These two are under way when the gateway dies: one in a moment's time, one for long.
        bodies = [
            {"tool": "put", "arguments": {"key": "cut", "value": rollout, "pause": 1.0}, "idempotency_key": "cut"}
            for rollout in (busy, cut_off)
        ]

        async def send(rollout: str, body: Any) -> None:
            async with made.http.post(f"/v1/rollouts/{rollout}/call", json=body) as answer:
                await answer.read()

        calls = [
            asyncio.create_task(send(rollout, body)) for rollout, body in zip((busy, cut_off), bodies, strict=True)
        ]
        await made.until("select count(*) = 2 from megamcp.events where state = 'running'")
        assert made.castle.process is not None
        gateway = psutil.Process(made.castle.process.pid)
        if workers == "1":
            gateway.kill()
            await made.castle.process.wait()
        else:
            for child in gateway.children():
                if "megamcp.serve" in " ".join(child.cmdline()):
                    child.kill()
        await asyncio.gather(*calls, return_exceptions=True)
        await made.castle.raise_again()
        await made.castle.ready()
        await made.holds(rollouts[0], rollouts[3])
        for rollout, body in zip((busy, cut_off), bodies, strict=True):
            for _ in range(2):
                with pytest.raises(Refused) as refused:
                    await made.request("POST", f"/v1/rollouts/{rollout}/call", body)
                assert refused.value.code == "outcome_unknown"
            # It was run at most once, whatever became of it, and what was acknowledged before is there.
            found = await made.call(rollout, "items")
            assert found in (made.held[rollout], {**made.held[rollout], "cut": rollout})
            made.held[rollout] = found
        await made.put(busy, "after")
        await made.holds(busy)
        fork = await made.branch(point)
        await made.holds(fork)
        await made.is_as_the_journal_says()
        cut = asyncio.create_task(send(busy, {**bodies[0], "idempotency_key": "stopped"}))
        await made.until("select count(*) = 1 from megamcp.events where state = 'running'")
        await made.castle.stop()
        await asyncio.gather(cut, return_exceptions=True)
        await made.castle.raise_again()
        await made.castle.ready()
        made.held[busy]["cut"] = busy
        await made.holds(*rollouts, fork, await made.branch(point))
        await made.is_as_the_journal_says()


@pytest.mark.e2e
@pytest.mark.timeout(0)
async def test_a_keeper_that_is_killed_loses_what_was_in_memory_and_says_so(scratch_folder: Path) -> None:
    async with house(scratch_folder / "keeper", MEGAMCP_WORKERS="2") as made:
        fresh = await made.opened()
        called, pointed = await made.begun(), await made.begun()
        point = await made.point(pointed)
        fork = await made.branch(point)
        await made.holds(fork)
        made.keeper().kill()
        # As its environment starts: made again, and nobody notices.
        await made.holds(fresh)
        for rollout in (called, fork):
            for _ in range(2):
                with pytest.raises(Refused) as refused:
                    await made.call(rollout, "items")
                assert refused.value.code == "state_lost"
            events = (await made.request("GET", f"/v1/rollouts/{rollout}/events?limit=1000"))["events"]
            assert [event["kind"] for event in events].count("state_lost") == 1
        # Nothing was called since the checkpoint, but what that keeps was in memory too.
        with pytest.raises(Refused) as refused:
            await made.call(pointed, "items")
        assert refused.value.code == "state_lost"
        for way_back in (made.back(pointed, point), made.back(fork, point), made.branch(point)):
            with pytest.raises(Refused) as refused:
                await way_back
            assert refused.value.code == "state_lost"
            assert "open a new rollout" in refused.value.problem["hint"]
        again = await made.begun()
        await made.holds(again)
        with pytest.raises(Refused):
            await made.call(await made.branch(point), "items")
        await made.is_as_the_journal_says()


@pytest.mark.e2e
@pytest.mark.timeout(0)
async def test_a_storm_of_kills_runs_no_call_twice(scratch_folder: Path) -> None:
    """Gateways die while calls run. Each call's key comes back as done, once, or as unknown."""
    async with house(scratch_folder / "storm", MEGAMCP_WORKERS="2") as made:
        rollouts = [await made.begun() for _ in range(3)]
        end = time.monotonic() + float(os.environ.get("SOAK_SECONDS", "8"))
        unknown: dict[str, set[str]] = {rollout: set() for rollout in rollouts}

        async def work(rollout: str) -> None:
            number = 0
            while time.monotonic() < end:
                number += 1
                key = f"k{number}"
                try:
                    count = await made.call(rollout, "put", f"once {number}", key=key, value="v", pause=0.01)
                    made.held[rollout][key] = "v"
                    assert count["result"] >= len(made.held[rollout])
                except Refused as refused:
                    if refused.code != "outcome_unknown":
                        raise
                    unknown[rollout].add(key)

        async def storm() -> None:
            while time.monotonic() < end - 3:
                await asyncio.sleep(1.5)
                assert made.castle.process is not None
                gateway = psutil.Process(made.castle.process.pid)
                workers = [child for child in gateway.children() if "megamcp.serve" in " ".join(child.cmdline())]
                if workers:
                    workers[0].send_signal(signal.SIGKILL)

        await asyncio.gather(storm(), *map(work, rollouts))
        for rollout in rollouts:
            found = await made.call(rollout, "items")
            assert len(made.held[rollout]) > 5
            assert made.held[rollout].items() <= found.items()
            assert set(found) - set(made.held[rollout]) <= unknown[rollout]
        await made.is_as_the_journal_says()
