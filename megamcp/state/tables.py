"""SQL of the hidden tables of a state: one partitioned table, its base and delta, their indexes, the policy.

Base holds layer 0 and never changes after load; delta holds every rollout's rows. Every delta index that an
ORDER BY may take is led by the layer: led by the key, the rows of other rollouts cost a hundred times. Constraints
are not declared here, the triggers check them: a delta row need not satisfy what its chain doesn't show (a
tombstone, an older row). A delta row names the layer of the version it replaces, so that visibility is equality.
Squashing must remap _mm_over: when layers of a chain become one, rows above that name one of them must name the new
one, and the new layer's rows what the oldest of theirs replaced. What was measured about all this: docs/log.md.

Rows are told apart by a key (`Table.identity`): the primary key, or one of NOT NULL columns, that is checked at once.
A table without such a key has the hidden column _mm_row, a number drawn once a row that all of its versions carry; an
index over a hash of the visible columns finds a row by its content. Whoever copies versions copies _mm_row with them.
"""

from collections.abc import Iterable

from megamcp.state.catalog import Catalog, Column, Index, Table
from megamcp.state.names import DELETED, LAYER, OVER, ROW, STAMP, hidden, ident, idents

CHAIN = "(select megamcp.chain_with_base())::bigint[]"
WRITTEN = "(select megamcp.chain())::bigint[]"  # without base: what a delta may hold
# A delta is a queue of layers: they come at its end and go in batches, everywhere. So vacuum comes after a twentieth,
# also of rows that were only added (index-only scans want pages known to be visible); with five times the usual budget,
# which keeps up with a batch of dead rows a second; and it never truncates, for that locks readers out of the table.
VACUUM = """autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.05,
  autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_limit = 1000, vacuum_truncate = off"""
BALLAST = 4_000
ROWS_PER_LAYER = 400  # as the planner is told; megamcp.dear() is priced by it


def parent(state: str, table: str) -> str:
    return f"{ident(state)}.{ident(table)}"


def base(state: str, table: str) -> str:
    return f"{ident(state)}.{ident(hidden(table, 'base'))}"


def delta(state: str, table: str) -> str:
    return f"{ident(state)}.{ident(hidden(table, 'delta'))}"


def match(left: str, right: str, columns: tuple[str, ...]) -> str:
    return " and ".join(f"{left}.{ident(c)} = {right}.{ident(c)}" for c in columns)


def _column(column: Column) -> str:
    collation = f" collate {column.collation}" if column.collation else ""
    return f"{ident(column.name)} {column.type}{collation}"


def create(state: str, visible: str, table: Table) -> str:
    """Tables and the base's rows, copied from the loaded table in `visible`.

    What every scan filters by comes first: a row is unpacked only as far as it is needed. What only delta rows need
    is added when the base has its rows: they then take no room there, a missing column reads as its default.
    The planner is told how many rows a layer holds, many: it sizes a hash of a rollout's rows by that, a roomy one
    finds sooner that a key is not in it, and plans don't turn with what other rollouts do.
    """
    columns = ",\n  ".join(_column(c) for c in table.columns)
    names = idents(table.names)
    row = (f"{ROW} bigint,", f", {ROW}", ", nextval('megamcp.stamp_seq')") if table.row else [""] * 3
    p, b, d = (f(state, table.name) for f in (parent, base, delta))
    return f"""
create table {p} (
  {LAYER} bigint not null, {DELETED} boolean not null default false, {row[0]}
  {columns}
) partition by list ({LAYER});
create table {b} partition of {p} for values in (0);
insert into {b} ({names}, {LAYER}{row[1]}) select {names}, 0{row[2]} from {ident(visible)}.{ident(table.name)};
alter table {p} add {STAMP} bigint not null default 0, add {OVER} bigint not null default -1;
create table {d} partition of {p} default with (fillfactor = 90, {VACUUM});
alter table {d} alter {LAYER} set (n_distinct = {-1 / ROWS_PER_LAYER});
"""


def ballast(state: str, table: Table) -> str:
    """Rows of layers that no chain holds, so that the delta never looks empty to the planner.

    A plan made on an empty table scans it from end to end, and a cached one goes on doing so while the table fills.
    A table with a domain that forbids null, or an index over an expression that fails on it, has none.
    """
    d = delta(state, table.name)
    return f"""do $do$ begin
  insert into {d} ({LAYER}, {DELETED}) select -1 - n % 4, true from generate_series(1, {BALLAST}) n;
exception when others then null;
end $do$;
"""


def indexes(state: str, catalog: Catalog, table: Table) -> str:
    """Base: the environment's own indexes and one for each foreign key. Delta: the same, and one led by the layer.

    The delta's index for a key, a foreign key or one column is led by that and ends with the layer, where `state.sql`
    has operator classes for it: with 40 layers a probe in it costs 2 µs, in one led by the layer 15 µs. No ORDER BY can
    take it, so it never wades through other rollouts' rows. There is no second index for the same condition: between
    equal costs the planner often takes the dearer one.
    """
    b, d = base(state, table.name), delta(state, table.name)
    made: dict[str, None] = {}
    led: set[tuple[str, ...]] = set()
    if table.row:
        made[_index(b, [ROW], unique="unique ")] = None
        made |= dict.fromkeys(_key(d, table, (ROW,), identifies=True))
        made |= dict.fromkeys(_content(state, table))
    for key in table.keys:
        nulls = " nulls not distinct" if key.nulls_equal else ""
        rows = f" where {key.predicate}" if key.predicate else ""
        made[f"create unique index on {b} ({', '.join(key.items)}){nulls}{rows};"] = None
        if key.plain:
            made |= dict.fromkeys(_key(d, table, key.columns, identifies=key.identifies))
            led.add(key.columns)
        else:
            made[_index(d, [LAYER, *key.items]).removesuffix(";") + f"{rows};"] = None
    for index in table.indexes:
        tail = f" include ({idents(index.include)})" if index.include else ""
        tail += f" where {index.predicate}" if index.predicate else ""
        made[f"create index on {b} using {index.method} ({', '.join(index.items)}){tail};"] = None
        plain = index.method == "btree" and index.predicate is None
        if plain and _is_column(index) and (items := _led_by_key(table, index.columns)):
            made[_index(d, items)] = None
        elif index.method == "btree":  # others can't hold the layer; a chain's rows are found by it anyway
            made[_index(d, [LAYER, *index.items]).removesuffix(";") + f"{tail};"] = None
        if plain:
            led.add(index.columns)
    for wanted in dict.fromkeys(f.columns for f in catalog.foreign_keys if f.table == table.name):
        found = any(have[: len(wanted)] == wanted for have in led)
        items = _led_by_key(table, wanted)
        if not found:
            made[f"create index on {b} ({idents(wanted)});"] = None
        if items and all(wanted != key.columns for key in table.keys if key.plain):
            made[_index(d, items)] = None
        elif not found:
            made[_index(d, [LAYER, *map(ident, wanted)])] = None
        led.add(wanted)
    return "\n".join(made) + "\n"


def _index(table: str, items: Iterable[str], include: Iterable[str] = (), unique: str = "") -> str:
    held = ", ".join(include)
    return f"create {unique}index on {table} ({', '.join(items)}){f' include ({held})' if held else ''};"


def _key(d: str, table: Table, columns: tuple[str, ...], *, identifies: bool) -> list[str]:
    """A key's indexes on the delta. Those of the key that tells rows apart hold all that the policy asks of a row."""
    unique, over = ("unique ", [OVER]) if identifies else ("", [])
    items = _led_by_key(table, columns)
    if not items:
        return [_index(d, [LAYER, *map(ident, columns)], over, unique)]
    first, rest = [ident(columns[0])], [ident(name) for name in columns[1:]]
    made = [_index(d, items, over, unique)]
    if identifies:
        made.append(_index(d, [LAYER, *first], rest + over) if rest else _index(d, [LAYER], first + over))
    elif rest:
        made.append(_index(d, [LAYER, *first]))
    return made


def content_hash(table: Table, alias: str) -> str:
    """A number that equal rows share, for the index that finds a row by its content."""
    return f"hash_record_extended(row({idents(table.hashed, alias)}), 0)" if table.hashed else "0::bigint"


def _content(state: str, table: Table) -> list[str]:
    """Indexes that find a row by what a tool sees of it, in a base and a delta where many rows may look alike.

    Without statistics: the ballast's rows are all alike, and the planner would think the same of the others.
    """
    if not table.row or not table.hashed:
        return []
    value, equal = content_hash(table, ""), table.row.equal_class
    on_delta = [f"({value}) {equal}", LAYER] if equal else [LAYER, f"({value})"]
    made: list[str] = []
    for of, items in ((base, [f"({value})"]), (delta, on_delta)):
        name = hidden(table.name, f"content {of.__name__}")
        made.append(f"create index {ident(name)} on {of(state, table.name)} ({', '.join(items)});")
        column = next(n for n, item in enumerate(items, 1) if item != LAYER)
        made.append(f"alter index {ident(state)}.{ident(name)} alter column {column} set statistics 0;")
    return made


def _led_by_key(table: Table, columns: tuple[str, ...]) -> list[str]:
    """Items of an index led by these columns; empty when one of them has no operator class for it."""
    classes = {column.name: column.equal_class for column in (*table.columns, *((table.row,) if table.row else ()))}
    if not all(classes[name] for name in columns):
        return []
    return [*(f"{ident(name)} {classes[name]}" for name in columns), LAYER]


def _is_column(index: Index) -> bool:
    """One column in its type's own order, without a collation or operator class of the index's own."""
    if len(index.items) != 1 or len(index.columns) != 1 or index.include:
        return False
    name = index.columns[0]
    orders = ("", " desc", " nulls first", " nulls last", " desc nulls first", " desc nulls last")
    return index.items[0] in {f"{text}{order}" for text in (name, ident(name)) for order in orders}


def policy(state: str, table: Table, view_role: str) -> str:
    """What a chain sees of the table: the rows of its layers that no other row of the chain replaces.

    Equality alone, so that the planner may hash the replaced rows for a scan and probe the index for a few. NOT EXISTS
    would be taken to keep half the rows, IS NOT NULL nearly all, which is what it does: joins and groups are planned
    for the numbers that come.
    """
    p, d = parent(state, table.name), delta(state, table.name)
    row = ident(table.name)
    return f"""
alter table {p} enable row level security;
create policy "~chain" on {p} for select to {ident(view_role)} using (
  {LAYER} = any ({CHAIN}) and not {DELETED} and (case when exists (
    select from {d} _mm_n where _mm_n.{LAYER} = any ({WRITTEN}) and {match("_mm_n", row, table.identity)}
    and _mm_n.{OVER} = {row}.{LAYER} and megamcp.dear(_mm_n.{LAYER}, 1)) then null else true end) is not null
);
grant select on {p}, {d} to {ident(view_role)};
"""
