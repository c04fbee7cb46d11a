"""`/metrics` in Prometheus' text format: what this process knows of itself, and the count of open rollouts.

Of this process alone, except where the help text says otherwise: with several workers a scrape meets one of them.
"""

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from megamcp import __version__
from megamcp.services import Services

router = APIRouter()


class _Gateway(Collector):
    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("megamcp", "The gateway.", {"version": __version__})
        yield GaugeMetricFamily(
            "megamcp_rollouts_open",
            "Open rollouts in the whole database, as last counted by this process.",
            self._services.rollouts.open_count,
        )
        yield GaugeMetricFamily(
            "megamcp_calls_in_flight",
            "Tool calls that run or wait in this process.",
            self._services.dataplane.in_flight,
        )


@router.get("/metrics", tags=["health"], summary="Metrics for Prometheus", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    registry: CollectorRegistry | None = getattr(request.app.state, "metrics", None)
    if registry is None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Gateway(request.app.state.services))
        request.app.state.metrics = registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
