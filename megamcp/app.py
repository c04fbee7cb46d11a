"""The ASGI application: one door, two rooms.

`/r/`, `/e/` and `/mcp` go straight to the data plane, past FastAPI and every middleware; everything else is the control
plane's. The database must be there when the process starts (or comes within the start-up deadline); later outages are
answered with 503 until it is back.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from megamcp import __version__, metrics, outages
from megamcp.access import pages as access
from megamcp.access.reception import agents_room, control_room
from megamcp.api import COMMON, router
from megamcp.bodies import StrictBodies
from megamcp.databases.clusters import check as check_clusters
from megamcp.dataplane import Dataplane
from megamcp.environments import Environments, bundled
from megamcp.errors import MegaMCPError, TooLarge, Unavailable, Unprocessable
from megamcp.migrate import migrate
from megamcp.oauth.pages import router as pages
from megamcp.openapi import document_problems
from megamcp.postgres import check_server
from megamcp.services import Services, start_services
from megamcp.settings import Settings
from megamcp.store import Store, translated
from megamcp.views import add_error_handlers

T = TypeVar("T")
log = logging.getLogger(__name__)

AGENT_PATHS = ("/r/", "/e/", "/mcp")
START_PATIENCE_S = 30


class Gateway:
    """Dispatches by path; the data plane answers from the moment that start-up is done."""

    peer_address: str | None = None
    """Where other gateway processes reach this one; set before it starts."""

    def __init__(self, control: FastAPI) -> None:
        self.control = control

    def stop_calls(self) -> None:
        """See `Dataplane.stop_calls`."""
        services: Services | None = getattr(self.control.state, "services", None)
        if services is not None:
            services.dataplane.stop_calls()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(AGENT_PATHS) and Dataplane.serves(scope["path"]):
            services: Services = self.control.state.services
            await agents_room(services.entrance, services.dataplane, scope, receive, send)
        elif scope["type"] == "http":
            await control_room(self.control.state.services.entrance, self.control, scope, receive, send)
        else:
            await self.control(scope, receive, send)


def create_app(settings: Settings | None = None) -> Gateway:
    """The gateway on the database of `settings.database_url`, which must be set: `megamcp.serve` sees to that."""
    settings = settings or Settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if settings.database_url is None:
            raise Unprocessable(
                "No database.", code="no_database", hint="Use `megamcp serve`, or set MEGAMCP_DATABASE_URL."
            )
        dsn = settings.database_url.get_secret_value()
        async with contextlib.AsyncExitStack() as stack:

            async def start() -> Services:
                address = gateway.peer_address
                return await stack.enter_async_context(start_services(settings, dsn, await migrate(dsn), address))

            app.state.services = await patiently(dsn, start)
            yield

    control = FastAPI(
        title="MegaMCP",
        version=__version__,
        summary="An MCP gateway that gives every rollout its own state.",
        description=(
            "Open a rollout, point any MCP client at its `url`; checkpoint, fork, roll back and diff its state here. "
            "Errors are RFC 9457 documents with a stable `code`."
        ),
        lifespan=lifespan,
        redoc_url=None,
    )
    control.add_middleware(StrictBodies, limit=settings.max_body_bytes)
    control.include_router(router)
    control.include_router(access.keys_router(COMMON))
    control.include_router(access.metadata)
    control.include_router(metrics.router)
    control.include_router(pages)
    add_error_handlers(control)
    add_health(control)
    document_problems(control)
    gateway = Gateway(control)
    return gateway


def add_health(app: FastAPI) -> None:
    """Liveness and readiness, for supervisors and load balancers."""

    @app.get("/healthz", tags=["health"], summary="The process answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    @app.get(
        "/readyz",
        tags=["health"],
        summary="The database answers",
        responses={503: {"description": "It doesn't."}},
    )
    async def readyz(request: Request, response: Response) -> dict[str, Any]:
        services: Services = request.app.state.services
        try:
            environments = await asyncio.wait_for(services.environments.all(), 5)
            private = {e.full_name for e in environments if e.tenant is not None}
        except (MegaMCPError, *outages.DRIVER) as error:
            response.status_code = 503
            return {"status": "unavailable", "database": str(error) or type(error).__name__}
        return {
            "status": "ok",
            "environments": [e.full_name for e in environments if e.full_name not in private],
            "rollouts": services.rollouts.open_count,
            "servers": {name: one for name, one in services.dataplane.server_states().items() if name not in private},
            "state_clusters": [
                {"cluster": cluster.name, "copies": "share blocks" if cluster.reflink else "are full copies"}
                for cluster in services.databases.clusters.opened
            ],
        }


async def prepare(settings: Settings, dsn: str) -> None:
    """Once per start, before any worker: check the servers, migrate, load the environments that are asked for.

    Raises `Unavailable`, and what `migrate` and `Environments.load` raise.
    """

    await answered(lambda: check_clusters([url.get_secret_value() for url in settings.state_urls]))
    await patiently(dsn, lambda: load_environments(settings, dsn))


async def load_environments(settings: Settings, dsn: str) -> None:
    """Migrates, and loads the environments that the settings name; those whose content is known cost next to nothing.

    Raises what `migrate` and `Environments.load` raise.
    """
    signer = await migrate(dsn)
    async with Store.open(dsn, 2) as store:
        environments = Environments(store, signer, settings.document_bytes)
        await _load_all(environments, [*(bundled() if settings.bundled_environments else []), *settings.environments])
        await _warn_of_few_connections(settings, store, environments)


async def _load_all(environments: Environments, folders: list[Path]) -> None:
    """Each folder's environment. Raises one error that names every folder at fault, and what is wrong in it."""
    faults: list[tuple[Path, MegaMCPError]] = []
    for folder in folders:
        started = time.monotonic()
        try:
            loaded = await environments.load(folder)
        except (Unprocessable, TooLarge) as error:
            faults.append((folder, error))
        else:
            log.info("environment %s ready in %.2f s", loaded.full_name, time.monotonic() - started)
    if len(faults) == 1:
        ((folder, fault),) = faults
        fault.message = f"The environment in {folder} can't be loaded: {fault.message}"
        raise fault
    if faults:
        raise Unprocessable(
            f"Environments in {len(faults)} folders can't be loaded: {', '.join(str(folder) for folder, _ in faults)}.",
            code="invalid_environment",
            hint="Mend them, or leave them out of MEGAMCP_ENVIRONMENTS (`--environment`).",
            problems=[{"where": str(folder), "problem": fault.message, "hint": fault.hint} for folder, fault in faults],
        )


async def _warn_of_few_connections(settings: Settings, store: Store, environments: Environments) -> None:
    """Too few connections show as 429 and waiting under load, long after the start: better said now."""
    newest = {loaded.name: loaded for loaded in reversed(await environments.all())}
    stateful = sum(server.schema is not None for loaded in newest.values() for server in loaded.servers)
    each = settings.control_connections + 2 + stateful * (settings.tool_connections + settings.query_connections)
    allowed = int(await store.value("select current_setting('max_connections')::int"))
    if settings.workers * each > allowed:
        log.warning(
            "PostgreSQL allows %d connections; %d workers with %d tool servers may want %d. Raise max_connections, or"
            " lower MEGAMCP_TOOL_CONNECTIONS, MEGAMCP_QUERY_CONNECTIONS or MEGAMCP_CONTROL_CONNECTIONS.",
            allowed,
            settings.workers,
            stateful,
            settings.workers * each,
        )


async def patiently(dsn: str, step: Callable[[], Awaitable[T]]) -> T:
    """A step of the start, begun again when the database goes away in the middle: each step is all or nothing.

    Raises `Unavailable` when it stays away, and what the step raises.
    """
    give_up = time.monotonic() + START_PATIENCE_S
    while True:
        await answered(lambda: check_server(dsn))
        try:
            with translated():
                return await step()
        except Unavailable:
            if time.monotonic() > give_up:
                raise
            log.warning("the database went away while the gateway was starting; beginning again")


async def answered(check: Callable[[], Awaitable[Any]]) -> None:
    """Returns once a server answers and can be used. Raises what `check` raises, `Unavailable` later."""
    began = time.monotonic()
    told = False
    while True:
        try:
            await check()
        except Unavailable as error:
            if time.monotonic() > began + START_PATIENCE_S:
                raise
            if not told:
                told = True
                log.warning("waiting up to %d s: %s", START_PATIENCE_S, error)
            await asyncio.sleep(0.2)
        else:
            return
