"""Random statements that read: queries of many shapes, cursors, sequences, functions."""

from random import Random

from tests.integration.overlay.differential_openness import Statement
from tests.integration.overlay.differential_schema import Schema, Table
from tests.integration.overlay.differential_words import join, where


def read(random: Random, schema: Schema, table: Table) -> Statement:
    choice = random.random()
    if choice < 0.10 and schema.sequences and "sequence functions" in schema.taken:
        return sequence(random, schema)
    if choice < 0.2 and schema.calls:
        return _call(random, schema, table)
    if choice < 0.25 and "FOR UPDATE" in schema.taken:
        lock = random.choice(("update", "share", "no key update", "key share"))
        return Statement(
            f"select * from {table.name} t{where(random, schema, table, 't')} for {lock}", construct="FOR UPDATE"
        )
    if choice < 0.27 and "keyword time" in schema.taken:
        return Statement(
            "select current_timestamp, current_date, localtime, localtimestamp(0)",
            construct="keyword time",
            on_plain='select now() as "current_timestamp", now()::date as "current_date", now()::time as "localtime",'
            ' now()::timestamp(0) as "localtimestamp"',
        )
    return _select(random, schema, table)


def sequence(random: Random, schema: Schema, name: str = "") -> Statement:
    name = name or random.choice(schema.sequences)
    sql = random.choice(
        (
            f"select nextval('{name}')",
            f"select nextval('{name}') from generate_series(1, 3)",
            f"select currval('{name}')",
            "select lastval()",
            f"select setval('{name}', {random.choice((4, 5, 40))})",
            f"select setval('{name}', {random.choice((4, 5, 0))}, {random.choice(('true', 'false'))})",
        )
    )
    return Statement(sql, construct="sequence functions")


def _call(random: Random, schema: Schema, table: Table) -> Statement:
    call = random.choice(schema.calls)
    numbers, texts = table.of_type("int"), table.of_type("text")
    if "{int}" in call and numbers:
        call = call.format(int=f"t.{random.choice(numbers).name}")
    elif "{text}" in call and texts:
        call = call.format(text=f"t.{random.choice(texts).name}")
    else:
        return Statement(f"select {call.format(int='3', text=chr(39) + 'x' + chr(39))}", construct="function")
    return Statement(
        f"select {call} from {table.name} t{where(random, schema, table, 't')} order by {table.order('t')}",
        construct="function",
    )


def _select(random: Random, schema: Schema, table: Table) -> Statement:
    other = random.choice(schema.busy)
    on = join(random, table, "t", other, "o")
    some = where(random, schema, table, "t")
    a, b = random.choice(table.columns).name, random.choice(other.columns).name
    same = random.choice(table.grouped).name if table.grouped else None
    order = table.order("t")
    first = next((c.name for c in table.columns if c.type in {"int", "bigint", "text", "date"}), None)
    t, o = table.name, other.name
    templates = [
        f"select t.* from {t} t{some}",
        f"select to_jsonb(t) from {t} t{some}",
        f"select t from {t} t{some}",
        f"select t.{a}, o.{b} from {t} t join {o} o on {on}{some}",
        f"select t.{a}, o.{b} from {t} t left join {o} o on {on}{some}",
        f"select t.{a}, o.{b} from {t} t right join {o} o on {on}{some}",
        f"select count(*), count(t.{a}) from {t} t{some}",
        f"select {order}, t.{a} from {t} t order by {order} limit 2 offset 1",
        f"select {order}, row_number() over (order by {order}) from {t} t{some}",
        f"select array_agg(t.{a}::text order by {order}) from {t} t{some}",
        f"select t.{a}::text from {t} t union select o.{b}::text from {o} o",
        f"select t.{a}::text from {t} t except select o.{b}::text from {o} o",
        f"select {order} from {t} t where exists (select from {o} o where {on})",
        f"select {order}, (select count(*) from {o} o where {on}) from {t} t{some}",
        f"select {order}, x.n from {t} t cross join lateral (select count(*) as n from {o} o where {on}) x{some}",
        f"with w as (select * from {t}) select t.{a} from w t{some}",
        f"with w as materialized (select * from {t}) select count(*) from w t{some}",
        f"select 6 / length(t.{a}::text) from {t} t{some}",
        f"select * from {t} t natural left join (select * from {o} limit 0) z{some}"
        if table is not other
        else f"table {t}",
        f"with recursive r(n, x) as (select 1, t.{a}::text from {t} t union select n + 1, x from r where n < 3)"
        " select * from r",
    ]
    if same:
        templates += [
            f"select t.{same}, count(*) from {t} t{some} group by t.{same} having count(*) > 0",
            f"select distinct t.{same} from {t} t{some}",
            f"select t.{same}, max(o.{b}::text) from {t} t join {o} o on {on} group by grouping sets ((t.{same}), ())",
            f"select t.{same} in (select {same} from {t}), count(*) from {t} t group by 1",
        ]
    if first:
        templates += [f"select min(t.{first}), max(t.{first}) from {t} t{some}"]
    for view in table.views:
        templates += [f"select * from {view}", f"select t.{a} from {t} t where exists (select from {view} v)"]
    return Statement(random.choice(templates), construct="SELECT")
