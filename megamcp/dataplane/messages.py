"""What a client of a tool server says and hears, apart from how it travels: shared by HTTP and stdio.

Bodies of requests in both eras, what the handshakes answer, and what to say to a server that asks its client for
something. Arguments and results stay the bytes that they came as. No I/O.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from megamcp import __version__
from megamcp.dataplane import wire
from megamcp.dataplane.protocol import (
    CAPABILITIES_KEY,
    CLIENT_KEY,
    HANDSHAKE,
    LEVEL_KEY,
    MODERN,
    PROTOCOL_KEY,
    About,
    Client,
    ToolCall,
)
from megamcp.errors import UpstreamError

CLIENT = {"name": "megamcp", "version": __version__}
OWN_META: dict[str, Any] = {PROTOCOL_KEY: MODERN, CLIENT_KEY: CLIENT, CAPABILITIES_KEY: {}}
INITIALIZED = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
INITIALIZE_PARAMS: dict[str, Any] = {"protocolVersion": HANDSHAKE[0], "capabilities": {}, "clientInfo": CLIENT}
ALL_CAPABILITIES = wire.encode(
    {"roots": {"listChanged": True}, "sampling": {"context": {}, "tools": {}}, "elicitation": {"form": {}, "url": {}}}
)
DISCOVER_PARAMS = {"_meta": OWN_META}

_OWN_MEMBERS = wire.encode(OWN_META)[1:-1]
_REVISION = re.compile(r"[0-9A-Za-z.-]{1,40}")
NO_METHOD = b'{"code":-32601,"message":"No server here has this method.","data":{"code":"method_not_found"}}'
NO_CAPABILITY = b'{"code":-32601,"message":"No such capability is declared."}'


class Initialized(msgspec.Struct):
    """What `initialize` is answered with."""

    protocolVersion: str
    instructions: str | None = None
    capabilities: dict[str, Any] = {}

    @property
    def about(self) -> About:
        return About(self.instructions, self.capabilities)


class Discovered(msgspec.Struct):
    """What `server/discover` is answered with."""

    supportedVersions: list[str]
    instructions: str | None = None
    capabilities: dict[str, Any] = {}

    @property
    def about(self) -> About:
        return About(self.instructions, self.capabilities)


def request(number: bytes, method: str, params: Mapping[str, object]) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"method":%b,"params":%b}' % (number, wire.encode(method), wire.encode(params))


def notification(method: str, params: Mapping[str, object]) -> bytes:
    return b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (wire.encode(method), wire.encode(params))


def initialize(number: bytes, capabilities: bytes) -> bytes:
    """The handshake with what the client behind it can do."""
    return request(number, "initialize", {**INITIALIZE_PARAMS, "capabilities": msgspec.Raw(capabilities)})


def token_of(params: Mapping[str, object]) -> bytes | None:
    """The progress token that a client's `_meta` asks to be told of progress by."""
    meta = params.get("_meta")
    if not isinstance(meta, msgspec.Raw):
        return None
    token = wire.read_members(meta, "_meta").get("progressToken")
    return bytes(token) if token is not None else None


def for_modern(params: Mapping[str, object], client: Client | None) -> dict[str, object]:
    """Parameters of a request to a server of 2026-07-28, whoever asks."""
    meta = params.get("_meta")
    call = ToolCall("", b"", bytes(meta) if isinstance(meta, msgspec.Raw) else b"", _is_modern(meta))
    return {**params, "_meta": msgspec.Raw(modern_meta(call, client))}


def for_shared(params: Mapping[str, object], number: bytes, *, modern: bool) -> dict[str, object]:
    """Parameters of a request to a server that many share a stream to."""
    meta = params.get("_meta")
    raw = bytes(meta) if isinstance(meta, msgspec.Raw) else b""
    call = ToolCall("", b"", raw, _is_modern(meta), progress_token=token_of(params))
    rest = {name: value for name, value in params.items() if name != "_meta"}
    told = shared_meta(call, number, modern=modern)
    return {**rest, "_meta": msgspec.Raw(told)} if told else rest


def _is_modern(meta: object) -> bool:
    return isinstance(meta, msgspec.Raw) and PROTOCOL_KEY in wire.read_members(meta, "_meta")


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


def modern_meta(call: ToolCall, client: Client | None = None) -> bytes:
    """`_meta` of a 2026-07-28 request whose answer comes alone: the client's own, with its own progress token."""
    if call.modern:
        return call.meta
    members = _OWN_MEMBERS
    if client is not None and (client.level is not None or client.capabilities != b"{}"):
        own = {**OWN_META, CAPABILITIES_KEY: msgspec.Raw(client.capabilities)}
        if client.level is not None:
            own[LEVEL_KEY] = client.level
        members = wire.encode(own)[1:-1]
    if len(call.meta) > 2:
        return b"{%b,%b" % (members, call.meta.lstrip()[1:])
    return b"{%b}" % members


def shared_meta(call: ToolCall, number: bytes, *, modern: bool) -> bytes:
    """`_meta` where calls share a stream: tokens of different clients could be equal, so ours is the request's number.

    What describes a modern client has no meaning in the handshake era.
    """
    if len(call.meta) <= 2 and not modern:
        return b""
    members = wire.read_members(call.meta, "_meta") if len(call.meta) > 2 else {}
    if not modern:
        for key in (*OWN_META, LEVEL_KEY):
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
    """To a server that asks when there is no client to ask: a ping is answered, the rest refused."""
    number = bytes(envelope.id)
    if envelope.method == "ping":
        return wire.result_message(number, b"{}")
    return wire.error_message(number, NO_CAPABILITY)


def cancels(params: msgspec.Raw) -> bytes | None:
    """The id of the question that a server's `notifications/cancelled` takes back; None where that is malformed."""
    try:
        wanted = wire.read_members(params, "params").get("requestId")
    except wire.RpcFailure:
        return None
    return bytes(wanted) if wanted is not None else None


def is_log(message: bytes) -> bool:
    """Whether a notification is a log message."""
    return b'"notifications/message"' in message and wire.read_envelope(message).method == "notifications/message"


def is_acknowledgement(message: bytes) -> bool:
    """Whether a notification says that a subscription has begun."""
    method = "notifications/subscriptions/acknowledged"
    return method.encode() in message and wire.read_envelope(message).method == method


def is_change(message: bytes) -> bool:
    """Whether a notification says that a list or a resource has changed."""
    if b"list_changed" not in message and b"resources/updated" not in message:
        return False
    method = wire.read_envelope(message).method or ""
    return method.endswith("/list_changed") or method == "notifications/resources/updated"


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


class _Supported(msgspec.Struct, frozen=True):
    supported: list[str] = []


class _Unsupported(msgspec.Struct):
    code: int = 0
    data: _Supported = _Supported()


def speaks_modern(reply: wire.Reply) -> bool:
    """Whether a refusal of the version names 2026-07-28 as one that is spoken: no reason to speak an older one."""
    if not reply.failed:
        return False
    try:
        refused = msgspec.json.decode(reply.body, type=_Unsupported)
    except msgspec.DecodeError:
        return False
    return refused.code == wire.UNSUPPORTED_VERSION and MODERN in refused.data.supported


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
