"""The canonical form of a document and its digest: the same for equal documents, whatever way led there.

RFC 8785 (compact, keys sorted, shortest numbers that read back the same), but for three things. Keys are sorted by code
point, not by UTF-16 unit: that differs for keys with characters beyond U+FFFF. Integers keep all their digits. A float
that is a whole number keeps its ".0" and exponents are as Python writes them: a tool server can tell 1.0 from 1.
"""

import hashlib

import msgspec

from megamcp.documents.content import unpack


def canonical(content: bytes) -> bytes:
    """The canonical JSON of a packed document."""
    return msgspec.json.encode(unpack(content), order="sorted")


def digest(content: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(canonical(content)).hexdigest()
