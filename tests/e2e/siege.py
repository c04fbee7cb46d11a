"""The operations that pass the gateway's failpoints, and a gateway that is cut off at them.

Each operation is an async generator: what comes before its `yield` prepares, what comes after it passes the points, and
repeats its requests until they are answered, as a client would. At its end it has compared what rollouts hold.
"""

import asyncio
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg

from megamcp import outages
from tests.e2e.test_soak import KINDS, PAIR, Castle, Held, Soak, superuser

REACHED_S = 60.0
QUOTA = 40 << 20
WAYS = ("kill", "error", "state", "control")
"""How a step is cut off: SIGKILL of the gateway, an exception, SIGKILL of the state or the control cluster."""


@dataclass
class Keep(Castle):
    """A gateway whose failpoint is named in a file, so that it is told while it runs."""

    _raising: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def file(self) -> Path:
        return self.folder / "failpoint"

    @property
    def reached(self) -> Path:
        return self.folder / "failpoint.reached"

    def arm(self, point: str, way: str) -> None:
        place, _, turn = point.partition("@")
        action = way if way in ("kill", "error") else "hold"
        self.file.write_text(f"{place}={action}" + (f"@{turn}" if turn else ""))

    def disarm(self) -> None:
        self.file.unlink(missing_ok=True)
        self.reached.unlink(missing_ok=True)

    async def raise_again(self) -> None:
        async with self._raising:
            assert self.process is not None
            if self.process.returncode is not None:
                await self.start()

    def kill_cluster(self, which: str) -> None:
        """The postmaster that serves states, or the one that serves the control plane."""
        name = {"state": "state", "control": "postgres"}[which]
        lock = self.folder / "data" / name / "cluster" / "postmaster.pid"
        os.kill(int(lock.read_text().split()[0]), signal.SIGKILL)
        if which == "state":
            self.kills["state cluster"] = self.kills.get("state cluster", 0) + 1


@dataclass
class Siege(Soak):
    """Rollouts with what they should hold, and every value that was ever acknowledged on each one's path."""

    told: dict[str, list[str]] = field(default_factory=dict)
    told_at: dict[str, list[str]] = field(default_factory=dict)
    _numbers: int = 0

    async def opened(self, environment: str = "pair") -> str:
        made = await self.request("POST", "/v1/rollouts", {"environment": environment})
        rollout: str = made["rollouts"][0]["id"]
        self.rollouts[rollout] = {kind: Held() for kind in KINDS}
        self.told[rollout] = []
        return rollout

    async def write(self, rollout: str, kind: str = "own", key: str = "k", value: str | None = None) -> None:
        self._numbers += 1
        value = value or f"v{self._numbers}"
        held = self.rollouts[rollout][kind]
        self._line(held, kind, await self.call(rollout, kind, "put", key=key, value=value), key, value)
        held.items[key] = value
        self.told[rollout].append(f"{kind} {value}")

    async def begun(self) -> str:
        """A rollout that has a database."""
        rollout = await self.opened()
        await self.write(rollout)
        await self.write(rollout, "shared")
        return rollout

    async def point(self, rollout: str) -> str:
        made = await self.request("POST", f"/v1/rollouts/{rollout}/checkpoints", {})
        self.frozen[made["id"]] = (rollout, copy.deepcopy(self.rollouts[rollout]), made["digest"])
        self.told_at[made["id"]] = list(self.told[rollout])
        return str(made["id"])

    async def branch(self, checkpoint: str) -> str:
        made = await self.request("POST", f"/v1/checkpoints/{checkpoint}/fork", {})
        rollout: str = made["rollouts"][0]["id"]
        self.rollouts[rollout] = copy.deepcopy(self.frozen[checkpoint][1])
        self.told[rollout] = list(self.told_at[checkpoint])
        return rollout

    async def back(self, rollout: str, checkpoint: str) -> None:
        await self.request("POST", f"/v1/rollouts/{rollout}/rollback", {"checkpoint": checkpoint})
        self.rollouts[rollout] = copy.deepcopy(self.frozen[checkpoint][1])

    async def holds(self, rollout: str) -> None:
        """G1, G3, G4, G5: the rows are what they should be, the journal has each acknowledged call once."""
        await self.read(rollout)
        events = (await self.request("GET", f"/v1/rollouts/{rollout}/events?limit=1000"))["events"]
        calls = [
            f"{event['server']} {event['arguments']['value']}"
            for event in events
            if event["kind"] == "call" and event["tool"] == "put" and event["state"] == "done" and not event["is_error"]
        ]
        assert calls == self.told[rollout], (rollout, calls, self.told[rollout])

    async def reads_back(self, checkpoint: str) -> None:
        """A checkpoint's database says the same as ever, to readers and to a fork."""
        rollout, state, _ = self.frozen[checkpoint]
        body = {"server": "own", "sql": "select key, value from item", "at": checkpoint}
        found = await self.request("POST", f"/v1/rollouts/{rollout}/query", body)
        assert dict(found["rows"]) == state["own"].items

    @contextlib.asynccontextmanager
    async def control(self) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(superuser(self.castle.folder / "data" / "postgres"))
        try:
            yield connection
        finally:
            await connection.close()

    async def until(self, question: str, *arguments: Any) -> None:
        """Waits until a question to the control plane is answered with true."""
        end = time.monotonic() + 60
        while True:
            await self.castle.raise_again()
            with contextlib.suppress(*outages.DRIVER):
                async with self.control() as connection:
                    if await connection.fetchval(question, *arguments):
                        return
            assert time.monotonic() < end, question
            await asyncio.sleep(0.05)


Operation = Callable[[Siege], AsyncIterator[None]]


async def load(siege: Siege, server: str) -> AsyncIterator[None]:
    siege._numbers += 1
    name = f"pair-{server}-{siege._numbers}"
    folder = siege.castle.folder / name
    shutil.copytree(PAIR, folder)
    text = (folder / "environment.toml").read_text()
    keep = {"own": ("[servers.shared]", "[servers.own]"), "shared": ("[servers.own]", None)}[server]
    start = text.index(keep[0])
    text = text[:start] + (text[text.index(keep[1]) :] if keep[1] else "")
    (folder / "environment.toml").write_text(text.replace('name = "pair"', f'name = "{name}"'))
    with (folder / "seed.sql").open("a") as seed:
        seed.write(f"copy item (key, value) from stdin;\ncopied\t{name}\n\\.\n")
    yield
    await siege.request("POST", "/v1/environments", {"path": str(folder)})
    made = await siege.request("POST", "/v1/rollouts", {"environment": name})
    body = {"server": server, "sql": "select key, value from item order by key"}
    found = await siege.request("POST", f"/v1/rollouts/{made['rollouts'][0]['id']}/query", body)
    assert len(found["rows"]) == 6, found
    assert ["copied", name] in found["rows"], found


def load_own(siege: Siege) -> AsyncIterator[None]:
    return load(siege, "own")


def load_shared(siege: Siege) -> AsyncIterator[None]:
    return load(siege, "shared")


async def first_call(siege: Siege) -> AsyncIterator[None]:
    rollout = await siege.opened()
    yield
    await siege.write(rollout)
    await siege.holds(rollout)


async def fork_at_head(siege: Siege) -> AsyncIterator[None]:
    rollout = await siege.begun()
    point = await siege.point(rollout)
    yield
    fork = await siege.branch(point)
    await siege.write(fork)
    await siege.holds(fork)
    await siege.holds(rollout)


async def fork_behind_head(siege: Siege) -> AsyncIterator[None]:
    rollout = await siege.begun()
    point = await siege.point(rollout)
    await siege.write(rollout, key="late")
    await siege.point(rollout)
    yield
    fork = await siege.branch(point)
    await siege.holds(fork)
    await siege.write(fork)
    await siege.holds(fork)
    await siege.holds(rollout)


async def fork_over_ddl(siege: Siege) -> AsyncIterator[None]:
    rollout = await siege.begun()
    point = await siege.point(rollout)
    await siege.reshape(rollout)
    await siege.write(rollout)
    yield
    fork = await siege.branch(point)
    await siege.holds(fork)
    await siege.write(fork)
    await siege.holds(fork)
    await siege.holds(rollout)


async def checkpoint_over_ddl(siege: Siege) -> AsyncIterator[None]:
    rollout = await siege.begun()
    await siege.reshape(rollout)
    await siege.write(rollout)
    yield
    point = await siege.point(rollout)
    await siege.write(rollout, key="late")
    await siege.holds(rollout)
    await siege.reads_back(point)


async def rollback_in_place(siege: Siege) -> AsyncIterator[None]:
    rollout = await siege.begun()
    point = await siege.point(rollout)
    await siege.write(rollout, key="late")
    yield
    await siege.back(rollout, point)
    await siege.holds(rollout)
    await siege.write(rollout)
    await siege.holds(rollout)


async def rollback_over_ddl(siege: Siege) -> AsyncIterator[None]:
    rollout = await siege.begun()
    point = await siege.point(rollout)
    await siege.reshape(rollout)
    await siege.clear(rollout)
    await siege.write(rollout)
    yield
    await siege.back(rollout, point)
    await siege.holds(rollout)
    await siege.write(rollout)
    await siege.holds(rollout)
    await siege.reads_back(point)


async def release(siege: Siege) -> AsyncIterator[None]:
    rollout = await siege.begun()
    yield
    await siege.close(rollout)
    await siege.until("select not exists (select 1 from megamcp.databases where rollout = $1)", rollout)


async def view(siege: Siege) -> AsyncIterator[None]:
    rollout = await siege.begun()
    point = await siege.point(rollout)
    await siege.write(rollout)
    yield
    await siege.reads_back(point)
    await siege.holds(rollout)


async def quota(siege: Siege) -> AsyncIterator[None]:
    rollout = await siege.begun()
    point = await siege.point(rollout)
    for number in range(25):
        noise = random.Random(number).randbytes(480_000).hex()  # compresses to a half
        await siege.write(rollout, key=f"big{number}", value=noise)
    async with siege.control() as connection:
        await connection.execute(
            "update megamcp.databases set measured_at = now() - interval '1 hour' where rollout = $1", rollout
        )
    yield
    await siege.until("select status = 'full' from megamcp.databases where rollout = $1", rollout)
    await siege.back(rollout, point)
    await siege.holds(rollout)


async def spare(siege: Siege) -> AsyncIterator[None]:
    """The gateway keeps one spare here; taking it has another one made."""
    ready = "select exists (select 1 from megamcp.databases where kind = 'spare' and status = 'ready')"
    await siege.begun()
    await siege.until(ready)
    rollout = await siege.opened()
    yield
    await siege.write(rollout)
    await siege.until(ready)
    other = await siege.begun()
    await siege.holds(other)
    await siege.holds(rollout)


SHORT = """select cardinality(c.chain) <= 3 and not exists (select 1 from megamcp.replaced_chains o
      join megamcp.rollouts r on r.checkpoint = o.checkpoint and r.layers = o.layers where o.checkpoint = c.id)
    from megamcp.checkpoints c where c.id = $1"""
"""Whether a checkpoint's chain was squashed and its rollouts were moved."""


async def _long_line(siege: Siege, turns: int) -> tuple[str, list[str]]:
    """A rollout with a checkpoint after each write, and those checkpoints."""
    rollout = await siege.opened()
    points = []
    for turn in range(turns):
        await siege.write(rollout, "shared", key=f"k{turn % 3}")
        points.append(await siege.point(rollout))
    return rollout, points


async def _is_whole(siege: Siege, rollout: str, points: list[str]) -> None:
    """No layer is lost: each checkpoint has its digest, its rows and its forks."""
    for point in points:
        found = await siege.request("GET", f"/v1/rollouts/{rollout}/digest?at={point}")
        assert found["digest"] == siege.frozen[point][2], point
        fork = await siege.branch(point)
        await siege.holds(fork)
        await siege.close(fork)
    await siege.holds(rollout)


async def squash(siege: Siege) -> AsyncIterator[None]:
    """The gateway squashes chains of more than three layers by itself; a dirty head has to be moved with it."""
    rollout, points = await _long_line(siege, 3)
    yield
    for turn in range(4):
        await siege.write(rollout, "shared", key=f"k{turn % 3}")
        points.append(await siege.point(rollout))
        await siege.write(rollout, "shared", key="dirty")
    await siege.until(SHORT, points[-1])
    await _is_whole(siege, rollout, points)
    await siege.write(rollout, "shared")
    await siege.holds(rollout)


async def sweep(siege: Siege) -> AsyncIterator[None]:
    """Layers that no checkpoint and no rollout stands on any more go; the others stay."""
    rollout, points = await _long_line(siege, 7)
    await siege.until(SHORT, points[-1])
    yield
    for point in points[:-2]:
        await siege.request("DELETE", f"/v1/checkpoints/{point}", gone=True)
        del siege.frozen[point]
    given_up = "select not exists (select 1 from megamcp.checkpoints where id = any ($1::text[]) and not void)"
    await siege.until(given_up, points[:-2])
    await siege.until("select not exists (select 1 from megamcp.dead_layers)")
    await _is_whole(siege, rollout, points[-2:])


LAYERED = (squash, sweep)
"""Operations that the state cluster has no part in."""


async def cut(siege: Siege, operation: Operation, point: str, way: str) -> None:
    """Run an operation that is cut off once at a point. Fails where the operation does not pass it."""
    castle = siege.castle
    assert isinstance(castle, Keep)
    castle.disarm()
    steps = aiter(operation(siege))
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
        if way in ("state", "control"):
            castle.kill_cluster(way)
            castle.disarm()
        elif way == "kill":
            assert castle.process is not None
            await asyncio.wait_for(castle.process.wait(), 60)
            castle.disarm()
            await castle.raise_again()
        await rest
    finally:
        rest.cancel()
        castle.disarm()


async def keep(folder: Path, port: int, **options: str) -> Keep:
    """A gateway on a folder of its own, that has started."""
    made = Keep(folder, port, 1, options={"MEGAMCP_DATABASE_QUOTA": str(QUOTA), **options})
    made.failpoint = f"@{made.file}"
    await made.start()
    await made.ready()
    return made


def session(castle: Keep) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(castle.url, json_serialize=json.dumps)
