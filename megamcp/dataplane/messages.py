"""What a client of a tool server says and hears, apart from how it travels: shared by HTTP and stdio.

Bodies of requests in both eras, what the handshakes answer, and what to say to a server that asks its client for
something. Arguments and results stay the bytes that they came as. No I/O.
"""

import re
from collections.abc import Mapping

import msgspec

from megamcp import __version__
from megamcp.dataplane import wire
from megamcp.dataplane.protocol import (
    CAPABILITIES_KEY,
    CLIENT_KEY,
    HANDSHAKE,
    MODERN,
    PROTOCOL_KEY,
    ToolCall,
)
from megamcp.errors import UpstreamError

CLIENT = {"name": "megamcp", "version": __version__}
OWN_META = {PROTOCOL_KEY: MODERN, CLIENT_KEY: CLIENT, CAPABILITIES_KEY: {}}
INITIALIZED = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
INITIALIZE_PARAMS = {"protocolVersion": HANDSHAKE[0], "capabilities": {}, "clientInfo": CLIENT}
DISCOVER_PARAMS = {"_meta": OWN_META}

_OWN_MEMBERS = wire.encode(OWN_META)[1:-1]
_REVISION = re.compile(r"[0-9A-Za-z.-]{1,40}")
_NO_CAPABILITY = b'{"code":-32601,"message":"No such capability is declared."}'


class Initialized(msgspec.Struct):
    """What `initialize` is answered with."""

    protocolVersion: str
    instructions: str | None = None


class Discovered(msgspec.Struct):
    """What `server/discover` is answered with."""

    supportedVersions: list[str]
    instructions: str | None = None


def request(number: bytes, method: str, params: Mapping[str, object]) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"method":%b,"params":%b}' % (number, wire.encode(method), wire.encode(params))


def tool_call(number: bytes, call: ToolCall, meta: bytes) -> bytes:
    """`tools/call` with the caller's bytes; an empty `meta` is left out."""
    return b'{"jsonrpc":"2.0","id":%b,"method":"tools/call","params":{"name":%b,"arguments":%b%b%b}}' % (
        number,
        wire.encode(call.name),
        call.arguments,
        call.more,
        b',"_meta":' + meta if meta else b"",
    )


def cancelled(number: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%b,"reason":"left"}}' % number


def modern_meta(call: ToolCall) -> bytes:
    """`_meta` of a 2026-07-28 request whose answer comes alone: the client's own, with its own progress token."""
    if call.modern:
        return call.meta
    if len(call.meta) > 2:
        return b"{%b,%b" % (_OWN_MEMBERS, call.meta.lstrip()[1:])
    return b"{%b}" % _OWN_MEMBERS


def shared_meta(call: ToolCall, number: bytes, *, modern: bool) -> bytes:
    """`_meta` where calls share a stream: tokens of different clients could be equal, so ours is the request's number.

    What describes a modern client has no meaning in the handshake era.
    """
    if len(call.meta) <= 2 and not modern:
        return b""
    members = wire.read_members(call.meta, "_meta") if len(call.meta) > 2 else {}
    if not modern:
        for key in OWN_META:
            members.pop(key, None)
    elif not call.modern:
        members |= {key: msgspec.Raw(wire.encode(value)) for key, value in OWN_META.items()}
    if call.progress_token is not None:
        members["progressToken"] = msgspec.Raw(number)
    return wire.encode(members) if members else b""


def progress_for(params: msgspec.Raw, token: bytes) -> bytes | None:
    """A progress notification with the client's own token; None where it is malformed."""
    try:
        members = wire.read_members(params, "params")
    except wire.RpcFailure:
        return None
    members["progressToken"] = msgspec.Raw(token)
    return b'{"jsonrpc":"2.0","method":"notifications/progress","params":%b}' % wire.encode(members)


def answer_to(envelope: wire.Envelope) -> bytes:
    """To a server that asks its client: a ping is answered; no capability was declared, so the rest is refused."""
    number = bytes(envelope.id)
    if envelope.method == "ping":
        return wire.result_message(number, b"{}")
    return wire.error_message(number, _NO_CAPABILITY)


def read(server: str, text: bytes, depth: int) -> wire.Envelope:
    """A message of a server. Raises UpstreamError."""
    try:
        wire.check_text(text, depth)
        return wire.read_envelope(text)
    except wire.RpcFailure as error:
        raise UpstreamError(
            f"Tool server {server!r} sent something that is not JSON-RPC: {error.message}",
            code="tool_server_protocol",
        ) from None


def reply_in(envelope: wire.Envelope, number: bytes) -> wire.Reply | None:
    """The reply to a request of ours, if the message is one. A result that is no object is none."""
    if envelope.method is not None or envelope.id is wire.ABSENT or bytes(envelope.id) != number:
        return None
    if envelope.result is not wire.ABSENT and (result := bytes(envelope.result))[0] == 0x7B:
        return wire.Reply(result)
    if envelope.error is not wire.ABSENT:
        return wire.Reply(bytes(envelope.error), failed=True)
    return None


def read_discovered(reply: wire.Reply) -> Discovered | None:
    """What a server of 2026-07-28 says about itself; None for one that isn't."""
    if reply.failed:
        return None
    try:
        found = msgspec.json.decode(reply.body, type=Discovered)
    except msgspec.DecodeError:
        return None
    return found if MODERN in found.supportedVersions else None


def read_initialized(server: str, reply: wire.Reply | None) -> Initialized:
    """What a server of the handshake era says about itself; None stands for HTTP's 404. Raises UpstreamError."""
    if reply is None or reply.failed:
        why = wire.peek_error(reply.body)[1] if reply else "404"
        raise UpstreamError(f"Tool server {server!r} refuses MCP's handshake: {why}", code="tool_server_protocol")
    try:
        found = msgspec.json.decode(reply.body, type=Initialized)
    except msgspec.DecodeError as error:
        raise UpstreamError(
            f"Tool server {server!r} answers the handshake with nonsense: {error}", code="tool_server_protocol"
        ) from None
    if not _REVISION.fullmatch(found.protocolVersion):
        raise UpstreamError(f"Tool server {server!r} speaks no known revision of MCP.", code="tool_server_protocol")
    return found
