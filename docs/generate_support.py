"""Writes `docs/support.md` from the tests: `python docs/generate_support.py`. A test compares.

A line of the page is a test that carries `@pytest.mark.support(construct, "exact")` or
`@pytest.mark.support(construct, "refused: reason")` (as a decorator, or among the `marks` of a `pytest.param`): the
page can't claim what no test shows. Refusals of statements come from the table of `tests/unit/test_statements.py`, and
of schemas from tables named REFUSED beside the overlay's tests, with the reasons that the checks give.
"""

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

from megamcp.errors import UnsupportedStatement
from megamcp.state import refuse
from megamcp.state.statements import check_statement

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "support.md"
INTRODUCTION = """# What a `schema` state supports

*Exact*: same rows, counts, RETURNING, SQLSTATE and constraint name as on a plain table. *Refused*: an error that names
the construct, the reason and the way out, when the environment is loaded or (statements, SQLSTATE 0A000) before the
statement runs. This page is made from the tests by `python docs/generate_support.py`; the last column names the test
that shows it.
"""

Line = tuple[str, str, str]
"""Construct, verdict, test."""


def marked() -> Iterator[Line]:
    """Every `pytest.mark.support(…)` under tests/, with the test that carries it."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.support":
                    construct, verdict = (ast.literal_eval(argument) for argument in call.args)
                    if verdict != "exact" and not verdict.startswith("refused: "):
                        raise ValueError(f"{path}:{call.lineno}: neither 'exact' nor 'refused: reason'")
                    name = getattr(node, "name", "table")
                    yield construct, verdict, f"{path.relative_to(ROOT / 'tests')}: {name}"


def refused_statements() -> Iterator[Line]:
    place = "unit/test_statements.py"
    table = runpy.run_path(str(ROOT / "tests" / place))["REFUSED"]
    for sql, construct in table.items():
        try:
            check_statement(sql)
        except UnsupportedStatement as error:
            yield construct, f"refused: {error.extra['reason']}", f"{place}: {' '.join(sql.split())[:50]}"


def refused_schemas() -> Iterator[Line]:
    """From the tables of refused DDL; the reason where the text alone shows it."""
    for name in ("schemas", "functions", "triggers"):
        place = f"integration/overlay/test_overlay_{name}.py"
        if not (ROOT / "tests" / place).exists():
            continue
        for construct, ddl in runpy.run_path(str(ROOT / "tests" / place))["REFUSED"].items():
            reasons = {p.construct: p.reason for p in refuse.prepare(ddl, "schema").problems}
            verdict = f"refused: {reasons[construct]}" if construct in reasons else "refused"
            yield construct, verdict, f"{place}: {' '.join(ddl.split())[:50]}"


def page() -> str:
    """The text that `support.md` must have."""
    lines = list(marked())
    exact = [line for line in lines if line[1] == "exact"]
    at_load = [line for line in lines if line[1] != "exact"] + list(refused_schemas())
    parts = [INTRODUCTION]
    for title, found in (
        ("Exact", exact),
        ("Refused when an environment is loaded, or by a statement's circumstances", at_load),
        ("Refused statements", list(refused_statements())),
    ):
        parts.append(f"\n## {title}\n\n| construct | verdict | test |\n| --- | --- | --- |\n")
        first: dict[tuple[str, str], str] = {}
        for construct, verdict, test in found:
            first.setdefault((construct, verdict), test)
        parts += [
            f"| {_cell(construct)} | {_cell(verdict)} | `{_cell(test)}` |\n"
            for (construct, verdict), test in sorted(first.items(), key=lambda item: item[0][0].lower())
        ]
    return "".join(parts)


def _cell(text: str) -> str:
    """Control characters and lone surrogates, which some refused texts hold, are written as escapes."""
    return "".join(repr(c)[1:-1] if c < " " or "\ud800" <= c <= "\udfff" else c for c in text).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
