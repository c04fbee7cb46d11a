"""An environment's own triggers, fired where PostgreSQL would.

Row triggers can't stand on a view, so their functions are copied: same body, but NEW, OLD and the TG_ variables are
parameters, and the row is the result. The copies run as the view role, never as the owner of the hidden tables.

- BEFORE: within the trigger that writes the row, in order of name, before generated columns, checks and keys. NULL
  leaves the row out.
- AFTER: WHEN and UPDATE OF are judged when the row is written; the event goes to the queue of `foreign_keys`, before or
  after those of the foreign keys as the names sort, and is fired at the end of the command.
- For each statement: as it is, on the view. Its functions are SECURITY DEFINER, for cascades run as the owner.

Not here: constraint triggers, transition tables, TRUNCATE triggers, INSTEAD OF; `refuse` says so.
"""

from dataclasses import dataclass
from typing import Any

import postgast

from megamcp.state.catalog import Catalog, Table, Trigger
from megamcp.state.names import body_quote, hidden, ident, idents, literal

FIRST_NUMBER = 1_000_000
"""Numbers of events in the queue: foreign keys have those below."""
_RI = "RI_ConstraintTrigger"
_EVENTS = {"i": "INSERT", "u": "UPDATE", "d": "DELETE"}


@dataclass(frozen=True, slots=True)
class Parts:
    """What CREATE TRIGGER says besides names and events."""

    condition: str | None
    arguments: tuple[str, ...]


def _parts(trigger: Trigger) -> Parts:
    statement = postgast.parse(trigger.definition).stmts[0].stmt.create_trig_stmt
    condition = None
    if statement.HasField("when_clause"):
        tree = postgast.parse("select 1")
        tree.stmts[0].stmt.select_stmt.target_list[0].res_target.val.CopyFrom(statement.when_clause)
        condition = postgast.deparse(tree).removeprefix("SELECT ").strip()
    return Parts(condition, tuple(argument.string.sval for argument in statement.args))


def of_rows(catalog: Catalog, table: Table, event: str, *, before: bool) -> list[Trigger]:
    """In the order in which PostgreSQL fires them."""
    return [t for t in catalog.triggers if t.table == table.name and t.row and t.before is before and event in t.events]


def for_statements(catalog: Catalog, table: Table) -> list[Trigger]:
    return [t for t in catalog.triggers if t.table == table.name and not t.row]


def _function(visible: str, trigger: Trigger) -> str:
    return f"{ident(visible)}.{ident(hidden(trigger.table, f'fire {trigger.number}'))}"


def _call(visible: str, trigger: Trigger, event: str, new: str, old: str) -> str:
    arguments = _parts(trigger).arguments
    quoted = ",".join('"' + a.replace("\\", "\\\\").replace('"', '\\"') + '"' for a in arguments)
    values = literal(f"[0:{len(arguments) - 1}]={{{quoted}}}") + "::text[]" if arguments else "null::text[]"
    row = f"{ident(visible)}.{ident(trigger.table)}"
    fixed = [
        literal(trigger.name), literal("BEFORE" if trigger.before else "AFTER"), "'ROW'", event,
        f"{literal(row)}::regclass::oid", literal(trigger.table), literal(trigger.table), literal(visible),
        str(len(arguments)), values,
    ]  # fmt: skip
    return f"{_function(visible, trigger)}({new}, {old}, {', '.join(fixed)})"


def _condition(trigger: Trigger, event: str, sets: str | None) -> str:
    """`sets` is an SQL array of the assigned columns, where the statement is not an UPDATE of the view."""
    tests = []
    if event == "u" and trigger.columns:
        if sets is None:
            tests.append(f"current_setting('megamcp.o{trigger.number}', true) = _mm_statement::text")
        else:
            tests.append(f"array[{', '.join(map(literal, trigger.columns))}]::text[] && {sets}")
    if condition := _parts(trigger).condition:
        tests.append(f"({condition})")
    return " and ".join(tests)


def fire_before(visible: str, catalog: Catalog, table: Table, event: str, sets: str | None = None) -> str:
    """In a row trigger's function: calls that may change NEW or leave the row out."""
    row = f"{ident(visible)}.{ident(table.name)}"
    lines: list[str] = []
    for trigger in of_rows(catalog, table, event, before=True):
        # NEW may be a row of another view with the same columns.
        new = "null" if event == "d" else f"row({idents(table.names, 'new')})::{row}"
        old = "null" if event == "i" else "old"
        call = _call(visible, trigger, literal(_EVENTS[event]), new, old)
        body = f"    declare\n      _mm_back {row} := {call};\n    begin\n"
        body += "      if not (_mm_back is distinct from null) then\n        return null;\n      end if;\n"
        if event != "d":
            body += "".join(f"      new.{ident(n)} := _mm_back.{ident(n)};\n" for n in table.names)
        body += "    end;\n"
        condition = _condition(trigger, event, sets)
        lines.append(f"  if {condition} then\n{body}  end if;\n" if condition else body)
    return "".join(lines)


def fire_after(state: str, catalog: Catalog, table: Table, event: str, *, early: bool, sets: str | None = None) -> str:
    """In a row trigger's function: events for the end of the command. `early` ones come before the foreign keys'."""
    lines: list[str] = []
    for trigger in of_rows(catalog, table, event, before=False):
        if (trigger.name.encode() < _RI.encode()) is not early:
            continue
        new = "null" if event == "d" else "new::text"
        old = "null" if event == "i" else "old::text"
        number = FIRST_NUMBER + trigger.number
        call = f"perform {ident(state)}.\"~enqueue\"({number}, '{event}', {old}, {new}, null);"
        condition = _condition(trigger, event, sets)
        lines.append(f"  if {condition} then\n    {call}\n  end if;\n" if condition else f"  {call}\n")
    return "".join(lines)


def arms(state: str, catalog: Catalog) -> str:
    """Arms of the queue's CASE."""
    return "".join(
        f'      when {FIRST_NUMBER + t.number} then perform {ident(state)}."~user {t.number}"'
        "(_event.event, _event.before, _event.after);\n"
        for t in catalog.triggers
        if t.row and not t.before
    )


def events(state: str, visible: str, catalog: Catalog, head: str) -> str:
    """One function an AFTER trigger, which reads the rows of an event and calls the copy."""
    made: list[str] = []
    for trigger in catalog.triggers:
        if not trigger.row or trigger.before:
            continue
        row = f"{ident(visible)}.{ident(trigger.table)}"
        event = "case _event when 'i' then 'INSERT' when 'u' then 'UPDATE' else 'DELETE' end"
        body = f"""declare
  _o {row} := _before::{row};
  _n {row} := _after::{row};
begin
  perform {_call(visible, trigger, event, "_n", "_o")};
end"""
        made.append(
            f'create function {ident(state)}."~user {trigger.number}"(_event "char", _before text, _after text) '
            f"returns void {head} {body_quote(body)};\n"
        )
    return "".join(made)


def marks(state: str, visible: str, catalog: Catalog, head: str) -> str:
    """Notes for UPDATE OF that the statement assigns one of the columns."""
    made: list[str] = []
    for trigger in catalog.triggers:
        if not trigger.row or not trigger.columns:
            continue
        number = catalog.table(trigger.table).number
        body = f"""declare
  _done text := set_config('megamcp.o{trigger.number}', current_setting('megamcp.t{number}', true), true);
begin
  return null;
end"""
        columns = ", ".join(map(ident, trigger.columns))
        name = f'{ident(state)}."~of {trigger.number}"()'
        made.append(
            f"create function {name} returns trigger {head} {body_quote(body)};\n"
            # After "~before", which makes the stamp.
            f'create trigger "~of {trigger.number}" before update of {columns} '
            f"on {ident(visible)}.{ident(trigger.table)} for each statement execute function {name};\n"
        )
    return "".join(made)


async def copies(conn: Any, visible: str, catalog: Catalog, marked: Any) -> str:
    """SQL for the view role: the copies of the functions, and the statement triggers. `marked(n)` is a level's mark."""
    made: list[str] = []
    for trigger in catalog.triggers:
        source = await conn.fetchval(
            "select p.prosrc from pg_proc p where p.oid = $1::text::regprocedure", trigger.function
        )
        if not trigger.row:
            made.append(f"alter function {trigger.function} security definer;\n{trigger.definition};\n")
            continue
        row = f"{ident(visible)}.{ident(trigger.table)}"
        made.append(
            f'create function {_function(visible, trigger)}("new" {row}, "old" {row}, tg_name name, tg_when text, '
            "tg_level text, tg_op text, tg_relid oid, tg_relname name, tg_table_name name, tg_table_schema name, "
            f"tg_nargs integer, tg_argv text[]) returns {row} language plpgsql security definer\n"
            f"set search_path = {ident(visible)}, pg_catalog, pg_temp, {marked(FIRST_NUMBER + trigger.number)} as "
            f"{body_quote(source)};\n"
            f"revoke all on function {_function(visible, trigger)} from public;\n"
        )
    return "".join(made)


def rights(visible: str, catalog: Catalog, owner: str, others: tuple[str, ...]) -> str:
    """The copies are called by the hidden triggers alone. After the rights to all functions of the schema."""
    return "".join(
        f"revoke all on function {_function(visible, trigger)} from {', '.join(map(ident, others))};\n"
        f"grant execute on function {_function(visible, trigger)} to {ident(owner)};\n"
        for trigger in catalog.triggers
        if trigger.row
    )
