"""SQL of unique keys beside the probe itself: the error, and the second look at keys that are checked late.

As in PostgreSQL, a row whose deferrable key clashes when it is written is queued, and looked at again when its
constraint is due: at the end of the statement, at SET CONSTRAINTS … IMMEDIATE or at COMMIT. By then it may have gone or
changed.
"""

import postgast

from megamcp.state import probes
from megamcp.state.catalog import Catalog, Key, Table
from megamcp.state.expressions import over
from megamcp.state.names import DELETED, LAYER, body_quote, ident, idents, literal
from megamcp.state.tables import delta


def violation(visible: str, table: Table, code: str, message: str, detail: str, **place: str) -> str:
    """A RAISE with the fields PostgreSQL would set. `message` and `detail` are SQL expressions."""
    fields = "".join(f", {name} = {literal(value)}" for name, value in place.items())
    return (
        f"raise exception using errcode = {literal(code)}, message = {message}, detail = {detail},\n"
        f"      schema = {literal(visible)}, table = {literal(table.name)}{fields};"
    )


def refused(visible: str, table: Table, key: Key, record: str) -> str:
    """The error of a duplicate, as PostgreSQL words it."""
    text = literal(f'duplicate key value violates unique constraint "{key.name}"')
    return violation(visible, table, "23505", text, _detail(visible, table, key, record), constraint=key.name)


def _detail(visible: str, table: Table, key: Key, record: str) -> str:
    """SQL expression: `Key (a, lower(b))=(1, x) already exists.`"""
    names: list[str] = []
    values: list[str] = []
    for item, column in zip(key.items, key.columns, strict=True):
        names.append(_as_needed(column) if column else item.replace(f"{visible}.", ""))
        value = f"{record}.{ident(column)}" if column else f"({over(item, table.names, record)})"
        values.append(f"coalesce(megamcp.shown({value}), 'null')")
    head = literal(f"Key ({', '.join(names)})=(")
    shown = " || ', ' || ".join(values)
    return f"{head} || {shown} || {literal(') already exists.')}"


def _as_needed(name: str) -> str:
    """Quoted where PostgreSQL would: it is a keyword, or not in lower case."""
    deparsed: str = postgast.deparse(postgast.parse(f"select {ident(name)}"))
    return deparsed.removeprefix("SELECT ").strip()


def late_keys(catalog: Catalog) -> list[tuple[Table, Key]]:
    return [(table, key) for table in catalog.tables for key in table.keys if key.deferrable]


def event_function(state: str, visible: str, table: Table, key: Key) -> str:
    """`s_<h>."~event <n>"` of a key: the row that was queued, as it is now, against all others."""
    d = delta(state, table.name)
    body = f"""#variable_conflict use_column
declare
  _mm_bound text := megamcp.verified(true);
  _mm_chain bigint[] := split_part(_mm_bound, '|', 1)::bigint[];
  _mm_head bigint := split_part(_mm_bound, '|', 2)::bigint;
  _c {ident(visible)}.{ident(table.name)}%rowtype;
begin
  _c := _after;
  select {idents(table.names, "_mm_d")} into _c from {d} _mm_d
  where _mm_d.{LAYER} = _mm_head and not _mm_d.{DELETED} and {probes.is_row(table, "_mm_d", "_c")};
  if found and {probes.clash(state, table, key, "_c", other=True)} then
    {refused(visible, table, key, "_c")}
  end if;
end"""
    return (
        f'create function {ident(state)}."~event {key.number}"(_event "char", _before text, _after text, '
        f"_mm_this bigint) returns void language plpgsql volatile security definer\n"
        f"set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan as {body_quote(body)};\n"
    )
