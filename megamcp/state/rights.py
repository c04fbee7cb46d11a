"""Who owns what of a state, and how its environment's code is kept in it.

Four roles a state, none a superuser's, none with a right in another state or in the control tables:

- the *owner* (no login) has s_<h>: hidden tables, trigger functions, counters. What its functions evaluate for a tool
  (a CHECK that calls the environment's function, say) runs as it;
- the *view* role (no login) has v_<h>'s views and the environment's own types and functions. The policies of the
  hidden tables are for it. It runs the environment's DDL and seeds and may read hidden tables through policies only;
- the *tool* and the *query* role log in. They may use v_<h> and call functions there; they have no right in s_<h>
  but on a few functions that hold the binding to account, and none on megamcp but what the policies call.

The loader, which may be a superuser, evaluates nothing of an environment itself: `confined()` makes two functions that
run SQL as the owner and as the view role. PostgreSQL refuses SET ROLE inside them, so no text gets out of its role.
"""

import asyncio
from typing import Any

import asyncpg

from megamcp.state.catalog import Catalog
from megamcp.state.clock import next_value, shown_by
from megamcp.state.companions import schema_name
from megamcp.state.names import hidden, ident, literal

_ATTEMPTS = 20

# Roles are cluster-wide, so another database may make the same one at this moment.
_ROLE = """do $do$ begin
  if not exists (select from pg_roles where rolname = {name}) then
    begin create role {role} {options}; exception when duplicate_object or unique_violation then null; end;
  end if;
end $do$;
"""


async def patiently(conn: Any, sql: str) -> None:
    """Changes roles. They belong to the whole cluster: another database that changes the same one makes this fail."""
    for attempt in range(_ATTEMPTS):
        try:
            async with conn.transaction():
                await conn.execute(sql)
            return
        except asyncpg.InternalServerError as error:
            if "concurrently" not in str(error) or attempt == _ATTEMPTS - 1:
                raise
        await asyncio.sleep(0.02 * (attempt + 1))


async def no_temporary_tables(conn: Any, tool: str) -> None:
    """A temporary table would outlive the call on a pooled connection and show in another rollout's calls."""
    held = await conn.fetchval("select has_database_privilege($1, current_database(), 'temporary')", tool)
    if held:
        name = await conn.fetchval("select quote_ident(current_database())")
        await conn.execute(f"revoke temporary on database {name} from public")


def role(name: str, options: str) -> str:
    return _ROLE.format(name=literal(name), role=ident(name), options=options)


def membership(roles: tuple[str, ...]) -> str:
    """The control role is a member: it gives objects away, changes passwords, and ends calls that hang."""
    names = ", ".join(literal(role) for role in roles)
    return f"""do $do$ declare _role name; begin
  foreach _role in array array[{names}]::name[] loop
    if not (pg_has_role(current_user, _role, 'set') and pg_has_role(current_user, _role, 'usage')) then
      execute format('grant %I to %I', _role, current_user);
    end if;
  end loop;
end $do$;
"""


def schemas(state: str, visible: str, owner: str, view: str) -> str:
    """The two schemas, and what their roles need of schema megamcp."""
    s, v, o, w = ident(state), ident(visible), ident(owner), ident(view)
    return f"""
create schema {s} authorization {o};
create schema {v} authorization {o};
create schema {ident(schema_name(visible))} authorization {o};
grant usage on schema megamcp to {o}, {w};
grant execute on function megamcp.verified(boolean), megamcp.shown(anyelement), megamcp.failing_row(text[]) to {o};
grant execute on function megamcp.chain_with_base(), megamcp.chain(), megamcp.prf(bigint, bigint),
  megamcp.dear(bigint, bigint) to {o}, {w};
grant usage on sequence megamcp.stamp_seq to {o};
create function {s}."~kept"(what text) returns text language plpgsql immutable security definer
set search_path = pg_catalog, pg_temp set debug_print_plan = off
as $body$ begin return megamcp.kept({literal(state)}, what); end $body$;
revoke all on function {s}."~kept"(text) from public;
grant execute on function {s}."~kept"(text) to {o};
grant usage on schema {s} to {w};
grant usage, create on schema {v} to {w};
"""


def confined(state: str, visible: str, owner: str, view: str) -> str:
    """`s_<h>."~as owner"(sql)` and `v_<h>."~as view"(sql)`: run while loading, dropped by `released`."""
    parts: list[str] = []
    for role_, function, path in (
        (owner, _as_owner(state), "pg_catalog, pg_temp"),
        (view, _as_view(visible), f"{ident(visible)}, pg_catalog, pg_temp"),
    ):
        parts.append(
            f"set local role {ident(role_)};\n"
            f"create function {function}(_sql text) returns void language plpgsql volatile security definer\n"
            f"set search_path = {path} set check_function_bodies = on as $body$ begin execute _sql; end $body$;\n"
            f"revoke all on function {function}(text) from public;\n"
            "reset role;\n"
        )
    return "".join(parts)


def _as_owner(state: str) -> str:
    return f'{ident(state)}."~as owner"'


def _as_view(visible: str) -> str:
    return f'{ident(visible)}."~as view"'


async def as_owner(conn: Any, state: str, sql: str) -> None:
    """Runs statements as the owner of the hidden schema, who has no other right anywhere."""
    await conn.execute(f"select {_as_owner(state)}($1)", sql)


async def as_view(conn: Any, visible: str, sql: str) -> None:
    """Runs statements as the role of the views, with the environment's search path."""
    await conn.execute(f"select {_as_view(visible)}($1)", sql)


def released(state: str, visible: str, view: str) -> str:
    """After loading: nobody makes or runs anything as these roles but through the state's own functions."""
    return (
        f"drop function {_as_owner(state)}(text);\ndrop function {_as_view(visible)}(text);\n"
        f"revoke create on schema {ident(visible)} from {ident(view)};\n"
    )


def while_loading(state: str, view: str) -> str:
    """What the environment's SQL needs before `grants`."""
    shared = ('~draw"()', '~now"()', '~below"(numeric)', '~uuid"(bytea, int)')
    return "".join(f'grant execute on function {ident(state)}."{f} to {ident(view)};\n' for f in shared)


def to_owner(visible: str, catalog: Catalog, owner: str) -> str:
    """Run as the view role: triggers stand on the views, and cascades write through them."""
    return "".join(
        f"grant select, insert, update, delete, trigger on {ident(visible)}.{ident(table.name)} to {ident(owner)};\n"
        for table in catalog.tables
    )


def grants(state: str, visible: str, catalog: Catalog, roles: tuple[str, str, str, str]) -> str:
    """Rights of the four roles (owner, view, tool, query) of a loaded state."""
    s, v = ident(state), ident(visible)
    owner, view, tool, query = map(ident, roles)
    # Which views PostgreSQL updates by itself it says when somebody tries.
    names = [*(table.name for table in catalog.tables), *(made.name for made in catalog.remakes if made.kind == "view")]
    writable = ", ".join(f"{v}.{ident(name)}" for name in names)
    readable = ", ".join(f"{v}.{ident(name)}" for name in (*names, *(q.name for q in catalog.sequences)))
    reads = f"grant select on {readable} to {tool}, {query};" if readable else ""
    shared = f"{view}, {tool}, {query}"
    changes = f"grant insert, update, delete on {writable} to {tool};" if writable else ""
    return f"""
grant usage on schema {v}, megamcp to {tool}, {query};
revoke all on all functions in schema {s}, {v} from public;
grant execute on all functions in schema {v} to {owner}, {shared};
grant execute on function megamcp.chain_with_base(), megamcp.chain(), megamcp.prf(bigint, bigint),
  megamcp.dear(bigint, bigint) to {tool}, {query};
{reads}
{changes}
grant execute on function {s}."~draw"(), {s}."~now"(), {s}."~below"(numeric), {s}."~uuid"(bytea, int),
  {s}."~sequence"(text), {s}."~missing"(text), {s}."~unset"(text) to {shared};
""" + "".join(_sequence_grants(state, catalog, shared))


def _sequence_grants(state: str, catalog: Catalog, roles: str) -> list[str]:
    calls = [next_value(state, sequence.name) for sequence in catalog.sequences]
    calls += [
        f"{ident(state)}.{ident(hidden(sequence.name, 'set'))}(bigint, boolean)" for sequence in catalog.sequences
    ]
    calls += [shown_by(state, sequence.name) for sequence in catalog.sequences]
    return [f"grant execute on function {call} to {roles};\n" for call in calls]


def drop(name: str) -> str:
    """Drops a role of a state and what it may do in this database; one that another database still uses stays."""
    return f"""do $do$ begin
  drop owned by {ident(name)};
  drop role {ident(name)};
exception when undefined_object or dependent_objects_still_exist then null; end $do$;
"""
