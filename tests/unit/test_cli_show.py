"""What people see: trees, diffs, journals and rows, in 80 columns and without surprises from their content."""

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console, RenderableType

from megamcp import types as t
from megamcp.cli import show
from megamcp.tree import MAX_CHILDREN, Forest, document, draw

START = datetime(2026, 1, 15, tzinfo=UTC)


def drawn(shown: RenderableType, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(shown)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def rollout(identifier: str, parent: str | None = None, at: str | None = None, **more: Any) -> t.Rollout:
    given = {
        "id": identifier,
        "url": "http://x",
        "environment": "retail@0123456789abcdef",
        "group": "g",
        "turn": 0,
        "depth": 0,
        "seq": 1,
        "status": "open",
        "parent_checkpoint": parent,
        "checkpoint": at or parent,
        "seed": 0,
        "labels": {},
        "created_at": START,
        "expires_at": START,
    }
    return t.Rollout.model_validate({**given, **more})


def checkpoint(identifier: str, of: str, parent: str | None, **more: Any) -> t.Checkpoint:
    given = {
        "id": identifier,
        "rollout": of,
        "environment": "retail@0",
        "parent": parent,
        "turn": 1,
        "depth": 1,
        "seq": 2,
        "digest": "sha256:abcdef0123456789",
        "label": None,
        "created_at": START,
        "expires_at": START,
    }
    return t.Checkpoint.model_validate({**given, **more})


def test_a_fork_hangs_below_its_checkpoint_and_a_checkpoint_below_the_one_before() -> None:
    forest = Forest(
        (rollout("ro_a", at="cp_2"), rollout("ro_b", "cp_1")),
        (checkpoint("cp_1", "ro_a", None), checkpoint("cp_2", "ro_a", "cp_1", label="two")),
    )
    assert drawn(draw(forest)).splitlines() == [
        "● ro_a  retail@0123456789abcdef",
        "└── ◆ cp_1  turn 1  abcdef0123",
        "    ├── ● ro_b",
        "    └── ◆ cp_2  two  turn 1  abcdef0123",
        "        └── ○ head of ro_a",
    ]


def test_after_a_rollback_the_head_is_back_and_what_was_left_is_still_shown() -> None:
    forest = Forest(
        (rollout("ro_a", at="cp_1"),), (checkpoint("cp_1", "ro_a", None), checkpoint("cp_2", "ro_a", "cp_1"))
    )
    text = drawn(draw(forest)).splitlines()
    assert text[2:] == ["    ├── ◆ cp_2  turn 1  abcdef0123", "    └── ○ head of ro_a"]


def test_a_fork_whose_checkpoint_was_released_is_shown_at_the_top() -> None:
    text = drawn(draw(Forest((rollout("ro_b", "cp_gone"),), ())))
    assert text == "● ro_b  from a released checkpoint"


def test_checkpoints_and_heads_on_released_ones_are_not_lost() -> None:
    forest = Forest((rollout("ro_a", at="cp_gone"),), (checkpoint("cp_2", "ro_a", "cp_gone"),))
    text = drawn(draw(forest))
    assert "cp_2" in text
    assert "head of ro_a" in text


def test_each_rollout_and_checkpoint_is_drawn_once_and_closed_ones_have_no_head() -> None:
    forest = Forest(
        (
            rollout("ro_a", at="cp_1", status="closed"),
            rollout("ro_b", "cp_1"),
            rollout("ro_c", "cp_b", status="expired"),
        ),
        (checkpoint("cp_1", "ro_a", None), checkpoint("cp_b", "ro_b", "cp_1")),
    )
    text = drawn(draw(forest))
    assert [text.count(name) for name in ("ro_a", "ro_c", "cp_1", "cp_b")] == [1, 1, 1, 1]
    assert "closed" in text
    assert "expired" in text


def test_a_thousand_forks_are_cut_short() -> None:
    forks = tuple(rollout(f"ro_{number}", "cp_1") for number in range(1000))
    text = drawn(draw(Forest((rollout("ro_a", at="cp_1"), *forks), (checkpoint("cp_1", "ro_a", None),))))
    assert len(text.splitlines()) == 2 + MAX_CHILDREN + 2
    assert f"… {1000 - MAX_CHILDREN} more" in text


def test_the_tree_for_programs_holds_every_id() -> None:
    forest = Forest((rollout("ro_a"),), (checkpoint("cp_1", "ro_a", None),))
    assert {thing.id for things in document(forest).values() for thing in things} == {"ro_a", "cp_1"}


def a_diff(**tables: Any) -> t.Diff:
    filled = {name: {"added": [], "removed": [], "changed": [], "total": 0, **rows} for name, rows in tables.items()}
    servers = {"shop": {"kind": "schema", "tables": filled}} if tables else {}
    return t.Diff.model_validate({"rollout": "ro_a", "from": "base", "to": "head", "servers": servers})


def test_a_diff_shows_only_what_changed_in_a_row() -> None:
    orders = {
        "changed": [{"before": {"id": 1, "s": "new", "n": None}, "after": {"id": 1, "s": "done", "n": None}}],
        "added": [{"id": 2, "s": "new", "n": None}],
        "removed": [{"id": 3}],
    }
    assert drawn(show.diff(a_diff(orders=orders))).splitlines() == [
        "shop.orders  +1 -1 ~1",
        "  + id=2 s=new",
        "  - id=3",
        "  ~ id=1  s new → done",
    ]


def test_a_long_diff_says_how_much_is_left_out() -> None:
    text = drawn(
        show.diff(a_diff(t={"added": [{"id": n} for n in range(30)], "total": 70, "truncated": True}), limit=5)
    )
    assert text.splitlines()[0] == "shop.t  +30 of 70 rows that differ"
    assert "… 25 more" in text


def test_no_difference_is_said() -> None:
    assert drawn(show.diff(a_diff())) == "No difference between base and head."


def test_content_is_never_taken_for_markup() -> None:
    nasty = "[red]x[/red] [/] \n\n [link=http://x]y"
    text = drawn(show.diff(a_diff(t={"added": [{"a": nasty}]})), width=200)
    assert "[red]x[/red] [/] [link=http://x]y" in text
    found = t.QueryResult(columns=["a"], rows=[[nasty]], truncated=False)
    assert "[red]x[/red]" in drawn(show.query(found, 200), width=200)
    event = t.Event(rollout="r", seq=1, kind="call", at=START, tool="[b]t", arguments={"a": "[/]"})
    assert "[b]t" in drawn(show.events([event]))


def test_rows_too_wide_for_the_terminal_are_shown_one_value_a_line() -> None:
    found = t.QueryResult(columns=["id", "text_of_it"], rows=[[1, "x" * 90], [2, None]], truncated=True)
    lines = drawn(show.query(found, 80), width=200).splitlines()
    assert lines[:2] == ["id          1", f"text_of_it  {'x' * 90}"]
    assert lines[-1] == "2 rows and more"
    assert show.query(t.QueryResult(columns=[], rows=[], truncated=False), 80)


def test_tables_of_ids_fit_80_columns_and_break_no_id() -> None:
    long = "ro_" + "0" * 32
    text = drawn(show.rollouts([rollout(long, environment="a-rather-long-name@0123456789abcdef")]))
    assert long in text
    points = drawn(show.checkpoints([checkpoint("cp_" + "1" * 32, long, None, label="a label of some length")]))
    assert "cp_" + "1" * 32 in points
    assert max(len(line) for line in (text + "\n" + points).splitlines()) <= 80


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "over"), (59.6, "60s"), (3600, "60m"), (7300, "2h"), (864000, "10d")]
)
def test_what_is_left_of_a_lease_is_rounded(seconds: float, text: str) -> None:
    assert show.left(datetime.now(UTC) + timedelta(seconds=seconds)) == text


def test_tables_that_the_gateway_does_not_know_are_not_counted_as_none() -> None:
    def environment(name: str, **servers: list[str]) -> t.Environment:
        made = [t.EnvironmentServer(name=kind, kind=kind, tables=tables) for kind, tables in servers.items()]
        return t.Environment(name=name, hash="0" * 16, clock=START, seed=0, loaded_at=START, servers=made)

    found = [
        environment("one", schema=["a", "b"]),
        environment("two", database=[]),
        environment("both", schema=["a"], database=[]),
    ]
    lines = {line.split()[0]: line.split()[-1] for line in drawn(show.environments(found)).splitlines() if line.split()}
    assert (lines["one"], lines["two"], lines["both"]) == ("2", "–", "1+")
    assert "as its SQL makes them" in drawn(show.environment(found[1]))
