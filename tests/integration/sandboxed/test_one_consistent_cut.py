"""A checkpoint covers all servers of a rollout at one moment, whatever kinds of state they have.

The environment has a copy-on-write schema, a database, a document and sandboxes of the fork server and (where it works)
of CRIU. One machine runs random histories against a model of them all, in which sandboxes and tool servers are killed,
also while a checkpoint is being made; one test takes checkpoints while each step goes through the servers in a fixed
order, so that every consistent cut is a prefix of that order, and any other one would show.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from megamcp.client import MegaMCPError, Rollout, ToolResult, UpstreamError
from sandboxes.types import Kind
from tests.integration.sandboxed.conftest import ENVIRONMENTS, Sandboxed, database_with, gateway_on

OTHERS = ("shared", "own", "page")
BOXES = ("left", "right", "frozen")
"""The last one by CRIU."""
BOX = """
[servers.{name}]
entry = "memo_server:server"
env = {{ NAME = "{name}" }}
[servers.{name}.state]
kind = "process"
runtime = "{runtime}"
"""
PAGE = """
[servers.page]
entry = "page_server:Page"
[servers.page.state]
kind = "document"
"""
PAGE_SERVER = '''
import os
from megamcp.sdk import read_only

class Page:
    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def put(self, key: str, value: str) -> int:
        """Set an item."""
        self.kept[key] = value
        return len(self.kept)

    @read_only
    def items(self) -> dict[str, str]:
        """Every item."""
        return self.kept

    @read_only
    def process(self) -> int:
        """Number of the process that serves."""
        return os.getpid()
'''


@dataclass(frozen=True, slots=True)
class Ensemble(Sandboxed):
    """A gateway with an environment of all these servers."""

    servers: tuple[str, ...]
    without: str | None
    """Why there is no CRIU among them."""

    @property
    def boxes(self) -> tuple[str, ...]:
        return tuple(name for name in BOXES if name in self.servers)


def ensemble(folder: Path, boxes: tuple[str, ...]) -> Path:
    """The environment's folder."""
    shutil.copytree(ENVIRONMENTS / "pair", folder)
    shutil.copy(ENVIRONMENTS / "memo_server.py", folder)
    (folder / "page_server.py").write_text(PAGE_SERVER)
    text = (folder / "environment.toml").read_text().replace('name = "pair"', 'name = "ensemble"')
    runtimes = {name: "criu" if name == "frozen" else "fork" for name in boxes}
    text += PAGE + "".join(BOX.format(name=name, runtime=runtime) for name, runtime in runtimes.items())
    (folder / "environment.toml").write_text(text)
    return folder


@contextlib.asynccontextmanager
async def playing(postgres_dsn: str, top: Path) -> AsyncIterator[Ensemble]:
    """A gateway on a database and a keeper of its own."""
    async with (
        database_with(postgres_dsn) as dsn,
        gateway_on(dsn, state_urls=[postgres_dsn], sandbox_dir=top / "keeper", spare_databases=0) as running,
    ):
        keeper, _ = await running.gateway.services.tender._host.keeper()
        (criu,) = [report for report in await keeper.reports() if report.kind == Kind.CRIU]
        boxes = BOXES if criu.works else BOXES[:2]
        await running.client.load_environment(ensemble(top / "ensemble", boxes))
        without = None if criu.works else f"without CRIU: {criu.reason}"
        yield Ensemble(running.gateway, running.client, (*OTHERS, *boxes), without)


async def held(rollout: Rollout, servers: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """What each server has, but for the seed."""
    found = await asyncio.gather(*(rollout.call(f"{server}__items") for server in servers))
    return {
        server: {key: value for key, value in result.structured.items() if not key.startswith("base-")}
        for server, result in zip(servers, found, strict=True)
    }


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def all_kinds(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ensemble]:
    async with playing(postgres_dsn, tmp_path_factory.mktemp("kinds")) as running:
        yield running


@pytest.fixture(autouse=True)
def told(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """What was left out is printed at the end."""
    for name in {"all_kinds", "machine"} & set(request.fixturenames):
        found = request.getfixturevalue(name)
        if why := (found if isinstance(found, Ensemble) else found.running).without:
            record_property("report", why)


async def test_checkpoints_during_calls_hold_a_prefix_of_their_order(all_kinds: Ensemble) -> None:
    rollout, servers = await all_kinds.client.open("ensemble"), all_kinds.servers
    for server in servers:  # each has a process and a database by then
        await rollout.call(f"{server}__put", key="step", value="0")
    points = []
    done = asyncio.Event()

    async def steps() -> None:
        for number in range(1, 6):
            for server in servers:  # each server is told of a step before the next one is
                await rollout.call(f"{server}__put", key="step", value=str(number))
        done.set()

    async def checkpoints() -> None:
        while not done.is_set():
            points.append(await rollout.checkpoint())
            await asyncio.sleep(0.02)  # so that calls have a turn too

    await asyncio.gather(steps(), checkpoints())
    assert len(points) > 3
    seen = []
    points = points[:: max(1, len(points) // 4)]
    for point in points:
        (fork,) = await point.fork()
        found = await held(fork, servers)
        counts = [int(found[server].get("step", 0)) for server in servers]
        assert counts == sorted(counts, reverse=True), counts
        assert counts[0] - counts[-1] <= 1, counts
        seen.append(sum(counts))
        await fork.close()
    assert seen == sorted(seen)
    await rollout.rollback(points[len(points) // 2])
    assert sum(int(part.get("step", 0)) for part in (await held(rollout, servers)).values()) == seen[len(points) // 2]


async def test_one_server_that_hangs_keeps_the_whole_checkpoint_from_being_made(all_kinds: Ensemble) -> None:
    rollout, servers = await all_kinds.client.open("ensemble"), all_kinds.servers
    for server in servers:
        await rollout.call(f"{server}__put", key="k", value="v")
    point = await rollout.checkpoint()
    for server in servers:
        await rollout.call(f"{server}__put", key="k", value="later")
    hanging = asyncio.create_task(rollout.call("right__hang"))
    query = "select exists (select 1 from megamcp.events where rollout = $1 and state = 'running')"
    store = all_kinds.gateway.services.store
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
    others = tuple(name for name in servers if name != "right")
    assert await held(rollout, others) == {server: {"k": "later"} for server in others}
    await rollout.rollback(point)
    await asyncio.gather(hanging, return_exceptions=True)
    assert await held(rollout, servers) == {server: {"k": "v"} for server in servers}


ONLY = [(*OTHERS, *BOXES), ("left",), ("own", "right"), ("page", "frozen")]


class Play(RuleBasedStateMachine):
    """Rollouts beside what their servers should hold. A sandbox that was killed is lost until a rollback."""

    rollouts = Bundle("rollouts")
    checkpoints = Bundle("checkpoints")
    portal: BlockingPortal
    running: Ensemble

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
        rollout = self.run(self.running.client.open("ensemble")).id
        self.stands(rollout, {server: {} for server in self.running.servers})
        return rollout

    def stands(self, rollout: str, held: dict[str, dict[str, str]]) -> None:
        self.state[rollout] = {server: dict(items) for server, items in held.items()}
        self.called[rollout], self.lost[rollout] = set(), set()
        self.touched = rollout

    @rule(rollout=rollouts, key=st.sampled_from("ab"), only=st.sampled_from(ONLY))
    def step(self, rollout: str, key: str, only: tuple[str, ...]) -> None:
        value, view = f"v{next(self.numbers)}", self.at(rollout)
        for server in self.running.servers:
            if server not in only:
                continue
            if server in self.lost[rollout]:
                with pytest.raises(MegaMCPError) as told:
                    self.run(view.call(f"{server}__put", key=key, value=value))
                assert told.value.code == "state_lost"
                continue
            self.run(patient(view, f"{server}__put", key=key, value=value, idempotency_key=f"{server} {value}"))
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
        self.portal.call(self.end, rollout, server)
        if server in self.called[rollout]:
            self.lost[rollout].add(server)
        self.touched = rollout

    @rule(target=checkpoints, rollout=rollouts, server=st.sampled_from(("page", *BOXES)))
    def checkpoint_under_fire(self, rollout: str, server: str) -> Any:
        """SIGKILL while a checkpoint is made: it is made of all servers, or it isn't made."""
        if self.lost[rollout]:
            return multiple()

        async def go() -> Any:
            view = await self.running.client.rollout(rollout)
            making = asyncio.create_task(view.checkpoint())
            await self.end(rollout, server)
            return (await asyncio.gather(making, return_exceptions=True))[0]

        made, self.touched = self.portal.call(go), rollout
        if isinstance(made, BaseException):
            assert isinstance(made, MegaMCPError), made
            assert server in self.called[rollout], "no sandbox was to be frozen that could have been killed"
            self.lost[rollout].add(server)
            return multiple()
        self.called[rollout] = set()
        self.frozen[made.id] = rollout, {name: dict(items) for name, items in self.state[rollout].items()}
        return made.id

    async def end(self, rollout: str, server: str) -> None:
        """SIGKILL of a rollout's sandbox, where it has one, or of the process that keeps documents."""
        services = self.running.gateway.services
        if server == "page":
            view = await self.running.client.rollout(rollout)
            os.kill((await patient(view, "page__process")).value, signal.SIGKILL)
            return
        query = "select name from megamcp.sandboxes where rollout = $1 and server = $2 and status = 'ready'"
        name = await services.store.value(query, rollout, server)
        keeper, _ = await services.tender._host.keeper()
        for info in (await keeper.inventory()).sandboxes:
            if info.sandbox == name:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(info.pid, signal.SIGKILL)
                while any(one.sandbox == name for one in (await keeper.inventory()).sandboxes):
                    await asyncio.sleep(0.002)

    @invariant()
    def the_touched_rollout_holds_what_it_should(self) -> None:
        if self.touched is not None:
            self.compare(self.touched)
        self.touched = None

    def compare(self, rollout: str) -> None:
        view = self.at(rollout)
        for server in self.running.servers:
            if server in self.lost[rollout]:
                continue
            found = self.run(patient(view, f"{server}__items")).structured
            items = {key: value for key, value in found.items() if not key.startswith("base-")}
            assert items == self.state[rollout][server], server
            self.called[rollout].add(server)  # a call is a call: it may have changed something

    def teardown(self) -> None:
        for rollout in self.state:
            self.compare(rollout)
            self.run(self.at(rollout).close())


async def patient(rollout: Rollout, tool: str, **arguments: Any) -> ToolResult:
    """Repeats a call to the process that keeps documents: it is started again when it was killed."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await rollout.call(tool, **arguments)
            except UpstreamError as error:
                if not tool.startswith("page__") or error.code == "outcome_unknown":
                    raise
            await asyncio.sleep(0.1)


@pytest.fixture
def machine(postgres_dsn: str, tmp_path: Path) -> Iterator[type[Play]]:
    """The machine on a gateway of its own, in a thread."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(playing(postgres_dsn, tmp_path)) as running,
    ):
        yield type("BoundPlay", (Play,), {"portal": portal, "running": running})


@pytest.mark.timeout(0)
def test_random_histories_of_all_kinds_agree_with_a_model(machine: type[Play]) -> None:
    budget = settings(
        max_examples=3,
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
