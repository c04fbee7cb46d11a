"""SQL of the hidden tables of a state: one partitioned table, its base and delta, their indexes, the policy.

Base holds layer 0 and never changes after load; delta holds every rollout's rows. Every delta index that an
ORDER BY may take is led by the layer: led by the key, the rows of other rollouts cost a hundred times. Constraints
are not declared here, the triggers check them: a delta row need not satisfy what its chain doesn't show (a
tombstone, an older row). A delta row names the layer of the version it replaces, so that visibility is equality.
"""

from megamcp.state.catalog import Catalog, Column, Index, Table
from megamcp.state.names import DELETED, LAYER, OVER, STAMP, hidden, ident, idents

CHAIN = "(select megamcp.chain_with_base())::bigint[]"
VIEW_ROLE = "megamcp_view"
BALLAST = 4_000


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

    What every scan filters by comes first: a row is unpacked only as far as it is needed.
    """
    columns = ",\n  ".join(_column(c) for c in table.columns)
    names = idents(table.names)
    p, b, d = (f(state, table.name) for f in (parent, base, delta))
    return f"""
create table {p} (
  {LAYER} bigint not null, {DELETED} boolean not null default false,
  {columns},
  {STAMP} bigint not null default 0, {OVER} bigint not null default -1
) partition by list ({LAYER});
create table {b} partition of {p} for values in (0);
create table {d} partition of {p} default with (fillfactor = 90, autovacuum_analyze_scale_factor = 0.05,
  autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.05);
insert into {b} ({names}, {LAYER}) select {names}, 0 from {ident(visible)}.{ident(table.name)};
"""


def ballast(state: str, table: Table) -> str:
    """Rows of layers that no chain holds, so that the delta never looks empty to the planner.

    A plan made on an empty table scans it from end to end, and a cached one goes on doing so while the table fills.
    Few layers with many rows, since the planner should expect a rollout to own many.
    A table with a domain that forbids null has none.
    """
    d = delta(state, table.name)
    return f"""do $do$ begin
  insert into {d} ({LAYER}, {DELETED}) select -1 - n % 4, true from generate_series(1, {BALLAST}) n;
exception when not_null_violation or check_violation then null;
end $do$;
"""


def indexes(state: str, catalog: Catalog, table: Table) -> str:
    """Base: the environment's own indexes and one for each foreign key. Delta: the same, led by the layer.

    Keys and foreign keys get an index led by the key besides, where `state.sql` has operator classes for it: with 40
    layers a probe in it costs 1.6 µs, in one led by the layer 19 µs. No ORDER BY can take it, so it never wades
    through other rollouts' rows.
    """
    b, d = base(state, table.name), delta(state, table.name)
    parts: list[str] = []
    led: set[tuple[str, ...]] = set()
    for key in table.keys:
        unique = "unique " if key.primary else ""
        nulls = " nulls not distinct" if key.nulls_equal else ""
        parts.append(f"create unique index on {b} ({idents(key.columns)}){nulls};")
        include = f" include ({OVER})" if key.primary else ""
        parts.append(f"create {unique}index on {d} ({LAYER}, {idents(key.columns)}){include};")
        led.add(key.columns)
    for index in table.indexes:
        parts.extend(_plain_index(b, d, index))
        if index.predicate is None and index.method == "btree":
            led.add(index.columns)
    foreign = [f.columns for f in catalog.foreign_keys if f.table == table.name]
    for wanted in foreign:
        if not any(have[: len(wanted)] == wanted for have in led):
            parts.append(f"create index on {b} ({idents(wanted)});")
            if not _key_led(d, table, wanted):
                parts.append(f"create index on {d} ({LAYER}, {idents(wanted)});")
            led.add(wanted)
    # Last, so that they are the newest: between equal costs the planner takes the newest index.
    for columns in dict.fromkeys([*(key.columns for key in table.keys), *foreign]):
        parts.extend(_key_led(d, table, columns, OVER if columns == table.primary else None))
    return "\n".join(parts) + "\n"


def _key_led(d: str, table: Table, columns: tuple[str, ...], include: str | None = None) -> list[str]:
    classes = {column.name: column.equal_class for column in table.columns}
    if not all(classes[name] for name in columns):
        return []
    items = ", ".join(f"{ident(name)} {classes[name]}" for name in columns)
    tail = f" include ({include})" if include else ""
    return [f"create index on {d} ({items}, {LAYER}){tail};"]


def _plain_index(b: str, d: str, index: Index) -> list[str]:
    items = ", ".join(index.items)
    tail = f" include ({idents(index.include)})" if index.include else ""
    tail += f" where {index.predicate}" if index.predicate else ""
    made = [f"create index on {b} using {index.method} ({items}){tail};"]
    if index.method == "btree":  # others can't be led by the layer; delta rows of a chain are found by (layer, key)
        made.append(f"create index on {d} ({LAYER}, {items}){tail};")
    return made


def policy(state: str, table: Table) -> str:
    """What a chain sees of the table: the rows of its layers that no other row of the chain replaces.

    Equality alone, so that the planner may hash the replaced rows for a scan and probe the index for a few.
    """
    p, d = parent(state, table.name), delta(state, table.name)
    row = ident(table.name)
    return f"""
alter table {p} enable row level security;
create policy "~chain" on {p} for select to {VIEW_ROLE} using (
  {LAYER} = any ({CHAIN}) and not {DELETED} and not exists (
    select from {d} _mm_n where _mm_n.{LAYER} = any ({CHAIN}) and {match("_mm_n", row, table.primary)}
    and _mm_n.{OVER} = {row}.{LAYER} and megamcp.dear(_mm_n.{LAYER}, 1))
);
grant select on {p}, {d} to {VIEW_ROLE};
"""
