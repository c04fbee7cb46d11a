"""The form in which every benchmark tells its result: words on the way, one JSON object as the last line.

A benchmark reports, it doesn't judge: a missed target is `"met": false` and exit status 0. Only a run that
could not measure exits with another status. Ratios come from one run on one machine.
"""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure should be: `value` of the figure `figure` must stand in relation `op` to `target`."""

    figure: str
    op: Literal["<=", ">="]
    target: float

    def met(self, value: float) -> bool:
        return value <= self.target if self.op == "<=" else value >= self.target


def machine() -> dict[str, str | int]:
    """What a reader needs to judge absolute figures."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return {
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "memory_mib": memory,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def say(text: str) -> None:
    """Progress, on standard error and at once."""
    print(text, file=sys.stderr, flush=True)


def report(name: str, figures: Mapping[str, float], targets: Sequence[Target], **about: str | int) -> None:
    """Print the figures beside their targets, then the JSON line. KeyError: a figure was not measured."""
    by_figure = {target.figure: target for target in targets}
    width = max(map(len, figures), default=0)
    for figure, value in figures.items():
        target = by_figure.get(figure)
        note = f"  {target.op} {target.target:g} {'met' if target.met(value) else 'MISSED'}" if target else ""
        print(f"{figure:<{width}}  {value:>12.4g}{note}")
    judged = [
        {
            "figure": t.figure,
            "op": t.op,
            "target": t.target,
            "value": round(figures[t.figure], 4),
            "met": t.met(figures[t.figure]),
        }
        for t in targets
    ]
    document = {
        "name": name,
        "machine": {**machine(), **about},
        "figures": {figure: round(value, 4) for figure, value in figures.items()},
        "targets": judged,
    }
    print(json.dumps(document), flush=True)
