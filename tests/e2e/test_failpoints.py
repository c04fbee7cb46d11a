"""Every failpoint of the gateway, cut off in every way: afterwards rollouts hold what they should and nothing is left.

G4 to G7 at each step of the journal of databases. CI takes each failpoint once, in the operation that matters most, by
a kill and by the other ways in turn; with `SOAK_SECONDS` all combinations of operation, failpoint and way are run.
`SIEGE_ONLY="operation,point,way;…"` runs some of them, in that order.
"""

import asyncio
import functools
import logging
import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.e2e import siege as ops
from tests.e2e import test_sandbox_kills as boxes
from tests.e2e.siege import WAYS, Keep, Operation, Siege, cut, keep, session
from tests.e2e.test_kill import free_port
from tests.e2e.test_soak import nothing_leaks

log = logging.getLogger(__name__)
ALL = "SOAK_SECONDS" in os.environ
CODE = Path(__file__).parents[2] / "megamcp"
CLONE = ("clone.created", "clone.cleaned", "clone.admitted")
LIVE = ("clone.drained", *CLONE)
MAKE = ("database.planned", *CLONE, "database.copied", "database.made")
MAKE_FROM_LIVE = ("clone.drained", *MAKE)
DROP = ("drop.shut", "drop.database", "database.dropped")

PASSES: dict[Operation, tuple[str, ...]] = {
    ops.load_own: (
        "source.planned",
        "load.script",
        "load.copied",
        "build.filled",
        "build.installed",
        "build.renamed",
        "source.built",
    ),
    ops.load_shared: ("load.script", "load.copied"),
    ops.first_call: MAKE,
    ops.fork_at_head: (*MAKE_FROM_LIVE, "drain.closed"),
    ops.fork_behind_head: (*MAKE_FROM_LIVE, "drain.closed"),
    ops.fork_over_ddl: (
        *MAKE_FROM_LIVE,
        *("database.planned@2", "clone.drained@2", "clone.cleaned@2", "clone.created@3", "database.copied@2"),
        *("database.copied@3", "drop.shut", "drop.database"),
    ),
    ops.checkpoint_over_ddl: ("database.planned", *LIVE, "database.copied", "drain.closed"),
    ops.rollback_in_place: ("database.rewound",),
    ops.rollback_over_ddl: ("database.rewound", "drain.closed", "database.retired", *MAKE),
    ops.release: ("database.retired", "drain.closed", *DROP),
    ops.view: ("database.planned", *LIVE, "database.copied"),
    ops.quota: ("database.retired",),
    ops.squash: ("squash.built", "squash.swapped", "squash.moved"),
    ops.sweep: ("layers.void", "layers.marked", "layers.discarded"),
}
"""The points that each operation passes, without spares."""

SPARE = (*CLONE, "spare.copied")

CHOSEN: dict[str, Operation] = {
    "load.script": ops.load_own,
    "load.copied": ops.load_own,
    "database.planned": ops.fork_at_head,
    "database.copied": ops.fork_over_ddl,
    "database.made": ops.first_call,
    "clone.drained": ops.fork_at_head,
    "clone.created": ops.fork_behind_head,
    "clone.cleaned": ops.fork_at_head,
    "clone.admitted": ops.checkpoint_over_ddl,
    "drain.closed": ops.checkpoint_over_ddl,
    "database.retired": ops.rollback_over_ddl,
    "drop.shut": ops.release,
    "drop.database": ops.release,
}
"""Where CI cuts a point that several operations pass."""


@functools.cache
def failpoints() -> set[str]:
    """Every name in the code."""
    texts = [path.read_text() for path in CODE.rglob("*.py") if path.name != "failpoints.py"]
    return {name for text in texts for name in re.findall(r'failpoint\("([^"]+)"\)', text)}


def cases() -> list[tuple[Operation, str, str]]:
    """Operation, point and way, in an order that is mixed but always the same. Those of sandboxes are in a file of
    their own."""
    found = [
        (operation, point, way)
        for operation, points in PASSES.items()
        for point in points
        for way in WAYS
        if not (operation in ops.LAYERED and way == "state")
        if ALL or ("@" not in point and CHOSEN.get(point, operation) is operation and way == way_of(point))
    ]
    random.Random(7).shuffle(found)
    return found


def way_of(point: str) -> str:
    """How CI cuts a point. A kill costs three times what the others do, since all has to start again."""
    turn = sorted(failpoints()).index(point)
    ways = [way for way in WAYS if way != "state"] if point.startswith(("squash.", "layers.")) else WAYS
    return ways[turn % len(ways)]


def chosen() -> list[tuple[Operation, str, str]]:
    """The cases, or those that `SIEGE_ONLY` names."""
    found = cases()
    if only := os.environ.get("SIEGE_ONLY"):
        found = [
            case for word in only.split(";") for case in found if f"{case[0].__name__},{case[1]},{case[2]}" == word
        ]
    return found


def test_every_failpoint_is_in_the_matrix() -> None:
    passed = {point.partition("@")[0] for points in (*PASSES.values(), SPARE) for point in points}
    elsewhere = {point for points in (*boxes.PASSES.values(), boxes.PARKING) for point in points}
    assert passed | elsewhere == failpoints()
    assert not passed & elsewhere
    assert {point for _, point, _ in cases()} >= failpoints() - {"spare.copied"} - elsewhere


async def _besiege(castle: Keep, todo: list[tuple[Operation, str, str]]) -> None:
    try:
        async with session(castle) as http:
            siege = Siege(castle, http, random.Random(1))
            bystander = await siege.begun()
            failed: list[Exception] = []
            for operation, point, way in todo:
                began = time.monotonic()
                try:
                    await cut(siege, operation, point, way)
                    await siege.holds(bystander)
                except Exception as error:
                    error.add_note(f"{operation.__name__}, {point}, {way}")
                    log.exception("%s, %s, %s", operation.__name__, point, way)
                    failed.append(error)
                    if len(failed) == (20 if ALL else 3):
                        break
                log.info("%s, %s, %s: %.2f s", operation.__name__, point, way, time.monotonic() - began)
            if failed:
                raise ExceptionGroup("cases that failed", failed)
            await nothing_leaks(siege)
    except BaseException:
        log.error("the gateway's log ends with\n%s", (castle.folder / "gateway.log").read_text()[-8000:])
        raise
    finally:
        await castle.stop()
    await asyncio.sleep(0.5)
    assert castle.family() == [], "something outlived the gateway"


@pytest.mark.e2e
@pytest.mark.timeout(0)
async def test_a_step_that_is_cut_off_is_taken_up(scratch_folder: Path) -> None:
    folder = scratch_folder / "siege"
    folder.mkdir(mode=0o755)
    await _besiege(await keep(folder, free_port(), MEGAMCP_SPARE_DATABASES="0"), chosen())


@pytest.mark.e2e
@pytest.mark.timeout(0)
async def test_a_spare_that_is_cut_off_is_made_again(scratch_folder: Path) -> None:
    folder = scratch_folder / "siege-of-spares"
    folder.mkdir(mode=0o755)
    todo = [(ops.spare, point, way) for point in (SPARE if ALL else SPARE[-1:]) for way in WAYS[:: 1 if ALL else 2]]
    await _besiege(await keep(folder, free_port(), MEGAMCP_SPARE_DATABASES="1"), todo)
