"""Who may give tokens for a tool server: RFC 9728 (its own metadata), then RFC 8414 and OpenID Connect (the others').

The order of places and the comparisons are those of MCP's authorization, revisions 2025-11-25 and 2026-07-28; a server
without metadata of its own is its own authorization server, as in 2025-03-26. Nothing is kept here.
"""

import re
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from megamcp.errors import UpstreamError
from megamcp.oauth.fetch import Fetcher, place_allowed, same_origin

T = TypeVar("T")
_PARAMETER = re.compile(r'([A-Za-z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_SCHEME = re.compile(r"(?:^|,)\s*bearer(?:\s+|$)", re.IGNORECASE)


class Issuer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An authorization server's metadata, as far as it matters here."""

    issuer: str
    token_endpoint: str
    authorization_endpoint: str | None = None
    registration_endpoint: str | None = None
    scopes_supported: list[str] | None = None
    token_endpoint_auth_methods_supported: list[str] | None = None
    code_challenge_methods_supported: list[str] | None = None
    client_id_metadata_document_supported: bool = False
    authorization_response_iss_parameter_supported: bool = False


class _Resource(msgspec.Struct, frozen=True):
    resource: str
    authorization_servers: list[str]
    scopes_supported: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Challenge:
    """A `WWW-Authenticate: Bearer`; empty where there is none."""

    error: str | None = None
    scopes: tuple[str, ...] = ()
    resource_metadata: str | None = None

    @classmethod
    def read(cls, header: str | None) -> "Challenge":
        found = _SCHEME.search(header or "")
        if header is None or found is None:
            return cls()
        told: dict[str, str] = {}
        for name, quoted, plain in _PARAMETER.findall(header[found.end() :]):
            told.setdefault(name.lower(), re.sub(r"\\(.)", r"\1", quoted) or plain)
        return cls(told.get("error"), tuple(told.get("scope", "").split()), told.get("resource_metadata"))


@dataclass(frozen=True, slots=True)
class Found:
    """What a token is to be asked for, and where."""

    issuer: Issuer
    resource: str
    """Names the tool server in requests (RFC 8707)."""
    scopes: tuple[str, ...]
    """Those that the tool server lists; none where it lists none."""


class Discovery:
    """Finds it out for one tool server. Raises UpstreamError (`authorization_failed`)."""

    def __init__(self, server: str, resource: str, fetcher: Fetcher, preferred: str | None) -> None:
        self._server = server
        self._resource = resource
        self._fetcher = fetcher
        self._preferred = preferred

    async def find(self, challenge: Challenge) -> Found:
        told = await self._protected_resource(challenge)
        if told is None:
            # Before 2025-06-18 a tool server was its own authorization server.
            origin = "{0.scheme}://{0.netloc}".format(urlsplit(self._resource))
            issuer = await self._issuer(origin, [f"{origin}/.well-known/oauth-authorization-server"])
            return Found(issuer, self._resource, ())
        named = told.authorization_servers
        chosen = named[0]
        if self._preferred is not None:
            chosen = next((one for one in named if same_issuer(one, self._preferred or "")), "")
            if not chosen:
                raise self.failed(f"it leads to {named[0][:200]!r}, and its oauth.issuer is {self._preferred!r}")
        if not place_allowed(chosen, self._resource):
            raise self.failed(f"it leads to {chosen[:200]!r}, which is neither https nor its own host")
        issuer = await self._issuer(chosen, _issuer_places(chosen))
        return Found(issuer, told.resource, tuple(told.scopes_supported or ()))

    async def _protected_resource(self, challenge: Challenge) -> _Resource | None:
        parts = urlsplit(self._resource)
        root = f"{parts.scheme}://{parts.netloc}/.well-known/oauth-protected-resource"
        places = [challenge.resource_metadata] if challenge.resource_metadata else []
        places += [root + parts.path, root] if parts.path.strip("/") else [root]
        failed: int | None = None
        for place in dict.fromkeys(places):
            fetched = await self._fetcher.get(place)
            if fetched.status == 200 and (told := _read(fetched.body, _Resource)) and told.authorization_servers:
                if not _covers(told.resource, self._resource):
                    raise self.failed(f"its metadata is of another resource, {told.resource[:200]!r}")
                return told
            if fetched.status >= 500 or fetched.status == 429:
                failed = fetched.status
        if failed is not None:
            # Says nothing of whether there is any: not a reason to go and register at the tool server itself.
            raise self.failed(f"its metadata can't be read (HTTP {failed})")
        return None

    async def _issuer(self, expected: str, places: list[str]) -> Issuer:
        for place in places:
            fetched = await self._fetcher.get(place)
            if fetched.status >= 500:
                raise self.failed(f"{place} answers HTTP {fetched.status}")
            if fetched.status != 200 or (issuer := _read(fetched.body, Issuer)) is None:
                continue
            if not same_issuer(issuer.issuer, expected):
                raise self.failed(f"the metadata of {expected!r} is that of another issuer, {issuer.issuer[:200]!r}")
            named = (issuer.token_endpoint, issuer.authorization_endpoint, issuer.registration_endpoint)
            for url in filter(None, named):
                if not place_allowed(url, self._resource):
                    raise self.failed(f"{expected!r} names {url[:200]!r}, which is neither https nor the server's own")
            return issuer
        raise self.failed(f"there is no authorization server's metadata for {expected[:200]!r}")

    def failed(self, why: str) -> UpstreamError:
        return UpstreamError(
            f"Tool server {self._server!r} wants authorization, and that can't be had: {why}.",
            code="authorization_failed",
        )


def same_issuer(one: str, other: str) -> bool:
    """RFC 8414 has a plain comparison of texts; only an origin is the same with and without its slash."""
    return one == other or (one.rstrip("/") == other.rstrip("/") and not urlsplit(one).path.strip("/"))


def _issuer_places(issuer: str) -> list[str]:
    parts = urlsplit(issuer)
    origin, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    names = ("oauth-authorization-server", "openid-configuration")
    places = [f"{origin}/.well-known/{name}{path}" for name in names]
    return [*places, f"{origin}{path}/.well-known/openid-configuration"] if path else places


def _covers(named: str, resource: str) -> bool:
    """Whether a resource's name stands for this URL: its own, or a folder above it at the same origin."""
    if not same_origin(named, resource):
        return False
    above = urlsplit(named).path.rstrip("/") + "/"
    return (urlsplit(resource).path.rstrip("/") + "/").startswith(above)


def _read(body: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None
