"""Plain classes as tool servers: the document tests' own."""

import os
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from megamcp.sdk import Clock, Table, ToolError, read_only


class Shelf:
    """Keeps things under keys."""

    def __init__(self) -> None:
        self.things: MutableMapping[str, Any] = {"first": "seeded"}
        self.count = 0

    def put(self, key: str, value: str) -> int:
        """Put a thing there; gives how many calls of this were made."""
        self.things[key] = value
        self.count += 1
        return self.count

    def take(self, key: str) -> str:
        """Take a thing away."""
        self.count += 1
        if key not in self.things:
            raise ToolError("not_there", f"There is nothing under {key}.")
        return str(self.things.pop(key))

    @read_only
    def get(self, key: str) -> str | None:
        """Look at a thing."""
        return self.things.get(key)

    @read_only
    def all(self) -> dict[str, Any]:
        """Look at everything."""
        return {"things": dict(self.things), "count": self.count}

    @read_only
    def sneak(self, key: str) -> None:
        """Says that it reads, and writes."""
        self.things[key] = "sneaked"

    def fill(self, count: int, size: int) -> int:
        """Put many things there."""
        self.things.update({f"thing-{number:06}": "x" * size for number in range(count)})
        return len(self.things)

    def spoil(self, how: str) -> None:
        """Keep what is no JSON."""
        self.things["good"] = "half"
        bad = {"set": {1}, "tuple": (1, 2), "nan": float("nan"), "key": {1: 2}, "big": 2**70, "bytes": b"x"}
        bad |= {"surrogate": "\ud800", "object": object()}
        if how == "loop":
            self.things["loop"] = self.things
        else:
            self.things["bad"] = [{"here": bad[how]}]

    def slow(self, seconds: float, key: str) -> int:
        """Put a thing there, and take a while."""
        self.things[key] = "slow"
        self.count += 1
        Path(f"{os.environ['SHELF_MARKS']}/{key}").touch()
        time.sleep(seconds)
        return self.count

    @read_only
    def process(self) -> int:
        """Number of the process that serves."""
        return os.getpid()

    def now(self, clock: Clock) -> str:
        """The environment's time."""
        return clock.now().isoformat()

    async def later(self, key: str) -> str:
        """An `async def` method."""
        self.things[key] = "later"
        return key


class Ledger(Shelf):
    """The same, by a table."""

    things: Table[Any]

    def __init__(self) -> None:
        super().__init__()
        self.things = Table(self.things)


class Tower:
    """Keeps its state behind load and dump, in types of its own."""

    def __init__(self) -> None:
        self._floors: set[tuple[str, int]] = {("ground", 0)}
        self.broken = False
        self.loaded = 0

    def load(self, document: dict[str, Any]) -> None:
        self._floors = {(name, level) for name, level in document["floors"]}
        self.loaded += 1

    def dump(self) -> dict[str, Any]:
        if self.broken:
            raise RuntimeError("the dump is broken")
        return {"floors": sorted(self._floors)}

    def build(self, name: str) -> int:
        """Add a floor."""
        self._floors.add((name, len(self._floors)))
        return len(self._floors)

    def refuse(self) -> None:
        """Add a floor, and think better of it."""
        self._floors.add(("refused", 99))
        raise ToolError("refused", "No.")

    @read_only
    def loads(self) -> int:
        """How often this object was loaded."""
        return self.loaded

    def crack(self) -> None:
        """Break the dump."""
        self._floors.add(("crack", -1))
        self.broken = True

    @read_only
    def floors(self) -> list[str]:
        """Names, sorted."""
        return sorted(name for name, _ in self._floors)
