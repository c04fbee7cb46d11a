"""Environments that change while the gateway runs: loaded again on SIGHUP, or when a file of theirs has changed.

A folder whose content is new becomes a new version beside the others; rollouts that are open stay on theirs and none of
their calls notices. A folder that can't be loaded is told in the log, and what was loaded before stays.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from megamcp.app import load_environments
from megamcp.errors import MegaMCPError
from megamcp.settings import Settings

log = logging.getLogger("megamcp")

_LOOK_S = 1.0
_MOST_FILES = 10_000


@contextlib.asynccontextmanager
async def reloading(settings: Settings, dsn: str) -> AsyncIterator[None]:
    """While the gateway runs: heeds SIGHUP, and where it is wanted, the files."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, asked.set)
    tasks = [asyncio.create_task(_reload(settings, dsn, asked), name="reload environments")]
    if settings.reload:
        tasks.append(asyncio.create_task(_watch(settings.environments, asked), name="watch environments"))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _reload(settings: Settings, dsn: str, asked: asyncio.Event) -> None:
    while True:
        await asked.wait()
        asked.clear()
        log.info("loading the environments again")
        try:
            await load_environments(settings, dsn)
        except MegaMCPError as error:
            problems = error.extra.get("problems") or ()
            told = "".join(f"\n  {one['where']}: {one['problem']}" for one in problems)
            log.error("the environments stay as they were: %s%s", error.message, told)
        except Exception:
            log.exception("the environments stay as they were")


async def _watch(folders: list[Path], asked: asyncio.Event) -> None:
    known = await asyncio.to_thread(_seen, folders)
    while True:
        await asyncio.sleep(_LOOK_S)
        now = await asyncio.to_thread(_seen, folders)
        if now != known:
            await asyncio.sleep(_LOOK_S)  # editors and checkouts write more than one file
            known = await asyncio.to_thread(_seen, folders)
            asked.set()


def _seen(folders: list[Path]) -> dict[str, tuple[int, int]]:
    """Time and size of every file of the folders."""
    found: dict[str, tuple[int, int]] = {}
    for folder in folders:
        files = folder.rglob("*") if folder.is_dir() else [folder]
        for file in files:
            with contextlib.suppress(OSError):
                stat = file.stat()
                if "__pycache__" not in file.parts:
                    found[str(file)] = stat.st_mtime_ns, stat.st_size
            if len(found) >= _MOST_FILES:
                return found
    return found
