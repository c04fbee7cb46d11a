"""What differs between two documents, by JSON pointers (RFC 6901).

Objects are compared key by key, arrays by position once what they begin and end with alike is put aside. Places
that were added or changed are named by their pointer in the later document, removed ones by that in the earlier. Values
of other types are other values: 1 is not 1.0, nor true.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megamcp.documents.content import Path, pointer


@dataclass(frozen=True, slots=True)
class Changed:
    """A place that has another value."""

    path: str
    before: Any
    after: Any


@dataclass(slots=True)
class DocumentDiff:
    """Places in the order of the documents. `total` counts all that differ, listed or not."""

    added: list[tuple[str, Any]] = field(default_factory=list)
    removed: list[tuple[str, Any]] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)
    total: int = 0

    @property
    def truncated(self) -> bool:
        return self.total > len(self.added) + len(self.removed) + len(self.changed)


_MISSING = object()


def difference(before: Any, after: Any, limit: int) -> DocumentDiff:
    """At most `limit` places are listed."""
    found = DocumentDiff()
    for path, old, new in _places(before, after, ()):
        found.total += 1
        if found.total > limit:
            continue
        if old is _MISSING:
            found.added.append((pointer(path), new))
        elif new is _MISSING:
            found.removed.append((pointer(path), old))
        else:
            found.changed.append(Changed(pointer(path), old, new))
    return found


def _places(before: Any, after: Any, path: Path) -> Iterator[tuple[Path, Any, Any]]:
    kind = type(before)
    if kind is not type(after):
        yield path, before, after
    elif kind is dict:
        for key, old in before.items():
            new = after.get(key, _MISSING)
            if new is _MISSING:
                yield (*path, key), old, new
            else:
                yield from _places(old, new, (*path, key))
        for key, new in after.items():
            if key not in before:
                yield (*path, key), _MISSING, new
    elif kind is list:
        yield from _items(before, after, path)
    elif before != after:
        yield path, before, after


def _items(before: list[Any], after: list[Any], path: Path) -> Iterator[tuple[Path, Any, Any]]:
    shorter = min(len(before), len(after))
    first = next((i for i in range(shorter) if not _same(before[i], after[i])), shorter)
    end = next((i for i in range(shorter - first) if not _same(before[-1 - i], after[-1 - i])), shorter - first)
    old, new = before[first : len(before) - end], after[first : len(after) - end]
    both = min(len(old), len(new))
    for index in range(both):
        yield from _places(old[index], new[index], (*path, first + index))
    for index in range(both, len(old)):
        yield (*path, first + index), old[index], _MISSING
    for index in range(both, len(new)):
        yield (*path, first + index), _MISSING, new[index]


def _same(a: Any, b: Any) -> bool:
    """Equal, also in their types all the way down."""
    return next(_places(a, b, ()), None) is None
