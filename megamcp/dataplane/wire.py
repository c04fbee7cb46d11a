"""The bytes of MCP: JSON-RPC envelopes and their errors.

Only the envelope is parsed. Ids, arguments, schemas and results stay the bytes they came as and are sliced
into the next envelope, so that nothing a tool or a model wrote is ever re-serialised. The module knows neither
rollouts nor HTTP; it raises `RpcFailure` for what it refuses.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from megamcp.errors import MegaMCPError

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
HEADER_MISMATCH = -32020
UNSUPPORTED_VERSION = -32022

ABSENT = msgspec.Raw(b"")
"""Default of every raw field; compare by identity."""

ERROR_KEY = "io.megamcp/error"
"""`_meta` key under which a JSON-RPC error is kept when it is recorded in the shape of a tool result."""

_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]{0,30})")
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)


class Envelope(msgspec.Struct, gc=False):
    """One JSON-RPC message of any kind; absent members are `ABSENT` or None."""

    jsonrpc: str = ""
    id: msgspec.Raw = ABSENT
    method: str | None = None
    params: msgspec.Raw = ABSENT
    result: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT


class RpcFailure(Exception):
    """A JSON-RPC error to be sent to the client, with the HTTP status that goes with it."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        status: int = 400,
        data: dict[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.data = data
        self.retry_after = retry_after

    @classmethod
    def of(cls, error: MegaMCPError) -> "RpcFailure":
        """The one mapping from the error tree to JSON-RPC."""
        retry_after = error.extra.get("retry_after")
        return cls(error.jsonrpc, error.message, status=error.status, data=error.rpc_data(), retry_after=retry_after)


@dataclass(frozen=True, slots=True)
class Reply:
    """How a call ended: `body` is the JSON text of a result, or of a JSON-RPC error object when `failed`."""

    body: bytes
    failed: bool = False


_envelope = msgspec.json.Decoder(Envelope)
_batch = msgspec.json.Decoder(list[msgspec.Raw])
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
encode = msgspec.json.Encoder().encode


def check_text(body: bytes, max_depth: int) -> None:
    """Refuses what is not UTF-8 or nests too deep. The decoder checks neither inside skipped values."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise RpcFailure(
                PARSE_ERROR, f"The body is not UTF-8 (byte {error.start}).", data={"code": "invalid_utf8"}
            ) from None
    if body.count(b"[") + body.count(b"{") > max_depth:
        depth = 0
        for match in _BRACKETS.finditer(body):
            token = body[match.start()]
            if token in b"[{":
                depth += 1
                if depth > max_depth:
                    raise RpcFailure(
                        PARSE_ERROR,
                        f"The JSON nests deeper than {max_depth} levels.",
                        data={"code": "too_deep"},
                    )
            elif token in b"]}":
                depth -= 1


def read_envelope(body: bytes | msgspec.Raw) -> Envelope:
    """Parses one message. Raises `RpcFailure` -32700 for bad JSON, -32600 for JSON that is no message."""
    try:
        return _envelope.decode(body)
    except msgspec.ValidationError as error:
        raise RpcFailure(
            INVALID_REQUEST, f"Not a JSON-RPC message: {error}.", data={"code": "invalid_request"}
        ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RpcFailure(PARSE_ERROR, f"Invalid JSON: {error}.", data={"code": "invalid_json"}) from None


def read_batch(body: bytes) -> list[msgspec.Raw]:
    """The messages of a batch (revision 2025-03-26 only)."""
    try:
        return _batch.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RpcFailure(PARSE_ERROR, f"Invalid JSON: {error}.", data={"code": "invalid_json"}) from None


def read_members(raw: msgspec.Raw | bytes, what: str) -> dict[str, msgspec.Raw]:
    """The members of a JSON object, values untouched. Raises -32602 when it is something else."""
    try:
        return _members.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raise RpcFailure(INVALID_PARAMS, f"{what} must be an object.", data={"code": "invalid_params"}) from None


def read_string(raw: msgspec.Raw | None, what: str) -> str:
    """A JSON string. Raises -32602 when absent or something else."""
    try:
        return _text.decode(raw if raw is not None else b"null")
    except msgspec.DecodeError:
        raise RpcFailure(INVALID_PARAMS, f"{what} must be a string.", data={"code": "invalid_params"}) from None


def request_id(envelope: Envelope) -> bytes | None:
    """The id's own bytes, None for a notification. Raises -32600 when it is neither string nor integer."""
    if envelope.id is ABSENT:
        return None
    raw = bytes(envelope.id)
    if raw[0] == 0x22 or _INTEGER.fullmatch(raw):
        return raw
    raise RpcFailure(INVALID_REQUEST, "The id must be a string or an integer.", data={"code": "invalid_request"})


def result_message(message_id: bytes, result: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (message_id, result)


def error_message(message_id: bytes | None, error: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (message_id or b"null", error)


def error_object(failure: RpcFailure) -> bytes:
    members: dict[str, Any] = {"code": failure.code, "message": failure.message}
    if failure.data:
        members["data"] = failure.data
    return encode(members)


def reply_message(message_id: bytes, reply: Reply) -> bytes:
    return error_message(message_id, reply.body) if reply.failed else result_message(message_id, reply.body)


def error_as_result(error: bytes, message: str) -> bytes:
    """A JSON-RPC error in the shape of a tool result, as it is recorded; `result_as_reply` gives it back."""
    return encode(
        {
            "content": [{"type": "text", "text": message}],
            "isError": True,
            "_meta": {ERROR_KEY: msgspec.Raw(error)},
        }
    )


class _Marked(msgspec.Struct):
    isError: bool = False
    meta: dict[str, msgspec.Raw] | None = msgspec.field(name="_meta", default=None)


_marked = msgspec.json.Decoder(_Marked)


class _ErrorPeek(msgspec.Struct):
    code: int = INTERNAL_ERROR
    message: str = ""
    data: Any = None


_error_peek = msgspec.json.Decoder(_ErrorPeek)


def result_as_reply(result: bytes, is_error: bool) -> Reply:
    """A recorded result as the reply it was when it was recorded."""
    if is_error and ERROR_KEY.encode() in result:
        try:
            meta = _marked.decode(result).meta
        except msgspec.DecodeError:
            meta = None
        if meta and ERROR_KEY in meta:
            return Reply(bytes(meta[ERROR_KEY]), failed=True)
    return Reply(result)


def is_tool_error(result: bytes) -> bool:
    """Whether a tool result says `isError`."""
    try:
        return _marked.decode(result).isError
    except (msgspec.DecodeError, RecursionError):
        return False


def peek_error(error: bytes) -> tuple[int, str, str | None]:
    """(code, message, data.code) of a JSON-RPC error object; defaults where it is malformed."""
    try:
        peek = _error_peek.decode(error)
    except (msgspec.DecodeError, RecursionError):
        return INTERNAL_ERROR, "", None
    name = peek.data.get("code") if isinstance(peek.data, dict) else None
    return peek.code, peek.message, name if isinstance(name, str) else None
