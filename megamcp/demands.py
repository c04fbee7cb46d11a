"""What a request may not go on without: a rollout that is there and open, a checkpoint that is alive and comparable."""

import asyncpg

from megamcp.errors import Conflict, Gone, NotFound


def found(row: asyncpg.Record | None, rollout: str) -> asyncpg.Record:
    """The rollout's row. Raises `NotFound`."""
    if row is None:
        raise no_rollout(rollout)
    return row


def no_rollout(identifier: str) -> NotFound:
    """The error for an id that is no rollout's; says so where it is a checkpoint's."""
    if identifier.startswith("cp_"):
        return NotFound(
            f"There is no rollout {identifier[:80]}: that is a checkpoint's id.",
            code="rollout_not_found",
            hint="Give the id of a rollout (ro_…). One that starts there: POST /v1/checkpoints/{id}/fork.",
        )
    return NotFound(f"There is no rollout {identifier[:80]}.", code="rollout_not_found")


def no_checkpoint(identifier: str) -> NotFound:
    """The error for an id that is no checkpoint's; says so where it is a rollout's."""
    if identifier.startswith("ro_"):
        return NotFound(
            f"There is no checkpoint {identifier[:80]}: that is a rollout's id.",
            code="checkpoint_not_found",
            hint="Give the id of a checkpoint (cp_…): GET /v1/rollouts/{id}/checkpoints lists those of a rollout.",
        )
    return NotFound(f"There is no checkpoint {identifier[:80]}.", code="checkpoint_not_found")


def alive(row: asyncpg.Record | None, checkpoint: str) -> asyncpg.Record:
    """The checkpoint's row. Raises `NotFound`, or `Gone` when its lease has ended."""
    if row is None:
        raise no_checkpoint(checkpoint)
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
