"""Tools of the everything-server, by the names that the conformance suite calls."""

import base64
import json
import struct
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
from mcp.shared.exceptions import UrlElicitationRequiredError
from mcp.shared.subscriptions import PromptsListChanged, ResourceUpdated, ToolsListChanged
from mcp_types import (
    AudioContent,
    CallToolRequestParams,
    ContentBlock,
    ElicitRequestURLParams,
    EmbeddedResource,
    ImageContent,
    InputRequest,
    ListRootsRequest,
    LoggingLevel,
    TextContent,
    TextResourceContents,
    Tool,
)

from tests.conformance.asking import Context, ask, can, form, modern, optional_form, page, prompt, require
from tests.conformance.sessions import State

Answer = str | list[ContentBlock]
Run = Callable[[Context, CallToolRequestParams, State], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Offer:
    tool: Tool
    run: Run


OFFERS: dict[str, Offer] = {}
TEXT = {"type": "string"}
WATCHED = "test://watched-resource"
PAUSE_S = 0.05
"""Between the parts of what a tool tells in mid-call."""


def tool(name: str, description: str, schema: dict[str, Any] | None = None, **arguments: Any) -> Callable[[Run], Run]:
    """Offers a function as a tool, with arguments that are all required, or with a schema of its own."""
    schema = schema or {"type": "object", "properties": arguments, "required": list(arguments)}

    def offer(run: Run) -> Run:
        OFFERS[name] = Offer(Tool(name=name, description=description, input_schema=schema), run)
        return run

    return offer


class Refused(Exception):
    """What a tool tells its caller as an error of its own."""


# What a result can hold


def png() -> str:
    """One red pixel, in base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    picture = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0\xff\0\0")) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + picture).decode()


def wav() -> str:
    """Two samples of silence, in base64."""
    silence = b"\0\0\0\0"
    head = b"RIFF" + struct.pack("<I", 36 + len(silence)) + b"WAVEfmt "
    head += struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16) + b"data" + struct.pack("<I", len(silence))
    return base64.b64encode(head + silence).decode()


PNG = ImageContent(data=png(), mime_type="image/png")


def embedded(uri: str, mime_type: str, text: str) -> EmbeddedResource:
    return EmbeddedResource(resource=TextResourceContents(uri=uri, mime_type=mime_type, text=text))


@tool("test_simple_text", "Answers a text.")
async def simple_text(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    return "This is a simple text response for testing."


@tool("test_image_content", "Answers an image.")
async def image_content(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    return [PNG]


@tool("test_audio_content", "Answers a sound.")
async def audio_content(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    return [AudioContent(data=wav(), mime_type="audio/wav")]


@tool("test_embedded_resource", "Answers a resource with its content.")
async def embedded_resource(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    return [embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")]


@tool("test_multiple_content_types", "Answers a text, an image and a resource.")
async def multiple_content_types(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    data = json.dumps({"test": "data", "value": 123})
    resource = embedded("test://mixed-content-resource", "application/json", data)
    return [TextContent(text="Multiple content types test:"), PNG, resource]


@tool("test_error_handling", "Always fails.")
async def error_handling(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    raise Refused("This tool intentionally returns an error for testing")


@tool(
    "json_schema_2020_12_tool",
    "Tool with JSON Schema 2020-12 features",
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {
            "address": {"$anchor": "addressDef", "type": "object", "properties": {"street": TEXT, "city": TEXT}},
        },
        "properties": {
            "name": TEXT,
            "address": {"$ref": "#/$defs/address"},
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
            "phone": TEXT,
            "email": TEXT,
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": False,
    },
)
async def json_schema(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    return json.dumps(params.arguments or {})


@tool(
    "test_x_mcp_header",
    "Wants one of its arguments in a header too.",
    {
        "type": "object",
        "properties": {"region": {"type": "string", "x-mcp-header": "Region"}, "query": TEXT},
        "required": ["region"],
    },
)
async def x_mcp_header(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    return f"Asked in {(params.arguments or {}).get('region')}."


# What is told in mid-call


async def log(ctx: Context, state: State, level: LoggingLevel, text: str) -> None:
    """To the client that wants it: it set a level for its session (handshake era), or for this request."""
    if modern(ctx) or state.wants(level):
        await ctx.session.send_log_message(level, text, "everything", ctx.request_id)


@tool("test_tool_with_logging", "Logs three times.")
async def with_logging(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    await log(ctx, state, "info", "Tool execution started")
    await anyio.sleep(PAUSE_S)
    await log(ctx, state, "info", "Tool processing data")
    await anyio.sleep(PAUSE_S)
    await log(ctx, state, "info", "Tool execution completed")
    return "Logged three times."


@tool("test_logging_tool", "Logs once, if the request allows it.")
async def logging_tool(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    await log(ctx, state, "info", "Logged by test_logging_tool")
    return "Logged, where the request allows it."


@tool("test_tool_with_progress", "Tells its progress.")
async def with_progress(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    for done in (0, 50, 100):
        await ctx.session.report_progress(done, 100)
        await anyio.sleep(PAUSE_S)
    return "Came to its end."


@tool("test_reconnection", "Closes the stream that its result would come by; who reconnects gets it.")
async def reconnection(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    if ctx.close_sse_stream is not None:
        await ctx.close_sse_stream()
        await anyio.sleep(2 * PAUSE_S)
    return "Reconnection test completed."


# What changes


@tool("test_trigger_tool_change", "Adds a tool to the list, or takes it away again.")
async def trigger_tool_change(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    state.server.extra_tool = not state.server.extra_tool
    await state.server.bus.publish(ToolsListChanged())
    if not modern(ctx):
        await ctx.session.send_tool_list_changed()
    return "The list of tools changed."


@tool("test_trigger_prompt_change", "Adds a prompt to the list, or takes it away again.")
async def trigger_prompt_change(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    state.server.extra_prompt = not state.server.extra_prompt
    await state.server.bus.publish(PromptsListChanged())
    if not modern(ctx):
        await ctx.session.send_prompt_list_changed()
    return "The list of prompts changed."


@tool("test_trigger_resource_update", f"Changes {WATCHED}.")
async def trigger_resource_update(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    state.server.watched_version += 1
    await state.server.bus.publish(ResourceUpdated(uri=WATCHED))
    if not modern(ctx) and WATCHED in state.subscribed:
        await ctx.session.send_resource_updated(WATCHED)
    return f"Version {state.server.watched_version}."


# What a tool asks of its client. The first half is for the handshake era by name, the second for input_required; each
# works in both.

NAME = form("What is your name?", name=TEXT)
CONFIRM = form("Please confirm", ok={"type": "boolean"})
CAPITAL = prompt("What is the capital of France?")


@tool("test_sampling", "Has the client's model answer a prompt.", prompt=TEXT)
async def sampling(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    answers = await ask(ctx, params, {"answer": prompt((params.arguments or {}).get("prompt", ""))})
    return f"LLM response: {answers['answer'].content.text}"


@tool("test_elicitation", "Asks the user for a name and an address.", message=TEXT)
async def elicitation(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    message = (params.arguments or {}).get("message", "")
    user = {"type": "string", "description": "User's response"}
    email = {"type": "string", "description": "User's email address"}
    answers = await ask(ctx, params, {"user": form(message, username=user, email=email)})
    return f"User response: {answers['user'].model_dump_json(include={'action', 'content'})}"


@tool("test_elicitation_sep1034_defaults", "Asks with a default for each kind of value.")
async def elicitation_defaults(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    asked = optional_form(
        "Please review what is filled in",
        [],
        name={"type": "string", "default": "John Doe"},
        age={"type": "integer", "default": 30},
        score={"type": "number", "default": 95.5},
        status={"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        verified={"type": "boolean", "default": True},
    )
    return completed((await ask(ctx, params, {"review": asked}))["review"])


@tool("test_elicitation_sep1330_enums", "Asks with each kind of choice.")
async def elicitation_enums(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    plain = ["option1", "option2", "option3"]
    titled = [{"const": f"value{n}", "title": f"{nth} Option"} for n, nth in enumerate(("First", "Second", "Third"), 1)]
    legacy = {"enum": ["opt1", "opt2", "opt3"], "enumNames": ["Option One", "Option Two", "Option Three"]}
    asked = optional_form(
        "Please choose",
        [],
        untitledSingle={"type": "string", "enum": plain},
        titledSingle={"type": "string", "oneOf": titled},
        legacyEnum={"type": "string", **legacy},
        untitledMulti={"type": "array", "items": {"type": "string", "enum": plain}},
        titledMulti={"type": "array", "items": {"anyOf": titled}},
    )
    return completed((await ask(ctx, params, {"choice": asked}))["choice"])


def completed(answer: Any) -> str:
    return f"Elicitation completed: action={answer.action}, content={json.dumps(answer.content)}"


@tool("test_elicitation_url", "Has the user open a page.")
async def elicitation_url(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    asked = page(ctx, "Please open this page", "https://example.com/consent", "consent-1")
    return f"The user's answer: {(await ask(ctx, params, {'page': asked}))['page'].action}"


@tool("test_url_elicitation_required", "Fails until the user has opened a page (up to 2025-11-25).")
async def url_elicitation_required(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    needed = ElicitRequestURLParams(
        message="Please open this page first", url="https://example.com/consent", elicitation_id="consent-2"
    )
    raise UrlElicitationRequiredError([needed])


@tool("test_list_roots", "Tells the client's roots.")
async def list_roots(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    return roots((await ask(ctx, params, {"roots": ListRootsRequest()}))["roots"])


def roots(answer: Any) -> str:
    return "Roots: " + ", ".join(str(root.uri) for root in answer.roots)


@tool("test_missing_capability", "Needs a client that can sample.")
async def missing_capability(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    require(ctx, CAPITAL)
    return "The client can sample."


@tool("test_streaming_elicitation", "Asks, as its first word.")
async def streaming_elicitation(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    return completed((await ask(ctx, params, {"confirm": CONFIRM}))["confirm"])


@tool("test_input_required_result_elicitation", "Asks for a name and greets.")
async def input_elicitation(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    answers = await ask(ctx, params, {"user_name": NAME})
    return f"Hello, {(answers['user_name'].content or {}).get('name', 'stranger')}!"


@tool("test_input_required_result_sampling", "Asks the client's model.")
async def input_sampling(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    answers = await ask(ctx, params, {"capital_question": CAPITAL})
    return f"LLM response: {answers['capital_question'].content.text}"


@tool("test_input_required_result_list_roots", "Asks for roots.")
async def input_list_roots(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    return roots((await ask(ctx, params, {"client_roots": ListRootsRequest()}))["client_roots"])


@tool("test_input_required_result_request_state", "Asks, and finds again where it was.")
async def input_request_state(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    await ask(ctx, params, {"confirm": CONFIRM}, state="waits for confirm")
    if modern(ctx) and params.request_state != "waits for confirm":
        raise Refused("The request came without the state that belongs to its answers.")
    return "state-ok"


@tool("test_input_required_result_tampered_state", "Asks with a state that nobody can change unseen.")
async def input_tampered_state(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    return await input_request_state(ctx, params, state)


@tool("test_input_required_result_multiple_inputs", "Asks three things at once.")
async def input_multiple(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    asked: dict[str, InputRequest] = {
        "user_name": NAME,
        "greeting": prompt("Generate a greeting", 50),
        "client_roots": ListRootsRequest(),
    }
    answers = await ask(ctx, params, asked, state="waits for three")
    name = (answers["user_name"].content or {}).get("name")
    return f"{answers['greeting'].content.text} {name}, {roots(answers['client_roots'])}"


@tool("test_input_required_result_multi_round", "Asks twice, the second time knowing the first answer.")
async def input_multi_round(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    known = params.request_state or ""
    if known.startswith("name="):
        name = known.removeprefix("name=")
    else:
        first = await ask(ctx, params, {"step1": form("Step 1: What is your name?", name=TEXT)}, state="step1")
        name = (first["step1"].content or {}).get("name", "")
    asked = {"step2": form("Step 2: What is your favorite color?", color=TEXT)}
    second = await ask(ctx, params, asked, state=f"name={name}")
    return f"{name} likes {(second['step2'].content or {}).get('color')}."


@tool("test_input_required_result_capabilities", "Asks only what the client can answer.")
async def input_capabilities(ctx: Context, params: CallToolRequestParams, state: State) -> Answer:
    possible: dict[str, InputRequest] = {
        "user_name": NAME,
        "capital_question": CAPITAL,
        "client_roots": ListRootsRequest(),
    }
    answers = await ask(ctx, params, {key: request for key, request in possible.items() if can(ctx, request)})
    return f"Answered: {', '.join(answers) or 'nothing'}"
