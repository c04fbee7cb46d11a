"""Keys in the database: made, listed, revoked, and found again by what a request shows.

A key is 256 random bits, so its SHA-256 is all that is kept: there is nothing to guess, and nothing to slow down. What
a key is for is remembered for two seconds: a revoked one is refused everywhere by then, and a call costs no round trip.
"""

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import asyncpg

from megamcp.access.principal import Principal, Quotas, Scope
from megamcp.errors import NotFound
from megamcp.store import Store, seconds

PREFIX = "mmk_"
_FRESH_S = 2.0
_REMEMBERED = 10_000

_MAKE = """insert into megamcp.api_keys (id, name, hash, scope, tenant, quotas, expires_at, created_by)
    values ($1, $2, $3, $4, $5, $6, clock_timestamp() + $7, $8) returning *"""
_LIVE = "select * from megamcp.api_keys where id = $1 and revoked_at is null"
_LIST = "select * from megamcp.api_keys order by created_at, id"
# Revoked ones stay: the audit log names keys by their ids.
_REVOKE = """update megamcp.api_keys set revoked_at = coalesce(revoked_at, clock_timestamp())
    where id = $1 returning id"""


@dataclass(slots=True)
class _Known:
    principal: Principal | None
    hash: bytes
    expires: float | None
    until: float


class Keys:
    """The keys of the database, as one gateway process knows them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def make(
        self, name: str, scope: Scope, tenant: str, quotas: Quotas, ttl_s: float | None, by: str | None
    ) -> tuple[asyncpg.Record, str]:
        """A new key, and its text, which is known to nobody afterwards."""
        identifier = secrets.token_hex(8)
        text = f"{PREFIX}{identifier}_{secrets.token_urlsafe(32)}"
        lease = None if ttl_s is None else seconds(ttl_s)
        kept = {name: value for name, value in asdict(quotas).items() if value is not None}
        row = await self._store.row(_MAKE, identifier, name, _hash(text), scope, tenant, kept, lease, by)
        assert row is not None
        return row, text

    async def list(self) -> Sequence[asyncpg.Record]:
        """All keys, revoked and expired ones too, oldest first."""
        return await self._store.rows(_LIST)

    async def revoke(self, identifier: str) -> None:
        """Idempotent. Raises `NotFound` for a key that never was."""
        if await self._store.value(_REVOKE, identifier) is None:
            raise NotFound(f"There is no key {identifier[:80]!r}.", code="key_not_found")
        self._known.pop(identifier, None)

    async def find(self, text: str) -> Principal | None:
        """Who shows this key; None for one that isn't, or isn't any more."""
        identifier, _, rest = text.removeprefix(PREFIX).partition("_")
        if not rest or len(text) > 200 or not identifier.isalnum():
            return None
        now = time.monotonic()
        known = self._known.get(identifier)
        if known is None or known.until <= now:
            known = await self._look(identifier, now)
        if not hmac.compare_digest(_hash(text), known.hash):
            return None
        if known.expires is not None and known.expires <= time.time():
            return None
        return known.principal

    async def _look(self, identifier: str, now: float) -> _Known:
        row = await self._store.row(_LIVE, identifier)
        if row is None:
            known = _Known(None, b"", None, now + _FRESH_S)
        else:
            expires = row["expires_at"].timestamp() if row["expires_at"] else None
            known = _Known(principal_of(row), bytes(row["hash"]), expires, now + _FRESH_S)
        self._known[identifier] = known
        self._known.move_to_end(identifier)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return known


def principal_of(row: Any) -> Principal:
    """Whom a key's row stands for."""
    return Principal(row["id"], row["name"], Scope(row["scope"]), row["tenant"], Quotas(**row["quotas"]))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
