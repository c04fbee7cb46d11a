"""What `megamcp top` makes of two looks at `/metrics`."""

import io

from prometheus_client import generate_latest
from rich.console import Console

from megamcp.dataplane import watched, wire
from megamcp.measures import Metrics
from megamcp.top import Look, document, draw, quantile, read

DONE = wire.Reply(b'{"content":[]}')


def ended(metrics: Metrics, tool: str, seconds: float, error: BaseException | None = None) -> None:
    call = watched.Doing("ro_1")
    call.environment, call.server, call.tool = "retail", "shop", tool
    call.began -= seconds
    metrics.ended(call, None if error else DONE, error)


def look(metrics: Metrics, at: float) -> Look:
    return read(generate_latest(metrics.registry).decode(), at)


def test_between_two_looks_it_tells_of_what_was_since() -> None:
    metrics = Metrics()
    for _ in range(50):
        ended(metrics, "before", 0.02)
    old = look(metrics, 100.0)
    for _ in range(98):
        ended(metrics, "buy", 0.02)
    for _ in range(2):
        ended(metrics, "buy", 20.0, RuntimeError("a bug"))
    metrics.rollouts("retail", "opened", 3)
    told = document(look(metrics, 110.0), old)
    (tool,) = told["tools"]
    assert (tool["tool"], tool["calls"], tool["failed"], tool["calls_per_s"]) == ("buy", 100, 2, 10.0)
    assert 0.01 < tool["p50_s"] <= 0.025
    assert 10 < tool["p99_s"] <= 30
    assert told["errors"] == {"internal": 2}
    assert told["rollout_events"] == {"opened": 3}
    assert told["database_up"] is False
    written = io.StringIO()
    Console(file=written, width=120).print(draw(told))
    assert "10.0 calls/s" in written.getvalue()
    assert "retail/shop buy" in written.getvalue()


def test_one_look_tells_of_all_calls_and_of_no_rates() -> None:
    metrics = Metrics()
    ended(metrics, "buy", 0.02)
    told = document(look(metrics, 5.0), None)
    assert (told["calls"], told["calls_per_s"]) == (1, None)


def test_a_quantile_beyond_the_last_bound_is_that_bound_and_of_nothing_there_is_none() -> None:
    assert quantile({0.1: 0.0, 1.0: 0.0, float("inf"): 4.0}, 0.5) == 1.0
    assert quantile({0.1: 0.0, float("inf"): 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None
