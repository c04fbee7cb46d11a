"""The search is searched: the overlay is broken on purpose, in one place at a time, and each break must be found.

So a comparison that compares nothing, or a generator that never draws what would tell, is seen. Runs where
`FUZZ_SECONDS` is set; one break takes the search some seconds to some minutes.
"""

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megamcp.state import (
    catalog,
    clock,
    companions,
    digests,
    foreign_keys,
    keyless,
    late,
    probes,
    rewrites,
    squash,
    triggers,
    user_triggers,
)
from megamcp.state.names import STAMP
from tests.integration.overlay.test_differential import FUZZ_SECONDS, Search, one_turn, search

__all__ = ["search"]

PROGRAMS = 60
"""What the search may take to find a break: some five turns, half a minute to some minutes."""
Patch = pytest.MonkeyPatch
Break = Callable[[Patch], object]


def _text(module: Any, name: str, old: str, new: str) -> Break:
    """The SQL that a function makes, with what matches `old` replaced."""
    made = getattr(module, name)

    def altered(*arguments: Any, **named: Any) -> Any:
        text = made(*arguments, **named)
        return None if text is None else re.sub(old, new, text)

    return lambda patch: patch.setattr(module, name, altered)


def _instead(module: Any, name: str, other: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Break:
    return lambda patch: patch.setattr(module, name, other(getattr(module, name)))


def _clock(old: str, new: str) -> Break:
    text = clock._SQL["core"]
    assert old in text
    return lambda patch: patch.setitem(clock._SQL, "core", text.replace(old, new))  # type: ignore[arg-type]


async def _nothing(*_: Any) -> None:
    """In place of a step that is left out."""


BREAKS: dict[str, Break] = {
    "unique and foreign keys don't look into the base": _text(probes, "_shows", r"^\(exists", "(false and exists"),
    "a row that was deleted still is a parent": _text(probes, "_by_key", r"select not \S+ from", "select true from"),
    "ON DELETE CASCADE deletes nothing": _text(foreign_keys, "_action", "(delete from .* where) ", r"\1 false and "),
    "ON UPDATE and SET NULL change nothing": _text(foreign_keys, "_action", "(update .* where) ", r"\1 false and "),
    "RESTRICT is told as NO ACTION": _text(foreign_keys, "_action", "'23001'", "'23503'"),
    "ON DELETE SET NULL takes all columns": _instead(
        foreign_keys,
        "_action",
        lambda made: lambda s, v, c, foreign, *a, **k: made(s, v, c, replace(foreign, set_columns=()), *a, **k),
    ),
    "MATCH FULL takes what is mixed": _text(
        foreign_keys, "_event_function", r"if num_nulls\(", "if false and num_nulls("
    ),
    "deferred checks are lost": _instead(late, "put_off", lambda _: lambda *_: "null;"),
    "a row met twice is counted twice": _text(triggers, "_touched", "return null;", "return old;"),
    "UPDATE takes nulls": _text(
        triggers, "row_checks", "is not distinct from null then", "is not distinct from null and tg_op = 'INSERT' then"
    ),
    "UPDATE passes by CHECK": _text(triggers, "row_checks", "is false then", "is false and tg_op = 'INSERT' then"),
    "NULLS NOT DISTINCT is forgotten": _instead(
        catalog, "_key", lambda made: lambda *a: replace(made(*a), nulls_equal=False)
    ),
    "a partial key counts all rows": _instead(
        catalog, "_key", lambda made: lambda *a: replace(made(*a), predicate=None)
    ),
    "rows that look alike are taken again": _text(keyless, "create", rf" and _mm_d.{STAMP} <> _mm_statement", ""),
    "UPDATE OF is forgotten": _text(user_triggers, "_condition", r"current_setting\('megamcp.o[^=]* = \S+", "true"),
    "WHEN is forgotten": _instead(
        user_triggers, "_parts", lambda made: lambda trigger: replace(made(trigger), condition=None)
    ),
    "AFTER triggers and foreign keys change places": _instead(
        user_triggers, "fire_after", lambda made: lambda *a, early, **k: made(*a, early=not early, **k)
    ),
    "RESTART IDENTITY is forgotten": _instead(companions, "_restarted", lambda _: lambda *_: []),
    "DO UPDATE passes by its WHERE": _text(companions, "_conflict", "_mm_row._mm_wanted is not true", "false"),
    "ON CONFLICT turns the rows around": _text(rewrites, "_returning", "^", " order by 1 desc"),
    "a sequence goes on after a rollback": _clock(
        "c.layer = any (split_part(_bound, '|', 1)::bigint[])", "(c.layer > 0 or _bound <> '')"
    ),
    "digests leave a table out": _instead(
        digests, "freeze", lambda made: lambda state, tables: made(state, tables[1:])
    ),
    "a diff shows changes only": _text(digests, "diff", "is distinct from", "<>"),
    "a head is not moved to the squashed layer": lambda patch: patch.setattr(squash, "move_head", _nothing),
}


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not FUZZ_SECONDS, reason="set FUZZ_SECONDS to search longer than CI does")
def test_each_break_is_found(search: Search, record_property: Callable[[str, object], None]) -> None:
    lines: list[str] = []
    missed: list[str] = []
    for name, broken in BREAKS.items():
        start, programs, statements = time.monotonic(), search.report.programs, search.report.statements.total()
        with pytest.MonkeyPatch.context() as patch:
            broken(patch)
            found = _found(search, programs + PROGRAMS)
        programs = search.report.programs - programs
        statements = search.report.statements.total() - statements
        took = f"{programs:3} programs {statements:5} statements {time.monotonic() - start:5.1f} s"
        lines.append(f"{'found ' if found else 'MISSED'} {took} {name}: {found}")
        if not found:
            missed.append(name)
    record_property("report", "breaks of the overlay\n" + "\n".join(lines))
    assert not missed


def _found(search: Search, most: int) -> str:
    """What the search says first. It begins with the turns that are known to be clean: those of every test run."""
    for turn in itertools.count():
        if search.report.programs >= most:
            return ""
        try:
            one_turn(search, turn)
        except Exception as error:
            return str(error).rpartition("--- ")[2][:90].replace("\n", " ") or repr(error)[:90]
        finally:
            search.forget()
    raise AssertionError("unreachable")
