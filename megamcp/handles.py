"""State handles: signed, expiring, good for one call.

A handle tells PostgreSQL which rollout's state a call may touch. The gateway mints it, a tool server carries it
unread, and `megamcp.open_handle` (megamcp/sql/control.sql) checks it. A tool server has no key, so it can't make one.
"""

import hashlib
import hmac
import secrets
import uuid
from dataclasses import dataclass, field
from enum import StrEnum


class Mode(StrEnum):
    """What a handle allows."""

    WRITE = "w"
    """One call that may write; runs alone in its rollout."""
    READ = "r"
    """One call in a read-only transaction; runs beside other reads."""
    QUERY = "q"
    """One evaluator's query by the state's query role."""
    DEED = "d"
    """Says whose a database is, from which epoch on. No call, and good for ever."""


def new_id(prefix: str) -> str:
    """An unguessable id, 128 bits: `ro_…`, `cp_…`, `gr_…`."""
    return f"{prefix}_{secrets.token_hex(16)}"


def fingerprint(server: str, tool: str, arguments: bytes) -> bytes:
    """What an idempotency key is tied to: the same key with another fingerprint is refused."""
    digest = hashlib.sha256()
    for part in (server.encode(), tool.encode(), arguments):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Signer:
    """Mints handles with the deployment's key, and derives the passwords of state roles from it."""

    secret: bytes = field(repr=False)

    @staticmethod
    def pads(secret: bytes) -> tuple[bytes, bytes]:
        """The inner and outer block of HMAC-SHA256 (RFC 2104), for `megamcp.keys`."""
        block = secret.ljust(64, b"\0")
        return bytes(b ^ 0x36 for b in block), bytes(b ^ 0x5C for b in block)

    def mint(
        self,
        *,
        rollout: str,
        server: str,
        epoch: int,
        mode: Mode,
        deadline: float,
        nonce: uuid.UUID | None = None,
        idempotency_key: str | None = None,
        request: bytes = b"",
        point: str = "",
    ) -> str:
        """A handle for one call, valid until `deadline` (Unix time in seconds). `request` is the call's fingerprint."""
        key = "" if idempotency_key is None else idempotency_key.encode().hex()
        single_use = (nonce or uuid.uuid4()).hex
        fields = (rollout, server, epoch, mode, single_use, int(deadline * 1000), key, request.hex(), point)
        signed = ".".join(("v1", *map(str, fields)))
        mac = hmac.digest(self.secret, signed.encode(), "sha256")
        return f"{signed}.{mac.hex()}"

    def deed(self, database: str, *, rollout: str, server: str, epoch: int) -> str:
        """What binds a copy to the rollout that it was made for. The same each time, and without effect the second."""
        never, mode = uuid.UUID(int=0), Mode.DEED
        return self.mint(
            rollout=rollout, server=server, epoch=epoch, mode=mode, deadline=0, nonce=never, point=database
        )

    def password(self, purpose: str) -> str:
        """A role's password. Derived, so that every gateway process knows it and none has to store it."""
        return hmac.digest(self.secret, b"role\0" + purpose.encode(), "sha256").hex()
