"""How the everything-server asks its client for something, in the words of either era.

Up to 2025-11-25 a server sends a request of its own in mid-call and waits; from 2026-07-28 on it answers
`input_required`, and the client sends its request again with the answers. A tool that is written with `ask` works in
both: it runs once in the first, and from its beginning for each round in the second, so it must not do anything before
it has its answers.
"""

from collections.abc import Mapping
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    ClientCapabilities,
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    ElicitationCapability,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitRequestURLParams,
    ElicitResult,
    InputRequest,
    InputRequiredResult,
    InputResponse,
    InputResponseRequestParams,
    ListRootsRequest,
    ListRootsResult,
    RootsCapability,
    SamplingCapability,
    SamplingMessage,
    TextContent,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

Context = ServerRequestContext[Any, Any]

ANSWERS: dict[type[InputRequest], type[InputResponse]] = {
    CreateMessageRequest: CreateMessageResult,
    ElicitRequest: ElicitResult,
    ListRootsRequest: ListRootsResult,
}
NEEDS: dict[type[InputRequest], ClientCapabilities] = {
    CreateMessageRequest: ClientCapabilities(sampling=SamplingCapability()),
    ElicitRequest: ClientCapabilities(elicitation=ElicitationCapability()),
    ListRootsRequest: ClientCapabilities(roots=RootsCapability()),
}


class NotYet(Exception):
    """Unwinds a tool whose answers haven't come; carries what the client is told."""

    def __init__(self, result: InputRequiredResult) -> None:
        super().__init__("the client has to answer first")
        self.result = result


def modern(ctx: Context) -> bool:
    return ctx.protocol_version in MODERN_PROTOCOL_VERSIONS


def can(ctx: Context, request: InputRequest) -> bool:
    """Whether the client said that it can answer such a request."""
    return ctx.session.check_client_capability(NEEDS[type(request)])


def require(ctx: Context, request: InputRequest) -> None:
    """Raises the protocol's error about a capability that the client didn't declare."""
    if not can(ctx, request):
        needed = NEEDS[type(request)].model_dump(by_alias=True, exclude_none=True)
        raise MCPError(
            MISSING_REQUIRED_CLIENT_CAPABILITY,
            f"This needs a client with the capability {', '.join(needed)}.",
            {"requiredCapabilities": needed},
        )


async def ask(
    ctx: Context,
    params: InputResponseRequestParams,
    requests: Mapping[str, InputRequest],
    state: str | None = None,
) -> dict[str, Any]:
    """The client's answers by the keys of `requests`.

    Raises `NotYet` where they come with a later request, which then holds `state` too; `MCPError` where the client
    can't give them.
    """
    for request in requests.values():
        require(ctx, request)
    if not modern(ctx):
        here = ServerMessageMetadata(related_request_id=ctx.request_id)
        return {
            key: await ctx.session.send_request(request, ANSWERS[type(request)], metadata=here)
            for key, request in requests.items()
        }
    given = params.input_responses or {}
    if all(isinstance(given.get(key), ANSWERS[type(request)]) for key, request in requests.items()):
        return {key: given[key] for key in requests}
    raise NotYet(InputRequiredResult(input_requests=dict(requests), request_state=state))


def form(message: str, **properties: dict[str, Any]) -> ElicitRequest:
    """A form of which every field has to be filled in."""
    return optional_form(message, list(properties), **properties)


def optional_form(message: str, required: list[str], **properties: dict[str, Any]) -> ElicitRequest:
    schema = {"type": "object", "properties": properties, "required": required}
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


def page(ctx: Context, message: str, url: str, name: str) -> ElicitRequest:
    """A page that the user is to open."""
    named = {} if modern(ctx) else {"elicitation_id": name}
    return ElicitRequest(params=ElicitRequestURLParams(message=message, url=url, **named))


def prompt(text: str, max_tokens: int = 100) -> CreateMessageRequest:
    """A question to the client's model."""
    message = SamplingMessage(role="user", content=TextContent(text=text))
    return CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=max_tokens))
