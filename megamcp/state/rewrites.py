"""Statements that a view does not take, rewritten to ones that it does: INSERT … ON CONFLICT, OVERRIDING, row locks,
GROUP BY a key, the keyword forms of the clock. And a look ahead at values that columns don't take (`fixed`).

`INSERT … ON CONFLICT` becomes two steps of one command, through the views of schema w_<h> (`companions`):

    with "_mm_0" as (insert into w.t~proposed … returning *)  -- casts, defaults and checks of the proposed rows
    insert into w.t~conflict as t (…) select …                -- each with the row that it meets, what SET makes of it
    from "_mm_1" as excluded left join lateral (the row of t with the same key) as t on true …

so that the expressions of DO UPDATE are evaluated by PostgreSQL where it would: over the row of the command's snapshot
and `excluded`, in the order of the source. Which keys the clause means, PostgreSQL says (EXPLAIN over the shape).

`check_statement` has accepted a text before it comes here. Refusals here are those that need the clause's details. Not
here: anything about functions' bodies; those are rewritten, or refused, when the environment is loaded.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import postgast
from postgast import pg_query_pb2 as pb

from megamcp.state import fixed, grouping, locks, refusals
from megamcp.state.names import hidden, ident, idents, literal
from megamcp.state.statements import refuse

Fetch = Callable[..., Awaitable[Sequence[Any]]]
"""fetch(sql, *arguments) → rows, on the connection that will run the statement. May raise PostgreSQL's errors."""

_CANDIDATE = re.compile(
    r"\bconflict\b|\boverriding\b|\bcurrent_|\blocaltime|\btruncate\b|\bconstraints\b"
    rf"|{locks.CLAUSE.pattern}|{grouping.CLAUSE.pattern}",
    re.I,
)
_MAY_NOT = "42501"  # looked at after a statement was understood
_KEPT, _KEPT_LENGTH = 1_000, 16_000  # texts, so that they stay below some 64 MiB

_COMPANION = "select 'w_' || substr(current_schema(), 3)"
_IS_VIEW = "select exists (select from pg_class where oid = to_regclass(format('%I', $1::text)) and relkind = 'v')"
_TABLE = """
select current_schema()::text as visible, array(
  select a.attname::text from pg_catalog.pg_attribute a join pg_catalog.pg_class c on c.oid = a.attrelid
  where c.oid = to_regclass(format('%I.%I', 'w_' || substr(current_schema(), 3), $1::text)) and a.attnum > 0
    and c.relkind = 'r' and not a.attisdropped order by a.attnum) as columns, array(
  select a.attname::text from pg_catalog.pg_attribute a
  where a.attrelid = to_regclass(format('%I.%I', 'w_' || substr(current_schema(), 3), $2::text)) and a.attnum > 0
    and not a.attisdropped order by a.attnum) as accepted,
  to_regclass(format('%I.%I', 'w_' || substr(current_schema(), 3), $3::text)) is not null as identities,
  obj_description(to_regclass(format('%I.%I', 'w_' || substr(current_schema(), 3), $1::text)), 'pg_class') as note
"""
_KEYS = """
select i.relname::text as name, x.indnullsnotdistinct as nulls_equal,
  pg_get_expr(x.indpred, x.indrelid) as predicate,
  array(select pg_get_indexdef(x.indexrelid, n::int, true) from generate_series(1, x.indnkeyatts) n) as items
from pg_catalog.pg_index x join pg_catalog.pg_class i on i.oid = x.indexrelid
where x.indrelid = to_regclass(format('%I.%I', $1::text, $2::text)) and x.indisunique
"""


def candidate(sql: str) -> bool:
    """False for a text that surely needs no look."""
    return fixed.WRITES.search(sql) is not None or _CANDIDATE.search(sql) is not None


class Unmet(Exception):
    """PostgreSQL refuses the clause: running `statement`, without parameters, raises its error."""

    def __init__(self, statement: str) -> None:
        super().__init__(statement)
        self.statement = statement


@dataclass(frozen=True, slots=True)
class _Key:
    name: str
    nulls_equal: bool
    predicate: str | None
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    visible: str
    columns: tuple[str, ...]
    accepted: tuple[str, ...]
    """Columns of `t~conflict`."""
    identities: bool
    triggers: bool
    """Statement triggers stand on the table's view, not on those beside it."""
    keys: tuple[_Key, ...]

    @property
    def schema(self) -> str:
        return "w_" + self.visible.removeprefix("v_")

    def row(self, alias: str) -> str:
        """The whole row as the type of the table."""
        return f"row({idents(self.columns, ident(alias))})::{ident(self.visible)}.{ident(self.name)}"


class Rewriter:
    """Rewrites texts for one state; remembers what it asked of PostgreSQL."""

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._tables: dict[tuple[str, str], _Table | None] = {}
        self._ahead = fixed.Ahead()
        self._grouping = grouping.Grouping()

    async def rewrite(self, sql: str, fetch: Fetch, path: str = "", *, read_only: bool = False) -> tuple[str, bool]:
        """The statement to run in place of `sql`, and whether it takes the parameters of `sql`.

        It takes none when it is there to raise PostgreSQL's own error. `path` is the connection's search path, where
        it may change; in a `read_only` transaction row locks are left for PostgreSQL to refuse. Raises
        UnsupportedStatement and what `fetch` raises, but for the errors of one EXPLAIN: `fetch` must leave the
        transaction usable after an error.
        """
        if not candidate(sql):
            return sql, True
        key = f"{path}|{read_only}", sql
        try:
            if key in self._texts:
                return self._texts[key], True
            if not read_only and (refused := await self._ahead.refused(sql, fetch, path)):
                return refused, False
            text = sql
            if _CANDIDATE.search(sql):
                text = await self._rewritten(clock_calls(sql), fetch, path, read_only)
        except Unmet as unmet:
            return unmet.statement, False
        if len(sql) <= _KEPT_LENGTH:
            self._texts[key] = text
            if len(self._texts) > _KEPT:
                self._texts.popitem(last=False)
        return text, True

    async def _rewritten(self, sql: str, fetch: Fetch, path: str, read_only: bool) -> str:
        try:
            tree = postgast.parse(sql)
        except postgast.PgQueryError:
            return sql  # PostgreSQL will tell
        except Exception:  # protobuf's own bound of 100 levels
            refuse(refusals.TOO_DEEP)
        if not tree.stmts:
            return sql
        node = tree.stmts[0].stmt
        if node.HasField("truncate_stmt"):
            return await self._truncate(node.truncate_stmt, fetch, path)
        if node.HasField("constraints_set_stmt"):
            return await self._constraints(node.constraints_set_stmt, fetch)
        changed = not read_only and await locks.unlocked(tree, sql, fetch)
        changed = await self._grouping.extend(tree, sql, fetch, path) or changed
        node = tree.stmts[0].stmt  # another one where the clauses were extended
        statement = getattr(node, node.WhichOneof("node"))
        parts: list[str] = []
        conflicts = False
        for item in statement.with_clause.ctes if hasattr(statement, "with_clause") else ():
            cte = item.common_table_expr
            if cte.ctequery.HasField("insert_stmt"):
                inner = cte.ctequery.insert_stmt
                changed = await self._overriding(inner, fetch, path) or changed
                found = await self._conflict(inner, len(parts), fetch, path)
                if found is not None:
                    if inner.HasField("with_clause"):
                        refuse(refusals.NESTED_CONFLICT)
                    names = idents(part.string.sval for part in cte.aliascolnames)
                    parts += [found[0], f"{ident(cte.ctename)}{f' ({names})' if names else ''} as ({found[1]})"]
                    conflicts = True
                    continue
            parts.append(_common_table(item))
        main = None
        if node.HasField("insert_stmt"):
            changed = await self._overriding(statement, fetch, path) or changed
            found = await self._conflict(statement, len(parts), fetch, path)
            if found is not None:
                parts.append(found[0])
                main = found[1]
                conflicts = True
        if not conflicts:
            return postgast.deparse(tree) if changed else sql
        recursive = "recursive " if statement.with_clause.recursive else ""
        statement.ClearField("with_clause")
        return f"with {recursive}{', '.join(parts)} {main or postgast.deparse(tree)}"

    async def _truncate(self, statement: pb.TruncateStmt, fetch: Fetch, path: str) -> str:
        names: list[str] = []
        schema = ""
        for item in statement.relations:
            table = await self._table(item.range_var, fetch, path)
            if table is None:
                raise Unmet(f"truncate {ident(item.range_var.relname)}")
            names.append(table.name)
            schema = table.schema
        restart, cascade = statement.restart_seqs, statement.behavior == pb.DROP_CASCADE
        listed = ", ".join(map(literal, names))
        return f'call {ident(schema)}."~truncate"(array[{listed}], {restart}, {cascade})'

    async def _constraints(self, statement: pb.ConstraintsSetStmt, fetch: Fetch) -> str:
        names = ", ".join(literal(item.range_var.relname) for item in statement.constraints)
        (row,) = await fetch(_COMPANION)
        return f'call {ident(row[0])}."~constraints"({f"array[{names}]" if names else "null"}, {statement.deferred})'

    async def _overriding(self, insert: pb.InsertStmt, fetch: Fetch, path: str) -> bool:
        """Sends the rows through the view that takes or draws all identity values, where the table has such columns."""
        if insert.override in (0, pb.OVERRIDING_NOT_SET):
            return False
        table = await self._table(insert.relation, fetch, path)
        if table is None:
            await _no_view(insert.relation, fetch)
        if insert.HasField("on_conflict_clause"):
            refuse(refusals.OVERRIDING_CONFLICT)
        system = insert.override == pb.OVERRIDING_SYSTEM_VALUE
        insert.override = pb.OVERRIDING_NOT_SET
        if table is not None and table.identities:
            if table.triggers:
                refuse(refusals.STATEMENT_TRIGGERS)
            if not insert.relation.HasField("alias"):
                insert.relation.alias.aliasname = table.name
            insert.relation.schemaname = table.schema
            insert.relation.relname = hidden(table.name, "system" if system else "user")
        return True

    async def _table(self, relation: pb.RangeVar, fetch: Fetch, path: str) -> _Table | None:
        """What the clause needs to know; None for what is no table of the environment."""
        name = relation.relname
        key = path, name
        if key not in self._tables:
            (row,) = await fetch(_TABLE, name, hidden(name, "conflict"), hidden(name, "system"))
            if not row["columns"]:
                return None
            schema = "w_" + row["visible"].removeprefix("v_")
            keys = [
                _Key(k["name"], k["nulls_equal"], k["predicate"], tuple(k["items"]))
                for k in await fetch(_KEYS, schema, name)
            ]
            columns, accepted = tuple(row["columns"]), tuple(row["accepted"])
            self._tables[key] = _Table(
                name, row["visible"], columns, accepted, row["identities"], row["note"] is not None, tuple(keys)
            )
        return self._tables[key]

    async def _conflict(self, insert: pb.InsertStmt, number: int, fetch: Fetch, path: str) -> tuple[str, str] | None:
        """The CTE of the proposed rows, and the INSERT that takes them; None for what goes to the view as it is."""
        if not insert.HasField("on_conflict_clause"):
            return None
        table = await self._table(insert.relation, fetch, path)
        if table is None:
            await _no_view(insert.relation, fetch)
            return None
        if not table.accepted or table.triggers:
            refuse(refusals.TOO_WIDE if not table.triggers else refusals.STATEMENT_TRIGGERS)
        if _names_ours(insert):
            refuse(refusals.OUR_NAMES)
        clause, stage = insert.on_conflict_clause, f"_mm_{number}"
        alias = insert.relation.alias.aliasname or insert.relation.relname
        keys = await _arbiters(clause, table, alias, fetch)
        names = ", ".join(literal(key.name) for key in keys)
        columns = idents(table.columns)
        into = f"insert into {ident(table.schema)}.{ident(hidden(table.name, 'conflict'))} as {ident(alias)}"
        returning = _returning(insert, table, alias)
        proposed = f"{ident(stage)} as ({_proposed(insert, table)} returning *)"
        if clause.action == pb.ONCONFLICT_NOTHING:
            return proposed, (
                f"{into} ({columns}, _mm_arbiters) "
                f"select {columns}, array[{names}]::text[] from {ident(stage)}{returning}"
            )
        if len(keys) != 1:
            refuse(refusals.SEVERAL_KEYS)
        sets = _assignments(clause, table)
        if alias == "excluded":  # two of that name: only what mentions neither of them has a meaning
            whole = _over_shape(clause, table, alias)
            if await grouping.fails(whole, fetch) not in (None, _MAY_NOT):
                raise Unmet(f"explain {fixed.without_parameters(whole)}")
            alias = "_mm_t"
        hit, same = _same_key(keys[0], alias)
        wanted = f"({_expression(clause.where_clause)})" if clause.HasField("where_clause") else "true"
        assigned = ", ".join(f"_mm_set_{table.columns.index(name)}" for name, _ in sets)
        values = ", ".join(_value(value) for _, value in sets)
        set_names = ", ".join(literal(name) for name, _ in sets)
        return proposed, (
            f"{into} ({columns}, _mm_arbiters, _mm_found, _mm_wanted, _mm_sets, {assigned}) "
            f"select {idents(table.columns, 'excluded')}, array[{names}]::text[], "
            f"case when {hit} then {table.row(alias)} end, _mm_w._mm_wanted, array[{set_names}]::text[], {values} "
            f"from {ident(stage)} as excluded left join lateral (select * from "
            f"{ident(table.visible)}.{ident(table.name)} as {ident(alias)} where {same} limit 1) "
            f"as {ident(alias)} on true cross join lateral "
            f"(select case when {hit} then {wanted} end as _mm_wanted offset 0) as _mm_w{returning}"
        )


async def _no_view(relation: pb.RangeVar, fetch: Fetch) -> None:
    (row,) = await fetch(_IS_VIEW, relation.relname)
    if row[0]:
        refuse(refusals.VIEW_CONFLICT)


async def _arbiters(clause: pb.OnConflictClause, table: _Table, alias: str, fetch: Fetch) -> tuple[_Key, ...]:
    """The keys that the clause means; PostgreSQL infers them over the shape."""
    if not clause.HasField("infer"):
        if clause.action == pb.ONCONFLICT_UPDATE:
            raise Unmet(
                f"insert into {ident(table.schema)}.{ident(table.name)} default values on conflict do update set x = 1"
            )
        return table.keys
    if any(True for _ in postgast.find_nodes(clause.infer, pb.ParamRef)):
        refuse(refusals.PARAMETER_IN_TARGET)
    only = pb.OnConflictClause(action=pb.ONCONFLICT_NOTHING, infer=clause.infer)
    explain = f"explain (format json) {_over_shape(only, table, alias)}"
    try:
        (row,) = await fetch(explain)
    except Exception as error:
        if getattr(error, "sqlstate", None):
            raise Unmet(explain) from error
        raise
    plan = json.loads(row[0]) if isinstance(row[0], str) else row[0]  # as the connection decodes JSON
    arbiters = plan[0]["Plan"]["Conflict Arbiter Indexes"]
    return tuple(key for key in table.keys if key.name in arbiters)


def _over_shape(clause: pb.OnConflictClause, table: _Table, alias: str) -> str:
    """An INSERT into the shape, by which PostgreSQL tells what it makes of the clause."""
    probe = pb.ParseResult()
    made = probe.stmts.add().stmt.insert_stmt
    made.relation.CopyFrom(pb.RangeVar(schemaname=table.schema, relname=table.name, inh=True, relpersistence="p"))
    made.relation.alias.aliasname = alias
    made.override = pb.OVERRIDING_NOT_SET
    made.on_conflict_clause.CopyFrom(clause)
    text: str = postgast.deparse(probe)
    return text


def _names_ours(insert: pb.InsertStmt) -> bool:
    names = [one.aliasname for one in postgast.find_nodes(insert, pb.Alias)]
    names += [one.ctename for one in postgast.find_nodes(insert, pb.CommonTableExpr)]
    return any(name.startswith("_mm_") for name in names)


def _proposed(insert: pb.InsertStmt, table: _Table) -> str:
    tree = pb.ParseResult()
    stage = tree.stmts.add().stmt.insert_stmt
    stage.CopyFrom(insert)
    for field in ("on_conflict_clause", "returning_clause", "with_clause"):
        stage.ClearField(field)
    stage.relation.ClearField("alias")
    stage.relation.schemaname, stage.relation.relname = table.schema, hidden(table.name, "proposed")
    text: str = postgast.deparse(tree)
    return text


def _assignments(clause: pb.OnConflictClause, table: _Table) -> list[tuple[str, pb.Node]]:
    """Column and expression of each SET; rows of columns are taken apart."""
    found: list[tuple[str, pb.Node]] = []
    for item in clause.target_list:
        target = item.res_target
        value = target.val
        if value.HasField("multi_assign_ref"):
            several = value.multi_assign_ref
            if not several.source.HasField("row_expr") or len(several.source.row_expr.args) != several.ncolumns:
                refuse(refusals.SET_OF_SUBSELECT)
            value = several.source.row_expr.args[several.colno - 1]
        if target.indirection:
            refuse(refusals.SET_OF_PART)
        if value.HasField("row_expr"):
            refuse(refusals.SET_TO_ROW)
        if value.HasField("set_to_default"):
            refuse(refusals.SET_TO_DEFAULT)
        if target.name not in table.columns:
            raise Unmet(
                f"update {ident(table.visible)}.{ident(table.name)} set {ident(target.name)} = null where false"
            )
        if f"_mm_set_{table.columns.index(target.name)}" not in table.accepted:
            raise Unmet(
                f"update {ident(table.visible)}.{ident(table.name)} set {ident(target.name)} = null where false"
            )
        found.append((target.name, value))
    return found


def _value(value: pb.Node) -> str:
    """Evaluated only where the row is updated; what can't fail keeps its form, from which its type follows."""
    text = _expression(value)
    plain = value.HasField("a_const") or value.HasField("param_ref")
    return text if plain else f"case when _mm_w._mm_wanted then {text} end"


def _same_key(key: _Key, alias: str) -> tuple[str, str]:
    """(there is a row, it has the key of `excluded`): expressions over the aliases."""
    conditions: list[str] = []
    for item in key.items:
        left, right = _qualified(item, alias), _qualified(item, "excluded")
        equal = f"{left} operator(pg_catalog.=) {right}"
        conditions.append(
            f"({equal} or ({left} is not distinct from null and {right} is not distinct from null))"
            if key.nulls_equal
            else equal
        )
    if key.predicate:
        conditions += [_qualified(key.predicate, one) for one in (alias, "excluded")]
    hit = f"({ident(alias)}.*)::text" if key.nulls_equal else _qualified(key.items[0], alias)
    return f"{hit} is distinct from null", " and ".join(conditions)


def _qualified(text: str, alias: str) -> str:
    """The expression with its columns as the alias's, in parentheses."""
    tree = postgast.parse(f"select {text}")
    for reference in postgast.find_nodes(tree, pb.ColumnRef):
        column = pb.Node()
        column.CopyFrom(reference.fields[-1])
        del reference.fields[:]
        reference.fields.add().string.sval = alias
        reference.fields.add().CopyFrom(column)
    return f"({_expression(tree.stmts[0].stmt.select_stmt.target_list[0].res_target.val)})"


def _returning(insert: pb.InsertStmt, table: _Table, alias: str) -> str:
    """RETURNING without the hidden columns of the view that the rows now go through."""
    if not insert.HasField("returning_clause"):
        return ""
    clause = insert.returning_clause
    update = insert.on_conflict_clause.action == pb.ONCONFLICT_UPDATE
    if clause.options:
        refuse(refusals.OLD_ROWS)
    items: list[str] = []
    for item in clause.exprs:
        target = item.res_target
        for reference in postgast.find_nodes(target, pb.ColumnRef):
            first = reference.fields[0].string.sval
            if update and first in ("old", "new") and len(reference.fields) > 1 and alias != first:
                refuse(refusals.OLD_ROWS)
        fields = target.val.column_ref.fields
        if fields and fields[-1].HasField("a_star"):
            lead = fields[0].string.sval if len(fields) > 1 else alias
            items.append(idents(table.columns, ident(lead)))
            continue
        whole = f" as {ident(alias)}" if not target.name and _whole_row(target.val, table, alias) else ""
        _expand_rows(target, table, alias)
        items.append(_expression(target.val) + (f" as {ident(target.name)}" if target.name else whole))
    return f" returning {', '.join(items)}"


def _whole_row(node: pb.Node, table: _Table, alias: str) -> bool:
    if not node.HasField("column_ref"):
        return False
    fields = node.column_ref.fields
    named = fields[0].string.sval == alias and alias not in table.columns
    return bool(named and (len(fields) == 1 or fields[-1].HasField("a_star")))


def _expand_rows(message: Any, table: _Table, alias: str) -> None:
    """`t` and `t.*` within expressions stand for the row of the table, not of the view with hidden columns."""
    for descriptor, value in message.ListFields():
        if descriptor.type != descriptor.TYPE_MESSAGE:
            continue
        for item in value if descriptor.is_repeated else (value,):
            if isinstance(item, pb.Node) and _whole_row(item, table, alias):
                row = postgast.parse(f"select {table.row(alias)}")
                item.CopyFrom(row.stmts[0].stmt.select_stmt.target_list[0].res_target.val)
            else:
                _expand_rows(item, table, alias)


def _expression(node: pb.Node) -> str:
    tree = postgast.parse("select 1")
    tree.stmts[0].stmt.select_stmt.target_list[0].res_target.val.CopyFrom(node)
    text: str = postgast.deparse(tree)
    return text.removeprefix("SELECT ").strip()


def _common_table(item: pb.Node) -> str:
    tree = postgast.parse("with x as (select 1) select 1")
    clause = tree.stmts[0].stmt.select_stmt.with_clause
    clause.ctes[0].CopyFrom(item)
    text: str = postgast.deparse(tree)
    return text.removeprefix("WITH ").removesuffix(" SELECT 1").strip()


_KEYWORDS = frozenset({"CURRENT_DATE", "CURRENT_TIME", "CURRENT_TIMESTAMP", "LOCALTIME", "LOCALTIMESTAMP"})


def clock_calls(sql: str) -> str:
    """CURRENT_DATE and its kin as calls of the environment's functions of those names."""
    try:
        tokens = postgast.scan(sql).tokens
    except postgast.PgQueryError:
        return sql
    raw, parts, done = sql.encode(), [], 0
    for token in tokens:
        word = raw[token.start : token.end].decode()
        if word.upper() in _KEYWORDS:
            followed = raw[token.end :].lstrip().startswith(b"(")
            parts += [raw[done : token.start], f'"{word.lower()}"{"" if followed else "()"}'.encode()]
            done = token.end
    return b"".join([*parts, raw[done:]]).decode()
