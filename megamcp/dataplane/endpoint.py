"""The MCP endpoint: `/r/{rollout}/mcp`, `/e/{environment}/mcp` and `/mcp`, as a raw ASGI application.

It finds out which rollout and which protocol era a request is for, and answers the protocol's own methods; tool
calls go to `calls`. No session is stored: a handshake-era session id names its rollout, so an id that this process
has never seen is as good as any. HTTP statuses: whatever keeps a request from being read, and the end of a
rollout, has its own in both eras. For errors of a request that was read, 2026-07-28 wants the status too; in a
handshake-era session they are 200 with a JSON-RPC error, since its clients take any other for a broken connection.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl

import msgspec

from megamcp.dataplane import consent, eras, wire
from megamcp.dataplane.asgi import (
    Disconnected,
    EventStream,
    Headers,
    Receive,
    Scope,
    Send,
    accepts,
    is_json,
    origin_allowed,
    read_body,
    retry_headers,
    send_empty,
    send_json,
)
from megamcp.dataplane.calls import CallRequest, Calls
from megamcp.dataplane.links import Environment, Environments
from megamcp.dataplane.ports import ControlPort, Limits, RolloutView
from megamcp.dataplane.protocol import ToolCall
from megamcp.errors import BY_RPC, AuthorizationRequired, BadRequest, MegaMCPError, NotFound

log = logging.getLogger(__name__)

IDEMPOTENCY_KEY = "io.megamcp/idempotency-key"
_INSTRUCTIONS_TIMEOUT_S = 10.0
_PATH = re.compile(r"(?:/([re])/([^/]{1,300}))?/mcp/?")
_ROLLOUT_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_ALLOW: Headers = [(b"allow", b"POST, DELETE, OPTIONS")]
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
class _Request:
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


@dataclass(slots=True, eq=False)
class _InFlight:
    task: "asyncio.Task[None]"
    reason: str | None = None

    def cancel(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self.task.cancel(reason)


class Endpoint:
    """The ASGI application. Raises nothing; a bug becomes an internal error without details."""

    def __init__(self, control: ControlPort, environments: Environments, calls: Calls, limits: Limits) -> None:
        self._control = control
        self._environments = environments
        self._calls = calls
        self._limits = limits
        self._in_flight: dict[tuple[str, str, bytes], _InFlight] = {}
        self._watches: set[asyncio.Task[None]] = set()

    @staticmethod
    def serves(path: str) -> bool:
        """Whether a path is the endpoint's."""
        return _PATH.fullmatch(path) is not None

    def cancel(self, rollout: str, session: str, request_id: str) -> bool:
        """Cancels a handshake-era call of this process; False when it has no such call."""
        entry = self._in_flight.get((rollout, session, request_id.encode()))
        if entry is None:
            return False
        entry.cancel("cancelled")
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: _Request | None = None
        try:
            if scope["method"] != "POST":
                await self._other_method(scope, send)
                return
            request = self._open(scope, receive, send)
            body = await self._body(request)
            if body.lstrip()[:1] == b"[":
                await self._batch(request, body, send)
            else:
                await self._single(request, body, send)
        except Disconnected:
            pass
        except (wire.RpcFailure, MegaMCPError) as error:
            await self._refuse(request, error, send)
        except Exception:
            log.exception("a bug in the MCP endpoint")
            failure = wire.RpcFailure(wire.INTERNAL_ERROR, "Internal error.", status=500, data={"code": "internal"})
            await self._refuse(request, failure, send)

    # HTTP

    def _open(self, scope: Scope, receive: Receive, send: Send) -> _Request:
        head = eras.Head.of(scope["headers"])
        values = head.values
        if (origin := values.get(b"origin")) is not None and not origin_allowed(origin, self._limits.allowed_origins):
            raise wire.RpcFailure(
                wire.INVALID_REQUEST,
                "This Origin may not use the gateway.",
                status=403,
                data={"code": "origin_refused"},
            )
        if not is_json(values.get(b"content-type")):
            raise wire.RpcFailure(
                wire.INVALID_REQUEST,
                "Content-Type must be application/json in UTF-8.",
                status=415,
                data={"code": "unsupported_media_type"},
            )
        json, events = accepts(values.get(b"accept"))
        if not json and not events:
            raise wire.RpcFailure(
                wire.INVALID_REQUEST,
                "Accept must allow application/json or text/event-stream.",
                status=406,
                data={"code": "not_acceptable"},
            )
        environment, rollout, key = _addressee(scope, head)
        session = head.text(b"mcp-session-id")
        return _Request(head, environment, rollout, key, session, receive, EventStream(send) if events else None)

    async def _body(self, request: _Request) -> bytes:
        declared = request.head.values.get(b"content-length")
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                body = await read_body(request.receive, self._limits.body_bytes, declared)
        except TimeoutError:
            raise wire.RpcFailure(
                wire.INVALID_REQUEST, "The body did not arrive.", status=408, data={"code": "body_timeout"}
            ) from None
        wire.check_text(body, self._limits.depth)
        return body

    async def _other_method(self, scope: Scope, send: Send) -> None:
        head = eras.Head.of(scope["headers"])
        if scope["method"] == "OPTIONS":
            await send_empty(send, 204, _ALLOW)
        elif scope["method"] == "DELETE" and (session := head.text(b"mcp-session-id")) is not None:
            # Sessions hold nothing, so there is nothing to delete but a rollout that one opened for itself.
            environment, _, _ = _addressee(scope, head)
            if environment is not None and _ROLLOUT_ID.fullmatch(own := eras.rollout_of_session(session)):
                await self._control.session_ended(own)
            await send_empty(send, 204)
        else:
            # No stream of the server's own accord: 405 is how a GET is told so, in both eras.
            await send_empty(send, 405, _ALLOW)

    async def _refuse(self, request: _Request | None, error: wire.RpcFailure | MegaMCPError, send: Send) -> None:
        failure = error if isinstance(error, wire.RpcFailure) else wire.RpcFailure.of(error)
        message_id = request.id if request is not None else None
        body = wire.error_message(message_id, wire.error_object(failure))
        if request is not None and request.stream is not None and request.stream.started:
            await request.stream.finish(body)
            return
        await send_json(send, _status(request, failure), body, retry_headers(failure))

    # Messages

    async def _single(self, request: _Request, body: bytes, send: Send) -> None:
        envelope = wire.read_envelope(body)
        request.id = wire.request_id(envelope)
        request.modern = eras.is_modern(request.head, envelope, body)
        try:
            reply = await self._message(request, envelope)
        except AuthorizationRequired as required:
            reply = consent.asked(required, envelope, modern=request.modern)
        if reply is None:
            if request.id is None:
                await send_empty(send, 202)
            return
        text = wire.reply_message(request.id or b"null", reply)
        stream = request.stream
        if stream is not None and (stream.started or not accepts(request.head.values.get(b"accept"))[0]):
            await stream.finish(text)
            return
        status = _error_status(request, reply.body) if reply.failed else 200
        session = request.new_session
        await send_json(send, status, text, [(b"mcp-session-id", session.encode())] if session is not None else None)

    async def _batch(self, request: _Request, body: bytes, send: Send) -> None:
        version = request.head.text(b"mcp-protocol-version") or eras.BATCHES
        messages = wire.read_batch(body)
        if version != eras.BATCHES or not messages or len(messages) > self._limits.batch:
            raise wire.RpcFailure(
                wire.INVALID_REQUEST,
                f"Send one message a request (batches of up to {self._limits.batch} belong to {eras.BATCHES}).",
                data={"code": "batch_refused"},
            )
        request.stream = None
        answers = await asyncio.gather(*(self._member(request, message) for message in messages))
        texts = [answer for answer in answers if answer is not None]
        if texts:
            await send_json(send, 200, b"[%b]" % b",".join(texts))
        else:
            await send_empty(send, 202)

    async def _member(self, batch: _Request, message: msgspec.Raw) -> bytes | None:
        request = _Request(batch.head, batch.environment, batch.rollout, batch.key, batch.session, batch.receive, None)
        try:
            envelope = wire.read_envelope(message)
            request.id = wire.request_id(envelope)
            if envelope.method == "initialize":
                raise wire.RpcFailure(
                    wire.INVALID_REQUEST, "initialize can't be batched.", data={"code": "batch_refused"}
                )
            reply = await self._message(request, envelope)
        except wire.RpcFailure as failure:
            return wire.error_message(request.id, wire.error_object(failure))
        except MegaMCPError as error:
            return wire.error_message(request.id, wire.error_object(wire.RpcFailure.of(error)))
        return None if reply is None else wire.reply_message(request.id or b"null", reply)

    async def _message(self, request: _Request, envelope: wire.Envelope) -> wire.Reply | None:
        if envelope.jsonrpc != "2.0":
            raise wire.RpcFailure(wire.INVALID_REQUEST, 'jsonrpc must be "2.0".', data={"code": "invalid_request"})
        method = envelope.method
        if method is None:
            answered = envelope.result is not wire.ABSENT or envelope.error is not wire.ABSENT
            if request.modern or request.id is None or not answered:
                raise wire.RpcFailure(
                    wire.INVALID_REQUEST,
                    "Not a JSON-RPC request or notification.",
                    data={"code": "invalid_request"},
                )
            request.id = None  # a response is acknowledged, and nothing here ever asked for one
            return None
        if request.id is None:
            await self._notification(request, method, envelope.params)
            return None
        if envelope.params is wire.ABSENT:
            params: dict[str, msgspec.Raw] = {}
        else:
            params = wire.read_members(envelope.params, "params")
        if request.modern:
            params = consent.unwrapped(params)
            eras.check_modern(request.head, method, params)
        if method == "tools/call":
            return await self._call(request, params)
        environment, rollout = await self._environment(request, opens=method == "initialize")
        match method:
            case "tools/list":
                return await self._list(environment, rollout, params, modern=request.modern)
            case "initialize" if not request.modern:
                protocol = eras.negotiated(envelope.params)
                request.new_session = eras.new_session(request.rollout or "")
                view = environment.view
                said = await environment.instructions(rollout, _INSTRUCTIONS_TIMEOUT_S)
                return wire.Reply(eras.initialize_result(protocol, view.name, view.version, said))
            case "ping" if not request.modern:
                return wire.Reply(b"{}")
            case "server/discover" if request.modern:
                view = environment.view
                said = await environment.instructions(rollout, _INSTRUCTIONS_TIMEOUT_S)
                return wire.Reply(eras.discover_result(view.name, view.version, said))
            case _:
                raise wire.RpcFailure(
                    wire.METHOD_NOT_FOUND,
                    f"There is no method {method[:100]!r} here.",
                    status=404,
                    data={"code": "method_not_found"},
                )

    async def _notification(self, request: _Request, method: str, params: msgspec.Raw) -> None:
        # 2026-07-28 has none over HTTP (a client cancels by leaving); those sent all the same are dropped.
        if request.modern or method != "notifications/cancelled":
            return
        rollout = request.rollout or (eras.rollout_of_session(request.session) if request.session else None)
        if rollout is None:
            return
        wanted = wire.read_members(params, "params").get("requestId")
        if wanted is None:
            return
        session, text = request.session or "", bytes(wanted).decode()
        if not self.cancel(rollout, session, text):
            await self._control.cancel_elsewhere(rollout, session, text)

    # Rollout and environment

    async def _rollout(self, request: _Request, *, for_call: bool = False) -> RolloutView:
        """The rollout that a request is for. Raises NotFound, Gone, BadRequest."""
        rollout = request.rollout
        if rollout is None and request.session is not None and not request.modern:
            rollout = eras.rollout_of_session(request.session)
        if rollout is None and request.environment is not None and request.key is not None:
            rollout = await self._control.open_for_session(request.environment, key=request.key)
        if rollout is None:
            raise BadRequest(
                "This request names no rollout.",
                code="rollout_required",
                hint="Open one with POST /v1/rollouts and use its url, or send X-Rollout-Id.",
            )
        if not _ROLLOUT_ID.fullmatch(rollout):
            raise NotFound(f"There is no rollout {rollout[:100]!r}.", code="rollout_not_found")
        find = self._control.rollout_for_call if for_call else self._control.rollout
        view = await find(rollout)
        request.rollout = rollout
        request.read = True
        return view

    async def _environment(self, request: _Request, *, opens: bool) -> tuple[Environment, RolloutView | None]:
        if request.environment is not None and request.rollout is None:
            if opens and not request.modern:
                request.rollout = await self._control.open_for_session(request.environment, key=None)
            elif request.modern or request.session is None:
                view = await self._control.environment_named(request.environment)
                request.read = True
                return self._environments.of(view), None
        rollout = await self._rollout(request)
        return self._environments.of(await self._control.environment(rollout.environment_id)), rollout

    # Tools

    async def _list(
        self, environment: Environment, rollout: RolloutView | None, params: dict[str, msgspec.Raw], *, modern: bool
    ) -> wire.Reply:
        tools = await environment.tool_list(rollout)
        page: int | None = 0
        if (raw := params.get("cursor")) is not None and bytes(raw) != b"null":
            page = tools.page_of(wire.read_string(raw, "cursor"))
            if page is None:
                raise wire.RpcFailure(
                    wire.INVALID_PARAMS, "This cursor is not one of ours.", data={"code": "bad_cursor"}
                )
        assert page is not None
        following = tools.cursor(page + 1) if page + 1 < len(tools.pages) else None
        return wire.Reply(eras.list_result(tools.pages[page], following, modern=modern))

    async def _call(self, request: _Request, params: dict[str, msgspec.Raw]) -> wire.Reply | None:
        view = await self._rollout(request, for_call=True)
        call, key = _tool_call(request, params)
        task = asyncio.current_task()
        assert task is not None
        entry = _InFlight(task)
        address = (view.id, request.session or "", request.id or b"")
        watch: asyncio.TimerHandle | None = None
        if request.modern:
            # Only a call that takes a while pays for watching whether its client is still there.
            watch = asyncio.get_running_loop().call_later(
                self._limits.disconnect_check_s, self._watch, request.receive, entry
            )
        else:
            self._in_flight[address] = entry
        stream = request.stream
        progress = stream.event if stream is not None and call.progress_token is not None else None
        mirrored = request.head.mirrored if request.modern else None
        try:
            reply = await self._calls.call(view, CallRequest(call, key, mirrored), progress)
            return eras.complete(reply) if request.modern else reply
        except asyncio.CancelledError:
            if entry.reason is None:
                raise
            task.uncancel()
            if entry.reason == "disconnected":
                raise Disconnected from None
            raise wire.RpcFailure(-32800, "The call was cancelled.", status=200, data={"code": "cancelled"}) from None
        finally:
            entry.reason = entry.reason or "done"
            if watch is not None:
                watch.cancel()
            elif self._in_flight.get(address) is entry:
                del self._in_flight[address]

    def _watch(self, receive: Receive, entry: _InFlight) -> None:
        task = asyncio.create_task(_until_disconnect(receive, lambda: entry.cancel("disconnected")))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)


async def _until_disconnect(receive: Receive, leave: Callable[[], None]) -> None:
    """Ends by itself: servers report a disconnect also when the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()


def _addressee(scope: Scope, head: eras.Head) -> tuple[str | None, str | None, str | None]:
    """(environment, rollout, API key). Carriers of the rollout that disagree are refused."""
    match = _PATH.fullmatch(scope["path"])
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
    if (authorization := head.text(b"authorization")) is not None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer" and token:
            if token.startswith("ro_"):
                carriers.add(token.strip())
            else:
                key = token.strip()
    if len(carriers) > 1:
        raise BadRequest(
            "The URL, X-Rollout-Id, ?rollout= and the bearer token name different rollouts.",
            code="rollout_carriers_disagree",
            hint="Name the rollout once; the URL is enough.",
        )
    return name if kind == "e" else None, next(iter(carriers), None), key


def _tool_call(request: _Request, params: dict[str, msgspec.Raw]) -> tuple[ToolCall, str | None]:
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
    return ToolCall(name, arguments, meta, request.modern, more, (), token), key


def _status(request: _Request | None, failure: wire.RpcFailure) -> int:
    """See the module's docstring."""
    if request is None or not request.read:
        return failure.status
    if failure.code in (wire.INVALID_PARAMS, wire.METHOD_NOT_FOUND):
        if not request.modern:
            return 200
        return 400 if failure.status == 404 and failure.code == wire.INVALID_PARAMS else failure.status
    if request.modern or request.session is None or failure.status in (404, 410):
        return failure.status
    return 200


def _error_status(request: _Request, error: bytes) -> int:
    """The status of a JSON-RPC error that a tool server answered with."""
    code, _, name = wire.peek_error(error)
    if name and code in BY_RPC and (request.modern or request.session is None):
        return BY_RPC[code].status
    return _MODERN_STATUS.get(code, 200) if request.modern else 200
