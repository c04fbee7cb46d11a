"""The control plane's door for request bodies: bounded, UTF-8, strict JSON, before anything else reads them.

FastAPI alone takes a body of any size, JSON in UTF-16, `NaN` and lone surrogates, none of which PostgreSQL could keep
or an agent be given back. What passes here is what RFC 8259 calls interoperable JSON; what it means is checked by
`types.py`. The data plane has its own door, which leaves bytes alone.
"""

import asyncio
import math

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megamcp.dataplane import Limits
from megamcp.dataplane.asgi import Disconnected, is_json, read_body
from megamcp.dataplane.wire import RpcFailure, check_text
from megamcp.errors import BadRequest, MegaMCPError, TooLarge, UnsupportedMedia

_BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})


def problem(error: MegaMCPError, request: Request) -> Response:
    """The error as an RFC 9457 document."""
    headers = {}
    if error.status == 401 or error.challenge is not None:
        headers["WWW-Authenticate"] = error.challenge or "Bearer"
    if (wait := error.extra.get("retry_after")) is not None:
        headers["Retry-After"] = f"{max(1, math.ceil(wait))}"
    elif error.status == 503:
        headers["Retry-After"] = "1"
    body = msgspec.json.encode(error.problem(request.url.path), enc_hook=str)
    return Response(body, error.status, headers, media_type="application/problem+json")


class StrictBodies:
    """ASGI middleware: reads the whole body, refuses what is none of ours, and hands it on."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _BODILESS:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            body = await self._read(receive, headers.get(b"content-length"))
            if body:
                check(body, headers.get(b"content-type"))
        except Disconnected:
            return
        except MegaMCPError as error:
            await problem(error, Request(scope))(scope, receive, send)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive, declared: bytes | None) -> bytes:
        try:
            async with asyncio.timeout(Limits().body_timeout_s):
                return await read_body(receive, self._limit, declared)
        except RpcFailure as error:
            raise TooLarge(
                error.message,
                code="body_too_large",
                limit=self._limit,
                hint="Send less at once, or raise MEGAMCP_MAX_BODY_BYTES.",
            ) from None
        except TimeoutError:
            raise BadRequest("The body did not arrive in time.", code="body_timeout") from None


def check(body: bytes, content_type: bytes | None) -> None:
    """Raises `UnsupportedMedia` for another format, `BadRequest` for what isn't strict JSON in UTF-8."""
    if not is_json(content_type):
        raise UnsupportedMedia(
            "Content-Type must be application/json in UTF-8.",
            code="unsupported_media_type",
            hint="Send the header Content-Type: application/json.",
        )
    try:
        check_text(body, Limits().depth)
        msgspec.json.decode(body)
    except RpcFailure as error:
        raise BadRequest(error.message, code=(error.data or {})["code"]) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not JSON as RFC 8259 has it: {error}.", code="invalid_json") from None
