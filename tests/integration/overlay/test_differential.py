"""The same random programs on copied-on-write rollouts and on plain tables give the same answers.

A program of 50 to 200 statements opens rollouts over a random schema and calls, checkpoints, forks and rolls
back; each call is a transaction. After every call the rows and sequences of the rollout are compared, and of every
statement its count, RETURNING rows, SQLSTATE and constraint. `make fuzz SECONDS=600` searches on with other seeds; a
find is told as schema, statements and both results, and becomes a test in `test_differential_regressions.py`.
What was run, refused and allowed to differ is printed at the end.
"""

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest

from megamcp.errors import UnsupportedSchema
from tests.integration.overlay import differential_features as features
from tests.integration.overlay.differential_census import SCHEMA, STATEMENTS, in_schema, in_statement
from tests.integration.overlay.differential_database import Database
from tests.integration.overlay.differential_features import accepted
from tests.integration.overlay.differential_programs import Statement, seed_insert
from tests.integration.overlay.differential_report import Report
from tests.integration.overlay.differential_run import (
    Call,
    Checkpoint,
    Fork,
    Pair,
    Rewrite,
    Rollback,
    Savepoint,
    Squash,
    Step,
    Undo,
)
from tests.integration.overlay.differential_scenes import scene
from tests.integration.overlay.differential_schema import schema
from tests.integration.overlay.differential_shrink import shrunk
from tests.integration.overlay.differential_swarm import FOCI, focused

FUZZ_SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
FUZZ_WORKERS = int(os.environ.get("FUZZ_WORKERS", "1"))
TURNS = 1
BUDGET_S = 300.0
"""What every run of the tests spends on the search."""
BASE_ROWS = 12
BLOCK, EXAMPLES = 5, 12
"""Schemas and programs of one turn."""

SHRINK_S = 60.0

_WEIGHTS = {
    Statement: 24, Call: 4, Checkpoint: 2, Savepoint: 2, Undo: 2, Fork: 1, Rollback: 1, Rewrite: 1, Squash: 1, None: 1,
}  # fmt: skip


Act = int | Step | Savepoint | Undo | None
"""A number is a statement, an empty Call begins the next transaction, None is nothing."""


def _act(kind: Any, seed: int) -> Act:
    match kind:
        case None:
            return None
        case _ if kind is Statement:
            return seed
        case _ if kind is Call:
            return Call(seed % 8, ())
        case _ if kind in (Rewrite, Squash):
            return kind(seed % 8, seed // 8 % 8)
        case _ if kind in (Savepoint, Undo):
            return kind()
    return kind(seed % 8)


_TAKEN = (frozenset(features.SCHEMA) | frozenset(features.STATEMENTS)) - {"COPY"}
"""What runs without FUZZ_SECONDS don't ask for one by one."""


def acts(random: Random) -> list[Act]:
    kinds = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=random.randint(80, 240))
    return [_act(kind, random.randrange(100_000)) for kind in kinds]


def program(drawn: list[Act], write: Callable[[int], Sequence[Statement]]) -> list[Step]:
    """Statements gather in a call; whatever is no part of a call ends it."""
    steps: list[Step] = []
    rollout, gathered = 0, []
    for act in [*drawn, Call(0, ())]:
        match act:
            case None:
                pass
            case int():
                gathered += write(act)
            case Savepoint() | Undo():
                gathered.append(act)
            case _:
                if gathered:
                    steps.append(Call(rollout, tuple(gathered)))
                    gathered = []
                if isinstance(act, Call):
                    rollout = act.rollout
                else:
                    steps.append(act)
    return steps


class Search:
    """Programs by number of their schema; a schema is loaded once."""

    def __init__(self, runner: asyncio.Runner, database: Database) -> None:
        self._runner = runner
        self._database = database
        self._pairs: dict[int, Pair | None] = {}
        self.taken, refused = _TAKEN, {}
        if FUZZ_SECONDS:
            self.taken, refused = runner.run(accepted(database.connection))
        self.report = Report(not_taken=refused)

    def run(self, number: int, focus: int, drawn: list[Act]) -> None:
        made, pair = focused(schema(number, self.taken), focus), self._pair(number)
        if pair:
            self._runner.run(pair.run(program(drawn, lambda seed: scene(made, seed))))

    def fails(self, number: int, focus: int, drawn: list[Act]) -> bool:
        try:
            self.run(number, focus, drawn)
        except Exception:
            return True
        return False

    def _pair(self, number: int) -> Pair | None:
        """None where the loader refuses constructs together that it takes alone: counted, with its reason."""
        if number not in self._pairs:
            made, random = schema(number, self.taken), Random(number)
            seeds = [seed_insert(random, made, table) for _ in range(BASE_ROWS) for table in made.tables]
            names = [t.name for t in made.tables]
            ddl = made.ddl
            loading = Pair.load(self._database, f"plain_{number}", ddl, names, seeds, self.report)
            try:
                self._pairs[number] = self._runner.run(loading)
                self.report.schemas += 1
                self.report.tables += len(made.tables)
                self.report.done.update(in_schema(ddl))
            except UnsupportedSchema as error:
                self._pairs[number] = None
                for problem in error.extra["problems"]:
                    self.report.together[f"{problem['construct']}: {problem['reason']}"] += 1
        return self._pairs[number]

    def forget(self) -> None:
        """Unload every schema, so that a long search needs no more room than a short one."""
        for pair in self._pairs.values():
            if pair:
                self._runner.run(pair.unload())
        self._pairs.clear()


@pytest.fixture
def search(postgres_dsn: str, record_property: Callable[[str, object], None]) -> Iterator[Search]:
    with asyncio.Runner() as runner:
        database = runner.run(Database.create(postgres_dsn))
        made = Search(runner, database)
        try:
            yield made
        finally:
            record_property("report", f"differential search\n{made.report.text()}")
            made.forget()
            runner.run(database.drop())


def _for(search: Search, seconds: float, turns: Iterator[int]) -> None:
    """Turn after turn, each with schemas and programs of its own, until the time is over."""
    end = time.monotonic() + seconds
    for turn in turns:
        if time.monotonic() > end:
            return
        one_turn(search, turn, SHRINK_S)
        search.forget()


def one_turn(search: Search, turn: int, shrink_s: float = 0.0) -> None:
    """Raises what is found, after so much time for a smaller program."""

    for example in range(EXAMPLES):
        # Not hypothesis: it draws other programs where other modules are loaded.
        random = Random(f"{turn}/{example}")
        number, focus, drawn = turn * BLOCK + random.randrange(BLOCK), random.randrange(FOCI), acts(random)
        _agree(search, number, focus, drawn, shrink_s)


def _agree(search: Search, number: int, focus: int, drawn: list[Act], shrink_s: float) -> None:
    try:
        search.run(number, focus, drawn)
    except Exception:
        if shrink_s:
            search.run(number, focus, shrunk(drawn, lambda part: search.fails(number, focus, part), shrink_s))
        raise


def test_every_named_construct_is_drawn_within_a_fixed_budget() -> None:
    """80 schemas, 75 scenes each: what the search promises to cover comes up again and again."""
    drawn: Counter[str] = Counter()
    for number in range(80):
        made = schema(number, _TAKEN)
        drawn.update(in_schema(made.ddl))
        for seed in range(75):
            seen = focused(made, seed // 10)
            drawn.update(name for one in scene(seen, seed) for name in in_statement(one.sql))
    rare = {name: drawn[name] for name in SCHEMA if drawn[name] < 3}
    rare |= {name: drawn[name] for name in STATEMENTS if drawn[name] < 10}
    assert not rare


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_programs_agree_with_plain_tables(search: Search) -> None:
    """The same programs each time, so that a run says of the code and not of the machine."""
    _for(search, BUDGET_S, iter(range(TURNS)))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not FUZZ_SECONDS, reason="set FUZZ_SECONDS to search longer than CI does")
@pytest.mark.parametrize("worker", range(FUZZ_WORKERS))
def test_a_longer_search_finds_no_difference(search: Search, worker: int) -> None:
    start = int(os.environ.get("FUZZ_SEED", str(time.time_ns() % 1_000_000)))
    _for(search, FUZZ_SECONDS, itertools.count(start + worker, FUZZ_WORKERS))
