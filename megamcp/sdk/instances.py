"""Objects of a plain class that are ready for calls: each holds one version of a document.

An object that is not in use stands at exactly the version that it is kept under; one whose state is not known any more
(a tool raised, a call was cut off) is never given back. Versions are never used twice, so a version that was undone is
one that nobody asks for. What is used least goes first.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from megamcp.documents.content import Packed, Splice, check, demand_size, pack, packed_whole, splices, unpack
from megamcp.sdk.classes import Keeper


@dataclass(slots=True)
class Instance:
    """An object and what it holds: `version` of the document, whose packed form is `content`.

    `shown` is what it gave right after it was loaded, where that is another form of the same (keys or items in another
    order, say): as long as it gives that, nothing has changed.
    """

    keeper: Keeper
    object: Any
    content: bytes
    shown: bytes | None = None
    bounds: list[int] = field(default_factory=lambda: [0])
    """Of the pieces of `content`, as far as they are known."""
    version: int = 0
    deltas: int = 0
    delta_bytes: int = 0

    @classmethod
    async def of(cls, keeper: Keeper, content: bytes) -> "Instance":
        """Made from a document. Raises whatever `load` and `dump` raise."""
        made = cls(keeper, await keeper.loaded(unpack(content)), content)
        try:
            shown = pack(await keeper.dumped(made.object), tuples=keeper.tuples)
            made.bounds = shown.bounds()
            if (whole := shown.content()) != content:
                check(await keeper.dumped(made.object), (), tuples=keeper.tuples)
                made.shown, made.bounds = whole, [0]
        except BaseException:
            made.drop()
            raise
        return made

    def drop(self) -> None:
        """It is not used any more."""
        self.keeper.drop(self.object)

    async def change(self, limit: int) -> "Change | None":
        """What the object holds by now against `content`. Raises `NotJson`, `TooLarge`, whatever `dump` raises."""
        packed = pack(await self.keeper.dumped(self.object), tuples=self.keeper.tuples)
        demand_size(packed.size, limit)
        if self.shown is not None and packed.content() == self.shown:
            return None
        found = splices(self.content, self.bounds, packed, tuples=self.keeper.tuples)
        return Change(found, packed) if found else None

    def changed(self, change: "Change", content: bytes) -> None:
        """The change was kept."""
        self.content, self.bounds, self.shown = content, change.packed.bounds(), None


@dataclass(frozen=True, slots=True)
class Change:
    """What makes the new document of the old one, and the new one."""

    splices: list[Splice]
    packed: Packed


async def first_content(keeper: Keeper, limit: int) -> bytes:
    """The document of a fresh object. Raises `NotJson`, `TooLarge`, whatever the class raises."""
    made = await keeper.fresh()
    try:
        content = packed_whole(await keeper.dumped(made), tuples=keeper.tuples)
    finally:
        keeper.drop(made)
    demand_size(len(content), limit)
    return content


class Pool:
    """Instances that wait, by version. `room` is in bytes of content."""

    def __init__(self, count: int, room: int) -> None:
        self._count = count
        self._room = room
        self._used = 0
        self._waiting: OrderedDict[int, list[Instance]] = OrderedDict()
        self._held = 0

    @property
    def versions(self) -> list[int]:
        return list(self._waiting)

    def take(self, version: int) -> Instance | None:
        """An instance at that version, out of the pool."""
        found = self._waiting.pop(version, [])
        while found:
            instance = found.pop()
            self._forget(instance)
            if instance.keeper.usable(instance.object):
                if found:
                    self._waiting[version] = found
                return instance
            instance.drop()
        return None

    def give(self, instance: Instance) -> None:
        """An instance that stands at its version."""
        if len(instance.content) > self._room:
            instance.drop()
            return
        self._waiting.setdefault(instance.version, []).append(instance)
        self._waiting.move_to_end(instance.version)
        self._held += 1
        self._used += len(instance.content)
        while self._held > self._count or self._used > self._room:
            eldest = next(iter(self._waiting))
            gone = self._waiting[eldest].pop()
            if not self._waiting[eldest]:
                del self._waiting[eldest]
            self._forget(gone)
            gone.drop()

    def clear(self) -> None:
        """Nothing is left in it."""
        for instances in self._waiting.values():
            for instance in instances:
                instance.drop()
        self._waiting.clear()
        self._held = self._used = 0

    def _forget(self, instance: Instance) -> None:
        self._held -= 1
        self._used -= len(instance.content)
