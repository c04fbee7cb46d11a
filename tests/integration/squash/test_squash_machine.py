"""Random histories with squashing and sweeping at every moment, against a plain model.

Chains are squashed from three layers on, so nearly every history stands on squashed layers; one run squashes and sweeps
in steps of the history, another has the background do it as fast as it can.
"""

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from megamcp.testing import running_gateway
from tests.integration.promises.world import World

KEYS = st.sampled_from(["base-1", "base-2", "a", "b", "c", "d"])
VALUES = st.sampled_from(["x", "y", "z"])


@dataclass
class Ledger:
    """What a rollout should hold: items, entries by id, the next id."""

    items: dict[str, str] = field(default_factory=lambda: {f"base-{n}": "seeded" for n in range(1, 6)})
    entries: dict[int, int] = field(default_factory=dict)
    drawn: int = 0


class Squashed(RuleBasedStateMachine):
    rollouts = Bundle("rollouts")
    checkpoints = Bundle("checkpoints")
    portal: BlockingPortal
    world: World

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Ledger] = {}
        self.frozen: dict[str, tuple[str, str, Ledger]] = {}
        self.released: set[str] = set()
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
        self.state[rollout] = Ledger()
        return rollout

    @rule(rollout=rollouts, key=KEYS, value=VALUES)
    def put(self, rollout: str, key: str, value: str) -> None:
        self.run("call", rollout, "put", key=key, value=value)
        self.state[rollout].items[key] = value
        self.touched = rollout

    @rule(rollout=rollouts, key=KEYS)
    def delete(self, rollout: str, key: str) -> None:
        held = self.state[rollout].items
        assert self.run("call", rollout, "delete", key=key) == int(key in held)
        held.pop(key, None)
        self.touched = rollout

    @rule(rollout=rollouts, key=KEYS, other=KEYS)
    def rename(self, rollout: str, key: str, other: str) -> None:
        held = self.state[rollout].items
        if other in held:
            return
        sql = f"update item set key = '{other}' where key = '{key}'"
        assert self.run("call", rollout, "run_sql", sql=sql) == [[int(key in held)]]
        if key in held:
            held[other] = held.pop(key)
        self.touched = rollout

    @rule(rollout=rollouts, amount=st.integers(1, 9))
    def book(self, rollout: str, amount: int) -> None:
        ledger = self.state[rollout]
        ledger.drawn += 1
        assert self.run("call", rollout, "book", account_id=1, amount=amount)["id"] == ledger.drawn
        ledger.entries[ledger.drawn] = amount
        self.touched = rollout

    @rule(rollout=rollouts, data=st.data())
    def unbook(self, rollout: str, data: st.DataObject) -> None:
        ledger = self.state[rollout]
        if not ledger.entries:
            return
        number = data.draw(st.sampled_from(sorted(ledger.entries)))
        self.run("call", rollout, "run_sql", sql=f"delete from entry where id = {number}")
        amount = ledger.entries.pop(number)
        self.run("call", rollout, "run_sql", sql=f"update account set balance = balance - {amount} where id = 1")
        self.touched = rollout

    @rule(target=checkpoints, rollout=rollouts)
    def checkpoint(self, rollout: str) -> str:
        made = self.run("checkpoint", rollout)
        self.frozen[made["id"]] = (rollout, made["digest"], copy.deepcopy(self.state[rollout]))
        self.touched = rollout
        return str(made["id"])

    @rule(target=rollouts, checkpoint=checkpoints, count=st.integers(1, 2))
    def fork(self, checkpoint: str, count: int) -> Any:
        if checkpoint in self.released:
            return multiple()
        forks = self.run("fork", checkpoint, count=count)
        for fork in forks:
            self.state[fork] = copy.deepcopy(self.frozen[checkpoint][2])
        self.touched = forks[0]
        return multiple(*forks)

    @rule(checkpoint=checkpoints)
    def roll_back(self, checkpoint: str) -> None:
        rollout, digest, held = self.frozen[checkpoint]
        if rollout not in self.state or checkpoint in self.released:
            return
        self.run("roll_back", rollout, checkpoint)
        self.state[rollout] = copy.deepcopy(held)
        assert self.run("digest", rollout) == digest
        self.touched = rollout

    @rule(checkpoint=consumes(checkpoints))
    def release(self, checkpoint: str) -> None:
        self.portal.call(self.world.services.rollouts.release_checkpoint, checkpoint)
        self.released.add(checkpoint)

    @rule(target=rollouts, rollout=consumes(rollouts))
    def close(self, rollout: str) -> str:
        self.portal.call(self.world.services.rollouts.close, rollout)
        del self.state[rollout]
        return self.open()

    @rule()
    def squash(self) -> None:
        self.portal.call(self.world.services.squasher.once)

    @rule()
    def sweep(self) -> None:
        self.portal.call(self.world.services.reaper.once)

    @rule(a=checkpoints, b=checkpoints)
    def diff(self, a: str, b: str) -> None:
        if {a, b} & self.released or not self.state:
            return
        tables = self.portal.call(self.world.services.points.diff, next(iter(self.state)), a, b)["ledger"].tables
        for name, key, before, after in (
            ("item", "key", self.frozen[a][2].items, self.frozen[b][2].items),
            ("entry", "id", self.frozen[a][2].entries, self.frozen[b][2].entries),
        ):
            found = tables.get(name)
            told = {row[key] for row in (*found.added, *found.removed)} if found else set()
            told |= {change.after[key] for change in found.changed} if found else set()
            assert told == {k for k in {**before, **after} if before.get(k) != after.get(k)}, name

    @rule(checkpoint=checkpoints)
    def read_checkpoint(self, checkpoint: str) -> None:
        rollout, _, held = self.frozen[checkpoint]
        if checkpoint in self.released or rollout not in self.state:
            return
        sql = "select key, value from item"
        _, rows, _ = self.portal.call(self.world.services.queries.run, rollout, "ledger", sql, checkpoint)
        assert sorted(bytes(row).decode() for row in rows) == sorted(f'["{k}","{v}"]' for k, v in held.items.items())

    @invariant()
    def the_touched_rollout_holds_what_it_should(self) -> None:
        if self.touched and self.touched in self.state:
            self.check(self.touched)
        self.touched = None

    def check(self, rollout: str) -> None:
        held = self.state[rollout]
        assert self.run("call", rollout, "items") == held.items
        total = sum(held.entries.values())
        assert self.run("call", rollout, "sums") == {"balances": total, "entries": total}
        assert self.run("counters", rollout).get("sequence:entry_id_seq") == held.drawn

    def teardown(self) -> None:
        for checkpoint, (_, digest, held) in self.frozen.items():
            if checkpoint not in self.released:
                (fork,) = self.run("fork", checkpoint)
                self.state[fork] = held
                assert self.run("digest", fork) == digest
        for rollout in list(self.state):
            self.check(rollout)
            self.portal.call(self.world.services.rollouts.close, rollout)
        for checkpoint in self.frozen:
            self.portal.call(self.world.services.rollouts.release_checkpoint, checkpoint)
        left: dict[str, int] = {"": 1}
        for _ in range(100):  # replaced chains are noted first, then forgotten; a background task may be in the way
            self.portal.call(self.world.services.reaper.once)
            if not (left := self.portal.call(self.world.leftovers)):
                break
        assert left == {}


@contextmanager
def machine(dsn: str, **options: Any) -> Iterator[type[Squashed]]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(running_gateway(dsn, chain_layers=2, **options)) as running,
    ):
        world = World(running.services, running.url, dsn)
        yield type("BoundSquashed", (Squashed,), {"portal": portal, "world": world})


def explore(bound: type[Squashed], examples: int) -> None:
    budget = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize="SOAK_SECONDS" not in os.environ,
        database=None,
    )
    end = time.monotonic() + float(os.environ.get("SOAK_SECONDS", "0"))
    while True:
        run_machine(bound, settings=budget)
        if time.monotonic() >= end:
            return


@pytest.mark.timeout(0)
def test_histories_squashed_step_by_step_agree_with_a_model(world_database: str) -> None:
    with machine(world_database, squash_interval_s=3600, reap_interval_s=3600) as bound:
        explore(bound, 5)


@pytest.mark.timeout(0)
def test_histories_squashed_in_the_background_agree_with_a_model(world_database: str) -> None:
    with machine(world_database, squash_interval_s=0.001, reap_interval_s=0.001) as bound:
        explore(bound, 4)
