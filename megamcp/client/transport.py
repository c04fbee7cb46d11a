"""Requests to the gateway: what may be sent again, and which error an answer is.

A request is repeated only where that can't do a thing twice: when nothing was sent, after 429 (refused before it was
begun), and, for requests that are marked `repeatable`, after 503 or a lost connection. Waits are jittered and bounded;
when the bound is reached the last error is raised. Every failure leaves as a class of `megamcp.errors`; httpx's own
never get out.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from megamcp import __version__
from megamcp import errors as e

M = TypeVar("M", bound=BaseModel)

UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Failures before a byte of the request left."""

CONNECT_S = 5.0
KEEP_IDLE_S = 30.0
"""Less than what the gateway keeps an idle connection, so that none is used that it is about to close."""

_BY_STATUS = {cls.status: cls for cls in e.MegaMCPError.__subclasses__()}
_BY_CODE: dict[str, type[e.MegaMCPError]] = {
    cls.default_code: cls for cls in (e.UnsupportedSchema, e.UnsupportedStatement)
}
_STANDARD = {"type", "title", "status", "detail", "code", "hint", "instance", "retry_after"}


@dataclass(frozen=True, slots=True)
class Retry:
    """How patiently a request is repeated. `Retry(attempts=1)` never repeats."""

    attempts: int = 6
    """Sends in all."""
    first_s: float = 0.1
    """Wait before the second send; doubles from there. The real wait is between half of it and all of it."""
    longest_s: float = 5.0
    """Longest wait. A gateway that asks for a longer one is not waited for."""

    def pause(self, attempt: int, asked: float | None) -> float | None:
        """Seconds to wait after send number `attempt` (from 1); None: give up."""
        if attempt >= self.attempts or (asked is not None and asked > self.longest_s):
            return None
        backoff: float = min(self.first_s * 2 ** (attempt - 1), self.longest_s)
        jittered = backoff * random.uniform(0.5, 1)
        return jittered if asked is None else asked + jittered


class Transport:
    """One pool of connections to one gateway."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        timeout: float,
        connections: int,
        retry: Retry,
        asgi: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._retry = retry
        headers = {"User-Agent": f"megamcp-client/{__version__}", "Accept": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(timeout, connect=min(CONNECT_S, timeout)),
                limits=httpx.Limits(
                    max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=KEEP_IDLE_S
                ),
                # Reading the system's certificates takes 30 ms; plain HTTP has no use for them.
                verify=not self.url.startswith("http://"),
                transport=asgi,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise bad_url(url) from error
        if self._http.base_url.scheme not in ("http", "https") or not self._http.base_url.host:
            raise bad_url(url)

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def get(self, path: str, answer: type[M], **params: Any) -> M:
        """GET; parameters that are None are left out."""
        response = await self.send("GET", path, params=params, repeatable=True)
        return parse(answer, response)

    async def post(self, path: str, answer: type[M], body: BaseModel | None = None, *, repeatable: bool = False) -> M:
        """POST a model; fields that were not set are left out."""
        content = body.model_dump(mode="json", exclude_none=True) if body is not None else None
        return parse(answer, await self.send("POST", path, body=content, repeatable=repeatable))

    async def delete(self, path: str) -> None:
        """DELETE, which is idempotent everywhere in this interface."""
        await self.send("DELETE", path, repeatable=True)

    async def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        repeatable: bool = False,
    ) -> httpx.Response:
        """One request, repeated as the module says. Raises `MegaMCPError`."""
        query = {name: value for name, value in (params or {}).items() if value is not None}
        attempt = 0
        while True:
            attempt += 1
            asked: float | None = None
            failure: e.MegaMCPError
            try:
                response = await self._http.request(method, path, params=query or None, json=body)
            except httpx.HTTPError as error:
                failure = unreachable(error, self.url)
                again = isinstance(error, UNSENT) or (repeatable and not isinstance(error, httpx.TimeoutException))
            except (TypeError, ValueError) as error:
                raise e.BadRequest(f"The request can't be written as JSON: {error}", code="not_json") from error
            else:
                if response.is_success:
                    return response
                failure = problem(response)
                asked = retry_after(response)
                again = (response.status_code == 429 and asked is not None) or (
                    response.status_code == 503 and repeatable
                )
            pause = self._retry.pause(attempt, asked) if again else None
            if pause is None:
                raise failure
            await asyncio.sleep(pause)

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, Any] | None = None, *, method: str = "GET", body: BaseModel | None = None
    ) -> AsyncIterator[AsyncIterator[str]]:
        """Lines of a server-sent event stream. No deadline between them; the gateway's comments keep it alive."""
        timeout = httpx.Timeout(CONNECT_S, read=None)
        headers = {"Accept": "text/event-stream"}
        content = body.model_dump(mode="json", exclude_none=True) if body is not None else None
        try:
            async with self._http.stream(
                method, path, params=dict(params or {}), json=content, headers=headers, timeout=timeout
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise problem(response)
                yield response.aiter_lines()
        except httpx.HTTPError as error:
            raise unreachable(error, self.url) from error


async def events_of(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, str]]:
    """Kind and data of each event of a stream."""
    kind, data = "message", []
    async for line in lines:
        if line.startswith("event:"):
            kind = line[6:].strip()
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line:
            if data:
                yield kind, "\n".join(data)
            kind, data = "message", []


def build(model: type[M], **fields: Any) -> M:
    """A request body. Raises `BadRequest` for what the gateway would refuse anyway."""
    try:
        return model(**fields)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        raise e.BadRequest(told, code="invalid_request") from error


def parse(answer: type[M], response: httpx.Response) -> M:
    """The answer's model. Raises `UpstreamError` when the other side is no gateway of this version."""
    try:
        return answer.model_validate_json(response.content)
    except ValidationError as error:
        raise e.UpstreamError(
            f"The answer of {response.request.url} is not what a MegaMCP gateway sends.",
            code="unexpected_answer",
            hint="Check the URL, and that client and gateway are of the same version.",
        ) from error


def problem(response: httpx.Response) -> e.MegaMCPError:
    """The error that an answer carries, with its code, hint and extra members."""
    try:
        document = json.loads(response.content)
    except ValueError:
        document = None
    if not isinstance(document, dict) or "code" not in document:
        ours = response.status_code >= 500
        document = {
            "detail": f"HTTP {response.status_code} {response.reason_phrase} from {response.request.url}",
            "code": "http_error",
            "hint": "The gateway's log says more." if ours else "Is this the URL of a MegaMCP gateway?",
        }
    return error_of(document, response.status_code, retry_after(response))


def error_of(document: dict[str, Any], status: int, wait: float | None = None) -> e.MegaMCPError:
    """The error that a problem document describes."""
    code = str(document["code"])
    cls = _BY_CODE.get(code) or _BY_STATUS.get(status, e.MegaMCPError)
    extra = {name: value for name, value in document.items() if name not in _STANDARD}
    if cls is e.NoCapacity:
        extra["retry_after"] = _number(document.get("retry_after")) or wait or 1.0
    elif cls is e.MegaMCPError:
        extra["status"] = status
    return cls(str(document.get("detail") or code), code=code, hint=document.get("hint"), **extra)


def retry_after(response: httpx.Response) -> float | None:
    """Seconds that the gateway asks to wait, from `Retry-After` in either of its forms."""
    text = response.headers.get("Retry-After")
    if text is None:
        return None
    if (seconds := _number(text)) is not None:
        return max(0.0, seconds)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (when - datetime.now(UTC)).total_seconds()) if when.tzinfo else None


def unreachable(error: httpx.HTTPError, url: str) -> e.MegaMCPError:
    """No answer came: why, and what to do."""
    told = str(error) or type(error).__name__
    match error:
        case httpx.PoolTimeout():
            return e.Unavailable(
                "All connections of this client are in use.",
                code="no_free_connection",
                hint="Raise Client(connections=…), or do less at once.",
            )
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return e.Unavailable(
                f"There is no gateway at {url}: {told}",
                code="gateway_unreachable",
                hint="Start one with `megamcp serve`, or name another with --url or MEGAMCP_URL.",
            )
        case httpx.TimeoutException():
            return e.DeadlineExceeded(
                f"The gateway at {url} did not answer in time.",
                code="client_timeout",
                hint="It may still have done what was asked. Raise Client(timeout=…) if this is normal.",
            )
    return e.Unavailable(
        f"The connection to {url} was lost: {told}",
        code="connection_lost",
        hint="It may still have done what was asked.",
    )


def bad_url(url: str) -> e.BadRequest:
    """What is wrong with a gateway's URL."""
    return e.BadRequest(
        f"{url!r} is not the URL of a gateway.", code="invalid_url", hint="It looks like http://127.0.0.1:8600."
    )


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
