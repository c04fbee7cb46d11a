"""Traces: the caller's goes on to tool servers, and what a tracer of the program is told of messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode, TraceFlags

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
OTHER = f"00-{'a' * 32}-{'b' * 16}-01"


class Recorded(NonRecordingSpan):
    """A span that keeps what it is told."""

    def __init__(self, number: int, name: str, kind: SpanKind, parent: SpanContext, attributes: Any) -> None:
        super().__init__(SpanContext(parent.trace_id or 1, number, False, TraceFlags(1)))
        self.name, self.kind, self.parent = name, kind, parent
        self.attributes: dict[str, Any] = dict(attributes or {})
        self.status = StatusCode.UNSET

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = status.status_code


class Recorder(trace.TracerProvider, trace.Tracer):
    """A tracer as a program would set one up, by the API alone."""

    def __init__(self) -> None:
        self.spans: list[Recorded] = []

    def get_tracer(self, *_: Any, **__: Any) -> trace.Tracer:
        return self

    def start_span(self, name: str, context: Any = None, kind: SpanKind = SpanKind.INTERNAL, *rest: Any) -> Span:
        parent = trace.get_current_span(context).get_span_context()
        self.spans.append(Recorded(len(self.spans) + 1, name, kind, parent, rest[0] if rest else None))
        return self.spans[-1]

    @contextmanager
    def start_as_current_span(
        self,
        name: str,
        context: Any = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Any = None,
        **_: Any,
    ) -> Iterator[Span]:
        with trace.use_span(self.start_span(name, context, kind, attributes), end_on_exit=True) as span:
            yield span


@pytest.fixture
def rollout(gateway, shared):
    return gateway.control.open(shared)


@pytest.fixture
def spans(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: recorder)
    return recorder.spans


async def sent_on(gateway, rollout, meta, headers):
    params = {"name": "trace", "arguments": {}, **({"_meta": meta} if meta else {})}
    answer = await gateway.rpc(rollout, "tools/call", params, **headers)
    return answer.json["result"]["structuredContent"]


async def test_without_a_tracer_the_callers_trace_goes_on_as_it_came_that_of_the_message_first(gateway, rollout):
    state = {"tracestate": "vendor=1"}
    headers = {"traceparent": PARENT, **state}
    assert await sent_on(gateway, rollout, None, headers) == headers
    assert await sent_on(gateway, rollout, {"traceparent": OTHER}, headers) == {"traceparent": OTHER}
    assert await sent_on(gateway, rollout, None, {}) == {}
    modern = await gateway.modern(f"/r/{rollout}/mcp", "tools/call", {"name": "trace", "arguments": {}}, **headers)
    assert modern.json["result"]["structuredContent"] == headers


async def test_a_span_has_the_names_of_the_conventions_the_callers_trace_and_goes_on_to_the_server(
    gateway, rollout, spans
):
    answered = await sent_on(gateway, rollout, None, {"traceparent": PARENT, "mcp_protocol_version": "2025-11-25"})
    (span,) = spans
    assert answered["traceparent"] == f"00-{TRACE}-{span.get_span_context().span_id:016x}-01"
    assert (span.name, span.kind, span.status) == ("tools/call trace", SpanKind.SERVER, StatusCode.UNSET)
    assert f"{span.parent.trace_id:032x}" == TRACE
    assert span.attributes.pop("megamcp.upstream_s") > 0
    assert span.attributes.pop("megamcp.queue_s") >= 0
    assert span.attributes.pop("megamcp.environment").startswith("env")
    assert span.attributes.pop("jsonrpc.request.id")
    assert span.attributes == {
        "mcp.method.name": "tools/call",
        "mcp.protocol.version": "2025-11-25",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "trace",
        "network.transport": "tcp",
        "network.protocol.name": "http",
        "megamcp.rollout": rollout,
        "megamcp.server": "shop",
    }


async def test_failures_say_of_what_type_they_are(gateway, rollout, spans):
    await gateway.call(rollout, "broken")
    await gateway.call(rollout, "no_such_tool")
    await gateway.rpc(rollout, "no/such/method")
    assert [span.attributes["error.type"] for span in spans] == ["tool_error", "unknown_tool", "-32601"]
    assert {span.status for span in spans} == {StatusCode.ERROR}
