"""What one program is about: a few tables that refer to each other, and some kinds of statements over and over.

Where statements are drawn evenly from all tables, few of them meet: a parent is deleted that has no children, a
trigger's table is never updated. The schema itself is fond of some constructs and leaves out others (`Draw`).
"""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from tests.integration.overlay.differential_schema import Schema, Table

EVENLY: Mapping[str, int] = {
    "insert": 20, "insert select": 5, "update": 18, "update from": 9, "delete": 10, "delete using": 6, "merge": 8,
    "merge values": 7, "on conflict": 11, "writing cte": 9, "truncate": 2, "set constraints": 2, "read": 22,
    "cursor": 3, "deferred": 3, "sequence": 3,
}  # fmt: skip
FOCI = 64


def focused(schema: Schema, number: int) -> Schema:
    """The schema with what this program is about; every fourth is about everything, evenly."""
    if number % 4 == 0:
        return replace(schema, weights=EVENLY)
    random = Random(f"{schema.number}/focus {number}")
    near = _near(random, schema)
    weights = {kind: weight * random.choice((0, 1, 1, 4)) for kind, weight in EVENLY.items()}
    return replace(schema, near=near, weights={**weights, "insert": max(weights["insert"], 10)})


def _near(random: Random, schema: Schema) -> tuple[Table, ...]:
    """A table twice, and up to two that it refers to or that refer to it."""
    linked = [t for t in schema.tables if t.references or schema.referring(t)]
    start = random.choice([*schema.tables, *linked, *linked])
    names = dict.fromkeys([*(r.table for r in start.references), *(t.name for t, _ in schema.referring(start))])
    others = [schema.table(name) for name in names if name != start.name]
    return (start, start, *random.sample(others, min(len(others), 2)))
