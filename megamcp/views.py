"""What is kept, as the wire shows it: rows and records become the models of `types.py`, errors RFC 9457 documents."""

from collections.abc import Callable
from typing import Any

import asyncpg
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from megamcp import outages
from megamcp import types as t
from megamcp.bodies import problem
from megamcp.documents.difference import DocumentDiff
from megamcp.environments import LoadedEnvironment
from megamcp.errors import BadRequest, MegaMCPError, NotFound
from megamcp.points import Changes
from megamcp.sandboxed import FileChanges
from megamcp.services import Services
from megamcp.state import TableDiff
from megamcp.store import translate

encode: Callable[[Any], bytes] = msgspec.json.Encoder(decimal_format="number").encode


def environment_view(loaded: LoadedEnvironment) -> t.Environment:
    """An environment as the wire shows it."""
    return t.Environment(
        name=loaded.name,
        hash=loaded.hash,
        clock=loaded.clock,
        seed=loaded.seed,
        loaded_at=loaded.loaded_at,
        servers=[
            t.EnvironmentServer(
                name=server.name,
                kind=server.config.state.kind,
                tables=[table.name for table in server.schema.tables] if server.schema else [],
                url=server.config.url and server.config.url.partition("?")[0],
            )
            for server in loaded.servers
        ],
    )


def rollout_view(row: asyncpg.Record, s: Services, request: Request) -> t.Rollout:
    """A rollout as the wire shows it."""
    public = s.settings.public_url or str(request.base_url)
    names = "id group turn depth seq status parent_checkpoint checkpoint seed labels created_at expires_at"
    return t.Rollout(
        url=f"{public.rstrip('/')}/r/{row['id']}/mcp",
        environment=row["environment_name"],
        **{name: row[name] for name in names.split()},
    )


def table_view(found: TableDiff) -> t.TableDiff:
    """A table's changes as the wire shows them."""
    return t.TableDiff(
        added=list(found.added),
        removed=list(found.removed),
        changed=[t.RowChange(before=change.before, after=change.after) for change in found.changed],
        total=found.total,
        truncated=found.truncated,
    )


def files_view(found: FileChanges) -> t.FilesDiff:
    """The changes of a working folder as the wire shows them."""
    names = "path kind size mode text"
    by_change: dict[str, list[t.FileChange]] = {"added": [], "removed": [], "changed": []}
    for change in found.changes:
        by_change[change.change].append(t.FileChange(**{name: getattr(change, name) for name in names.split()}))
    return t.FilesDiff(**by_change, truncated=found.truncated)


def changes_view(changes: Changes) -> t.ServerDiff:
    """What differs in a server's state as the wire shows it."""
    return t.ServerDiff(
        kind=changes.kind,
        tables={name: table_view(table) for name, table in changes.tables.items()},
        files=files_view(changes.files) if changes.files and changes.files.changes else None,
        document=document_view(changes.document) if changes.document else None,
    )


def document_view(found: DocumentDiff) -> t.DocumentDiff:
    """A document's changes as the wire shows them."""
    return t.DocumentDiff(
        added=[t.Place(path=path, value=value) for path, value in found.added],
        removed=[t.Place(path=path, value=value) for path, value in found.removed],
        changed=[t.PlaceChange(path=one.path, before=one.before, after=one.after) for one in found.changed],
        total=found.total,
        truncated=found.truncated,
    )


def checkpoint_view(row: asyncpg.Record) -> t.Checkpoint:
    """A checkpoint as the wire shows it."""
    names = ["id", "rollout", "parent", "turn", "depth", "seq", "digest", "label", "pins", "created_at", "expires_at"]
    return t.Checkpoint(environment=row["environment_name"], **{name: row[name] for name in names})


def event_document(row: asyncpg.Record) -> dict[str, Any]:
    """A journal row as JSON; a call's arguments and result keep their bytes."""
    document: dict[str, Any] = {name: row[name] for name in ("rollout", "seq", "kind", "at")}
    for name in ("server", "tool", "is_error", "state", "data"):
        if row[name] is not None:
            document[name] = row[name]
    if row["duration_ms"] is not None:
        document["duration_ms"] = float(row["duration_ms"])
    for name in ("arguments", "result"):
        if row[name] is not None:
            document[name] = msgspec.Raw(row[name].encode())
    return document


def add_error_handlers(app: FastAPI) -> None:
    """One mapping from errors to the wire."""

    @app.exception_handler(MegaMCPError)
    async def ours(request: Request, error: MegaMCPError) -> Response:
        return problem(error, request)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        problems = [{"where": ".".join(map(str, e["loc"])), "problem": e["msg"]} for e in error.errors()]
        told = "; ".join(f"{p['where']}: {p['problem']}" for p in problems)
        return problem(BadRequest(told, code="invalid_request", problems=problems, hint="See /docs."), request)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return problem(
                NotFound(f"There is nothing at {request.url.path}.", code="no_such_path", hint="See /docs."),
                request,
            )
        known = MegaMCPError(str(error.detail), code="method_not_allowed" if error.status_code == 405 else "http_error")
        document = {**known.problem(request.url.path), "title": "HTTPException", "status": error.status_code}
        headers = dict(error.headers or {})
        return Response(encode(document), error.status_code, headers, media_type="application/problem+json")

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return problem(MegaMCPError("The gateway failed; its log says more.", code="internal"), request)

    async def database(request: Request, error: Exception) -> Response:
        known = translate(error)
        if known is None:
            raise error
        return problem(known, request)

    for kind in outages.DRIVER:
        app.exception_handler(kind)(database)
