"""Parts of random statements: values, assignments, conditions, joins, and how much order they leave open."""

from random import Random

from tests.integration.overlay.differential_openness import Openness
from tests.integration.overlay.differential_schema import Column, Reference, Schema, Table

FRESH = {
    "int": "{}",
    "bigint": "{}",
    "smallint": "{}",
    "numeric": "{}.50",
    "numeric(6,2)": "{}.50",
    "score": "{}",
    "text": "'k{}'",
    "varchar(4)": "'k{}'",
    "uuid": "'00000000-0000-0000-0000-0000000001{:02}'",
    "date": "date '2025-01-01' + {}",
    "inet": "'10.0.1.{}'",
    "interval": "'{} hours'",
    "float8": "{}.25",
    "bytea": r"'\x00{}'",
    "int4range": "'[{},100)'",
    "jsonb": "'{}'",
    "int[]": "array[{}]",
    "text[]": "array['{}']",
    "timestamptz": "timestamptz '2025-01-01T00:00Z' + interval '{} hours'",
    "timestamp(0)": "timestamp '2025-01-01T00:00' + interval '{} hours'",
    "char(3)": "'{}'",
}
"""Values that no row is likely to hold."""


def literal(random: Random, column: Column, null: float = 0.15) -> str:
    if "not null" in column.definition or "primary key" in column.definition:
        null /= 4
    if random.random() < null:
        return "null"
    kind = column.kind
    return random.choice(kind.bad if kind.bad and random.random() < 0.05 else kind.good)


def inserted(random: Random, schema: Schema, table: Table, column: Column, row: int = 0, meets: bool = False) -> str:
    """A value for a new row: of a key often a fresh one, of a reference often one that is there.

    `row` says which row that is there it refers to, and, where it `meets` one, whose keys it has.
    """
    key = column.name in table.at_once | set(table.key)
    if key and meets and not column.generated:
        return f"(select z.{column.name} from {table.name} z order by {table.order('z')} limit 1 offset {row})"
    if random.random() < (0.7 if column.generated else 0.01 if key else 0.06):
        return "default"
    if key and column.type in FRESH and random.random() < 0.75:
        return FRESH[column.type].format(random.randint(10, 99))
    for reference in table.references:
        if column.name in reference.columns and random.random() < 0.7:
            target = reference.target[reference.columns.index(column.name)]
            order = ", ".join(f"p.{name}" for name in reference.target)
            return f"(select p.{target} from {reference.table} p order by {order} limit 1 offset {row})"
    return literal(random, column, null=0.01 if column.name in table.key else 0.3 if key else 0.1)


def some_row(random: Random) -> int:
    """The number of a row that may be there."""
    return random.choice((0, 0, 0, 0, 1, 1, 2, 3))


def returning(random: Random, table: Table, old_new: bool = False, alias: str = "") -> str:
    name = alias or table.name
    column = random.choice(table.columns).name
    choices = ["", "", f" returning {name}.*", f" returning {name}.{column}", f" returning {name}, {column} as x"]
    if old_new:
        name = random.choice(table.columns).name
        choices += [f" returning old.{name}, new.{name}", " returning to_jsonb(new.*)"]
    return random.choice(choices)


def borrowed(random: Random, column: Column, source: Table) -> str:
    fitting = source.of_type(column.type)
    if fitting and random.random() < 0.6:
        name = f"{source.name}.{random.choice(fitting).name}"
        return f"{name} + {random.choice((3, 5, 10))}" if column.type in {"int", "bigint"} else name
    return f"{literal(random, column)}::{column.type}"


def assignments(random: Random, schema: Schema, table: Table, alias: str) -> tuple[str, bool]:
    """SET clause, and whether it moves a key that is checked row by row."""
    pool = [c for c in table.columns if not c.generated or random.random() < 0.05] or table.columns
    keys = [c for c in pool if c.name in table.at_once | set(table.key)]
    if keys and random.random() < 0.35:
        chosen = [random.choice(keys)]
    else:
        chosen = random.sample(pool, min(len(pool), random.choice((1, 1, 2, 3))))
    moves = any(c.name in table.at_once for c in chosen)
    values = [_new_value(random, schema, table, c, alias) for c in chosen]
    # Not `(id, …) = row(id, …)` of an ALWAYS column: see test_differential_regressions.
    if len(chosen) > 1 and random.random() < 0.15 and all(c.identity != "always" for c in chosen):
        names = ", ".join(c.name for c in chosen)
        return f"({names}) = row({', '.join(values)})", moves
    return ", ".join(f"{c.name} = {value}" for c, value in zip(chosen, values, strict=True)), moves


def _new_value(random: Random, schema: Schema, table: Table, column: Column, alias: str) -> str:
    name = f"{alias}.{column.name}"
    other = random.choice(schema.busy)
    options = [literal(random, column), literal(random, column), name]
    if not column.identity:  # numbers drawn for several rows depend on their order
        options.append("default")
    match column.type:
        case "int" | "bigint" | "smallint":
            options += [f"{name} + 1", f"{name} * 2", f"{name} - 1", f"(select count(*) from {other.name})"]
            options += [f"(select max({c.name}) from {table.name})" for c in table.of_type(column.type)[:1]]
            options += [c.format(int=name) for c in schema.calls if c.startswith(("twice", "clamp"))]
        case "text":
            options += [f"{name} || 'x'", f"upper({name})", f"nullif({name}, 'a')"]
        case "numeric(6,2)" | "numeric":
            options += [f"{name} * 1.1", f"round({name})", f"{name} + 0.00"]
        case "bool":
            options += [f"not {name}", f"exists (select from {other.name})"]
        case "timestamptz":
            options += [f"{name} + interval '1 day'"]
        case "jsonb":
            options += [f"jsonb_build_object('was', {name})", f"{name} -> 'a'"]
        case "int[]":
            options += [f"{name} || 4", f"{name}[2:]"]
        case "pair":
            options += [f"row(({name}).n, 'z')"]
    if column.generated:
        options = ["default", *options[:1]]
    return random.choice(options)


def condition(random: Random, schema: Schema, table: Table, alias: str) -> str:
    column = random.choice(table.columns)
    name = f"{alias}.{column.name}"
    if not column.kind.equal:
        return f"{name} is {random.choice(('null', 'not null'))}"
    value, other = (f"{random.choice(column.kind.good)}::{column.type}" for _ in range(2))
    options = [
        f"{name} = {value}",
        f"{name} = {value}",
        f"{name} is null",
        f"{name} is distinct from {value}",
        f"{name} in ({value}, {other})",
    ]
    if column.kind.ordered:
        options += [f"{name} >= {value}", f"{name} between {value} and {other}"]
    if column.type == "pair":
        options += [f"({name}).n = 1"]
    if column.type in {"text", "varchar(4)"}:
        options += [f"{name} like 'a%'", f"lower({name}) = 'ab'"]
    if table.references:
        reference = random.choice(table.references)
        match_ = " and ".join(f"p.{t} = {alias}.{c}" for c, t in zip(reference.columns, reference.target, strict=True))
        options += [
            f"exists (select from {reference.table} p where {match_})",
            f"not exists (select from {reference.table} p where {match_})",
        ]
    if children := schema.referring(table):
        options += [_referred(*random.choice(children), alias)] * 2
    options += [
        f"{alias}.{k} = (select min(z.{k}) from {table.name} z)"
        for k in table.key[:1]
        if table.column(k).type in {"int", "bigint", "text", "numeric", "date"}
    ]
    return random.choice(options)


def where(random: Random, schema: Schema, table: Table, alias: str) -> str:
    count = random.choice((0, 1, 1, 1, 2))
    if not count:
        return ""
    joiner = random.choice((" and ", " or "))
    return " where " + joiner.join(f"({condition(random, schema, table, alias)})" for _ in range(count))


def one_row(random: Random, schema: Schema, table: Table) -> str:
    """WHERE, for one row at most: by value, or one that is there, or one that others refer to."""
    if random.random() < 0.3:
        parts = [f"{table.name}.{k} = {random.choice(table.column(k).kind.good[:4])}" for k in table.key]
        return " where " + " and ".join(parts)
    children = schema.referring(table)
    some = ""
    if children and random.random() < 0.5:
        some = f" where {_referred(*random.choice(children), 'z')}"
    mine, found = (", ".join(f"{alias}.{k}" for k in table.key) for alias in (table.name, "z"))
    query = f"select {found} from {table.name} z{some} order by {found} limit 1 offset {some_row(random)}"
    return f" where ({mine}) = ({query})"


def _referred(child: Table, reference: Reference, alias: str) -> str:
    """That rows of the child refer to the row."""
    match_ = " and ".join(f"c.{c} = {alias}.{t}" for c, t in zip(reference.columns, reference.target, strict=True))
    return f"exists (select from {child.name} c where {match_})"


def join(random: Random, table: Table, alias: str, other: Table, other_alias: str) -> str:
    pairs = [(a.name, b.name) for a in table.comparable for b in other.of_type(a.type)]
    links = [
        (c, t)
        for reference in table.references
        if reference.table == other.name
        for c, t in zip(reference.columns[:1], reference.target[:1], strict=True)
    ]
    if links and random.random() < 0.6:
        a, b = random.choice(links)
    elif pairs and random.random() < (0.8 if table.key else 0.5):  # rows that look alike, met several times
        a, b = random.choice(pairs)
    else:
        return "true"
    return f"{alias}.{a} = {other_alias}.{b}"


def openness(schema: Schema, table: Table, moves: bool, sets: str) -> Openness:
    """Of an UPDATE of several rows."""
    own = {name for r in table.references if r.table == table.name for name in r.columns}
    both = any(f"{name} = " in sets or f"{name}," in sets or f"{name})" in sets for name in own)
    keys = {name for names in [table.key, *table.candidates] for name in names}
    leaves = moves or any(name in sets for name in keys)
    if leaves and (both or cascades(schema, table)):
        return Openness.EVENT_ORDER
    return Openness.KEY_SHIFT if moves else Openness.FIRST_FAILURE


def of_one_row(schema: Schema, table: Table) -> Openness:
    """Of a statement that writes one row: actions of foreign keys may go to several."""
    if table.tells_apart and not any(reference.acts for _, reference in schema.referring(table)):
        return Openness.EXACT
    return Openness.EVENT_ORDER if cascades(schema, table) else Openness.FIRST_FAILURE


def cascades(schema: Schema, table: Table) -> bool:
    """Whether rows that leave may change other rows before some foreign key is checked."""
    acting = any(r.acts for _, r in schema.referring(table))
    return acting and any(r.checks for other in schema.tables for r in other.references)
