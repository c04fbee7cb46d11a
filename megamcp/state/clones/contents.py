"""What differs between two databases, by what is in them: for points that no one log connects.

Tables are matched by name and rows by key. Hashes decide; only rows that are shown are fetched. In memory are
the hashes of a part of a table at a time, and the rows that are shown.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from megamcp.state.clones.inside import Inside
from megamcp.state.schema import Change, TableDiff

_TABLES = "select * from megamcp.comparable()"
# By the first byte of the key's hash.
_PARTS = """select get_byte(k, 0) as part, count(*) as n, sum(megamcp.high(h)) as high, sum(megamcp.low(h)) as low
  from megamcp.hashed($1, $2, $3) group by 1"""
_ROWS = """select k, h, count(*) as n from megamcp.hashed($1, $2, $3)
 where get_byte(k, 0) = any ($4::int[]) group by k, h"""
_AT_ONCE = 100_000  # rows whose hashes are held


class _Side:
    """A table of one of the two; none: it is not there."""

    def __init__(self, inside: Inside, table: Any) -> None:
        self._inside = inside
        self.table = table
        self.key: list[str] | None = table and table["key"]

    async def ask(self, query: str, *more: Any) -> list[Any]:
        if self.table is None:
            return []
        arguments = self.table["relation"], self.key, self.table["label"], *more
        return list(await self._inside.connection.fetch(query, *arguments))

    async def show(self, wanted: Counter[bytes]) -> list[dict[str, Any]]:
        """Rows by the hashes of their keys."""
        if self.table is None or not wanted:
            return []
        copies = wanted if self.key is None else dict.fromkeys(wanted, 1)
        return await self._inside.shown(self.table["relation"], self.key, self.table["label"], copies)


async def compare(before: Inside, after: Inside, limit: int) -> dict[str, TableDiff]:
    """At most `limit` rows a table. Raises what reading raises."""
    sides = [
        {(row["schema"], row["name"]): row for row in await one.connection.fetch(_TABLES)} for one in (before, after)
    ]
    found: dict[str, TableDiff] = {}
    for schema, table in sorted(sides[0].keys() | sides[1].keys()):
        x, y = (_Side(one, side.get((schema, table))) for one, side in zip((before, after), sides, strict=True))
        if x.table and y.table and x.key != y.key:
            x.key = y.key = None
        diff = await _table(x, y, limit)
        if diff.total:
            found[table if schema == "public" else f"{schema}.{table}"] = diff
    return found


async def _table(x: _Side, y: _Side, limit: int) -> TableDiff:
    gone: Counter[bytes] = Counter()
    come: Counter[bytes] = Counter()
    total = 0
    key = x.key or y.key
    for parts in _portions(*[{row["part"]: row for row in await side.ask(_PARTS)} for side in (x, y)]):
        rows = [Counter({(row["k"], row["h"]): row["n"] for row in await side.ask(_ROWS, parts)}) for side in (x, y)]
        less, more = _by_key(rows[0] - rows[1]), _by_key(rows[1] - rows[0])
        for k in sorted(less | more):
            total += 1 if key else less[k] + more[k]
            if len(gone | come) < limit:
                gone[k] += less[k]
                come[k] += more[k]
    removed, added = await x.show(+gone), await y.show(+come)
    changed = []
    if key:
        had = {_key_of(row, key): row for row in removed}
        pairs = [(had.get(_key_of(row, key)), row) for row in added]
        changed = [Change(old, new) for old, new in pairs if old is not None]
        kept = {_key_of(change.before, key) for change in changed}
        added = [new for old, new in pairs if old is None]
        removed = [old for k, old in had.items() if k not in kept]
    else:
        removed, added = removed[:limit], added[: max(0, limit - len(removed))]
    shown = len(added) + len(removed) + len(changed)
    return TableDiff(tuple(added), tuple(removed), tuple(changed), total, total > shown)


def _portions(x: Mapping[int, Any], y: Mapping[int, Any]) -> Iterator[list[int]]:
    """Parts that differ, a bounded number of rows at a time."""
    some: list[int] = []
    size = 0
    for part in sorted(x.keys() | y.keys()):
        sides = x.get(part), y.get(part)
        if None not in sides and len({(side["high"], side["low"]) for side in sides if side}) == 1:
            continue
        n = sum(side["n"] for side in sides if side)
        if some and size + n > _AT_ONCE:
            yield some
            some, size = [], 0
        some.append(part)
        size += n
    if some:
        yield some


def _by_key(rows: Counter[tuple[bytes, bytes]]) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    for (k, _), n in rows.items():
        found[k] += n
    return found


def _key_of(row: Mapping[str, Any], key: list[str]) -> str:
    return json.dumps([row[name] for name in key], default=str)
