"""JWTs as bearer tokens: signature, issuer, audience and time checked, then read as a principal.

Keys come from the issuer's JWKS, are kept for ten minutes, and are fetched again for a `kid` that isn't among them, at
most every ten seconds. Only RS256, ES256 and EdDSA: never what the token says of itself alone, never a shared secret.
What was verified is remembered for a minute, so that a call costs no signature. Where the issuer can't be asked, nobody
comes in.
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from typing import Any
from urllib.parse import urlsplit

import jwt
import msgspec

from megamcp.access.principal import DEFAULT_TENANT, SCOPE_PREFIX, Principal, Scope
from megamcp.errors import Forbidden, MegaMCPError, Unauthorized, Unavailable
from megamcp.oauth.authorities import base_url
from megamcp.oauth.fetch import Fetcher
from megamcp.settings import Settings

ALGORITHMS = ("RS256", "ES256", "EdDSA")
_KEPT_S, _AGAIN_S, _VERIFIED_S, _LEEWAY_S = 600.0, 10.0, 60.0, 10.0
_REMEMBERED = 10_000


class Tokens:
    """Reads tokens of one issuer."""

    def __init__(self, settings: Settings) -> None:
        assert settings.jwt_issuer is not None
        self.issuer = settings.jwt_issuer
        self._url = settings.jwt_jwks_url or f"{self.issuer.rstrip('/')}/.well-known/jwks.json"
        self._audience = (settings.jwt_audience or base_url(settings)).rstrip("/")
        self._tenant_claim = settings.jwt_tenant_claim
        self._scope_claim = settings.jwt_scope_claim
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._fetched = float("-inf")
        self._fetching = asyncio.Lock()
        self._verified: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    async def read(self, text: str) -> Principal:
        """Raises `Unauthorized` for a token that isn't good, `Forbidden` for one that is and is for nothing here, and
        `Unavailable` where the issuer's keys can't be had."""
        digest = hashlib.sha256(text.encode()).digest()
        now = time.time()
        if (known := self._verified.get(digest)) and known[0] > now:
            return known[1]
        claims = await self._claims(text)
        principal = self._principal(claims)
        self._verified[digest] = (min(now + _VERIFIED_S, float(claims["exp"]) + _LEEWAY_S), principal)
        self._verified.move_to_end(digest)
        if len(self._verified) > _REMEMBERED:
            self._verified.popitem(last=False)
        return principal

    async def _claims(self, text: str) -> dict[str, Any]:
        try:
            header = jwt.get_unverified_header(text)
            if header.get("alg") not in ALGORITHMS:
                raise refused(f"it is not signed by {', '.join(ALGORITHMS)}")
            key = await self._key(header.get("kid"))
            if key.algorithm_name != header["alg"]:
                raise refused("its algorithm is not its key's")
            return jwt.decode(
                text,
                key,
                algorithms=list(ALGORITHMS),
                issuer=self.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"], "verify_aud": False},
            )
        except jwt.PyJWTError as error:
            raise refused(str(error)) from None
        except (ValueError, TypeError):
            raise refused("it can't be read") from None

    async def _key(self, kid: Any) -> jwt.PyJWK:
        if kid is not None and not isinstance(kid, str):
            raise refused("its kid is no text")
        asked = time.monotonic()
        if asked - self._fetched > _KEPT_S or (self._pick(kid) is None and asked - self._fetched > _AGAIN_S):
            async with self._fetching:
                if self._fetched < asked:
                    await self._fetch()
        if (found := self._pick(kid)) is None:
            raise refused("its key is none of the issuer's")
        return found

    def _pick(self, kid: str | None) -> jwt.PyJWK | None:
        if kid is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(kid)

    async def _fetch(self) -> None:
        try:
            fetched = await Fetcher("jwks", self._url).get(self._url)
            if fetched.status != 200:
                raise ValueError(fetched.status)
            document = msgspec.json.decode(fetched.body, type=dict[str, Any])
            keys = [key for key in document["keys"] if isinstance(key, dict)]
        except (MegaMCPError, ValueError, KeyError, TypeError) as error:
            if self._keys and time.monotonic() - self._fetched < _KEPT_S:
                return  # a key more is looked for; those that are known are good
            raise Unavailable("The issuer's keys for tokens can't be had.", code="jwks_unavailable") from error
        self._keys = dict(_usable(keys))
        self._fetched = time.monotonic()

    def _principal(self, claims: dict[str, Any]) -> Principal:
        path = self._addressed(claims["aud"])
        scopes = claims.get(self._scope_claim) or ()
        named = scopes.split() if isinstance(scopes, str) else scopes if isinstance(scopes, list) else ()
        scope = next((scope for scope in Scope if f"{SCOPE_PREFIX}{scope}" in named), None)
        if scope is None:
            raise Forbidden("The token has no scope of this gateway.", code="forbidden")
        tenant = claims.get(self._tenant_claim) if self._tenant_claim else DEFAULT_TENANT
        if tenant is None and scope is Scope.ADMIN:
            tenant = DEFAULT_TENANT
        rollout = claims.get("rollout")
        subject = claims.get("sub", "")
        if not isinstance(tenant, str) or not tenant or not isinstance(rollout, str | None) or type(subject) is not str:
            raise refused(f"its claim {self._tenant_claim!r}, rollout or sub is missing or no text")
        if "\0" in f"{tenant}{rollout}{subject}":
            raise refused("a claim holds a NUL character")
        return Principal(f"jwt:{subject}"[:200], subject[:200], scope, tenant[:100], rollout=rollout, path=path)

    def _addressed(self, audience: Any) -> str | None:
        """The path of the gateway that a token is for; None for all of it."""
        named = [audience] if isinstance(audience, str) else audience if isinstance(audience, list) else []
        inside = [one.rstrip("/") for one in named if isinstance(one, str)]
        if self._audience in inside:
            return None
        for one in inside:
            if one.startswith(f"{self._audience}/"):
                return urlsplit(one).path
        raise refused("it is for another audience")


def _usable(keys: list[dict[str, Any]]) -> list[tuple[str | None, jwt.PyJWK]]:
    """Those that sign, by an algorithm that is taken."""
    found = []
    for key in keys:
        if key.get("kty") not in ("RSA", "EC", "OKP") or key.get("use", "sig") != "sig":
            continue
        try:
            made = jwt.PyJWK(key)
        except (jwt.PyJWTError, ValueError, TypeError):
            continue
        if made.algorithm_name in ALGORITHMS:
            found.append((made.key_id, made))
    return found


def refused(why: str) -> Unauthorized:
    """The error for a token that isn't good."""
    return Unauthorized(f"The bearer token is refused: {why}.", code="invalid_token")
