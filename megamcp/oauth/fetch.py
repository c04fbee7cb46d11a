"""Requests to places that a tool server names: metadata, registrations, tokens. Server and place are strangers.

A place is https, or the tool server's own host, or on loopback where the tool server is; never nearer to the gateway
than the tool server itself: what is on the internet names no address of a private network, and nobody the link's own
addresses (clouds keep credentials there). The address that was looked at is the one that is connected to. Redirects
stay at their origin; bodies and times are bounded; nothing else is sent along.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlencode, urljoin, urlsplit

from megamcp.dataplane.http import Address, Broken, ConnectFailed, Pool, Response, TooMuch, field_lines
from megamcp.errors import UpstreamError

_MOST_BYTES = 256 * 1024
_TIMEOUT_S = 10.0
_REDIRECTS = 3
_PUBLIC, _PRIVATE, _LOOPBACK, _NEVER = range(4)


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer, whole."""

    status: int
    body: bytes = field(repr=False)


def place_allowed(url: str, resource: str) -> bool:
    """Whether a tool server at `resource` may name this URL, as far as it can be told without asking for addresses."""
    try:
        place, own = urlsplit(url), urlsplit(resource)
        if not url.isascii() or not place.hostname or place.username is not None or place.password is not None:
            return False
        _ = place.port  # raises where it is none
    except ValueError:
        return False
    if place.scheme == "http":
        local = _is_local(place.hostname) and _is_local(own.hostname or "")
        return own.scheme == "http" and (local or place.hostname == own.hostname)
    return place.scheme == "https"


def same_origin(one: str, other: str) -> bool:
    """Whether both are URLs of one scheme, host and port."""
    try:
        return _origin(one) == _origin(other)
    except ValueError:
        return False


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


class Fetcher:
    """Asks in the name of one tool server. Raises UpstreamError (`authorization_failed`) for a place that it may not
    ask, and for one that doesn't answer."""

    def __init__(self, server: str, resource: str) -> None:
        self._server = server
        self._resource = resource

    async def get(self, url: str) -> Fetched:
        for _ in range(_REDIRECTS):
            fetched, location = await self._send(b"GET", url, {"Accept": "application/json"}, b"")
            if location is None or not same_origin(location, url):
                break
            url = location
        return fetched

    async def post_form(self, url: str, form: Mapping[str, str], headers: Mapping[str, str]) -> Fetched:
        kind = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
        return (await self._send(b"POST", url, {**kind, **headers}, urlencode(form).encode()))[0]

    async def post_json(self, url: str, body: bytes) -> Fetched:
        kind = {"Content-Type": "application/json", "Accept": "application/json"}
        return (await self._send(b"POST", url, kind, body))[0]

    async def _send(
        self, method: bytes, url: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[Fetched, str | None]:
        if not place_allowed(url, self._resource):
            raise self._failed(f"it names {url[:200]!r}, which is neither https nor its own host")
        place = urlsplit(url)._replace(query="", fragment="").geturl()  # what a message may show
        pool: Pool | None = None
        response: Response | None = None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                address = await self._address(url)
                pool = Pool(address, limit=1, idle_s=0, connect_s=_TIMEOUT_S)
                response = await pool.request(method, field_lines(headers), body)
                text = await response.read(_MOST_BYTES)
        except TimeoutError:
            raise self._failed(f"{place} did not answer within {_TIMEOUT_S:g} s") from None
        except TooMuch:
            raise self._failed(f"{place} sent more than {_MOST_BYTES} bytes") from None
        except (ConnectFailed, Broken, OSError, ValueError) as error:  # the last: a host's name that can be none
            raise self._failed(f"{place} can't be asked: {error}") from None
        finally:
            if response is not None:
                response.close()
            if pool is not None:
                await pool.aclose()
        location = response.field(b"location") if 300 <= response.status < 400 else None
        return Fetched(response.status, text), _joined(url, location)

    async def _address(self, url: str) -> Address:
        address, own = Address.of(url), Address.of(self._resource)
        found = await _lookup(address.host, address.port)
        if address.host != own.host:
            nearest = max(map(_nearness, found))
            if nearest == _NEVER or nearest > max(map(_nearness, await _lookup(own.host, own.port))):
                raise self._failed(f"it names {address.host!r}, whose address is nearer to the gateway than its own")
        return replace(address, ip=found[0])

    def _failed(self, why: str) -> UpstreamError:
        return UpstreamError(
            f"Tool server {self._server!r} wants authorization, and that can't be had: {why}.",
            code="authorization_failed",
        )


def _joined(url: str, location: str | None) -> str | None:
    try:
        return urljoin(url, location) if location else None
    except ValueError:
        return None


async def _lookup(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _nearness(text: str) -> int:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return _LOOPBACK
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return _NEVER
    return _PUBLIC if address.is_global else _PRIVATE


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
