"""Small random schemas made of what the copy-on-write state accepts, drawn from a seed.

A schema is a function of its number, so that a failing program can be told by (number, statements) and both
sides are loaded once a number, not once an example. Domains of values are tiny: clashes of keys and
dangling references are the point.
"""

from dataclasses import dataclass, field
from random import Random

CLOCK = "2026-01-15T09:00:00+00:00"

LITERALS: dict[str, tuple[str, ...]] = {
    "int": ("0", "1", "2", "3", "4", "5", "-1"),
    "bigint": ("0", "1", "2", "3", "7", "9000000000"),
    "text": ("'a'", "'b'", "'c'", "''", "'Ab'", "'it''s'"),
    "varchar(4)": ("'a'", "'bb'", "'ccc'", "'toolong'"),
    "numeric(6,2)": ("0", "1.5", "2.25", "-3", "1.555", "99999"),
    "bool": ("true", "false"),
    "timestamptz": ("'2026-01-15T09:00:00Z'", "'2025-12-31T23:59:59Z'", "now()"),
    "date": ("'2026-01-15'", "'2024-02-29'"),
    "jsonb": ("""'{"a": 1}'""", "'[1, 2]'", "'null'", """'{"b": {"c": "x"}}'"""),
    "int[]": ("'{1,2}'", "'{}'", "array[3]", "'{NULL}'"),
    "mood": ("'sad'", "'ok'", "'happy'", "'furious'"),
    "score": ("1", "2", "5", "-1"),
    "uuid": ("'00000000-0000-0000-0000-000000000001'", "'00000000-0000-0000-0000-000000000002'"),
}
KEY_TYPES = ("int", "int", "int", "text", "bigint")
PLAIN_TYPES = tuple(LITERALS)
ACTIONS = ("no action", "restrict", "cascade", "set null", "set default")


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    definition: str
    """What follows the type in CREATE TABLE."""
    generated: bool = False
    identity: str = ""
    """'', 'always', 'by default' or 'serial'."""


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
    candidates: list[tuple[str, ...]] = field(default_factory=list)
    """Sets of columns that a foreign key may point at."""
    references: list[Reference] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def of_type(self, *types: str) -> list[Column]:
        return [column for column in self.columns if column.type in types]

    @property
    def writable(self) -> list[Column]:
        return [column for column in self.columns if not column.generated]

    @property
    def ddl(self) -> str:
        types = {"serial": "serial"}
        parts = [f"{c.name} {types.get(c.identity, c.type)} {c.definition}".rstrip() for c in self.columns]
        return f"create table {self.name} (\n  " + ",\n  ".join(parts + self.constraints) + "\n);"


@dataclass(frozen=True, slots=True)
class Schema:
    number: int
    tables: tuple[Table, ...]

    @property
    def ddl(self) -> str:
        mood = "create type mood as enum ('sad', 'ok', 'happy');\ncreate domain score as int check (value > 0);\n"
        return mood + "\n".join(table.ddl for table in self.tables) + "\n" + "\n".join(self._extras()) + "\n"

    def _extras(self) -> list[str]:
        """A plain index and a view a table, so that plans and rewriting differ from table to table."""
        made = []
        for table in self.tables:
            last = table.columns[-1].name
            made.append(f"create index on {table.name} ({last});")
            made.append(
                f"create view {table.name}_seen as select {last}, count(*) as n from {table.name} group by {last};"
            )
        return made

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)


def schema(number: int) -> Schema:
    """The schema of this number: two to four tables; each may refer to itself and to earlier ones."""
    random = Random(number)
    tables: list[Table] = []
    for name in ("alpha", "beta", "gamma", "delta")[: random.randint(2, 4)]:
        tables.append(_table(random, name, tables))
    return Schema(number, tuple(tables))


def _table(random: Random, name: str, earlier: list[Table]) -> Table:
    table = Table(name)
    _key(random, table)
    for i in range(random.randint(1, 4)):
        table.columns.append(_plain_column(random, f"c{i}"))
    _generated(random, table)
    _unique(random, table)
    _checks(random, table)
    others = [*earlier, *earlier, table]
    for i in range(random.choice((0, 1, 1, 2))):
        _reference(random, table, random.choice(others), i)
    return table


def _key(random: Random, table: Table) -> None:
    kind = random.choice(("plain", "plain", "serial", "always", "by default", "two", "three"))
    if kind in {"serial", "always", "by default"}:
        definition = "" if kind == "serial" else f"generated {kind} as identity"
        table.columns.append(Column("id", "int", f"{definition} primary key".strip(), identity=kind))
        table.key = ("id",)
    elif kind == "plain":
        type_ = random.choice(KEY_TYPES)
        table.columns.append(Column("id", type_, "primary key"))
        table.key = ("id",)
    else:
        names = ("k1", "k2", "k3")[: 2 if kind == "two" else 3]
        table.columns.extend(Column(n, random.choice(("int", "text")), "") for n in names)
        table.key = names
        table.constraints.append(f"primary key ({', '.join(names)})")
    table.candidates.append(table.key)


def _plain_column(random: Random, name: str) -> Column:
    type_ = random.choice(PLAIN_TYPES)
    parts = []
    if random.random() < 0.4:
        value = random.choice([v for v in LITERALS[type_] if v not in {"'toolong'", "99999", "'furious'", "-1"}])
        parts.append(f"default {value}")
    if random.random() < 0.3:
        parts.append("not null")
    if type_ in {"int", "bigint", "numeric(6,2)"} and random.random() < 0.3:
        parts.append(f"check ({name} {random.choice(('> -1', '<> 3', 'between -1 and 8'))})")
    if type_ == "text" and random.random() < 0.2:
        parts.append(f"check ({name} <> '')")
    return Column(name, type_, " ".join(parts))


def _generated(random: Random, table: Table) -> None:
    numbers = [c for c in table.of_type("int") if not c.identity]
    texts = table.of_type("text")
    if numbers and random.random() < 0.35:
        source = random.choice(numbers).name
        expression = random.choice((f"{source} * 2", f"{source} + 1", f"coalesce({source}, 0) - 1"))
        extra = random.choice(("", "", " not null", " unique"))
        definition = f"generated always as ({expression}) stored{extra}"
        table.columns.append(Column("gen", "int", definition, generated=True))
    elif texts and random.random() < 0.3:
        source = random.choice(texts).name
        definition = f"generated always as (upper({source}) || '!') stored"
        table.columns.append(Column("gen", "text", definition, generated=True))


def _unique(random: Random, table: Table) -> None:
    usable = [c.name for c in table.columns if c.name not in table.key and c.type not in {"jsonb"} and not c.generated]
    if not usable or random.random() < 0.5:
        return
    names = tuple(random.sample(usable, min(len(usable), random.choice((1, 1, 2)))))
    nulls = random.choice(("", "", " nulls not distinct"))
    name = random.choice(("", f"constraint {table.name}_once "))
    table.constraints.append(f"{name}unique{nulls} ({', '.join(names)})")
    table.candidates.append(names)


def _checks(random: Random, table: Table) -> None:
    numbers = table.of_type("int")
    if len(numbers) >= 2 and random.random() < 0.4:
        a, b = random.sample([c.name for c in numbers], 2)
        table.constraints.append(f"constraint {table.name}_sane check ({a} <> {b} or {a} = 2)")


def _reference(random: Random, table: Table, target: Table, i: int) -> None:
    columns = random.choice(target.candidates)
    names = []
    for j, column in enumerate(columns):
        kind = target.column(column).type
        name = f"r{i}{j}"
        definition = random.choice(("", "", "", "not null", f"default {LITERALS[kind][1]}"))
        table.columns.append(Column(name, kind, definition))
        names.append(name)
    actions = ""
    if random.random() < 0.8:
        actions += f" on delete {random.choice(ACTIONS)}"
    if random.random() < 0.8:
        actions += f" on update {random.choice(ACTIONS)}"
    table.constraints.append(
        f"foreign key ({', '.join(names)}) references {target.name} ({', '.join(columns)}){actions}"
    )
    table.references.append(Reference(tuple(names), target.name, columns, actions))
