"""Benchmarks measure, and tell it in the documented form. Whether targets are met is not asked here."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report

ROOT = Path(__file__).parents[2]


async def last_line_of(*arguments: str) -> dict[str, Any]:
    """Runs a benchmark and gives the object that its last line is."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()[-3000:]
    document: dict[str, Any] = json.loads(told.decode().splitlines()[-1])
    return document


def check_form(document: dict[str, Any], name: str, targets: set[str]) -> None:
    assert set(document) == {"name", "machine", "figures", "targets"}
    assert document["name"] == name
    assert document["machine"]["cores"] >= 1
    assert all(isinstance(value, int | float) for value in document["figures"].values())
    assert {target["figure"] for target in document["targets"]} == targets
    for target in document["targets"]:
        assert set(target) == {"figure", "op", "target", "value", "met"}
        assert target["value"] == document["figures"][target["figure"]]
        met = target["value"] <= target["target"] if target["op"] == "<=" else target["value"] >= target["target"]
        assert target["met"] is met


@pytest.mark.e2e
async def test_gateway_benchmark_measures_and_reports() -> None:
    document = await last_line_of("benchmarks.gateway", "--quick", "--no-peers")
    check_form(document, "gateway", {"added_cpu_ms", "added_unrecorded_cpu_ms"})
    assert 0 < document["figures"]["direct_wall_ms"] < document["figures"]["gateway_wall_ms"]


@pytest.mark.e2e
async def test_footprint_benchmark_measures_and_reports() -> None:
    document = await last_line_of("benchmarks.footprint", "--quick")
    check_form(document, "footprint", {"idle_rollout_kib", "start_s"})
    assert 0 < document["figures"]["start_s"] < document["figures"]["first_start_s"]


@pytest.mark.e2e
async def test_fork_benchmark_measures_and_reports() -> None:
    document = await last_line_of("benchmarks.fork", "--quick")
    assert document["figures"]["rest_few_p50_ms"] > 0
    check_form(document, "fork", {target["figure"] for target in document["targets"]})


def test_a_missed_target_is_told_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    targets = [report.Target("speed", ">=", 10), report.Target("cost", "<=", 1)]
    report.report("example", {"speed": 5.0, "cost": 0.5, "other": 1.23456}, targets, rows=7)
    lines = capsys.readouterr().out.splitlines()
    assert "MISSED" in lines[0]
    document = json.loads(lines[-1])
    check_form(document, "example", {"speed", "cost"})
    assert [target["met"] for target in document["targets"]] == [False, True]
    assert document["machine"]["rows"] == 7
    assert document["figures"]["other"] == 1.2346


def test_a_target_without_its_figure_is_an_error() -> None:
    with pytest.raises(KeyError):
        report.report("example", {}, [report.Target("speed", ">=", 10)])
