"""GROUP BY a primary key: a view has none, so the columns that hang on it are added to the clause.

In a group of one row's key all columns of that row are the same, so the groups stay as they are. Only columns that the
query mentions are added, since each makes the grouping dearer. With GROUPING SETS, ROLLUP and CUBE a key counts where
all of it is in every set; what is added beside them is in every set, too. Left alone: tables inside a join that has a
name of its own; PostgreSQL says 42803 there.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import postgast
from postgast import pg_query_pb2 as pb

from megamcp.state import refusals
from megamcp.state.catalog import Catalog
from megamcp.state.fixed import without_parameters
from megamcp.state.statements import refuse

CLAUSE = re.compile(r"\bgroup\s+by\b", re.I)

_NO_FUNCTION = "42883"  # nor operator, as for types without equality
_TABLES = """
select c.relname::text as name,
  array(select a.attname::text from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0
    and not a.attisdropped order by a.attnum) as columns,
  array(select a.attname::text from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum = any (n.conkey))
    as key
from pg_catalog.pg_constraint n join pg_catalog.pg_class c on c.oid = n.conrelid
where c.relnamespace = to_regnamespace(format('%I', 'w_' || substr(current_schema(), 3))) and n.contype = 'p'
  and not n.condeferrable
"""


@dataclass(frozen=True, slots=True)
class Keyed:
    """A table with a primary key."""

    columns: tuple[str, ...]
    key: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Range:
    alias: str
    columns: tuple[str, ...]
    key: frozenset[str]


class Grouping:
    """Asks PostgreSQL for one state whether a statement needs it; remembers its tables."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, Keyed]] = {}

    async def extend(self, tree: pb.ParseResult, sql: str, fetch: Callable[..., Awaitable[Any]], path: str) -> bool:
        """Extends the clauses of `tree`, which is of `sql`, where PostgreSQL doesn't take them as they are."""
        if not CLAUSE.search(sql):
            return False
        if path not in self._known:
            rows = await fetch(_TABLES)
            self._known[path] = {row["name"]: Keyed(tuple(row["columns"]), frozenset(row["key"])) for row in rows}
        other = pb.ParseResult()
        other.CopyFrom(tree)
        if not extend(other, self._known[path]) or (before := await fails(sql, fetch)) is None:
            return False
        if before != _NO_FUNCTION and await fails(postgast.deparse(other), fetch) == _NO_FUNCTION:
            refuse(refusals.GROUPED_BY_KEY)
        tree.CopyFrom(other)
        return True


async def fails(sql: str, fetch: Callable[..., Awaitable[Any]]) -> str | None:
    """The SQLSTATE of EXPLAIN of a statement whose parameters are unknown; None: it can be run."""
    try:
        await fetch(f"explain {without_parameters(sql)}")
    except Exception as error:
        state: str | None = getattr(error, "sqlstate", None)
        if state is None:
            raise
        return state
    return None


def extended(sql: str, catalog: Catalog) -> str:
    """The statement with what its tables' keys ask for."""
    keyed = {
        table.name: Keyed(table.names, frozenset(key.columns))
        for table in catalog.tables
        for key in table.keys
        if key.primary and not key.deferrable
    }
    tree = postgast.parse(sql)
    extend(tree, keyed)
    made: str = postgast.deparse(tree)
    return made


def extend(tree: pb.ParseResult, tables: Mapping[str, Keyed]) -> bool:
    """Adds to each GROUP BY of a primary key the columns that the query mentions. True when any was added."""
    own = {item.ctename for item in postgast.find_nodes(tree, pb.CommonTableExpr)}
    known = {name: table for name, table in tables.items() if name not in own}
    found = False
    for select in postgast.find_nodes(tree, pb.SelectStmt):
        if select.group_clause:
            found = _extended(select, known) or found
    return found


def _extended(select: pb.SelectStmt, tables: Mapping[str, Keyed]) -> bool:
    ranges = [found for item in select.from_clause for found in _ranges(item, tables)]
    grouped = _grouped_by(select.group_clause, select, ranges)
    always = _always(select.group_clause, select, ranges)
    names, rows = _mentioned(select)
    added = False
    for one in ranges:
        by = {name for alias, name in grouped if alias == one.alias}
        if not one.key or not one.key <= {name for alias, name in always if alias == one.alias}:
            continue
        whole = not rows.isdisjoint(("", one.alias))
        if one.alias in rows and not any(one.alias in other.columns for other in ranges):
            select.group_clause.add().column_ref.fields.add().string.sval = one.alias
            added = True
        for column in one.columns:
            if column not in by and (whole or column in names):
                fields = select.group_clause.add().column_ref.fields
                fields.add().string.sval = one.alias
                fields.add().string.sval = column
                added = True
    return added


def _ranges(item: pb.Node, tables: Mapping[str, Keyed]) -> Iterator[_Range]:
    if item.HasField("join_expr") and not item.join_expr.HasField("alias"):
        yield from _ranges(item.join_expr.larg, tables)
        yield from _ranges(item.join_expr.rarg, tables)
    elif item.HasField("range_var"):
        table = tables.get(item.range_var.relname, Keyed((), frozenset()))
        alias = item.range_var.alias
        given = [name.string.sval for name in alias.colnames]
        names = (*given, *table.columns[len(given) :])
        called = dict(zip(table.columns, names, strict=False))
        yield _Range(alias.aliasname or item.range_var.relname, names, frozenset(called[name] for name in table.key))


def _grouped_by(items: Iterable[pb.Node], select: pb.SelectStmt, ranges: Sequence[_Range]) -> set[tuple[str, str]]:
    """(alias, column) of all that is grouped by in any set."""
    found: set[tuple[str, str]] = set()
    for item in items:
        if item.HasField("grouping_set"):
            found |= _grouped_by(item.grouping_set.content, select, ranges)
        elif _is_list(item):
            found |= _grouped_by(item.row_expr.args, select, ranges)
        elif (column := _grouped(item, select, ranges)) is not None:
            found.add(column)
    return found


def _always(items: Iterable[pb.Node], select: pb.SelectStmt, ranges: Sequence[_Range]) -> set[tuple[str, str]]:
    """The same of what is in every set. Sets beside each other are multiplied; ROLLUP and CUBE have an empty one."""
    found: set[tuple[str, str]] = set()
    for item in items:
        if not item.HasField("grouping_set"):
            found |= _grouped_by([item], select, ranges)
        elif item.grouping_set.kind == pb.GROUPING_SET_SETS:
            found |= set.intersection(*(_always([one], select, ranges) for one in item.grouping_set.content))
    return found


def _is_list(item: pb.Node) -> bool:
    return bool(item.HasField("row_expr") and item.row_expr.row_format == pb.COERCE_IMPLICIT_CAST)


def _grouped(item: pb.Node, select: pb.SelectStmt, ranges: Sequence[_Range]) -> tuple[str, str] | None:
    """(alias, column) of an item that is a column."""
    if item.HasField("a_const") and item.a_const.HasField("ival"):
        place = item.a_const.ival.ival
        if not 1 <= place <= len(select.target_list):
            return None
        item = select.target_list[place - 1].res_target.val
    names = _column(item)
    if len(names) == 1 and not any(names[0] in one.columns for one in ranges):
        outputs = [one.res_target.val for one in select.target_list if one.res_target.name == names[0]]
        names = _column(outputs[0]) if outputs else []
    joins = postgast.find_nodes(select, pb.JoinExpr)
    if len(names) == 2 and any(join.join_using_alias.aliasname == names[0] for join in joins):
        del names[0]
    if len(names) == 1:
        columns = {one.alias: one.columns for one in ranges}
        held = (_holder(one, names[0], columns) for one in select.from_clause)
        return next(((alias, names[0]) for alias in held if alias is not None), None)
    return (names[-2], names[-1]) if names else None


def _holder(item: pb.Node, column: str, columns: Mapping[str, Sequence[str]]) -> str | None:
    """The alias whose column a name without one means; None: there is none of this name.

    Of two in a join USING it, that is the one which is never padded with nulls; in a FULL join neither ("").
    """
    if item.HasField("join_expr"):
        join = item.join_expr
        left, right = (_holder(side, column, columns) for side in (join.larg, join.rarg))
        if left is None or right is None:
            return right if left is None else left
        if join.jointype == pb.JOIN_FULL:
            return ""
        return right if join.jointype == pb.JOIN_RIGHT else left
    alias = item.range_var.alias.aliasname or item.range_var.relname
    return alias if column in columns.get(alias, ()) else None


def _column(item: pb.Node) -> list[str]:
    if not item.HasField("column_ref"):
        return []
    return [field.string.sval for field in item.column_ref.fields]


def _mentioned(select: pb.SelectStmt) -> tuple[set[str], set[str]]:
    """Names of columns in it, and those that stand for whole rows ("" for all)."""
    columns: set[str] = set()
    rows: set[str] = set()
    for reference in postgast.find_nodes(select, pb.ColumnRef):
        *before, last = (field.string.sval for field in reference.fields)  # a star has none
        columns.add(last)
        if not last or not before:
            rows.add(before[-1] if before else last)
    return columns, rows
