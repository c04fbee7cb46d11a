"""The disk limit of sandboxes, where no quota keeps it: what each has written is looked at again and again.

A single file can't get over the limit: the write is refused, its writer is told and may tidy up, and that is all. So
one file that has come to the limit isn't counted; what ends a sandbox is the sum of the others, which nothing refuses.
"""

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
        await look(watched)
        # A tenth of one processor at most.
        await asyncio.sleep(max(_EACH_S, 9 * (time.monotonic() - began)))


async def look(watched: Callable[[], Iterable[Watched]]) -> None:
    """One round."""
    for folder, limit, end in list(watched()):
        if await asyncio.to_thread(layers.size, folder, limit) > limit:
            end(f"it was over its disk limit of {limit >> 20} MiB")
