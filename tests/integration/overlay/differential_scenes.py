"""Statements that mean something only together, in one call: a cursor's life, deferred checks, a sequence's numbers.

Writes stand between them, so that what a cursor holds, a constraint waits for and a sequence remembers is looked at
after rows have moved.
"""

from random import Random

from tests.integration.overlay.differential_openness import Openness, Statement
from tests.integration.overlay.differential_programs import drawn, write
from tests.integration.overlay.differential_reads import sequence
from tests.integration.overlay.differential_schema import Schema
from tests.integration.overlay.differential_words import where


def scene(schema: Schema, seed: int) -> tuple[Statement, ...]:
    """Mostly one statement. A function of (schema with its focus, seed), so that programs shrink by dropping some."""
    random = Random(f"{schema.number}/{seed}")
    kind = random.choices(list(schema.weights), list(schema.weights.values()))[0]
    match kind:
        case "cursor" if "cursor" in schema.taken:
            return _cursor(random, schema)
        case "deferred" if "SET CONSTRAINTS" in schema.taken:
            return _deferred(random, schema)
        case "sequence" if schema.sequences and "sequence functions" in schema.taken:
            name = random.choice(schema.sequences)
            return tuple(sequence(random, schema, name) for _ in range(random.randint(2, 5)))
        case "cursor" | "deferred" | "sequence":
            kind = "read"
    return (drawn(random, schema, kind),)


def _cursor(random: Random, schema: Schema) -> tuple[Statement, ...]:
    table = random.choice(schema.busy)
    scroll = random.choice((" scroll", " scroll", "", " no scroll", " insensitive"))
    # Without either word, whether it goes back hangs on the plan; another scene's cursor may have the name already.
    name = "c" if "scroll" in scroll else "d"
    query = f"select * from {table.name} t{where(random, schema, table, 't')} order by {table.order('t')}"
    made = [Statement(f"declare {name}{scroll} cursor for {query}", construct="cursor")]
    forward = ("fetch next from {}", "fetch 2 from {}", "fetch all from {}", "fetch {}", "move 1 from {}")
    back = ("fetch prior from {}", "fetch first from {}", "fetch last from {}", "fetch absolute 2 from {}")
    back += ("fetch relative -1 from {}", "move backward 1 from {}", "fetch backward all from {}")
    for _ in range(random.randint(2, 5)):
        if random.random() < 0.3:
            made.append(write(random, schema))
        words = random.choice(forward + back if name == "c" and random.random() < 0.7 else forward)
        made.append(Statement(words.format(name), construct="cursor"))
    if random.random() < 0.4:
        made.append(Statement(f"close {random.choice((name, name, 'all'))}", construct="cursor"))
    return tuple(made)


def _deferred(random: Random, schema: Schema) -> tuple[Statement, ...]:
    first = Statement("set constraints all deferred", construct="SET CONSTRAINTS")
    last = Statement("set constraints all immediate", Openness.FIRST_FAILURE, "SET CONSTRAINTS")
    return (first, *(write(random, schema) for _ in range(random.randint(1, 3))), last)
