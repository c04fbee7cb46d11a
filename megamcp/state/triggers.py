"""SQL of the triggers that turn a write through a view into rows of the head layer.

Three INSTEAD OF row triggers a table, and a statement trigger before and after. What they keep to:

- The order of PostgreSQL's checks: NOT NULL by column, CHECK by name, is the row still untouched, unique keys by
  index, foreign keys. Same SQLSTATE, constraint name, table, column, message and detail.
- A row is touched once a command. Each statement draws a stamp; the head's row of a key carries the stamp of
  the statement that wrote it last; a second match finds its own stamp and returns NULL (21000 in a MERGE). Where no
  key tells rows apart, a match takes one of the rows that look alike and lack the stamp.
- Two data-modifying parts of one command on one table can't be told apart by stamps, so they are refused (0A000).
- The binding is verified once a statement, by its first trigger. What its rows need of it stands in settings whose
  names nobody knows (`megamcp.kept`).
- A row that nothing is in the way of, no version in the head, no row of its key, takes one SQL statement. Only others
  are looked at with all care.
- A delete leaves a tombstone with the whole old row: domains that forbid null hold there too.

Foreign keys end in `foreign_keys`; what can't be decided while rows still move waits there for the statement's end.
"""

from megamcp.state import clock, foreign_keys, keyless, probes, unique, user_triggers, writes
from megamcp.state.catalog import Catalog, Column, Key, Table
from megamcp.state.expressions import changed as differs
from megamcp.state.expressions import nested, over_new, over_sequences
from megamcp.state.names import LAYER, STAMP, body_quote, hidden, ident, literal
from megamcp.state.tables import delta

HEAD = """language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set debug_print_plan = off as"""


_FIRST = r"^(\s|--[^\n]*\n|/\*.*\*/)*"
_MERGE = rf"{_FIRST}merge\M|[()]\s*merge\s+into\M"  # also after WITH … (…), or inside it


def core(state: str, *, triggers: bool = False) -> str:
    """The statement triggers' functions, shared by the tables of a state.

    Several statements may be under way at once: the parts of a command that write in WITH, and what functions do in
    between. Their level tells them apart: a mark in the search path, which each function of an environment has for
    itself (`level_mark`). What a level queued is drained when its last part ends, as PostgreSQL fires AFTER triggers at
    the end of the whole command. Cascades are of the level that is drained. `megamcp.open` lists the levels of the
    parts under way, `megamcp.level` is the innermost.

    With `triggers` of the environment anything may write in between, so every command counts as one of several parts.

    The last two functions see the caller's search path, so each name and operator in them has its schema.
    """
    s = ident(state)
    head = HEAD.replace("set search_path = pg_catalog, pg_temp", "")
    mark = literal('"~[^"]*"')
    mark = f"substring(pg_catalog.current_setting('search_path') from {mark})"
    level = (
        # The depth tells a trigger's statement from one of the same trigger that it fires.
        f"coalesce(case when {mark} is not null then\n"
        f"      pg_catalog.concat({mark}, '#', pg_catalog.current_setting('megamcp.depth', true)) end,\n"
        "    substring(pg_catalog.current_setting('megamcp.draining', true) from '<(.*)>'), '')"
    )
    return f"""
create function {s}."~merging"() returns boolean language sql stable set search_path = pg_catalog, pg_temp
return coalesce(current_setting('megamcp.level', true), '') = '' and current_query() ~* {literal(_MERGE)};
create function {s}."~begun"(_table text, _name text, _level text) returns void {HEAD} $body$
declare
  _setting text := 'megamcp.t' || _table;
  _several text := case when {str(triggers).lower()} or _level <> ''
    or current_query() ~* {literal(f"{_FIRST}(with|merge)")} then 'on' else '' end;
  _bound text := megamcp.verified(true);
  _done text := set_config({kept(state, "chain")}, '{{' || substr(split_part(_bound, '|', 1), 4), true);
begin
  _done := set_config({kept(state, "head")}, split_part(_bound, '|', 2), true);
  if current_setting(_setting, true) <> '' then
    if _level = '' and {s}."~merging"() then
      return;  -- MERGE fires this once for INSERT, UPDATE and DELETE each; none is in a function
    end if;
    raise exception 'two parts of one command write table "%"', _name
      using errcode = '0A000', hint = 'Write the table in statements of their own.';
  end if;
  _done := set_config(_setting, nextval('megamcp.stamp_seq')::text, true);
  _done := current_setting('megamcp.open', true);
  _done := set_config('megamcp.open', concat(_done, '<', _level, '>'), true);
  if _level <> coalesce(current_setting('megamcp.level', true), '') then
    _done := set_config('megamcp.level', _level, true);
  end if;
  if _several <> coalesce(current_setting('megamcp.several', true), '') then
    _done := set_config('megamcp.several', _several, true);
  end if;
end $body$;
create function {s}."~ended"(_table text, _level text) returns void {HEAD} $body$
declare
  _setting text := 'megamcp.t' || _table;
  _part text := '<' || _level || '>';
  _open text := current_setting('megamcp.open', true);
  _outer text;
  _done text;
begin
  if current_setting(_setting, true) = '' then
    return;  -- of a MERGE that has ended
  end if;
  _done := set_config(_setting, '', true);
  _open := overlay(_open placing '' from strpos(_open, _part) for length(_part));
  _done := set_config('megamcp.open', _open, true);
  if current_setting('megamcp.queued', true) = 'on' and strpos(_open, _part) = 0 then
    perform {s}."~drain"(_level);
  end if;
  _outer := coalesce(substring(_open from '<([^<>]*)>$'), '');
  if _outer <> _level then
    _done := set_config('megamcp.level', _outer, true);
  end if;
end $body$;
create function {s}."~before"() returns trigger {head} $body$
begin
  perform {s}."~begun"(tg_argv[0], tg_argv[1], {level});
  return null;
end $body$;
create function {s}."~after"() returns trigger {head} $body$
begin
  perform {s}."~ended"(tg_argv[0], {level});
  return null;
end $body$;
create function {s}."~unset"(_setting text) returns text
language plpgsql volatile set search_path = pg_catalog, pg_temp as $body$
declare
  _done text := set_config(_setting, 'on', true);
begin
  return null;
end $body$;
"""


def kept(state: str, what: str) -> str:
    """The name of a setting as `"~begun"` leaves it: `chain`, the written layers as an array, or `head`."""
    return f"{ident(state)}.\"~kept\"('{what}')"


def level_mark(number: int) -> str:
    """What a function of an environment has at the end of its search path: a schema that isn't there."""
    return ident(f"~{number}")


def _failing_row(table: Table) -> str:
    shown = ("'virtual'" if c.virtual else f"megamcp.shown(new.{ident(c.name)})" for c in table.columns)
    values = ", ".join(shown)
    return f"megamcp.failing_row(variadic array[{values}])"


def fixed(table: Table) -> tuple[Column, ...]:
    """Columns that take no value but DEFAULT: generated ones and GENERATED ALWAYS AS IDENTITY."""
    return tuple(c for c in table.columns if c.generated is not None or c.identity == "a")


def _refused_value(column: Column, update: bool) -> str:
    """PostgreSQL says this before it looks at a row; `fixed_columns` says it for what only a row shows."""
    detail = f'Column "{column.name}" is a generated column.'
    if column.identity:
        detail = f'Column "{column.name}" is an identity column defined as GENERATED ALWAYS.'
    text = f'column "{column.name}" can only be updated to DEFAULT'
    hint = ""
    if not update:
        text = f'cannot insert a non-DEFAULT value into column "{column.name}"'
        hint = ", hint = 'Use OVERRIDING SYSTEM VALUE to override.'" if column.identity else ""
    return f"raise exception using errcode = '428C9', message = {literal(text)}, detail = {literal(detail)}{hint};"


def unset_setting(table: Table, column: Column) -> str:
    """Setting that the view's default of a generated column switches on: a given NULL looks the same otherwise."""
    return f"megamcp.u{table.number}_{table.names.index(column.name)}"


def fixed_columns(catalog: Catalog, table: Table, update: bool, *, identities: bool = True) -> str:
    """Refuses values for columns that take none; without `identities`, those take what is given."""
    lines: list[str] = []
    for column in fixed(table):
        name = ident(column.name)
        after = ""
        if column.identity and not identities:
            continue
        if column.identity:
            sequence = next(s for s in catalog.sequences if s.name == column.sequence)
            drawn = f"split_part(current_setting({literal(clock.setting(sequence))}, true), ':', 2)"
            given = f"new.{name}::text is distinct from {drawn}"
            if update:
                given = f"new.{name} is distinct from old.{name} and {given}"
        else:
            mark = literal(unset_setting(table, column))
            given = f"current_setting({mark}, true) is distinct from 'on'"
            if update:
                given = f"new.{name} is distinct from null and {differs(table, [column.name], 'new', 'old')}"
            else:
                after = f"  _mm_done := set_config({mark}, '', true);\n"
        lines.append(f"  if {given} then\n    {_refused_value(column, update)}\n  end if;\n{after}")
    return "".join(lines)


def generated(table: Table) -> str:
    """Computes the generated columns of NEW."""
    return "".join(
        f"  new.{ident(column.name)} := {over_new(column.generated, table.names)};\n"
        for column in table.columns
        if column.generated is not None
    )


def _changed_before(visible: str, catalog: Catalog, table: Table, event: str, sets: str | None = None) -> str:
    """The environment's BEFORE triggers, which don't see generated columns of NEW, and then those columns."""
    fired = user_triggers.fire_before(visible, catalog, table, event, sets)
    hidden_values = "".join(f"  new.{ident(c.name)} := null;\n" for c in table.columns if c.generated is not None)
    return f"{hidden_values if fired else ''}{fired}{generated(table)}"


def _column_trigger(state: str, visible: str, table: Table) -> str:
    """Refuses SET of a fixed column before any row is looked at, unless the command says DEFAULT somewhere."""
    columns = fixed(table)
    if not columns:
        return ""
    parts: list[str] = []
    for number, column in enumerate(columns):
        # Only the text tells `set c = default`, by a name that may be a view's. The SDK's connection has looked closer.
        to_default = literal(r"=\s*default\M|\)\s*=\s*(row\s*)?\(.*\mdefault\M")
        body = f"""begin
  if current_query() !~* {to_default} then
    {_refused_value(column, update=True)}
  end if;
  return null;
end"""
        function = f"{ident(state)}.{ident(hidden(table.name, f'fixed {number}'))}()"
        parts.append(
            f"create function {function} returns trigger {HEAD} {body_quote(body)};\n"
            f'create trigger "~fixed {number}" before update of {ident(column.name)} '
            f"on {ident(visible)}.{ident(table.name)} for each statement execute function {function};\n"
        )
    return "".join(parts)


def row_checks(visible: str, table: Table) -> str:
    lines: list[str] = []
    for column in table.columns:
        if column.not_null:  # DISTINCT FROM, here and in keys: IS NULL of a composite value asks its fields
            text = f'null value in column "{column.name}" of relation "{table.name}" violates not-null constraint'
            raised = unique.violation(visible, table, "23502", literal(text), _failing_row(table), column=column.name)
            lines.append(f"  if new.{ident(column.name)} is not distinct from null then\n    {raised}\n  end if;\n")
    for check in table.checks:
        text = f'new row for relation "{table.name}" violates check constraint "{check.name}"'
        raised = unique.violation(visible, table, "23514", literal(text), _failing_row(table), constraint=check.name)
        lines.append(f"  if ({over_new(check.expression, table.names)}) is false then\n    {raised}\n  end if;\n")
    return "".join(lines)


def _unique(state: str, visible: str, table: Table, key: Key, *, but: bool, changed: bool) -> str:
    """A clash with another row is an error at once; one with a key that is checked late is looked at again then."""
    if not key.deferrable:
        then = unique.refused(visible, table, key, "new")
    elif key.primary:
        then = f"perform {foreign_keys.enqueue(state, table, key.number, 'k', 'null', 'new::text')};"
    else:
        then = f"_mm_late := _mm_late || {key.number};"
    own = ([differs(table, key.reads, "new", "old")] if changed else []) + probes.may_clash(table, key, "new")
    perhaps = probes.perhaps_clash(state, table, key, "new", other=but) if but or not key.identifies else ""
    return nested(then, " and ".join(own), perhaps, probes.clash(state, table, key, "new", other=but))


def _late(state: str, table: Table) -> str:
    """Queues clashes of UNIQUE: PostgreSQL's triggers sort by name, PK_…, RI_… (foreign keys), Unique_…"""
    keys = [key for key in table.keys if key.deferrable and not key.primary]
    lines = [
        f"  if {key.number} = any (_mm_late) then\n"
        f"    perform {foreign_keys.enqueue(state, table, key.number, 'k', 'null', 'new::text')};\n  end if;\n"
        for key in keys
    ]
    return "".join(lines)


def _insert(state: str, visible: str, table: Table) -> str:
    """The row of NEW against the unique keys and into the head; the key that tells rows apart goes with the write."""
    if table.row:
        checks = [_unique(state, visible, table, key, but=False, changed=False) for key in table.keys]
        return "".join(checks) + writes.new(state, table)
    (number,) = [n for n, key in enumerate(table.keys) if key.identifies]
    before, after = (
        "".join(_unique(state, visible, table, key, but=but, changed=False) for key in keys)
        for keys, but in ((table.keys[:number], False), (table.keys[number + 1 :], True))
    )
    held = _unique(state, visible, table, table.keys[number], but=False, changed=False) + writes.new(state, table)
    return before + writes.absent(state, table) + f"  if not found then\n{held}  end if;\n" + after


def _touched(state: str) -> str:
    return f"""  if not found then
    if {ident(state)}."~merging"() then
      raise exception 'MERGE command cannot affect row a second time' using errcode = '21000',
        hint = 'Ensure that not more than one source row matches any one target row.';
    end if;
    return null;
  end if;
"""


def function(state: str, table: Table, event: str, body: str) -> str:
    text = f"""#variable_conflict use_column
declare
  _mm_chain bigint[] := current_setting({kept(state, "chain")}, true)::bigint[];
  _mm_head bigint := current_setting({kept(state, "head")}, true)::bigint;
  _mm_done text;
  _mm_this bigint;
  _mm_late int[];
  _mm_statement bigint := current_setting('megamcp.t{table.number}')::bigint;
begin
{body}end"""
    return (
        f"create function {ident(state)}.{ident(hidden(table.name, event))}() returns trigger {HEAD} "
        f"{body_quote(text)};\n"
    )


def proposed(visible: str, catalog: Catalog, table: Table, *, identities: bool = True) -> str:
    """NEW as it is to be inserted, checked by itself."""
    return (
        fixed_columns(catalog, table, update=False, identities=identities)
        + _changed_before(visible, catalog, table, "i")
        + row_checks(visible, table)
    )


def insert_body(state: str, visible: str, catalog: Catalog, table: Table, *, identities: bool = True) -> str:
    return (
        proposed(visible, catalog, table, identities=identities)
        + inserted(state, visible, catalog, table)
        + "  return new;\n"
    )


def inserted(state: str, visible: str, catalog: Catalog, table: Table) -> str:
    """The checked row of NEW comes into the head."""
    return (
        ("  _mm_this := nextval('megamcp.stamp_seq');\n" if table.row else "")
        + _insert(state, visible, table)
        + user_triggers.fire_after(state, catalog, table, "i", early=True)
        + foreign_keys.on_write(state, visible, catalog, table, update=False)
        + _late(state, table)
        + user_triggers.fire_after(state, catalog, table, "i", early=False)
    )


def gone(state: str, table: Table, touched: str = "") -> str:
    """The row of OLD leaves without a word to anybody; `touched` is for one that the statement has written already."""
    return (keyless.find(state, table) + touched if table.row else "") + writes.once(state, table, "old", True)


def updated(state: str, visible: str, catalog: Catalog, table: Table, touched: str, sets: str | None = None) -> str:
    """The row of OLD becomes NEW; `touched` is what happens to a row that the statement has written already.

    `sets` is an SQL array of the assigned columns, where the statement is not an UPDATE of the view.
    """
    rest = [key for key in table.keys if not key.identifies]
    write = keyless.find(state, table) + touched if table.row else ""
    write += writes.once(state, table, "new", False) + touched
    write += "".join(_unique(state, visible, table, key, but=True, changed=True) for key in rest)
    if not table.row:
        moved = writes.once(state, table, "old", True) + touched
        # An event that still waits for the row knows it by its old key: what is deferrable is looked at anew.
        moved += "".join(
            _unique(state, visible, table, key, but=False, changed=not (key.identifies or key.deferrable))
            for key in table.keys
        )
        moved += writes.new(state, table)
        stays = " and ".join(f"new.{ident(c)} = old.{ident(c)}" for c in table.identity)
        write = f"  if {stays} then\n{write}  else\n{moved}  end if;\n"
    fires = user_triggers.of_rows(catalog, table, "u", before=True)
    return (
        fixed_columns(catalog, table, update=True)
        + (_untouched(state, table, touched) if fires else "")
        + _changed_before(visible, catalog, table, "u", sets)
        + row_checks(visible, table)
        + write
        # As the names of PostgreSQL's triggers sort: what the row does to others comes before its own parents.
        + user_triggers.fire_after(state, catalog, table, "u", early=True, sets=sets)
        + foreign_keys.on_leave(state, catalog, table, update=True)
        + foreign_keys.on_write(state, visible, catalog, table, update=True)
        + _late(state, table)
        + user_triggers.fire_after(state, catalog, table, "u", early=False, sets=sets)
    )


def _untouched(state: str, table: Table, touched: str) -> str:
    """PostgreSQL fires nothing for a row that the statement has written already."""
    if table.row:
        return keyless.find(state, table) + touched
    written = (
        f"select from {delta(state, table.name)} _mm_d where _mm_d.{LAYER} = _mm_head and "
        f"{probes.is_row(table, '_mm_d', 'old')} and _mm_d.{STAMP} = _mm_statement"
    )
    return f"  perform where not exists ({written});\n{touched}"


def _delete_body(state: str, visible: str, catalog: Catalog, table: Table) -> str:
    touched = _touched(state)
    fires = user_triggers.of_rows(catalog, table, "d", before=True)
    return (
        (_untouched(state, table, touched) if fires else "")
        + user_triggers.fire_before(visible, catalog, table, "d")
        + gone(state, table, touched)
        + touched
        + user_triggers.fire_after(state, catalog, table, "d", early=True)
        + foreign_keys.on_leave(state, catalog, table, update=False)
        + user_triggers.fire_after(state, catalog, table, "d", early=False)
        + "  return old;\n"
    )


def create(state: str, visible: str, catalog: Catalog, table: Table) -> str:
    """The three functions of a table and the triggers on its view."""
    update = updated(state, visible, catalog, table, _touched(state)) + "  return new;\n"
    parts = [
        keyless.create(state, visible, table) if table.row else "",
        function(state, table, "insert", insert_body(state, visible, catalog, table)),
        function(state, table, "update", update),
        function(state, table, "delete", _delete_body(state, visible, catalog, table)),
    ]
    s, view = ident(state), f"{ident(visible)}.{ident(table.name)}"
    parts += [
        f'create trigger "~{event}" instead of {event} on {view} for each row '
        f"execute function {s}.{ident(hidden(table.name, event))}();\n"
        for event in ("insert", "update", "delete")
    ]
    parts.append(around(state, view, table, "insert or update or delete"))
    parts.append(_column_trigger(state, visible, table))
    return "".join(parts)


def around(state: str, view: str, table: Table, events: str) -> str:
    """The statement triggers of a view whose rows go into `table`.

    Triggers of a kind fire in order of name: the environment's BEFORE triggers come first, its AFTER triggers last.
    """
    return "".join(
        f'create trigger "{sign}{moment}" {moment} {events} on {view} for each statement '
        f"execute function {ident(state)}.\"~{moment}\"('{table.number}', {literal(table.name)});\n"
        for sign, moment in (("~", "before"), ("!", "after"))
    )


def default_of(state: str, table: Table, column: Column) -> str | None:
    """The expression of a view column's default; identity columns draw from their sequence."""
    if column.identity and column.sequence:
        call = clock.next_value(state, column.sequence)
        return call if column.type == "bigint" else f"{call}::{column.type}"
    if column.generated is not None:
        return f'{ident(state)}."~unset"({literal(unset_setting(table, column))})::{column.type}'
    if column.default is None:
        return None
    return over_sequences(column.default, lambda name: (state, hidden(name, "next")))
