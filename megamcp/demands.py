"""What a request may not go on without: a rollout that is there and open, a checkpoint that is alive and comparable."""

import asyncpg

from megamcp.errors import Conflict, Gone, NotFound


def found(row: asyncpg.Record | None, rollout: str) -> asyncpg.Record:
    """The rollout's row. Raises `NotFound`."""
    if row is None:
        raise NotFound(
            f"There is no rollout {rollout}.",
            code="rollout_not_found",
            hint="Open one with POST /v1/rollouts; ended ones are forgotten after a while.",
        )
    return row


def alive(row: asyncpg.Record | None, checkpoint: str) -> asyncpg.Record:
    """The checkpoint's row. Raises `NotFound`, or `Gone` when its lease has ended."""
    if row is None:
        raise NotFound(f"There is no checkpoint {checkpoint}.", code="checkpoint_not_found")
    if not row["alive"]:
        raise Gone(
            f"Checkpoint {checkpoint} was released or its lease ended.",
            code="checkpoint_gone",
            hint="Renew or pin checkpoints that you want to come back to.",
        )
    return row


def compared(rollout: asyncpg.Record, checkpoint: asyncpg.Record) -> asyncpg.Record:
    """The checkpoint. Raises `Conflict` when it is of another environment version than the rollout."""
    if checkpoint["environment"] != rollout["environment"]:
        raise Conflict(
            f"Checkpoint {checkpoint['id']} is of environment {checkpoint['environment_name']}.",
            code="foreign_checkpoint",
            hint="Only points of the same environment version can be compared.",
        )
    return checkpoint


def demand_open(row: asyncpg.Record) -> None:
    """Raises `Gone` for a rollout that has ended."""
    if row["status"] != "open":
        raise Gone(
            f"Rollout {row['id']} is {row['status']}.",
            code=f"rollout_{row['status']}",
            hint="Its checkpoints may still be forked: POST /v1/checkpoints/{id}/fork.",
        )
