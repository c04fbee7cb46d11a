"""Envelopes, events and headers as bytes."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamcp.dataplane import eras, mirrored, wire
from megamcp.dataplane.asgi import accepts, is_json, origin_allowed
from megamcp.dataplane.protocol import header_value
from megamcp.dataplane.sse import SseReader, sse_event
from megamcp.errors import DeadlineExceeded

SCHEMA = {
    "type": "object",
    "properties": {
        "region": {"type": "string", "x-mcp-header": "Region"},
        "deep": {"type": "object", "properties": {"count": {"type": "integer", "x-mcp-header": "Count"}}},
        "flag": {"type": "boolean", "x-mcp-header": "Flag"},
    },
}
WANTED = mirrored.parameters(msgspec.Raw(json.dumps(SCHEMA).encode()))


@pytest.mark.parametrize(
    "broken",
    [
        {"type": "string", "x-mcp-header": ""},
        {"type": "string", "x-mcp-header": "a b"},
        {"type": "string", "x-mcp-header": "größe"},
        {"type": "string", "x-mcp-header": None},
        {"type": "number", "x-mcp-header": "A"},
        {"type": "array", "x-mcp-header": "A"},
        {"type": "string", "x-mcp-header": "REGION"},
    ],
    ids=str,
)
def test_annotations_that_break_the_rules_are_told(broken):
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "more": broken}}
    with pytest.raises(mirrored.Invalid):
        mirrored.parameters(msgspec.Raw(json.dumps(schema).encode()))


@given(st.binary(max_size=30).map(lambda text: json.dumps(text.decode("latin-1")).encode()), st.text(max_size=5))
def test_every_result_keeps_its_bytes_in_an_envelope(result, name):
    message = wire.result_message(wire.encode(name), result)
    envelope = wire.read_envelope(message)
    assert bytes(envelope.result) == result
    assert json.loads(bytes(envelope.id)) == name


def test_a_recorded_error_comes_back_as_the_error_it_was():
    error = wire.error_object(wire.RpcFailure.of(DeadlineExceeded("too late", hint="hurry")))
    recorded = wire.error_as_result(error, "too late")
    assert wire.is_tool_error(recorded)
    reply = wire.result_as_reply(recorded, True)
    assert reply.failed
    assert json.loads(reply.body) == {
        "code": -32008,
        "message": "too late",
        "data": {"code": "deadline_exceeded", "hint": "hurry"},
    }
    plain = b'{"content":[{"type":"text","text":"io.megamcp/error"}],"isError":true}'
    assert wire.result_as_reply(plain, True) == wire.Reply(plain)


@pytest.mark.parametrize("depth", [1, 64, 128])
def test_nesting_is_counted_outside_strings(depth):
    wire.check_text(b"[" * depth + b'"' + b"[{" * 500 + b'\\"["' + b"]" * depth, 128)
    with pytest.raises(wire.RpcFailure):
        wire.check_text(b"[" * 129 + b"]" * 129, 128)


def test_siblings_are_not_depth():
    wire.check_text(b"[" + b"[]," * 5000 + b"[]]", 128)


@given(
    st.lists(st.text(max_size=20).map(lambda text: json.dumps(text).encode()), min_size=1, max_size=5),
    st.lists(st.integers(1, 9), max_size=60),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_events_are_found_however_the_stream_is_cut(payloads, cuts, ending):
    stream = b"".join(sse_event(payload).replace(b"\n", ending) + b": ping" + ending * 2 for payload in payloads)
    # A trailing lone CR might be half of a CRLF, so what follows it decides.
    stream += b":" + ending if ending == b"\r" else b""
    reader, found, at = SseReader(1000), [], 0
    for cut in cuts:
        found += reader.feed(stream[at : at + cut])
        at += cut
    found += reader.feed(stream[at:])
    assert found == payloads


def test_a_pretty_printed_message_is_one_event():
    assert list(SseReader(100).feed(sse_event(b'{\n "a": 1\r\n}'))) == [b'{\n "a": 1\n}']


def test_an_endless_event_is_refused():
    reader = SseReader(100)
    endless = b"data: 0123456789\n"
    with pytest.raises(ValueError, match="larger than 100"):
        assert [list(reader.feed(endless)) for _ in range(20)]


def test_an_event_of_empty_lines_is_no_way_around_the_bound():
    reader = SseReader(100)
    with pytest.raises(ValueError, match="larger than 100"):
        assert [list(reader.feed(b"data:\n" * 10)) for _ in range(20)]


def test_a_large_event_in_small_parts_is_not_copied_for_each():
    reader, part = SseReader(1 << 26), b"x" * 1024
    assert list(reader.feed(b"data: ")) == []
    assert not [event for _ in range(1 << 14) for event in reader.feed(part)]
    assert [len(event) for event in reader.feed(b"\n\n")] == [1 << 24]
    # Copying it each time takes longer than a test may.


def test_what_had_come_of_an_event_is_forgotten_with_its_connection():
    reader = SseReader(100)
    assert list(reader.feed(b'id: 7\ndata: {}\n\ndata: {"a":\ndata: ')) == [b"{}"]
    reader.restart()
    assert list(reader.feed(b"data: 8\n\n")) == [b"8"]
    assert reader.last_id == "7"


def test_the_last_event_id_is_kept_for_resumption():
    reader = SseReader(100)
    assert list(reader.feed(b"id: 7\nretry: 250\ndata: {}\n\n")) == [b"{}"]
    assert (reader.last_id, reader.retry_ms) == ("7", 250)


@given(st.text(max_size=12))
def test_every_header_value_comes_back(value):
    encoded = header_value(value)
    encoded.encode("ascii")
    assert "\n" not in encoded
    assert "\r" not in encoded
    assert mirrored.decode_value(encoded.encode()) == value


def test_annotated_arguments_become_headers():
    arguments = b'{"region":"us","deep":{"count":42.0},"flag":true}'
    headers = dict(mirrored.headers_for(WANTED, arguments))
    assert headers == {"Mcp-Param-Region": "us", "Mcp-Param-Count": "42", "Mcp-Param-Flag": "true"}
    assert dict(mirrored.headers_for(WANTED, b'{"region":null}')) == {}


@pytest.mark.parametrize(
    ("arguments", "sent", "fits"),
    [
        (b'{"region":"us"}', [(b"mcp-param-region", b"us")], True),
        (b'{"region":"us"}', [(b"mcp-param-region", b"=?base64?dXM=?=")], True),
        (b'{"region":"us"}', [(b"mcp-param-region", b"eu")], False),
        (b'{"region":"us"}', [], False),
        (b"{}", [(b"mcp-param-region", b"us")], False),
        (b"{}", [(b"mcp-param-unknown", b"us")], True),
        (b'{"region":"us"}', [(b"mcp-param-region", b"us")] * 2, False),
        (b'{"deep":{"count":42}}', [(b"mcp-param-count", b"42.0")], True),
        (b'{"deep":{"count":42}}', [(b"mcp-param-count", b"42.5")], False),
        (b'{"flag":true}', [(b"mcp-param-flag", b"true")], True),
    ],
)
def test_headers_and_arguments_must_agree(arguments, sent, fits):
    if fits:
        mirrored.check(WANTED, arguments, sent)
    else:
        with pytest.raises(mirrored.Mismatch):
            mirrored.check(WANTED, arguments, sent)


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (None, (True, True)),
        (b"*/*", (True, True)),
        (b"application/json", (True, False)),
        (b"text/event-stream; q=0.5, application/json", (True, True)),
        (b"text/event-stream;q=0, application/*", (True, False)),
        (b"text/html", (False, False)),
    ],
)
def test_accept_headers(header, allowed):
    assert accepts(header) == allowed


def test_content_types_and_origins():
    assert is_json(b'application/json; charset="UTF-8"')
    assert not is_json(b"application/json; charset=utf-16")
    assert not is_json(None)
    assert origin_allowed(b"http://localhost:1", ())
    assert not origin_allowed(b"http://localhost.evil.example", ())
    assert not origin_allowed(b"null", ())
    assert not origin_allowed(b"http://[bad", ())
    assert origin_allowed(b"https://ui.example", ("https://ui.example",))


@pytest.mark.parametrize(
    ("result", "sent"),
    [
        (b"{}", b'{"resultType":"complete"}'),
        (b' { "content" : [ ] }', b'{"resultType":"complete", "content" : [ ] }'),
        (b'{"content":[{"resultType":1}]}', b'{"resultType":"complete","content":[{"resultType":1}]}'),
        (b'{"resultType":"input_required"}', b'{"resultType":"input_required"}'),
        (b'{"content":[],"resultType":"complete"}', b'{"content":[],"resultType":"complete"}'),
    ],
)
def test_a_result_without_a_type_is_complete_for_a_modern_client(result: bytes, sent: bytes) -> None:
    assert eras.complete(wire.Reply(result)).body == sent


def test_an_error_gets_no_result_type() -> None:
    assert eras.complete(wire.Reply(b'{"code":1}', failed=True)).body == b'{"code":1}'
