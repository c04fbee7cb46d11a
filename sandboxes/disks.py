"""The disk limit of sandboxes, where no quota keeps it: what each has written is looked at again and again."""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from sandboxes import layers

_EACH_S = 1.0

Watched = tuple[Path, int, Callable[[str], None]]
"""A folder, the bytes that may be in it, and what ends its sandbox (told why)."""


async def patrol(watched: Callable[[], Iterable[Watched]]) -> None:
    """Ends what is over its limit, until cancelled. `watched` gives those that aren't being ended already."""
    while True:
        began = time.monotonic()
        for folder, limit, end in list(watched()):
            if await asyncio.to_thread(layers.size, folder) > limit:
                end(f"it was over its disk limit of {limit >> 20} MiB")
        # A tenth of one processor at most.
        await asyncio.sleep(max(_EACH_S, 9 * (time.monotonic() - began)))
