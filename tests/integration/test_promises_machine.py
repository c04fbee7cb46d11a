"""Random histories of one tree of rollouts against a dict: write, delete, checkpoint, fork, roll back, close, retry.

CI runs a fixed number of short histories; `make soak` runs them for as long as `SOAK_SECONDS` says.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from megamcp.testing import running_gateway
from tests.integration.promises.world import World

pytest_plugins: list[str] = []
BASE = {f"base-{n}": "seeded" for n in range(1, 6)}
KEYS = st.sampled_from(["base-1", "base-2", "a", "b", "c"])
VALUES = st.sampled_from(["", "x", "ü", "0" * 200])


class Tree(RuleBasedStateMachine):
    """Rollouts and checkpoints beside what they should hold."""

    rollouts = Bundle("rollouts")
    checkpoints = Bundle("checkpoints")
    portal: BlockingPortal
    world: World

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, dict[str, str]] = {}
        self.frozen: dict[str, tuple[str, str, dict[str, str]]] = {}
        self.digests: dict[str, str] = {}
        self.calls = 0
        self.touched: str | None = None

    def run(self, method: str, *arguments: Any, **named: Any) -> Any:
        async def go() -> Any:
            return await getattr(self.world, method)(*arguments, **named)

        return self.portal.call(go)

    @initialize(target=rollouts)
    def first(self) -> str:
        return self.open()

    def open(self) -> str:
        rollout: str = self.run("one")
        self.state[rollout] = dict(BASE)
        return rollout

    @rule(rollout=rollouts, key=KEYS, value=VALUES, tries=st.integers(1, 2))
    def put(self, rollout: str, key: str, value: str, tries: int) -> None:
        self.calls += 1
        for _ in range(tries):
            assert self.run("call", rollout, "put", once=f"call-{self.calls}", key=key, value=value) == value
        self.state[rollout][key] = value
        self.touched = rollout

    @rule(rollout=rollouts, key=KEYS)
    def delete(self, rollout: str, key: str) -> None:
        expected = int(key in self.state[rollout])
        assert self.run("call", rollout, "delete", key=key) == expected
        self.state[rollout].pop(key, None)
        self.touched = rollout

    @rule(target=checkpoints, rollout=rollouts)
    def checkpoint(self, rollout: str) -> str:
        made = self.run("checkpoint", rollout)
        self.frozen[made["id"]] = (rollout, made["digest"], dict(self.state[rollout]))
        return str(made["id"])

    @rule(target=rollouts, checkpoint=checkpoints, count=st.integers(1, 2))
    def fork(self, checkpoint: str, count: int) -> Any:
        forks = self.run("fork", checkpoint, count=count)
        for fork in forks:
            self.state[fork] = dict(self.frozen[checkpoint][2])
        self.touched = forks[0]
        return multiple(*forks)

    @rule(checkpoint=checkpoints)
    def roll_back(self, checkpoint: str) -> None:
        rollout, digest, held = self.frozen[checkpoint]
        if rollout not in self.state:
            return
        self.run("roll_back", rollout, checkpoint)
        self.state[rollout] = dict(held)
        assert self.run("digest", rollout) == digest
        self.touched = rollout

    @rule(target=rollouts, rollout=consumes(rollouts))
    def close(self, rollout: str) -> str:
        self.portal.call(self.world.services.rollouts.close, rollout)
        del self.state[rollout]
        self.portal.call(self.world.services.reaper.once)
        return self.open()

    @invariant()
    def the_touched_rollout_holds_what_it_should(self) -> None:
        if self.touched and self.touched in self.state:
            assert self.run("call", self.touched, "items") == self.state[self.touched]
            digest = self.run("digest", self.touched)
            content = repr(sorted(self.state[self.touched].items()))
            assert self.digests.setdefault(content, digest) == digest, "equal states, different digests"
        self.touched = None

    def teardown(self) -> None:
        for rollout, held in self.state.items():
            assert self.run("call", rollout, "items") == held
            self.portal.call(self.world.services.rollouts.close, rollout)


@pytest.fixture
def tree(world_database: str) -> Iterator[type[Tree]]:
    """The machine on a gateway of its own, in a thread."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(running_gateway(world_database, reap_interval_s=3600)) as running,
    ):
        world = World(running.services, running.url, world_database)
        yield type("BoundTree", (Tree,), {"portal": portal, "world": world})


@pytest.mark.timeout(0)
def test_random_histories_agree_with_a_dict(tree: type[Tree]) -> None:
    budget = settings(
        max_examples=8,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize="SOAK_SECONDS" not in os.environ,
        database=None,
    )
    end = time.monotonic() + float(os.environ.get("SOAK_SECONDS", "0"))
    while True:
        run_machine(tree, settings=budget)
        if time.monotonic() >= end:
            return
