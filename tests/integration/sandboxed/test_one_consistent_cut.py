"""A checkpoint covers all servers of a rollout at one moment, whatever kinds of state they have.

The environment has a copy-on-write schema, a database and two sandboxes. One machine runs random histories against a
model of all four; one test takes checkpoints while each step goes through the servers in a fixed order, so that every
consistent cut is a prefix of that order, and any other one would show.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from megamcp.client import MegaMCPError, Rollout
from tests.integration.sandboxed.conftest import ENVIRONMENTS, Sandboxed, database_with, gateway_on

SERVERS = ("shared", "own", "left", "right")
BOXES = ("left", "right")
BOX = """
[servers.{name}]
entry = "memo_server:server"
env = {{ NAME = "{name}" }}
[servers.{name}.state]
kind = "process"
"""


def quartet(top: Path) -> Path:
    """The environment's folder."""
    folder = top / "quartet"
    shutil.copytree(ENVIRONMENTS / "pair", folder)
    shutil.copy(ENVIRONMENTS / "memo_server.py", folder)
    text = (folder / "environment.toml").read_text().replace('name = "pair"', 'name = "quartet"')
    (folder / "environment.toml").write_text(text + "".join(BOX.format(name=name) for name in BOXES))
    return folder


async def held(rollout: Rollout) -> dict[str, dict[str, str]]:
    """What each server has, but for the seed."""
    found = await asyncio.gather(*(rollout.call(f"{server}__items") for server in SERVERS))
    return {
        server: {key: value for key, value in result.structured.items() if not key.startswith("base-")}
        for server, result in zip(SERVERS, found, strict=True)
    }


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def four(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sandboxed]:
    top = tmp_path_factory.mktemp("four")
    top.chmod(0o755)
    async with (
        database_with(postgres_dsn, quartet(top)) as dsn,
        gateway_on(dsn, state_urls=[postgres_dsn], sandbox_dir=top / "keeper", spare_databases=0) as running,
    ):
        yield running


async def test_checkpoints_during_calls_hold_a_prefix_of_their_order(four: Sandboxed) -> None:
    rollout = await four.client.open("quartet")
    for server in SERVERS:  # each has a process and a database by then
        await rollout.call(f"{server}__put", key="step", value="0")
    points = []
    done = asyncio.Event()

    async def steps() -> None:
        for number in range(1, 13):
            for server in SERVERS:  # each server is told of a step before the next one is
                await rollout.call(f"{server}__put", key="step", value=str(number))
        done.set()

    async def checkpoints() -> None:
        while not done.is_set():
            points.append(await rollout.checkpoint())
            await asyncio.sleep(0.02)  # so that calls have a turn too

    await asyncio.gather(steps(), checkpoints())
    assert len(points) > 3
    seen = []
    for point in points:
        (fork,) = await point.fork()
        found = await held(fork)
        counts = [int(found[server].get("step", 0)) for server in SERVERS]
        assert counts == sorted(counts, reverse=True), counts
        assert counts[0] - counts[-1] <= 1, counts
        seen.append(sum(counts))
        await fork.close()
    assert seen == sorted(seen)
    await rollout.rollback(points[len(points) // 2])
    assert sum(int(part.get("step", 0)) for part in (await held(rollout)).values()) == seen[len(points) // 2]


async def test_one_server_that_hangs_keeps_the_whole_checkpoint_from_being_made(four: Sandboxed) -> None:
    rollout = await four.client.open("quartet")
    for server in SERVERS:
        await rollout.call(f"{server}__put", key="k", value="v")
    point = await rollout.checkpoint()
    for server in SERVERS:
        await rollout.call(f"{server}__put", key="k", value="later")
    hanging = asyncio.create_task(rollout.call("right__hang"))
    query = "select exists (select 1 from megamcp.events where rollout = $1 and state = 'running')"
    store = four.gateway.services.store
    while not await store.value(query, rollout.id):
        await asyncio.sleep(0.01)
    began = time.monotonic()
    with pytest.raises(MegaMCPError) as refused:
        await rollout.checkpoint()
    assert refused.value.code == "rollout_busy"
    assert time.monotonic() - began < 3 + 15
    assert [made.id for made in await rollout.checkpoints()] == [point.id]
    images = "select count(*) from megamcp.images where status = 'creating'"
    assert await store.value(images) == 0
    assert await held_but(rollout, "right") == {server: {"k": "later"} for server in SERVERS if server != "right"}
    await rollout.rollback(point)
    await asyncio.gather(hanging, return_exceptions=True)
    assert await held(rollout) == {server: {"k": "v"} for server in SERVERS}


async def held_but(rollout: Rollout, server: str) -> dict[str, dict[str, str]]:
    """What the other servers have."""
    found = {name: (await rollout.call(f"{name}__items")).structured for name in SERVERS if name != server}
    return {
        name: {key: value for key, value in items.items() if not key.startswith("base-")}
        for name, items in found.items()
    }


class Quartet(RuleBasedStateMachine):
    """Rollouts beside what their four servers should hold. A sandbox that was killed is lost until a rollback."""

    rollouts = Bundle("rollouts")
    checkpoints = Bundle("checkpoints")
    portal: BlockingPortal
    running: Sandboxed

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, dict[str, dict[str, str]]] = {}
        self.called: dict[str, set[str]] = {}
        self.lost: dict[str, set[str]] = {}
        self.frozen: dict[str, tuple[str, dict[str, dict[str, str]]]] = {}
        self.touched: str | None = None
        self.numbers = itertools.count()

    def run(self, coroutine: Any) -> Any:
        async def go() -> Any:
            return await coroutine

        return self.portal.call(go)

    def at(self, rollout: str) -> Rollout:
        return self.run(self.running.client.rollout(rollout))

    @initialize(target=rollouts)
    def first(self) -> str:
        rollout = self.run(self.running.client.open("quartet")).id
        self.stands(rollout, {server: {} for server in SERVERS})
        return rollout

    def stands(self, rollout: str, held: dict[str, dict[str, str]]) -> None:
        self.state[rollout] = {server: dict(items) for server, items in held.items()}
        self.called[rollout], self.lost[rollout] = set(), set()
        self.touched = rollout

    @rule(rollout=rollouts, key=st.sampled_from("ab"), only=st.sampled_from([SERVERS, ("left",), ("own", "right")]))
    def step(self, rollout: str, key: str, only: tuple[str, ...]) -> None:
        value, view = f"v{next(self.numbers)}", self.at(rollout)
        for server in only:
            if server in self.lost[rollout]:
                with pytest.raises(MegaMCPError) as told:
                    self.run(view.call(f"{server}__put", key=key, value=value))
                assert told.value.code == "state_lost"
                continue
            self.run(view.call(f"{server}__put", key=key, value=value))
            self.state[rollout][server][key] = value
            self.called[rollout].add(server)
        self.touched = rollout

    @rule(target=checkpoints, rollout=rollouts)
    def checkpoint(self, rollout: str) -> Any:
        view = self.at(rollout)
        if self.lost[rollout]:
            with pytest.raises(MegaMCPError) as told:
                self.run(view.checkpoint())
            assert told.value.code == "state_lost"
            return multiple()
        made = self.run(view.checkpoint()).id
        self.called[rollout] = set()
        self.frozen[made] = rollout, {server: dict(items) for server, items in self.state[rollout].items()}
        return made

    @rule(target=rollouts, checkpoint=checkpoints)
    def fork(self, checkpoint: str) -> str:
        point = self.run(self.running.client.checkpoint(checkpoint))
        (made,) = self.run(point.fork())
        self.stands(made.id, self.frozen[checkpoint][1])
        return str(made.id)

    @rule(checkpoint=checkpoints)
    def roll_back(self, checkpoint: str) -> None:
        rollout, held = self.frozen[checkpoint]
        self.run(self.at(rollout).rollback(checkpoint))
        self.stands(rollout, held)

    @rule(rollout=rollouts, server=st.sampled_from(BOXES))
    def kill(self, rollout: str, server: str) -> None:
        """SIGKILL of a sandbox. What was called since it was frozen is lost; anything else nobody notices."""
        query = "select name from megamcp.sandboxes where rollout = $1 and server = $2 and status = 'ready'"
        services = self.running.gateway.services

        async def go() -> None:
            name = await services.store.value(query, rollout, server)
            keeper, _ = await services.tender._host.keeper()
            for info in (await keeper.inventory()).sandboxes:
                if info.sandbox == name:
                    os.kill(info.pid, signal.SIGKILL)
                    while any(one.sandbox == name for one in (await keeper.inventory()).sandboxes):
                        await asyncio.sleep(0.002)

        self.portal.call(go)
        if server in self.called[rollout]:
            self.lost[rollout].add(server)
        self.touched = rollout

    @invariant()
    def the_touched_rollout_holds_what_it_should(self) -> None:
        if self.touched is not None:
            self.compare(self.touched)
        self.touched = None

    def compare(self, rollout: str) -> None:
        view = self.at(rollout)
        for server in SERVERS:
            if server in self.lost[rollout]:
                continue
            found = self.run(view.call(f"{server}__items")).structured
            items = {key: value for key, value in found.items() if not key.startswith("base-")}
            assert items == self.state[rollout][server], server
            self.called[rollout].add(server)  # a call is a call: it may have changed something

    def teardown(self) -> None:
        for rollout in self.state:
            self.compare(rollout)
            self.run(self.at(rollout).close())


@pytest.fixture
def machine(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Quartet]]:
    """The machine on a gateway of its own, in a thread."""
    top = tmp_path_factory.mktemp("quartet")
    top.chmod(0o755)

    @contextlib.asynccontextmanager
    async def world() -> AsyncIterator[Sandboxed]:
        async with (
            database_with(postgres_dsn, quartet(top)) as dsn,
            gateway_on(dsn, state_urls=[postgres_dsn], sandbox_dir=top / "keeper", spare_databases=0) as running,
        ):
            yield running

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(world()) as running:
        yield type("BoundQuartet", (Quartet,), {"portal": portal, "running": running})


@pytest.mark.timeout(0)
def test_random_histories_of_four_servers_agree_with_a_model(machine: type[Quartet]) -> None:
    budget = settings(
        max_examples=6,
        stateful_step_count=14,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize="SOAK_SECONDS" not in os.environ,
        database=None,
    )
    end = time.monotonic() + float(os.environ.get("SOAK_SECONDS", "0"))
    while True:
        run_machine(machine, settings=budget)
        if time.monotonic() >= end:
            return
