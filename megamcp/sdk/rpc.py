"""JSON-RPC and MCP envelopes of both protocol eras: what is read of a request, and the answers that need no
tool.

Only the envelope is decoded; arguments, ids and progress tokens stay the bytes that came. Nothing here does
I/O.
"""

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from megamcp.sdk.server import Server

MODERN = "2026-07-28"
HANDSHAKE = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
HEADER_MISMATCH = -32020
UNSUPPORTED_VERSION = -32022

CHECK_DOCUMENT = "io.megamcp/check_document"
"""A gateway's question about what the document is to start as."""

_VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
_CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
_MODERN_STATUS = {
    PARSE_ERROR: 400,
    INVALID_REQUEST: 400,
    INVALID_PARAMS: 400,
    HEADER_MISMATCH: 400,
    UNSUPPORTED_VERSION: 400,
    METHOD_NOT_FOUND: 404,
}


class RpcError(Exception):
    """Leaves as a JSON-RPC error. `status` is the HTTP status where the protocol's table doesn't decide."""

    def __init__(self, code: int, message: str, data: Any = None, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data
        self.status = status

    def http_status(self, modern: bool) -> int:
        if self.status is not None:
            return self.status
        if modern or self.code in (PARSE_ERROR, INVALID_REQUEST, HEADER_MISMATCH, UNSUPPORTED_VERSION):
            return _MODERN_STATUS.get(self.code, 200)
        return 200

    def body(self, request_id: bytes) -> bytes:
        error = {"code": self.code, "message": self.message}
        if self.data is not None:
            error["data"] = self.data
        return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (request_id, msgspec.json.encode(error))


class Headers:
    """The headers that matter, from ASGI's raw pairs. A routing header given twice is refused when it is
    read."""

    __slots__ = ("_values", "repeated")

    _KNOWN = frozenset(
        {b"accept", b"mcp-protocol-version", b"mcp-method", b"mcp-name", b"megamcp-handle", b"megamcp-database"}
    )

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[bytes, str] = {}
        self.repeated: str | None = None
        for name, value in raw:
            if name in self._KNOWN:
                if name in self._values and name != b"accept":
                    self.repeated = name.decode()
                self._values[name] = value.decode("latin-1")

    @property
    def version(self) -> str | None:
        return self._values.get(b"mcp-protocol-version")

    @property
    def method(self) -> str | None:
        return self._values.get(b"mcp-method")

    @property
    def name(self) -> str | None:
        """Decoded from the base64 form that names outside of printable ASCII have; None if malformed."""
        value = self._values.get(b"mcp-name")
        if value is None or not (value.startswith("=?base64?") and value.endswith("?=")):
            return value
        try:
            return base64.b64decode(value[9:-2], validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return None

    @property
    def handle(self) -> str | None:
        return self._values.get(b"megamcp-handle")

    @property
    def database(self) -> str | None:
        """DSN of the rollout's own database, where it has one."""
        return self._values.get(b"megamcp-database")

    def acceptable(self) -> bool:
        accept = self._values.get(b"accept")
        return accept is None or any(kind in accept for kind in ("application/json", "*/*", "application/*"))

    def accepts_events(self) -> bool:
        accept = self._values.get(b"accept", "")
        return "text/event-stream" in accept or "*/*" in accept


class _Envelope(msgspec.Struct):
    jsonrpc: str
    method: str
    id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    params: msgspec.Raw = msgspec.Raw(b"{}")


class _CallParams(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class _CheckParams(msgspec.Struct):
    document: Any


class _Meta(msgspec.Struct):
    version: Any = msgspec.field(name=_VERSION_KEY, default=None)
    capabilities: msgspec.Raw = msgspec.field(name=_CAPABILITIES_KEY, default=msgspec.Raw(b""))
    token: msgspec.Raw = msgspec.field(name="progressToken", default=msgspec.Raw(b""))


class _Params(msgspec.Struct):
    meta: _Meta | None = msgspec.field(name="_meta", default=None)


class _InitializeParams(msgspec.Struct):
    version: str = msgspec.field(name="protocolVersion")


_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_params = msgspec.json.Decoder(_Params).decode
_decode_call = msgspec.json.Decoder(_CallParams).decode
_decode_check = msgspec.json.Decoder(_CheckParams).decode
_decode_id = msgspec.json.Decoder(int | str).decode
_decode_initialize = msgspec.json.Decoder(_InitializeParams).decode


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: bytes
    progress_token: bytes


@dataclass(slots=True)
class Request:
    """`id` is its JSON text, None for a notification."""

    method: str
    id: bytes | None
    params: bytes
    meta: _Meta | None = None
    modern: bool = False

    def check_envelope(self, headers: Headers) -> None:
        """Which era, and in the stateless one that headers and body agree. Raises RpcError."""
        try:
            self.meta = _decode_params(self.params).meta
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RpcError(INVALID_PARAMS, f"params: {error}") from error
        if headers.repeated:
            raise RpcError(HEADER_MISMATCH, f"{headers.repeated} header appears more than once")
        enveloped = self.meta is not None and self.meta.version is not None
        version = headers.version
        if version is not None and version not in HANDSHAKE and version != MODERN:
            raise _unsupported(version)
        if version != MODERN and not enveloped:
            return
        self.modern = True
        if self.meta is None or self.meta.version is None or not self.meta.capabilities:
            raise RpcError(INVALID_PARAMS, f"params._meta must carry {_VERSION_KEY!r} and {_CAPABILITIES_KEY!r}")
        if version != self.meta.version:
            raise RpcError(HEADER_MISMATCH, "mcp-protocol-version header and params._meta disagree")
        if headers.method != self.method:
            raise RpcError(HEADER_MISMATCH, "mcp-method header and the body's method disagree")
        if version != MODERN:
            raise _unsupported(str(version))
        if self.method == "tools/call" and headers.name != self.tool_call().name:
            raise RpcError(HEADER_MISMATCH, "mcp-name header and params.name disagree")

    def document(self) -> Any:
        """Of `CHECK_DOCUMENT`. Raises RpcError."""
        try:
            return _decode_check(self.params).document
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RpcError(INVALID_PARAMS, f"{self.method}: {error}") from error

    def tool_call(self) -> ToolCall:
        try:
            params = _decode_call(self.params)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RpcError(INVALID_PARAMS, f"tools/call: {error}", {"code": "bad_request"}) from error
        arguments = bytes(params.arguments).strip()
        if arguments == b"null":
            arguments = b"{}"
        if arguments[:1] != b"{":
            raise RpcError(INVALID_PARAMS, "tools/call: arguments must be an object", {"code": "bad_request"})
        return ToolCall(params.name, arguments, bytes(self.meta.token) if self.meta is not None else b"")


def check_line(request: Request) -> None:
    """The same as `check_envelope` where there are no headers. Raises RpcError."""
    try:
        request.meta = _decode_params(request.params).meta
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RpcError(INVALID_PARAMS, f"params: {error}") from error
    if request.meta is None or request.meta.version is None:
        return
    request.modern = True
    if not request.meta.capabilities:
        raise RpcError(INVALID_PARAMS, f"params._meta must carry {_CAPABILITIES_KEY!r}")
    if request.meta.version != MODERN:
        raise _unsupported(str(request.meta.version))


def _unsupported(version: str) -> RpcError:
    data = {"supported": [MODERN, *HANDSHAKE], "requested": version}
    return RpcError(UNSUPPORTED_VERSION, "Unsupported protocol version", data)


def parse(body: bytes) -> Request:
    """Raises RpcError for what is no JSON, no UTF-8 or not one JSON-RPC request or notification."""
    try:
        body.decode()
        envelope = _decode_envelope(body)
    except UnicodeDecodeError as error:
        raise RpcError(PARSE_ERROR, "The body is not UTF-8") from error
    except msgspec.ValidationError as error:
        raise RpcError(INVALID_REQUEST, f"The body is not one JSON-RPC request: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RpcError(PARSE_ERROR, f"The body is not JSON: {error}") from error
    if envelope.jsonrpc != "2.0":
        raise RpcError(INVALID_REQUEST, 'jsonrpc must be "2.0"')
    request_id: bytes | None = None
    if not isinstance(envelope.id, msgspec.UnsetType):
        try:
            _decode_id(envelope.id)
        except msgspec.MsgspecError as error:
            raise RpcError(INVALID_REQUEST, "id must be a string or an integer") from error
        request_id = bytes(envelope.id)
    return Request(envelope.method, request_id, bytes(envelope.params))


class StaticAnswers:
    """Answers that depend on the server's tools alone; encoded once."""

    def __init__(self, server: Server) -> None:
        info = {"name": server.name, "version": server.version}
        about: dict[str, Any] = {"capabilities": {"tools": {"listChanged": False}}, "serverInfo": info}
        if server.instructions:
            about["instructions"] = server.instructions
        self._about = about
        modern = {"resultType": "complete", "_meta": {"io.modelcontextprotocol/serverInfo": info}}
        cache = {"ttlMs": 60_000, "cacheScope": "public"}
        tools = [tool.advertised() for tool in server.tools.values()]
        encode = msgspec.json.encode
        self._tools = encode({"tools": tools}), encode({"tools": tools, **cache, **modern})
        self._ping = b"{}", encode(modern)
        self._discover = encode({"supportedVersions": [MODERN, *HANDSHAKE], **about, **cache, **modern})

    def answer(self, request: Request) -> bytes:
        """Raises RpcError for a method that is not served in the request's era."""
        match request.method, request.modern:
            case "tools/list", modern:
                return self._tools[modern]
            case "ping", modern:
                return self._ping[modern]
            case "server/discover", True:
                return self._discover
            case "initialize", False:
                return self._initialize(request)
            case method, _:
                raise RpcError(METHOD_NOT_FOUND, f"Method not found: {method}")

    def done(self, request: Request) -> bytes:
        """To what has no result but that it was done."""
        return self._ping[request.modern]

    def _initialize(self, request: Request) -> bytes:
        try:
            asked = _decode_initialize(request.params).version
        except msgspec.MsgspecError as error:
            raise RpcError(INVALID_PARAMS, f"initialize: {error}") from error
        version = asked if asked in HANDSHAKE else HANDSHAKE[0]
        return msgspec.json.encode({"protocolVersion": version, **self._about})
