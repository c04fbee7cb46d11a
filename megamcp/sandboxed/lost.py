"""What is said where the state of a sandbox or an image is no more: which, why, and what can still be gone back to.

A checkpoint can be gone back to as long as each of its images is there: those of the fork server die with its keeper.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg

from megamcp.errors import Conflict
from megamcp.sandboxed import journal as sql

Ask = Callable[..., Awaitable[Any]]
"""`value` of the store, or `fetchval` of a connection."""


async def box_lost(ask: Ask, rollout: str, server: str, words: str) -> Conflict:
    """A sandbox has ended with something in it; `words` say what follows and why."""
    last = await ask(sql.LAST_WHOLE, rollout)
    return Conflict(
        f"The sandbox of tool server {server!r} has ended{words}", code="state_lost", checkpoint=last, hint=_hint(last)
    )


async def image_lost(ask: Ask, rollout: str, server: str, checkpoint: str | None) -> Conflict:
    """What a rollout stands on, or would go back to, is gone."""
    return _image_lost(server, checkpoint, await ask(sql.LAST_WHOLE, rollout))


async def demand_images(connection: asyncpg.Connection, checkpoint: str, rollout: str | None = None) -> None:
    """Raises `Conflict` (`state_lost`) for a checkpoint that can't be gone back to any more. Without a rollout it is to
    be forked."""
    server = await connection.fetchval(sql.LOST_OF, checkpoint)
    if server is None:
        return
    last = await connection.fetchval(sql.LAST_WHOLE, rollout) if rollout else None
    raise _image_lost(server, checkpoint, last or await connection.fetchval(sql.LAST_WHOLE_BEFORE, checkpoint))


def _image_lost(server: str, checkpoint: str | None, last: str | None) -> Conflict:
    return Conflict(
        f"What {f'checkpoint {checkpoint}' if checkpoint else 'a checkpoint'} keeps of tool server {server!r} died with"
        " the process that had it.",
        code="state_lost",
        checkpoint=last,
        hint=f"{_hint(last)} Runtime criu keeps its checkpoints on disk.",
    )


def _hint(last: str | None) -> str:
    if last is None:
        return "No checkpoint is left to go back to: open a new rollout."
    return f"Checkpoint {last} is still there: roll back to it, or fork it."
