"""The control plane's REST interface: one function a route, no decisions of its own.

Bodies and answers are the models of `types.py`; errors are RFC 9457 documents made from the error tree at one place.
The interface is documented where it is defined: `/docs` shows it, `/openapi.json` is the contract for clients.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path as FilePath
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from megamcp import store as sql
from megamcp import types as t
from megamcp.access.entrance import permitted
from megamcp.access.principal import listed_tenant, visible
from megamcp.environments import LoadedEnvironment
from megamcp.errors import AuthorizationRequired, BadRequest, Unprocessable
from megamcp.loading.units import Progress
from megamcp.loads import watched
from megamcp.services import Services
from megamcp.store import cursor_of, read_cursor
from megamcp.trial import try_out
from megamcp.views import (
    changes_view,
    checkpoint_view,
    encode,
    environment_view,
    event_document,
    rollout_view,
)

PROBLEM = {"model": t.Problem, "content": {"application/problem+json": {}}}
COMMON: dict[int | str, dict[str, Any]] = {
    status: {**PROBLEM, "description": text}
    for status, text in {
        400: "The request is malformed: `bad_request`, `invalid_arguments`, …",
        401: "The key is missing or wrong: `unauthorized`, `invalid_token`",
        403: "The key is not for this: `forbidden`",
        404: "No such thing: `rollout_not_found`, `checkpoint_not_found`, `environment_not_found`, …",
        409: "Not in a state that allows this: `foreign_checkpoint`, `checkpoint_pinned`, `rolled_back`, …",
        410: "It was there and is not any more: `rollout_closed`, `rollout_expired`, `checkpoint_gone`",
        413: "The body is over the limit: `body_too_large`",
        415: "The body isn't JSON: `unsupported_media_type`",
        422: "Understood and refused: `idempotency_key_reused`, `unsupported_schema`, `query_failed`, …",
        429: "A bound is reached: `too_many_rollouts`, `control_busy`, …; see `Retry-After`",
        503: "The database is away: `database_unavailable`",
    }.items()
}
SLOW: dict[int | str, dict[str, Any]] = {
    status: {**PROBLEM, "description": text}
    for status, text in {
        502: "The tool server died or makes no sense: `upstream_error`, …",
        504: "It took longer than its deadline: `deadline_exceeded`, `query_timeout`",
    }.items()
}
MAX_PAGE = 1000
POLL_S = 0.25


def services(request: Request) -> Services:
    """The process's services, made by the app's lifespan."""
    made: Services = request.app.state.services
    return made


S = Annotated[Services, Depends(services)]
RolloutId = Annotated[str, Path(description="A rollout's id.", max_length=100)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most rows of a page.")]
CheckpointId = Annotated[str, Path(description="A checkpoint's id.", max_length=100)]
DatabaseServer = Annotated[
    str | None, Query(description="May be left out where one server has a database of the rollout's own.")
]
router = APIRouter(prefix="/v1", dependencies=[Depends(permitted)], responses=COMMON)


# -- environments -------------------------------------------------------------------------------------------------


@router.get("/environments", tags=["environments"], summary="What can be opened")
async def list_environments(s: S) -> t.Environments:
    return t.Environments(environments=[environment_view(e) for e in await s.environments.all() if visible(e.tenant)])


@router.get("/environments/{name}", tags=["environments"], summary="One environment, by name or name@hash")
async def show_environment(
    s: S, name: Annotated[str, Path(description="Name (its newest version) or name@hash.")]
) -> t.Environment:
    return environment_view(await s.environments.find(name))


@router.post(
    "/environments",
    tags=["environments"],
    summary="Load an environment from a folder",
    status_code=201,
    response_model=t.Environment,
    responses={201: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def load_environment(
    s: S,
    request: Request,
    body: t.LoadEnvironment,
    accept: Annotated[str, Header(description="`text/event-stream` to see its progress.")] = "application/json",
) -> t.Environment | Response:
    """Idempotent: the same content is the same version. All of it is loaded, or nothing.

    With `Accept: text/event-stream`: `progress`, `remark`, and at the end `loaded` or `problem`. Who hangs up before
    that ends the load. Then, too, its servers are started, which is told in remarks, and what its sandboxes need is got
    ready (packages, images): a problem with that comes when the environment is loaded already.
    """

    async def load(progress: Progress | None) -> LoadedEnvironment:
        loaded = await s.environments.load(FilePath(body.path), progress, s.databases.sources.build, body.tenant)
        if progress is not None:
            await try_out(loaded, s.host, s.dataplane, s.store, progress)
        return loaded

    if "text/event-stream" in accept:
        stream = watched(load, request.url.path)
        return StreamingResponse(stream, 201, {"Cache-Control": "no-store"}, media_type="text/event-stream")
    return environment_view(await load(None))


@router.post(
    "/environments/{name}/servers/{server}/authorize",
    tags=["environments"],
    summary="Have a tool server at a URL authorized",
    responses=SLOW,
)
async def authorize_server(
    s: S,
    name: Annotated[str, Path(description="Name (its newest version) or name@hash.")],
    server: Annotated[str, Path(description="Of a server with a `url`.")],
    body: t.Authorize | None = None,
) -> t.Authorization:
    """Asks the server for its tools. Where it wants a person's consent first, `url` is where it is given; ask again to
    see whether it was."""
    loaded = await s.environments.find(name)
    found = loaded.named(server)
    if found.config.url is None:
        raise Unprocessable(f"Server {server!r} is run by the gateway: nobody has to authorize that.", code="no_url")
    if body is not None and body.again:
        await s.authorities.of(loaded, found).forget()
    try:
        await s.dataplane.reach(loaded.id, server)
    except AuthorizationRequired as required:
        return t.Authorization(authorized=False, url=required.url)
    return t.Authorization(authorized=True)


# -- rollouts -----------------------------------------------------------------------------------------------------


@router.post("/rollouts", tags=["rollouts"], summary="Open rollouts", status_code=201)
async def open_rollouts(s: S, request: Request, body: t.OpenRollouts) -> t.Rollouts:
    """Each one has a URL for any MCP client, and a state of its own that starts as the environment's."""
    rows = await s.rollouts.open(
        body.environment,
        count=body.count,
        group=body.group,
        ttl_s=body.ttl_s,
        seed=body.seed,
        labels=body.labels,
    )
    return t.Rollouts(rollouts=[rollout_view(row, s, request) for row in rows])


@router.get("/rollouts", tags=["rollouts"], summary="List rollouts, oldest first")
async def list_rollouts(
    s: S,
    request: Request,
    group: Annotated[str | None, Query(description="Only rollouts of this group.")] = None,
    status: Annotated[t.RolloutStatus | None, Query(description="Only rollouts in this state.")] = None,
    environment: Annotated[str | None, Query(description="Name or name@hash.")] = None,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
    limit: Limit = 100,
) -> t.Rollouts:
    created, last = read_cursor(cursor)
    rows = await s.store.rows(sql.ROLLOUTS, group, status, environment, created, last, limit + 1, listed_tenant())
    page = rows[:limit]
    return t.Rollouts(
        rollouts=[rollout_view(row, s, request) for row in page],
        next_cursor=cursor_of(page[-1]) if len(rows) > limit else None,
    )


@router.get("/rollouts/{rollout}", tags=["rollouts"], summary="Show a rollout")
async def show_rollout(s: S, request: Request, rollout: RolloutId) -> t.Rollout:
    return rollout_view(await s.rollouts.get(rollout), s, request)


@router.delete("/rollouts/{rollout}", tags=["rollouts"], summary="Release a rollout", status_code=204)
async def close_rollout(s: S, rollout: RolloutId) -> None:
    """Idempotent. Calls still in flight end in an error; its checkpoints live on until their own leases end."""
    await s.rollouts.close(rollout)


@router.post("/rollouts/{rollout}/renew", tags=["rollouts"], summary="Extend a rollout's lease")
async def renew_rollout(s: S, request: Request, rollout: RolloutId, body: t.Renew | None = None) -> t.Rollout:
    return rollout_view(await s.rollouts.renew(rollout, body.ttl_s if body else None), s, request)


@router.post("/rollouts/{rollout}/rollback", tags=["rollouts"], summary="Move a rollout back to its own checkpoint")
async def roll_back(s: S, request: Request, rollout: RolloutId, body: t.Rollback) -> t.Rollout:
    """Exact: rows, counters, clock and random position. The journal keeps what was rolled back."""
    await s.entrance.see_checkpoint(body.checkpoint)
    return rollout_view(await s.rollouts.roll_back(rollout, body.checkpoint), s, request)


# -- checkpoints --------------------------------------------------------------------------------------------------


@router.post("/rollouts/{rollout}/checkpoints", tags=["checkpoints"], summary="Checkpoint a rollout", status_code=201)
async def make_checkpoint(s: S, rollout: RolloutId, body: t.MakeCheckpoint | None = None) -> t.Checkpoint:
    """Waits for running calls; sees none half done."""
    body = body or t.MakeCheckpoint()
    row = await s.rollouts.make_checkpoint(rollout, label=body.label, turn=body.turn, ttl_s=body.ttl_s)
    return checkpoint_view(row)


@router.get("/rollouts/{rollout}/checkpoints", tags=["checkpoints"], summary="A rollout's own checkpoints")
async def list_checkpoints(s: S, rollout: RolloutId) -> t.Checkpoints:
    return t.Checkpoints(checkpoints=[checkpoint_view(row) for row in await s.rollouts.checkpoints(rollout)])


@router.get("/checkpoints/{checkpoint}", tags=["checkpoints"], summary="Show a checkpoint")
async def show_checkpoint(s: S, checkpoint: CheckpointId) -> t.Checkpoint:
    return checkpoint_view(await s.rollouts.checkpoint(checkpoint))


@router.delete("/checkpoints/{checkpoint}", tags=["checkpoints"], summary="Release a checkpoint", status_code=204)
async def release_checkpoint(s: S, checkpoint: CheckpointId) -> None:
    """Idempotent. Rollouts and checkpoints that stand on it are not touched."""
    await s.rollouts.release_checkpoint(checkpoint)


@router.post("/checkpoints/{checkpoint}/renew", tags=["checkpoints"], summary="Extend a checkpoint's lease")
async def renew_checkpoint(s: S, checkpoint: CheckpointId, body: t.Renew | None = None) -> t.Checkpoint:
    return checkpoint_view(await s.rollouts.renew_checkpoint(checkpoint, body.ttl_s if body else None))


@router.post("/checkpoints/{checkpoint}/pin", tags=["checkpoints"], summary="Hold a checkpoint under a name")
async def pin_checkpoint(s: S, checkpoint: CheckpointId, body: t.Pin) -> t.Checkpoint:
    return checkpoint_view(await s.rollouts.pin(checkpoint, body.owner, body.ttl_s))


@router.delete(
    "/checkpoints/{checkpoint}/pin/{owner:path}", tags=["checkpoints"], summary="Let go of a pin", status_code=204
)
async def unpin_checkpoint(
    s: S, checkpoint: CheckpointId, owner: Annotated[str, Path(description="Who pinned it.")]
) -> None:
    """Idempotent. Without pins the checkpoint's own lease decides again."""
    await s.rollouts.unpin(checkpoint, owner)


@router.post(
    "/checkpoints/{checkpoint}/fork",
    tags=["checkpoints"],
    summary="Fork rollouts from a checkpoint",
    status_code=201,
)
async def fork(s: S, request: Request, checkpoint: CheckpointId, body: t.Fork | None = None) -> t.Rollouts:
    """New rollouts that start from this point and share nothing that either may change."""
    body = body or t.Fork()
    rows = await s.rollouts.fork(
        checkpoint, count=body.count, group=body.group, ttl_s=body.ttl_s, seed=body.seed, labels=body.labels
    )
    return t.Rollouts(rollouts=[rollout_view(row, s, request) for row in rows])


# -- reading ------------------------------------------------------------------------------------------------------

Where = Annotated[str, Query(description="A checkpoint id, `base` or `head`.", max_length=100)]


@router.get(
    "/rollouts/{rollout}/diff", tags=["state"], summary="What differs between two points", response_model=t.Diff
)
async def diff(
    s: S,
    rollout: RolloutId,
    start: Annotated[str, Query(alias="from", description="A checkpoint id, `base` or `head`.")] = "base",
    to: Where = "head",
) -> Response:
    """Numbers keep all their digits."""
    servers = {
        name: changes_view(changes) for name, changes in (await s.points.diff(rollout, start, to)).items() if changes
    }
    found = t.Diff.model_validate({"rollout": rollout, "from": start, "to": to, "servers": servers})
    return _json(found.model_dump(by_alias=True))


@router.get("/rollouts/{rollout}/digest", tags=["state"], summary="Hash of the effective state at a point")
async def digest(s: S, rollout: RolloutId, at: Where = "head") -> t.Digest:
    """Null where memory of a process belongs to the state: its server's part is `opaque` then."""
    found = await s.points.digest(rollout, at)
    return t.Digest(
        rollout=rollout,
        at=at,
        digest=found.whole,
        servers=dict(found.servers),
        files=dict(found.files),
        counters=dict(found.counters),
    )


@router.post(
    "/rollouts/{rollout}/query",
    tags=["state"],
    summary="Read-only SQL on a rollout's state",
    response_model=t.QueryResult,
    responses=SLOW,
)
async def query(s: S, rollout: RolloutId, body: t.Query) -> Response:
    """For evaluators: one SELECT, by a role that can read this rollout's rows and nothing else."""
    await s.entrance.see_checkpoint(body.at)
    columns, rows, truncated = await s.queries.run(rollout, body.server, body.sql, body.at)
    return _json({"columns": columns, "rows": rows, "truncated": truncated})


@router.get(
    "/rollouts/{rollout}/events",
    tags=["journal"],
    summary="The journal, the ancestors' part first",
    responses={200: {"model": t.Events, "content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def events(
    s: S,
    rollout: RolloutId,
    after: Annotated[int, Query(ge=0, lt=2**63, description="Number of the last row that is known.")] = 0,
    limit: Limit = 500,
    accept: Annotated[str, Header(description="`text/event-stream` for a stream.")] = "application/json",
    last_event_id: Annotated[int | None, Header(ge=0, lt=2**63, description="Goes before `after` in a stream.")] = None,
) -> Response:
    """JSON by default. With `Accept: text/event-stream`: one event a row, going on until the rollout ends."""
    await s.rollouts.get(rollout)
    if "text/event-stream" in accept:
        stream = _follow(s, rollout, last_event_id if last_event_id is not None else after)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    rows = await s.store.rows(sql.EVENTS, rollout, after, limit + 1)
    page = rows[:limit]
    return _json(
        {
            "events": [event_document(row) for row in page],
            "next_after": page[-1]["seq"] if len(rows) > limit else None,
        }
    )


async def _follow(s: Services, rollout: str, after: int) -> AsyncIterator[bytes]:
    quiet, ended = 0.0, False
    while not s.stopping.is_set():
        rows = await s.store.rows(sql.EVENTS, rollout, after, 100)
        for row in rows:
            after = row["seq"]
            yield b"id: %d\nevent: %b\ndata: %b\n\n" % (
                after,
                row["kind"].encode(),
                msgspec.json.encode(event_document(row)),
            )
        if rows:
            quiet = 0.0
            continue
        if ended:
            return
        # What was written before it ended is told first, in one more round.
        ended = (await s.rollouts.get(rollout))["status"] != t.RolloutStatus.OPEN
        if ended:
            continue
        quiet += POLL_S
        if quiet >= 15:
            quiet = 0.0
            yield b": still here\n\n"
        await asyncio.sleep(POLL_S)


@router.post("/rollouts/{rollout}/scores", tags=["journal"], summary="Keep a reward or advantage", status_code=201)
async def score(s: S, rollout: RolloutId, body: t.Score) -> t.Event:
    seq = await s.rollouts.score(rollout, body.model_dump(exclude_none=True))
    rows = await s.store.rows(sql.EVENTS, rollout, seq - 1, 1)
    return t.Event.model_validate(event_document(rows[0]))


# -- the agent's view ---------------------------------------------------------------------------------------------


@router.get("/rollouts/{rollout}/dsn", tags=["state"], summary="A DSN of the rollout's own database")
async def dsn(s: S, request: Request, rollout: RolloutId, server: DatabaseServer = None) -> t.Dsn:
    """For clients that want to talk SQL themselves, on state of kind `database`.

    It stays the same over checkpoints, forks and rollbacks, and ends with the rollout.
    """
    found = await s.door.dsn(rollout, server, reached_as=request.url.hostname)
    return t.Dsn(rollout=rollout, **found)


@router.get(
    "/rollouts/{rollout}/tools",
    tags=["tools"],
    summary="The tools as the agent sees them",
    response_model=t.Tools,
    responses=SLOW,
)
async def tools(s: S, rollout: RolloutId) -> Response:
    return Response(b'{"tools":[%b]}' % b",".join(await s.dataplane.tools(rollout)), media_type="application/json")


@router.post(
    "/rollouts/{rollout}/call",
    tags=["tools"],
    summary="Call a tool as the agent would",
    response_model=t.ToolResult,
    responses=SLOW,
)
async def call(
    s: S,
    rollout: RolloutId,
    body: t.Call,
    idempotency_key: Annotated[
        str | None, Header(description="The same as the body's `idempotency_key`.", max_length=512)
    ] = None,
) -> Response:
    """The same path as MCP's `tools/call`; the answer is MCP's `CallToolResult`."""
    key = body.idempotency_key
    if idempotency_key is not None:
        if key not in (None, idempotency_key):
            raise BadRequest("The Idempotency-Key header and the body's differ.", code="bad_idempotency_key")
        key = idempotency_key
    arguments = msgspec.json.encode(body.arguments)
    result = await s.dataplane.call(rollout, body.tool, arguments, idempotency_key=key)
    return Response(result, media_type="application/json")


def _json(document: Any) -> Response:
    return Response(encode(document), media_type="application/json")
