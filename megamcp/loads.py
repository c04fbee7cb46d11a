"""Loading an environment while its caller watches: progress as server-sent events, then the environment or the problem.

Events: `progress` {what, done, total} (at most some a second, the newest of each), `remark` {what}, and at the end
`loaded` (as the JSON answer) or `problem` (RFC 9457). A caller that goes away ends the load, and nothing of it stays.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from megamcp.environments import LoadedEnvironment
from megamcp.errors import MegaMCPError, Unavailable
from megamcp.loading.units import Progress
from megamcp.store import translate
from megamcp.views import encode, environment_view

log = logging.getLogger(__name__)

EVERY_S = 0.2
QUIET_S = 10.0

_running: set[asyncio.Task[LoadedEnvironment]] = set()


async def watched(load: Callable[[Progress], Awaitable[LoadedEnvironment]], path: str) -> AsyncIterator[bytes]:
    """The stream. `path` is what problems are told of."""
    remarks: list[str] = []
    newest: tuple[str, int, int] | None = None

    def progress(what: str, done: int, total: int) -> None:
        nonlocal newest
        if total == 0:
            remarks.append(what)
        else:
            newest = what, done, total

    async def run() -> LoadedEnvironment:
        return await load(progress)

    task = asyncio.create_task(run())
    _running.add(task)
    task.add_done_callback(_over)
    told_at = time.monotonic()
    try:
        while not task.done():
            await asyncio.wait([task], timeout=EVERY_S)
            told = [_event("remark", {"what": remark}) for remark in remarks]
            if newest is not None:
                told.append(_event("progress", dict(zip(("what", "done", "total"), newest, strict=True))))
            remarks, newest = [], None
            if told or time.monotonic() - told_at > QUIET_S:
                told_at = time.monotonic()
                yield b"".join(told) or b": still here\n\n"
        yield _outcome(task, path)
    finally:
        task.cancel()


def _outcome(task: asyncio.Task[LoadedEnvironment], path: str) -> bytes:
    try:
        return _event("loaded", environment_view(task.result()).model_dump(mode="json"))
    except asyncio.CancelledError:
        error: MegaMCPError = Unavailable("The gateway ended the load.", hint="Nothing was loaded. Load it again.")
    except Exception as raised:
        known = translate(raised)
        if known is None:
            log.exception("loading an environment")
        error = known or MegaMCPError("The gateway failed; its log says more.", code="internal")
    return b"event: problem\ndata: %b\n\n" % msgspec.json.encode(error.problem(path), enc_hook=str)


def _event(kind: str, document: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(document))


def _over(task: asyncio.Task[LoadedEnvironment]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # told already, or to nobody any more
