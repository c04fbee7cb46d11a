"""Which layers of a chain are merged: chains stay short, and no row is copied more than a few times."""

import math

from hypothesis import given
from hypothesis import strategies as st

from megamcp.state.squash import difference, first_to_merge

MOST = 8


def copied(checkpoints: list[int]) -> tuple[int, int]:
    """Rows that squashing copies along a trajectory that writes so many new rows a turn, and the longest chain."""
    chain: list[int] = []
    work = longest = 0
    for rows in checkpoints:
        chain.append(rows)
        longest = max(longest, len(chain))
        if len(chain) > MOST:
            first = first_to_merge(chain, MOST)
            merged = sum(chain[first:])
            chain = [*chain[:first], merged]
            work += merged
    return work, longest


@given(st.lists(st.integers(0, 100), min_size=1, max_size=300))
def test_chains_stay_short(checkpoints: list[int]) -> None:
    assert copied(checkpoints)[1] <= MOST + 1


def test_a_row_is_copied_about_as_often_as_the_rows_double() -> None:
    turns = 2000
    assert copied([5] * turns)[0] <= 5 * turns * math.log2(turns)


def test_a_big_layer_is_left_alone_by_small_ones() -> None:
    work, _ = copied([50_000, *[5] * 1000])
    assert work < 50_000 + 5000 * math.log2(1000)


@given(st.lists(st.integers(0, 10**6), min_size=3, max_size=200), st.integers(2, 16))
def test_at_least_two_layers_become_one(rows: list[int], most: int) -> None:
    if len(rows) > most:
        first = first_to_merge(rows, most)
        assert 0 <= first <= len(rows) - 2
        assert first + 1 <= most


def test_what_a_squash_replaced_is_told_from_the_two_chains() -> None:
    assert difference([64, 128, 192, 256], [64, 257]) == ([128, 192, 256], 257)
