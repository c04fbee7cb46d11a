"""HTTP as ASGI speaks it: read one bounded body, check what HTTP can check, answer in two messages.

Knows JSON-RPC only as bytes to send. Everything refused here is raised as `RpcFailure` with its HTTP status.
"""

import math
from collections.abc import Awaitable, Callable, MutableMapping
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from megamcp.dataplane import wire

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_JSON = (b"content-type", b"application/json")
STREAM: Headers = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class Disconnected(Exception):
    """The client left before its request was complete; there is nobody to answer."""


async def read_body(receive: Receive, limit: int, declared: bytes | None) -> bytes:
    """The whole body. Raises `RpcFailure` 413 over the limit, `Disconnected`; TimeoutError is the caller's."""
    if declared is not None and declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    message = await receive()
    if message["type"] != "http.request":
        raise Disconnected
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > limit:
            raise _too_large(limit)
        return body
    parts, size = [body], len(body)
    while message.get("more_body", False):
        if size > limit:
            raise _too_large(limit)
        message = await receive()
        if message["type"] != "http.request":
            raise Disconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    if size > limit:
        raise _too_large(limit)
    return b"".join(parts)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left, or its response is complete. For requests whose body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def bearer(authorization: bytes) -> str | None:
    """The token of an Authorization header."""
    scheme, _, token = authorization.decode("latin-1").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def not_acceptable(wanted: str) -> wire.RpcFailure:
    """406: the client takes no answer of the kind that there is."""
    return wire.RpcFailure(
        wire.INVALID_REQUEST, f"Accept must allow {wanted}.", status=406, data={"code": "not_acceptable"}
    )


def _too_large(limit: int) -> wire.RpcFailure:
    return wire.RpcFailure(
        wire.INVALID_REQUEST,
        f"The body is larger than {limit} bytes.",
        status=413,
        data={"code": "body_too_large", "limit": limit},
    )


@lru_cache(maxsize=256)
def accepts(header: bytes | None) -> tuple[bool, bool]:
    """(JSON, event streams): what an Accept header allows. None or empty allows both."""
    if not header:
        return True, True
    ranges = set()
    for part in header.decode("latin-1").lower().split(","):
        kind, _, parameters = part.partition(";")
        if "q=0" not in parameters.replace(" ", "").replace("q=0.", "q=1."):
            ranges.add(kind.strip())
    return (
        not ranges.isdisjoint(("*/*", "application/*", "application/json")),
        not ranges.isdisjoint(("*/*", "text/*", "text/event-stream")),
    )


@lru_cache(maxsize=256)
def is_json(header: bytes | None) -> bool:
    """Whether a Content-Type is JSON in UTF-8."""
    kind, _, parameters = (header or b"").decode("latin-1").lower().partition(";")
    charset = parameters.replace('"', "").replace(" ", "").partition("charset=")[2].partition(";")[0]
    return kind.strip() == "application/json" and charset in ("", "utf-8", "utf8", "us-ascii")


@lru_cache(maxsize=256)
def origin_allowed(origin: bytes, allowed: tuple[str, ...]) -> bool:
    """A web page may talk to the gateway from this machine, or where the operator says so (`*`: anywhere).

    The Host header is no help here: under DNS rebinding it agrees with the attacker's Origin.
    """
    text = origin.decode("latin-1")
    if "*" in allowed or text in allowed:
        return True
    try:
        return urlsplit(text).hostname in _LOCAL
    except ValueError:
        return False


async def send_json(send: Send, status: int, body: bytes, extra: Headers | None = None) -> None:
    headers = [_JSON, (b"content-length", b"%d" % len(body))]
    if extra:
        headers += extra
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_empty(send: Send, status: int, extra: Headers | None = None) -> None:
    headers: Headers = [] if status == 204 else [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": status, "headers": headers + (extra or [])})
    await send({"type": "http.response.body", "body": b""})


def retry_headers(failure: wire.RpcFailure) -> Headers | None:
    if failure.retry_after is None:
        return None
    return [(b"retry-after", b"%d" % max(1, math.ceil(failure.retry_after)))]
