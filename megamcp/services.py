"""What one gateway process is made of, started and stopped as one.

The order is the dependency order: the database's pool, then what only reads and writes it, then the data plane with its
tool server processes. Stopping goes the other way round.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from megamcp.access.entrance import Entrance
from megamcp.control import Control, Instance
from megamcp.databases import Clusters, Databases, Door, Keeper, Reads
from megamcp.databases.sources import Sources
from megamcp.dataplane import Dataplane, Limits
from megamcp.environments import Environments
from megamcp.handles import Signer
from megamcp.measures import Metrics
from megamcp.oauth import Authorities
from megamcp.points import Points
from megamcp.queries import Queries
from megamcp.reaper import Reaper
from megamcp.rollouts import Rollouts
from megamcp.sandboxed import Boxes, BoxFreezer, Host, Tender, Trees
from megamcp.settings import Settings
from megamcp.squasher import Squasher
from megamcp.store import Store
from megamcp.targets import Targets

SIDE_CONNECTIONS = 4
GRANT_CONNECTIONS = 4
"""Tool servers whose tokens are renewed at the same time."""
START_S = 10
"""Deadline for the first instance connection."""


@dataclass(frozen=True, slots=True)
class Services:
    """Everything that a request may need."""

    settings: Settings
    store: Store
    environments: Environments
    authorities: Authorities
    rollouts: Rollouts
    databases: Databases
    door: Door
    entrance: Entrance
    points: Points
    queries: Queries
    dataplane: Dataplane
    reaper: Reaper
    keeper: Keeper
    tender: Tender
    host: Host
    squasher: Squasher
    metrics: Metrics
    stopping: asyncio.Event


@asynccontextmanager
async def start_services(
    settings: Settings, dsn: str, signer: Signer, address: str | None = None
) -> AsyncIterator[Services]:
    """Services on a migrated database. Background tasks end before the pool does. `address` is where other gateway
    processes reach this one."""
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(Store.open(dsn, settings.control_connections))
        environments = Environments(store, signer, settings.document_bytes)
        instance = Instance(dsn, address)
        # With connections of their own: whoever holds a rollout's lock, and so one of the store's, waits for them.
        side = await stack.enter_async_context(Store.open(dsn, SIDE_CONNECTIONS))
        clusters = Clusters(settings, dsn)
        stack.push_async_callback(clusters.aclose)
        sources = Sources(side, clusters, signer, lambda: instance.owner)
        databases = Databases(side, clusters, sources, signer, settings, lambda: instance.owner)
        door = Door(side, environments, databases, signer, settings)
        stack.push_async_callback(door.aclose)
        host = Host(settings)
        stack.push_async_callback(host.aclose)
        boxes = Boxes(side, environments, host, lambda: instance.owner)
        freezer = BoxFreezer(side, host, boxes, lambda: instance.owner)
        entrance = Entrance(store, settings)
        stack.callback(entrance.audit.close)
        grants = await stack.enter_async_context(Store.open(dsn, GRANT_CONNECTIONS))
        authorities = Authorities(store, grants, settings)
        stack.push_async_callback(authorities.aclose)
        rollouts = Rollouts(store, environments, settings, databases, boxes, freezer)
        reads = Reads(side, databases)
        points = Points(rollouts, environments, reads, Trees(side, host), settings)
        queries = Queries(rollouts, environments, reads, signer, settings, dsn)
        stack.push_async_callback(queries.close)
        control = Control(
            store=store,
            environments=environments,
            rollouts=rollouts,
            databases=databases,
            boxes=boxes,
            door=door,
            signer=signer,
            settings=settings,
            targets=Targets(settings, signer, dsn, authorities.of),
            instance=instance,
        )
        metrics = Metrics()
        rollouts.told = metrics.rollouts
        dataplane = await stack.enter_async_context(Dataplane(control, limits(settings), metrics))
        instance.on_cancel = dataplane.cancel
        instance.on_session = dataplane.session_said
        boxes.let_go = dataplane.let_go
        instance.on_held = databases.forget

        async def moved(rollout: str, epoch: int | None) -> None:
            databases.forget(rollout)
            await dataplane.moved(rollout, epoch)

        instance.on_move = moved
        rollouts.before_move = dataplane.interrupt
        reaper = Reaper(store, environments, rollouts, settings)
        squasher = Squasher(store, environments, settings)
        stopping = asyncio.Event()
        keeper = Keeper(side, databases, settings, lambda: instance.owner)
        tender = Tender(side, host, settings, lambda: instance.owner, boxes.leave)
        tasks = [asyncio.create_task(instance.hold())]
        try:
            async with asyncio.timeout(START_S):
                await instance.ready()
            if settings.relay_port:
                await door.open()
            tasks += [asyncio.create_task(work.run()) for work in (reaper, squasher, keeper, tender)]
            tasks.append(asyncio.create_task(metrics.run(dataplane, store.connections)))
            yield Services(
                settings,
                store,
                environments,
                authorities,
                rollouts,
                databases,
                door,
                entrance,
                points,
                queries,
                dataplane,
                reaper,
                keeper,
                tender,
                host,
                squasher,
                metrics,
                stopping,
            )
        finally:
            stopping.set()
            dataplane.stop_calls()
            await tender.park_all()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def limits(settings: Settings) -> Limits:
    """The data plane's bounds, from the settings."""
    return Limits(
        allowed_origins=tuple(settings.allowed_origins),
        body_bytes=settings.max_body_bytes,
        response_bytes=settings.max_result_bytes,
        call_timeout_s=settings.call_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        waiting_per_rollout=settings.queue_per_rollout,
        calls_in_flight=settings.calls_in_flight,
        dedicated_processes=settings.dedicated_processes,
        dedicated_idle_s=settings.dedicated_idle_s,
        # Each reader holds a connection of the tool server; one rollout may not take them all.
        readers_per_rollout=max(1, settings.tool_connections // 2),
    )
