"""What each method of the protocol does: its own ones are answered here, calls go to `calls`, the rest to `features`.

One object for both eras. Nothing of HTTP: that is `endpoint`'s.
"""

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from megamcp.dataplane import clients, consent, eras, tracing, watched, wire
from megamcp.dataplane.asgi import Disconnected, Receive, disconnected
from megamcp.dataplane.calls import CallRequest, Calls
from megamcp.dataplane.features import SESSIONS_OWN, Features, no_method
from megamcp.dataplane.forward import Elsewhere, peer_of
from megamcp.dataplane.links import Environment, Environments
from megamcp.dataplane.listening import Listening
from megamcp.dataplane.ports import ControlPort, Limits, RolloutView
from megamcp.dataplane.protocol import CAPABILITIES_KEY, LEVEL_KEY, Client
from megamcp.dataplane.request import ANSWERS, Request, tool_call
from megamcp.errors import BadRequest, NotFound

ROLLOUT_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_ABOUT_TIMEOUT_S = 10.0
_HANDSHAKE_ONLY = SESSIONS_OWN | {"ping", "initialize"}
_REMEMBERED = 10_000


@dataclass(slots=True, eq=False)
class _InFlight:
    task: "asyncio.Task[None]"
    reason: str | None = None

    def cancel(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            self.task.cancel(reason)


class Methods:
    """Answers messages."""

    def __init__(self, control: ControlPort, environments: Environments, calls: Calls, limits: Limits) -> None:
        self._control = control
        self._environments = environments
        self._calls = calls
        self._limits = limits
        self._features = Features(limits)
        self.answers = clients.Answers(control.peer)
        self._held = clients.Held(control.peer)
        self.listening = Listening(environments, self.answers, limits)
        self._in_flight: dict[tuple[str, str, bytes], _InFlight] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._levels: OrderedDict[str, str] = OrderedDict()

    def cancel(self, rollout: str, session: str, request_id: str) -> bool:
        """Cancels a handshake-era request of this process; False when it has no such request."""
        entry = self._in_flight.get((rollout, session, request_id.encode()))
        if entry is None:
            return False
        entry.cancel("cancelled")
        return True

    async def message(self, request: Request, envelope: wire.Envelope) -> wire.Reply | None:
        """The reply to a request; None for what has none."""
        if envelope.jsonrpc != "2.0":
            raise wire.RpcFailure(wire.INVALID_REQUEST, 'jsonrpc must be "2.0".', data={"code": "invalid_request"})
        method = envelope.method
        watched.begin(request.rollout, request.id.decode("utf-8", "replace") if request.id else None)
        if method is None:
            self._answer(request, envelope)
            request.id = None
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
            request.meta = eras.check_modern(request.head, method, params)
            if method in _HANDSHAKE_ONLY:
                raise no_method(method)
        if not tracing.wanted():
            return await self._answered(request, envelope, method, tracing.passed_on(request, params))
        with tracing.span(request, method, params) as (made, params):
            reply = await self._answered(request, envelope, method, params)
            tracing.end(made, reply, call=method == "tools/call")
            return reply

    async def _answered(
        self, request: Request, envelope: wire.Envelope, method: str, params: dict[str, msgspec.Raw]
    ) -> wire.Reply | None:
        if method == "tools/call":
            return await self._call(request, params)
        environment, rollout = await self._environment(request, opens=method == "initialize")
        match method:
            case "tools/list":
                return await self._list(environment, rollout, params, modern=request.modern)
            case "initialize":
                protocol, capabilities = eras.negotiated(envelope.params)
                request.new_session = eras.new_session(request.rollout or "", clients.packed(capabilities))
                view = environment.view
                about = await environment.about(rollout, _ABOUT_TIMEOUT_S)
                return wire.Reply(
                    eras.initialize_result(protocol, view.name, view.version, about, logs=environment.may_ask)
                )
            case "ping":
                return wire.Reply(b"{}")
            case "server/discover" if request.modern:
                view = environment.view
                about = await environment.about(rollout, _ABOUT_TIMEOUT_S)
                return wire.Reply(eras.discover_result(view.name, view.version, about))
            case "subscriptions/listen" if request.modern:
                await environment.about(rollout, _ABOUT_TIMEOUT_S)
                client = self._client(request, rollout)
                return await self.listening.subscribe(environment, rollout, request, params, client)
            case "server/discover" | "subscriptions/listen":
                raise no_method(method)
        return await self._feature(request, environment, rollout, method, params)

    def _answer(self, request: Request, envelope: wire.Envelope) -> None:
        """A client's answer to a question that a server had."""
        answered = envelope.result is not wire.ABSENT or envelope.error is not wire.ABSENT
        if request.modern or request.id is None or not answered:
            raise wire.RpcFailure(
                wire.INVALID_REQUEST,
                "Not a JSON-RPC request or notification.",
                data={"code": "invalid_request"},
            )
        failed = envelope.result is wire.ABSENT
        reply = wire.Reply(bytes(envelope.error if failed else envelope.result), failed)
        if not self.answers.give(request.session or "", request.id, reply):
            self._elsewhere(request, request.id.decode().strip('"'), answered=False)

    def _elsewhere(self, request: Request, name: str, *, answered: bool = True) -> None:
        """Raises `Elsewhere` for what another process has. `answered`: the message wants an answer."""
        peer = peer_of(name)
        if peer and peer != self._control.peer and not request.forwarded:
            raise Elsewhere(peer, answered=answered)

    async def _notification(self, request: Request, method: str, params: msgspec.Raw) -> None:
        # 2026-07-28 has none over HTTP (a client cancels by leaving); those sent all the same are dropped.
        if request.modern:
            return
        rollout = request.rollout or (eras.rollout_of_session(request.session) if request.session else None)
        if rollout is None:
            return
        if method == "notifications/roots/list_changed":
            environment, view = await self._environment(request, opens=False)
            client = self._client(request, view)
            await asyncio.gather(*(link.tell(view, method, client) for link in environment.links.values()))
        elif method == "notifications/cancelled":
            wanted = wire.read_members(params, "params").get("requestId")
            if wanted is None:
                return
            session, text = request.session or "", bytes(wanted).decode()
            if not self.cancel(rollout, session, text):
                await self._control.cancel_elsewhere(rollout, session, text)

    # Rollout and environment

    async def rollout(self, request: Request, *, for_call: bool = False) -> RolloutView:
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
        if not ROLLOUT_ID.fullmatch(rollout):
            raise NotFound(f"There is no rollout {rollout[:100]!r}.", code="rollout_not_found")
        find = self._control.rollout_for_call if for_call else self._control.rollout
        view = await find(rollout)
        request.rollout = watched.current().rollout = rollout
        request.read = True
        return view

    async def _environment(self, request: Request, *, opens: bool) -> tuple[Environment, RolloutView | None]:
        if request.environment is not None and request.rollout is None:
            if opens and not request.modern:
                request.rollout = await self._control.open_for_session(request.environment, key=None)
            elif request.modern or request.session is None:
                view = await self._control.environment_named(request.environment)
                request.read = True
                return self._environments.of(view), None
        rollout = await self.rollout(request)
        return await self.environment_of(rollout), rollout

    async def environment_of(self, rollout: RolloutView) -> Environment:
        return self._environments.of(await self._control.environment(rollout.environment_id))

    def _client(self, request: Request, rollout: RolloutView | None) -> Client:
        limits = self._limits
        if not request.modern:
            session = request.session or (rollout.id if rollout is not None else "")
            capabilities = clients.unpacked(eras.capabilities_of_session(session))
            client = clients.SessionClient(session, capabilities, request.stream, self.answers, limits.ask_timeout_s)
            client.level = self._levels.get(session)
            return client
        return self._held_client(request, rollout)

    def session_said(self, session: str, method: str, value: str) -> None:
        """See `ControlPort.session_said`; also what this process itself said comes here."""
        if method == "logging/setLevel":
            self._remember_level(session, value)
        self.listening.hear_of(session, method, value)

    def _remember_level(self, session: str, level: str) -> None:
        self._levels[session] = level
        self._levels.move_to_end(session)
        if len(self._levels) > _REMEMBERED:
            self._levels.popitem(last=False)

    def _held_client(self, request: Request, rollout: RolloutView | None) -> clients.HeldClient:
        meta = request.meta or {}
        level = meta.get(LEVEL_KEY)
        capabilities = bytes(meta.get(CAPABILITIES_KEY, b"{}"))
        return clients.HeldClient(
            clients.session_for(rollout.id if rollout is not None else "", capabilities),
            capabilities,
            wire.read_string(level, LEVEL_KEY) if level is not None else None,
            request.stream,
            self._limits.ask_timeout_s,
        )

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

    async def _call(self, request: Request, params: dict[str, msgspec.Raw]) -> wire.Reply:
        view = await self.rollout(request, for_call=True)
        call, key = tool_call(request, params)
        environment = await self.environment_of(view)
        mirrored = request.head.mirrored if request.modern else None
        asked = CallRequest(call, key, mirrored)

        def work(client: Client) -> Awaitable[wire.Reply]:
            return self._calls.call(view, asked, client)

        reply = await self._settled(request, environment, view, params, "tools/call", work)
        return eras.complete(reply) if request.modern else reply

    async def _feature(
        self,
        request: Request,
        environment: Environment,
        rollout: RolloutView | None,
        method: str,
        params: dict[str, msgspec.Raw],
    ) -> wire.Reply:
        async def work(client: Client) -> wire.Reply:
            reply, links = await self._features.request(environment, rollout, method, params, client)
            if method in SESSIONS_OWN and not reply.failed:
                name = "level" if method == "logging/setLevel" else "uri"
                said = wire.read_string(params.get(name), name)
                if name == "level":
                    self._remember_level(client.session, said)
                self.listening.heed(client.session, links, rollout, method, said)
                await self._control.session_said(client.session, method, said)
            return reply

        reply = await self._settled(request, environment, rollout, params, method, work)
        return eras.complete(reply, method) if request.modern else reply

    async def _settled(
        self,
        request: Request,
        environment: Environment,
        rollout: RolloutView | None,
        params: dict[str, msgspec.Raw],
        method: str,
        work: Callable[[Client], Awaitable[wire.Reply]],
    ) -> wire.Reply:
        """Does the work of one request, which its client may cancel, and may be asked for input for."""
        task = asyncio.current_task()
        assert task is not None
        entry = _InFlight(task)
        address = (rollout.id if rollout is not None else "", request.session or "", request.id or b"")
        watch: asyncio.TimerHandle | None = None
        opening: asyncio.TimerHandle | None = None
        if request.modern:
            # Only a request that takes a while pays for watching whether its client is still there.
            watch = asyncio.get_running_loop().call_later(
                self._limits.disconnect_check_s, self._watch, request.receive, entry
            )
        else:
            self._in_flight[address] = entry
        if request.stream is not None:
            opening = request.stream.start_later()
        try:
            if not request.modern or not environment.may_ask:
                return await work(self._client(request, rollout))
            client = self._held_client(request, rollout)
            identity = _identity(address[0], method, params)
            state = params.get("requestState")
            if state is not None and bytes(state).startswith(b'"' + clients.HELD.encode()):
                answers = wire.read_members(params.get("inputResponses", msgspec.Raw(b"{}")), "inputResponses")
                held = wire.read_string(state, "requestState")
                if not self._held.holds(held):
                    self._elsewhere(request, held.removeprefix(clients.HELD))
                return await self._held.resume(held, identity, answers, request.stream)
            return await self._held.run(work(client), client, identity)
        except asyncio.CancelledError:
            if entry.reason is None:
                raise
            task.uncancel()
            if entry.reason == "disconnected":
                raise Disconnected from None
            raise wire.RpcFailure(-32800, "The call was cancelled.", status=200, data={"code": "cancelled"}) from None
        finally:
            entry.reason = entry.reason or "done"
            if rollout is not None and request.session is not None:
                self.listening.poke(request.session, environment, rollout)
            if opening is not None:
                opening.cancel()
            if watch is not None:
                watch.cancel()
            elif self._in_flight.get(address) is entry:
                del self._in_flight[address]

    def _watch(self, receive: Receive, entry: _InFlight) -> None:
        async def watch() -> None:
            await disconnected(receive)
            entry.cancel("disconnected")

        task = asyncio.create_task(watch())
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)


def _identity(rollout: str, method: str, params: dict[str, msgspec.Raw]) -> bytes:
    """What makes a request with answers the one that was held."""
    hashed = hashlib.sha256(f"{rollout}\0{method}\0".encode())
    for name in sorted(params):
        if name not in ANSWERS and name != "_meta":
            hashed.update(name.encode() + b"\0" + bytes(params[name]) + b"\0")
    return hashed.digest()
