"""Sequences, functions and triggers of a random schema: what runs inside the database on both sides."""

from dataclasses import replace

from tests.integration.overlay.differential_schema import Column, Draw, Schema, Table

TWICE = "create function twice(n int) returns int language sql immutable return n * 2;"
CLAMP = """create function clamp(n int) returns int language plpgsql immutable as
$$ begin if n > 3 then return 3; end if; return n; end $$;"""
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
            "minvalue 3 maxvalue 9 increment 2 cycle", "increment -2 maxvalue 5 minvalue -4", "maxvalue 6"
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
    for table in schema.tables:
        after += _triggers(draw, table)
    return replace(
        schema, tables=tuple(tables), before=tuple(before), after=tuple(after), sequences=tuple(sequences),
        calls=tuple(calls),
    )  # fmt: skip


def _triggers(draw: Draw, table: Table) -> list[str]:
    made: list[str] = []
    virtual = any("virtual" in c.definition for c in table.columns)  # with row triggers: refused
    if not virtual and draw.chance(0.25, "trigger before row"):
        made.append(_before(draw, table))
    if not virtual and draw.chance(0.25, "trigger after row") and "table without a key" in draw.taken:
        made.append(_after(draw, table))
    cascaded = any(reference.acts for reference in table.references)  # fires once too often: see the regressions
    if not cascaded and draw.chance(0.15, "trigger for each statement") and "table without a key" in draw.taken:
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
    events = draw.one("insert", "update", "insert or update", "insert or update or delete", "delete")
    when = ""
    if texts and draw.chance(0.4, "trigger with WHEN") and "delete" not in events and number:
        when = f" when (new.{number} is distinct from 1)"
    return (
        f"create function {name}() returns trigger language plpgsql as $$ begin"
        f" if tg_op = 'DELETE' then {delete} return old; end if; {skip} {change} return new; end $$;\n"
        f"create trigger {name} before {events} on {table.name} for each row{when} execute function {name}();"
    )


def _after(draw: Draw, table: Table) -> str:
    name = draw.one(f"{table.name}_after", f"a_{table.name}")
    names = [c.name for c in table.columns[:2]]
    new, old = (f"row({', '.join(f'{record}.{n}' for n in names)})::text" for record in ("new", "old"))
    of = f" of {table.columns[-1].name}" if draw.chance(0.3) and not table.columns[-1].generated else ""
    events = draw.one("insert", f"update{of}", "insert or delete", f"insert or update{of} or delete")
    return (
        f"create function {name}() returns trigger language plpgsql as $$ begin"
        f" if tg_op = 'DELETE' then insert into journal values (tg_op || ' ' || tg_table_name, {old});"
        f" elsif tg_op = 'UPDATE' then insert into journal values (tg_name, {old} || {new});"
        f" else insert into journal values (tg_op, {new}); end if; return null; end $$;\n"
        f"create trigger {name} after {events} on {table.name} for each row execute function {name}();"
    )
