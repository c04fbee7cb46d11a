"""Plain values of the clone engine."""

import uuid
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Keys:
    """The blocks of HMAC-SHA256 that state handles are checked with (`Signer.pads`)."""

    inner_pad: bytes = field(repr=False)
    outer_pad: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Mark:
    """A position that a database can be rewound to.

    `written`: rows or sequences changed, or DDL ran, since the mark before. `exact`: what happened since then can be
    undone row by row. `digest`: 128-bit sum of all rows; None after DDL, until `Inside.digest` has computed it. `call`:
    id of the last call before it. `bytes`: that the log has ever grown by.
    """

    position: int
    written: bool
    exact: bool
    digest: int | None
    call: int
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """What a copy made now would be: the end of its log, its last call, and whether it is at a mark as it is."""

    head: int
    call: int
    there: bool


@dataclass(frozen=True, slots=True)
class Bound:
    """The rollout, server and epoch whose handles a database takes."""

    rollout: str
    server: str
    epoch: int


@dataclass(frozen=True, slots=True)
class CallRow:
    """A call as this database recorded it. `id` grows; `outcome` is `done` or `failed`, `mode` `r` or `w`."""

    id: int
    nonce: uuid.UUID
    rollout: str
    server: str
    epoch: int
    mode: str
    tool: str
    arguments: str
    outcome: str
    result: str
    is_error: bool
    idempotency_key: str | None
    fingerprint: bytes | None
    began: datetime
    ended: datetime


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of the file system that holds the cluster's data."""

    free: int
    total: int
