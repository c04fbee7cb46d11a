"""How a tool server reaches the client that asked: over the stream of its request, or by letting it come back.

A client of the handshake era gets requests on the event stream of its own request and posts its answers, which find
their question here by session and id. A client of 2026-07-28 gets an `input_required` result while the call is held,
and comes back with the answers and the call's token. Nothing here knows tools, rollouts' states or HTTP.
"""

import asyncio
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from megamcp.dataplane import messages, wire
from megamcp.dataplane.forward import named
from megamcp.dataplane.streams import EventStream

HELD = "io.megamcp/call:"
"""How the `requestState` of a held call begins."""

_SAID_S = 60.0
"""So long the result of a held call waits for a client that is late."""

_LATE = wire.error_object(wire.RpcFailure(wire.INTERNAL_ERROR, "The client did not answer in time."))
_NO_STREAM = wire.error_object(
    wire.RpcFailure(wire.INTERNAL_ERROR, "The client can't be asked: it takes no event stream for this request.")
)

# Sub-capabilities that matter to a server, in the order of their bits in a session id: never change, only append.
_KNOWN: tuple[tuple[str, ...], ...] = (
    ("roots",),
    ("roots", "listChanged"),
    ("sampling",),
    ("sampling", "context"),
    ("sampling", "tools"),
    ("elicitation",),
    ("elicitation", "form"),
    ("elicitation", "url"),
)
_NEEDED = {"sampling/createMessage": "sampling", "elicitation/create": "elicitation", "roots/list": "roots"}


def packed(capabilities: dict[str, Any]) -> str:
    """Capabilities as few characters, for a session id: those that are known here."""
    bits = 0
    for bit, path in enumerate(_KNOWN):
        found: Any = capabilities
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None and found is not False:
            bits |= 1 << bit
    return f"{bits:x}"


def session_for(rollout: str, capabilities: bytes) -> str:
    """The session of a client that has none: it says with each request what it can do."""
    if capabilities == b"{}":
        return rollout
    declared = msgspec.json.decode(capabilities)
    return f"{rollout}#{packed(declared)}" if isinstance(declared, dict) else rollout


@lru_cache(maxsize=256)
def unpacked(text: str) -> bytes:
    """The JSON text of what `packed` made; nothing where it is no such text."""
    try:
        bits = int(text or "0", 16)
    except ValueError:
        bits = 0
    capabilities: dict[str, Any] = {}
    for bit, path in enumerate(_KNOWN):
        if bits >> bit & 1:
            into = capabilities
            for name in path[:-1]:
                into = into.setdefault(name, {})
            into.setdefault(path[-1], True if path[-1] == "listChanged" else {})
    return wire.encode(capabilities)


def _can(capabilities: bytes, method: str, params: bytes) -> bool:
    needed = _NEEDED.get(method)
    declared = msgspec.json.decode(capabilities)
    if needed is None or not isinstance(declared, dict) or needed not in declared:
        return False
    if method == "elicitation/create" and b'"url"' in params:
        try:
            mode = msgspec.json.decode(params).get("mode")
        except (msgspec.DecodeError, AttributeError):
            return True
        return mode != "url" or "url" in declared[needed]
    return True


class Answers:
    """Questions that wait for clients of this process, by (session, id)."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._waiting: dict[tuple[str, bytes], asyncio.Future[wire.Reply]] = {}

    def expect(self, session: str) -> tuple[bytes, "asyncio.Future[wire.Reply]"]:
        number = wire.encode(named(self._peer))
        future: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[session, number] = future
        future.add_done_callback(lambda _: self._waiting.pop((session, number), None))
        return number, future

    def give(self, session: str, number: bytes, reply: wire.Reply) -> bool:
        """False where nothing here waits for it."""
        future = self._waiting.get((session, number))
        if future is None or future.done():
            return False
        future.set_result(reply)
        return True


class SessionClient:
    """A client of the handshake era, for one request of its or outside of any."""

    resumes = False
    level: str | None = None

    def __init__(
        self, session: str, capabilities: bytes, stream: EventStream | None, answers: Answers, ask_s: float
    ) -> None:
        self.session = session
        self.capabilities = capabilities
        self._stream = stream
        self._answers = answers
        self._ask_s = ask_s

    async def notify(self, message: bytes) -> None:
        if self._stream is not None:
            await self._stream.event(message)

    async def ask(self, method: str, params: bytes) -> wire.Reply:
        if not _can(self.capabilities, method, params):
            return wire.Reply(messages.NO_CAPABILITY, failed=True)
        if self._stream is None:
            return wire.Reply(_NO_STREAM, failed=True)
        number, future = self._answers.expect(self.session)
        await self._stream.event(
            b'{"jsonrpc":"2.0","id":%b,"method":%b,"params":%b}' % (number, wire.encode(method), params)
        )
        try:
            async with asyncio.timeout(self._ask_s):
                return await future
        except TimeoutError:
            return wire.Reply(_LATE, failed=True)
        except asyncio.CancelledError:
            await self._stream.event(messages.cancelled(number))
            raise


class Caller:
    """Whoever calls over REST: nobody to ask, and no stream. Results that ask are its own to follow up."""

    resumes = True
    capabilities = b"{}"
    level: str | None = None

    def __init__(self, rollout: str) -> None:
        self.session = rollout

    async def notify(self, message: bytes) -> None:
        pass

    async def ask(self, method: str, params: bytes) -> wire.Reply:
        return wire.Reply(messages.NO_CAPABILITY, failed=True)


@dataclass(slots=True, eq=False)
class _Asked:
    method: str
    params: bytes
    answer: "asyncio.Future[wire.Reply]"


class HeldClient:
    """A client of 2026-07-28 in a request that may be held while it is away to find answers."""

    resumes = True

    def __init__(
        self, session: str, capabilities: bytes, level: str | None, stream: EventStream | None, ask_s: float
    ) -> None:
        self.session = session
        self.capabilities = capabilities
        self.level = level
        self.stream = stream
        """Of the request that is there now."""
        self._ask_s = ask_s
        self._open: dict[str, _Asked] = {}
        self.asked = asyncio.Event()

    async def notify(self, message: bytes) -> None:
        if self.stream is None or (self.level is None and messages.is_log(message)):
            return  # only who names a level gets log messages
        if messages.is_change(message):
            return  # for subscriptions
        await self.stream.event(message)

    async def ask(self, method: str, params: bytes) -> wire.Reply:
        if not _can(self.capabilities, method, params):
            return wire.Reply(messages.NO_CAPABILITY, failed=True)
        key = secrets.token_hex(4)
        asked = self._open[key] = _Asked(method, params, asyncio.get_running_loop().create_future())
        self.asked.set()
        try:
            async with asyncio.timeout(self._ask_s):
                return await asked.answer
        except TimeoutError:
            return wire.Reply(_LATE, failed=True)
        finally:
            del self._open[key]

    def questions(self) -> dict[str, Any]:
        """What is to be answered now, as `inputRequests`."""
        self.asked.clear()
        waiting = {key: one for key, one in self._open.items() if not one.answer.done()}
        return {key: {"method": one.method, "params": msgspec.Raw(one.params)} for key, one in waiting.items()}

    def answer(self, answers: dict[str, msgspec.Raw]) -> None:
        for key, answer in answers.items():
            if (asked := self._open.get(key)) is not None and not asked.answer.done():
                asked.answer.set_result(wire.Reply(bytes(answer)))
        if any(not asked.answer.done() for asked in self._open.values()):
            self.asked.set()  # it is asked again


@dataclass(slots=True, eq=False)
class _Call:
    task: "asyncio.Task[wire.Reply]"
    client: HeldClient
    identity: bytes


class Held:
    """Calls of this process whose clients are away to find answers."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._calls: dict[str, _Call] = {}

    async def run(self, work: Awaitable[wire.Reply], client: HeldClient, identity: bytes) -> wire.Reply:
        """The result of `work`, or the questions that it has; then it goes on without the caller until `resume`.

        `identity` stands for the request: another one can't resume it.
        """
        call = _Call(asyncio.ensure_future(work), client, identity)
        return await self._next(call)

    def holds(self, state: str) -> bool:
        return state.removeprefix(HELD) in self._calls

    async def resume(
        self, state: str, identity: bytes, answers: dict[str, msgspec.Raw], stream: EventStream | None
    ) -> wire.Reply:
        """Raises RpcFailure where there is no such call (any more), or it was another request's."""
        call = self._calls.get(state.removeprefix(HELD))
        if call is None or call.identity != identity:
            raise wire.RpcFailure(
                wire.INVALID_PARAMS,
                "This requestState belongs to no call that waits for this request: it has ended, or was another's.",
                data={"code": "call_not_held"},
            )
        del self._calls[state.removeprefix(HELD)]
        call.client.stream = stream
        call.client.answer(answers)
        return await self._next(call)

    async def _next(self, call: _Call) -> wire.Reply:
        asked = asyncio.ensure_future(call.client.asked.wait())
        try:
            await asyncio.wait({call.task, asked}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            call.task.cancel()
            await asyncio.wait({call.task})
            raise
        finally:
            asked.cancel()
        if call.task.done() or not (questions := call.client.questions()):
            return await call.task
        call.client.stream = None
        token = named(self._peer)
        self._calls[token] = call
        call.task.add_done_callback(lambda task: self._ended(token, task))
        return wire.Reply(
            wire.encode({"resultType": "input_required", "inputRequests": questions, "requestState": HELD + token})
        )

    def _ended(self, token: str, task: "asyncio.Task[wire.Reply]") -> None:
        """Its result waits a while. That it failed is in the journal; nobody need come for it."""
        if not task.cancelled():
            task.exception()
        if token in self._calls:
            asyncio.get_running_loop().call_later(_SAID_S, self._calls.pop, token, None)
