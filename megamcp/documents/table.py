"""A mapping that knows what of it may have changed, so that a call packs what it touched and not all of a document.

Items lie in groups, in the order in which they came. An item that is handed out may be changed by whoever has it, so
its group is packed anew at the next look; the bytes of the others stand. It is no `dict`: what reads or writes one of
those in C would pass by the record of it.

What it can't see is an item that was kept elsewhere in a call before and is changed there.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Self, TypeVar

Value = TypeVar("Value")

_GROUP = 64
_FIXED = (str, int, float, bool, type(None))
"""Handed out without a chance to change them."""


class Group:
    """Neighbours, and what they were packed to. None: they may be others by now."""

    __slots__ = ("items", "piece", "unchecked")

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}
        self.piece: bytes | None = None
        self.unchecked: set[str] = set()
        """Keys of items that were put here since the group was packed: what packs to the same bytes may be no JSON."""


class Table(MutableMapping[str, Value]):
    """Items of JSON by text keys, for many of them: a call costs what it touches.

    An attribute of a plain class that is one says so in the class's body, and is one after a load too:

        class Shop:
            orders: Table[dict[str, Any]]

    Looking through `values()` or `items()` touches everything. `dict(table)` is a plain copy, as for a tool's result. A
    table lies in nothing but the object: one in a list or a dict would be a dict after a load, and is refused.
    """

    __slots__ = ("_groups", "_where")

    def __init__(self, items: Mapping[str, Value] | None = None) -> None:
        self._groups: list[Group] = []
        self._where: dict[str, Group] = {}
        if items is not None:
            self.update(items)

    @property
    def groups(self) -> list[Group]:
        """All there is, in order."""
        return self._groups

    def __getitem__(self, key: str) -> Value:
        group = self._where[key]
        value: Value = group.items[key]
        if type(value) not in _FIXED:
            group.piece = None
        return value

    def __setitem__(self, key: str, value: Value) -> None:
        group = self._where.get(key)
        if group is None:
            if not self._groups or len(self._groups[-1].items) >= _GROUP:
                self._groups.append(Group())
            group = self._where[key] = self._groups[-1]
        group.items[key] = value
        group.piece = None
        if type(value) not in _FIXED:
            group.unchecked.add(key)

    def __delitem__(self, key: str) -> None:
        group = self._where.pop(key)
        del group.items[key]
        group.piece = None
        group.unchecked.discard(key)
        if not group.items:
            self._groups.remove(group)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._where)

    # As a dict's, it takes more than `|` does.
    def __ior__(self, other: "Mapping[str, Value] | Iterable[tuple[str, Value]]") -> Self:  # type: ignore[misc]
        self.update(other)
        return self

    def __or__(self, other: object) -> "Table[Value]":
        if not isinstance(other, Mapping):
            return NotImplemented
        made = Table(self)
        made.update(other)
        return made

    def __ror__(self, other: object) -> "Table[Value]":
        return Table(other) | self if isinstance(other, Mapping) else NotImplemented

    def popitem(self) -> tuple[str, Value]:
        """The newest item, as of a dict."""
        for key in reversed(self._where):
            return key, self.pop(key)
        raise KeyError("popitem(): the table is empty")

    def clear(self) -> None:
        """Nothing is left."""
        self._groups.clear()
        self._where.clear()

    def copy(self) -> "Table[Value]":
        """Another table of the same items."""
        return Table(self)

    __copy__ = copy

    def __repr__(self) -> str:
        return f"Table({dict(self)!r})"
