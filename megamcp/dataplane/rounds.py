"""Questions of a 2026-07-28 server to a client that is asked while its request waits (the handshake era's way).

Such a server answers `input_required` with its questions; the client is asked, and the request repeated with the
answers, until there is a result. Clients of 2026-07-28 do that themselves, and callers over REST too.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec

from megamcp.dataplane import wire
from megamcp.dataplane.protocol import Client, ToolCall
from megamcp.errors import UpstreamError

_MOST = 10
_PAUSE_S = 0.05

More = dict[str, msgspec.Raw]
"""Members that go into the repeated request's params."""


class _Question(msgspec.Struct):
    method: str
    params: msgspec.Raw = msgspec.Raw(b"{}")


class _Required(msgspec.Struct):
    resultType: str = "complete"
    inputRequests: dict[str, _Question] | None = None
    requestState: msgspec.Raw = wire.ABSENT


async def settled(send: Callable[[More], Awaitable[wire.Reply]], client: Client | None) -> wire.Reply:
    """The reply of `send`, its questions answered. Raises what `send` raises, UpstreamError after too many rounds."""
    more: More = {}
    for _ in range(_MOST):
        reply = await send(more)
        if client is None or client.resumes or (required := _required(reply)) is None:
            return reply
        more = {}
        if required.requestState is not wire.ABSENT:
            more["requestState"] = required.requestState
        if required.inputRequests:
            questions = required.inputRequests
            answers = await asyncio.gather(*(client.ask(one.method, bytes(one.params)) for one in questions.values()))
            for answer in answers:
                if answer.failed:
                    return answer
            given = {key: msgspec.Raw(answer.body) for key, answer in zip(questions, answers, strict=True)}
            more["inputResponses"] = msgspec.Raw(wire.encode(given))
        else:
            await asyncio.sleep(_PAUSE_S)
    raise UpstreamError(f"The tool server asked for input {_MOST} times without an end.", code="tool_server_protocol")


def with_more(call: ToolCall, more: More) -> ToolCall:
    if not more:
        return call
    return replace(call, more=call.more + b"".join(b",%b:%b" % (wire.encode(k), bytes(v)) for k, v in more.items()))


def _required(reply: wire.Reply) -> _Required | None:
    if reply.failed or b'"input_required"' not in reply.body:
        return None
    try:
        found = msgspec.json.decode(reply.body, type=_Required)
    except msgspec.DecodeError:
        return None
    return found if found.resultType == "input_required" else None
