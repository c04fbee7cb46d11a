"""Arguments that a 2026-07-28 client mirrors into `Mcp-Param-*` headers (`x-mcp-header` in a tool's schema).

Two duties: a client's headers must agree with its arguments, and a server that asks for headers must get them also
when the client is of the older era. Tools without the annotation cost nothing here. Source: specification
2026-07-28, "Custom Headers from Tool Parameters".
"""

import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

PREFIX = b"mcp-param-"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_DECIMAL = re.compile(r"-?[0-9]+(?:\.0+)?")
_PRIMITIVE = ("string", "integer", "boolean")


@dataclass(frozen=True, slots=True)
class MirroredParameter:
    """One annotated property: where it is in the arguments, and its header's name."""

    path: tuple[str, ...]
    header: str
    kind: str


class Mismatch(Exception):
    """A header and an argument disagree; the text says which."""


class Invalid(ValueError):
    """The annotations of a schema break the rules; the text says how."""


def parameters(schema: msgspec.Raw) -> tuple[MirroredParameter, ...]:
    """The annotated properties of an input schema. Raises `Invalid`."""
    if b"x-mcp-header" not in bytes(schema):
        return ()
    found: list[MirroredParameter] = []
    _walk(msgspec.json.decode(schema), (), found)
    if len({entry.header.lower() for entry in found}) != len(found):
        raise Invalid("two parameters have one header")
    return tuple(found)


def _walk(schema: Any, path: tuple[str, ...], found: list[MirroredParameter]) -> None:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or len(path) > 16:
        return
    for name, inner in properties.items():
        if isinstance(inner, dict):
            token, kind = inner.get("x-mcp-header"), inner.get("type")
            if "x-mcp-header" in inner:
                if not isinstance(token, str) or not _TOKEN.fullmatch(token):
                    raise Invalid(f"the header of {name!r} has no name that HTTP can carry")
                if kind not in _PRIMITIVE:
                    raise Invalid(f"{name!r} has a header and is no string, integer or boolean")
                found.append(MirroredParameter((*path, name), f"Mcp-Param-{token}", kind))
            _walk(inner, (*path, name), found)


def headers_for(wanted: tuple[MirroredParameter, ...], arguments: bytes) -> tuple[tuple[str, str], ...]:
    """The headers for these arguments, values not yet encoded for HTTP."""
    decoded = _decoded(arguments)
    pairs = ((entry.header, _text(_at(decoded, entry.path))) for entry in wanted)
    return tuple((header, text) for header, text in pairs if text is not None)


def check(wanted: tuple[MirroredParameter, ...], arguments: bytes, sent: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises `Mismatch` unless headers and arguments agree: both there and equal, or neither."""
    decoded = _decoded(arguments)
    for entry in wanted:
        key = entry.header.lower().encode()
        values = [value for name, value in sent if name == key]
        text = _text(_at(decoded, entry.path))
        where = f"{entry.header} and the argument {'.'.join(entry.path)!r}"
        if len(values) > 1:
            raise Mismatch(f"{entry.header} was sent more than once")
        if not values and text is None:
            continue
        if not values or text is None:
            raise Mismatch(f"{where} must be sent together")
        header = decode_value(values[0])
        if header is None or not _same(header, text, entry.kind):
            raise Mismatch(f"{where} differ")


def decode_value(value: bytes) -> str | None:
    """A header's value, taken out of its Base64 form if it has one; None when that is malformed."""
    try:
        if value.startswith(b"=?base64?") and value.endswith(b"?=") and len(value) >= 11:
            return binascii.a2b_base64(value[9:-2], strict_mode=True).decode()
        return value.decode("ascii")
    except (binascii.Error, UnicodeDecodeError):
        return None


def _decoded(arguments: bytes) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}


def _at(node: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, str | int | float) else None


def _same(header: str, text: str, kind: str) -> bool:
    if kind == "integer" and _DECIMAL.fullmatch(header):
        return header.partition(".")[0] == text
    return header == text
