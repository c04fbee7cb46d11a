"""What is kept of authorizations, for all gateway processes: sealed rows of the control database.

The key is `MEGAMCP_TOKEN_KEY`, or one made once in `data_dir`; it is never in the database, so that a copy of that
gives no token away. A row that was sealed by another key is as good as none. One process at a time renews a grant: it
holds the grant's lock, a transaction on a connection that is kept for that.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import asyncpg
import msgspec

from megamcp.errors import Unprocessable
from megamcp.oauth.discovery import Issuer
from megamcp.oauth.tokens import Client, Tokens
from megamcp.settings import Settings
from megamcp.store import Store, seconds

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

log = logging.getLogger(__name__)

T = TypeVar("T")
CONSENT_S = 600.0
_FRESH_S = 60.0
"""A consent that still lives so long is asked for again, in place of another one."""
_NONCE = 12

LOCK = "select pg_advisory_xact_lock(hashtextextended('oauth ' || $1, 7728))"
GRANT = "select sealed from megamcp.oauth_grants where environment = $1 and server = $2 and resource = $3"
KEEP_GRANT = """insert into megamcp.oauth_grants (environment, server, resource, sealed) values ($1, $2, $3, $4)
    on conflict (environment, server, resource)
    do update set sealed = excluded.sealed, updated_at = clock_timestamp()"""
ASK = """with old as (delete from megamcp.oauth_consents where expires_at < clock_timestamp())
    insert into megamcp.oauth_consents (state, environment, server, resource, sealed, expires_at)
    values ($1, $2, $3, $4, $5, clock_timestamp() + $6)"""
ASKED = """select state, sealed from megamcp.oauth_consents where environment = $1 and server = $2 and resource = $3
    and expires_at > clock_timestamp() + $4 order by expires_at desc limit 1"""
WITHDRAW = "delete from megamcp.oauth_consents where environment = $1 and server = $2 and resource = $3"
TAKE = """with taken as (delete from megamcp.oauth_consents where state = $1 returning *)
    select environment, server, resource, sealed, expires_at > clock_timestamp() as alive from taken"""


@dataclass(frozen=True, slots=True)
class Place:
    """Whose authorization it is."""

    environment: str
    server: str
    resource: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.environment, self.server, self.resource


class Grant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the gateway has for a server: where it is registered, and as what; what it may show."""

    issuer: Issuer | None = None
    resource: str = ""
    client: Client | None = None
    tokens: Tokens | None = None


class Consent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A consent that is waited for, and all that its answer is to be held against."""

    url: str
    verifier: str
    redirect: str
    issuer: Issuer
    client: Client
    resource: str
    scopes: tuple[str, ...] = ()
    because: str = ""
    """The refusal that it is for."""


class Vault:
    """The two tables. `locks` are connections for those who hold a grant's lock while they ask elsewhere."""

    def __init__(self, store: Store, locks: Store, settings: Settings) -> None:
        self._store = store
        self._locks = locks
        self._settings = settings
        self._key: bytes | None = None

    @asynccontextmanager
    async def locked(self, place: Place) -> AsyncIterator["Locked"]:
        """The grant of a place, for one process at a time."""
        async with self._locks.transaction(wait_s=30) as connection:
            await connection.execute(LOCK, "\0".join(place.key).encode().hex())
            yield Locked(self, connection, place)

    async def grant(self, place: Place) -> Grant:
        return self._grant(place, await self._store.value(GRANT, *place.key))

    async def take(self, state: str) -> tuple[Place, Consent] | None:
        """A consent, by the `state` that came back: once, and in time. None for every other."""
        row = await self._store.row(TAKE, _digest(state))
        if row is None or not row["alive"]:
            return None
        place = Place(row["environment"], row["server"], row["resource"])
        consent = self.open(row["sealed"], ("consent", *place.key), Consent)
        return (place, consent) if consent is not None else None

    def _grant(self, place: Place, sealed: bytes | None) -> Grant:
        return (self.open(sealed, ("grant", *place.key), Grant) if sealed else None) or Grant()

    def seal(self, value: msgspec.Struct, about: tuple[str, ...]) -> bytes:
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._cipher().encrypt(nonce, msgspec.json.encode(value), "\0".join(about).encode())

    def open(self, sealed: bytes, about: tuple[str, ...], kind: type[T]) -> T | None:
        """None where it was sealed by another key, or for another purpose."""
        from cryptography.exceptions import InvalidTag

        try:
            text = self._cipher().decrypt(sealed[:_NONCE], sealed[_NONCE:], "\0".join(about).encode())
            return msgspec.json.decode(text, type=kind)
        except (InvalidTag, msgspec.DecodeError):
            log.warning(
                "what is kept to authorize %s was sealed by another key, and is not used: gateways that share a"
                " database need the same MEGAMCP_TOKEN_KEY",
                " of ".join(about[2:0:-1]),
            )
            return None

    def _kept_key(self) -> bytes:
        try:
            return kept_key(self._settings.data_dir)
        except OSError as error:
            raise Unprocessable(
                f"There is no key for tokens, and none can be kept in {self._settings.data_dir}: {error.strerror}.",
                code="no_token_key",
                hint="Set MEGAMCP_TOKEN_KEY, to the same for all gateways on the database.",
            ) from error

    def _cipher(self) -> "AESGCM":
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if self._key is None:
            given = self._settings.token_key
            secret = given.get_secret_value().encode() if given else self._kept_key()
            self._key = hmac.digest(secret, b"megamcp tokens of tool servers", "sha256")
        return AESGCM(self._key)


class Locked:
    """A grant while its lock is held."""

    def __init__(self, vault: Vault, connection: asyncpg.Connection, place: Place) -> None:
        self._vault = vault
        self._connection = connection
        self._place = place

    async def grant(self) -> Grant:
        return self._vault._grant(self._place, await self._connection.fetchval(GRANT, *self._place.key))

    async def keep(self, grant: Grant) -> None:
        sealed = self._vault.seal(grant, ("grant", *self._place.key))
        await self._connection.execute(KEEP_GRANT, *self._place.key, sealed)

    async def asked(self) -> Consent | None:
        """A consent that is waited for already."""
        row = await self._connection.fetchrow(ASKED, *self._place.key, seconds(_FRESH_S))
        return self._vault.open(row["sealed"], ("consent", *self._place.key), Consent) if row else None

    async def withdraw(self) -> None:
        """Nobody is asked any more."""
        await self._connection.execute(WITHDRAW, *self._place.key)

    async def ask(self, state: str, consent: Consent) -> None:
        sealed = self._vault.seal(consent, ("consent", *self._place.key))
        await self._connection.execute(ASK, _digest(state), *self._place.key, sealed, seconds(CONSENT_S))


def kept_key(folder: Path) -> bytes:
    """The deployment's own key: made once, readable for its user only. Several processes may ask at once."""
    file = folder / "token.key"
    with contextlib.suppress(FileNotFoundError):
        return file.read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    made, name = tempfile.mkstemp(dir=folder, prefix=".token.key-")
    try:
        with os.fdopen(made, "wb") as target:
            target.write(secrets.token_bytes(32))
            target.flush()
            os.fsync(target.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(name, file)
    finally:
        os.unlink(name)
    return file.read_bytes()


def _digest(state: str) -> bytes:
    return hashlib.sha256(state.encode()).digest()
