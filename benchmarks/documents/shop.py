"""The tool server of `benchmarks.document`: a plain class, whose document is of the make that the environment says."""

import json
import os
import random
from collections.abc import MutableMapping
from typing import Any

from megamcp.sdk import Table, read_only

_COUNTS = {"small": 1, "records": 2900, "table": 2900, "text": 2400}


class Shop:
    """Orders, or pages."""

    def __init__(self) -> None:
        make = os.environ.get("SHOP_MAKE", "small")
        chance = random.Random(1)
        page = _page if make == "text" else _order
        self.marks = 0
        self.things: MutableMapping[str, Any] = {
            f"W{number:05}": page(number, chance) for number in range(_COUNTS[make])
        }

    def mark(self, number: int) -> int:
        """Change one value."""
        self.marks += 1
        self._thing(number)["status"] = f"marked {self.marks}"
        return self.marks

    @read_only
    def look(self, number: int) -> str:
        """Look at one value."""
        return str(self._thing(number)["status"])

    @read_only
    def size(self) -> int:
        """Bytes of the document as JSON."""
        return len(json.dumps({"marks": self.marks, "things": dict(self.things)}, separators=(",", ":")))

    def _thing(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self.things[f"W{number % len(self.things):05}"]
        return found


class TableShop(Shop):
    """The same, in a table."""

    things: Table[Any]

    def __init__(self) -> None:
        super().__init__()
        self.things = Table(self.things)


def _order(number: int, chance: random.Random) -> dict[str, Any]:
    items = [
        {"sku": f"S{chance.randrange(10**6)}", "count": 1 + chance.randrange(5), "price": chance.randrange(10**5) / 100}
        for _ in range(5)
    ]
    return {
        "id": f"W{number:05}",
        "customer": f"customer_{chance.randrange(9999)}",
        "status": "pending",
        "items": items,
        "address": {"street": f"Long Street {number}", "city": "Hobart", "postcode": "7000"},
        "paid": True,
        "note": "Leave it at the door, please; ring twice." + " Thank you." * chance.randrange(4),
    }


def _page(number: int, chance: random.Random) -> dict[str, Any]:
    return {"id": number, "status": "draft", "title": f"Page {number}", "text": "All work and no play. " * 24}
