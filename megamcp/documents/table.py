"""A mapping that knows what of it may have changed, so that a call packs what it touched and not all of a document.

Items lie in groups, in the order in which they came. An item that is handed out may be changed by whoever has it, so
its group is packed anew at the next look; the bytes of the others stand. It is no `dict`: what reads or writes one of
those in C would pass by the record of it.

What it can't see is an item that was kept elsewhere in a call before and is changed there.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

Value = TypeVar("Value")

_GROUP = 64
_FIXED = (str, int, float, bool, type(None))
"""Handed out without a chance to change them."""


class Group:
    """Neighbours, and what they were packed to. None: they may be others by now."""

    __slots__ = ("items", "piece")

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}
        self.piece: bytes | None = None


class Table(MutableMapping[str, Value]):
    """Items of JSON by text keys, for many of them: a call costs what it touches.

    An attribute of a plain class that is one says so in the class's body, and is one after a load too:

        class Shop:
            orders: Table[dict[str, Any]]

    Looking through `values()` or `items()` touches everything. `dict(table)` is a plain copy, as for a tool's result.
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

    def __delitem__(self, key: str) -> None:
        group = self._where.pop(key)
        del group.items[key]
        group.piece = None
        if not group.items:
            self._groups.remove(group)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __copy__(self) -> "Table[Value]":
        return Table(self)

    def __repr__(self) -> str:
        return f"Table({dict(self)!r})"
