"""What an authorization server is asked for: a client, a consent's URL, tokens. One function a request of OAuth 2.1.

Answers of strangers: what they say is told in errors only as far as it is one of OAuth's own words. What is secret here
(`Client.secret`, `Tokens`, codes and verifiers) goes to the token endpoint and nowhere else.
"""

import base64
import hashlib
import re
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from megamcp.errors import UpstreamError
from megamcp.oauth.discovery import Found, Issuer
from megamcp.oauth.fetch import Fetched, Fetcher

_WORD = re.compile(r"[a-z0-9_.-]{1,60}")
_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_ASSERTION_S = 300


class Client(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the gateway is to an authorization server. `issuer` is the one that it has registered with by itself, None
    where it is the same for all; `redirect` and `scopes` are what it has registered for."""

    id: str
    secret: str | None = None
    method: str = "none"
    issuer: str | None = None
    redirect: str | None = None
    scopes: tuple[str, ...] = ()
    key: str | None = None
    algorithm: str = "ES256"

    def __repr__(self) -> str:
        return f"Client({self.id!r})"


class Tokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a server is shown, and what renews it. `requested` are the scopes that were asked for."""

    access: str
    refresh: str | None = None
    expires_at: float | None = None
    renew_at: float | None = None
    requested: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "Tokens(…)"


class Refused(Exception):
    """The authorization server says no, in OAuth's words: what was shown to it is not, or no longer, good."""

    def __init__(self, error: str) -> None:
        super().__init__(error)
        self.error = error


class _TokenAnswer(msgspec.Struct):
    access_token: str
    token_type: str = "Bearer"
    expires_in: int | float | str | None = None
    refresh_token: str | None = None


class _Registered(msgspec.Struct):
    client_id: str
    client_secret: str | None = None
    token_endpoint_auth_method: str | None = None


class _Error(msgspec.Struct):
    error: str = ""


def metadata_document(redirect: str, scopes: Sequence[str], method: str) -> dict[str, Any]:
    """How the gateway describes itself when it registers (RFC 7591), and in its client id metadata document."""
    local = redirect.startswith(("http://127.0.0.1", "http://localhost", "http://[::1]"))
    document: dict[str, Any] = {
        "client_name": "MegaMCP",
        "redirect_uris": [redirect],
        "grant_types": ["authorization_code", "refresh_token"],
        "response_types": ["code"],
        "token_endpoint_auth_method": method,
        "application_type": "native" if local else "web",
    }
    return document | ({"scope": " ".join(scopes)} if scopes else {})


def auth_method(issuer: Issuer, *, secret: bool) -> str:
    """How the token endpoint is to know the client."""
    offered = issuer.token_endpoint_auth_methods_supported or ["client_secret_basic"]
    wanted = ("client_secret_basic", "client_secret_post", "none") if secret else ("none",)
    return next((method for method in wanted if method in offered), wanted[0])


async def register(fetcher: Fetcher, issuer: Issuer, redirect: str, scopes: Sequence[str]) -> Client:
    """A client of this authorization server. Raises Refused, UpstreamError."""
    assert issuer.registration_endpoint is not None
    offered = issuer.token_endpoint_auth_methods_supported or ["client_secret_basic"]
    # A secret is worth having where one is given, but a public client with PKCE is what the gateway is.
    asked = "none" if "none" in offered else auth_method(issuer, secret=True)
    body = msgspec.json.encode(metadata_document(redirect, scopes, asked))
    fetched = await fetcher.post_json(issuer.registration_endpoint, body)
    if fetched.status not in (200, 201):
        raise Refused(_word(fetched))
    made = _decoded(fetched, _Registered)
    method = made.token_endpoint_auth_method or (auth_method(issuer, secret=True) if made.client_secret else "none")
    if method not in ("none", "client_secret_basic", "client_secret_post"):
        raise Refused(f"a client that is to authenticate by {_WORD.match(method) and method!r}")
    if method != "none" and not made.client_secret:
        raise Refused("a client that is to show a secret, and has been given none")
    return Client(
        id=made.client_id,
        secret=made.client_secret,
        method=method,
        issuer=issuer.issuer,
        redirect=redirect,
        scopes=tuple(scopes),
    )


def verifier_and_challenge() -> tuple[str, str]:
    """PKCE, S256 (RFC 7636)."""
    verifier = secrets.token_urlsafe(48)
    digest = hashlib.sha256(verifier.encode()).digest()
    return verifier, base64.urlsafe_b64encode(digest).decode().rstrip("=")


def consent_url(
    issuer: Issuer, client: Client, *, redirect: str, state: str, challenge: str, resource: str, scopes: Sequence[str]
) -> str:
    """Where a person consents."""
    asked = {
        "response_type": "code",
        "client_id": client.id,
        "redirect_uri": redirect,
        "state": state,
        "code_challenge": challenge,
        "code_challenge_method": "S256",
        "resource": resource,
    }
    if scopes:
        asked["scope"] = " ".join(scopes)
    if "offline_access" in scopes:
        asked["prompt"] = "consent"  # OpenID Connect gives no refresh token without
    place = issuer.authorization_endpoint or ""
    return f"{place}{'&' if '?' in place else '?'}{urlencode(asked)}"


async def exchange(
    fetcher: Fetcher,
    issuer: Issuer,
    client: Client,
    *,
    code: str,
    verifier: str,
    redirect: str,
    resource: str,
    scopes: Sequence[str],
) -> Tokens:
    """Tokens for a consent's code. Raises Refused, UpstreamError."""
    form = {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": redirect,
        "code_verifier": verifier,
        "resource": resource,
    }
    return await _ask(fetcher, issuer, client, form, scopes, None)


async def refresh(fetcher: Fetcher, issuer: Issuer, client: Client, tokens: Tokens, resource: str) -> Tokens:
    """Newer tokens. Raises Refused, UpstreamError."""
    assert tokens.refresh is not None
    form = {"grant_type": "refresh_token", "refresh_token": tokens.refresh, "resource": resource}
    return await _ask(fetcher, issuer, client, form, tokens.requested, tokens.refresh)


async def by_credentials(fetcher: Fetcher, found: Found, client: Client, scopes: Sequence[str]) -> Tokens:
    """Tokens for the gateway itself. Raises Refused, UpstreamError."""
    form = {"grant_type": "client_credentials", "resource": found.resource}
    if scopes:
        form["scope"] = " ".join(scopes)
    return await _ask(fetcher, found.issuer, client, form, scopes, None)


async def _ask(
    fetcher: Fetcher, issuer: Issuer, client: Client, form: dict[str, str], scopes: Sequence[str], kept: str | None
) -> Tokens:
    headers: Mapping[str, str] = {}
    form["client_id"] = client.id  # where the header says it too: some look for it here only
    match client.method:
        case "client_secret_basic":
            pair = f"{quote(client.id, safe='')}:{quote(client.secret or '', safe='')}"
            headers = {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
        case "client_secret_post":
            form["client_secret"] = client.secret or ""
        case "private_key_jwt":
            form |= {"client_assertion_type": _ASSERTION, "client_assertion": _assertion(client, issuer.issuer)}
    asked_at = time.time()
    fetched = await fetcher.post_form(issuer.token_endpoint, form, headers)
    if fetched.status not in (200, 201):
        if fetched.status >= 500 or fetched.status == 429:
            raise UpstreamError(
                f"The authorization server {issuer.issuer!r} gives no token now (HTTP {fetched.status}).",
                code="authorization_failed",
            )
        raise Refused(_word(fetched))
    answer = _decoded(fetched, _TokenAnswer)
    if answer.token_type.lower() != "bearer" or not re.fullmatch(r"[\x21-\x7e]+", answer.access_token):
        raise Refused("a token that is no bearer token")
    lifetime = _seconds(answer.expires_in)
    return Tokens(
        access=answer.access_token,
        refresh=answer.refresh_token or kept,
        expires_at=None if lifetime is None else asked_at + lifetime,
        renew_at=None if lifetime is None else asked_at + lifetime - min(30.0, lifetime / 10),
        requested=tuple(scopes),
    )


def _assertion(client: Client, audience: str) -> str:
    import jwt  # where it is needed only: it brings OpenSSL's bindings along

    now = int(time.time())
    claims = {"iss": client.id, "sub": client.id, "aud": audience, "iat": now, "exp": now + _ASSERTION_S}
    try:
        return jwt.encode(claims | {"jti": str(uuid.uuid4())}, client.key or "", algorithm=client.algorithm)
    except (ValueError, TypeError, jwt.PyJWTError):  # whose texts may show the key
        raise Refused("the private_key can't sign by that algorithm") from None


def _seconds(value: float | str | None) -> float | None:
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None


def _decoded(fetched: Fetched, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(fetched.body, type=kind)
    except (msgspec.DecodeError, RecursionError):
        raise Refused("an answer that is not OAuth") from None


def _word(fetched: Fetched) -> str:
    """OAuth's word for what is wrong, or the status: all else that a stranger says may hold what it was sent."""
    try:
        error = msgspec.json.decode(fetched.body, type=_Error).error
    except (msgspec.DecodeError, RecursionError):
        error = ""
    return error if _WORD.fullmatch(error) else f"HTTP {fetched.status}"
