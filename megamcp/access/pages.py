"""What the wire has of access: keys for admins, and who gives tokens, for everyone (RFC 9728)."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request

from megamcp import types as t
from megamcp.access.entrance import METADATA, Entrance, permitted
from megamcp.access.principal import CALLER, Quotas, Scope
from megamcp.errors import Conflict, NotFound

metadata = APIRouter(include_in_schema=False)


def keys_router(responses: dict[int | str, dict[str, Any]]) -> APIRouter:
    """`/v1/keys`, with the answers that all routes of the control plane may give."""
    router = APIRouter(prefix="/v1/keys", tags=["keys"], dependencies=[Depends(permitted)], responses=responses)
    router.add_api_route("", list_keys, methods=["GET"], summary="All keys, without what is shown for them")
    router.add_api_route("", create_key, methods=["POST"], status_code=201, summary="Make a key")
    router.add_api_route("/{key}", revoke_key, methods=["DELETE"], status_code=204, summary="Revoke a key")
    return router


def _entrance(request: Request) -> Entrance:
    entrance: Entrance = request.app.state.services.entrance
    return entrance


E = Annotated[Entrance, Depends(_entrance)]


async def list_keys(entrance: E) -> t.Keys:
    return t.Keys(keys=[t.Key.model_validate(dict(row)) for row in await entrance.keys.list()])


async def create_key(entrance: E, body: t.MakeKey) -> t.NewKey:
    """`secret` is shown here and never again."""
    if not entrance.wanted:
        raise Conflict("This gateway wants no keys, so one would keep nobody out.", code="keys_not_wanted")
    caller = CALLER.get()
    by = None if caller is None else caller.id
    row, secret = await entrance.keys.make(
        body.name,
        Scope(body.scope),
        body.tenant,
        Quotas(**body.quotas.model_dump()),
        body.ttl_s,
        by,
    )
    return t.NewKey.model_validate({**dict(row), "secret": secret})


async def revoke_key(entrance: E, key: Annotated[str, Path(description="A key's id.", max_length=100)]) -> None:
    """Idempotent. Every gateway process refuses it within two seconds."""
    await entrance.keys.revoke(key)


@metadata.get(METADATA, summary="Who gives tokens for this gateway")
@metadata.get(METADATA + "/{path:path}", summary="Who gives tokens for this path of the gateway")
async def protected_resource(entrance: E, path: str = "") -> dict[str, Any]:
    document = entrance.metadata(f"/{path}" if path else "")
    if document is None:
        raise NotFound("This gateway takes keys of its own only, no tokens.", code="no_such_path")
    return document
