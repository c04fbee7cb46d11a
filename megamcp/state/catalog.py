"""What PostgreSQL made of an environment's DDL, read back from pg_catalog into frozen records.

Texts (types, expressions, view bodies) are read with an empty search path, so every name in them that is not a
built-in carries its schema. This module only reads; `refuse` judges and `tables`, `views`, `triggers` generate.
"""

from dataclasses import dataclass, replace
from typing import Any

import asyncpg

from megamcp.state.expressions import mentions
from megamcp.state.names import ROW, ident
from megamcp.state.queries import named


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
    base_type: str | None = None  # below all domains
    virtual: bool = False  # generated when it is read


@dataclass(frozen=True, slots=True)
class Key:
    """PRIMARY KEY, UNIQUE constraint or unique index. Order of keys = PostgreSQL's checks."""

    name: str
    items: tuple[str, ...]  # quoted columns or expressions
    columns: tuple[str, ...]  # names; "" for an expression
    reads: tuple[str, ...]  # columns that items and predicate depend on
    identifies: bool  # its columns are what tells rows apart
    nulls_equal: bool = False  # NULLS NOT DISTINCT
    predicate: str | None = None
    deferrable: bool = False
    deferred: bool = False  # INITIALLY DEFERRED
    primary: bool = False
    constraint: bool = False  # not an index only
    number: int = 0  # of its events, among those of foreign keys

    @property
    def plain(self) -> bool:
        """Over columns alone, of all rows."""
        return all(self.columns) and self.predicate is None


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
    match_full: bool = False
    deferrable: bool = False
    deferred: bool = False  # INITIALLY DEFERRED


@dataclass(frozen=True, slots=True)
class Table:
    number: int
    name: str
    columns: tuple[Column, ...]
    keys: tuple[Key, ...]
    checks: tuple[Check, ...]
    indexes: tuple[Index, ...]
    row: Column | None = None  # the hidden column that tells rows apart, where no key does
    hashed: tuple[str, ...] = ()  # with `row`: columns whose types have a hash function

    @property
    def identity(self) -> tuple[str, ...]:
        """Columns that tell rows apart: of a key, or the hidden one."""
        if self.row:
            return (self.row.name,)
        return next(key.columns for key in self.keys if key.identifies)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that a tool sees."""
        return tuple(column.name for column in self.columns)

    @property
    def stored(self) -> tuple[str, ...]:
        """`names` and the hidden column of `row`: what a version of a row consists of."""
        return (*self.names, self.row.name) if self.row else self.names


@dataclass(frozen=True, slots=True)
class Sequence:
    number: int
    name: str
    start: int
    increment: int
    minimum: int
    maximum: int
    cycle: bool
    last: int  # value handed out last; where the next one was set, that less the increment
    called: bool  # `last` was really handed out
    owner: str | None = None  # table whose column owns it
    owner_column: str | None = None


@dataclass(frozen=True, slots=True)
class Trigger:
    """A trigger of the environment. In catalogs they are in the order in which PostgreSQL fires those of one table."""

    number: int
    name: str
    table: str
    row: bool
    before: bool
    events: str  # of i, u, d
    columns: tuple[str, ...]  # UPDATE OF
    function: str
    definition: str


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
    triggers: tuple[Trigger, ...] = ()

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)


_SQL = named("catalog.sql")


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
    for row in await conn.fetch(_SQL["columns"], schema):
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
                base_type=row["base_type"],
                virtual=row["generated"] == "v",
            )
        )
    foreign_keys = await conn.fetch(_SQL["foreign_keys"], schema)
    not_null = {(name, column.name) for name, found in columns.items() for column in found if column.not_null}
    keys: dict[str, list[Key]] = {}
    indexes: dict[str, list[Index]] = {}
    for row in await conn.fetch(_SQL["indexes"], schema):
        size, names = row["indnkeyatts"], list(row["columns"])
        if row["indisunique"]:
            keys.setdefault(row["table"], []).append(_key(row, tuple(c.name for c in columns[row["table"]])))
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
    for row in await conn.fetch(_SQL["checks"], schema):
        checks.setdefault(row["table"], []).append(Check(row["name"], row["expression"]))
    number = len(foreign_keys)
    for name, of_table in keys.items():
        told = _tells(of_table, {column for table, column in not_null if table == name})
        for n, key in enumerate(of_table):
            number += 1
            of_table[n] = replace(key, number=number, identifies=key is told)
    row_class = await conn.fetchval(_SQL["row_class"])
    tables: list[Table] = []
    for number, (name, found) in enumerate(columns.items(), 1):
        keyless = not any(key.identifies for key in keys.get(name, ()))
        tables.append(
            Table(
                number=number,
                name=name,
                columns=tuple(found),
                keys=tuple(keys.get(name, ())),
                checks=tuple(checks.get(name, ())),
                indexes=tuple(indexes.get(name, ())),
                row=Column(ROW, "bigint", True, None, None, "", None, None, row_class) if keyless else None,
                hashed=await _hashed(conn, found) if keyless else (),
            )
        )
    return Catalog(
        tables=tuple(tables),
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
                match_full=row["match_full"],
                deferrable=row["deferrable"],
                deferred=row["deferred"],
            )
            for number, row in enumerate(foreign_keys, 1)
        ),
        sequences=await _sequences(conn, schema),
        remakes=tuple(Remake(**dict(row)) for row in await conn.fetch(_SQL["remakes"], schema, ours)),
        triggers=tuple(
            Trigger(
                number=number,
                name=row["name"],
                table=row["table"],
                row=bool(row["kind"] & 1),
                before=bool(row["kind"] & 2),
                events="".join(e for e, bit in (("i", 4), ("d", 8), ("u", 16)) if row["kind"] & bit),
                columns=tuple(row["columns"]),
                function=row["function"],
                definition=row["definition"],
            )
            for number, row in enumerate(await conn.fetch(_SQL["triggers"], schema), 1)
        ),
    )


def _key(row: Any, names: tuple[str, ...]) -> Key:
    size = row["indnkeyatts"]
    columns = tuple(row["columns"][:size])
    items = tuple(ident(name) if name else row["items"][n] for n, name in enumerate(columns))
    texts = [item for item, name in zip(items, columns, strict=True) if not name]
    mentioned = {name for text in [*texts, row["predicate"] or "true"] for name in mentions(text)}
    return Key(
        name=row["name"],
        items=items,
        columns=columns,
        reads=tuple(name for name in names if name in columns or name in mentioned),
        identifies=False,
        nulls_equal=row["indnullsnotdistinct"],
        predicate=row["predicate"],
        deferrable=row["deferrable"],
        deferred=row["deferred"],
        primary=row["indisprimary"],
        constraint=row["is_constraint"],
    )


def _tells(keys: list[Key], not_null: set[str]) -> Key | None:
    """The key whose columns tell rows apart at every moment: none that is checked late, or lets nulls in."""
    fit = [key for key in keys if key.plain and not key.deferrable and not_null.issuperset(key.columns)]
    return min(fit, key=lambda key: not key.primary, default=None)


async def _hashed(conn: Any, columns: list[Column]) -> tuple[str, ...]:
    """Columns of types with a hash function (json, xml and the geometric types have none)."""
    found: list[str] = []
    for column in columns:
        try:
            async with conn.transaction():
                await conn.execute(f"select hash_record_extended(row(null::{column.type}), 0)")
            found.append(column.name)
        except (asyncpg.UndefinedFunctionError, asyncpg.NotNullViolationError, asyncpg.CheckViolationError):
            continue
    return tuple(found)


async def _sequences(conn: Any, schema: str) -> tuple[Sequence, ...]:
    found: list[Sequence] = []
    for number, row in enumerate(await conn.fetch(_SQL["sequences"], schema), 1):
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
                called=called,
                owner=row["owner"],
                owner_column=row["owner_column"],
            )
        )
    return tuple(found)
