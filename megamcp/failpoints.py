"""Places where a test may kill, fail or delay the gateway. They do nothing unless `MEGAMCP_FAILPOINTS` names them.

`MEGAMCP_FAILPOINTS="clone.created=kill,drop.database=sleep:0.2@3"`: a name, an action, and `@n` for the n-th time only.
Actions: `kill` (SIGKILL to this process), `error` (raises `FailpointError`), `sleep:SECONDS`. Read at each pass, so
that a test may set it while the gateway runs. Not a configuration of the product.
"""

import asyncio
import os
import signal
from collections import Counter

VARIABLE = "MEGAMCP_FAILPOINTS"
_passed: Counter[str] = Counter()


class FailpointError(Exception):
    """Raised where a failpoint says `error`."""


async def failpoint(name: str) -> None:
    """Passes this place, and does there what the environment asks for."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    for entry in wanted.split(","):
        place, _, action = entry.strip().partition("=")
        if place != name:
            continue
        _passed[name] += 1
        action, _, turn = action.partition("@")
        if turn and int(turn) != _passed[name]:
            continue
        match action.partition(":"):
            case ("kill", _, _):
                os.kill(os.getpid(), signal.SIGKILL)
            case ("error", _, _):
                raise FailpointError(name)
            case ("sleep", _, seconds):
                await asyncio.sleep(float(seconds))
            case _:
                raise ValueError(f"{VARIABLE}: {entry!r} is no failpoint; write name=kill, error or sleep:SECONDS")


def reset() -> None:
    """Forget how often each place was passed."""
    _passed.clear()
