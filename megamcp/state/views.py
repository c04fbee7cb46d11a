"""SQL of what a tool sees: schemas, roles, the views over the hidden tables and the environment's own views.

A tool role may use v_<h> and call functions there; it has no right in s_<h> and none on megamcp but EXECUTE on
chain_with_base() and chain(), which the policies call as the querying role. The environment's own views are read only.
"""

from megamcp.state.catalog import Catalog, Table
from megamcp.state.clock import next_value
from megamcp.state.names import hidden, ident, idents, literal
from megamcp.state.tables import VIEW_ROLE, parent
from megamcp.state.triggers import default_of

# Roles are cluster-wide, so another database may make the same one at this moment.
_ROLE = """do $do$ begin
  if not exists (select from pg_roles where rolname = {name}) then
    begin create role {role} {options}; exception when duplicate_object or unique_violation then null; end;
  end if;
end $do$;
"""


def role(name: str, options: str) -> str:
    return _ROLE.format(name=literal(name), role=ident(name), options=options)


def membership(roles: tuple[str, ...]) -> str:
    """The control role is a member: it gives views away, runs the DDL as their owner, and ends calls that hang."""
    names = ", ".join(literal(role) for role in roles)
    return f"""do $do$ declare _role name; begin
  foreach _role in array array[{names}]::name[] loop
    if not (pg_has_role(current_user, _role, 'set') and pg_has_role(current_user, _role, 'usage')) then
      execute format('grant %I to %I', _role, current_user);
    end if;
  end loop;
end $do$;
"""


def create(state: str, visible: str, table: Table) -> str:
    name = f"{ident(visible)}.{ident(table.name)}"
    return (
        f"create view {name} as select {idents(table.names)} from {parent(state, table.name)};\n"
        f"alter view {name} owner to {VIEW_ROLE};\n"
    )


def defaults(state: str, visible: str, table: Table) -> str:
    """Defaults on the view: PostgreSQL evaluates them only for columns left out or DEFAULT, as for a table."""
    parts: list[str] = []
    for column in table.columns:
        expression = default_of(state, table, column)
        if expression is not None:
            parts.append(
                f"alter view {ident(visible)}.{ident(table.name)} alter column {ident(column.name)} "
                f"set default {expression};\n"
            )
    return "".join(parts)


def grants(state: str, visible: str, catalog: Catalog, tool: str, query: str) -> str:
    """Rights of the two roles of a state."""
    s, v, t, q = ident(state), ident(visible), ident(tool), ident(query)
    writable = ", ".join(f"{v}.{ident(table.name)}" for table in catalog.tables)
    shared = f"{VIEW_ROLE}, {t}, {q}"
    changes = f"grant insert, update, delete on {writable} to {t};" if writable else ""
    return f"""
grant usage on schema {v}, megamcp to {shared};
grant usage on schema {s} to {VIEW_ROLE};
revoke all on all functions in schema {s}, {v} from public;
grant execute on all functions in schema {v} to {shared};
grant execute on function megamcp.chain_with_base(), megamcp.chain(), megamcp.prf(bigint, bigint),
  megamcp.dear(bigint, bigint) to {shared};
grant select on all tables in schema {v} to {t}, {q};
{changes}
grant execute on function {s}."~draw"(), {s}."~now"(), {s}."~below"(numeric), {s}."~uuid"(bytea, int),
  {s}."~sequence"(text), {s}."~missing"(text), {s}."~unset"(text) to {shared};
""" + "".join(_sequence_grants(state, catalog, shared))


def _sequence_grants(state: str, catalog: Catalog, roles: str) -> list[str]:
    calls = [next_value(state, sequence.name) for sequence in catalog.sequences]
    calls += [
        f"{ident(state)}.{ident(hidden(sequence.name, 'set'))}(bigint, boolean)" for sequence in catalog.sequences
    ]
    return [f"grant execute on function {call} to {roles};\n" for call in calls]
