"""Expressions of an environment (CHECK, generated columns) made to read the trigger's NEW instead of columns."""

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import postgast
from postgast import pg_query_pb2 as pb

from megamcp.state.names import ident

if TYPE_CHECKING:
    from megamcp.state.catalog import Table

# Types whose `=` is equality of bytes, so that IS DISTINCT FROM tells every change.
_BYTEWISE = re.compile(
    r"(smallint|integer|bigint|oid|boolean|text|uuid|date|bytea|character varying(\(\d+\))?"
    r"|timestamp(\(\d\))? with(out)? time zone)$"
)


def nested(then: str, *conditions: str) -> str:
    """PL/pgSQL: `then` where all conditions hold, each asked only if those before it do; empty ones count as true.

    What asks a table should stand alone: an expression with a sub-select is run as a statement, whatever it comes to.
    """
    for condition in reversed([c for c in conditions if c]):
        then = f"if {condition} then\n    {then}\n  end if;"
    return f"  {then}\n"


def changed(table: "Table", columns: Iterable[str], left: str, right: str) -> str:
    """True when a column's value differs between two records, if only in its bytes (numeric 1.0 and 1.00)."""
    types = {column.name: column.type for column in table.columns}
    tests: list[str] = []
    for name in columns:
        a, b = f"{left}.{ident(name)}", f"{right}.{ident(name)}"
        if _BYTEWISE.match(types[name]):
            tests.append(f"{a} is distinct from {b}")
        else:
            tests.append(f"row({a})::record *<> row({b})::record")
    return tests[0] if len(tests) == 1 else f"({' or '.join(tests)})"


def over_new(text: str, columns: tuple[str, ...]) -> str | None:
    """`text` with each column `c` as `new.c`; None when it holds the whole row, which NEW can't stand for."""
    return over(text, columns, "new")


def over(text: str, columns: tuple[str, ...], record: str) -> str | None:
    """`text` with each column `c` as `record.c`; None when it holds the whole row, which a record can't stand for."""
    tree = postgast.parse(f"select {text}")
    for reference in postgast.find_nodes(tree, pb.ColumnRef):
        fields = [f.string.sval if f.HasField("string") else None for f in reference.fields]
        if len(fields) != 1 or fields[0] not in columns:
            return None
        column = pb.Node()
        column.CopyFrom(reference.fields[0])
        del reference.fields[:]
        lead = reference.fields.add()
        lead.string.sval = record
        reference.fields.add().CopyFrom(column)
    deparsed: str = postgast.deparse(tree)
    return deparsed.removeprefix("SELECT ").strip()


def mentions(text: str) -> set[str]:
    """The columns that an expression names."""
    tree = postgast.parse(f"select {text}")
    fields = [reference.fields[0] for reference in postgast.find_nodes(tree, pb.ColumnRef)]
    return {field.string.sval for field in fields if field.HasField("string")}


def over_sequences(text: str, call: Callable[[str], tuple[str, str]]) -> str:
    """`text` with each `nextval('schema.name'::regclass)` as a call of the function that `call(name)` names."""
    if "nextval" not in text:
        return text
    tree = postgast.parse(f"select {text}")
    for function in postgast.find_nodes(tree, pb.FuncCall):
        if function.funcname[-1].string.sval != "nextval" or len(function.args) != 1:
            continue
        sequence = _constant(function.args[0])
        if sequence is None:
            continue
        del function.funcname[:], function.args[:]
        for part in call(_last_part(sequence)):
            function.funcname.add().string.sval = part
    deparsed: str = postgast.deparse(tree)
    return deparsed.removeprefix("SELECT ").strip()


def _constant(node: pb.Node) -> str | None:
    while node.HasField("type_cast"):
        node = node.type_cast.arg
    if not node.HasField("a_const"):
        return None
    value: str = node.a_const.sval.sval
    return value


def _last_part(name: str) -> str:
    """The last identifier of a possibly quoted, possibly qualified name as PostgreSQL prints it."""
    if name.endswith('"'):
        start = re.search(r'(?:^|\.)"((?:[^"]|"")*)"$', name)
        return start[1].replace('""', '"') if start else name
    return name.rsplit(".", 1)[-1]
