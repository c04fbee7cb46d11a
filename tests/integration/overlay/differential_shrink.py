"""Makes a failing program small: parts are dropped while it still fails.

Hypothesis would try other values for each number too, five minutes long; a number means nothing by its size here.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrunk(whole: Sequence[T], fails: Callable[[list[T]], bool], seconds: float) -> list[T]:
    """A part of `whole` that still fails, of which no element can be left out unless the time is over."""
    kept = list(whole)
    end = time.monotonic() + seconds
    size = len(kept) // 2
    while size and time.monotonic() < end:
        start, before = 0, len(kept)
        while start < len(kept) and time.monotonic() < end:
            rest = kept[:start] + kept[start + size :]
            if fails(rest):
                kept = rest
            else:
                start += size
        if size > 1 or len(kept) == before:
            size //= 2
    return kept
