"""Random statements over a random schema. Each is a function of (schema, seed), so programs shrink by
dropping some.

What PostgreSQL itself leaves open is not asked for: LIMIT comes with a total ORDER BY, the value that
UPDATE … FROM takes from several matches never reaches the row, serial numbers are given to rows in a stated
order. What is left open but asked for is marked by `Openness`, and `differential_openness` says what holds then.
"""

from dataclasses import replace
from random import Random

import postgast

from tests.integration.overlay.differential_openness import Openness, Statement
from tests.integration.overlay.differential_reads import read
from tests.integration.overlay.differential_schema import Column, Schema, Table
from tests.integration.overlay.differential_types import NUMBERS
from tests.integration.overlay.differential_words import (
    FRESH,
    assignments,
    borrowed,
    cascades,
    condition,
    inserted,
    join,
    literal,
    of_one_row,
    one_row,
    openness,
    returning,
    some_row,
    where,
)

__all__ = ["Openness", "Statement", "drawn", "seed_insert", "write"]


def drawn(random: Random, schema: Schema, kind: str) -> Statement:
    made = _MADE_BY[kind](random, schema, random.choice(schema.busy))
    return _with_parameters(random, made) if random.random() < 0.25 else made


def write(random: Random, schema: Schema) -> Statement:
    """One that changes rows of one table."""
    return random.choice((_insert, _update, _delete, _on_conflict))(random, schema, random.choice(schema.busy))


_TAKES_PARAMETERS = ("select", "insert", "update", "delete", "merge", "with")


def _with_parameters(random: Random, made: Statement) -> Statement:
    """Some of its whole numbers sent as parameters."""
    if made.on_plain or not made.sql.startswith(_TAKES_PARAMETERS):
        return made
    raw, parts, end, sent = made.sql.encode(), [b""], 0, list[int]()
    for token in postgast.scan(made.sql).tokens:
        before = raw[end : token.start].decode()
        usual = before.rstrip().endswith(("=", ",", "(")) and not before.endswith(_MODIFIED)
        if token.token == _INTEGER and usual and len(sent) < 4 and random.random() < 0.6:
            sent.append(int(raw[token.start : token.end]))
            kind = "int" if abs(sent[-1]) < 2**31 else "bigint"
            parts += [before.encode(), f"${len(sent)}::{kind}".encode()]
            end = token.end
    if not sent:
        return made
    return replace(made, sql=b"".join([*parts, raw[end:]]).decode(), arguments=tuple(sent))


_INTEGER = postgast.pg_query_pb2.Token.Value("ICONST")
_MODIFIED = ("numeric(", "numeric(6,", "varchar(", "char(", "bit(", "timestamp(", "order by ", "group by ")


def seed_insert(random: Random, schema: Schema, table: Table) -> str:
    """A plain INSERT of one row for the base, or of several that look alike; PostgreSQL decides if it is valid."""
    columns = [c for c in table.writable if not c.identity]
    row = some_row(random)
    values = ", ".join(inserted(random, schema, table, c, row) for c in columns)
    if not columns:
        return f"insert into {table.name} default values"
    rows = ", ".join([f"({values})"] * _alike(random, table))
    return f"insert into {table.name} ({', '.join(c.name for c in columns)}) values {rows}"


def _alike(random: Random, table: Table) -> int:
    """How often a row is written: once, where a key tells rows apart."""
    return 1 if table.key else random.choice((1, 1, 2, 3))


def _insert_head(
    random: Random, schema: Schema, table: Table, alias: str = "", meets: float = 0.03
) -> tuple[str, int, str]:
    """`insert into t (…) values …` without a tail, its number of rows, and what it is counted as.

    `meets` is the share of rows that take the keys of one that is there.
    """
    into = f"insert into {table.name}{f' as {alias}' if alias else ''}"
    if random.random() < 0.03:
        return f"{into} default values", 1, "INSERT"
    columns = [c for c in table.columns if _wanted(random, table, c)] or [table.columns[0]]
    random.shuffle(columns)
    rows: list[str] = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        row, meet = some_row(random), random.random() < meets
        values = ", ".join(inserted(random, schema, table, c, row, meet) for c in columns)
        rows += [f"({values})"] * _alike(random, table)
    overriding = ""
    if not alias and any(c.identity in {"always", "by default"} for c in columns) and random.random() < 0.7:
        overriding = f" overriding {random.choice(('system', 'user'))} value"
    head = f"{into} ({', '.join(c.name for c in columns)}){overriding} values {', '.join(rows)}"
    return head, len(rows), "OVERRIDING" if overriding else "INSERT"


def _wanted(random: Random, table: Table, column: Column) -> bool:
    if column.generated:
        return random.random() < 0.08
    if column.identity:
        return random.random() < 0.45
    needed = "not null" in column.definition and "default" not in column.definition
    return random.random() < (0.99 if needed or column.name in table.key else 0.85)


def _insert(random: Random, schema: Schema, table: Table) -> Statement:
    head, _, construct = _insert_head(random, schema, table)
    return Statement(head + returning(random, table), construct=construct)


def _insert_select(random: Random, schema: Schema, table: Table) -> Statement:
    head = _selected(random, schema, table, table.name)
    if not head:
        return _insert(random, schema, table)
    return Statement(head + returning(random, table), construct="INSERT … SELECT")


def _selected(random: Random, schema: Schema, table: Table, alias: str) -> str:
    """`insert into t as … select … order by …` without a tail; numbers are not drawn."""
    source = random.choice(schema.busy)
    columns = [c for c in table.writable if not c.identity]
    if not columns:
        return ""
    outputs = [borrowed(random, c, source) for c in columns]
    names = ", ".join(c.name for c in columns)
    into = f"insert into {table.name}{'' if alias == table.name else f' as {alias}'} ({names})"
    some = where(random, schema, source, source.name)
    return f"{into} select {', '.join(outputs)} from {source.name}{some} order by {source.order(source.name)}"


def _on_conflict(random: Random, schema: Schema, table: Table) -> Statement:
    nothing = random.random() < 0.5
    construct = "ON CONFLICT DO NOTHING" if nothing else "ON CONFLICT DO UPDATE"
    if construct not in schema.taken or not (nothing or table.arbiters):
        return _insert(random, schema, table)
    alias = random.choice((table.name, table.name, "n"))
    head, rows = "", 2
    if random.random() < 0.3:
        head = _selected(random, schema, table, alias)
    if not head:
        head, rows, _ = _insert_head(random, schema, table, "n" if alias == "n" else "", meets=0.6)
    target = f" {random.choice(table.arbiters)}" if table.arbiters and (not nothing or random.random() < 0.6) else ""
    tail = returning(random, table, alias=alias)
    if nothing:
        return Statement(f"{head} on conflict{target} do nothing{tail}", construct=construct)
    guard = f" where {condition(random, schema, table, alias)}" if random.random() < 0.4 else ""
    sql = f"{head} on conflict{target} do update set {_conflict_sets(random, table, alias)}{guard}{tail}"
    return Statement(sql, Openness.EXACT if rows == 1 else Openness.FIRST_FAILURE, construct)


def _conflict_sets(random: Random, table: Table, alias: str) -> str:
    pool = [c for c in table.writable if not c.identity] or table.columns
    names, values = [], []
    for column in random.sample(pool, min(len(pool), random.choice((1, 1, 2)))):
        value = literal(random, column)
        value += f"::{column.type}" if value.startswith("row(") else ""
        given = [f"excluded.{column.name}", value, f"{alias}.{column.name}"]
        given += [f"excluded.{column.name}", *(["default"] if random.random() < 0.1 else [])]
        if column.type in NUMBERS:
            given += [f"{alias}.{column.name} + excluded.{column.name}", f"{alias}.{column.name} + 1"]
        names.append(column.name)
        values.append(random.choice(given))
    if len(names) > 1 and random.random() < 0.3:
        return f"({', '.join(names)}) = {random.choice(('', 'row'))}({', '.join(values)})"
    return ", ".join(f"{name} = {value}" for name, value in zip(names, values, strict=True))


def _update(random: Random, schema: Schema, table: Table) -> Statement:
    sets, moves = assignments(random, schema, table, table.name)
    tail = returning(random, table, old_new=True)
    if table.key and random.random() < 0.4:
        return Statement(
            f"update {table.name} set {sets}{one_row(random, schema, table)}{tail}",
            of_one_row(schema, table),
            "UPDATE one row",
        )
    if random.random() < 0.15:
        return _update_by_query(random, schema, table)
    sql = f"update {table.name} set {sets}{where(random, schema, table, table.name)}{tail}"
    return Statement(sql, openness(schema, table, moves, sets), "UPDATE")


def _update_by_query(random: Random, schema: Schema, table: Table) -> Statement:
    """`update t as u set (a, b) = (select …)`."""
    source = random.choice(schema.busy)
    pool = [c for c in table.writable if c.identity != "always"] or table.columns
    chosen = random.sample(pool, min(len(pool), random.choice((1, 2, 2))))
    names = ", ".join(c.name for c in chosen)
    values = ", ".join(borrowed(random, c, source).replace(f"{source.name}.", "s.") for c in chosen)
    query = f"select {values} from {source.name} s order by {source.order('s')} limit 1"
    sets = f"({names}) = ({query})"
    sql = f"update {table.name} as u set {sets}{where(random, schema, table, 'u')}"
    moves = any(c.name in table.at_once for c in chosen)
    return Statement(
        f"{sql}{returning(random, table, alias='u')}", openness(schema, table, moves, f"({names})"), "UPDATE"
    )


def _update_from(random: Random, schema: Schema, table: Table) -> Statement:
    """Several matches per row, but the values come from the row alone; or one match per row."""
    source = random.choice(schema.busy)
    if random.random() < 0.4 and (single := _update_from_one(random, schema, table, source)):
        return single
    sets, moves = assignments(random, schema, table, table.name)
    on = join(random, table, table.name, source, "s")
    numbers = [c.name for c in table.of_type("int") if not c.generated]
    if not table.key and numbers and random.random() < 0.5:  # rows come to look like others that are still to be met
        sets, on, moves = f"{numbers[-1]} = {table.name}.{numbers[-1]} + 1", "true", numbers[-1] in table.at_once
    sql = f"update {table.name} set {sets} from {source.name} s where {on}{returning(random, table)}"
    return Statement(sql, openness(schema, table, moves, sets), "UPDATE … FROM")


def _update_from_one(random: Random, schema: Schema, table: Table, source: Table) -> Statement | None:
    keys = [(a.name, b.name) for a in table.comparable for b in source.of_type(a.type)]
    values = [(a, b.name) for a in table.of_type(*_LEAST) if not a.generated for b in source.of_type(a.type)]
    if not keys or not values:
        return None
    (a, b), (value, other) = random.choice(keys), random.choice(values)
    grouped = f"select {b} as k, min({other})::{value.type} as v from {source.name} group by {b}"
    sql = f"update {table.name} set {value.name} = s.v from ({grouped}) s where {table.name}.{a} = s.k"
    tail = random.choice(("", f" returning {table.name}.*, s.v", f" returning s.k, new.{value.name}, old.{value.name}"))
    if not table.column(a).kind.exact:  # which of the equal values stands for the group is open
        tail = tail.replace("s.k, ", "")
    moves = value.name in table.at_once
    return Statement(sql + tail, openness(schema, table, moves, f"{value.name} = "), "UPDATE … FROM")


_LEAST = ("int", "bigint", "smallint", "text", "varchar(4)", "numeric(6,2)", "date", "score", "mood", "timestamptz")
"""Types that have min(), and whose equal values look the same."""


def _delete(random: Random, schema: Schema, table: Table) -> Statement:
    tail = returning(random, table)
    if table.key and random.random() < 0.5:
        return Statement(
            f"delete from {table.name}{one_row(random, schema, table)}{tail}",
            of_one_row(schema, table),
            "DELETE one row",
        )
    sql = f"delete from {table.name}{where(random, schema, table, table.name)}{tail}"
    return Statement(sql, _deleting(schema, table), "DELETE")


def _deleting(schema: Schema, table: Table) -> Openness:
    return Openness.EVENT_ORDER if cascades(schema, table) else Openness.FIRST_FAILURE


def _delete_using(random: Random, schema: Schema, table: Table) -> Statement:
    source = random.choice(schema.busy)
    on = join(random, table, table.name, source, "s")
    extra = f" and ({condition(random, schema, source, 's')})"
    sql = f"delete from {table.name} using {source.name} s where {on}{extra}{returning(random, table)}"
    return Statement(sql, _deleting(schema, table), "DELETE … USING")


def _merge(random: Random, schema: Schema, table: Table) -> Statement:
    source = random.choice(schema.busy)
    on = join(random, table, table.name, source, "s")
    if on == "true":
        on = condition(random, schema, table, table.name)
    clauses = []
    moves = False
    every = ""
    for kind in random.sample(("matched", "not matched", "not matched by source"), random.choice((1, 2, 3))):
        guard = ""
        if kind == "matched" and random.random() < 0.4:
            guard = f" and {condition(random, schema, table, table.name)}"
        if kind == "not matched":
            clauses.append(f"when not matched{guard} then {_merge_insert(random, table, source)}")
            continue
        action = random.choice(("delete", "do nothing", "update", "update"))
        if action == "update":
            sets, moved = assignments(random, schema, table, table.name)
            moves = moves or moved
            every += sets
            action = f"update set {sets}"
        clauses.append(f"when {kind}{guard} then {action}")
    return _merging(
        schema,
        table,
        f"merge into {table.name} using {source.name} s on {on} {' '.join(clauses)}",
        random,
        moves,
        every,
    )


def _merging(schema: Schema, table: Table, sql: str, random: Random, moves: bool, every: str) -> Statement:
    sql += random.choice((f" returning merge_action(), {table.name}.*", f" returning {table.name}::text"))
    writes = sum(word in sql for word in ("then delete", "then update", "then insert"))
    own = any(reference.table == table.name for reference in table.references)
    if (writes > 1 and own) or cascades(schema, table):
        return Statement(sql, Openness.EVENT_ORDER, "MERGE")
    if moves:
        return Statement(sql, openness(schema, table, moves, every), "MERGE")
    return Statement(sql, Openness.KEY_SHIFT if "then insert" in sql else Openness.FIRST_FAILURE, "MERGE")


def _merge_values(random: Random, schema: Schema, table: Table) -> Statement:
    """The everyday MERGE: some rows by key, changed where they are there and inserted where not."""
    others = [c for c in table.writable if c.name not in table.key and not c.identity]
    if not table.key or any(c.identity == "always" for c in table.columns):
        return _merge(random, schema, table)
    chosen = random.sample(others, min(len(others), 2))
    columns = [*map(table.column, table.key), *chosen]
    rows = ", ".join(
        f"({', '.join(f'{_sample(random, table, c)}::{c.type}' for c in columns)})"
        for _ in range(random.choice((1, 2, 3)))
    )
    names = [f"s{n}" for n in range(len(columns))]
    pairs = list(zip((c.name for c in columns), names, strict=True))
    on = " and ".join(f"{table.name}.{c} = s.{n}" for c, n in pairs[: len(table.key)])
    sets = ", ".join(f"{c} = s.{n}" for c, n in pairs[len(table.key) :]) or f"{pairs[0][0]} = s.s0"
    guard = condition(random, schema, table, table.name)
    clauses = [
        *(
            [f"when matched and {guard} then {random.choice(('delete', 'do nothing'))}"]
            if random.random() < 0.4
            else []
        ),
        f"when matched then update set {sets}",
        f"when not matched then insert ({', '.join(c.name for c in columns)})"
        f" values ({', '.join(f's.{n}' for n in names)})",
        *([f"when not matched by source and {guard} then delete"] if random.random() < 0.2 else []),
    ]
    sql = f"merge into {table.name} using (values {rows}) s ({', '.join(names)}) on {on} {' '.join(clauses)}"
    return _merging(schema, table, sql, random, any(c.name in table.at_once for c in chosen), f"{sets} = ")


def _sample(random: Random, table: Table, column: Column) -> str:
    fresh = column.name in table.key and column.type in FRESH and random.random() < 0.4
    return FRESH[column.type].format(random.randint(10, 99)) if fresh else literal(random, column)


def _merge_insert(random: Random, table: Table, source: Table) -> str:
    if random.random() < (0.8 if any(c.identity == "always" for c in table.columns) else 0.1):
        return "do nothing"
    # Every number is given: those drawn for several rows depend on the order in which the join finds them.
    columns = table.writable
    values = [borrowed(random, c, source).replace(f"{source.name}.", "s.") for c in columns]
    overriding = " overriding system value" if any(c.identity == "always" for c in columns) else ""
    return f"insert ({', '.join(c.name for c in columns)}){overriding} values ({', '.join(values)})"


def _writing_cte(random: Random, schema: Schema, table: Table) -> Statement:
    if "writing CTE" not in schema.taken:
        return _insert(random, schema, table)
    parts, opens = [], []
    for number in range(random.choice((1, 1, 1, 2))):
        target = _another(random, schema, table) if number else table
        kinds = (_insert, _update, _delete, _on_conflict if "ON CONFLICT in WITH" in schema.taken else _insert)
        made = random.choice(kinds)(random, schema, target)
        parts.append(
            f"w{number} as ({made.sql.split(' returning ')[0]} returning {random.choice(target.columns).name} as c)"
        )
        opens.append(made.openness)
    other = _another(random, schema, table)
    choice = random.random()
    if choice < 0.3:
        outer = "select * from w0 order by w0::text"
    elif choice < 0.5:
        outer = f"select count(*), (select count(*) from {other.name}) from w0"
    elif choice < 0.65:
        outer = _delete(random, schema, other).sql.split(" returning ")[0] + " returning *"
    elif choice < 0.8 and (columns := [c for c in other.writable if not c.identity]):
        values = ", ".join(f"{literal(random, c)}::{c.type}" for c in columns)
        outer = f"insert into {other.name} ({', '.join(c.name for c in columns)}) select {values} from w0 returning *"
    else:
        sets, _ = assignments(random, schema, other, other.name)
        outer = f"update {other.name} set {sets} where exists (select from w0)"
    sql = f"with {', '.join(parts)} {outer}"
    # Events of the foreign keys of all parts are fired together, in the order of their rows.
    exact = outer.startswith("select") and opens == [Openness.EXACT]
    return Statement(sql, Openness.EXACT if exact else Openness.EVENT_ORDER, "writing CTE")


def _another(random: Random, schema: Schema, table: Table) -> Table:
    """Mostly: two parts of one command that write the same table are refused."""
    others = [t for t in schema.busy if t is not table]
    return random.choice(others) if others and random.random() < 0.9 else table


def _truncate(random: Random, schema: Schema, table: Table) -> Statement:
    if "TRUNCATE" not in schema.taken:
        return _delete(random, schema, table)
    tail = random.choice(("", " cascade", " restart identity", " restart identity cascade"))
    if "restart" in tail and (counted := [t for t in schema.busy if any(c.identity for c in t.columns)]):
        table = random.choice(counted)
    names = dict.fromkeys([table.name, *(random.choice(schema.busy).name for _ in range(random.choice((0, 0, 1, 2))))])
    return Statement(f"truncate {', '.join(names)}{tail}", construct="TRUNCATE")


def _constraints(random: Random, schema: Schema, table: Table) -> Statement:
    if "SET CONSTRAINTS" not in schema.taken:
        return read(random, schema, table)
    which = random.choice(("all", "all", *(f"{table.name}_once{i}" for i in range(2))))
    when = random.choice(("deferred", "deferred", "immediate"))
    return Statement(f"set constraints {which} {when}", Openness.FIRST_FAILURE, "SET CONSTRAINTS")


_MADE_BY = {
    "insert": _insert, "insert select": _insert_select, "update": _update, "update from": _update_from,
    "delete": _delete, "delete using": _delete_using, "merge": _merge, "merge values": _merge_values,
    "on conflict": _on_conflict, "writing cte": _writing_cte, "truncate": _truncate, "set constraints": _constraints,
    "read": read,
}  # fmt: skip
