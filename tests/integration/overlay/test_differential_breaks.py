"""The search is searched: the overlay is broken on purpose, in one place at a time, and each break must be found.

So a comparison that compares nothing, or a generator that never draws what would tell, is seen. Runs where
`FUZZ_SECONDS` is set; one break takes the search some seconds.
"""

import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from megamcp.state import (
    clock,
    digests,
    late,
    probes,
    rewrites,
    squash,
    triggers,
)
from tests.integration.overlay.test_differential import FUZZ_SECONDS, Search, one_turn, search

__all__ = ["search"]

BUDGET_S = 60.0
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
    "a row that was deleted still is a parent": _text(probes, "_by_key", r"select not \S+ from", "select true from"),
    "deferred checks are lost": _instead(late, "put_off", lambda _: lambda *_: "null;"),
    "a row met twice is counted twice": _text(triggers, "_touched", "return null;", "return old;"),
    "UPDATE takes nulls": _text(
        triggers, "row_checks", "is not distinct from null then", "is not distinct from null and tg_op = 'INSERT' then"
    ),
    "UPDATE passes by CHECK": _text(triggers, "row_checks", "is false then", "is false and tg_op = 'INSERT' then"),
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
        start, before = time.monotonic(), sum(search.report.statements.values())
        with pytest.MonkeyPatch.context() as patch:
            broken(patch)
            found = _found(search, start + BUDGET_S)
        statements = sum(search.report.statements.values()) - before
        lines.append(
            f"{'found ' if found else 'MISSED'} {time.monotonic() - start:5.1f} s {statements:5} {name}: {found}"
        )
        if not found:
            missed.append(name)
    record_property("report", "breaks of the overlay: seconds, statements\n" + "\n".join(lines))
    assert not missed


def _found(search: Search, end: float) -> str:
    """What the search says first. It begins with the turns that are known to be clean: those of every test run."""
    for turn in itertools.count():
        if time.monotonic() > end:
            return ""
        try:
            one_turn(search, turn)
        except Exception as error:
            return str(error).rpartition("--- ")[2][:90].replace("\n", " ") or repr(error)[:90]
        finally:
            search.forget()
    raise AssertionError("unreachable")
