"""An MCP server with one of everything, in both eras: what the conformance suite talks to behind the gateway.

`python -m tests.conformance.everything` serves streamable HTTP on a port (told on stdout as one line, the URL), or
stdio with `--stdio`. With `--era` it is a server that knows one of the eras only. It stands on the low level of the
`mcp` SDK, so that schemas and results are exactly what is written here.
"""

import argparse
import asyncio
import itertools
import json
import socket
import warnings
from collections.abc import Awaitable, Callable
from typing import Any, get_args

import uvicorn
from mcp.server.caching import CacheHint
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.server.subscriptions import ListenHandler
from mcp.shared.exceptions import MCPDeprecationWarning, MCPError
from mcp_types import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    UNSUPPORTED_PROTOCOL_VERSION,
    BlobResourceContents,
    CallToolRequestParams,
    CallToolResult,
    CompleteRequestParams,
    CompleteResult,
    Completion,
    EmptyResult,
    GetPromptRequestParams,
    GetPromptResult,
    InputRequiredResult,
    JSONRPCMessage,
    ListPromptsResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    PaginatedRequestParams,
    Prompt,
    PromptArgument,
    PromptMessage,
    ReadResourceRequestParams,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
    ServerCapabilities,
    SetLevelRequestParams,
    SubscribeRequestParams,
    TextContent,
    TextResourceContents,
    Tool,
    UnsubscribeRequestParams,
)
from mcp_types.methods import CacheableMethod
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.conformance.asking import Context, NotYet, ask, form
from tests.conformance.sessions import Sessions
from tests.conformance.tools import OFFERS, PNG, TEXT, WATCHED, Refused, embedded

ERAS = ("handshake", "modern")
EXTRA_TOOL = Tool(name="test_extra_tool", description="Comes and goes.", input_schema={"type": "object"})
EXTRA_PROMPT = Prompt(name="test_extra_prompt", description="Comes and goes.")

RESOURCES = [
    Resource(
        uri="test://static-text", name="static-text", description="A text that never changes.", mime_type="text/plain"
    ),
    Resource(
        uri="test://static-binary", name="static-binary", description="A picture of one pixel.", mime_type="image/png"
    ),
    Resource(uri=WATCHED, name="watched-resource", description="A text that changes.", mime_type="text/plain"),
]
TEMPLATE = ResourceTemplate(
    uri_template="test://template/{id}/data",
    name="template",
    description="What there is about an id.",
    mime_type="application/json",
)


def argument(name: str, description: str) -> PromptArgument:
    return PromptArgument(name=name, description=description, required=True)


PROMPTS = [
    Prompt(name="test_simple_prompt", description="Has no arguments."),
    Prompt(
        name="test_prompt_with_arguments",
        description="Has two arguments.",
        arguments=[argument("arg1", "First test argument"), argument("arg2", "Second test argument")],
    ),
    Prompt(
        name="test_prompt_with_embedded_resource",
        description="Embeds a resource.",
        arguments=[argument("resourceUri", "URI of the resource to embed")],
    ),
    Prompt(name="test_prompt_with_image", description="Holds an image."),
    Prompt(name="test_input_required_result_prompt", description="Asks the user first."),
]


class Everything(Server[Any]):
    """The handlers, by method."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        super().__init__(
            "everything",
            version="1",
            instructions="A server for tests of the protocol: it has one of everything.",
            cache_hints=dict.fromkeys(get_args(CacheableMethod), CacheHint(ttl_ms=60_000, scope="public")),
            get_tool_input_schema=lambda name: OFFERS[name].tool.input_schema if name in OFFERS else None,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
            on_subscribe_resource=self._subscribe,
            on_unsubscribe_resource=self._unsubscribe,
            on_subscriptions_listen=ListenHandler(self.sessions.server.bus),
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
            on_completion=self._complete,
        )
        self.add_request_handler("logging/setLevel", SetLevelRequestParams, self._set_level)
        self.middleware.append(RequestStateBoundary(RequestStateSecurity.ephemeral(), default_audience=self.name))

    def get_capabilities(
        self, notification_options: NotificationOptions | None = None, *args: Any, **named: Any
    ) -> ServerCapabilities:
        """The lists do change, also for clients of the handshake era."""
        changes = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
        return super().get_capabilities(changes, *args, **named)

    async def _list_tools(self, ctx: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        tools = [offer.tool for offer in OFFERS.values()]
        return ListToolsResult(tools=tools + [EXTRA_TOOL] * self.sessions.server.extra_tool)

    async def _call_tool(self, ctx: Context, params: CallToolRequestParams) -> CallToolResult | InputRequiredResult:
        if params.name == EXTRA_TOOL.name and self.sessions.server.extra_tool:
            return CallToolResult(content=[TextContent(text="Here for now.")])
        if params.name not in OFFERS:
            raise MCPError(INVALID_PARAMS, f"Unknown tool: {params.name}")
        offer = OFFERS[params.name]
        given = params.arguments or {}
        if missing := [name for name in offer.tool.input_schema.get("required", ()) if name not in given]:
            return failed(f"Arguments are missing: {', '.join(missing)}")
        try:
            answer = await offer.run(ctx, params, self.sessions.of(ctx))
        except Refused as error:
            return failed(str(error))
        except NotYet as waiting:
            return waiting.result
        return CallToolResult(content=[TextContent(text=answer)] if isinstance(answer, str) else answer)

    async def _list_resources(self, ctx: Context, params: PaginatedRequestParams | None) -> ListResourcesResult:
        return ListResourcesResult(resources=RESOURCES)

    async def _list_templates(self, ctx: Context, params: PaginatedRequestParams | None) -> ListResourceTemplatesResult:
        return ListResourceTemplatesResult(resource_templates=[TEMPLATE])

    async def _read_resource(self, ctx: Context, params: ReadResourceRequestParams) -> ReadResourceResult:
        contents: TextResourceContents | BlobResourceContents
        match params.uri.split("/")[2:]:
            case ["static-text"]:
                contents = text(params.uri, "This is the content of the static text resource.")
            case ["static-binary"]:
                contents = BlobResourceContents(uri=params.uri, mime_type="image/png", blob=PNG.data)
            case ["watched-resource"]:
                contents = text(params.uri, f"Version {self.sessions.server.watched_version}")
            case ["template", id_, "data"]:
                data = {"id": id_, "templateTest": True, "data": f"Data for ID: {id_}"}
                contents = text(params.uri, json.dumps(data), "application/json")
            case _:
                raise MCPError(INVALID_PARAMS, "Resource not found", {"uri": params.uri})
        return ReadResourceResult(contents=[contents])

    async def _subscribe(self, ctx: Context, params: SubscribeRequestParams) -> EmptyResult:
        self.sessions.of(ctx).subscribed.add(params.uri)
        return EmptyResult()

    async def _unsubscribe(self, ctx: Context, params: UnsubscribeRequestParams) -> EmptyResult:
        self.sessions.of(ctx).subscribed.discard(params.uri)
        return EmptyResult()

    async def _list_prompts(self, ctx: Context, params: PaginatedRequestParams | None) -> ListPromptsResult:
        return ListPromptsResult(prompts=PROMPTS + [EXTRA_PROMPT] * self.sessions.server.extra_prompt)

    async def _get_prompt(self, ctx: Context, params: GetPromptRequestParams) -> GetPromptResult | InputRequiredResult:
        given = params.arguments or {}
        match params.name:
            case "test_simple_prompt":
                return said("This is a simple prompt for testing.")
            case "test_prompt_with_arguments":
                return said(f"Prompt with arguments: arg1='{given.get('arg1')}', arg2='{given.get('arg2')}'")
            case "test_prompt_with_embedded_resource":
                resource = embedded(
                    given.get("resourceUri", ""), "text/plain", "Embedded resource content for testing."
                )
                return said(resource, "Please process the embedded resource above.")
            case "test_prompt_with_image":
                return said(PNG, "Please analyze the image above.")
            case "test_input_required_result_prompt":
                asked = {"user_context": form("What context should the prompt use?", context=TEXT)}
                try:
                    answers = await ask(ctx, params, asked)
                except NotYet as waiting:
                    return waiting.result
                return said(f"In this context: {(answers['user_context'].content or {}).get('context')}")
            case EXTRA_PROMPT.name if self.sessions.server.extra_prompt:
                return said("Here for now.")
        raise MCPError(INVALID_PARAMS, f"Unknown prompt: {params.name}")

    async def _complete(self, ctx: Context, params: CompleteRequestParams) -> CompleteResult:
        known = ("paris", "park", "party", "test", "testing", "123")
        values = [value for value in known if value.startswith(params.argument.value)]
        return CompleteResult(completion=Completion(values=values, total=len(values), has_more=False))

    async def _set_level(self, ctx: Context, params: SetLevelRequestParams) -> EmptyResult:
        self.sessions.of(ctx).level = params.level
        return EmptyResult()


def failed(reason: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=reason)], is_error=True)


def text(uri: str, content: str, mime_type: str = "text/plain") -> TextResourceContents:
    return TextResourceContents(uri=uri, mime_type=mime_type, text=content)


def said(*contents: Any) -> GetPromptResult:
    blocks = [TextContent(text=content) if isinstance(content, str) else content for content in contents]
    return GetPromptResult(messages=[PromptMessage(role="user", content=block) for block in blocks])


class Events(EventStore):
    """What was sent on each stream, for clients that come back with `Last-Event-ID`. Kept as long as the process."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._events: dict[str, tuple[str, JSONRPCMessage | None]] = {}

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        number = str(next(self._numbers))
        self._events[number] = (stream_id, message)
        return number

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        if last_event_id not in self._events:
            return None
        stream = self._events[last_event_id][0]
        for number, (of, message) in list(self._events.items()):
            if of == stream and int(number) > int(last_event_id) and message is not None:
                await send_callback(EventMessage(message, number))
        return stream


class OneEra:
    """Before the HTTP application: answers what the other era asks as a server would that never heard of it."""

    def __init__(self, app: ASGIApp, era: str) -> None:
        self._app = app
        self._modern = era == "modern"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        version = Headers(scope=scope).get("mcp-protocol-version")
        others = (None, *HANDSHAKE_PROTOCOL_VERSIONS) if self._modern else MODERN_PROTOCOL_VERSIONS
        if version not in others:
            await self._app(scope, receive, send)
            return
        if self._modern:
            data = {"supported": list(MODERN_PROTOCOL_VERSIONS), "requested": version or ""}
            error = {"code": UNSUPPORTED_PROTOCOL_VERSION, "message": "Unsupported protocol version", "data": data}
        else:  # in the words of the SDK's first version
            error = {"code": INVALID_REQUEST, "message": "Bad Request: Missing session ID"}
        answer = {"jsonrpc": "2.0", "id": None if self._modern else "server-error", "error": error}
        status = 400 if scope["method"] == "POST" else 405
        await JSONResponse(answer, status_code=status)(scope, receive, send)


async def serve_http(port: int, era: str | None) -> None:
    app: ASGIApp = Everything().streamable_http_app(event_store=Events(), retry_interval=100)
    # h11 leaves no spaces around a header's value; httptools leaves those after it.
    if era is not None:
        app = OneEra(app, era)
    listening = socket.create_server(("127.0.0.1", port))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
    await uvicorn.Server(uvicorn.Config(app, log_level="warning", http="h11")).serve(sockets=[listening])


async def serve_stdio() -> None:
    server = Everything()
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.everything", description=__doc__)
    parser.add_argument("--stdio", action="store_true", help="serve stdio, not HTTP")
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1; 0, the default, takes a free one")
    parser.add_argument("--era", choices=ERAS, help="be a server of this era only (over HTTP)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", MCPDeprecationWarning)  # what the handshake era can do is what is tested here
    serve: Callable[[], Awaitable[None]] = (
        serve_stdio if arguments.stdio else lambda: serve_http(arguments.port, arguments.era)
    )
    asyncio.run(serve())  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
