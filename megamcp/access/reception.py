"""A request's way through the entrance into its room: as whom, metered, and written down.

The data plane is told nothing: it asks its `ControlPort`, which sees `CALLER`. Refusals are in the room's own words: a
problem document, or a JSON-RPC error.
"""

import json
import math
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import Message, Receive, Send
from starlette.types import Scope as Asgi

from megamcp.access.entrance import VISIT, Entrance, Visit
from megamcp.access.principal import CALLER, Principal
from megamcp.bodies import problem
from megamcp.errors import MegaMCPError

Room = Callable[[Asgi, Receive, Send], Awaitable[None]]


async def agents_room(entrance: Entrance, room: Room, scope: Asgi, receive: Receive, send: Send) -> None:
    """The data plane's door."""
    counted: Principal | None = None
    try:
        try:
            entrance.check_host(scope)
            principal = await entrance.enter(scope, agents=True)
            if principal is not None and principal.quotas.metered:
                entrance.meters.demand_bytes(principal)
                if scope["method"] == "POST":
                    entrance.meters.begin_call(principal)
                    counted = principal
                receive, send = entrance.meters.counted(principal, receive, send)
        except MegaMCPError as error:
            await refuse(error, send)
            return
        if principal is not None:
            CALLER.set(principal)
            if principal.rollout is not None:  # a carrier like the others: the data plane compares them
                scope = {**scope, "headers": [*scope["headers"], (b"x-rollout-id", principal.rollout.encode())]}
        await room(scope, receive, send)
    finally:
        if counted is not None:
            entrance.meters.end_call(counted)


async def control_room(entrance: Entrance, room: Room, scope: Asgi, receive: Receive, send: Send) -> None:
    """The control plane's door. Pages outside of `/v1` are for everyone."""
    try:
        entrance.check_host(scope)
        if not scope["path"].startswith("/v1/"):
            await room(scope, receive, send)
            return
        entrance.check_origin(scope)
        visit = Visit(await entrance.enter(scope, agents=False))
        principal = visit.principal
        if principal is not None and principal.quotas.metered:
            entrance.meters.demand_bytes(principal)
            receive, send = entrance.meters.counted(principal, receive, send)
    except MegaMCPError as error:
        await problem(error, Request(scope))(scope, receive, send)
        return
    CALLER.set(principal)
    scope[VISIT] = visit
    status = 500

    async def noted(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    try:
        await room(scope, receive, noted)
    finally:
        if visit.calling and principal is not None:
            entrance.meters.end_call(principal)
        if visit.deed is not None:
            client = scope.get("client")
            entrance.audit.tell(principal, visit.deed, visit.target, status=status, address=client and client[0])


async def refuse(error: MegaMCPError, send: Send) -> None:
    """An error in the shape of MCP's own; the message that it answers was not read."""
    told = {"code": error.jsonrpc, "message": error.message, "data": error.rpc_data()}
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": told}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.status == 401 or error.challenge is not None:
        headers.append((b"www-authenticate", (error.challenge or "Bearer").encode()))
    if (wait := error.extra.get("retry_after")) is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait))))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
