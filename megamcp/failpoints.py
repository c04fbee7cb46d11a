"""Places where a test may kill, fail or delay the gateway. They do nothing unless `MEGAMCP_FAILPOINTS` names them.

`MEGAMCP_FAILPOINTS="clone.created=kill,drop.database=sleep:0.2@3"`: a name, an action, and `@n` for the n-th time only.
Actions: `kill` (SIGKILL to this process), `error` (raises `FailpointError`), `sleep:SECONDS`. Read at each pass, so
that a test may set it while the gateway runs. Not a configuration of the product.

`MEGAMCP_FAILPOINTS="@FILE"` is for a gateway in a process of its own. The file holds one `name=action` (or `…@n`: the
n-th time from now). Whoever passes the place takes it, by renaming the file to `FILE.reached`, so that it happens once
however many processes run. One more action is known here: `hold` waits until `FILE.reached` is gone.
"""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

VARIABLE = "MEGAMCP_FAILPOINTS"
_passed: Counter[str] = Counter()


class FailpointError(Exception):
    """Raised where a failpoint says `error`."""


async def failpoint(name: str) -> None:
    """Passes this place, and does there what the environment asks for."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    if wanted.startswith("@"):
        await _from_file(Path(wanted[1:]), name)
        return
    for entry in wanted.split(","):
        place, _, action = entry.strip().partition("=")
        if place != name:
            continue
        _passed[name] += 1
        action, _, turn = action.partition("@")
        if turn and int(turn) != _passed[name]:
            continue
        await _act(name, action)


async def _from_file(file: Path, name: str) -> None:
    reached = file.with_name(f"{file.name}.reached")
    try:
        place, _, action = file.read_text().strip().partition("=")
        if place != name:
            return
        action, _, turn = action.partition("@")
        if turn and int(turn) > 1:
            file.write_text(f"{name}={action}@{int(turn) - 1}")
            return
        file.rename(reached)
    except FileNotFoundError:
        return
    if action != "hold":
        await _act(name, action)
        return
    while reached.exists():  # noqa: ASYNC110 - another process says when
        await asyncio.sleep(0.01)


async def _act(name: str, action: str) -> None:
    match action.partition(":"):
        case ("kill", _, _):
            os.kill(os.getpid(), signal.SIGKILL)
        case ("error", _, _):
            raise FailpointError(name)
        case ("sleep", _, seconds):
            await asyncio.sleep(float(seconds))
        case _:
            raise ValueError(f"{VARIABLE}: {name}={action} is no failpoint; write name=kill, error or sleep:SECONDS")


def reset() -> None:
    """Forget how often each place was passed."""
    _passed.clear()
