"""A document's content: packed as MessagePack, checked to be JSON, and changed by splices.

Packing is what every call pays for, so it is one pass in C over the document, but for what a `Table` in it knows to be
as it was, and only what has changed is looked at in Python. Invariant: equal documents (keys in equal order) pack to
equal bytes. So a call that changed nothing is told by comparing, and one that changed little by what the two have in
common at both ends. What turned into a tuple or a set of the very same items looks unchanged, and is noticed when
something beside it changes, or when it was put into a `Table`.

A document is a tree: what two places of it share is two things once it was loaded again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import msgspec

from megamcp.documents.table import Table
from megamcp.errors import TooLarge, Unprocessable

Json = Any

_FEW = 32
"""A container with so few items, near the root, is taken apart."""
_GROUP = 128
"""Of one with more, so many items are packed at once."""
_DEPTH = 2
_AHEAD = 5
"""So many pieces are looked at for where a document goes on as before."""
_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode

Path = tuple[str | int, ...]


class NotJson(Unprocessable):
    """What a tool server keeps is no JSON document."""

    default_code = "invalid_document"


@dataclass(slots=True)
class Packed:
    """A document's bytes in pieces, and what each was made of: path, value, index of an array's first item, whether the
    piece begins with the header of the value. None: a header alone."""

    pieces: list[bytes]
    origins: list[tuple[Path, Any, int, bool] | None]

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))

    def content(self) -> bytes:
        return b"".join(self.pieces)

    def bounds(self) -> list[int]:
        """Where each piece begins, and the last one ends."""
        return [0, *accumulate(map(len, self.pieces))]


@dataclass(frozen=True, slots=True)
class Splice:
    """At `position`, `removed` bytes make way for `added`."""

    position: int
    removed: int
    added: bytes


def pack(document: Json, *, tuples: bool) -> Packed:
    """The document in pieces, not yet checked but for what can't be packed at all. Raises `NotJson`.

    `tuples`: whether they may stand for arrays.
    """
    packed = Packed([], [])
    try:
        _add(packed, document, (), 0, tuples)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        # Packing says what is wrong; where it is wrong, only a look at everything can say.
        check(document, (), tuples=tuples)
        raise NotJson(f"The document can't be kept as JSON: {error}.") from error
    return packed


def packed_whole(document: Json, *, tuples: bool = True) -> bytes:
    """A whole document's content, all of it checked. Raises `NotJson`."""
    packed = pack(document, tuples=tuples)
    check(document, (), tuples=tuples)
    return packed.content()


def demand_size(size: int, limit: int) -> None:
    """Raises `TooLarge` for a content over the limit."""
    if size > limit:
        raise TooLarge(
            f"The document has {size} bytes, the limit is {limit}.",
            code="document_too_large",
            hint="Keep less in it, or raise MEGAMCP_DOCUMENT_BYTES.",
        )


def unpack(content: bytes) -> Json:
    return _decode(content)


def splices(old: bytes, bounds: Sequence[int], new: Packed, *, tuples: bool) -> list[Splice]:
    """What makes `new` of `old`, in the order in which it is to be applied; none where they are equal.

    `bounds` say where the pieces of `old` began and the last one ended, as far as that is known. What the splices bring
    is checked. Raises `NotJson`.
    """
    pieces = new.pieces
    found: list[Splice] = []

    def same(index: int) -> bool:
        piece = pieces[index]
        return len(piece) == bounds[index + 1] - bounds[index] and old.startswith(piece, bounds[index])

    both = min(len(pieces), len(bounds) - 1)
    first = 0
    while first < both:
        if not same(first):
            # A change in place: soon the pieces are the old ones again.
            if not any(same(index) for index in range(first + 1, min(first + _AHEAD, both))):
                break
            part = Packed(pieces[first : first + 1], new.origins[first : first + 1])
            found.append(_spliced(old, bounds[first], bounds[first + 1], part, tuples))
        first += 1
    start = bounds[first] if first < len(bounds) else len(old)
    rest = Packed(pieces[first:], new.origins[first:])
    start, end, rest = _narrowed(old, start, len(old), rest)
    if start != end or rest.pieces:
        found.append(_spliced(old, start, end, rest, tuples))
    return found[::-1]  # from the end, so that each position is one of the old content


def _spliced(old: bytes, start: int, end: int, new: Packed, tuples: bool) -> Splice:
    """The one that puts `new` in the place of `old[start:end]`."""
    start, end, changed = _narrowed(old, start, end, _finer(new))
    for origin in changed.origins:
        if origin is not None:
            check(origin[1], origin[0], tuples=tuples, first=origin[2])
    added, replaced = changed.content(), old[start:end]
    before = _in_common(added, replaced)
    after = _in_common(added[before:][::-1], replaced[before:][::-1])
    return Splice(start + before, len(replaced) - before - after, added[before : len(added) - after])


def _narrowed(old: bytes, start: int, end: int, new: Packed) -> tuple[int, int, Packed]:
    """Without the pieces that `old[start:end]` begins and ends with as well."""
    pieces = new.pieces
    first, last = 0, len(pieces)
    while first < last and start + len(pieces[first]) <= end and old.startswith(pieces[first], start):
        start += len(pieces[first])
        first += 1
    while last > first and end - len(pieces[last - 1]) >= start and old.endswith(pieces[last - 1], start, end):
        last -= 1
        end -= len(pieces[last])
    return start, end, Packed(pieces[first:last], new.origins[first:last])


def _finer(packed: Packed) -> Packed:
    """Groups in a piece an item, so that little has to be looked at."""
    finer = Packed([], [])
    for piece, origin in zip(packed.pieces, packed.origins, strict=True):
        group = origin and origin[1]
        if origin is None or not isinstance(group, dict | list) or len(group) < 2:
            finer.pieces.append(piece)
            finer.origins.append(origin)
            continue
        path, _, first, headed = origin
        finer.pieces.append(_header(len(group), isinstance(group, dict)) if headed else b"")
        finer.origins.append(None)
        items: list[Any] = [[item] for item in group]
        if isinstance(group, dict):
            items = [{key: item} for key, item in group.items()]
        finer.pieces += [_encode(item)[1:] for item in items]
        finer.origins += [(path, item, first + index, True) for index, item in enumerate(items)]
    return finer


def spliced(content: bytes, splices: Sequence[Splice]) -> bytes:
    """A content after changes, in their order."""
    if not splices:
        return content
    room = bytearray(content)
    for one in splices:
        room[one.position : one.position + one.removed] = one.added
    return bytes(room)


def _add(packed: Packed, value: Any, path: Path, depth: int, tuples: bool) -> None:
    kind = type(value)
    if kind is Table:
        _add_table(packed, value, path, tuples)
        return
    count = len(value) if kind is dict or kind is list else 0
    if not count or (depth >= _DEPTH and count <= _GROUP):
        packed.pieces.append(_encode(value))
        packed.origins.append((path, value, 0, True))
        return
    packed.pieces.append(_header(count, kind is dict))
    packed.origins.append(None)
    if count > _FEW or depth >= _DEPTH:
        items = iter(value.items() if kind is dict else value)
        first = 0
        while group := (dict(islice(items, _GROUP)) if kind is dict else list(islice(items, _GROUP))):
            packed.pieces.append(_encode(group)[1 if len(group) < 16 else 3 :])
            packed.origins.append((path, group, first, False))
            first += _GROUP
    elif kind is dict:
        for key, item in value.items():
            packed.pieces.append(_encode(key))
            packed.origins.append((path, {key: None}, 0, False))  # the key is looked at as one of a mapping
            _add(packed, item, (*path, key), depth + 1, tuples)
    else:
        for index, item in enumerate(value):
            _add(packed, item, (*path, index), depth + 1, tuples)


def _add_table(packed: Packed, table: Table[Any], path: Path, tuples: bool) -> None:
    _demand_place(path)
    packed.pieces.append(_header(len(table), True))
    packed.origins.append(None)
    for group in table.groups:
        if group.piece is None:
            for key in group.unchecked:
                check(group.items[key], (*path, key), tuples=tuples)
            group.unchecked.clear()
            group.piece = _encode(group.items)[1 if len(group.items) < 16 else 3 :]
        packed.pieces.append(group.piece)
        packed.origins.append((path, group.items, 0, False))


def _header(count: int, mapping: bool) -> bytes:
    """How MessagePack begins a map or an array."""
    if count < 16:
        return bytes(((0x80 if mapping else 0x90) | count,))
    if count < 1 << 16:
        return (b"\xde" if mapping else b"\xdc") + count.to_bytes(2)
    return (b"\xdf" if mapping else b"\xdd") + count.to_bytes(4)


def check(value: Any, path: Path, *, tuples: bool, first: int = 0) -> None:
    """Raises `NotJson` with the place of what JSON has no form for. An array's items count from `first`."""
    try:
        _check(value, path, tuples, first)
    except RecursionError as error:
        raise NotJson("The document is nested too deeply, or holds itself.") from error


def _check(value: Any, path: Path, tuples: bool, first: int = 0) -> None:
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise _refused(path, f"has a key {key!r:.80} that is {_named(key)}: keys of JSON are text")
            _text(key, path)
            if type(item) is not int or not -(2**63) <= item < 2**64:
                _check(item, (*path, key), tuples)
    elif kind is Table:
        _demand_place(path)
        for group in value.groups:
            _check(group.items, path, tuples)
    elif kind is list or (kind is tuple and tuples):
        for index, item in enumerate(value, first):
            _check(item, (*path, index), tuples)
    elif kind is str:
        _text(value, path)
    elif kind is int:
        if not -(2**63) <= value < 2**64:
            raise _refused(path, "is an integer of more than 64 bits")
    elif kind is float:
        if not math.isfinite(value):
            raise _refused(path, f"is {value}, which JSON has no form for")
    elif kind is not bool and value is not None:
        raise _refused(path, f"is {_named(value)}, which JSON has no form for")


def _demand_place(path: Path) -> None:
    """Raises `NotJson` for a table where a load would make none."""
    if len(path) > 1:
        raise NotJson(
            f"{pointer(path)} is a Table inside of something else, where it would be a dict after a load.",
            hint="Keep a Table as an attribute of the object, or as a value of the object that dump gives; elsewhere a"
            " dict.",
        )


def _text(text: str, path: Path) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _refused(path, "holds text with a lone surrogate") from error


def _refused(path: Path, what: str) -> NotJson:
    return NotJson(
        f"{pointer(path) or 'The document'} {what}.",
        hint="Keep objects with text keys, arrays, text, numbers, true, false and null, or write load and dump.",
    )


def _named(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def pointer(path: Sequence[str | int]) -> str:
    """The place as an RFC 6901 JSON pointer; the root is the empty text."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


def _in_common(a: bytes, b: bytes) -> int:
    """How many bytes both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
