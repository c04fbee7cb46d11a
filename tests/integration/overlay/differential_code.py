"""Sequences, functions and triggers of a random schema: what runs inside the database on both sides."""

from dataclasses import replace

from tests.integration.overlay.differential_schema import Column, Draw, Reference, Schema, Table, reaches
from tests.integration.overlay.differential_words import assignments, one_row

TWICE = "create function twice(n int) returns int language sql immutable return n * 2;"
CLAMP = """create function clamp(n int) returns int language plpgsql immutable as
$$ begin if n > 3 then return 3; end if; return n; end $$;"""
TOTALS = Table(
    "totals",
    [Column("name", "text", "primary key"), Column("n", "int", "")],
    ("name",),
    [("name",)],
    ["(name)"],
    {"name"},
)
JOURNAL = Table("journal", [Column("what", "text", ""), Column("line", "text", "")])


def code(draw: Draw, schema: Schema) -> Schema:
    """The schema with what it calls and what its tables call."""
    before: list[str] = []
    after: list[str] = []
    calls: list[str] = []
    sequences = [
        f"{t.name}_{c.name}_seq"
        for t in schema.tables
        for c in t.columns
        if c.identity in {"serial", "always", "by default"}
    ]
    if any(c.identity == "shared" for t in schema.tables for c in t.columns):
        before.append("create sequence numbers;")
        sequences.append("numbers")
    if draw.chance(0.4, "sequence with options"):
        # No CACHE: its gaps are a session's, and sequences of a rollout have none.
        options = draw.one(
            "minvalue 3 maxvalue 9 increment 2 cycle",
            "increment -2 maxvalue 5 minvalue -4",
            "maxvalue 6",
            "as smallint start 32766",
            "increment -1 minvalue -3 maxvalue -1 cycle",
        )
        before.append(f"create sequence odd {options};")
        sequences.append("odd")
    if "function in SQL" in draw.taken:
        before.append(TWICE)
        calls.append("twice({int})")
    if "function in PL/pgSQL" in draw.taken:
        before.append(CLAMP)
        calls.append("clamp({int})")
    if "function that reads" in draw.taken:
        first = schema.tables[0].name
        after.append(f"create function many() returns bigint language sql stable as 'select count(*) from {first}';")
        calls.append("many()")
    tables = list(schema.tables)
    if "table without a key" in draw.taken:
        tables.append(JOURNAL)
        if "function in SQL that writes" in draw.taken:
            after.append(
                "create function note(l text) returns void language sql as"
                " $$ insert into journal values ('note', l) $$;"
            )
            calls.append("note({text})")
        if "function in PL/pgSQL that writes" in draw.taken:
            after.append(
                "create function noted(l text) returns bigint language plpgsql as $$ declare n bigint; begin"
                " insert into journal values ('noted', l); select count(*) into n from journal; return n; end $$;"
            )
            calls.append("noted({text})")
        if draw.chance(0.7, "function in PL/pgSQL that changes rows"):
            after.append(
                "create function mark(n int) returns text language plpgsql as $$ declare m int; o int; begin"
                " update journal set line = left(line, 1) || n where what = 'noted';"
                " get diagnostics m = row_count;"
                " delete from journal where what = 'note' and length(line) > n; get diagnostics o = row_count;"
                " return m || '/' || o; end $$;"
            )
            calls.append("mark({int})")
    tables.append(TOTALS)
    if draw.chance(0.7, "function with ON CONFLICT"):
        after.append(
            "create function tally(w text) returns int language plpgsql as $$ declare m int; begin"
            " insert into totals values (w, 1) on conflict (name) do update set n = totals.n + excluded.n;"
            " select n into m from totals where name = w; return m; end $$;"
        )
        calls.append("tally({text})")
    keyed = [t for t in schema.tables if t.key]
    if keyed and draw.chance(0.7, "function with EXCEPTION"):
        after.append(_trying(draw, schema, draw.random.choice(keyed)))
        calls.append("try_it()")
    if keyed and draw.chance(0.5, "function that returns rows"):
        table = draw.random.choice(keyed)
        columns = ", ".join(f"o{i} {c.type}" for i, c in enumerate(table.columns[:2]))
        names = ", ".join(c.name for c in table.columns[:2])
        after.append(
            f"create function few() returns table ({columns}) language sql stable as"
            f" $$ select {names} from {table.name} order by {table.order(table.name)} limit 3 $$;"
        )
        calls.append("few()")
    for table in schema.tables:
        after += _triggers(draw, schema, table)
    return replace(
        schema, tables=tuple(tables), before=tuple(before), after=tuple(after), sequences=tuple(sequences),
        calls=tuple(calls),
    )  # fmt: skip


def _trying(draw: Draw, schema: Schema, table: Table) -> str:
    """A function that writes one row and, where that fails, writes another and goes on."""
    sets, _ = assignments(draw.random, schema, table, table.name)
    other = f"delete from {table.name}{one_row(draw.random, schema, table)};" if draw.chance(0.5) else ""
    return (
        "create function try_it() returns text language plpgsql as $$ declare m int; begin"
        f" begin update {table.name} set {sets}{one_row(draw.random, schema, table)}; get diagnostics m = row_count;"
        f" exception when integrity_constraint_violation or data_exception then {other} return sqlstate; end;"
        " return m; end $$;"
    )


def _triggers(draw: Draw, schema: Schema, table: Table) -> list[str]:
    made: list[str] = []
    virtual = any("virtual" in c.definition for c in table.columns)  # with row triggers: refused
    if not virtual and draw.chance(0.25, "trigger before row"):
        made.append(_before(draw, table))
        if draw.chance(0.4, "several triggers of one event"):
            made.append(_guard(draw, table))
    referred = bool(_acting(schema, table))
    if (
        not virtual
        and draw.chance(0.7 if referred else 0.3, "trigger after row")
        and "table without a key" in draw.taken
    ):
        made.append(_after(draw, schema, table))
    if not virtual and draw.chance(0.2, "trigger that writes by ON CONFLICT"):
        name = f"{table.name}_total"
        events = draw.one("insert", "update", "delete", "insert or update or delete")
        made.append(
            f"create function {name}() returns trigger language plpgsql as $$ begin"
            f" insert into totals values (tg_argv[0] || tg_argv[1], 1)"
            f" on conflict (name) do update set n = totals.n + 1; return null; end $$;\n"
            f"create trigger {name} after {events} on {table.name} for each row"
            f" execute function {name}('it''s ', {draw.random.randint(1, 3)});"
        )
    cascaded = any(reference.acts for reference in table.references)  # fires once too often: see the regressions
    if not cascaded and draw.chance(0.35, "trigger for each statement") and "table without a key" in draw.taken:
        name = f"{table.name}_done"
        moment = draw.one("before", "after")
        made.append(
            f"create function {name}() returns trigger language plpgsql as $$ begin"
            f" insert into journal values (tg_op || ' ' || tg_when || ' ' || tg_level, tg_name); return null; end $$;\n"
            f"create trigger {name} {moment} insert or update or delete on {table.name}"
            f" for each statement execute function {name}();"
        )
    return made


def _before(draw: Draw, table: Table) -> str:
    name = f"{table.name}_before"
    texts = [c for c in table.of_type("text") if not c.generated and c.name not in table.at_once | set(table.key)]
    change = f"new.{texts[0].name} := coalesce(new.{texts[0].name}, '') || '+';" if texts else ""
    number = next((c.name for c in table.of_type("int") if c.name not in table.key), None)
    skip = f"if new.{number} = 4 then return null; end if;" if number and draw.chance(0.5) else ""
    delete = f"if old.{number} = 2 then return null; end if;" if number and draw.chance(0.5) else ""
    of = _of(draw, table)
    events = draw.one("insert", f"update{of}", f"insert or update{of}", f"insert or update{of} or delete", "delete")
    when = _when(draw, table, events)
    return (
        f"create function {name}() returns trigger language plpgsql as $$ begin"
        f" if tg_op = 'DELETE' then {delete} return old; end if; {skip} {change} return new; end $$;\n"
        f"create trigger {name} before {events} on {table.name} for each row{when} execute function {name}();"
    )


def _of(draw: Draw, table: Table) -> str:
    """`of c` after the word UPDATE, or nothing."""
    columns = [c.name for c in table.columns if not c.generated]
    return f" of {draw.random.choice(columns)}" if columns and draw.chance(0.4) else ""


def _when(draw: Draw, table: Table, events: str) -> str:
    """As often true as not."""
    columns = [c for c in table.comparable if not c.generated]
    if not columns or " or " in events or not draw.chance(0.4, "trigger with WHEN"):
        return ""
    record = "old" if events == "delete" else draw.one("new", "old") if "update" in events else "new"
    column = draw.random.choice(columns)
    value = f"{draw.random.choice(column.kind.good[:2])}::{column.type}"
    name = f"{record}.{column.name}"
    tests = [f"{name} is distinct from {value}", f"{name} is not distinct from {value}", f"{name} is not null"]
    if "update" in events:
        tests += [f"old.{column.name} is distinct from new.{column.name}"] * 2
    return f" when ({draw.random.choice(tests)})"


def _guard(draw: Draw, table: Table) -> str:
    """A second BEFORE trigger: it sees what the first made of the row, and forbids some."""
    name = draw.one(f"{table.name}_guard", f"a_{table.name}_guard")
    ints = [c.name for c in table.of_type("int") if not c.generated]
    texts = [c.name for c in table.of_type("text") if not c.generated]
    test = f"new.{draw.random.choice(ints)} = 5" if ints else f"new.{texts[0]} like '%b%'" if texts else "false"
    code = draw.one("", " using errcode = '23514'", " using errcode = '22023'")
    events = draw.one("insert", "update", "insert or update")
    return (
        f"create function {name}() returns trigger language plpgsql as $$ begin"
        f" if {test} then raise exception 'guarded by %', tg_name{code}; end if; return new; end $$;\n"
        f"create trigger {name} before {events} on {table.name} for each row execute function {name}();"
    )


def _after(draw: Draw, schema: Schema, table: Table) -> str:
    """Writes down what it is given, and whether rows refer to it: foreign keys come before some and after others."""
    name = draw.one(f"{table.name}_after", f"a_{table.name}", f'"A_{table.name}"', f'"A_{table.name}"')
    names = [c.name for c in table.columns[:2]]
    new, old = (f"row({', '.join(f'{record}.{n}' for n in names)})::text" for record in ("new", "old"))
    of = _of(draw, table)
    every = f"insert or update{of} or delete"
    events = draw.one("insert", f"update{of}", f"update{of}", "insert or delete", every, "delete")
    if acting := _acting(schema, table):
        events = draw.one("update", "delete", "delete", "update or delete")
    when = _when(draw, table, events)
    number = next((c.name for c in table.of_type("int") if not c.generated), None)
    fail = ""
    if number and draw.chance(0.3):
        fail = f" if (case tg_op when 'DELETE' then old.{number} else new.{number} end) = 1 then"
        fail += " raise exception 'told after %', tg_op; end if;"
    children = "".join(f" || {_referred(child, reference)}" for child, reference in acting[:2])
    return (
        f"create function {name}() returns trigger language plpgsql as $$ begin{fail}"
        f" if tg_op = 'DELETE' then insert into journal values (tg_op || ' ' || tg_table_name, {old}{children});"
        f" elsif tg_op = 'UPDATE' then insert into journal values (tg_name, {old} || {new}{children});"
        f" else insert into journal values (tg_op, {new}); end if; return null; end $$;\n"
        f"create trigger {name} after {events} on {table.name} for each row{when} execute function {name}();"
    )


def _acting(schema: Schema, table: Table) -> list[tuple[Table, Reference]]:
    """Foreign keys that take rows away from the table's, and nothing else does or brings some, lest the order of rows
    count."""

    def elsewhere(reference: Reference) -> bool:
        return reference.table != table.name and not reaches(schema.tables, schema.table(reference.table), table)

    return [
        (other, mine)
        for other, mine in schema.referring(table)
        if mine.acts and "default" not in mine.actions and "update cascade" not in mine.actions and other is not table
        if all(r is mine or (r.table != other.name and elsewhere(r)) for r in other.references)
    ]


def _referred(child: Table, reference: Reference) -> str:
    match = " and ".join(f"c.{c} = old.{t}" for c, t in zip(reference.columns, reference.target, strict=True))
    return f"exists (select from {child.name} c where {match})"
