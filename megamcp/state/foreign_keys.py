"""SQL of foreign keys: probes while rows move, a queue for what only the end of the statement or call can decide.

PostgreSQL checks and cascades after the statement, one event a row and foreign key, and appends the events of
cascaded statements to the same queue. So does this:

- A referring row whose parent is there when it is written needs nothing more: should the parent leave in the same
  command, the parent's own event finds the referring row. Only a missing parent is queued, and all parents in commands
  of several parts, where the order of events decides which error or action is met first.
- A parent that leaves (deleted, or its referenced key changed) is queued for each foreign key that has rows.
- The outermost AFTER STATEMENT trigger of a level drains its queue in order; cascades are plain DML through the views,
  whose triggers append to the queue and leave the draining to it.

- What belongs to a deferrable constraint goes on from the queue to a table of the constraint's own (`late`).

The queue is an unlogged table with rows of running transactions only. Each sees its own alone: what a hostile tool may
have left behind by its settings is nobody's.
"""

from megamcp.state import late, probes, unique, user_triggers
from megamcp.state.catalog import Catalog, ForeignKey, Table
from megamcp.state.expressions import changed, nested
from megamcp.state.names import body_quote, ident, literal

_HEAD = """language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan as"""

# Set by the statement's first trigger: other parts of the command, or of a function's caller, may write too.
_SEVERAL = "current_setting('megamcp.several', true) = 'on'"


def queue(state: str) -> str:
    s = ident(state)
    return f"""
create unlogged table {s}."~queue" (
  id bigint generated always as identity primary key, xact xid8 not null default pg_current_xact_id(),
  number int not null, event "char" not null, before text, after text, row bigint,
  level text not null default coalesce(current_setting('megamcp.level', true), '')
);
create index on {s}."~queue" (xact, id);
create function {s}."~enqueue"(_number int, _event "char", _before text, _after text, _row bigint) returns void
{_HEAD} $body$
begin
  insert into {s}."~queue" (number, event, before, after, row) values (_number, _event, _before, _after, _row);
  perform set_config('megamcp.queued', 'on', true);
end $body$;
"""


def enqueue(state: str, table: Table, number: int, event: str, before: str, after: str) -> str:
    """The call, in a row trigger; `before` and `after` are SQL: rows as text."""
    row = "_mm_this" if table.row else "null"
    return f"{ident(state)}.\"~enqueue\"({number}, '{event}', {before}, {after}, {row})"


def _new(columns: tuple[str, ...]) -> list[str]:
    return [f"new.{ident(c)}" for c in columns]


def on_write(state: str, visible: str, catalog: Catalog, table: Table, *, update: bool) -> str:
    """In a row trigger: each foreign key of the new row has its parent, or is queued to be looked at again."""
    lines: list[str] = []
    for foreign in catalog.foreign_keys:
        if foreign.table != table.name:
            continue
        values = _new(foreign.columns)
        listed = ", ".join(values)
        conditions = (
            [f"num_nonnulls({listed}) > 0"] if foreign.match_full else [f"{v} is distinct from null" for v in values]
        )
        if update:
            olds = ", ".join(f"old.{ident(c)}" for c in foreign.columns)
            conditions.append(f"row({listed}) is distinct from row({olds})")
        mixed = f"num_nulls({listed}) > 0 or " if foreign.match_full else ""
        missing = f"not {probes.parent_row(state, catalog.table(foreign.parent), foreign, values)}"
        # What is deferrable is queued in any case: else whatever else is queued before it is due may be told first.
        unsure = "" if foreign.deferrable else f"{mixed}{_SEVERAL} or {missing}"
        queued = enqueue(state, table, foreign.number, "c", "null", "new::text")
        lines.append(nested(f"perform {queued};", " and ".join(conditions), unsure))
        if update and not table.row and not set(table.identity) <= set(foreign.columns):
            # An event that still waits for the row knows it by its old key, and would find it gone.
            conditions[-1] = f"row({listed}) is not distinct from row({olds})"
            conditions.append(changed(table, table.identity, "old", "new"))
            lines.append(nested(f"perform {queued};", " and ".join(conditions), f"{mixed}{missing}"))
    return "".join(lines)


def on_leave(state: str, catalog: Catalog, table: Table, *, update: bool) -> str:
    """In a row trigger: a referenced key leaves; queue it for each foreign key that has referring rows.

    Rows may come to refer to it before the event's turn: a later row of the same UPDATE or MERGE where the table
    refers to itself, a child that a cascade of another row moves here, another part of the command that writes. So
    updates are queued in any case, deletes unless the command is a plain DELETE.
    """
    lines: list[str] = []
    for foreign in catalog.foreign_keys:
        if foreign.parent != table.name:
            continue
        olds = [f"old.{ident(c)}" for c in foreign.parent_columns]
        conditions = [f"{v} is distinct from null" for v in olds]
        unsure = ""
        if update:
            conditions.append(changed(table, foreign.parent_columns, "old", "new"))
        elif not (foreign.deferrable and foreign.on_delete == "a"):
            referred = probes.child_row(state, catalog.table(foreign.table), foreign, olds)
            unsure = f"{referred} or {_SEVERAL}"
        event, after = ("u", "new::text") if update else ("d", "null")
        queued = enqueue(state, table, foreign.number, event, "old::text", after)
        lines.append(nested(f"perform {queued};", " and ".join(conditions), unsure))
    return "".join(lines)


def drain(state: str, visible: str, catalog: Catalog) -> str:
    """One function a foreign key, and the loop that takes events off the queue."""
    s = ident(state)
    parts = [_event_function(state, visible, catalog, foreign) for foreign in catalog.foreign_keys]
    parts.append(user_triggers.events(state, visible, catalog, _HEAD))
    arms = ""
    for foreign in catalog.foreign_keys:
        now = ""
        if foreign.deferrable:
            parts.append(late.table(state, visible, foreign.number, foreign.name, foreign.deferred))
            kinds = ["'c'"] + [f"'{e}'" for e, a in (("u", foreign.on_update), ("d", foreign.on_delete)) if a == "a"]
            if len(kinds) < 3:
                now = f"if _event.event not in ({', '.join(kinds)}) then {_call(s, foreign.number)} else "
            now += late.put_off(visible, foreign.number) + (" end if;" if now else "")
        arms += f"      when {foreign.number} then {now or _call(s, foreign.number)}\n"
    for table, key in unique.late_keys(catalog):
        parts.append(unique.event_function(state, visible, table, key))
        parts.append(late.table(state, visible, key.number, key.name, key.deferred))
        arms += f"      when {key.number} then {late.put_off(visible, key.number)}\n"
    arms += user_triggers.arms(state, catalog)
    calls = f"    case _event.number\n{arms}    end case;\n" if arms else ""
    body = f"""declare
  _event record;
  _any boolean;
  _before text := coalesce(current_setting('megamcp.draining', true), '');
  _mine text := '<' || _level || '>';
  _depth text := coalesce(current_setting('megamcp.depth', true), '');  -- in levels' names: back as it was
  _done text;
begin
  if _before = _mine then
    return;
  end if;
  _done := set_config('megamcp.draining', _mine, true);
  _done := set_config('megamcp.depth', (coalesce(nullif(_depth, ''), '0')::int + 1)::text, true);
  loop  -- a batch at a time: events that it adds come after all of it
    _any := false;
    for _event in
      with taken as (delete from {s}."~queue" q where q.xact = pg_current_xact_id() and q.level = _level returning q.*)
      select * from taken order by id
    loop
      _any := true;
{calls}    end loop;
    exit when not _any;
  end loop;
  _done := set_config('megamcp.draining', _before, true);
  _done := set_config('megamcp.depth', _depth, true);
  if not exists (select from {s}."~queue" q where q.xact = pg_current_xact_id()) then
    _done := set_config('megamcp.queued', '', true);
  end if;
end"""
    parts.append(f'create function {s}."~drain"(_level text) returns void {_HEAD} {body_quote(body)};\n')
    return "".join(parts)


def _call(s: str, number: int) -> str:
    return f'perform {s}."~event {number}"({late.EVENT});'


def _detail(columns: tuple[str, ...], record: str, tail: str) -> str:
    values = " || ', ' || ".join(f"megamcp.shown({record}.{ident(c)})" for c in columns)
    names = ", ".join(columns)
    return f"{literal(f'Key ({names})=(')} || {values} || {literal(f') {tail}')}"


def _raise(visible: str, foreign: ForeignKey, code: str, message: str, detail: str) -> str:
    return (
        f"raise exception using errcode = '{code}', message = {literal(message)}, detail = {detail},\n"
        f"      schema = {literal(visible)}, table = {literal(foreign.table)}, constraint = {literal(foreign.name)};"
    )


def _event_function(state: str, visible: str, catalog: Catalog, foreign: ForeignKey) -> str:
    child, parent = catalog.table(foreign.table), catalog.table(foreign.parent)
    c, p = f"{ident(visible)}.{ident(child.name)}", f"{ident(visible)}.{ident(parent.name)}"
    missing = _raise(
        visible,
        foreign,
        "23503",
        _missing(child, foreign),
        _detail(foreign.columns, "_c", f'is not present in table "{parent.name}".'),
    )
    mixed = ""
    if foreign.match_full and len(foreign.columns) > 1:
        text = "MATCH FULL does not allow mixing of null and nonnull key values."
        raised = _raise(visible, foreign, "23503", _missing(child, foreign), literal(text))
        listed = ", ".join(f"_c.{ident(n)}" for n in foreign.columns)
        mixed = f"if num_nulls({listed}) > 0 then\n      {raised}\n    end if;"
    values = [f"_c.{ident(n)}" for n in foreign.columns]
    body = f"""#variable_conflict use_column
declare
  _mm_bound text := megamcp.verified(true);
  _mm_chain bigint[] := split_part(_mm_bound, '|', 1)::bigint[];
  _mm_head bigint := split_part(_mm_bound, '|', 2)::bigint;
  _c {c}%rowtype;
  _o {p}%rowtype;
  _n {p}%rowtype;
begin
  if _event = 'c' then
    _c := _after;
    if not {probes.is_current(state, child, "_c", foreign.columns)} then
      return;
    end if;
    {mixed}
    if not {probes.parent_row(state, parent, foreign, values)} then
      {missing}
    end if;
    return;
  end if;
  _o := _before;
  _n := _after;
  if _event = 'd' then
{_action(state, visible, catalog, foreign, foreign.on_delete, update=False)}
  else
{_action(state, visible, catalog, foreign, foreign.on_update, update=True)}
  end if;
end"""
    return (
        f'create function {ident(state)}."~event {foreign.number}"(_event "char", _before text, _after text, '
        f"_mm_this bigint) returns void {_HEAD} {body_quote(body)};\n"
    )


def _missing(child: Table, foreign: ForeignKey) -> str:
    return f'insert or update on table "{child.name}" violates foreign key constraint "{foreign.name}"'


def _action(state: str, visible: str, catalog: Catalog, foreign: ForeignKey, action: str, *, update: bool) -> str:
    child, parent = catalog.table(foreign.table), catalog.table(foreign.parent)
    view = f"{ident(visible)}.{ident(child.name)}"
    olds = [f"_o.{ident(n)}" for n in foreign.parent_columns]
    where = " and ".join(f"_t.{ident(n)} = {v}" for n, v in zip(foreign.columns, olds, strict=True))
    match action:
        case "c" if update:
            news = [f"_n.{ident(n)}" for n in foreign.parent_columns]
            sets = ", ".join(f"{ident(n)} = {v}" for n, v in zip(foreign.columns, news, strict=True))
            return f"    update {view} _t set {sets} where {where};"
        case "c":
            return f"    delete from {view} _t where {where};"
        case "n" | "d":
            columns = foreign.columns if update else foreign.set_columns or foreign.columns
            word = "null" if action == "n" else "default"
            sets = ", ".join(f"{ident(n)} = {word}" for n in columns)
            done = f"    update {view} _t set {sets} where {where};"
            if action == "n":
                return done
            # A row whose key was the default keeps it, so nothing above looked for its parent again.
            return f"{done}\n{_still_referenced(state, visible, catalog, foreign, olds)}"
        case "r":
            text = (
                f'update or delete on table "{parent.name}" violates RESTRICT setting of foreign key constraint '
                f'"{foreign.name}" on table "{child.name}"'
            )
            detail = _detail(foreign.parent_columns, "_o", f'is referenced from table "{child.name}".')
            still = probes.child_row(state, child, foreign, olds)
            return f"    if {still} then\n      {_raise(visible, foreign, '23001', text, detail)}\n    end if;"
    return _still_referenced(state, visible, catalog, foreign, olds)


def _still_referenced(state: str, visible: str, catalog: Catalog, foreign: ForeignKey, olds: list[str]) -> str:
    """NO ACTION: an error unless the referring rows are gone or the key has come back."""
    child, parent = catalog.table(foreign.table), catalog.table(foreign.parent)
    text = (
        f'update or delete on table "{parent.name}" violates foreign key constraint "{foreign.name}" '
        f'on table "{child.name}"'
    )
    still = probes.child_row(state, child, foreign, olds)
    detail = _detail(foreign.parent_columns, "_o", f'is still referenced from table "{child.name}".')
    again = probes.parent_row(state, parent, foreign, olds)
    return f"    if {still} and not {again} then\n      {_raise(visible, foreign, '23503', text, detail)}\n    end if;"
