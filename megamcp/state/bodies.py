"""Bodies of an environment's functions, in SQL and PL/pgSQL: what is in them, and whether it can be exact.

Each statement and expression is judged like one that a tool sends (`statements`), with less allowed: a function's text
is not rewritten when it runs. ON CONFLICT is rewritten once, when the state is made (`rewritten`). Dynamic SQL can't be
judged and is refused. PL/pgSQL is parsed by libpg_query, which names every expression of it.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import postgast
from postgast import pg_query_pb2 as pb
from postgast.errors import check_error
from postgast.native import lib

from megamcp.state import refusals, rewrites
from megamcp.state.grouping import CLAUSE
from megamcp.state.refusals import Refusal
from megamcp.state.statements import body_verdict

_DYNAMIC = {"PLpgSQL_stmt_dynexecute", "PLpgSQL_stmt_dynfors", "dynquery"}
_CONTROL = {"PLpgSQL_stmt_commit", "PLpgSQL_stmt_rollback"}
_CLOCK_LITERAL = re.compile(r"\s*'\s*(now|today|tomorrow|yesterday)\s*'\s*", re.I)
_REWRITTEN = re.compile(rf"conflict|{CLAUSE.pattern}", re.I)
_STATEMENT, _EXPRESSION = 0, 2  # parse modes of PL/pgSQL; others are assignments


def judge(function: pb.CreateFunctionStmt, language: str) -> Iterator[Refusal]:
    """What a function's body holds that can't be exact. Raises PgQueryError where it can't be parsed."""
    if language == "sql":
        if refusal := body_verdict(text(function)):
            yield refusal
        return
    for kind, query, mode in _parts(function):
        if kind in _DYNAMIC:
            yield refusals.DYNAMIC
        elif kind in _CONTROL:
            yield refusals.TRANSACTION
        elif mode == _STATEMENT:
            if refusal := body_verdict(query):
                yield refusal
        else:
            for expression in (query,) if mode == _EXPRESSION else _sides(query):
                if _CLOCK_LITERAL.fullmatch(expression):  # assigned to a variable, perhaps of a time
                    yield refusals.TIME_LITERAL
                if refusal := body_verdict(f"select {expression}"):
                    yield refusal


def text(function: pb.CreateFunctionStmt) -> str:
    """The body as it was written; empty for one in BEGIN ATOMIC."""
    for option in function.options:
        if option.def_elem.defname == "as":
            body: str = option.def_elem.arg.list.items[0].string.sval
            return body
    return ""


def replace(function: pb.CreateFunctionStmt, body: str) -> None:
    for option in function.options:
        if option.def_elem.defname == "as":
            option.def_elem.arg.list.items[0].string.sval = body


def _parts(function: pb.CreateFunctionStmt) -> Iterator[tuple[str, str, int]]:
    """(kind of node, query, parse mode) of all that a PL/pgSQL function evaluates."""
    tree = pb.ParseResult()
    tree.stmts.add().stmt.create_function_stmt.CopyFrom(function)
    for kind in postgast.find_nodes(tree, pb.TypeName):  # libpg_query knows no schemas
        del kind.names[:-1]
    result = lib.pg_query_parse_plpgsql(postgast.deparse(tree).encode())
    try:
        check_error(result)
        dump: str = result.plpgsql_funcs.decode()
    finally:
        lib.pg_query_free_plpgsql_parse_result(result)
    # libpg_query writes the variables of a trigger function (TG_OP and its like) as `{}}`.
    head, action, rest = dump.partition('"action":')
    pending: list[tuple[str, Any]] = [("", json.loads(re.sub(r"\{\}\}(?=[,\]])", "{}", head) + action + rest))]
    while pending:
        kind, value = pending.pop()
        if isinstance(value, list):
            pending.extend((kind, item) for item in value)
        elif isinstance(value, dict):
            if kind == "PLpgSQL_expr":
                yield kind, value["query"], value.get("parseMode", 0)
            elif kind in _DYNAMIC or kind in _CONTROL:
                yield kind, "", _STATEMENT
            pending.extend(value.items())


def _sides(assignment: str) -> Iterator[str]:
    """`a[i] := x` evaluates a[i], in a sense, and x."""
    raw, depth = assignment.encode(), 0
    for token in postgast.scan(assignment).tokens:
        word = raw[token.start : token.end]
        depth += (word in (b"[", b"(")) - (word in (b"]", b")"))
        if depth == 0 and word in (b":=", b"="):
            yield raw[: token.start].decode()
            yield raw[token.end :].decode()
            return


async def rewritten(definition: str, rewrite: Callable[[str], Awaitable[tuple[str, bool]]]) -> str | None:
    """The CREATE FUNCTION with its ON CONFLICT and GROUP BY a key as the views take them; None when it has none."""
    tree = postgast.parse(definition)
    function = tree.stmts[0].stmt.create_function_stmt
    body = text(function)
    if not _REWRITTEN.search(body):
        return None
    options = {option.def_elem.defname: option.def_elem.arg for option in function.options}
    if options["language"].string.sval == "sql":
        queries = {("", query.removesuffix(";").strip()) for query in postgast.split(body)}
    else:
        queries = {part for _, query, mode in _parts(function) for part in _queries(query, mode)}
    changed = body
    for lead, query in sorted(queries, key=lambda part: len(part[1]), reverse=True):
        if not _REWRITTEN.search(query):
            continue
        other, runs = await rewrite(lead + query)
        other = other.removeprefix(lead)
        if not runs:
            raise NotRewritten(query)
        if other == query:
            continue
        if query in changed:
            changed = changed.replace(query, other)
        elif places := _with_into(query, changed):
            for place, into in places:
                changed = changed.replace(place, f"{other} {into}")
        else:
            raise NotRewritten(query)
    if changed == body:
        return None
    replace(function, changed)
    made: str = postgast.deparse(tree)
    return made


def _queries(text: str, mode: int) -> Iterator[tuple[str, str]]:
    """(what makes a statement of it, a statement or expression)."""
    if mode == _STATEMENT:
        yield "", text.strip()
    else:
        for expression in (text,) if mode == _EXPRESSION else _sides(text):
            yield "SELECT ", expression.strip()


def _with_into(query: str, body: str) -> set[tuple[str, str]]:
    """(statement, its INTO) of a query that PL/pgSQL took INTO out of: its bytes are spaces there."""
    raw, whole = query.encode(), body.encode()
    found: set[tuple[str, str]] = set()
    for gap in re.finditer(rb"\s{6,}", raw):
        before, after = raw[: gap.start()], raw[gap.end() :]
        for match in re.finditer(re.escape(before), whole):
            into = whole[match.end() : match.end() + len(gap[0])]
            end = match.start() + len(raw)
            if re.match(rb"\s*into\b", into, re.I) and whole[end - len(after) : end] == after:
                found.add((whole[match.start() : end].decode(), into.decode().strip()))
    return found


class NotRewritten(Exception):
    """A query of a function that ON CONFLICT or GROUP BY a key can't be rewritten in."""


def clock_calls(function: pb.CreateFunctionStmt) -> bool:
    """CURRENT_DATE and its like in the body become calls; true when there were any."""
    body = text(function)
    changed = rewrites.clock_calls(body)
    if changed == body:
        return False
    replace(function, changed)
    return True
