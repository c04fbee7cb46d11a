"""Values for columns that take none (GENERATED ALWAYS), and writes to sequences, refused as PostgreSQL does it: before
a row is looked at.

A view has no such columns, so its triggers see the value only when a row arrives. But the shape of its table has them
(`companions`), and EXPLAIN of the same statement over the shape makes PostgreSQL say 428C9 in its own words. Only
statements that may give such a value are asked about. A sequence is a view, too, and its shape is a sequence.

Not here: what comes through an environment's own view, or runs in its functions. There the triggers remain.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import postgast
from postgast import pg_query_pb2 as pb

from megamcp.state.catalog import Column
from megamcp.state.names import literal

WRITES = re.compile(r"\binsert\b|\bupdate\b|\bmerge\b|\bdelete\b", re.I)
"""What a statement that may give such a value holds."""
# Tables and sequences by their shapes; `places` count from 1, and are null for sequences.
_TABLES = """
select c.relnamespace::regnamespace::text as schema, c.relname::text as name, null as columns, null as places
from pg_catalog.pg_class c
where c.relnamespace = to_regnamespace(format('%I', 'w_' || substr(current_schema(), 3))) and c.relkind = 'S'
union all
select c.relnamespace::regnamespace::text, c.relname::text,
  array(select a.attname::text from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0
        and (a.attidentity = 'a' or a.attgenerated <> '') order by a.attnum),
  array(select a.attnum::int from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0
        and (a.attidentity = 'a' or a.attgenerated <> '') order by a.attnum)
from pg_catalog.pg_class c
where c.relnamespace = to_regnamespace(format('%I', 'w_' || substr(current_schema(), 3))) and c.relkind = 'r'
"""

Columns = Mapping[str, int]
"""Name of a column that takes no value → its place in the table."""
Shapes = Mapping[str, Columns | None]
"""Name of a table → its columns that take no value; None for a sequence, which takes none at all."""


class Ahead:
    """Asks PostgreSQL for one state; remembers which tables are worth it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, Shapes]] = {}

    async def refused(self, sql: str, fetch: Callable[..., Awaitable[Any]], path: str) -> str | None:
        """A statement without parameters that fails as `sql` would when it's planned; None when it wouldn't.

        `fetch` and `path` as for `rewrites.Rewriter`.
        """
        if not WRITES.search(sql):
            return None
        if path not in self._known:
            rows = await fetch(_TABLES)
            found = {
                row["name"]: None if row["places"] is None else dict(zip(row["columns"], row["places"], strict=True))
                for row in rows
            }
            self._known[path] = rows[0]["schema"] if rows else "", found
        schema, tables = self._known[path]
        probe = _probe(sql, tables, schema)
        if probe is None:
            return None
        explain, sequence = probe
        change = f'call {schema}."~sequence"({literal(sequence)})' if sequence else None
        try:
            await fetch(explain)
        except Exception as error:
            state = getattr(error, "sqlstate", None)
            if state is None:
                raise
            if sequence:  # a right to write its shape can't be given
                return change if state == "42501" else explain
            return explain if state == "428C9" else None
        return change


def _probe(sql: str, tables: Shapes, schema: str) -> tuple[str, str] | None:
    """The EXPLAIN that fails if `sql` gives such a column a value, and the sequence that it writes (or ""); None when
    it surely does neither.

    Other errors of it mean nothing: its parameters are nulls.
    """
    lowered = sql.lower()
    if not any(fixed != {} and name.lower() in lowered for name, fixed in tables.items()):
        return None
    try:
        tree = postgast.parse(sql)
    except Exception:  # PostgreSQL will tell, or protobuf's bound of 100 levels is passed
        return None
    found = False
    sequence = ""
    for kind, write in _writes(tree):
        name = write.relation.relname
        if name not in tables:
            continue
        fixed = tables[name]
        if fixed is None:
            found, sequence = True, name
        elif fixed and _may_give(kind, write, fixed):
            found = True
        # Every write: an ON CONFLICT names keys, and a view has none.
        if not write.relation.HasField("alias"):
            write.relation.alias.aliasname = name
        write.relation.schemaname = schema
    if not found:
        return None
    return f"explain {without_parameters(postgast.deparse(tree))}", sequence


def without_parameters(sql: str) -> str:
    """The statement with nulls in the place of its parameters, whose types are not known yet."""
    raw, parts, done = sql.encode(), list[bytes](), 0
    for token in postgast.scan(sql).tokens:
        if token.token == _PARAMETER:
            parts += [raw[done : token.start], b"null"]
            done = token.end
    return b"".join([*parts, raw[done:]]).decode()


_PARAMETER = pb.Token.Value("PARAM")


def _writes(tree: pb.ParseResult) -> Iterator[tuple[str, Any]]:
    for raw in tree.stmts:
        kind = raw.stmt.WhichOneof("node") or ""
        statement: Any = getattr(raw.stmt, kind)
        for item in statement.with_clause.ctes if hasattr(statement, "with_clause") else ():
            query = item.common_table_expr.ctequery
            inner = query.WhichOneof("node") or ""
            if inner in _ROWS:
                yield inner, getattr(query, inner)
        if kind in _ROWS:
            yield kind, statement


_ROWS = ("insert_stmt", "update_stmt", "merge_stmt", "delete_stmt")


def _may_give(kind: str, write: Any, fixed: Columns) -> bool:
    if kind == "update_stmt":
        return _named(write.target_list, fixed)
    if kind == "delete_stmt":
        return False
    if kind == "merge_stmt":
        return any(_action_gives(item.merge_when_clause, fixed) for item in write.merge_when_clauses)
    select = write.select_stmt.select_stmt
    conflict = _named(write.on_conflict_clause.target_list, fixed)
    if write.cols or not write.HasField("select_stmt"):
        return conflict or _named(write.cols, fixed)
    # By place. How many columns a query has only PostgreSQL knows.
    widest = max((len(row.list.items) for row in select.values_lists), default=0)
    return conflict or not select.values_lists or widest >= min(fixed.values())


def _action_gives(action: pb.MergeWhenClause, fixed: Columns) -> bool:
    by_place = bool(action.values) and not action.target_list
    return (by_place and len(action.values) >= min(fixed.values())) or _named(action.target_list, fixed)


def _named(targets: Any, fixed: Columns) -> bool:
    return any(item.res_target.name in fixed for item in targets)


def shape_of(column: Column) -> str:
    """What makes a column of a shape one that takes no value; empty for others."""
    if column.identity == "a":
        return " generated always as identity"
    if column.generated is not None:
        collation = f" collate {column.collation}" if column.collation else ""
        return f" generated always as (null::{column.type}{collation}) stored"
    return ""
