"""What a client may say, in both eras of the protocol, and what the gateway says about itself.

A request that names 2026-07-28 in `MCP-Protocol-Version` stands alone: its headers must agree with its body. Every
other request belongs to the handshake era, whose sessions hold no state here. Nothing in this module knows how a
tool is called. Sources: specification 2026-07-28 (streamable HTTP, versioning) and 2025-11-25 (transports, lifecycle).
"""

import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec

from megamcp.dataplane import mirrored, wire
from megamcp.dataplane.protocol import CAPABILITIES_KEY, HANDSHAKE, MODERN, PROTOCOL_KEY, About

SUPPORTED = (MODERN, *HANDSHAKE)
BATCHES = "2025-03-26"
"""The only revision with batches; also what a request without a version header is taken for."""

SERVER_KEY = "io.modelcontextprotocol/serverInfo"
LIST_TTL_MS = 300_000

_COMPLETE = b'"resultType":"complete"}'
"""How results of our own servers end: seen without reading them."""

_NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_ROUTING = frozenset({b"mcp-protocol-version", b"mcp-method", b"mcp-name"})
_READ = _ROUTING | {
    b"accept",
    b"authorization",
    b"content-length",
    b"content-type",
    b"idempotency-key",
    b"last-event-id",
    b"mcp-session-id",
    b"origin",
    b"traceparent",
    b"tracestate",
    b"x-rollout-id",
}


@dataclass(slots=True)
class Head:
    """The headers that matter, by lower-case name; `mirrored` are the `Mcp-Param-*` ones."""

    values: dict[bytes, bytes] = field(default_factory=dict)
    mirrored: list[tuple[bytes, bytes]] = field(default_factory=list)
    repeated: bytes | None = None

    @classmethod
    def of(cls, headers: list[tuple[bytes, bytes]]) -> "Head":
        head = cls()
        values = head.values
        for name, value in headers:
            if name in _READ:
                if name in values and name in _ROUTING:
                    head.repeated = name
                values[name] = value.strip(b" \t")  # the parser leaves white space after a value
            elif name.startswith(mirrored.PREFIX):
                head.mirrored.append((name, value))
        return head

    def text(self, name: bytes) -> str | None:
        value = self.values.get(name)
        return value.decode("latin-1") if value is not None else None


def is_modern(head: Head, envelope: wire.Envelope, body: bytes) -> bool:
    """Which era a request belongs to. Raises for a version that is spoken in neither.

    `initialize` opens a handshake-era session whatever the header says (clients that probed first send it).
    """
    version = head.text(b"mcp-protocol-version")
    if version == MODERN:
        return True
    if envelope.method == "initialize":
        return False
    if version is not None and version not in HANDSHAKE:
        raise unsupported(version)
    if PROTOCOL_KEY.encode() in body and _claims_version(envelope):
        raise _mismatch("The MCP-Protocol-Version header is missing or differs from the version in _meta.")
    return False


def _claims_version(envelope: wire.Envelope) -> bool:
    """Whether `_meta` names a protocol version (the words alone may stand in arguments)."""
    try:
        params = wire.read_members(envelope.params, "params")
        return PROTOCOL_KEY in wire.read_members(params.get("_meta", wire.ABSENT), "_meta")
    except wire.RpcFailure:
        return False


def check_modern(head: Head, method: str, params: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """The checks of a 2026-07-28 request, in the specification's order. Returns the members of `_meta`."""
    meta_raw = params.get("_meta")
    if meta_raw is None:
        raise _incomplete(PROTOCOL_KEY, CAPABILITIES_KEY)
    meta = wire.read_members(meta_raw, "_meta")
    missing = [key for key in (PROTOCOL_KEY, CAPABILITIES_KEY) if key not in meta]
    if missing:
        raise _incomplete(*missing)
    if head.repeated is not None:
        raise _mismatch(f"The header {head.repeated.decode()} was sent more than once.")
    version = wire.read_string(meta[PROTOCOL_KEY], PROTOCOL_KEY)
    if head.text(b"mcp-protocol-version") != version:
        raise _mismatch("The MCP-Protocol-Version header differs from the version in _meta.")
    if head.text(b"mcp-method") != method:
        raise _mismatch("The Mcp-Method header is missing or differs from the method.")
    if (key := _NAMED.get(method)) is not None and key in params:
        value = head.values.get(b"mcp-name")
        if value is None or mirrored.decode_value(value) != wire.read_string(params[key], key):
            raise _mismatch(f"The Mcp-Name header is missing or differs from params.{key}.")
    return meta


def _incomplete(*keys: str) -> wire.RpcFailure:
    return wire.RpcFailure(
        wire.INVALID_PARAMS, f"params._meta lacks {' and '.join(keys)}.", data={"code": "invalid_params"}
    )


def _mismatch(message: str) -> wire.RpcFailure:
    return wire.RpcFailure(wire.HEADER_MISMATCH, message, data={"code": "header_mismatch"})


def unsupported(version: str) -> wire.RpcFailure:
    return wire.RpcFailure(
        wire.UNSUPPORTED_VERSION,
        "Unsupported protocol version",
        data={
            "code": "unsupported_protocol_version",
            "supported": list(SUPPORTED),
            "requested": version[:100],
        },
    )


class _InitializeParams(msgspec.Struct):
    protocolVersion: str
    capabilities: dict[str, Any] = {}


def negotiated(params: msgspec.Raw) -> tuple[str, dict[str, Any]]:
    """The revision of a new handshake-era session (the client's if it is spoken here, else the newest), and what the
    client can do."""
    try:
        asked = msgspec.json.decode(params, type=_InitializeParams)
    except (msgspec.DecodeError, RecursionError):
        raise wire.RpcFailure(
            wire.INVALID_PARAMS, "initialize needs a protocolVersion.", data={"code": "invalid_params"}
        ) from None
    return asked.protocolVersion if asked.protocolVersion in HANDSHAKE else HANDSHAKE[0], asked.capabilities


def _self(name: str, version: str) -> dict[str, str]:
    return {"name": name, "version": version}


def initialize_result(protocol: str, name: str, version: str, about: About, *, logs: bool) -> bytes:
    result: dict[str, object] = {
        "protocolVersion": protocol,
        # Servers of 2026-07-28 may have log messages without declaring it.
        "capabilities": {**about.capabilities, "logging": {}} if logs else about.capabilities,
        "serverInfo": _self(name, version),
    }
    if about.instructions is not None:
        result["instructions"] = about.instructions
    return wire.encode(result)


def discover_result(name: str, version: str, about: About) -> bytes:
    result: dict[str, object] = {
        "resultType": "complete",
        "supportedVersions": SUPPORTED,
        "capabilities": about.capabilities,
        "ttlMs": LIST_TTL_MS,
        "cacheScope": "private",
        "_meta": {SERVER_KEY: _self(name, version)},
    }
    if about.instructions is not None:
        result["instructions"] = about.instructions
    return wire.encode(result)


def list_result(tools: bytes, cursor: str | None, *, modern: bool) -> bytes:
    """One page of tools, its descriptions as their servers wrote them."""
    after = b',"nextCursor":' + wire.encode(cursor) if cursor is not None else b""
    if modern:
        after += b',"resultType":"complete","ttlMs":%d,"cacheScope":"private"' % LIST_TTL_MS
    return b'{"tools":[%b]%b}' % (tools, after)


_CACHEABLE = frozenset({"prompts/list", "resources/list", "resources/templates/list", "resources/read"})
_NOT_FOUND = -32002


def complete(reply: wire.Reply, method: str = "") -> wire.Reply:
    """A reply for a 2026-07-28 client: it wants a `resultType`, and of some how long they stay good, which servers of
    the handshake era don't know; and it knows no code of its own for a resource that isn't there."""
    body = reply.body
    if reply.failed and method == "resources/read" and wire.peek_error(body)[0] == _NOT_FOUND:
        members = wire.read_members(body, "error")
        return wire.Reply(wire.encode({**members, "code": wire.INVALID_PARAMS}), failed=True)
    if not reply.failed and method in _CACHEABLE and b'"ttlMs"' not in body:
        members = wire.read_members(body, "result")
        if "ttlMs" not in members and _completes(members):
            more = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
            return wire.Reply(wire.encode({**more, **members}))
    if reply.failed or body.endswith(_COMPLETE):
        return reply
    if b'"resultType"' in body and "resultType" in wire.read_members(body, "result"):
        return reply
    inner = body.lstrip()[1:]
    comma = b"" if inner.lstrip()[:1] == b"}" else b","
    return wire.Reply(b'{"resultType":"complete"' + comma + inner)


def _completes(members: dict[str, msgspec.Raw]) -> bool:
    return "resultType" not in members or bytes(members["resultType"]) == b'"complete"'


def new_session(rollout: str, capabilities: str) -> str:
    """A session id. It names its rollout and what its client can do (`clients.packed`), so that any gateway process can
    serve it and none stores it."""
    return f"{rollout}.{secrets.token_hex(8)}.{capabilities}"


def capabilities_of_session(session: str) -> str:
    return session.rpartition(".")[2] if session.count(".") == 2 else ""


def rollout_of_session(session: str) -> str:
    return session.partition(".")[0]
