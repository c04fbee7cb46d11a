"""Random statements over a random schema. Each is a function of (schema, seed), so programs shrink by
dropping some.

What PostgreSQL itself leaves open is not asked for: LIMIT comes with a total ORDER BY, the value that
UPDATE … FROM takes from several matches never reaches the row, serial numbers are given to rows in a stated
order. What is left open but asked for is marked by `Openness`, and `differential_openness` says what holds then.
"""

from random import Random

from tests.integration.overlay.differential_openness import Openness, Statement
from tests.integration.overlay.differential_reads import read
from tests.integration.overlay.differential_schema import NUMBERS, Column, Schema, Table
from tests.integration.overlay.differential_words import (
    assignments,
    borrowed,
    cascades,
    condition,
    inserted,
    join,
    literal,
    one_row,
    openness,
    returning,
    where,
)

__all__ = ["Openness", "Statement", "seed_insert", "statement"]


def statement(schema: Schema, seed: int) -> Statement:
    random = Random(f"{schema.number}/{seed}")
    table = random.choice(schema.tables)
    writers = {
        _insert: 22, _insert_select: 6, _update: 20, _update_from: 8, _delete: 11, _delete_using: 6, _merge: 13,
        _on_conflict: 8, _writing_cte: 7, _truncate: 1, _constraints: 2, read: 24,
    }  # fmt: skip
    writer = random.choices(list(writers), list(writers.values()))[0]
    return writer(random, schema, table)


def seed_insert(random: Random, schema: Schema, table: Table) -> str:
    """A plain one-row INSERT for the base; whether it is valid, PostgreSQL decides."""
    columns = [c for c in table.writable if not c.identity]
    values = ", ".join(inserted(random, schema, table, c) for c in columns)
    if not columns:
        return f"insert into {table.name} default values"
    return f"insert into {table.name} ({', '.join(c.name for c in columns)}) values ({values})"


def _insert_head(random: Random, schema: Schema, table: Table) -> tuple[str, int, str]:
    """`insert into t (…) values …` without a tail, its number of rows, and what it is counted as."""
    if random.random() < 0.03:
        return f"insert into {table.name} default values", 1, "INSERT"
    columns = [c for c in table.columns if _wanted(random, table, c)] or [table.columns[0]]
    random.shuffle(columns)
    count = random.choice((1, 1, 1, 2, 3))
    rows = ", ".join(f"({', '.join(inserted(random, schema, table, c) for c in columns)})" for _ in range(count))
    overriding = ""
    if any(c.identity in {"always", "by default"} for c in columns) and random.random() < 0.5:
        overriding = f" overriding {random.choice(('system', 'user'))} value"
    head = f"insert into {table.name} ({', '.join(c.name for c in columns)}){overriding} values {rows}"
    return head, count, "OVERRIDING" if overriding else "INSERT"


def _wanted(random: Random, table: Table, column: Column) -> bool:
    if column.generated:
        return random.random() < 0.08
    if column.identity:
        return random.random() < 0.3
    needed = "not null" in column.definition and "default" not in column.definition
    return random.random() < (0.99 if needed or column.name in table.key else 0.85)


def _insert(random: Random, schema: Schema, table: Table) -> Statement:
    head, _, construct = _insert_head(random, schema, table)
    return Statement(head + returning(random, table), construct=construct)


def _insert_select(random: Random, schema: Schema, table: Table) -> Statement:
    source = random.choice(schema.tables)
    columns = [c for c in table.writable if not c.identity]
    if not columns:
        return _insert(random, schema, table)
    outputs = [borrowed(random, c, source) for c in columns]
    names = ", ".join(c.name for c in columns)
    query = f"select {', '.join(outputs)} from {source.name}{where(random, schema, source, source.name)}"
    query += f" order by {source.order(source.name)}"
    return Statement(
        f"insert into {table.name} ({names}) {query}{returning(random, table)}", construct="INSERT … SELECT"
    )


def _on_conflict(random: Random, schema: Schema, table: Table) -> Statement:
    nothing = random.random() < 0.5
    construct = "ON CONFLICT DO NOTHING" if nothing else "ON CONFLICT DO UPDATE"
    if construct not in schema.taken or not (nothing or table.arbiters):
        return _insert(random, schema, table)
    head, rows, _ = _insert_head(random, schema, table)
    target = f" {random.choice(table.arbiters)}" if table.arbiters and (not nothing or random.random() < 0.6) else ""
    if nothing:
        return Statement(f"{head} on conflict{target} do nothing{returning(random, table)}", construct=construct)
    pool = [c for c in table.writable if not c.identity] or table.columns
    parts = []
    for column in random.sample(pool, min(len(pool), random.choice((1, 1, 2)))):
        values = [
            f"excluded.{column.name}",
            literal(random, column),
            f"{table.name}.{column.name}",
            f"excluded.{column.name}",
        ]
        values += ["default"] if random.random() < 0.1 else []
        if column.type in NUMBERS:
            values += [f"{table.name}.{column.name} + excluded.{column.name}", f"{table.name}.{column.name} + 1"]
        parts.append(f"{column.name} = {random.choice(values)}")
    guard = f" where {condition(random, schema, table, table.name)}" if random.random() < 0.3 else ""
    sql = f"{head} on conflict{target} do update set {', '.join(parts)}{guard}{returning(random, table)}"
    return Statement(sql, Openness.EXACT if rows == 1 else Openness.FIRST_FAILURE, construct)


def _update(random: Random, schema: Schema, table: Table) -> Statement:
    sets, moves = assignments(random, schema, table, table.name)
    tail = returning(random, table, old_new=True)
    if table.key and random.random() < 0.4:
        return Statement(f"update {table.name} set {sets}{one_row(table, random)}{tail}", construct="UPDATE one row")
    sql = f"update {table.name} set {sets}{where(random, schema, table, table.name)}{tail}"
    return Statement(sql, openness(schema, table, moves, sets), "UPDATE")


def _update_from(random: Random, schema: Schema, table: Table) -> Statement:
    """Several matches per row, but the values come from the row alone."""
    source = random.choice(schema.tables)
    sets, moves = assignments(random, schema, table, table.name)
    on = join(random, table, table.name, source, "s")
    sql = f"update {table.name} set {sets} from {source.name} s where {on}{returning(random, table)}"
    return Statement(sql, openness(schema, table, moves, sets), "UPDATE … FROM")


def _delete(random: Random, schema: Schema, table: Table) -> Statement:
    tail = returning(random, table)
    if table.key and random.random() < 0.5:
        return Statement(f"delete from {table.name}{one_row(table, random)}{tail}", construct="DELETE one row")
    sql = f"delete from {table.name}{where(random, schema, table, table.name)}{tail}"
    return Statement(sql, _deleting(schema, table), "DELETE")


def _deleting(schema: Schema, table: Table) -> Openness:
    return Openness.EVENT_ORDER if cascades(schema, table) else Openness.FIRST_FAILURE


def _delete_using(random: Random, schema: Schema, table: Table) -> Statement:
    source = random.choice(schema.tables)
    on = join(random, table, table.name, source, "s")
    extra = f" and ({condition(random, schema, source, 's')})"
    sql = f"delete from {table.name} using {source.name} s where {on}{extra}{returning(random, table)}"
    return Statement(sql, _deleting(schema, table), "DELETE … USING")


def _merge(random: Random, schema: Schema, table: Table) -> Statement:
    source = random.choice(schema.tables)
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
    tail = random.choice((f" returning merge_action(), {table.name}.*", f" returning {table.name}::text"))
    sql = f"merge into {table.name} using {source.name} s on {on} {' '.join(clauses)}{tail}"
    writes = sum(word in sql for word in ("then delete", "then update", "then insert"))
    own = any(reference.table == table.name for reference in table.references)
    if (writes > 1 and own) or cascades(schema, table):
        return Statement(sql, Openness.EVENT_ORDER, "MERGE")
    if moves:
        return Statement(sql, openness(schema, table, moves, every), "MERGE")
    return Statement(sql, Openness.KEY_SHIFT if "then insert" in sql else Openness.FIRST_FAILURE, "MERGE")


def _merge_insert(random: Random, table: Table, source: Table) -> str:
    if random.random() < 0.1:
        return "do nothing"
    # Every number is given: those drawn for several rows depend on the order in which the join finds them.
    columns = table.writable
    values = [borrowed(random, c, source).replace(f"{source.name}.", "s.") for c in columns]
    overriding = " overriding system value" if any(c.identity == "always" for c in columns) else ""
    return f"insert ({', '.join(c.name for c in columns)}){overriding} values ({', '.join(values)})"


def _writing_cte(random: Random, schema: Schema, table: Table) -> Statement:
    if "writing CTE" not in schema.taken:
        return _insert(random, schema, table)
    other = random.choice(schema.tables)
    first = random.choice((_insert, _update, _delete))(random, schema, table)
    inner = first.sql.split(" returning ")[0]
    out = random.choice(table.columns).name
    choice = random.random()
    if choice < 0.35:
        outer = "select * from w order by w::text"
    elif choice < 0.6:
        outer = f"select count(*), (select count(*) from {other.name}) from w"
    elif choice < 0.75:
        outer = _delete(random, schema, other).sql.split(" returning ")[0]
    else:
        sets, _ = assignments(random, schema, other, other.name)
        outer = f"update {other.name} set {sets} where exists (select from w)"
    sql = f"with w as ({inner} returning {table.name}.{out}) {outer}"
    # Events of the foreign keys of both parts are fired together, in the order of their rows.
    return Statement(sql, Openness.EXACT if outer.startswith("select") and first.openness is Openness.EXACT
                     else Openness.EVENT_ORDER, "writing CTE")  # fmt: skip


def _truncate(random: Random, schema: Schema, table: Table) -> Statement:
    if "TRUNCATE" not in schema.taken:
        return _delete(random, schema, table)
    tail = random.choice(("", " cascade", " restart identity", " restart identity cascade"))
    return Statement(f"truncate {table.name}{tail}", construct="TRUNCATE")


def _constraints(random: Random, schema: Schema, table: Table) -> Statement:
    if "SET CONSTRAINTS" not in schema.taken:
        return read(random, schema, table)
    which = random.choice(("all", "all", *(f"{table.name}_once{i}" for i in range(2))))
    when = random.choice(("deferred", "deferred", "immediate"))
    return Statement(f"set constraints {which} {when}", Openness.FIRST_FAILURE, "SET CONSTRAINTS")
