"""SQL of schema w_<h>: what INSERT … ON CONFLICT and OVERRIDING are rewritten to (`rewrites` does that).

A view with INSTEAD OF triggers knows neither. So each table has, beside its view in v_<h>,

- a *shape*: an empty table of the same name with the same keys, which no row can enter. EXPLAIN of an INSERT into it
  makes PostgreSQL itself say which keys an ON CONFLICT clause means, or that it means none; and whether a column that
  takes no value is given one (`fixed`); a sequence's is a sequence;
- `t~proposed`, a view that takes the proposed rows: defaults, casts and row checks as for INSERT, nothing is written;
- `t~conflict`, a view that takes a proposed row together with the row that it met and what DO UPDATE makes of it, and
  inserts, updates or leaves out. Its statement triggers are those of the table's view;
- `t~system` and `t~user` where the table has identity columns, for OVERRIDING SYSTEM and USER VALUE.

A tool role may use all of these. What it writes by them directly is in its own rollout only, as ever.
"""

from typing import Any

import postgast

from megamcp.state import fixed, keyless, probes, triggers, user_triggers
from megamcp.state.catalog import Catalog, Column, Key, Table
from megamcp.state.names import LAYER, STAMP, body_quote, hidden, ident, literal
from megamcp.state.tables import delta, match

_TWICE = """raise exception using errcode = '21000',
        message = 'ON CONFLICT DO UPDATE command cannot affect row a second time',
        hint = 'Ensure that no rows proposed for insertion within the same command '
          'have duplicate constrained values.';
"""
STATEMENT_TRIGGERS = "statement triggers"
"""The comment of a shape whose table has such triggers: they stand on the table's own view alone."""
_MOST_COLUMNS = 780  # the view of conflicts has two columns for one


def schema_name(visible: str) -> str:
    return "w_" + visible.removeprefix("v_")


def has_conflicts(table: Table) -> bool:
    return len(table.columns) <= _MOST_COLUMNS


def set_column(number: int) -> str:
    """The column of `t~conflict` that holds what DO UPDATE assigns to the table's n-th column."""
    return f"_mm_set_{number}"


async def shapes(conn: Any, visible: str, catalog: Catalog) -> str:
    """SQL that makes the shapes; read while the loaded tables are still there."""
    w = ident(schema_name(visible))
    parts: list[str] = []
    for table in catalog.tables:
        columns = "".join(
            f"{ident(c.name)} {c.type}{f' collate {c.collation}' if c.collation else ''}{fixed.shape_of(c)}, "
            for c in table.columns
        )
        parts.append(f"create table {w}.{ident(table.name)} ({columns}check (false));\n")
        if user_triggers.for_statements(catalog, table):
            parts.append(f"comment on table {w}.{ident(table.name)} is {literal(STATEMENT_TRIGGERS)};\n")
        for row in await conn.fetch(_KEYS, visible, table.name):
            if row["constraint"]:
                parts.append(
                    f"alter table {w}.{ident(table.name)} add constraint {ident(row['name'])} {row['constraint']};\n"
                )
            else:
                parts.append(_moved(row["index"], schema_name(visible)))
    # Those of identity columns are there.
    parts += [f"create sequence if not exists {w}.{ident(sequence.name)};\n" for sequence in catalog.sequences]
    change = """begin raise exception 'cannot change sequence "%"', name using errcode = '42809'; end"""
    parts.append(f'create procedure {w}."~sequence"(name text) language plpgsql as {body_quote(change)};\n')
    return "".join(parts)


_KEYS = """
select i.relname as name, pg_get_indexdef(x.indexrelid) as index, pg_get_constraintdef(n.oid) as constraint
from pg_index x join pg_class i on i.oid = x.indexrelid join pg_class c on c.oid = x.indrelid
left join pg_constraint n on n.conindid = x.indexrelid and n.contype in ('p', 'u')
where c.relnamespace = $1::text::regnamespace and c.relname = $2 and x.indisunique order by x.indexrelid
"""


def _moved(definition: str, schema: str) -> str:
    """CREATE UNIQUE INDEX as PostgreSQL prints it, on the table of the same name in another schema."""
    tree = postgast.parse(definition)
    tree.stmts[0].stmt.index_stmt.relation.schemaname = schema
    return f"{postgast.deparse(tree)};\n"


def create(state: str, visible: str, catalog: Catalog, table: Table) -> str:
    parts: list[str] = []
    if has_conflicts(table):
        parts += [_proposed(state, visible, catalog, table), _conflict(state, visible, catalog, table)]
    if any(column.identity for column in table.columns):
        parts += [_overriding(state, visible, catalog, table, system) for system in (True, False)]
    return "".join(parts)


def truncate(state: str, visible: str, catalog: Catalog) -> str:
    """TRUNCATE as a procedure: PostgreSQL's check of foreign keys, no row triggers, no cascades of DELETE."""
    s, w = ident(state), ident(schema_name(visible))
    pairs = [(f.table, f.parent) for f in catalog.foreign_keys if f.table != f.parent]
    children = ", ".join(f"({literal(child)}, {literal(parent)})" for child, parent in pairs) or "(null, null)"
    parts: list[str] = []
    arms = ""
    for table in catalog.tables:
        name = f"{s}.{ident(hidden(table.name, 'truncate'))}"
        body = f"""#variable_conflict use_column
declare
  _mm_bound text := megamcp.verified(true);
  _mm_chain bigint[] := (split_part(_mm_bound, '|', 1)::bigint[])[2:];
  _mm_head bigint := split_part(_mm_bound, '|', 2)::bigint;
  _mm_statement bigint := nextval('megamcp.stamp_seq');
  _mm_this bigint;
  old {ident(visible)}.{ident(table.name)}%rowtype;
begin
  for old in select * from {ident(visible)}.{ident(table.name)} loop
{triggers.gone(state, table)}  end loop;
{"".join(_restarted(state, catalog, table))}end"""
        parts.append(f"create function {name}(_restart boolean) returns void {triggers.HEAD} {body_quote(body)};\n")
        arms += f"      when {literal(table.name)} then perform {name}(restart);\n"
    body = f"""declare
  _name text;
  _all text[] := names;
  _more text[];
  _child text;
  _parent text;
begin
  loop
    select array_agg(distinct f.child) into _more from (values {children}) f(child, parent)
      where f.parent = any (_all) and f.child <> all (_all);
    exit when _more is null;
    if not cascading then
      select f.child, f.parent into _child, _parent from (values {children}) f(child, parent)
        where f.parent = any (_all) and f.child <> all (_all) limit 1;
      raise exception 'cannot truncate a table referenced in a foreign key constraint' using errcode = '0A000',
        detail = format('Table "%s" references "%s".', _child, _parent),
        hint = format('Truncate table "%s" at the same time, or use TRUNCATE ... CASCADE.', _child);
    end if;
    _all := _all || _more;
  end loop;
  foreach _name in array _all loop
    case _name
{arms or "      when null then null;"}    end case;
  end loop;
end"""
    parts.append(
        f'create procedure {w}."~truncate"(names text[], restart boolean, cascading boolean) '
        f"language plpgsql security definer set search_path = pg_catalog, pg_temp as {body_quote(body)};\n"
    )
    return "".join(parts)


def _restarted(state: str, catalog: Catalog, table: Table) -> list[str]:
    """RESTART IDENTITY: the sequences that the table's columns own start again."""
    owned = [q for q in catalog.sequences if q.owner == table.name]
    calls = [f"perform {ident(state)}.{ident(hidden(q.name, 'set'))}({q.start}, false);" for q in owned]
    return [f"  if _restart then\n    {' '.join(calls)}\n  end if;\n"] if calls else []


def grants(visible: str, roles: tuple[str, ...]) -> str:
    w, names = ident(schema_name(visible)), ", ".join(map(ident, roles))
    return (
        f"grant usage on schema {w} to {names};\n"
        f"grant select, insert on all tables in schema {w} to {names};\n"
        f"revoke all on all routines in schema {w} from public;\n"
        f"grant execute on all routines in schema {w} to {names};\n"
    )


def _view(visible: str, name: str, columns: list[tuple[str, str]]) -> str:
    nulls = ", ".join(f"null::{kind} as {ident(column)}" for column, kind in columns)
    return f"create view {ident(schema_name(visible))}.{ident(name)} as select {nulls} where false;\n"


def _columns(table: Table) -> list[tuple[str, str]]:
    return [(column.name, column.type) for column in table.columns]


def _defaults(state: str, visible: str, table: Table, name: str, but: tuple[Column, ...] = ()) -> str:
    view = f"{ident(schema_name(visible))}.{ident(name)}"
    given = [(c, triggers.default_of(state, table, c)) for c in table.columns if c not in but]
    return "".join(f"alter view {view} alter column {ident(c.name)} set default {text};\n" for c, text in given if text)


def _trigger(visible: str, name: str, function: str) -> str:
    view = f"{ident(schema_name(visible))}.{ident(name)}"
    return f'create trigger "~insert" instead of insert on {view} for each row execute function {function};\n'


def _proposed(state: str, visible: str, catalog: Catalog, table: Table) -> str:
    name = hidden(table.name, "proposed")
    function = f"{ident(state)}.{ident(name)}()"
    body = f"""#variable_conflict use_column
declare
  _mm_done text;
begin
{triggers.proposed(visible, catalog, table)}  return new;
end"""
    return (
        _view(visible, name, _columns(table))
        + _defaults(state, visible, table, name)
        + f"create function {function} returns trigger {triggers.HEAD} {body_quote(body)};\n"
        + _trigger(visible, name, function)
    )


def _overriding(state: str, visible: str, catalog: Catalog, table: Table, system: bool) -> str:
    """SYSTEM: identity columns take what is given. USER: they take the next value, whatever is given."""
    name = hidden(table.name, "system" if system else "user")
    identities = tuple(c for c in table.columns if c.identity)
    drawn = "".join(
        f"  new.{ident(c.name)} := {triggers.default_of(state, table, c)};\n" for c in identities if not system
    )
    body = drawn + triggers.insert_body(state, visible, catalog, table, identities=False)
    return (
        _view(visible, name, _columns(table))
        + _defaults(state, visible, table, name, () if system else identities)
        + triggers.function(state, table, "system" if system else "user", body)
        + _trigger(visible, name, f"{ident(state)}.{ident(name)}()")
        + triggers.around(state, f"{ident(schema_name(visible))}.{ident(name)}", table, "insert")
    )


def _met(state: str, table: Table, key: Key) -> str:
    return f"coalesce({probes.clash(state, table, key, 'new', other=False)}, false)"


def _no_arbiter(visible: str, table: Table, key: Key) -> str:
    return (
        "raise exception using errcode = '55000',\n      message = "
        "'ON CONFLICT does not support deferrable unique constraints/exclusion constraints as arbiters',\n"
        f"      schema = {literal(visible)}, table = {literal(table.name)}, "
        f"constraint = {literal(key.name)};"
    )


def _conflict(state: str, visible: str, catalog: Catalog, table: Table) -> str:
    name = hidden(table.name, "conflict")
    row_type = f"{ident(visible)}.{ident(table.name)}"
    columns = _columns(table)
    columns += [("_mm_arbiters", "text[]"), ("_mm_found", row_type), ("_mm_wanted", "boolean"), ("_mm_sets", "text[]")]
    fixed = triggers.fixed(table)
    settable = [(number, c) for number, c in enumerate(table.columns) if c not in fixed]
    # Without its domains, whose checks are for values that are written: they are met when the row takes the value.
    columns += [(set_column(number), column.base_type or column.type) for number, column in settable]

    hits = "".join(
        f"  if {literal(key.name)} = any (_mm_row._mm_arbiters) and not _mm_hit then\n"
        f"    {_no_arbiter(visible, table, key) if key.deferrable else f'_mm_hit := {_met(state, table, key)};'}\n"
        "  end if;\n"
        for key in table.keys
    )
    proposed = ", ".join(f"_mm_row.{ident(n)}" for n in table.names)
    assigned = "".join(
        f"      if {literal(c.name)} = any (_mm_row._mm_sets) then\n"
        f"        new.{ident(c.name)} := _mm_row.{set_column(n)};\n      end if;\n"
        for n, c in settable
    )
    written = (
        f"not {keyless.untouched(state, table, '_mm_old')}"
        if table.row
        else f"exists (select from {delta(state, table.name)} _mm_d where _mm_d.{LAYER} = _mm_head\n"
        f"          and {match('_mm_d', '_mm_old', table.identity)} and _mm_d.{STAMP} = _mm_statement)"
    )
    touched = f"  if not found then\n    {_TWICE}  end if;\n"
    body = f"""  declare
    _mm_row {ident(schema_name(visible))}.{ident(name)} := new;
    _mm_hit boolean := false;
    _mm_old {row_type} := new._mm_found;
    _mm_result {row_type};
  begin
{hits}    if not _mm_hit then
      declare
        new {row_type} := row({proposed});
      begin
{triggers.inserted(state, visible, catalog, table)}        _mm_result := new;
      end;
    elsif _mm_row._mm_sets is null then
      return null;  -- DO NOTHING
    elsif _mm_row._mm_found is not distinct from null then
      {_TWICE}
    elsif _mm_row._mm_wanted is not true then
      if {written} then
        {_TWICE}
      end if;
      return null;
    else
      declare
        old {row_type} := _mm_old;
        new {row_type} := _mm_old;
      begin
{assigned}{triggers.updated(state, visible, catalog, table, touched, "_mm_row._mm_sets")}        _mm_result := new;
      end;
    end if;
{"".join(f"    new.{ident(n)} := _mm_result.{ident(n)};{chr(10)}" for n in table.names)}    return new;
  end;
"""
    view = f"{ident(schema_name(visible))}.{ident(name)}"
    return (
        _view(visible, name, columns)
        + triggers.function(state, table, "conflict", body)
        + _trigger(visible, name, f"{ident(state)}.{ident(name)}()")
        + triggers.around(state, view, table, "insert")
    )
