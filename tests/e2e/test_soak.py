"""Random steps of write, checkpoint, fork, roll back and kill over both kinds of state at once, against a dict.

Everything that a rollout holds is in a model beside it; each call has an idempotency key and is repeated until it is
acknowledged. Kills hit the gateway (at random moments, and at each named failpoint), tool servers, the control
cluster and the state cluster. CI runs 250 steps; `make soak` runs `SOAK_STEPS` (10,000), or for `SOAK_SECONDS`.
"""

import asyncio
import contextlib
import copy
import json
import logging
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest

from tests.e2e.test_kill import Fortress, free_port

log = logging.getLogger(__name__)
PAIR = Path(__file__).parent.parent / "environments" / "pair"
STEPS = int(os.environ.get("SOAK_STEPS", "250"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "0"))
KINDS = ("shared", "own")
BASE = {f"base-{n}": "seeded" for n in range(1, 6)}
FAILPOINTS = (
    "build.filled",
    "build.installed",
    "build.renamed",
    "source.planned",
    "source.built",
    "spare.copied",
    "database.planned",
    "clone.drained",
    "clone.created",
    "clone.cleaned",
    "clone.admitted",
    "database.copied",
    "database.made",
    "database.rewound",
    "database.retired",
    "database.dropped",
    "drain.closed",
    "drop.shut",
    "drop.database",
)


@dataclass
class Held:
    """What one server of a rollout should hold."""

    items: dict[str, str] = field(default_factory=lambda: dict(BASE))
    lines: list[list[Any]] = field(default_factory=list)
    next_line: int = 1


State = dict[str, Held]


@dataclass
class Castle(Fortress):
    """A gateway with a state cluster, which may be killed at a named place of its code."""

    failpoint: str = ""
    options: dict[str, str] = field(default_factory=dict)

    async def start(self) -> None:
        with (self.folder / "gateway.log").open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "megamcp", "serve", "--port", str(self.port)),
                *("--data-dir", str(self.folder / "data")),
                env={
                    **os.environ,
                    "MEGAMCP_ENVIRONMENTS": json.dumps([str(PAIR)]),
                    "MEGAMCP_BUNDLED_ENVIRONMENTS": "false",
                    "MEGAMCP_REAP_INTERVAL_S": "1",
                    "MEGAMCP_CALL_TIMEOUT_S": "30",
                    "MEGAMCP_SPARE_DATABASES": "1",
                    "MEGAMCP_DISK_RESERVE": "0",
                    "MEGAMCP_CHAIN_LAYERS": "3",
                    "MEGAMCP_FAILPOINTS": self.failpoint,
                    **self.options,
                },
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    async def kill(self, victim: str) -> None:
        if victim != "state cluster":
            await super().kill(victim)
            return
        lock = self.folder / "data" / "state" / "cluster" / "postmaster.pid"
        with contextlib.suppress(OSError, IndexError):
            os.kill(int(lock.read_text().split()[0]), signal.SIGKILL)
            self.kills[victim] = self.kills.get(victim, 0) + 1

    async def raise_again(self) -> None:
        """Starts the gateway again when a failpoint has killed it."""
        assert self.process is not None
        if self.process.returncode is not None:
            self.kills[f"at {self.failpoint.partition('=')[0]}"] = 1
            self.failpoint = ""
            await self.start()


@dataclass
class Soak:
    """The run: rollouts with what they should hold."""

    castle: Castle
    http: aiohttp.ClientSession
    dice: random.Random
    rollouts: dict[str, State] = field(default_factory=dict)
    frozen: dict[str, tuple[str, State, str | None]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    calls: int = 0

    async def request(self, method: str, path: str, body: Any = None, gone: bool = False) -> Any:
        """Repeat until it is answered with success."""
        end, last = time.monotonic() + 300, ""
        while time.monotonic() < end:
            await self.castle.raise_again()
            try:
                async with self.http.request(method, path, json=body, timeout=aiohttp.ClientTimeout(60)) as answer:
                    text = await answer.text()
                    if answer.status < 300 or (gone and answer.status in (404, 410)):
                        return json.loads(text) if text else None
                    last = text
                    assert answer.status not in (404, 410, 422), f"{method} {path}: {text}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                last = repr(error)
            await asyncio.sleep(0.05)
        raise AssertionError(f"no success in time for {method} {path}: {last}")

    async def call(self, rollout: str, kind: str, tool: str, **arguments: Any) -> Any:
        self.calls += 1
        body = {"tool": f"{kind}__{tool}", "arguments": arguments, "idempotency_key": f"call {self.calls}"}
        while True:
            result = await self.request("POST", f"/v1/rollouts/{rollout}/call", body)
            if not result.get("isError"):
                found = result["structuredContent"]
                return found["result"] if set(found) == {"result"} else found
            code = (result.get("structuredContent") or {}).get("code")
            # A call whose server or database was killed under it may be told as failed; nothing of it was kept.
            assert code in ("database_unavailable", "cancelled", None) or "ended" in str(result), result

    async def step(self) -> None:
        if not self.rollouts:
            await self.open()
        rollout = self.dice.choice(list(self.rollouts))
        weights = {
            "put": 30,
            "delete": 8,
            "reshape": 2,
            "clear": 1,
            "checkpoint": 14,
            "fork": 8 if len(self.rollouts) < 8 else 0,
            "roll_back": 8,
            "close": 4,
            "read": 15,
            "release": 3,
        }
        name = self.dice.choices(list(weights), list(weights.values()))[0]
        self.steps[name] = self.steps.get(name, 0) + 1
        await getattr(self, name)(rollout)

    async def open(self) -> None:
        made = await self.request("POST", "/v1/rollouts", {"environment": "pair"})
        self.rollouts[made["rollouts"][0]["id"]] = {kind: Held() for kind in KINDS}

    async def put(self, rollout: str) -> None:
        kind, key, value = self.dice.choice(KINDS), f"k{self.dice.randrange(8)}", f"v{self.calls}"
        held = self.rollouts[rollout][kind]
        self._line(held, kind, await self.call(rollout, kind, "put", key=key, value=value), key, value)
        held.items[key] = value

    async def delete(self, rollout: str) -> None:
        kind, key = self.dice.choice(KINDS), f"k{self.dice.randrange(8)}"
        held = self.rollouts[rollout][kind]
        self._line(held, kind, await self.call(rollout, kind, "delete", key=key), key, None)
        held.items.pop(key, None)

    def _line(self, held: Held, kind: str, number: int, key: str, value: str | None) -> None:
        """Numbers have no gaps; but PostgreSQL's own sequences don't take back what a call drew that was cut off (one a
        kill, and a kill is counted when it is over), and skip up to 32 when PostgreSQL is killed."""
        kills = self.castle.kills
        skipped = sum(kills.values()) + 1 + 32 * kills.get("state cluster", 0)
        most = held.next_line + (skipped if kind == "own" else 0)
        assert held.next_line <= number <= most, (kind, number, held.next_line)
        held.lines.append([number, key, value])
        held.next_line = number + 1

    async def reshape(self, rollout: str) -> None:
        await self.call(rollout, "own", "reshape", column=f"c{self.dice.randrange(2)}")

    async def clear(self, rollout: str) -> None:
        await self.call(rollout, "own", "clear")
        self.rollouts[rollout]["own"].lines.clear()

    async def checkpoint(self, rollout: str) -> None:
        made = await self.request("POST", f"/v1/rollouts/{rollout}/checkpoints", {})
        self.frozen[made["id"]] = (rollout, copy.deepcopy(self.rollouts[rollout]), made["digest"])

    async def fork(self, _: str) -> None:
        if self.frozen:
            checkpoint = self.dice.choice(list(self.frozen))
            made = await self.request("POST", f"/v1/checkpoints/{checkpoint}/fork", {})
            self.rollouts[made["rollouts"][0]["id"]] = copy.deepcopy(self.frozen[checkpoint][1])

    async def roll_back(self, rollout: str) -> None:
        own = [point for point, (owner, _, _) in self.frozen.items() if owner == rollout]
        if own:
            checkpoint = self.dice.choice(own)
            await self.request("POST", f"/v1/rollouts/{rollout}/rollback", {"checkpoint": checkpoint})
            self.rollouts[rollout] = copy.deepcopy(self.frozen[checkpoint][1])
            await self.read(rollout)

    async def close(self, rollout: str) -> None:
        await self.request("DELETE", f"/v1/rollouts/{rollout}", gone=True)
        del self.rollouts[rollout]

    async def release(self, _: str) -> None:
        if self.frozen:
            checkpoint = self.dice.choice(list(self.frozen))
            await self.request("DELETE", f"/v1/checkpoints/{checkpoint}", gone=True)
            del self.frozen[checkpoint]

    async def read(self, rollout: str) -> None:
        for kind in KINDS:
            held = self.rollouts[rollout][kind]
            assert await self.call(rollout, kind, "items") == held.items, (rollout, kind)
            assert await self.call(rollout, kind, "lines") == held.lines, (rollout, kind)

    async def storm(self, done: asyncio.Event) -> None:
        victims = ["gateway", "tool server", "tool server", "postgres", "state cluster", "state cluster", "failpoint"]
        while not done.is_set():
            before = sum(self.steps.values())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), self.dice.uniform(3, 9))
            # On a slow machine a kill every few seconds would leave no time in which anything could succeed.
            while not done.is_set() and sum(self.steps.values()) < before + 2:
                await asyncio.sleep(0.1)
            victim = self.dice.choice(victims)
            if victim == "failpoint":
                turn = self.dice.choice([1, 1, 2, 3])
                self.castle.failpoint = f"{self.dice.choice(FAILPOINTS)}=kill@{turn}"
                victim = "gateway"
            await self.castle.kill(victim)


@pytest.mark.e2e
@pytest.mark.timeout(0)
async def test_random_steps_and_kills_leave_no_difference(scratch_folder: Path) -> None:
    folder = scratch_folder / "soak"
    folder.mkdir()
    folder.chmod(0o755)
    castle = Castle(folder, free_port(), 1)
    await castle.start()
    try:
        await castle.ready()
        async with aiohttp.ClientSession(castle.url) as http:
            soak = Soak(castle, http, random.Random(int(os.environ.get("SOAK_SEED", "11"))))
            await _run(soak)
    except BaseException:
        for file in (folder / "gateway.log", *sorted((folder / "data").glob("*/postgres.log"))):
            log.error("%s ends with\n%s", file, file.read_text(errors="replace")[-8000:])
        raise
    finally:
        await castle.stop()
    await asyncio.sleep(0.5)
    assert castle.family() == [], "something outlived the gateway"


async def _run(soak: Soak) -> None:
    done = asyncio.Event()
    storm = asyncio.create_task(soak.storm(done))
    end = time.monotonic() + SECONDS
    steps = 0
    try:
        while steps < STEPS or time.monotonic() < end:
            await soak.step()
            steps += 1
    finally:
        done.set()
        await storm
    soak.castle.failpoint = ""
    await soak.castle.raise_again()
    await soak.castle.ready()
    for rollout in list(soak.rollouts):
        await soak.read(rollout)
    for checkpoint, (_, state, digest) in list(soak.frozen.items()):
        made = await soak.request("POST", f"/v1/checkpoints/{checkpoint}/fork", {})
        fork = made["rollouts"][0]["id"]
        soak.rollouts[fork] = copy.deepcopy(state)
        await soak.read(fork)
        if digest is not None:
            assert (await soak.request("GET", f"/v1/rollouts/{fork}/digest"))["digest"] == digest
        await soak.close(fork)
    log.info("%d steps %s, %d calls, kills %s", steps, soak.steps, soak.calls, soak.castle.kills)
    await nothing_leaks(soak)


async def nothing_leaks(soak: Soak) -> None:
    """When every rollout and checkpoint is gone, so is what they stood on."""
    for rollout in list(soak.rollouts):
        await soak.close(rollout)
    for checkpoint in list(soak.frozen):
        await soak.request("DELETE", f"/v1/checkpoints/{checkpoint}", gone=True)
    # Some were made twice, where the answer to the first request was lost: they have leases and nobody who knows them.
    while page := (await soak.request("GET", "/v1/rollouts?status=open"))["rollouts"]:
        for rollout in page:
            await soak.request("DELETE", f"/v1/rollouts/{rollout['id']}", gone=True)
    data = soak.castle.folder / "data"
    control = await asyncpg.connect(superuser(data / "postgres"))
    await control.execute(
        "update megamcp.checkpoints set expires_at = now() - interval '1 second' where released_at is null"
    )
    await control.execute("update megamcp.databases set used_at = now() - interval '1 hour' where kind = 'view'")
    state = await asyncpg.connect(superuser(data / "state"))
    fewest, end = sys.maxsize, time.monotonic() + 120
    while True:
        rows = await control.fetch(
            "select name, kind, status, rollout from megamcp.databases"
            " where kind in ('clone', 'view') or status <> 'ready'"
        )
        named = {row["name"] for row in await control.fetch("select name from megamcp.databases")}
        there = {row["datname"] for row in await state.fetch("select datname from pg_database where datname ~ '^mm_'")}
        roles = {row["rolname"] for row in await state.fetch("select rolname from pg_roles where rolname ~ '^mm_'")}
        strays = roles - named - {f"{name}_hand" for name in named} - {"mm_owner", "mm_hands"}
        points = await control.fetchval("select count(*) from megamcp.snapshots")
        layers = await control.fetchval("select count(*) from megamcp.dead_layers")
        if not rows and not layers and not points and there <= named and not strays:
            break
        left = len(rows) + len(there) + len(strays) + points + layers
        if left < fewest:  # after a long run there are hundreds to drop, one by one
            fewest, end = left, time.monotonic() + 120
        assert time.monotonic() < end, (rows, layers, points, there - named, strays)
        await asyncio.sleep(0.5)
    await control.close()
    await state.close()


def superuser(folder: Path) -> str:
    """DSN of an embedded cluster, from its folder."""
    password = (folder / "password").read_text().strip()
    sockets = folder / "run"
    if not sockets.is_dir():
        sockets = Path((folder / "run.path").read_text().strip())
    return f"postgresql://postgres:{password}@/postgres?host={sockets}&port=5432"
