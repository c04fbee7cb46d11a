"""Hypothesis for coroutines: examples are drawn in a thread and run on the session's loop, and end with their test.

Without that, a test that is cut off by its time limit would go on drawing, and the session's end would wait for it.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LIMIT_S = 60.0
"""Of an example, on a slow machine."""


class Over(BaseException):
    """No `Exception`, which Hypothesis would try to make smaller."""


async def drawn(
    attempt: Callable[..., Coroutine[Any, Any, None]], *strategies: st.SearchStrategy[Any], examples: int
) -> None:
    """Tries as many examples; each strategy gives one argument."""
    loop, over = asyncio.get_running_loop(), threading.Event()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.tuples(*strategies))
    def run(arguments: tuple[Any, ...]) -> None:
        if over.is_set():
            raise Over
        limited = asyncio.wait_for(attempt(*arguments), LIMIT_S)
        asyncio.run_coroutine_threadsafe(limited, loop).result()

    try:
        await asyncio.to_thread(run)
    finally:
        over.set()
