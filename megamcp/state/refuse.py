"""What a `schema` state does not take, found before and after the DDL runs, each with reason and way out.

Before: the text is parsed, statements that are not on a short list are refused, names with a schema too, the keyword
forms of the clock (CURRENT_TIMESTAMP …) are rewritten to calls of the environment's `now()`. After: pg_catalog tells
what was really made. Nothing here decides by hope: a construct that is not known to be exact is a problem.
"""

from dataclasses import dataclass
from typing import Any

import postgast
from postgast import pg_query_pb2 as pb

from megamcp.state import bodies, refusals
from megamcp.state.catalog import Catalog
from megamcp.state.clock import SHADOWED
from megamcp.state.expressions import over_new
from megamcp.state.names import RESERVED_PREFIX
from megamcp.state.queries import named


@dataclass(frozen=True, slots=True)
class Problem:
    construct: str
    object: str
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """Statements to run, and what was found wrong in the text."""

    statements: tuple[str, ...]
    problems: tuple[Problem, ...]


MOST_COLUMNS = 1_596
DATABASE = "Use state kind 'database' for this environment."

_ALLOWED = {
    "create_stmt", "index_stmt", "create_enum_stmt", "create_domain_stmt", "alter_table_stmt", "create_seq_stmt",
    "alter_seq_stmt", "view_stmt", "create_function_stmt", "comment_stmt", "insert_stmt", "update_stmt",
    "delete_stmt", "select_stmt", "drop_stmt", "create_trig_stmt", "composite_type_stmt", "create_range_stmt",
    "alter_enum_stmt", "alter_domain_stmt", "rename_stmt",
}  # fmt: skip

_KEYWORDS = {
    pb.SVFOP_CURRENT_DATE: "current_date",
    pb.SVFOP_CURRENT_TIME: "current_time",
    pb.SVFOP_CURRENT_TIME_N: "current_time",
    pb.SVFOP_CURRENT_TIMESTAMP: "current_timestamp",
    pb.SVFOP_CURRENT_TIMESTAMP_N: "current_timestamp",
    pb.SVFOP_LOCALTIME: "localtime",
    pb.SVFOP_LOCALTIME_N: "localtime",
    pb.SVFOP_LOCALTIMESTAMP: "localtimestamp",
    pb.SVFOP_LOCALTIMESTAMP_N: "localtimestamp",
}
_TIME_TYPES = {"date", "time", "timetz", "timestamp", "timestamptz"}
_WALL_CLOCK = {"now", "today", "tomorrow", "yesterday"}


def prepare(text: str, where: str) -> Prepared:
    """Parses one file of SQL; `where` names it in problems."""
    try:
        tree = postgast.parse(text)
    except postgast.PgQueryError as error:
        problem = Problem("syntax", where, str(error), "PostgreSQL's parser does not take this text.")
        return Prepared((), (problem,))
    statements: list[str] = []
    problems: list[Problem] = []
    raw = text.encode()
    for statement in tree.stmts:
        kind = statement.stmt.WhichOneof("node") or "empty statement"
        source = raw[statement.stmt_location :][: statement.stmt_len or None].decode().strip()
        label = f"{where}: {' '.join(source.split())[:60]}"
        if kind not in _ALLOWED:
            problems.append(
                Problem(kind.removesuffix("_stmt"), label, "this statement is not part of a schema", DATABASE)
            )
            continue
        found = _look(statement.stmt, label)
        problems.extend(found)
        if not found:
            rewritten = _rewrite(statement.stmt)
            statements.append(postgast.deparse(_single(statement)) if rewritten else source)
    return Prepared(tuple(statements), tuple(problems))


def _single(statement: pb.RawStmt) -> pb.ParseResult:
    tree = pb.ParseResult()
    tree.stmts.add().stmt.CopyFrom(statement.stmt)
    return tree


def _name(parts: Any) -> list[str]:
    return [part.string.sval for part in parts if part.HasField("string")]


def _look(node: pb.Node, label: str) -> list[Problem]:
    problems: list[Problem] = []

    def add(construct: str, reason: str, hint: str) -> None:
        problem = Problem(construct, label, reason, hint)
        if problem not in problems:
            problems.append(problem)

    for _, message in postgast.walk(node):
        match message:
            case pb.RangeVar():
                if message.schemaname or message.catalogname:
                    add("schema name", f"names the schema {message.schemaname}", "Leave the schema out.")
                elif refusal := refusals.relation(message.relname):
                    add(refusal.construct, refusal.reason, refusal.hint)
                if message.relpersistence in ("t", "u"):
                    add("temporary or unlogged table", "its rows would belong to no rollout", "Make it a plain table.")
            case pb.FuncCall():
                names = _name(message.funcname)
                if len(names) > 1 and (names[0] != "pg_catalog" or names[-1] in SHADOWED):
                    add("schema name", f"calls {'.'.join(names)}", "Call it without the schema.")
                elif names[-1] == "setseed":
                    add("setseed", "chance is the rollout's own", "Give the environment a seed.")
                elif refusal := refusals.outside(names[-1], f"{names[-1]}()"):
                    add(refusal.construct, refusal.reason, refusal.hint)
            case pb.TypeName():
                names = _name(message.names)
                if len(names) > 1 and names[0] != "pg_catalog":
                    add("schema name", f"names the type {'.'.join(names)}", "Leave the schema out.")
            case pb.SQLValueFunction():
                if message.op not in _KEYWORDS:
                    add("current user", "every rollout shares one role", "Keep the user in a column.")
            case pb.TypeCast():
                kind = _name(message.type_name.names)
                value = message.arg.a_const.sval.sval if message.arg.HasField("a_const") else ""
                if kind and kind[-1] in _TIME_TYPES and value.strip().lower() in _WALL_CLOCK:
                    add("clock literal", f"'{value}' is the wall clock's, once", "Write now() or CURRENT_DATE.")
            case pb.CreateRangeStmt():
                for option in message.params:
                    if option.def_elem.defname in ("canonical", "subtype_diff"):
                        add("range type with a function", "the function may not outlive loading", "Leave it out.")
            case pb.ColumnDef():
                _look_column(message, add)
            case pb.CreateTrigStmt() if len(message.funcname) > 1:
                add("schema name", "the trigger's function has a schema", "Leave the schema out.")
            case pb.CreateFunctionStmt():
                _look_function(message, add)
            case pb.SelectStmt() if message.HasField("into_clause"):
                add("SELECT INTO", "makes a table in passing", "Write CREATE TABLE and INSERT.")
            case pb.CreateStmt():
                if message.HasField("partspec") or message.HasField("partbound") or message.inh_relations:
                    add("partitioned or inherited table", "layers already partition it", "Make it a plain table.")
                if message.HasField("of_typename"):
                    add("typed table", "its columns hang on a composite type", "List the columns.")
    return problems


def _look_column(column: pb.ColumnDef, add: Any) -> None:
    kind = _name(column.type_name.names)
    for constraint in column.constraints:
        raw = constraint.constraint.raw_expr
        value = raw.a_const.sval.sval if raw.HasField("a_const") else ""
        if kind and kind[-1] in _TIME_TYPES and value.strip().lower() in _WALL_CLOCK:
            add("clock literal", f"'{value}' is the wall clock's, once", "Write now() or CURRENT_DATE.")


def _look_function(function: pb.CreateFunctionStmt, add: Any) -> None:
    name = _name(function.funcname)[-1]
    if function.is_procedure:
        add("procedure", "it may end transactions", "Write it in the tool server.")
    if len(function.funcname) > 1:
        add("schema name", "the function's name has a schema", "Leave the schema out.")
    if name in SHADOWED or name.startswith("megamcp_"):
        add("function name", f"{name} is the state's own", "Choose another name.")
    options = {o.def_elem.defname: o.def_elem.arg for o in function.options}
    language = options["language"].string.sval if "language" in options else "sql"
    if language not in ("sql", "plpgsql"):
        hint = "Write it in SQL, PL/pgSQL or in the tool server."
        add(f"function in {language}", "only SQL and PL/pgSQL are known to be exact", hint)
        return
    for option in ("security", "support", "window", "set"):
        if option in options:
            add(f"function with {option.upper()}", "it would change whose rows or settings apply", "Leave it out.")
    try:
        for refusal in bodies.judge(function, language):
            add(refusal.construct, f"in the body: {refusal.reason}", refusal.hint)
        if language == "sql":
            for problem in _look(postgast.parse(bodies.text(function)), name):
                add(problem.construct, f"in the body: {problem.reason}", problem.hint)
    except postgast.PgQueryError as error:
        add("syntax", str(error), "PostgreSQL's parser does not take this body.")
    if function.HasField("sql_body"):
        _look_atomic(function.sql_body, name, add)


def _look_atomic(body: pb.Node, name: str, add: Any) -> None:
    """BEGIN ATOMIC and RETURN: the statements are in the tree, not in a text."""
    for problem in _look(_single_node(body), name):
        add(problem.construct, f"in the body: {problem.reason}", problem.hint)
    for _, message in postgast.walk(body):
        if isinstance(message, pb.InsertStmt | pb.UpdateStmt | pb.DeleteStmt | pb.MergeStmt):
            hint = "Write the body as a text (AS $$ … $$)."
            add("writes in BEGIN ATOMIC", "its statements are fixed before the views are there", hint)
            return


def _single_node(node: pb.Node) -> pb.Node:
    copy = pb.Node()
    copy.CopyFrom(node)
    return copy


def _rewrite(node: Any) -> bool:
    """Keyword forms of the clock become calls of functions of those names. True when any was found."""
    changed = False
    for descriptor, value in node.ListFields():
        if descriptor.type != descriptor.TYPE_MESSAGE:
            continue
        for item in value if descriptor.is_repeated else (value,):
            if isinstance(item, pb.Node) and item.WhichOneof("node") == "sqlvalue_function":
                function = item.sqlvalue_function
                if function.op not in _KEYWORDS:  # refused by `_look`
                    continue
                digits = str(function.typmod) if function.typmod >= 0 else ""
                replacement = postgast.parse(f'select "{_KEYWORDS[function.op]}"({digits})')
                item.CopyFrom(replacement.stmts[0].stmt.select_stmt.target_list[0].res_target.val)
                changed = True
            elif isinstance(item, pb.CreateFunctionStmt):
                changed = bodies.clock_calls(item) or changed
                changed = _rewrite(item) or changed
            else:
                changed = _rewrite(item) or changed
    return changed


_JUDGE = named("judge.sql")["judge"]


async def judge(conn: Any, schema: str, ours: list[int]) -> list[Problem]:
    """What pg_catalog shows in `schema` that a state can't take; `ours` are the state's own functions."""
    return [Problem(*row) for row in await conn.fetch(_JUDGE, schema, ours)]


def judge_catalog(found: Catalog) -> list[Problem]:
    """What only the read catalog shows: names that clash, expressions over whole rows."""
    problems: list[Problem] = []
    for table in found.tables:
        if len(table.columns) > MOST_COLUMNS:
            problems.append(
                Problem(
                    "too many columns", table.name, f"PostgreSQL's 1,600 less hidden ones: {MOST_COLUMNS}", "Split it."
                )
            )
        problems.extend(
            Problem(
                "column name",
                f"{table.name}.{column.name}",
                f"names with {RESERVED_PREFIX} are hidden columns",
                "Rename it.",
            )
            for column in table.columns
            if column.name.startswith(RESERVED_PREFIX)
        )
        expressions = [(check.name, check.expression) for check in table.checks]
        expressions += [(c.name, c.generated) for c in table.columns if c.generated]
        for key in table.keys:
            texts = [item for item, name in zip(key.items, key.columns, strict=True) if not name]
            expressions += [(key.name, text) for text in [*texts, *((key.predicate,) if key.predicate else ())]]
        problems.extend(
            Problem(
                "expression over a whole row", f"{table.name}.{name}", "NEW can't stand for it", "Name the columns."
            )
            for name, text in expressions
            if over_new(text, table.names) is None
        )
    return problems
