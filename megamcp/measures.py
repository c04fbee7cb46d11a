"""What one gateway process counts, for `/metrics`: the names, what they mean, and the bounds of their labels.

Tools in labels are those that loaded environments list, at most `MOST_TOOLS`; every other name is `other`. Workers of
one gateway write into one folder (`prometheus_client`'s multi-process mode, which `megamcp.serve` turns on). Answers no
request: that is `metrics`.
"""

import asyncio
import os
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from megamcp.connections import Connections
from megamcp.dataplane import Dataplane, wire
from megamcp.dataplane.watched import Doing
from megamcp.errors import MegaMCPError

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable by which workers share what they count. Read when `prometheus_client` is imported."""
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
OTHER = "other"
MOST_TOOLS = 2000
REFRESH_S = 5.0

# name: (labels, help). The types follow from the names: `_total` counts, `_seconds` are histograms.
COUNTED: dict[str, tuple[tuple[str, ...], str]] = {
    "megamcp_call_seconds": (
        ("environment", "server", "tool", "outcome", "phase"),
        "Tool calls. Outcomes: `ok`, `tool_error` (the tool said so), `error` (the gateway or the protocol did),"
        " `cancelled`. Phases: `queue` (the way to the server's turn), `upstream` (the tool server), `journal` (rows"
        " before and after it, where the gateway writes them), `total`.",
    ),
    "megamcp_call_errors_total": (
        ("environment", "server", "tool", "code"),
        "Calls that ended as `error` or `cancelled`, by the code that their callers were told (docs/errors.md).",
    ),
    "megamcp_rollout_events_total": (
        ("environment", "event"),
        "What was done with rollouts: `opened`, `forked`, `checkpointed`, `rolled_back`, `closed`, `expired`.",
    ),
}
STANDING: dict[str, tuple[tuple[str, ...], str]] = {
    "megamcp_calls_in_flight": ((), "Tool calls that run or wait."),
    "megamcp_calls_waiting": ((), "Of those, calls that wait for their turn in their rollout."),
    "megamcp_streams_open": ((), "Clients that listen: sessions' own streams, and subscriptions."),
    "megamcp_upstream_sessions": ((), "Sessions of clients that tool servers at URLs keep."),
    "megamcp_dedicated_processes": ((), "Places of tool server processes that serve one rollout each."),
    "megamcp_tool_server_state": (
        ("environment", "server", "state"),
        "Gateway processes to which a tool server stands so: `ready`, `starting`, `failing`, `unused`, or for one at a"
        " URL `reached`, `unreachable` (its circuit is open), `unused`.",
    ),
    "megamcp_tool_server_starts": (
        ("environment", "server"),
        "How often processes of a tool server that all rollouts share were started.",
    ),
    "megamcp_postgres_connections": (
        ("state",),
        "Control connections to PostgreSQL: `used`, and `allowed`.",
    ),
    "megamcp_postgres_waiting": ((), "Requests that wait for such a connection."),
}
IN_DATABASE: dict[str, tuple[tuple[str, ...], str]] = {
    "megamcp_database_up": ((), "Whether the database answers; without it the next three are left out."),
    "megamcp_rollouts_open": ((), "Open rollouts."),
    "megamcp_checkpoints_live": ((), "Checkpoints that are not released."),
    "megamcp_sandboxes": (("runtime", "status"), "Sandboxes, in any state."),
}


class Metrics:
    """What one process counts. A `Watcher` of the data plane."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels, told = COUNTED["megamcp_call_seconds"]
        self._calls = Histogram("megamcp_call_seconds", told, labels, registry=self.registry, buckets=BUCKETS)
        labels, told = COUNTED["megamcp_call_errors_total"]
        self._errors = Counter("megamcp_call_errors_total", told, labels, registry=self.registry)
        labels, told = COUNTED["megamcp_rollout_events_total"]
        self._events = Counter("megamcp_rollout_events_total", told, labels, registry=self.registry)
        self._gauges = {
            name: Gauge(name, told, labels, registry=self.registry, multiprocess_mode="livesum")
            for name, (labels, told) in STANDING.items()
        }
        self._series: dict[tuple[str, str, str, str, str], Any] = {}
        self._states: dict[tuple[str, str, str], int] = {}
        self._tools: set[tuple[str | None, str | None, str | None]] = set()

    def ended(self, call: Doing, reply: wire.Reply | None, error: BaseException | None) -> None:
        """See `Watcher`."""
        total = time.perf_counter() - call.began
        outcome, code = _outcome(reply, error)
        where = self._place(call)
        phases = (("queue", call.queue), ("upstream", call.upstream), ("journal", call.journal))
        for phase, clock in phases:
            if clock.used:
                self._observe(*where, outcome, phase, clock.seconds)
        self._observe(*where, outcome, "total", total)
        if code is not None:
            self._errors.labels(*where, code).inc()

    def rollouts(self, environment: str, event: str, count: int) -> None:
        """See `Rollouts.told`."""
        self._events.labels(environment, event).inc(count)

    def _place(self, call: Doing) -> tuple[str, str, str]:
        known = (call.environment, call.server, call.tool)
        if call.tool is not None and known not in self._tools:
            if len(self._tools) >= MOST_TOOLS:
                return call.environment or OTHER, call.server or OTHER, OTHER
            self._tools.add(known)
        return call.environment or OTHER, call.server or OTHER, call.tool or OTHER

    def _observe(self, environment: str, server: str, tool: str, outcome: str, phase: str, seconds: float) -> None:
        key = (environment, server, tool, outcome, phase)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._calls.labels(*key)
        series.observe(seconds)

    def refresh(self, plane: Dataplane, connections: Connections) -> None:
        """Sets what stands at a moment."""
        for name, value in (
            ("megamcp_calls_in_flight", plane.in_flight),
            ("megamcp_calls_waiting", plane.waiting),
            ("megamcp_streams_open", plane.streams),
            ("megamcp_upstream_sessions", plane.sessions),
            ("megamcp_dedicated_processes", plane.dedicated),
            ("megamcp_postgres_waiting", connections.waiting),
        ):
            self._gauges[name].set(value)
        self._gauges["megamcp_postgres_connections"].labels("used").set(connections.used)
        self._gauges["megamcp_postgres_connections"].labels("allowed").set(connections.most)
        states = dict.fromkeys(self._states, 0)  # what is no more is 0: other processes read files that forget nothing
        for environment, servers in plane.server_states().items():
            for server, state in servers.items():
                key = (environment.partition("@")[0], server, state)
                states[key] = states.get(key, 0) + 1
        for key, count in states.items():
            self._gauges["megamcp_tool_server_state"].labels(*key).set(count)
        self._states = states
        starts = self._gauges["megamcp_tool_server_starts"]
        for (environment, server), count in plane.starts.items():
            starts.labels(environment, server).set(count)

    async def run(self, plane: Dataplane, connections: Connections) -> None:
        """In one of several workers: keeps what stands up to date for the others, until it is cancelled."""
        while FOLDER in os.environ:
            self.refresh(plane, connections)
            await asyncio.sleep(REFRESH_S)


def _outcome(reply: wire.Reply | None, error: BaseException | None) -> tuple[str, str | None]:
    if reply is not None:
        if reply.failed:
            return "error", "jsonrpc"
        return ("tool_error" if wire.is_tool_error(reply.body) else "ok"), None
    if isinstance(error, asyncio.CancelledError):
        return "cancelled", "cancelled"
    if isinstance(error, MegaMCPError):
        return "error", error.code
    if isinstance(error, wire.RpcFailure):
        code = error.data.get("code") if isinstance(error.data, dict) else None
        return "error", code if isinstance(code, str) else "jsonrpc"
    return "error", "internal"
