"""Random histories of documents on two gateways against dicts: calls, refusals, checkpoints, forks, rollbacks, ends."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from megamcp.client import Client
from megamcp.testing import running_gateway
from tests.integration.documents.conftest import environments

KEYS = st.sampled_from(["first", "a", "b/c", "ü", ""])
VALUES = st.sampled_from(["", "x", "ü" * 40, "0" * 3000])
Held = tuple[dict[str, str], int]


class Shelves(RuleBasedStateMachine):
    """Rollouts and checkpoints beside what they should hold."""

    rollouts = Bundle("rollouts")
    checkpoints = Bundle("checkpoints")
    portal: BlockingPortal
    clients: list[Client]

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Held] = {}
        self.frozen: dict[str, tuple[str, str, Held]] = {}
        self.digests: dict[str, str] = {}
        self.turn = self.opened = 0

    def on(self, rollout: str, verb: str, *arguments: Any, **named: Any) -> Any:
        """By either gateway, in turn."""
        self.turn += 1

        async def go() -> Any:
            return await getattr(await self.clients[self.turn % 2].rollout(rollout), verb)(*arguments, **named)

        return self.portal.call(go)

    def same(self, rollout: str) -> None:
        things, count = self.state[rollout]
        found = self.on(rollout, "call", "all").value
        assert found == {"things": things, "count": count}
        digest = self.on(rollout, "digest").digest
        content = repr((sorted(things.items()), count))
        assert self.digests.setdefault(content, digest) == digest, "equal documents, different digests"

    def open(self) -> str:
        """Of a class that keeps a dict, or a table."""
        self.opened += 1
        name = ("ledger", "shelf")[self.opened % 2]

        async def go() -> str:
            return (await self.clients[0].open(name)).id

        rollout = self.portal.call(go)
        self.state[rollout] = ({"first": "seeded"}, 0)
        return rollout

    @initialize(target=rollouts)
    def first(self) -> Any:
        return multiple(self.open(), self.open())

    @rule(rollout=rollouts, key=KEYS, value=VALUES, tries=st.integers(1, 2))
    def put(self, rollout: str, key: str, value: str, tries: int) -> None:
        things, count = self.state[rollout]
        once = f"call-{self.turn}"
        for _ in range(tries):
            found = self.on(rollout, "call", "put", key=key, value=value, idempotency_key=once)
            assert found.value == count + 1
        self.state[rollout] = ({**things, key: value}, count + 1)
        self.same(rollout)

    @rule(rollout=rollouts, key=KEYS)
    def take(self, rollout: str, key: str) -> None:
        things, count = self.state[rollout]
        found = self.on(rollout, "call", "take", key=key)
        assert found.is_error == (key not in things)
        if key in things:
            self.state[rollout] = ({name: one for name, one in things.items() if name != key}, count + 1)
        self.same(rollout)

    @rule(rollout=rollouts, count=st.integers(0, 300))
    def fill(self, rollout: str, count: int) -> None:
        things, calls = self.state[rollout]
        self.on(rollout, "call", "fill", count=count, size=7)
        self.state[rollout] = ({**things, **{f"thing-{number:06}": "x" * 7 for number in range(count)}}, calls)
        self.same(rollout)

    @rule(rollout=rollouts, how=st.sampled_from(["set", "nan", "loop"]))
    def spoil(self, rollout: str, how: str) -> None:
        assert self.on(rollout, "call", "spoil", how=how).is_error
        self.same(rollout)

    @rule(target=checkpoints, rollout=rollouts)
    def checkpoint(self, rollout: str) -> str:
        made = self.on(rollout, "checkpoint")
        self.frozen[made.id] = (rollout, made.digest, self.state[rollout])
        return str(made.id)

    @rule(target=rollouts, checkpoint=checkpoints, count=st.integers(1, 2))
    def fork(self, checkpoint: str, count: int) -> Any:
        async def go() -> list[str]:
            return [fork.id for fork in await (await self.clients[0].checkpoint(checkpoint)).fork(count=count)]

        forks = self.portal.call(go)
        for fork in forks:
            self.state[fork] = self.frozen[checkpoint][2]
            self.same(fork)
        return multiple(*forks)

    @rule(checkpoint=checkpoints)
    def roll_back(self, checkpoint: str) -> None:
        rollout, digest, before = self.frozen[checkpoint]
        if rollout in self.state:
            self.on(rollout, "rollback", checkpoint)
            self.state[rollout] = before
            assert self.on(rollout, "digest").digest == digest
            self.same(rollout)

    @rule(target=rollouts, rollout=consumes(rollouts))
    def close(self, rollout: str) -> str:
        self.on(rollout, "close")
        del self.state[rollout]
        return self.open()

    def teardown(self) -> None:
        for rollout in list(self.state):
            self.same(rollout)
            self.on(rollout, "close")


@pytest.fixture
def shelves(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Shelves]]:
    """The machine on gateways of its own, in a thread."""
    with start_blocking_portal() as portal:
        manage = portal.wrap_async_context_manager
        with (
            manage(environments(postgres_dsn, tmp_path_factory.mktemp("shelves"))) as dsn,
            manage(running_gateway(dsn)) as one,
            manage(running_gateway(dsn)) as two,
            manage(Client(one.url)) as first,
            manage(Client(two.url)) as second,
        ):
            yield type("BoundShelves", (Shelves,), {"portal": portal, "clients": [first, second]})


def test_random_histories_of_documents_agree_with_dicts(shelves: type[Shelves]) -> None:
    run_machine(
        shelves,
        settings=settings(
            max_examples=50 if "SOAK_SECONDS" in os.environ else 5,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
        ),
    )
