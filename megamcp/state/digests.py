"""SQL of digests and diffs of a state.

Digest: each row is the first 128 bits of sha256(table, row in text form under fixed settings), rows add up modulo
2^128. A layer's part is what it made of the chain below it: + the rows it shows, − the rows it replaced. So the
parts of a chain sum to effective − base, undoing a change by hand gives back the old digest, and a row written again
unchanged adds nothing. Counters (sequences, clock, random position) are left out.
"""

from megamcp.state.catalog import Table
from megamcp.state.names import DELETED, LAYER, ROW, STAMP, ident, idents, literal
from megamcp.state.tables import base, delta, match

_SETTINGS = """set search_path = pg_catalog, pg_temp set datestyle = 'ISO, YMD' set timezone = 'UTC'
set intervalstyle = 'postgres' set extra_float_digits = 1 set bytea_output = 'hex' set xmloption = 'content' """


def _columns(table: Table, alias: str) -> str:
    return idents(table.names, alias)


def _hash(state: str, table: Table, alias: str) -> str:
    return f'{ident(state)}."~hash"({literal(table.name)} || chr(31) || row({_columns(table, alias)})::text)'


def below(state: str, table: str, names: tuple[str, ...], key: tuple[str, ...], row: str, layers: str, get: str) -> str:
    """Sub-select: the row with the key of `row` that the chain `layers` shows (no rows when it shows none).

    `get` is the select list over alias `_mm_x`. The base's row counts when no layer holds the key.
    """
    b, d = base(state, table), delta(state, table)
    listed = idents(names, "_mm_p")  # a function's variables may have the same names
    return f"""(select {get} from (
      select * from (
        (select {listed}, _mm_p.{DELETED} from {d} _mm_p
         where _mm_p.{LAYER} = any ({layers}) and {match("_mm_p", row, key)}
         order by _mm_p.{LAYER} desc limit 1)
        union all
        select {listed}, _mm_p.{DELETED} from {b} _mm_p where {match("_mm_p", row, key)}
      ) _mm_u limit 1) _mm_x where not _mm_x.{DELETED})"""


def freeze(state: str, tables: tuple[Table, ...]) -> str:
    """`s_<h>."~freeze"(below bigint[], head bigint)` → rows the head holds, its 128-bit part of the digest."""
    s = ident(state)
    steps = "".join(
        f"""
  select count(*) into _count from {delta(state, t.name)} d where d.{LAYER} = head;
  if _count > 0 then
    rows := rows + _count;
    select sum(case when d.{DELETED} then 0 else {_hash(state, t, "d")} end
               - coalesce({below(state, t.name, t.names, t.identity, "d", "below", _hash(state, t, "_mm_x"))}, 0))
    into _part from {delta(state, t.name)} d where d.{LAYER} = head;
    digest := digest + _part;
  end if;"""
        for t in tables
    )
    return f"""
create function {s}."~hash"(_row text) returns numeric
language plpgsql immutable set search_path = pg_catalog, pg_temp as $body$
declare
  _bytes bytea := substr(sha256(convert_to(_row, 'UTF8')), 1, 16);
  _high bigint := ('x' || encode(substr(_bytes, 1, 8), 'hex'))::bit(64)::bigint;
  _low bigint := ('x' || encode(substr(_bytes, 9, 8), 'hex'))::bit(64)::bigint;
begin
  return (case when _high < 0 then 18446744073709551616 else 0 end + _high) * 18446744073709551616
       + (case when _low < 0 then 18446744073709551616 else 0 end + _low);
end $body$;
create function {s}."~freeze"(below bigint[], head bigint, out rows bigint, out digest numeric)
language plpgsql volatile {_SETTINGS} as $body$
#variable_conflict use_variable
declare
  _count bigint;
  _part numeric;
begin
  select count(*) into rows from {s}."~counters" c where c.layer = head;
  digest := 0;{steps}
  digest := mod(mod(digest, 340282366920938463463374607431768211456) + 340282366920938463463374607431768211456,
                340282366920938463463374607431768211456);
end $body$;
"""


def diff(state: str, table: str, names: tuple[str, ...], key: tuple[str, ...], limit: int) -> str:
    """Query over ($1 chain a, $2 chain b, $3): before, after (JSON) of keys whose effective row differs, and the total.

    $3 is the last layer that both points have in common, 0 if there is none. What differs was written after it, so the
    newest row of its key, on one chain or the other, comes from a later layer. A squashed row says which it came from.
    """
    d = delta(state, table)
    listed = idents(key)
    before, after = (f"${n}::bigint[]" for n in (1, 2))

    def shown(chain: str, get: str) -> str:
        return below(state, table, names, key, "_mm_k", chain, get)

    changed = f"""_mm_k as (
  select distinct {listed} from {d} where {LAYER} = any (array(
    select layer from unnest($1::bigint[] || $2::bigint[]) u(layer) where layer > $3 group by layer having count(*) = 1
  )) and ({STAMP} >= 0 or -{STAMP} > $3)
)"""
    one = f"row_to_json(_mm_v)::text from (select {idents(names, '_mm_x')}) _mm_v"
    text = f"row({idents(names, '_mm_x')})::text"
    if key == (ROW,):
        sides = " union all ".join(
            f"select {count} as n, {shown(chain, f'array[{text}, (select {one})]')} as version from _mm_k"
            for chain, count in ((before, -1), (after, 1))
        )
        return f"""
with {changed}, _mm_c as materialized (
  select min(version[2]) as version, sum(n) as n from ({sides}) _mm_s where version is not null
  group by version[1] having sum(n) <> 0 order by version[1]
)
select case when n < 0 then version end as before, case when n > 0 then version end as after,
  (select sum(abs(n)) from _mm_c)::bigint as total
from _mm_c, generate_series(1, abs(n)) limit {limit}
"""
    same = f"{shown(before, text)} is distinct from {shown(after, text)}"
    return f"""
with {changed}, _mm_c as materialized (select {listed} from _mm_k where {same})
select {shown(before, f"(select {one})")} as before, {shown(after, f"(select {one})")} as after,
  (select count(*) from _mm_c) as total
from (select * from _mm_c order by {listed} limit {limit}) _mm_k
"""
