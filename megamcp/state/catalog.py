"""What PostgreSQL made of an environment's DDL, read back from pg_catalog into frozen records.

Texts (types, expressions, view bodies) are read with an empty search path, so every name in them that is not a
built-in carries its schema. This module only reads; `refuse` judges and `tables`, `views`, `triggers` generate.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    not_null: bool
    default: str | None  # expression, None for generated columns
    generated: str | None  # expression of a generated column
    identity: str  # "", "a" (ALWAYS) or "d" (BY DEFAULT)
    sequence: str | None  # the sequence that an identity column draws from
    collation: str | None  # quoted, only where it differs from the type's
    equal_class: str | None = None  # operator class for a key-led index, where there is one for the base type


@dataclass(frozen=True, slots=True)
class Key:
    """PRIMARY KEY, UNIQUE constraint or unique index over plain columns. Order of keys = PostgreSQL's checks."""

    name: str
    columns: tuple[str, ...]
    primary: bool
    nulls_equal: bool = False  # NULLS NOT DISTINCT


@dataclass(frozen=True, slots=True)
class Index:
    """A non-unique index: `items` are column or expression texts with operator class, collation and direction."""

    name: str
    method: str
    items: tuple[str, ...]
    include: tuple[str, ...]
    predicate: str | None
    columns: tuple[str, ...]  # leading plain columns


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    expression: str


@dataclass(frozen=True, slots=True)
class ForeignKey:
    number: int  # order of creation = order in which PostgreSQL fires the actions of one row
    name: str
    table: str
    columns: tuple[str, ...]
    parent: str
    parent_columns: tuple[str, ...]
    on_update: str  # a NO ACTION, r RESTRICT, c CASCADE, n SET NULL, d SET DEFAULT
    on_delete: str
    set_columns: tuple[str, ...]  # columns named by ON DELETE SET NULL/DEFAULT (…), else all


@dataclass(frozen=True, slots=True)
class Table:
    number: int
    name: str
    columns: tuple[Column, ...]
    keys: tuple[Key, ...]
    checks: tuple[Check, ...]
    indexes: tuple[Index, ...]

    @property
    def primary(self) -> tuple[str, ...]:
        return next(key.columns for key in self.keys if key.primary)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


@dataclass(frozen=True, slots=True)
class Sequence:
    number: int
    name: str
    start: int
    increment: int
    minimum: int
    maximum: int
    cycle: bool
    last: int  # value handed out last (start - increment before the first)


@dataclass(frozen=True, slots=True)
class Remake:
    """A view or SQL function of the environment that is dropped with the tables and made again over the views."""

    oid: int
    kind: str  # "view" or "function"
    name: str
    definition: str


@dataclass(frozen=True, slots=True)
class Catalog:
    tables: tuple[Table, ...]
    foreign_keys: tuple[ForeignKey, ...]
    sequences: tuple[Sequence, ...]
    remakes: tuple[Remake, ...]

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)


_COLUMNS = """
select c.relname, a.attname, format_type(a.atttypid, a.atttypmod) as type, a.attnotnull, a.attidentity::text as identity,
       a.attgenerated::text as generated, pg_get_expr(d.adbin, d.adrelid) as expression,
       (select 'megamcp.' || o.opcname from pg_opclass o where o.opcnamespace = 'megamcp'::regnamespace and o.opcname = case b.typname
          when 'varchar' then 'text' else b.typname end || '_equal') as equal_class,
       case when a.attcollation <> t.typcollation then quote_ident(cn.nspname) || '.' || quote_ident(co.collname) end as collation,
       (select s.relname from pg_depend p join pg_class s on s.oid = p.objid and s.relkind = 'S'
        where p.refobjid = c.oid and p.refobjsubid = a.attnum and p.deptype = 'i' and p.classid = 'pg_class'::regclass limit 1) as sequence
from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
join pg_type t on t.oid = a.atttypid join pg_type b on b.oid = coalesce(nullif(t.typbasetype, 0), t.oid)
left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
left join pg_collation co on co.oid = a.attcollation left join pg_namespace cn on cn.oid = co.collnamespace
where c.relnamespace = $1::text::regnamespace and c.relkind = 'r' order by c.oid, a.attnum
"""
_INDEXES = """
select c.relname as table, i.relname as name, x.indisunique, x.indisprimary, x.indnullsnotdistinct, am.amname as method,
       pg_get_expr(x.indpred, x.indrelid) as predicate, x.indnkeyatts,
       array(select pg_get_indexdef(x.indexrelid, n, true) from generate_series(1, x.indnatts) n) as items,
       array(select case when o.opcdefault then '' else quote_ident(n.nspname) || '.' || quote_ident(o.opcname) end
             from unnest(x.indclass::oid[]) with ordinality u(id, n2) join pg_opclass o on o.oid = u.id
             join pg_namespace n on n.oid = o.opcnamespace order by n2) as opclasses,
       x.indoption::int2[] as options,
       array(select coalesce(a.attname, '') from unnest(x.indkey::int2[]) with ordinality k(attnum, n)
             left join pg_attribute a on a.attrelid = x.indrelid and a.attnum = k.attnum and k.attnum > 0 order by n) as columns
from pg_index x join pg_class i on i.oid = x.indexrelid join pg_class c on c.oid = x.indrelid join pg_am am on am.oid = i.relam
where c.relnamespace = $1::text::regnamespace and c.relkind = 'r' order by x.indexrelid
"""
_CHECKS = """
select c.relname as table, n.conname as name, pg_get_expr(n.conbin, n.conrelid) as expression
from pg_constraint n join pg_class c on c.oid = n.conrelid
where c.relnamespace = $1::text::regnamespace and n.contype = 'c' order by n.conname collate "C"
"""
_FOREIGN_KEYS = """
select n.conname as name, c.relname as table, p.relname as parent, n.confupdtype::text as on_update, n.confdeltype::text as on_delete,
  array(select a.attname from unnest(n.conkey) with ordinality k(num, o) join pg_attribute a on a.attrelid = n.conrelid and a.attnum = k.num order by o) as columns,
  array(select a.attname from unnest(n.confkey) with ordinality k(num, o) join pg_attribute a on a.attrelid = n.confrelid and a.attnum = k.num order by o) as parent_columns,
  array(select a.attname from unnest(n.confdelsetcols) with ordinality k(num, o) join pg_attribute a on a.attrelid = n.conrelid and a.attnum = k.num order by o) as set_columns
from pg_constraint n join pg_class c on c.oid = n.conrelid join pg_class p on p.oid = n.confrelid
where c.relnamespace = $1::text::regnamespace and n.contype = 'f' order by n.oid
"""
_SEQUENCES = """
select c.relname as name, s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcycle
from pg_sequence s join pg_class c on c.oid = s.seqrelid where c.relnamespace = $1::text::regnamespace order by c.oid
"""
_REMAKES = """
select c.oid::bigint as oid, 'view' as kind, c.relname::text as name,
  format('create view %I.%I (%s) %s as %s', n.nspname, c.relname,
    (select string_agg(quote_ident(a.attname), ', ' order by a.attnum) from pg_attribute a where a.attrelid = c.oid and a.attnum > 0),
    case when c.reloptions is null then '' else 'with (' || array_to_string(c.reloptions, ', ') || ')' end,
    rtrim(pg_get_viewdef(c.oid), ';')) as definition
from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = $1::text and c.relkind = 'v'
union all
select p.oid::bigint, 'function', p.oid::regprocedure::text, pg_get_functiondef(p.oid)
from pg_proc p where p.pronamespace = $1::text::regnamespace and p.prokind = 'f' and not (p.oid = any ($2::oid[]))
order by 1
"""


def _index_item(row: Any, n: int) -> str:
    item: str = row["items"][n]
    if row["opclasses"][n]:
        item += " " + row["opclasses"][n]
    if row["method"] == "btree":
        option = row["options"][n]
        item += " desc" if option & 1 else ""
        item += " nulls first" if option & 2 else " nulls last"
    return item


async def read(conn: Any, schema: str, ours: list[int]) -> Catalog:
    """Reads the tables, keys, sequences, views and functions of `schema`; `ours` are functions to leave out."""
    columns: dict[str, list[Column]] = {}
    for row in await conn.fetch(_COLUMNS, schema):
        generated = row["expression"] if row["generated"] else None
        columns.setdefault(row["relname"], []).append(
            Column(
                name=row["attname"],
                type=row["type"],
                not_null=row["attnotnull"],
                default=None if generated else row["expression"],
                generated=generated,
                identity=row["identity"],
                sequence=row["sequence"] if row["identity"] else None,
                collation=row["collation"],
                equal_class=row["equal_class"],
            )
        )
    keys: dict[str, list[Key]] = {}
    indexes: dict[str, list[Index]] = {}
    for row in await conn.fetch(_INDEXES, schema):
        size, names = row["indnkeyatts"], list(row["columns"])
        if row["indisunique"]:
            keys.setdefault(row["table"], []).append(
                Key(row["name"], tuple(names[:size]), row["indisprimary"], row["indnullsnotdistinct"])
            )
            continue
        leading: list[str] = []
        for name in names[:size]:
            if not name:
                break
            leading.append(name)
        indexes.setdefault(row["table"], []).append(
            Index(
                name=row["name"],
                method=row["method"],
                items=tuple(_index_item(row, n) for n in range(size)),
                include=tuple(names[size:]),
                predicate=row["predicate"],
                columns=tuple(leading),
            )
        )
    checks: dict[str, list[Check]] = {}
    for row in await conn.fetch(_CHECKS, schema):
        checks.setdefault(row["table"], []).append(Check(row["name"], row["expression"]))
    tables = tuple(
        Table(
            number=number,
            name=name,
            columns=tuple(found),
            keys=tuple(keys.get(name, ())),
            checks=tuple(checks.get(name, ())),
            indexes=tuple(indexes.get(name, ())),
        )
        for number, (name, found) in enumerate(columns.items(), 1)
    )
    return Catalog(
        tables=tables,
        foreign_keys=tuple(
            ForeignKey(
                number=number,
                name=row["name"],
                table=row["table"],
                columns=tuple(row["columns"]),
                parent=row["parent"],
                parent_columns=tuple(row["parent_columns"]),
                on_update=row["on_update"],
                on_delete=row["on_delete"],
                set_columns=tuple(row["set_columns"]),
            )
            for number, row in enumerate(await conn.fetch(_FOREIGN_KEYS, schema), 1)
        ),
        sequences=await _sequences(conn, schema),
        remakes=tuple(Remake(**dict(row)) for row in await conn.fetch(_REMAKES, schema, ours)),
    )


async def _sequences(conn: Any, schema: str) -> tuple[Sequence, ...]:
    found: list[Sequence] = []
    for number, row in enumerate(await conn.fetch(_SEQUENCES, schema), 1):
        name = '"' + row["name"].replace('"', '""') + '"'
        last, called = await conn.fetchrow(f'select last_value, is_called from "{schema}".{name}')
        found.append(
            Sequence(
                number=number,
                name=row["name"],
                start=row["seqstart"],
                increment=row["seqincrement"],
                minimum=row["seqmin"],
                maximum=row["seqmax"],
                cycle=row["seqcycle"],
                last=last if called else last - row["seqincrement"],
            )
        )
    return tuple(found)
