"""SQL of deferrable constraints: when their events are due is PostgreSQL's own decision.

Events of such a constraint come, at the end of the statement, to a table that has a deferrable trigger of the
constraint's name. So they fire at once, at SET CONSTRAINTS or at COMMIT, and savepoints take the setting back, as with
any constraint trigger. The tables stand in v_<h>, where SET CONSTRAINTS looks the name up; nobody but the owner has a
right on them, and they hold rows of running transactions only.

SET CONSTRAINTS ALL would also fire the gateway's own triggers, so the SDK's connection sends SET CONSTRAINTS as a call
of the procedure that is made here. A tool's own login that sends it raw loses its own call, no more.
"""

from megamcp.state.catalog import Catalog
from megamcp.state.names import body_quote, ident, literal

EVENT = "_event.event, _event.before, _event.after, _event.row"


def put_off(visible: str, number: int) -> str:
    """In the loop over a statement's events: the event goes to its constraint's table."""
    return f'insert into {ident(visible)}."~late {number}" (event, before, after, row) values ({EVENT});'


def table(state: str, visible: str, number: int, name: str, deferred: bool) -> str:
    s, late = ident(state), f'{ident(visible)}."~late {number}"'
    return f"""
create unlogged table {late} (
  id bigint generated always as identity primary key, event "char", before text, after text, row bigint
);
create function {s}."~late {number}"() returns trigger language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp as $body$
begin
  delete from {late} q where q.id = new.id;
  perform {s}."~event {number}"(new.event, new.before, new.after, new.row);
  return null;
end $body$;
create constraint trigger {ident(name)} after insert on {late}
  deferrable initially {"deferred" if deferred else "immediate"} for each row execute function {s}."~late {number}"();
"""


def procedure(companion: str, visible: str, catalog: Catalog) -> str:
    """SET CONSTRAINTS as a procedure; `names` is null for ALL."""
    known = [(key.name, key.deferrable) for table in catalog.tables for key in table.keys if key.constraint]
    known += [(foreign.name, foreign.deferrable) for foreign in catalog.foreign_keys]
    late = [name for name, deferrable in known if deferrable]
    fixed = [name for name, deferrable in known if not deferrable]
    fixed += [check.name for table in catalog.tables for check in table.checks]
    body = f"""declare
  _late text[] := array[{", ".join(map(literal, dict.fromkeys(late)))}]::text[];
  _fixed text[] := array[{", ".join(map(literal, dict.fromkeys(fixed)))}]::text[];
  _due text[] := '{{}}';
  _name text;
begin
  foreach _name in array coalesce(names, _late) loop
    if _name = any (_late) then
      _due := _due || _name;
    elsif _name <> all (_fixed) then
      raise exception 'constraint "%" does not exist', _name using errcode = '42704';
    elsif late then  -- others are immediate already
      raise exception 'constraint "%" is not deferrable', _name using errcode = '42809';
    end if;
  end loop;
  if cardinality(_due) > 0 then
    execute (select 'set constraints ' || string_agg(format('%I.%I', {literal(visible)}, n), ', ')
      from unnest(_due) n) || case when late then ' deferred' else ' immediate' end;
  end if;
end"""
    return (
        f'create procedure {ident(companion)}."~constraints"(names text[], late boolean) language plpgsql '
        f"set search_path = pg_catalog, pg_temp as {body_quote(body)};\n"
    )
