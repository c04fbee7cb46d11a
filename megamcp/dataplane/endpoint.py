"""The MCP endpoint: `/r/{rollout}/mcp`, `/e/{environment}/mcp` and `/mcp`, as a raw ASGI application.

It finds out which rollout and which protocol era a request is for, and answers the protocol's own methods; tool
calls go to `calls`. No session is stored: a handshake-era session id names its rollout, so an id that this process
has never seen is as good as any. HTTP statuses: whatever keeps a request from being read, and the end of a
rollout, has its own in both eras. For errors of a request that was read, 2026-07-28 wants the status too; in a
handshake-era session they are 200 with a JSON-RPC error, since its clients take any other for a broken connection.
"""

import asyncio
import logging

import msgspec

from megamcp.dataplane import consent, eras, wire
from megamcp.dataplane.asgi import (
    Disconnected,
    Headers,
    Receive,
    Scope,
    Send,
    accepts,
    is_json,
    not_acceptable,
    origin_allowed,
    read_body,
    retry_headers,
    send_empty,
    send_json,
)
from megamcp.dataplane.calls import Calls
from megamcp.dataplane.forward import Elsewhere, Forwarder, peer_of, was_forwarded
from megamcp.dataplane.links import Environments
from megamcp.dataplane.methods import ROLLOUT_ID, Methods
from megamcp.dataplane.ports import ControlPort, Limits
from megamcp.dataplane.protocol import HANDSHAKE
from megamcp.dataplane.request import PATH, Request, addressee, error_status, status_of
from megamcp.dataplane.streams import EventStream, Records, replay
from megamcp.errors import AuthorizationRequired, MegaMCPError

log = logging.getLogger(__name__)

_ALLOW: Headers = [(b"allow", b"GET, POST, DELETE, OPTIONS")]
_GONE = wire.RpcFailure(
    wire.INVALID_PARAMS,
    "What this requestState belongs to went with the gateway process that had it.",
    data={"code": "call_not_held"},
)


class Endpoint:
    """The ASGI application. Raises nothing; a bug becomes an internal error without details."""

    def __init__(self, control: ControlPort, environments: Environments, calls: Calls, limits: Limits) -> None:
        self._control = control
        self._environments = environments
        self._limits = limits
        self._methods = Methods(control, environments, calls, limits)
        self._records = Records(control.peer)
        self._forwarder = Forwarder(control.peer_address)

    @staticmethod
    def serves(path: str) -> bool:
        """Whether a path is the endpoint's."""
        return PATH.fullmatch(path) is not None

    def cancel(self, rollout: str, session: str, request_id: str) -> bool:
        """Cancels a handshake-era request of this process; False when it has no such request."""
        return self._methods.cancel(rollout, session, request_id)

    def session_said(self, session: str, method: str, value: str) -> None:
        self._methods.session_said(session, method, value)

    @property
    def streams(self) -> int:
        """Clients that listen now."""
        return self._methods.listening.open

    def stop(self) -> None:
        """The gateway is about to stop: open streams end."""
        self._methods.listening.stop()

    async def aclose(self) -> None:
        await self._methods.listening.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: Request | None = None
        try:
            if scope["method"] != "POST":
                await self._other_method(scope, receive, send)
                return
            request = self._open(scope, receive, send)
            request.forwarded = was_forwarded(scope)
            body = await self._body(request)
            if body.lstrip()[:1] == b"[":
                await self._batch(request, body, send)
            else:
                await self._single(request, body, send)
        except Elsewhere as elsewhere:
            if await self._forwarder.forward(elsewhere.peer, scope, body, receive, send):
                pass
            elif elsewhere.answered:
                await self._refuse(request, _GONE, send)
            else:
                await send_empty(send, 202)
        except Disconnected:
            pass
        except (wire.RpcFailure, MegaMCPError) as error:
            await self._refuse(request, error, send)
        except Exception:
            log.exception("a bug in the MCP endpoint")
            failure = wire.RpcFailure(wire.INTERNAL_ERROR, "Internal error.", status=500, data={"code": "internal"})
            await self._refuse(request, failure, send)
        finally:
            if request is not None and request.stream is not None:
                request.stream.close()

    # HTTP

    def _open(self, scope: Scope, receive: Receive, send: Send) -> Request:
        head = eras.Head.of(scope["headers"])
        values = head.values
        self._check_origin(head)
        if not is_json(values.get(b"content-type")):
            raise wire.RpcFailure(
                wire.INVALID_REQUEST,
                "Content-Type must be application/json in UTF-8.",
                status=415,
                data={"code": "unsupported_media_type"},
            )
        json, events = accepts(values.get(b"accept"))
        if not json and not events:
            raise not_acceptable("application/json or text/event-stream")
        environment, rollout, key = addressee(scope, head)
        session = head.text(b"mcp-session-id")
        stream = EventStream(send, self._records, session if _resumable(head) else None) if events else None
        return Request(head, environment, rollout, key, session, receive, stream)

    def _check_origin(self, head: eras.Head) -> None:
        origin = head.values.get(b"origin")
        if origin is not None and not origin_allowed(origin, self._limits.allowed_origins):
            raise wire.RpcFailure(
                wire.INVALID_REQUEST,
                "This Origin may not use the gateway.",
                status=403,
                data={"code": "origin_refused"},
            )

    async def _body(self, request: Request) -> bytes:
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

    async def _other_method(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = eras.Head.of(scope["headers"])
        session = head.text(b"mcp-session-id")
        if scope["method"] == "OPTIONS":
            await send_empty(send, 204, _ALLOW)
        elif scope["method"] == "DELETE" and session is not None:
            await self._delete(scope, head, session)
            await send_empty(send, 204)
        elif scope["method"] == "GET" and session is not None:
            await self._listen(scope, head, session, receive, send)
        else:
            # 2026-07-28 has no GET, and no stream belongs to nobody: 405 is how both eras say so.
            await send_empty(send, 405, _ALLOW)

    async def _delete(self, scope: Scope, head: eras.Head, session: str) -> None:
        """A session holds nothing here but what servers keep for it, and a rollout that it opened for itself."""
        environment, _, _ = addressee(scope, head)
        own = eras.rollout_of_session(session)
        if not ROLLOUT_ID.fullmatch(own):
            return
        self._methods.listening.forget(session)
        try:
            view = await self._control.rollout(own)
            await self._environments.end(view.environment_id, session)
        except MegaMCPError:
            pass  # it is over by itself
        if environment is not None:
            await self._control.session_ended(own)

    async def _listen(self, scope: Scope, head: eras.Head, session: str, receive: Receive, send: Send) -> None:
        """The stream of a session: the rest of a broken one, or what servers say of their own accord."""
        self._check_origin(head)
        if not accepts(head.values.get(b"accept"))[1]:
            raise not_acceptable("text/event-stream")
        environment, rollout, key = addressee(scope, head)
        request = Request(head, environment, rollout, key, session, receive, None)
        view = await self._methods.rollout(request)
        if (last := head.text(b"last-event-id")) is not None:
            if found := self._records.find(session, last):
                await replay(send, *found)
                return
            peer = peer_of(last)
            elsewhere = peer != self._control.peer and not was_forwarded(scope)
            if elsewhere and await self._forwarder.forward(peer, scope, b"", receive, send):
                return
        stream = EventStream(send, self._records, session if _resumable(head) else None)
        try:
            found_environment = await self._methods.environment_of(view)
            await self._methods.listening.stand(found_environment, view, session, stream, receive)
        finally:
            stream.close()

    async def _refuse(self, request: Request | None, error: wire.RpcFailure | MegaMCPError, send: Send) -> None:
        failure = error if isinstance(error, wire.RpcFailure) else wire.RpcFailure.of(error)
        message_id = request.id if request is not None else None
        body = wire.error_message(message_id, wire.error_object(failure))
        if request is not None and request.stream is not None and request.stream.started:
            await request.stream.finish(body)
            return
        await send_json(send, status_of(request, failure), body, retry_headers(failure))

    # Messages

    async def _single(self, request: Request, body: bytes, send: Send) -> None:
        envelope = wire.read_envelope(body)
        request.id = wire.request_id(envelope)
        request.modern = eras.is_modern(request.head, envelope, body)
        try:
            reply = await self._methods.message(request, envelope)
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
        status = error_status(request, reply.body) if reply.failed else 200
        session = request.new_session
        await send_json(send, status, text, [(b"mcp-session-id", session.encode())] if session is not None else None)

    async def _batch(self, request: Request, body: bytes, send: Send) -> None:
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

    async def _member(self, batch: Request, message: msgspec.Raw) -> bytes | None:
        request = Request(batch.head, batch.environment, batch.rollout, batch.key, batch.session, batch.receive, None)
        try:
            envelope = wire.read_envelope(message)
            request.id = wire.request_id(envelope)
            if envelope.method == "initialize":
                raise wire.RpcFailure(
                    wire.INVALID_REQUEST, "initialize can't be batched.", data={"code": "batch_refused"}
                )
            reply = await self._methods.message(request, envelope)
        except wire.RpcFailure as failure:
            return wire.error_message(request.id, wire.error_object(failure))
        except MegaMCPError as error:
            return wire.error_message(request.id, wire.error_object(wire.RpcFailure.of(error)))
        except Elsewhere:
            # Handing it on would hand on the whole batch, whose other members run here.
            alone = "Send this answer alone, in no batch."
            refused = wire.RpcFailure(wire.INVALID_REQUEST, alone, data={"code": "batch_refused"})
            return wire.error_message(request.id, wire.error_object(refused))
        return None if reply is None else wire.reply_message(request.id or b"null", reply)


def _resumable(head: eras.Head) -> bool:
    """Whether the client's revision knows events that only carry an id to resume from."""
    return head.values.get(b"mcp-protocol-version") == HANDSHAKE[0].encode()
