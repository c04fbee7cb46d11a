"""Names and literals in generated SQL: quoting, hidden names, the marks that belong to the overlay.

Every identifier and literal that comes from an environment passes through here; no generator quotes by itself.
"""

import hashlib
from collections.abc import Iterable

LAYER = "_mm_layer"
DELETED = "_mm_deleted"
STAMP = "_mm_stamp"  # the statement that wrote the row last
OVER = "_mm_over"  # layer of the version of the same key that this row replaces: 0 the base's, -1 none
ROW = "_mm_row"  # what tells rows apart in a table without a key that does
RESERVED_PREFIX = "_mm_"

_LIMIT = 63


def ident(name: str) -> str:
    """A quoted identifier. Quotes always, so reserved words and mixed case need no thought."""
    if "\0" in name:
        raise ValueError("an identifier can't hold a NUL")
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A string literal that reads the same whatever standard_conforming_strings says."""
    if "\0" in text:
        raise ValueError("a literal can't hold a NUL")
    quoted = "'" + text.replace("'", "''") + "'"
    return "E" + quoted.replace("\\", "\\\\") if "\\" in text else quoted


def idents(names: Iterable[str], prefix: str = "") -> str:
    """`"a", "b"`, or `p."a", p."b"` with a prefix (an alias, written as it is)."""
    lead = f"{prefix}." if prefix else ""
    return ", ".join(lead + ident(name) for name in names)


def hidden(name: str, suffix: str) -> str:
    """`name~suffix` within PostgreSQL's 63 bytes; a long name is cut and told apart by a hash."""
    full = f"{name}~{suffix}"
    if len(full.encode()) <= _LIMIT:
        return full
    tail = f"~{hashlib.sha256(name.encode()).hexdigest()[:10]}~{suffix}"
    room = _LIMIT - len(tail.encode())
    return name.encode()[:room].decode(errors="ignore") + tail


def body_quote(body: str) -> str:
    """A dollar-quoted function body; the tag is one that the body does not hold."""
    tag, number = "$body$", 0
    while tag in body:
        number += 1
        tag = f"$body{number}$"
    return f"{tag}\n{body}\n{tag}"
