"""What a gateway is doing, from two looks at its `/metrics`: rates, times, errors, rollouts, sandboxes.

The first look alone tells of all the time since the gateway started. Talks to nobody; `megamcp.cli.watching` does.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

MOST_LINES = 30

Tool = tuple[str, str, str]


@dataclass(slots=True)
class Look:
    """One reading of `/metrics`. `buckets` are cumulative counts of a tool's calls by upper bound in seconds."""

    at: float
    calls: dict[Tool, float] = field(default_factory=lambda: defaultdict(float))
    failed: dict[Tool, float] = field(default_factory=lambda: defaultdict(float))
    buckets: dict[Tool, dict[float, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    codes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    events: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sandboxes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    servers: dict[str, str] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


def read(text: str, at: float) -> Look:
    """A look, from the text of `/metrics`; `at` in seconds of any clock."""
    look = Look(at)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            _take(look, sample.name, sample.labels, sample.value)
    return look


def _take(look: Look, name: str, labels: Mapping[str, str], value: float) -> None:
    match name:
        case "megamcp_call_seconds_count" | "megamcp_call_seconds_bucket":
            if labels["phase"] != "total":
                return
            tool = (labels["environment"], labels["server"], labels["tool"])
            if name.endswith("_bucket"):
                look.buckets[tool][float(labels["le"])] += value
                return
            look.calls[tool] += value
            if labels["outcome"] != "ok":
                look.failed[tool] += value
        case "megamcp_call_errors_total":
            look.codes[labels["code"]] += value
        case "megamcp_rollout_events_total":
            look.events[labels["event"]] += value
        case "megamcp_sandboxes":
            look.sandboxes[f"{labels['runtime']} {labels['status']}"] += value
        case "megamcp_tool_server_state":
            if value:
                look.servers[f"{labels['environment']}/{labels['server']}"] = labels["state"]
        case _ if name.startswith("megamcp_") and not labels:
            look.gauges[name.removeprefix("megamcp_")] = value


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Seconds within which this share of the calls ended, by straight lines within buckets; None without calls. Calls
    beyond the last bound count as that bound."""
    bounds = sorted(buckets)
    wanted = (buckets[bounds[-1]] if bounds else 0.0) * share
    if wanted <= 0:
        return None
    below, start = 0.0, 0.0
    for bound in bounds:
        if (count := buckets[bound]) >= wanted:
            if bound == float("inf"):
                return start
            return start + (bound - start) * (wanted - below) / (count - below)
        below, start = count, bound
    return start


def document(new: Look, old: Look | None) -> dict[str, Any]:
    """What programs read. Between two looks, or without an old one since the gateway's start (rates are null then)."""
    span = new.at - old.at if old is not None else None
    before = old or Look(new.at)

    def since(now: Mapping[Any, float], then: Mapping[Any, float]) -> dict[Any, float]:
        grown = {key: value - then.get(key, 0.0) for key, value in now.items()}
        return {key: value for key, value in grown.items() if value > 0}

    calls, failed = since(new.calls, before.calls), since(new.failed, before.failed)
    tools = []
    for tool in sorted(calls, key=lambda tool: (-calls[tool], tool)):
        then = before.buckets.get(tool, {})
        buckets = {bound: count - then.get(bound, 0.0) for bound, count in new.buckets[tool].items()}
        tools.append(
            {
                **dict(zip(("environment", "server", "tool"), tool, strict=True)),
                "calls": int(calls[tool]),
                "failed": int(failed.get(tool, 0)),
                "calls_per_s": calls[tool] / span if span else None,
                "p50_s": quantile(buckets, 0.5),
                "p99_s": quantile(buckets, 0.99),
            }
        )
    total = sum(calls.values())
    return {
        "seconds": span,
        "calls": int(total),
        "calls_per_s": total / span if span else None,
        "rollouts_open": _whole(new.gauges.get("rollouts_open")),
        "checkpoints_live": _whole(new.gauges.get("checkpoints_live")),
        "calls_in_flight": _whole(new.gauges.get("calls_in_flight")),
        "calls_waiting": _whole(new.gauges.get("calls_waiting")),
        "streams_open": _whole(new.gauges.get("streams_open")),
        "database_up": new.gauges.get("database_up") == 1,
        "rollout_events": {name: int(count) for name, count in since(new.events, before.events).items()},
        "errors": {name: int(count) for name, count in since(new.codes, before.codes).items()},
        "sandboxes": {name: int(count) for name, count in new.sandboxes.items()},
        "servers": new.servers,
        "tools": tools,
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def draw(told: Mapping[str, Any]) -> Group:
    """The document for people."""

    def number(name: str) -> str:
        return "?" if told[name] is None else f"{told[name]:,}"

    rate = f"{told['calls_per_s']:,.1f} calls/s" if told["calls_per_s"] is not None else f"{told['calls']:,} calls"
    head = Text.assemble(
        (rate, "bold"),
        f"  {number('calls_in_flight')} in flight, {number('calls_waiting')} waiting"
        f"  ·  {number('rollouts_open')} rollouts, {number('checkpoints_live')} checkpoints"
        f"  ·  {number('streams_open')} streams",
        *([] if told["database_up"] else [("  ·  the database does not answer", "bold red")]),
    )
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("tool")
    for name in ("calls/s" if told["seconds"] else "calls", "failed", "p50", "p99"):
        table.add_column(name, justify="right")
    for tool in told["tools"][:MOST_LINES]:
        count = f"{tool['calls_per_s']:,.1f}" if told["seconds"] else f"{tool['calls']:,}"
        failed = Text(f"{tool['failed']:,}", style="red" if tool["failed"] else "dim")
        named = Text.assemble((f"{tool['environment']}/{tool['server']} ", "dim"), tool["tool"])
        table.add_row(named, count, failed, _time(tool["p50_s"]), _time(tool["p99_s"]))
    lines: list[RenderableType] = [head, Text(), table]
    for title in ("errors", "rollout_events", "sandboxes", "servers"):
        if told[title]:
            listed = ", ".join(f"{name} {value}" for name, value in sorted(told[title].items()))
            lines.append(Text.assemble((f"{title.replace('_', ' ')}: ", "dim"), listed))
    return Group(*lines)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
