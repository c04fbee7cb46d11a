"""Random schemas of three to eight tables, made of what the copy-on-write state accepts, drawn from a number.

A schema is a function of its number and of the constructs that are taken, so that a failing program can be
told by (number, statements) and both sides are loaded once a number, not once an example. Domains of values
are tiny: clashes of keys and dangling references are the point. What a schema is fond of is drawn first (`Draw`),
so that what it has meets on the same tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from random import Random

from tests.integration.overlay.differential_types import KINDS, NUMBERS, Kind

CLOCK = "2026-01-15T09:00:00+00:00"
CLOCK_AT = datetime.fromisoformat(CLOCK)
KEY_TYPES = ("int", "int", "int", "text", "text", "bigint", "uuid", "date", "numeric", "varchar(4)", "mood", "score")
ACTIONS = ("no action", "restrict", "cascade", "set null", "set default")
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
_USUAL = ("int", "int", "int", "int", "text", "text", "text")
"""Columns that can be compared, counted and put together with those of other tables are the most."""
_NEVER_NULL = ("word",)
"""A subquery without rows gives such a column a null that no dump could bring back, so the column says it too."""
_WIDER = {"int": "bigint", "bigint": "int", "smallint": "int", "varchar(4)": "text"}
"""A type that a foreign key may have in place of the key's own."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    """As it is written in SQL: quoted where it has to be."""
    type: str
    definition: str
    """What follows the type in CREATE TABLE."""
    generated: bool = False
    identity: str = ""
    """'', 'always', 'by default', 'serial' or 'shared'."""

    @property
    def kind(self) -> Kind:
        return KINDS[self.type]


@dataclass(frozen=True, slots=True)
class Reference:
    columns: tuple[str, ...]
    table: str
    target: tuple[str, ...]
    actions: str = ""

    @property
    def acts(self) -> bool:
        """Changes referring rows."""
        return any(word in self.actions for word in ("cascade", "set"))

    @property
    def checks(self) -> bool:
        """May refuse: NO ACTION, also where none is written, and RESTRICT."""
        return self.actions.count(" on ") < 2 or "restrict" in self.actions or "no action" in self.actions


@dataclass(slots=True)
class Table:
    name: str
    columns: list[Column] = field(default_factory=list)
    key: tuple[str, ...] = ()
    """Empty: rows may be equal."""
    candidates: list[tuple[str, ...]] = field(default_factory=list)
    """Sets of columns that a foreign key may point at."""
    arbiters: list[str] = field(default_factory=list)
    """Conflict targets of INSERT … ON CONFLICT."""
    at_once: set[str] = field(default_factory=set)
    """Columns of keys that are checked row by row."""
    references: list[Reference] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    """Statements that follow the tables."""
    views: list[str] = field(default_factory=list)
    """Names of views over the table, to be read."""

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def of_type(self, *types: str) -> list[Column]:
        return [column for column in self.columns if column.type in types]

    @property
    def writable(self) -> list[Column]:
        return [column for column in self.columns if not column.generated]

    @property
    def grouped(self) -> list[Column]:
        """Columns by which rows make groups that look the same whichever row comes first."""
        return [column for column in self.columns if column.kind.equal and column.kind.exact]

    @property
    def comparable(self) -> list[Column]:
        return [column for column in self.columns if column.kind.equal]

    def order(self, alias: str) -> str:
        """A total order of the rows, up to equal ones."""
        return ", ".join(f"{alias}.{k}" for k in self.key) if self.tells_apart else f"{alias}::text"

    @property
    def tells_apart(self) -> bool:
        """Its key is one at all times, not only when the call commits."""
        return self.key in self.candidates

    @property
    def ddl(self) -> str:
        parts = [
            f"{c.name} {'serial' if c.identity == 'serial' else c.type} {c.definition}".rstrip() for c in self.columns
        ]
        return f"create table {self.name} (\n  " + ",\n  ".join(parts + self.constraints) + "\n);"


@dataclass(frozen=True, slots=True)
class Schema:
    number: int
    taken: frozenset[str]
    tables: tuple[Table, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    sequences: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    """Expressions that call functions of the schema."""
    near: tuple[Table, ...] = ()
    """Tables that the statements of one program are about; none is all of them."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """How often the program draws each kind of statement."""

    @property
    def ddl(self) -> str:
        prelude = dict.fromkeys(line for t in self.tables for c in t.columns for line in c.kind.prelude.splitlines())
        parts = [*prelude, *self.before, *(t.ddl for t in self.tables)]
        parts += [line for t in self.tables for line in t.after]
        return "\n".join([*parts, *self.after]) + "\n"

    @property
    def busy(self) -> tuple[Table, ...]:
        return self.near or self.tables

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)

    def referring(self, table: Table) -> list[tuple[Table, Reference]]:
        """Foreign keys that point at the table, each with the table that has it."""
        return [(other, r) for other in self.tables for r in other.references if r.table == table.name]


class Draw:
    """A source of chance that knows which constructs are taken, and how fond of each this schema is.

    Swarm testing: a schema does without some constructs and draws others over and over. Were all drawn evenly, two of
    them would rarely meet on one table.
    """

    def __init__(self, number: int, taken: frozenset[str]) -> None:
        swarm = Random(f"{number} swarm")
        self.fond = {construct: swarm.choice((0, 1, 1, 4)) for construct in sorted(taken)}
        self.taken = taken
        order = Random(f"{number // 4} types").sample(all_ := types(self), len(all_))
        self.palette = [*order[number % 4 :: 4], *_USUAL]
        """Types of plain columns: few, so that columns of several tables go together; four schemas have all."""
        self.actions = swarm.sample(ACTIONS, 2)
        """Of foreign keys."""
        self.random = Random(number)

    def chance(self, share: float, construct: str = "") -> bool:
        fond = self.fond.get(construct, 0) if construct else 1
        return self.random.random() < 1 - (1 - share) ** fond

    def one(self, *options: str | tuple[str, str]) -> str:
        """Of options, those given as (text, construct) as often as the schema is fond of that."""
        weighed = [(o, 1) if isinstance(o, str) else (o[0], self.fond.get(o[1], 0)) for o in options]
        return self.random.choice([text for text, weight in weighed for _ in range(weight)])


def types(draw: Draw, among: Iterable[str] = KINDS) -> list[str]:
    return [name for name in among if not KINDS[name].construct or KINDS[name].construct in draw.taken]


def schema(number: int, taken: frozenset[str] = frozenset()) -> Schema:
    """The schema of this number: three to eight tables; each may refer to itself, to others, even in a circle."""
    from tests.integration.overlay.differential_code import code  # it needs the words of this module

    draw = Draw(number, taken)
    tables: list[Table] = []
    names = NAMES[: draw.random.choice((3, 3, 3, 4, 4, 5, 6, 8))]
    for name in names:
        tables.append(_table(draw, name, tables))
    circles = [(a, b) for a in tables for b in tables if a is not b and reaches(tables, b, a) and b.candidates]
    if circles and draw.chance(0.6, "cycle of FOREIGN KEYs"):
        _reference(draw, *draw.random.choice(circles), 9, later=True)
    return code(draw, Schema(number, taken, tuple(tables)))


def reaches(tables: Sequence[Table], start: Table, end: Table) -> bool:
    """Whether rows of `start` refer to rows of `end`, or to rows that do."""
    seen, waiting = set[str](), [start.name]
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += [r.table for t in tables if t.name == name for r in t.references]
    return end.name in seen


def _table(draw: Draw, name: str, earlier: list[Table]) -> Table:
    table = Table(name)
    _key(draw, table)
    odd = draw.one("c1", '"Odd Name"', '"order"')
    for plain in ("c0", odd, "c2", "c3")[: draw.random.randint(1, 4)]:
        table.columns.append(_plain_column(draw, plain))
    _generated(draw, table)
    _uniques(draw, table)
    _checks(draw, table)
    others = [t for t in (*earlier, *earlier, table) if t.candidates]
    for i in range(draw.random.choice((0, 1, 1, 2, 2))):
        if others:
            _reference(draw, table, draw.random.choice(others), i)
    _indexes(draw, table)
    return table


def _key(draw: Draw, table: Table) -> None:
    kind = draw.one(
        "plain", "plain", "plain", "serial", ("always", "identity"), ("always", "identity"), ("by default", "identity"),
        ("by default", "identity"), "two", "three",
        ("shared", "shared sequence"), ("none", "table without a key"), ("none", "table without a key"),
        ("unique", "table with only UNIQUE NOT NULL"),
    )  # fmt: skip
    if kind == "none":
        return
    when = draw.one("", "", "", "", (" deferrable", "PRIMARY KEY deferrable"),
                    (" deferrable initially deferred", "PRIMARY KEY deferrable"))  # fmt: skip
    if kind in {"two", "three"}:
        names = ("k1", "k2", "k3")[: 2 if kind == "two" else 3]
        table.columns.extend(Column(n, draw.one("int", "text"), "") for n in names)
        table.key = names
        table.constraints.append(f"primary key ({', '.join(names)}){when}")
    else:
        definition = {
            "always": "generated always as identity ",
            "by default": "generated by default as identity ",
            "shared": "default nextval('numbers') ",
        }.get(kind, "")
        identity = kind if kind in {"serial", "always", "by default", "shared"} else ""
        type_ = "int" if identity else draw.random.choice(types(draw, KEY_TYPES))
        unique = "not null unique" if kind == "unique" else "primary key"
        table.columns.append(Column("id", type_, f"{definition}{unique}{when}", identity=identity))
        table.key = ("id",)
    if when:
        return  # no foreign key can point at it, no ON CONFLICT can name it
    table.at_once |= set(table.key)
    table.candidates.append(table.key)
    table.arbiters.append(f"({', '.join(table.key)})")
    table.arbiters.append(f"on constraint {table.name}_{'id_key' if kind == 'unique' else 'pkey'}")


def _plain_column(draw: Draw, name: str) -> Column:
    random = draw.random
    type_ = random.choice(draw.palette)
    parts = []
    if type_ == "text" and draw.chance(0.2, "COLLATE"):
        parts.append('collate "C"')
    if type_ == "int" and draw.chance(0.3, "function in DEFAULT"):
        parts.append("default twice(2)")
    elif random.random() < 0.4:
        parts.append(f"default {random.choice(KINDS[type_].good)}")
    if random.random() < 0.3 or type_ in _NEVER_NULL:
        parts.append("not null")
    if type_ == "int" and draw.chance(0.25, "function in CHECK"):
        parts.append(f"check (clamp({name}) <> 2)")
    elif type_ in NUMBERS and random.random() < 0.3:
        parts.append(f"check ({name} {random.choice(('> -1', '<> 3', 'between -1 and 8'))})")
    if type_ == "text" and random.random() < 0.2:
        parts.append(f"check ({name} <> '')")
    return Column(name, type_, " ".join(parts))


def _generated(draw: Draw, table: Table) -> None:
    random = draw.random
    numbers = [c for c in table.of_type("int") if not c.identity]
    texts = table.of_type("text")
    how = draw.one(("stored", "GENERATED stored"), ("virtual", "GENERATED virtual"), "")
    if not how:
        return
    if numbers and random.random() < 0.5:
        source = random.choice(numbers).name
        expression = draw.one(
            f"{source} * 2", f"coalesce({source}, 0) - 1", f"10 / ({source} + 7)",
            *([(f"twice({source})", "function in a generated column")] if how == "stored" else []),
        )  # fmt: skip
        extra = random.choice(("", " not null", " unique", " unique")) if how == "stored" else ""
        definition = f"generated always as ({expression}) {how}{extra}"
        table.columns.append(Column("gen", "int", definition, generated=True))
        if "unique" in extra:
            table.at_once |= {"gen", source}
    elif texts and random.random() < 0.3:
        source = random.choice(texts).name
        definition = f"generated always as (upper({source}) || '!') {how}"
        table.columns.append(Column("gen", "text", definition, generated=True))


def _uniques(draw: Draw, table: Table) -> None:
    random = draw.random
    usable = [c.name for c in table.columns if c.name not in table.key and c.kind.ordered and not c.generated]
    for i in range(random.choice((0, 0, 1, 1, 2))):
        if not usable:
            return
        names = tuple(random.sample(usable, min(len(usable), random.choice((1, 1, 2)))))
        _unique(draw, table, names, f"{table.name}_once{i}", usable)


_EXPRESSED = ("text", "int", "jsonb")


def _unique(draw: Draw, table: Table, names: tuple[str, ...], name: str, usable: list[str]) -> None:
    columns = ", ".join(names)
    form = draw.one(
        "plain", "plain", ("nulls", "UNIQUE nulls not distinct"), ("partial", "UNIQUE partial"),
        ("expression", "UNIQUE over an expression"), ("include", "UNIQUE include"),
        ("deferrable", "UNIQUE deferrable"), ("deferred", "UNIQUE initially deferred"),
        ("nulls deferrable", "UNIQUE nulls not distinct, deferrable"),
        ("all", "UNIQUE partial over an expression, nulls not distinct"),
    )  # fmt: skip
    if form in {"expression", "all"} and (fitting := [n for n in usable if table.column(n).type in _EXPRESSED]):
        names = tuple(dict.fromkeys((draw.random.choice(fitting), *names[1:])))
        columns = ", ".join(names)
    first = table.column(names[0])
    if form in {"expression", "all"} and first.type not in _EXPRESSED:
        form = "plain"
    if "defer" in form:
        later = draw.one("deferrable", "deferrable initially deferred") if "nulls" in form else "deferrable"
        later = "deferrable initially deferred" if form == "deferred" else later
        nulls = " nulls not distinct" if "nulls" in form else ""
        table.constraints.append(f"constraint {name} unique{nulls} ({columns}) {later}")
        return
    table.at_once |= set(names)
    match form:
        case "partial":
            condition = f"{first.name} is not null" if first.type == "jsonb" else _predicate(draw, first)
            table.after.append(f"create unique index {name} on {table.name} ({columns}) where {condition};")
            table.arbiters.append(f"({columns}) where {condition}")
        case "expression" | "all":
            expression = {
                "text": f"lower({first.name})",
                "int": draw.one(f"({first.name} % 3)", (f"clamp({first.name})", "function in an index")),
                "jsonb": f"({first.name} -> 'a')",
            }
            items = ", ".join([expression[first.type], *names[1:]])
            tail = where = ""
            if form == "all":
                where = f" where {first.name} is distinct from {first.kind.good[0]}::{first.type}"
                tail = f" nulls not distinct{where}"
            table.after.append(f"create unique index {name} on {table.name} ({items}){tail};")
            table.arbiters.append(f"({items}){where}")
        case "include":
            other = draw.random.choice([c.name for c in table.writable])
            table.constraints.append(f"constraint {name} unique ({columns}) include ({other})")
            table.arbiters.append(f"({columns})")
        case _:
            nulls = " nulls not distinct" if form == "nulls" else ""
            table.constraints.append(f"constraint {name} unique{nulls} ({columns})")
            table.candidates.append(names)
            table.arbiters += [f"({columns})", f"on constraint {name}"]


def _predicate(draw: Draw, column: Column) -> str:
    value = draw.random.choice(column.kind.good[:2])
    if "(" in value and not value.startswith("'"):  # not immutable
        return f"{column.name} is not null"
    return draw.one(f"{column.name} <> {value}::{column.type}", f"{column.name} = {value}::{column.type}")


def _checks(draw: Draw, table: Table) -> None:
    numbers = table.of_type("int")
    if len(numbers) >= 2 and draw.chance(0.4):
        a, b = draw.random.sample([c.name for c in numbers], 2)
        table.constraints.append(f"constraint {table.name}_sane check ({a} <> {b} or {a} = 2)")


def _reference(draw: Draw, table: Table, target: Table, i: int, *, later: bool = False) -> None:
    random = draw.random
    usable = [c for c in target.candidates if all(target.column(n).type != "tsvector" for n in c)]
    if not usable:
        return
    columns = random.choice(usable)
    names = []
    for j, column in enumerate(columns):
        kind = target.column(column).type
        if kind in _WIDER and draw.chance(0.2, "FOREIGN KEY of another type"):
            kind = _WIDER[kind]
        name = f"r{i}{j}"
        definition = random.choice(("", "", "", "not null" if not later else "", f"default {KINDS[kind].good[1]}"))
        definition = "not null" if kind in _NEVER_NULL else definition
        table.columns.append(Column(name, kind, definition))
        names.append(name)
    full = draw.one("", "", "", (" match full", "FOREIGN KEY match full"))
    actions = ""
    if random.random() < 0.8:
        action = random.choice(draw.actions)
        if action.startswith("set") and len(names) > 1 and draw.chance(0.7, "FOREIGN KEY set null (columns)"):
            action += f" ({names[-1]})"
        actions += f" on delete {action}"
    if random.random() < 0.8:
        actions += f" on update {random.choice(draw.actions)}"
    when = draw.one("", "", "", (" deferrable", "FOREIGN KEY deferrable"),
                    (" deferrable initially deferred", "FOREIGN KEY initially deferred"))  # fmt: skip
    text = f"foreign key ({', '.join(names)}) references {target.name} ({', '.join(columns)}){full}{actions}{when}"
    if later:
        table.after.append(f"alter table {table.name} add {text};")
    else:
        table.constraints.append(text)
    table.references.append(Reference(tuple(names), target.name, columns, actions))


def _indexes(draw: Draw, table: Table) -> None:
    """A plain index or two and a view a table, so that plans and rewriting differ from table to table."""
    ordered = [
        c for c in table.columns if c.kind.ordered and c.kind.exact and not (c.generated and "virtual" in c.definition)
    ]
    last = ordered[-1].name if ordered else None
    if last:
        direction = draw.one("", " desc", " nulls first")
        table.after.append(f"create index on {table.name} ({last}{direction});")
        grouped = f"select {last}, count(*) as n from {table.name} group by {last}"
        table.after.append(f"create view {table.name}_seen as {grouped};")
        table.views.append(f"{table.name}_seen")
        if draw.chance(0.3, "view over a view"):
            table.after.append(f"create view {table.name}_often as select * from {table.name}_seen where n > 1;")
            table.views.append(f"{table.name}_often")
    if table.references and draw.chance(0.4, "view that joins"):
        reference = table.references[0]
        on = " and ".join(f"p.{t} = c.{c}" for c, t in zip(reference.columns, reference.target, strict=True))
        table.views.append(f"{table.name}_family")
        table.after.append(
            f"create view {table.name}_family as select c.*, p.{reference.target[0]} as parent"
            f" from {table.name} c left join {reference.table} p on {on};"
        )
    texts = [c for c in table.of_type("text") if not c.generated]
    if texts and draw.chance(0.3, "index over an expression"):
        table.after.append(f"create index on {table.name} (lower({texts[0].name}));")
    if texts and draw.chance(0.3, "index partial"):
        table.after.append(f"create index on {table.name} ({texts[0].name}) where {texts[0].name} <> '';")
