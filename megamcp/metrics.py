"""`/metrics` in Prometheus' text format: what this gateway's processes know, and what its database holds.

Any worker of a gateway answers for all of them, whose counts are in one folder (see `measures`); what is counted in the
database is the same whoever is asked.
"""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
    multiprocess,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from megamcp import __version__, outages
from megamcp.errors import MegaMCPError
from megamcp.measures import FOLDER, IN_DATABASE, OTHER, Metrics
from megamcp.services import Services

router = APIRouter()

_NAMED = re.compile(rb'environment="([^"]*)"')
FRESH_S = 1.0
"""What was counted in the database is told again for so long."""

_COUNTS = """select (select count(*) from megamcp.rollouts where status = 'open') as rollouts,
    (select count(*) from megamcp.checkpoints where released_at is null) as checkpoints"""
_SANDBOXES = "select runtime, status, count(*) as count from megamcp.sandboxes group by 1, 2"


class _Database(Collector):
    """What the database holds, counted before the registry is read."""

    def __init__(self, services: Services) -> None:
        self._store = services.store
        self._found: list[Metric] = []
        self._stale_at = 0.0
        self._counting = asyncio.Lock()

    async def count(self) -> None:
        async with self._counting:
            if time.monotonic() < self._stale_at:
                return
            try:
                counts = await self._store.row(_COUNTS)
                sandboxes = await self._store.rows(_SANDBOXES)
            except (MegaMCPError, *outages.DRIVER):
                self._found = [self._family("megamcp_database_up", 0)]
            else:
                assert counts is not None
                family = GaugeMetricFamily(
                    "megamcp_sandboxes", IN_DATABASE["megamcp_sandboxes"][1], labels=["runtime", "status"]
                )
                for row in sandboxes:
                    family.add_metric([row["runtime"], row["status"]], row["count"])
                self._found = [
                    self._family("megamcp_database_up", 1),
                    self._family("megamcp_rollouts_open", counts["rollouts"]),
                    self._family("megamcp_checkpoints_live", counts["checkpoints"]),
                    family,
                ]
            self._stale_at = time.monotonic() + FRESH_S

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("megamcp", "The gateway.", {"version": __version__})
        yield from self._found

    @staticmethod
    def _family(name: str, value: float) -> Metric:
        return GaugeMetricFamily(name, IN_DATABASE[name][1], value)


class Page:
    """What a scrape of this process is answered from."""

    def __init__(self, services: Services, metrics: Metrics) -> None:
        self._services = services
        self._metrics = metrics
        self._database = _Database(services)
        self._public: set[bytes] = set()
        self._own = CollectorRegistry()
        self._own.register(self._database)
        ProcessCollector(registry=self._own)

    async def text(self) -> bytes:
        await self._database.count()
        self._metrics.refresh(self._services.dataplane, self._services.store.connections)
        counted = self._metrics.registry
        if (folder := os.environ.get(FOLDER)) is not None:
            counted = CollectorRegistry()
            multiprocess.MultiProcessCollector(counted, folder)  # type: ignore[no-untyped-call]
        told = generate_latest(self._own) + generate_latest(counted)
        public = await self._public_names()
        lines = told.splitlines(keepends=True)
        return b"".join(line for line in lines if (named := _NAMED.search(line)) is None or named[1] in public)

    async def _public_names(self) -> set[bytes]:
        """Environments that no tenant has to itself: whoever scrapes needs no key. As last known, in an outage."""
        with contextlib.suppress(MegaMCPError, *outages.DRIVER):
            environments = await self._services.environments.all()
            self._public = {OTHER.encode(), *(e.name.encode() for e in environments if e.tenant is None)}
        return self._public


def gone(pid: int, folder: str) -> None:
    """A worker has ended: what stood with it stands no more; what it has counted stays counted."""
    with contextlib.suppress(OSError):
        multiprocess.mark_process_dead(pid, folder)  # type: ignore[no-untyped-call]


@router.get("/metrics", tags=["health"], summary="Metrics for Prometheus", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    page: Page | None = getattr(request.app.state, "metrics", None)
    if page is None:
        services: Services = request.app.state.services
        page = request.app.state.metrics = Page(services, services.metrics)
    return Response(await page.text(), media_type=CONTENT_TYPE_LATEST)
