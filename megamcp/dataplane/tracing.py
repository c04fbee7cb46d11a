"""Spans of messages and calls, by OpenTelemetry's API alone: nothing is made unless a program has set up a tracer.

Names and attributes are those of its conventions for MCP. The caller's trace (W3C Trace Context, in `_meta` or else in
HTTP's headers) is the parent, and goes on to tool servers in `_meta`, with a tracer or without.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from megamcp import __version__
from megamcp.dataplane import watched, wire
from megamcp.dataplane.request import Request
from megamcp.errors import MegaMCPError

CARRIED = ("traceparent", "tracestate")
_PROPAGATOR = TraceContextTextMapPropagator()
_LONGEST = 600
_TARGETS = {
    "tools/call": ("name", "gen_ai.tool.name"),
    "prompts/get": ("name", "gen_ai.prompt.name"),
    "resources/read": ("uri", "mcp.resource.uri"),
}
"""The parameter that says what a message is about, and the attribute for it."""


def wanted() -> bool:
    """Whether somebody has set up a tracer."""
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def carried(headers: Mapping[bytes, bytes], meta: Mapping[str, msgspec.Raw] | None) -> dict[str, str]:
    """The caller's trace: that of the message, else that of HTTP."""
    found: dict[str, str] = {}
    for name in CARRIED:
        raw = meta.get(name) if meta else None
        if raw is not None:
            with contextlib.suppress(msgspec.DecodeError):
                found[name] = msgspec.json.decode(raw, type=str)
    if not found:
        found = {name: headers[name.encode()].decode("latin-1") for name in CARRIED if name.encode() in headers}
    return {name: value for name, value in found.items() if len(value) <= _LONGEST}


def passed_on(request: Request, params: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Parameters of a message that no span is made for: the caller's trace in HTTP's headers goes on in `_meta`."""
    if b"traceparent" not in request.head.values:
        return params
    meta = params.get("_meta")
    if meta is not None and b'"traceparent"' in bytes(meta):
        return params
    return _sent(params, carried(request.head.values, None))


@contextmanager
def span(
    request: Request, method: str, params: dict[str, msgspec.Raw]
) -> Iterator[tuple[Span, dict[str, msgspec.Raw]]]:
    """A span around the work on a message, and the parameters to go on with. Errors are told in it, and raised."""
    meta = _members(params)
    parent = carried(request.head.values, meta)
    context: Context | None = _PROPAGATOR.extract(parent) if parent else None
    number = request.id.decode("utf-8", "replace").strip('"') if request.id else None
    known: dict[str, str | None] = {
        "mcp.method.name": method,
        "mcp.session.id": request.session,
        "mcp.protocol.version": request.head.text(b"mcp-protocol-version"),
        "jsonrpc.request.id": number,
        "network.transport": "tcp",
        "network.protocol.name": "http",
    }
    target: str | None = None
    if (named := _TARGETS.get(method)) is not None and (raw := params.get(named[0])) is not None:
        with contextlib.suppress(msgspec.DecodeError):
            target = known[named[1]] = msgspec.json.decode(raw, type=str)[:_LONGEST]
    if method == "tools/call":
        known["gen_ai.operation.name"] = "execute_tool"
    name = f"{method} {target}" if target is not None and method != "resources/read" else method
    tracer = trace.get_tracer("megamcp", __version__)
    told = {key: value for key, value in known.items() if value is not None}
    with tracer.start_as_current_span(
        name, context, SpanKind.SERVER, told, record_exception=False, set_status_on_exception=False
    ) as made:
        sent: dict[str, str] = {}
        _PROPAGATOR.inject(sent)
        try:
            yield made, _sent(params, sent)
        except BaseException as error:
            fail(made, _error_type(error))
            raise
        finally:
            _describe(made)


def end(made: Span, reply: wire.Reply | None, *, call: bool) -> None:
    """Tells the span of a reply that is a failure."""
    if reply is None:
        return
    if reply.failed:
        code = wire.peek_error(reply.body)[0]
        made.set_attribute("rpc.response.status_code", str(code))
        fail(made, str(code))
    elif call and wire.is_tool_error(reply.body):
        fail(made, "tool_error")


def fail(made: Span, kind: str) -> None:
    made.set_attribute("error.type", kind)
    made.set_status(Status(StatusCode.ERROR))


def _describe(made: Span) -> None:
    """What is ours: whose rollout it was, and where the time of a call went."""
    doing = watched.doing()
    if doing is None:
        return
    for name in ("rollout", "environment", "server"):
        if (value := getattr(doing, name)) is not None:
            made.set_attribute(f"megamcp.{name}", value)
    for name, clock in (("queue", doing.queue), ("upstream", doing.upstream), ("journal", doing.journal)):
        if clock.used:
            made.set_attribute(f"megamcp.{name}_s", clock.seconds)


def _error_type(error: BaseException) -> str:
    if isinstance(error, wire.RpcFailure):
        return str(error.code)
    return error.code if isinstance(error, MegaMCPError) else type(error).__name__


def _members(params: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    raw = params.get("_meta")
    if raw is None or b'"trace' not in bytes(raw):
        return {}
    with contextlib.suppress(wire.RpcFailure):
        return wire.read_members(raw, "_meta")
    return {}


def _sent(params: dict[str, msgspec.Raw], sent: Mapping[str, str]) -> dict[str, msgspec.Raw]:
    """The parameters with this trace in `_meta`, whose other members stay as they are."""
    raw = params.get("_meta")
    if not sent:
        return params
    members = {} if raw is None or bytes(raw) == b"null" else wire.read_members(raw, "_meta")
    for name in CARRIED:
        members.pop(name, None)
    return {**params, "_meta": msgspec.Raw(wire.encode({**members, **sent}))}
