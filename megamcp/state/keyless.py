"""SQL that finds a row by its content, where no key tells rows apart (`Table.row`).

A view's trigger knows of an old row only what the view shows. Rows that show the same are as good as each other, so
the trigger takes one that its statement has not yet written: it has no stamp of the statement, and a row that the
statement is still to meet has none either. "The same" is the row's text, found by an index over a hash.

Rows are looked up some hundred at a time and handed out one by one from a transaction-local setting: one search a row
would pass all the rows written before, again and again, where thousands look alike. A tool that sets the setting
itself harms the rows of its own rollout only.
"""

from megamcp.state.catalog import Table
from megamcp.state.names import DELETED, LAYER, ROW, STAMP, body_quote, hidden, ident, idents
from megamcp.state.tables import base, content_hash, delta, match

BATCH = 500
_SLOTS = 16  # searches of different contents that are kept apart, a table


def find(state: str, table: Table) -> str:
    """In a trigger: `_mm_this` becomes the hidden column of a row like OLD that is still as the statement found it."""
    return f"  select _mm_f into _mm_this from {_call(state, table, 'old', 'true')} _mm_f where _mm_f is not null;\n"


def untouched(state: str, table: Table, record: str) -> str:
    """True when there is one; it is not taken."""
    return f"{_call(state, table, record, 'false')} is not null"


def _call(state: str, table: Table, record: str, take: str) -> str:
    return f"{ident(state)}.{ident(hidden(table.name, 'find'))}({record}, _mm_chain, _mm_statement, {take})"


def _same(table: Table, alias: str) -> str:
    text = f"row({idents(table.names, alias)})::text = _mm_text"
    return f"{content_hash(table, alias)} = _mm_hash and {text}" if table.hashed else text


def create(state: str, visible: str, table: Table) -> str:
    b, d = base(state, table.name), delta(state, table.name)

    def newer(row: str, condition: str) -> str:
        # Not NOT EXISTS: the planner would join, and read all of the chain's rows for one.
        found = f"_mm_n.{LAYER} = any (_mm_chain) and {match('_mm_n', row, (ROW,))}{condition}"
        return f"(select true from {d} _mm_n where {found} limit 1) is null"

    body = f"""#variable_conflict use_column
declare
  _mm_text text := _mm_old::text;
  _mm_hash bigint := {content_hash(table, "_mm_old")};
  _mm_setting text := 'megamcp.r{table.number}_' || (_mm_hash & {_SLOTS - 1});
  _mm_mark text := md5(_mm_statement || ':' || _mm_hash || ':' || _mm_text);
  _mm_kept text := current_setting(_mm_setting, true);
  _mm_done text;
begin
  if left(_mm_kept, 32) is distinct from _mm_mark or length(_mm_kept) = 32 then
    select _mm_mark || string_agg(_mm_x.{ROW} || ',', '') into _mm_kept from (
      select _mm_b.{ROW} from {b} _mm_b where {_same(table, "_mm_b")} and {newer("_mm_b", "")}
      union all
      select _mm_d.{ROW} from {d} _mm_d
      where _mm_d.{LAYER} = any (_mm_chain) and not _mm_d.{DELETED} and _mm_d.{STAMP} <> _mm_statement
        and {_same(table, "_mm_d")} and {newer("_mm_d", f" and _mm_n.{LAYER} > _mm_d.{LAYER}")}
      limit {BATCH}) _mm_x;
    if _mm_kept is null then
      return null;
    end if;
  end if;
  _mm_text := substr(split_part(_mm_kept, ',', 1), 33);
  if _mm_take then
    _mm_kept := overlay(_mm_kept placing '' from 33 for length(_mm_text) + 1);
  end if;
  _mm_done := set_config(_mm_setting, _mm_kept, true);
  return _mm_text::bigint;
end"""
    old = f"{ident(visible)}.{ident(table.name)}"
    return (
        f"create function {ident(state)}.{ident(hidden(table.name, 'find'))}"
        f"(_mm_old {old}, _mm_chain bigint[], _mm_statement bigint, _mm_take boolean)\n"
        "returns bigint language plpgsql volatile "
        "set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan\n"
        f"set extra_float_digits = 1 as {body_quote(body)};\n"
    )
