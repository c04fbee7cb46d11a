"""Chance for the seed's generator that is the same on every Python and machine.

Only `random.Random.random` is used, the one method whose sequence Python promises to keep.
"""

import random
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")


class Dice:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def between(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]

    def skewed(self, count: int, power: float) -> int:
        """An index below `count`; a power above 1 prefers small ones."""
        return int(count * self._random() ** power)

    def some(self, options: Sequence[T], count: int) -> list[T]:
        rest = list(options)
        return [rest.pop(int(self._random() * len(rest))) for _ in range(min(count, len(rest)))]

    def weighted(self, weights: dict[T, float]) -> T:
        mark = self._random() * sum(weights.values())
        for option, weight in weights.items():
            mark -= weight
            if mark < 0:
                return option
        return option


def minutes(dice: Dice, low_hours: float, high_hours: float) -> timedelta:
    return timedelta(minutes=dice.between(int(low_hours * 60), int(high_hours * 60)))
