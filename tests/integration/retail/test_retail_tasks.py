"""The twelve tasks: gold calls replay to their milestones, doing nothing fails, and the texts name what exists."""

import json
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from tests.integration.retail.desk import FOLDER, READ_ONLY, Desk

TASKS = [json.loads(line) for line in (FOLDER / "tasks.jsonl").read_text(encoding="utf-8").splitlines()]
EVALUATORS = {
    entry["task"]: entry
    for entry in map(json.loads, (FOLDER / "evaluators.jsonl").read_text(encoding="utf-8").splitlines())
}


async def table_digests(db: AsyncConnection) -> dict[str, str]:
    names = await db.execute(text("select tablename from pg_tables where schemaname = 'store' order by 1"))
    digests = {}
    for (name,) in names.all():
        found = await db.execute(text(f"select md5(string_agg(t::text, '|' order by t::text)) from {name} t"))
        digests[name] = str(found.scalar())
    return digests


async def verdicts(desk: Desk, checks: list[dict[str, Any]]) -> dict[str, bool]:
    return {
        check["id"]: await desk.value(check["expr"]) == check["expect"] for check in checks if check["kind"] == "state"
    }


async def play(desk: Desk, calls: list[dict[str, Any]]) -> list[Any]:
    return [await desk.call(call["tool"], **call["arguments"]) for call in calls]


def test_there_are_twelve_tasks_and_each_has_one_evaluator() -> None:
    assert len(TASKS) == 12
    assert [task["id"] for task in TASKS] == list(EVALUATORS)
    assert {task["split"] for task in TASKS} == {"train", "test"}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["template"])
async def test_gold_reaches_every_milestone_and_breaks_no_guard(desk: Desk, task: dict[str, Any]) -> None:
    evaluator = EVALUATORS[task["id"]]
    assert not any((await verdicts(desk, evaluator["milestones"])).values()), "a milestone holds at the start"
    assert all((await verdicts(desk, evaluator["guards"])).values()), "a guard is broken at the start"
    before = await table_digests(desk.db)
    results = await play(desk, task["gold"])
    assert all((await verdicts(desk, evaluator["milestones"])).values())
    assert all((await verdicts(desk, evaluator["guards"])).values())
    after = await table_digests(desk.db)
    changed = {name for name in after if after[name] != before[name]}
    (allowed,) = (set(guard["expect"]) for guard in evaluator["guards"] if guard["kind"] == "tables")
    assert changed
    assert changed <= allowed
    shown = str(results)
    for word in evaluator.get("communicate", ()):
        assert word in shown, "an agent can't say what no tool has told it"


@pytest.mark.parametrize(
    ("task", "calls"),
    [(task, calls) for task in TASKS for calls in task.get("alternatives", ())],
    ids=lambda value: value["id"] if isinstance(value, dict) else "alternative",
)
async def test_alternatives_pass_too(desk: Desk, task: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    await play(desk, calls)
    evaluator = EVALUATORS[task["id"]]
    assert all((await verdicts(desk, evaluator["milestones"] + evaluator["guards"])).values())


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["template"])
async def test_gold_without_its_last_writing_call_does_not_pass(desk: Desk, task: dict[str, Any]) -> None:
    last = max(i for i, call in enumerate(task["gold"]) if call["tool"] not in READ_ONLY)
    await play(desk, task["gold"][:last])
    assert not all((await verdicts(desk, EVALUATORS[task["id"]]["milestones"])).values())
