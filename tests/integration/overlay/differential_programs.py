"""Random statements over a random schema. Each is a function of (schema, seed), so programs shrink by
dropping some.

What PostgreSQL itself leaves open is not asked for: LIMIT comes with a total ORDER BY, the value that
UPDATE … FROM takes from several matches never reaches the row, serial numbers are given to rows in a stated
order. What is left open but asked for is marked by `Openness`, and the comparison says what it does then.
"""

from dataclasses import dataclass
from enum import Enum
from random import Random

from tests.integration.overlay.differential_schema import LITERALS, Column, Schema, Table


class Openness(Enum):
    """What PostgreSQL's result depends on beside the rows."""

    EXACT = "exact"
    """One result only."""
    FIRST_FAILURE = "first failure"
    """Several rows are written: which of several broken constraints is told depends on their order."""
    EVENT_ORDER = "event order"
    """Several rows leave while rows that refer to them leave, change or come: PostgreSQL fires its foreign keys'
    events row by row, so whether a cascade comes before a check depends on the order of rows."""
    KEY_SHIFT = "key shift"
    """Several unique keys move at once: whether they clash on the way depends on the order of rows."""


@dataclass(frozen=True, slots=True)
class Statement:
    sql: str
    openness: Openness = Openness.EXACT


def statement(schema: Schema, seed: int) -> Statement:
    random = Random(f"{schema.number}/{seed}")
    table = random.choice(schema.tables)
    writer = random.choices(
        (_insert, _insert_select, _update, _update_from, _delete, _delete_using, _merge, _select),
        (22, 6, 20, 8, 12, 6, 14, 18),
    )[0]
    return writer(random, schema, table)


def seed_insert(random: Random, table: Table) -> str:
    """A plain one-row INSERT for the base; whether it is valid, PostgreSQL decides."""
    columns = [c for c in table.writable if not c.identity]
    values = ", ".join(_literal(random, c, null=0.1) for c in columns)
    if not columns:
        return f"insert into {table.name} default values"
    return f"insert into {table.name} ({', '.join(c.name for c in columns)}) values ({values})"


def _literal(random: Random, column: Column, null: float = 0.15) -> str:
    if "not null" in column.definition or "primary key" in column.definition:
        null /= 4
    return "null" if random.random() < null else random.choice(LITERALS[column.type])


def _returning(random: Random, table: Table, old_new: bool = False) -> str:
    choices = [
        "",
        "",
        f" returning {table.name}.*",
        f" returning {table.name}.{random.choice(table.columns).name}",
    ]
    if old_new:
        name = random.choice(table.columns).name
        choices += [f" returning old.{name}, new.{name}", " returning to_jsonb(new.*)"]
    return random.choice(choices)


def _insert(random: Random, schema: Schema, table: Table) -> Statement:
    if random.random() < 0.08:
        return Statement(f"insert into {table.name} default values{_returning(random, table)}")
    columns = [c for c in table.columns if _wanted(random, c)] or [table.columns[0]]
    random.shuffle(columns)
    count = random.choice((1, 1, 1, 2, 3))
    rows = ", ".join(f"({', '.join(_inserted(random, c) for c in columns)})" for _ in range(count))
    overriding = ""
    if any(c.identity in {"always", "by default"} for c in columns) and random.random() < 0.5:
        overriding = f" overriding {random.choice(('system', 'user'))} value"
    sql = f"insert into {table.name} ({', '.join(c.name for c in columns)}){overriding} values {rows}"
    return Statement(sql + _returning(random, table))


def _wanted(random: Random, column: Column) -> bool:
    if column.generated:
        return random.random() < 0.08
    if column.identity:
        return random.random() < 0.3
    needed = "not null" in column.definition and "default" not in column.definition
    return random.random() < (0.98 if needed or "primary key" in column.definition else 0.85)


def _inserted(random: Random, column: Column) -> str:
    if random.random() < (0.7 if column.generated else 0.06):
        return "default"
    return _literal(random, column, null=0.1)


def _insert_select(random: Random, schema: Schema, table: Table) -> Statement:
    source = random.choice(schema.tables)
    columns = [c for c in table.writable if not c.identity]
    outputs = [_borrowed(random, c, source) for c in columns]
    if not columns:
        return _insert(random, schema, table)
    names = ", ".join(c.name for c in columns)
    where = _where(random, schema, source, source.name)
    order = ", ".join(f"{source.name}.{k}" for k in source.key)
    query = f"select {', '.join(outputs)} from {source.name}{where} order by {order}"
    return Statement(f"insert into {table.name} ({names}) {query}{_returning(random, table)}")


def _borrowed(random: Random, column: Column, source: Table) -> str:
    fitting = source.of_type(column.type)
    if fitting and random.random() < 0.6:
        name = f"{source.name}.{random.choice(fitting).name}"
        return f"{name} + {random.choice((3, 5, 10))}" if column.type in {"int", "bigint"} else name
    literal = _literal(random, column)
    return f"{literal}::{column.type}"


def _assignments(random: Random, schema: Schema, table: Table, alias: str) -> tuple[str, bool]:
    """SET clause, and whether it touches a column of a key."""
    unique = {name for names in table.candidates for name in names} | {
        c.name for c in table.columns if "unique" in c.definition
    }
    pool = [c for c in table.columns if not c.generated or random.random() < 0.05]
    keys = [c for c in pool if c.name in unique]
    if keys and random.random() < 0.35:
        chosen = [random.choice(keys)]
    else:
        chosen = random.sample(pool, min(len(pool), random.choice((1, 1, 2, 3))))
    parts = [f"{c.name} = {_new_value(random, schema, table, c, alias)}" for c in chosen]
    moved = {c.name for c in chosen} & unique
    feeds_unique = any(c.generated and "unique" in c.definition for c in table.columns)
    return ", ".join(parts), bool(moved) or feeds_unique


def _new_value(random: Random, schema: Schema, table: Table, column: Column, alias: str) -> str:
    name = f"{alias}.{column.name}"
    other = random.choice(schema.tables)
    options = [_literal(random, column), _literal(random, column), name]
    if not column.identity:  # numbers drawn for several rows depend on their order
        options.append("default")
    match column.type:
        case "int" | "bigint":
            options += [f"{name} + 1", f"{name} * 2", f"{name} - 1", f"(select count(*) from {other.name})"]
            options += [f"(select max({c.name}) from {table.name})" for c in table.of_type(column.type)[:1]]
        case "text":
            options += [f"{name} || 'x'", f"upper({name})", f"nullif({name}, 'a')"]
        case "numeric(6,2)":
            options += [f"{name} * 1.1", f"round({name})"]
        case "bool":
            options += [f"not {name}", f"exists (select from {other.name})"]
        case "timestamptz":
            options += [f"{name} + interval '1 day'"]
        case "jsonb":
            options += [f"""jsonb_build_object('was', {name})""", f"{name} -> 'a'"]
        case "int[]":
            options += [f"{name} || 4", f"{name}[2:]"]
    if column.generated:
        options = ["default", *options[:1]]
    return random.choice(options)


def _condition(random: Random, schema: Schema, table: Table, alias: str) -> str:
    column = random.choice(table.columns)
    name = f"{alias}.{column.name}"
    literal = f"{random.choice(LITERALS[column.type][:3])}::{column.type}"
    options = [
        f"{name} = {literal}",
        f"{name} = {literal}",
        f"{name} is null",
        f"{name} is distinct from {literal}",
        f"{name} >= {literal}",
        f"{name} in ({literal}, {random.choice(LITERALS[column.type][:2])}::{column.type})",
    ]
    if table.references:
        reference = random.choice(table.references)
        match_ = " and ".join(f"p.{t} = {alias}.{c}" for c, t in zip(reference.columns, reference.target, strict=True))
        options += [
            f"exists (select from {reference.table} p where {match_})",
            f"not exists (select from {reference.table} p where {match_})",
        ]
    options += [f"{alias}.{k} = (select min(z.{k}) from {table.name} z)" for k in table.key[:1]]
    return random.choice(options)


def _where(random: Random, schema: Schema, table: Table, alias: str) -> str:
    count = random.choice((0, 1, 1, 1, 2))
    if not count:
        return ""
    joiner = random.choice((" and ", " or "))
    return " where " + joiner.join(f"({_condition(random, schema, table, alias)})" for _ in range(count))


def _one_row(table: Table, random: Random) -> str:
    parts = [f"{table.name}.{k} = {random.choice(LITERALS[table.column(k).type][:4])}" for k in table.key]
    return " where " + " and ".join(parts)


def _update(random: Random, schema: Schema, table: Table) -> Statement:
    assignments, moves = _assignments(random, schema, table, table.name)
    if random.random() < 0.4:
        sql = f"update {table.name} set {assignments}{_one_row(table, random)}"
        return Statement(sql + _returning(random, table, old_new=True))
    sql = f"update {table.name} set {assignments}{_where(random, schema, table, table.name)}"
    openness = _openness(schema, table, moves, assignments)
    return Statement(sql + _returning(random, table, old_new=True), openness)


def _openness(schema: Schema, table: Table, moves: bool, assignments: str) -> Openness:
    """Of an UPDATE of several rows."""
    if not moves:
        return Openness.FIRST_FAILURE
    own = {name for r in table.references if r.table == table.name for name in r.columns}
    both = any(f"{name} = " in assignments for name in own)
    return Openness.EVENT_ORDER if both or _cascades(schema, table) else Openness.KEY_SHIFT


def _cascades(schema: Schema, table: Table) -> bool:
    """Whether rows that leave may change other rows before some foreign key is checked."""
    acting = any(r.acts for other in schema.tables for r in other.references if r.table == table.name)
    return acting and any(r.checks for other in schema.tables for r in other.references)


def _update_from(random: Random, schema: Schema, table: Table) -> Statement:
    """Several matches per row, but the values come from the row alone."""
    source = random.choice(schema.tables)
    assignments, moves = _assignments(random, schema, table, table.name)
    join = _join(random, table, table.name, source, "s")
    sql = f"update {table.name} set {assignments} from {source.name} s where {join}"
    return Statement(sql + _returning(random, table), _openness(schema, table, moves, assignments))


def _join(random: Random, table: Table, alias: str, other: Table, other_alias: str) -> str:
    pairs = [(a.name, b.name) for a in table.columns for b in other.of_type(a.type)]
    links = [
        (c, t)
        for reference in table.references
        if reference.table == other.name
        for c, t in zip(reference.columns[:1], reference.target[:1], strict=True)
    ]
    if links and random.random() < 0.6:
        a, b = random.choice(links)
    elif pairs and random.random() < 0.8:
        a, b = random.choice(pairs)
    else:
        return "true"
    return f"{alias}.{a} = {other_alias}.{b}"


def _delete(random: Random, schema: Schema, table: Table) -> Statement:
    if random.random() < 0.5:
        return Statement(f"delete from {table.name}{_one_row(table, random)}{_returning(random, table)}")
    sql = f"delete from {table.name}{_where(random, schema, table, table.name)}{_returning(random, table)}"
    return Statement(sql, _deleting(schema, table))


def _deleting(schema: Schema, table: Table) -> Openness:
    return Openness.EVENT_ORDER if _cascades(schema, table) else Openness.FIRST_FAILURE


def _delete_using(random: Random, schema: Schema, table: Table) -> Statement:
    source = random.choice(schema.tables)
    join = _join(random, table, table.name, source, "s")
    extra = f" and ({_condition(random, schema, source, 's')})"
    sql = f"delete from {table.name} using {source.name} s where {join}{extra}{_returning(random, table)}"
    return Statement(sql, _deleting(schema, table))


def _merge(random: Random, schema: Schema, table: Table) -> Statement:
    source = random.choice(schema.tables)
    join = _join(random, table, table.name, source, "s")
    if join == "true":
        join = _condition(random, schema, table, table.name)
    clauses = []
    moves = False
    for kind in random.sample(("matched", "not matched", "not matched by source"), random.choice((1, 2, 3))):
        guard = ""
        if kind == "matched" and random.random() < 0.4:
            guard = f" and {_condition(random, schema, table, table.name)}"
        if kind == "not matched":
            clauses.append(f"when not matched{guard} then {_merge_insert(random, table, source)}")
            continue
        action = random.choice(("delete", "do nothing", "update", "update"))
        if action == "update":
            assignments, moved = _assignments(random, schema, table, table.name)
            moves = moves or moved
            action = f"update set {assignments}"
        clauses.append(f"when {kind}{guard} then {action}")
    returning = random.choice(("", "", f" returning merge_action(), {table.name}.*"))
    sql = f"merge into {table.name} using {source.name} s on {join} {' '.join(clauses)}{returning}"
    writes = sum(word in sql for word in ("then delete", "then update", "then insert"))
    own = any(reference.table == table.name for reference in table.references)
    if (writes > 1 and own) or _cascades(schema, table):
        return Statement(sql, Openness.EVENT_ORDER)
    return Statement(sql, Openness.KEY_SHIFT if moves or "then insert" in sql else Openness.FIRST_FAILURE)


def _merge_insert(random: Random, table: Table, source: Table) -> str:
    if random.random() < 0.1:
        return "do nothing"
    # Every number is given: those drawn for several rows depend on the order in which the join finds them.
    columns = table.writable
    values = [_borrowed(random, c, source).replace(f"{source.name}.", "s.") for c in columns]
    overriding = " overriding system value" if any(c.identity == "always" for c in columns) else ""
    return f"insert ({', '.join(c.name for c in columns)}){overriding} values ({', '.join(values)})"


def _select(random: Random, schema: Schema, table: Table) -> Statement:
    other = random.choice(schema.tables)
    join = _join(random, table, "t", other, "o")
    where = _where(random, schema, table, "t")
    a, b = random.choice(table.columns).name, random.choice(other.columns).name
    key = ", ".join(f"t.{k}" for k in table.key)
    first = table.key[0]
    templates = [
        f"select t.* from {table.name} t{where}",
        f"select to_jsonb(t) from {table.name} t{where}",
        f"select t from {table.name} t{where}",
        f"select t.{a}, o.{b} from {table.name} t join {other.name} o on {join}{where}",
        f"select t.{a}, o.{b} from {table.name} t left join {other.name} o on {join}{where}",
        f"select t.{a}, o.{b} from {table.name} t right join {other.name} o on {join}{where}",
        f"select count(*), count(t.{a}), min({key.split(',')[0]}), max(t.{first}) from {table.name} t{where}",
        f"select t.{a}, count(*) from {table.name} t{where} group by t.{a} having count(*) > 0",
        f"select distinct t.{a} from {table.name} t{where}",
        f"select {key}, t.{a} from {table.name} t{where} order by {key} limit 2 offset 1",
        f"select {key}, row_number() over (order by {key}) from {table.name} t{where}",
        f"select array_agg(t.{a}::text order by {key}) from {table.name} t{where}",
        f"select t.{a}::text from {table.name} t union select o.{b}::text from {other.name} o",
        f"select t.{a}::text from {table.name} t except select o.{b}::text from {other.name} o",
        f"select {key} from {table.name} t where exists (select from {other.name} o where {join})",
        f"select {key}, (select count(*) from {other.name} o where {join}) from {table.name} t{where}",
        f"select {key}, x.n from {table.name} t cross join lateral "
        f"(select count(*) as n from {other.name} o where {join}) x{where}",
        f"with w as (select * from {table.name}) select t.{a} from w t{where}",
        f"select t.{a}, max(o.{b}::text) from {table.name} t join {other.name} o on {join} "
        f"group by grouping sets ((t.{a}), ())",
        f"select * from {table.name}_seen",
        f"select v.n, t.{a} from {table.name} t join {other.name}_seen v on v.n = 1{where}",
        f"select 6 / length(t.{a}::text) from {table.name} t{where}",
    ]
    return Statement(random.choice(templates))
