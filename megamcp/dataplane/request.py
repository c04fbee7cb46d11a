"""One POST on its way through the endpoint: whom it is for, what it may be answered with, and its tool call.

Reads; decides nothing and does nothing.
"""

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

import msgspec

from megamcp.dataplane import eras, wire
from megamcp.dataplane.asgi import Receive, Scope, bearer
from megamcp.dataplane.protocol import ToolCall
from megamcp.dataplane.streams import EventStream
from megamcp.errors import BY_RPC, BadRequest, NotFound

ANSWERS = ("inputResponses", "requestState")
"""What a client of 2026-07-28 adds when it comes back with what it was asked for."""
IDEMPOTENCY_KEY = "io.megamcp/idempotency-key"
PATH = re.compile(r"(?:/([re])/([^/]{1,300}))?/mcp/?")
_MODERN_STATUS = {
    wire.PARSE_ERROR: 400,
    wire.INVALID_REQUEST: 400,
    wire.INVALID_PARAMS: 400,
    wire.METHOD_NOT_FOUND: 404,
    wire.HEADER_MISMATCH: 400,
    -32021: 400,
    wire.UNSUPPORTED_VERSION: 400,
}


@dataclass(slots=True)
class Request:
    """One POST on its way: who it is for, and what it can take as an answer."""

    head: eras.Head
    environment: str | None
    rollout: str | None
    key: str | None
    session: str | None
    receive: Receive
    stream: EventStream | None
    modern: bool = False
    id: bytes | None = None
    read: bool = False
    """Set once the message is known to be a request for a live rollout: from here on errors are its answer."""
    new_session: str | None = None
    forwarded: bool = False
    """Another gateway process handed it on."""
    meta: dict[str, msgspec.Raw] | None = None
    """Members of `_meta` of a 2026-07-28 request."""


def addressee(scope: Scope, head: eras.Head) -> tuple[str | None, str | None, str | None]:
    """(environment, rollout, API key). Carriers of the rollout that disagree are refused."""
    match = PATH.fullmatch(scope["path"])
    if match is None:
        raise NotFound("There is no MCP endpoint at this path.", code="no_such_path")
    kind, name = match.groups()
    carriers: set[str] = {name} if kind == "r" else set()
    if (sent := head.text(b"x-rollout-id")) is not None:
        carriers.add(sent)
    if query := scope.get("query_string"):
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=None)
        carriers.update(value for key, value in pairs if key == "rollout")
    key: str | None = None
    if (token := bearer(head.values.get(b"authorization", b""))) is not None:
        if token.startswith("ro_"):
            carriers.add(token)
        else:
            key = token
    if len(carriers) > 1:
        raise BadRequest(
            "The URL, X-Rollout-Id, ?rollout= and the bearer token name different rollouts.",
            code="rollout_carriers_disagree",
            hint="Name the rollout once; the URL is enough.",
        )
    return name if kind == "e" else None, next(iter(carriers), None), key


def tool_call(request: Request, params: dict[str, msgspec.Raw]) -> tuple[ToolCall, str | None]:
    """The call in its maker's bytes, and its idempotency key."""
    name = wire.read_string(params.get("name"), "name")
    raw = params.get("arguments")
    arguments = bytes(raw) if raw is not None else b"{}"
    if arguments == b"null":
        arguments = b"{}"
    if arguments[0] != 0x7B:
        raise wire.RpcFailure(wire.INVALID_PARAMS, "arguments must be an object.", data={"code": "invalid_params"})
    key = request.head.text(b"idempotency-key")
    meta_raw = params.get("_meta")
    token: bytes | None = None
    meta = b""
    if meta_raw is not None and (meta := bytes(meta_raw)) != b"null":
        members = wire.read_members(meta_raw, "_meta")
        if (raw_token := members.get("progressToken")) is not None:
            token = bytes(raw_token)
        if (raw_key := members.get(IDEMPOTENCY_KEY)) is not None:
            named = wire.read_string(raw_key, IDEMPOTENCY_KEY)
            if key is not None and key != named:
                raise BadRequest(
                    f"The Idempotency-Key header and _meta[{IDEMPOTENCY_KEY!r}] differ.",
                    code="bad_idempotency_key",
                )
            key = named
    else:
        meta = b""
    more = b"".join(
        b",%b:%b" % (wire.encode(name), bytes(value))
        for name, value in params.items()
        if name not in ("name", "arguments", "_meta")
    )
    return ToolCall(name, arguments, meta, request.modern, more, (), token), _of_round(key, params)


def _of_round(key: str | None, params: dict[str, msgspec.Raw]) -> str | None:
    """The key of a call with answers to its questions: a call of its own, of which only a retry has the same."""
    said = [bytes(params[name]) for name in ANSWERS if name in params]
    if key is None or not said:
        return key
    return f"{key[:50]}#{hashlib.sha256(b''.join([key.encode(), *said])).hexdigest()}"


def status_of(request: Request | None, failure: wire.RpcFailure) -> int:
    """See the module's docstring."""
    if request is None or not request.read:
        return failure.status
    if failure.code in (wire.INVALID_PARAMS, wire.METHOD_NOT_FOUND):
        if not request.modern:
            return 200
        return 400 if failure.status == 404 and failure.code == wire.INVALID_PARAMS else failure.status
    if failure.status == 410 and request.environment is not None and not request.modern:
        return 404  # a session that opened its rollout itself is over with it
    if request.modern or request.session is None or failure.status in (404, 410):
        return failure.status
    return 200


def error_status(request: Request, error: bytes) -> int:
    """The status of a JSON-RPC error that a tool server answered with."""
    code, _, name = wire.peek_error(error)
    if name and code in BY_RPC and (request.modern or request.session is None):
        return BY_RPC[code].status
    return _MODERN_STATUS.get(code, 200) if request.modern else 200
