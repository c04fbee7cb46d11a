"""The check of each SQL statement before it runs on copy-on-write state.

`check_statement` is called by the SDK's connection for every statement a tool sends, `check_query` by the
gateway for the read-only SQL of evaluators. Both parse with libpg_query (PostgreSQL's own grammar, through
`postgast`) and raise `UnsupportedStatement` with the construct, the reason and the way out. What they accept
runs as on plain tables.

Invariants:
- A syntax error is no refusal: the text passes, and PostgreSQL, whose grammar is the same, reports it.
- No text, however hostile, crashes or stalls the process: length and nesting are bounded before the parser
  runs (libpg_query recurses over the tree it built, and a chain of 30,000 operators overran its stack).
- Verdicts are cached by text. Values belong into parameters, so a tool has few texts.

Not covered: string parameters such as 'now' that PostgreSQL itself casts to a time, and functions of the
environment, which were checked when its schema was loaded.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

from postgast import PgQueryError, scan
from postgast.native import lib

from megamcp.errors import UnsupportedStatement
from megamcp.state import refusals
from megamcp.state.refusals import Refusal

MAX_BYTES = 1 << 20
# A text this short can't nest deep enough to harm; a longer one has its nesting bounded by its tokens first.
_SURELY_SHALLOW = 8_000
_MAX_CHAIN = 4_000
_CACHED_LENGTH = 16_000

_TIME_TYPES = frozenset(
    {
        "date",
        "time",
        "timetz",
        "timestamp",
        "timestamptz",
        "daterange",
        "tsrange",
        "tstzrange",
        "datemultirange",
        "tsmultirange",
        "tstzmultirange",
    }
)
_RELATIVE_TIMES = ("now", "today", "tomorrow", "yesterday")

Node = dict[str, Any]


class _Refused(Exception):
    """Carries a refusal out of the tree walk."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.construct)
        self.refusal = refusal


def check_statement(sql: str, *, visible: str | None = None, savepoints: bool = False) -> None:
    """Raise `UnsupportedStatement` if `sql` can't run exactly on copy-on-write state.

    `visible` is the state's visible PostgreSQL schema, which may be named in the text; by default any name of
    the form `v_<hash>` may (privileges decide). `savepoints` admits SAVEPOINT, RELEASE and ROLLBACK TO.
    """
    refusal = _verdict(sql, visible, savepoints, False)
    if refusal is not None:
        refuse(refusal)


def check_query(sql: str, *, visible: str | None = None) -> None:
    """Raise `UnsupportedStatement` unless `sql` is one SELECT, VALUES or TABLE."""
    refusal = _verdict(sql, visible, False, True)
    if refusal is not None:
        refuse(refusal)


def body_verdict(sql: str) -> Refusal | None:
    """What is wrong with statements of a function's body, which runs as it is. A syntax error is no refusal."""
    try:
        for raw in _parse(sql.encode()) or ():
            kind = next(iter(raw["stmt"]))
            if kind in refusals.IN_FUNCTION:
                return refusals.IN_FUNCTION[kind]
            if kind not in refusals.READ_STATEMENTS | refusals.WRITE_STATEMENTS:
                return refusals.IN_FUNCTION["kind"]
            _Check(None, False, False, function=True).statement(raw["stmt"])
    except _Refused as refused:
        return refused.refusal
    except RecursionError:
        return refusals.TOO_DEEP
    return None


def check_foreign_query(sql: str) -> None:
    """Raise `UnsupportedStatement` unless `sql` is one query, of any kind: the database is its reader's alone."""
    kinds = kinds_of(sql)
    if len(kinds) > 1:
        refuse(refusals.SEVERAL)
    if kinds and kinds[0] not in refusals.READ_STATEMENTS:
        refuse(refusals.NOT_A_QUERY)


def refuse(refusal: Refusal) -> NoReturn:
    raise UnsupportedStatement(
        f"{refusal.construct} is not supported here: {refusal.reason}.",
        hint=refusal.hint,
        construct=refusal.construct,
        reason=refusal.reason,
    )


@lru_cache(maxsize=2048)
def _cached_verdict(sql: str, visible: str | None, savepoints: bool, query: bool) -> Refusal | None:
    return _judge(sql, visible, savepoints, query)


@lru_cache(maxsize=32)
def _cached_long_verdict(sql: str, visible: str | None, savepoints: bool, query: bool) -> Refusal | None:
    return _judge(sql, visible, savepoints, query)


def kinds_of(sql: str) -> list[str]:
    """Parse-tree names of the statements in a text (`SelectStmt`); empty where PostgreSQL will report a syntax error.

    Raises `UnsupportedStatement` for a text that can't be parsed safely.
    """
    refusal = _unsafe(sql)
    if refusal is None:
        try:
            return [kind for raw in _parse(sql.encode()) or () for kind in raw["stmt"]]
        except _Refused as refused:
            refusal = refused.refusal
    refuse(refusal)


def _verdict(sql: str, visible: str | None, savepoints: bool, query: bool) -> Refusal | None:
    """Long texts have a small cache of their own, so that the caches stay below 64 MiB whatever is sent."""
    cached = _cached_verdict if len(sql) <= _CACHED_LENGTH else _cached_long_verdict
    return cached(sql, visible, savepoints, query)


def _judge(sql: str, visible: str | None, savepoints: bool, query: bool) -> Refusal | None:
    if refusal := _unsafe(sql):
        return refusal
    try:
        statements = _parse(sql.encode())
        if statements is None:
            return None
        if len(statements) > 1:
            return refusals.SEVERAL
        if query and not statements:
            return refusals.NOT_A_QUERY
        check = _Check(visible, savepoints, query)
        for raw in statements:
            check.statement(raw["stmt"])
    except _Refused as refused:
        return refused.refusal
    except RecursionError:
        return refusals.TOO_DEEP
    return None


def _unsafe(sql: str) -> Refusal | None:
    """Why a text can't be given to the parser."""
    try:
        text = sql.encode()
    except UnicodeEncodeError:
        return refusals.NOT_TEXT
    if b"\0" in text:
        return refusals.NOT_TEXT
    if len(text) > MAX_BYTES:
        return refusals.TOO_LONG
    if len(text) > _SURELY_SHALLOW and _longest_chain(sql) > _MAX_CHAIN:
        return refusals.TOO_DEEP
    return None


def _parse(text: bytes) -> list[Node] | None:
    """The statements of a text; None when PostgreSQL will report a syntax error.

    The tree is read as JSON: its protobuf form can't be read past 100 levels, some 45 chained operators.
    """
    result = lib.pg_query_parse(text)
    try:
        if result.error:
            message = result.error.contents.message or b""
            if b"exhausted" in message or b"stack depth" in message:
                raise _Refused(refusals.TOO_DEEP)
            return None
        tree: bytes = result.parse_tree
    finally:
        lib.pg_query_free_parse_result(result)
    statements: list[Node] = json.loads(tree).get("stmts", [])
    return [raw for raw in statements if raw.get("stmt")]


def _longest_chain(sql: str) -> int:
    """A bound of the parse tree's depth: tokens since the last comma, summed over the open parentheses."""
    try:
        tokens = scan(sql).tokens
    except PgQueryError:
        return 0  # a token is broken, so the parser stops before it builds anything
    opening, closing, comma = (ord(c) for c in "(),")
    open_counts: list[int] = []
    outer = count = longest = 0
    for item in tokens:
        token = item.token
        if token == opening:
            open_counts.append(count + 1)
            outer += count + 1
            count = 0
        elif token == closing and open_counts:
            count = open_counts.pop()
            outer -= count
        elif token == comma:
            count = 0
        else:
            count += 1
            longest = max(longest, outer + count)
    return longest


def _names(parts: list[Node]) -> list[str]:
    return [part["String"]["sval"] for part in parts if part.get("String")]


class _Check:
    """One walk over one statement. Raises `_Refused` at the first construct that is refused."""

    def __init__(self, visible: str | None, savepoints: bool, query: bool, *, function: bool = False) -> None:
        self._visible = visible
        self._savepoints = savepoints
        self._query = query
        self._inside = function
        self._own_names: set[str] = set()
        self._system_columns: list[str] = []
        self._written: list[str] = []
        self._merges = False
        # Keys are node types, and the fields in which the JSON form leaves the node's type out.
        self._visitors: dict[str, Callable[[Node], None]] = {
            "RangeVar": self._relation,
            "relation": self._relation,
            "FuncCall": self._function,
            "ColumnRef": self._column,
            "TypeName": self._type,
            "typeName": self._type,
            "TypeCast": self._cast,
            "CommonTableExpr": self._common_table,
            "A_Expr": self._operator,
            "ResTarget": self._own_name,
            "Alias": self._alias,
            "alias": self._alias,
            "lockingClause": lambda _: self._lock(),
            "intoClause": lambda _: self._refuse(refusals.SELECT_INTO),
            "RangeTableSample": lambda _: self._refuse(refusals.SAMPLE),
            "CurrentOfExpr": lambda _: self._refuse(refusals.CURRENT_OF),
        }

    @staticmethod
    def _refuse(refusal: Refusal | None) -> None:
        if refusal is not None:
            raise _Refused(refusal)

    def statement(self, wrapped: Node) -> None:
        ((kind, node),) = wrapped.items()
        self._statement_kind(kind, node)
        if kind in refusals.WRITE_STATEMENTS:
            self._write(kind, node)
        self._walk(node)
        for name in self._system_columns:
            if name not in self._own_names:
                self._refuse(refusals.system_column(name))

    def _statement_kind(self, kind: str, node: Node) -> None:
        if kind in refusals.READ_STATEMENTS:
            return
        if kind == "ExplainStmt":
            self._refuse(refusals.EXPLAIN)
        if self._query:
            known = kind in refusals.WRITE_STATEMENTS | refusals.CURSOR_STATEMENTS | refusals.OTHER_STATEMENTS
            refusal = refusals.NOT_A_QUERY if known else refusals.statement(kind)
            self._refuse(refusals.NOT_A_QUERY if kind == "VariableShowStmt" else refusal)
        if kind in refusals.WRITE_STATEMENTS | refusals.OTHER_STATEMENTS:
            return
        if kind == "DeclareCursorStmt":
            with_hold = 0x0020  # CURSOR_OPT_HOLD in nodes/parsenodes.h
            self._refuse(refusals.WITH_HOLD if node.get("options", 0) & with_hold else None)
        elif kind == "VariableSetStmt":
            name = node.get("name", "")
            values = node.get("kind") in {"VAR_SET_VALUE", "VAR_SET_DEFAULT"}
            self._refuse(refusals.setting(name if values else "", bool(node.get("is_local"))))
        elif not (kind == "TransactionStmt" and self._savepoints and refusals.is_savepoint(node["kind"])):
            self._refuse(refusals.statement(kind))

    def _lock(self) -> None:
        self._refuse(refusals.ROW_LOCK if self._query else None)
        self._refuse(refusals.IN_FUNCTION["lock"] if self._inside else None)

    def _walk(self, root: Node) -> None:
        """Visit every node below `root`, in no particular order and without recursion."""
        visitors = self._visitors
        pending: list[Any] = [root]
        while pending:
            value = pending.pop()
            if isinstance(value, list):
                pending.extend(value)
                continue
            for key, child in value.items():
                if isinstance(child, dict):
                    if visit := visitors.get(key):
                        visit(child)
                    pending.append(child)
                elif isinstance(child, list):
                    if key in {"lockingClause", "intoClause"}:
                        visitors[key](value)
                    pending.append(child)
                elif key == "override" and child != "OVERRIDING_NOT_SET":
                    self._refuse(refusals.IN_FUNCTION["override"] if self._inside else None)
                    self._refuse(None if "relation" in value else refusals.OVERRIDING)  # in an action of MERGE

    def _relation(self, node: Node) -> None:
        if "relname" not in node:
            return  # a field named `relation` that holds a wrapped node, which is visited by itself
        if "catalogname" in node:
            self._refuse(refusals.schema(node["catalogname"], "", "table"))
        if "schemaname" in node:
            self._refuse(refusals.schema(node["schemaname"], self._visible, "table"))
        self._refuse(refusals.relation(node["relname"]))

    def _function(self, node: Node) -> None:
        *qualifier, name = _names(node["funcname"])
        arguments = node.get("args", [])
        if qualifier:
            self._refuse(refusals.schema(qualifier[-1], self._visible, "function"))
            if qualifier[-1] != "pg_catalog":
                return
        if name == "set_config":
            self._set_config(arguments)
        self._refuse(refusals.function(name, bool(qualifier), len(arguments)))
        if self._query and name in {"nextval", "setval"}:
            self._refuse(refusals.NO_SEQUENCE_MOVES)
        if self._query and name.startswith("pg_sleep"):
            self._refuse(refusals.NO_SLEEP)

    def _set_config(self, arguments: list[Node]) -> None:
        """set_config(name, value, is_local) with constants is SET; with anything else it can't be judged."""
        constants = [argument.get("A_Const", {}) for argument in arguments]
        name = constants[0].get("sval", {}).get("sval", "") if constants else ""
        local = len(constants) == 3 and constants[2].get("boolval", {}).get("boolval") is True
        self._refuse(refusals.setting(name, local))

    def _column(self, node: Node) -> None:
        names = _names(node["fields"])
        if len(node["fields"]) >= 3:
            self._refuse(refusals.schema(names[len(node["fields"]) - 3], self._visible, "table"))
        if names and "String" in node["fields"][-1] and names[-1] in refusals.SYSTEM_COLUMNS:
            self._system_columns.append(names[-1])

    def _own_name(self, node: Node) -> None:
        self._own_names.add(node.get("name", ""))

    def _alias(self, node: Node) -> None:
        self._own_names.update(_names(node.get("colnames", [])))

    def _type(self, node: Node) -> None:
        names = _names(node.get("names", []))
        if len(names) > 1:
            self._refuse(refusals.schema(names[-2], self._visible, "type"))

    def _cast(self, node: Node) -> None:
        names = _names(node.get("typeName", {}).get("names", []))
        text = node.get("arg", {}).get("A_Const", {}).get("sval", {}).get("sval", "").lower()
        if names and names[-1] in _TIME_TYPES and any(word in text for word in _RELATIVE_TIMES):
            self._refuse(refusals.TIME_LITERAL)

    def _common_table(self, node: Node) -> None:
        self._own_names.update(_names(node.get("aliascolnames", [])))
        ((kind, query),) = node["ctequery"].items()
        if kind != "SelectStmt":
            self._refuse(refusals.NOT_A_QUERY if self._query else None)
            self._write(kind, query)

    def _write(self, kind: str, node: Node) -> None:
        """The parts of one command that write: PostgreSQL's triggers can't tell two of one table apart."""
        name = node["relation"]["relname"]
        if self._inside:
            self._refuse(refusals.IN_FUNCTION["several"] if self._written else refusals.IN_FUNCTION.get(kind))
        self._refuse(refusals.twice(name) if name in self._written else None)
        self._written.append(name)
        self._merges = self._merges or kind == "MergeStmt"
        self._refuse(refusals.MERGE_AND_MORE if self._merges and len(self._written) > 1 else None)

    def _operator(self, node: Node) -> None:
        names = _names(node.get("name", []))
        if len(names) > 1:
            self._refuse(refusals.schema(names[-2], self._visible, "operator"))
