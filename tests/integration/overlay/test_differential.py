"""The same random programs on copied-on-write rollouts and on plain tables give the same answers.

A program opens rollouts over a random schema and calls, checkpoints, forks and rolls back; each call is a
transaction of one to three random statements. After every call the rows of the rollout's tables are
compared, and command tags, RETURNING rows, SQLSTATE and constraint of every statement. `FUZZ_SECONDS=600
pytest …` searches on with other seeds; a find is told as schema, statements and both results, and becomes a
test in `test_differential_regressions.py`.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from random import Random

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.overlay.differential_database import Database
from tests.integration.overlay.differential_programs import seed_insert, statement
from tests.integration.overlay.differential_run import Call, Checkpoint, Fork, Pair, Rollback, Step
from tests.integration.overlay.differential_schema import schema

FUZZ_SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SCHEMAS = 40
EXAMPLES = 300
BASE_ROWS = 25

settings.register_profile(
    "overlay",
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

numbers = st.integers(0, 7)
calls = st.tuples(numbers, st.lists(st.integers(0, 9_999), min_size=1, max_size=3))
steps = st.lists(
    st.one_of(
        calls,
        calls,
        calls,
        calls,
        st.builds(Checkpoint, numbers),
        st.builds(Fork, numbers),
        st.builds(Rollback, numbers),
    ),
    min_size=4,
    max_size=24,
)


class Search:
    """Programs by number of their schema; a schema is loaded once."""

    def __init__(self, runner: asyncio.Runner, database: Database) -> None:
        self._runner = runner
        self._database = database
        self._pairs: dict[int, Pair] = {}

    def run(self, number: int, drawn: list[tuple[int, list[int]] | Step]) -> None:
        made = schema(number)
        program = [
            Call(step[0], tuple(statement(made, seed) for seed in step[1])) if isinstance(step, tuple) else step
            for step in drawn
        ]
        self._runner.run(self._pair(number).run(program))

    def _pair(self, number: int) -> Pair:
        if number not in self._pairs:
            made, random = schema(number), Random(number)
            seeds = [seed_insert(random, table) for _ in range(BASE_ROWS) for table in made.tables]
            loading = Pair.load(
                self._database.connection, f"plain_{number}", made.ddl, [t.name for t in made.tables], seeds
            )
            self._pairs[number] = self._runner.run(loading)
        return self._pairs[number]

    def forget(self) -> None:
        """Unload every schema, so that a long search needs no more room than a short one."""
        for pair in self._pairs.values():
            self._runner.run(pair.unload())
        self._pairs.clear()


@pytest.fixture
def search(postgres_dsn: str) -> Iterator[Search]:
    with asyncio.Runner() as runner:
        database = runner.run(Database.create(postgres_dsn))
        made = Search(runner, database)
        try:
            yield made
        finally:
            made.forget()
            runner.run(database.drop())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_programs_agree_with_plain_tables(search: Search) -> None:
    @settings(settings.get_profile("overlay"))
    @given(st.integers(0, SCHEMAS - 1), steps)
    def programs(number: int, drawn: list[tuple[int, list[int]] | Step]) -> None:
        search.run(number, drawn)

    programs()


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not FUZZ_SECONDS, reason="set FUZZ_SECONDS to search longer than CI does")
def test_a_longer_search_finds_no_difference(search: Search) -> None:
    end = time.monotonic() + FUZZ_SECONDS
    start = int(os.environ.get("FUZZ_SEED", str(time.time_ns() % 1_000_000)))
    for turn in itertools.count(start):
        if time.monotonic() > end:
            return

        @hypothesis.seed(turn)
        @settings(settings.get_profile("overlay"), derandomize=False, max_examples=60)
        @given(st.integers(turn * 8, turn * 8 + 7), steps)
        def programs(number: int, drawn: list[tuple[int, list[int]] | Step]) -> None:
            search.run(number, drawn)

        programs()
        search.forget()
