"""Bad input: each a clear answer of a documented shape, never a 500, never a hang."""

import asyncio
import io
import json

import pytest
from hypothesis import strategies as st

from megamcp.dataplane.ports import Limits, ServerView
from tests.integration.drawing import drawn

MODERN = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
}


@pytest.fixture
def rollout(gateway, shared):
    return gateway.control.open(shared)


@pytest.mark.parametrize(
    ("body", "status", "rpc", "code"),
    [
        (b"", 400, -32700, "invalid_json"),
        (b"{", 400, -32700, "invalid_json"),
        (b"nonsense", 400, -32700, "invalid_json"),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping"} x', 400, -32700, "invalid_json"),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":NaN}}', 400, -32700, "invalid_json"),
        (b'{"jsonrpc":"2.0","id":1,"method":"\xff"}', 400, -32700, "invalid_utf8"),
        (b'{"jsonrpc":"2.0","id":1,"params":{"a":"\xed\xa0\x80"}}', 400, -32700, "invalid_utf8"),
        (b'{"a":' * 2000 + b"1" + b"}" * 2000, 400, -32700, "too_deep"),
        (b"[" * 100_000, 400, -32700, "too_deep"),
        (b"3", 400, -32600, "invalid_request"),
        (b"{}", 400, -32600, "invalid_request"),
        (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', 400, -32600, "invalid_request"),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', 400, -32600, "invalid_request"),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', 400, -32600, "invalid_request"),
        (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', 400, -32600, "invalid_request"),
        (b'{"jsonrpc":"2.0","id":1,"method":7}', 400, -32600, "invalid_request"),
        (b"[]", 400, -32600, "batch_refused"),
    ],
)
async def test_what_is_no_message_is_refused(gateway, rollout, body, status, rpc, code):
    answer = await gateway.post(f"/r/{rollout}/mcp", body)
    assert (answer.status, answer.json["error"]["code"], answer.code) == (status, rpc, code)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("name", ["1", '"a\\u00e9"', '"\\ud83d\\ude00"', "-7", '""', '"1"'])
async def test_the_id_comes_back_as_it_was_written(gateway, rollout, name):
    body = b'{"jsonrpc":"2.0","id": %b ,"method":"ping"}' % name.encode()
    answer = await gateway.post(f"/r/{rollout}/mcp", body)
    assert answer.body == b'{"jsonrpc":"2.0","id":%b,"result":{}}' % name.encode()


async def test_a_body_over_the_limit_is_413(gateway, rollout):
    headers = {"content-type": "application/json"}
    large = io.BytesIO(b" " * (Limits().body_bytes + 1))
    async with gateway.http.post(gateway.url(rollout), data=large, headers=headers) as response:
        assert (response.status, (await response.json())["error"]["data"]["code"]) == (413, "body_too_large")

    async def pieces():
        for _ in range(80):
            yield b" " * 65536

    async with gateway.http.post(gateway.url(rollout), data=pieces(), headers=headers) as response:
        assert response.status == 413


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"content_type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content_type": "application/json; charset=latin-1"}, 415, "unsupported_media_type"),
        ({"accept": "text/html"}, 406, "not_acceptable"),
        ({"origin": "https://evil.example"}, 403, "origin_refused"),
        ({"x_rollout_id": "ro_another"}, 400, "rollout_carriers_disagree"),
        ({"authorization": "Bearer ro_another"}, 400, "rollout_carriers_disagree"),
        ({"mcp_protocol_version": "1999-01-01"}, 400, "unsupported_protocol_version"),
    ],
)
async def test_headers_that_do_not_fit_are_refused(gateway, rollout, headers, status, code):
    answer = await gateway.rpc(rollout, "ping", **headers)
    assert (answer.status, answer.code) == (status, code)


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:9"])
async def test_pages_of_this_machine_may_connect(gateway, rollout, origin):
    assert (await gateway.rpc(rollout, "ping", origin=origin)).status == 200


async def test_the_rollout_may_come_by_any_carrier(gateway, rollout):
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    assert (await gateway.post("/mcp", ping, x_rollout_id=rollout)).status == 200
    assert (await gateway.post(f"/mcp?rollout={rollout}", ping)).status == 200
    assert (await gateway.post("/mcp", ping, authorization=f"Bearer {rollout}")).status == 200
    assert (await gateway.post(f"/r/{rollout}/mcp?rollout={rollout}", ping, x_rollout_id=rollout)).status == 200
    assert (await gateway.post("/mcp", ping)).code == "rollout_required"
    assert (await gateway.post(f"/mcp?rollout={rollout}&rollout=ro_b", ping)).code == "rollout_carriers_disagree"


async def test_unknown_and_released_rollouts_are_told_apart(gateway, shared):
    for name in ("ro_nobody", "a%00b", "x" * 200, "..%2f.."):
        answer = await gateway.rpc(name, "ping")
        assert (answer.status, answer.json["id"] is not None) == (404, answer.code == "rollout_not_found")
    rollout = gateway.control.open(shared)
    gateway.control.release(rollout)
    answer = await gateway.call(rollout, "echo", {"value": "x"})
    assert (answer.status, answer.code, answer.json["error"]["code"]) == (410, "rollout_released", -32004)


async def test_other_methods_of_http(gateway, rollout):
    url = gateway.url(rollout)
    async with gateway.http.get(url) as response:
        assert (response.status, response.headers["allow"]) == (405, "GET, POST, DELETE, OPTIONS")
    async with gateway.http.head(url) as response:
        assert response.status == 405
    async with gateway.http.put(url) as response:
        assert response.status == 405
    async with gateway.http.options(url) as response:
        assert (response.status, response.headers["allow"]) == (204, "GET, POST, DELETE, OPTIONS")
    async with gateway.http.delete(url) as response:
        assert response.status == 405
    async with gateway.http.delete(url, headers={"mcp-session-id": "x"}) as response:
        assert response.status == 204
    assert (await gateway.rpc(rollout, "ping")).status == 200


async def test_a_session_nobody_knows_is_served(gateway, rollout):
    answer = await gateway.call(rollout, "echo", {"value": "x"}, mcp_session_id="from-another-process")
    assert answer.json["result"]["structuredContent"] == {"result": "x"}


async def test_initialize_negotiates_the_revision(gateway, rollout):
    for asked, answered in [("2025-03-26", "2025-03-26"), ("2025-06-18", "2025-06-18"), ("2030-01-01", "2025-11-25")]:
        answer = await gateway.rpc(rollout, "initialize", {"protocolVersion": asked, "capabilities": {}})
        result = answer.json["result"]
        assert result["protocolVersion"] == answered
        assert result["capabilities"]["tools"] == {"listChanged": True}
        assert result["instructions"] == "Count and echo."
        assert answer.headers["mcp-session-id"].startswith(rollout)
    assert (await gateway.rpc(rollout, "initialize", {})).json["error"]["code"] == -32602


async def test_unknown_methods_and_cursors(gateway, rollout):
    for method in ("nothing/list", "logging/setLevel", "server/discover"):
        answer = await gateway.rpc(rollout, method)
        assert (answer.status, answer.json["error"]["code"]) == (200, -32601)
    answer = await gateway.rpc(rollout, "tools/list", {"cursor": "abc"})
    assert answer.json["error"]["code"] == -32602
    answer = await gateway.modern(f"/r/{rollout}/mcp", "nothing/list")
    assert (answer.status, answer.json["error"]["code"]) == (404, -32601)
    answer = await gateway.modern(f"/r/{rollout}/mcp", "ping")
    assert (answer.status, answer.json["error"]["code"]) == (404, -32601)


async def test_notifications_and_responses_are_acknowledged(gateway, rollout):
    for message in (
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "method": "notifications/whatever", "params": {}},
        {"jsonrpc": "2.0", "id": 1, "result": {}},
    ):
        answer = await gateway.post(f"/r/{rollout}/mcp", message)
        assert (answer.status, answer.body) == (202, b"")
    cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "elsewhere"}}
    assert (await gateway.post(f"/r/{rollout}/mcp", cancelled, mcp_session_id="s")).status == 202
    assert gateway.control.relayed[-1] == (rollout, "s", '"elsewhere"')


async def test_batches_belong_to_one_revision(gateway, rollout):
    batch = [
        {"jsonrpc": "2.0", "id": 1, "method": "ping"},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": "two", "method": "nothing"},
        7,
    ]
    answer = await gateway.post(f"/r/{rollout}/mcp", batch)
    assert answer.status == 200
    assert [entry["id"] for entry in answer.json] == [1, "two", None]
    answer = await gateway.post(f"/r/{rollout}/mcp", batch, mcp_protocol_version="2025-11-25")
    assert (answer.status, answer.code) == (400, "batch_refused")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"mcp_protocol_version": "2025-11-25"}, -32020),
        ({"mcp_method": "tools/list"}, -32020),
        ({"mcp_name": "count"}, -32020),
        ({"mcp_name": "=?base64?!!?="}, -32020),
    ],
)
async def test_modern_headers_must_agree_with_the_body(gateway, rollout, change, code):
    answer = await gateway.modern(
        f"/r/{rollout}/mcp", "tools/call", {"name": "echo", "arguments": {"value": "x"}}, **change
    )
    assert (answer.status, answer.json["error"]["code"]) == (400, code)


async def test_modern_requests_must_describe_themselves(gateway, rollout):
    path = f"/r/{rollout}/mcp"
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": META}}
    for missing in META:
        partial = {**message, "params": {"_meta": {k: v for k, v in META.items() if k != missing}}}
        answer = await gateway.post(path, partial, mcp_protocol_version=MODERN, mcp_method="tools/list")
        assert (answer.status, answer.json["error"]["code"]) == (400, -32602)
    assert (await gateway.post(path, message)).json["error"]["code"] == -32020
    assert (await gateway.post(path, message, mcp_protocol_version=MODERN)).json["error"]["code"] == -32020
    encoded = "=?base64?ZWNobw==?="
    answer = await gateway.modern(path, "tools/call", {"name": "echo", "arguments": {"value": "x"}}, mcp_name=encoded)
    assert answer.status == 200


async def test_discovery_names_both_eras_and_what_the_servers_have(gateway, rollout, shared):
    result = (await gateway.modern(f"/r/{rollout}/mcp", "server/discover")).json["result"]
    assert result["supportedVersions"] == [MODERN, "2025-11-25", "2025-06-18", "2025-03-26"]
    assert result["capabilities"]["tools"] == {"listChanged": True}
    assert result["resultType"] == "complete"
    assert result["_meta"]["io.modelcontextprotocol/serverInfo"] == {"name": shared.name, "version": "v1"}
    # The question needs no rollout; a call does.
    path = f"/e/{shared.name}/mcp"
    assert "tools" in (await gateway.modern(path, "tools/list")).json["result"]
    call = {"name": "echo", "arguments": {"value": "x"}}
    assert (await gateway.modern(path, "tools/call", call)).code == "rollout_required"
    keyed = [await gateway.modern(path, "tools/call", call, authorization="Bearer secret") for _ in range(2)]
    assert [answer.status for answer in keyed] == [200, 200]


async def test_arguments_and_results_pass_byte_for_byte(gateway, rollout):
    raw = b'{"value" : "\\u0041\\ud83d\\ude00 \xc3\xa9" ,  "value": "last", "n": 1e2, "m": 100.0}'
    body = b'{"id":1,"params":{"arguments":%b,"name":"echo"},"method":"tools/call","jsonrpc":"2.0"}' % raw
    answer = await gateway.post(f"/r/{rollout}/mcp", body)
    seen = [handle.arguments for handle in gateway.control.handles.values() if handle.rollout == rollout]
    assert seen == [raw]
    assert answer.json["result"]["content"][0]["text"] == "last"


async def test_large_arguments_and_results_pass(gateway, rollout):
    value = "x" * 3_000_000
    data = json.dumps(
        {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo", "arguments": {"value": value}}}
    )
    headers = {"content-type": "application/json"}
    async with gateway.http.post(gateway.url(rollout), data=io.BytesIO(data.encode()), headers=headers) as response:
        assert (await response.json())["result"]["structuredContent"] == {"result": value}


async def test_tool_descriptions_pass_byte_for_byte(gateway, rollout, shared):
    link = gateway.plane._environments.of(shared).links["shop"]
    texts = [tool.text for tool in (await link.tools(None)).values()]
    answer = await gateway.rpc(rollout, "tools/list")
    assert answer.body.endswith(b'"result":{"tools":[%b]}}' % b",".join(texts))


async def test_a_list_may_be_cut_into_pages(serve, make_child):
    async with serve(Limits(tools_per_page=3)) as running:
        rollout = running.open(ServerView("shop", make_child(), exactly_once=True))
        names, cursor = [], None
        for _ in range(9):
            result = (await running.rpc(rollout, "tools/list", {"cursor": cursor})).json["result"]
            names += [tool["name"] for tool in result["tools"]]
            cursor = result.get("nextCursor")
            if cursor is None:
                break
        assert len(names) == len(set(names)) == 11


async def test_annotated_arguments_are_mirrored_into_headers(gateway, rollout):
    call = {"name": "regional", "arguments": {"region": "größe"}}
    path = f"/r/{rollout}/mcp"
    # A client of the older era knows nothing of it; the gateway adds the header.
    answer = await gateway.rpc(rollout, "tools/call", call)
    assert answer.json["result"]["structuredContent"] == {"result": "größe"}
    answer = await gateway.modern(path, "tools/call", call, mcp_param_region="=?base64?Z3LDtsOfZQ==?=")
    assert answer.json["result"]["structuredContent"] == {"result": "größe"}
    for wrong in ({}, {"mcp_param_region": "us"}):
        answer = await gateway.modern(path, "tools/call", call, **wrong)
        assert (answer.status, answer.json["error"]["code"]) == (400, -32020)


async def test_a_client_that_takes_only_events_gets_one(gateway, rollout):
    answer = await gateway.rpc(rollout, "ping", accept="text/event-stream")
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.body.startswith(b'event: message\ndata: {"jsonrpc":"2.0"')


async def test_a_modern_client_that_leaves_cancels_its_call(gateway, shared, rollout):
    task = asyncio.create_task(
        gateway.modern(
            f"/r/{rollout}/mcp", "tools/call", {"name": "slow", "arguments": {"name": "left", "seconds": 30}}
        )
    )
    await asyncio.sleep(0.4)
    task.cancel()
    for _ in range(200):
        if gateway.plane.in_flight == 0:
            break
        await asyncio.sleep(0.01)
    (entry,) = [entry for entry in gateway.control.journal if entry.rollout == rollout]
    assert b'"cancelled"' in entry.result


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
methods = st.sampled_from(
    ["initialize", "ping", "tools/list", "tools/call", "server/discover", "notifications/cancelled", "x", ""]
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.sampled_from(["2.0", "1.0", 2]),
        "id": st.one_of(st.integers(), st.text(max_size=4), json_values),
        "method": st.one_of(methods, json_values),
        "params": st.one_of(
            json_values,
            st.fixed_dictionaries(
                {},
                optional={
                    "name": st.one_of(st.sampled_from(["echo", "nothing", "shop__echo"]), json_values),
                    "arguments": json_values,
                    "_meta": st.one_of(st.just(META), json_values),
                    "cursor": json_values,
                    "protocolVersion": st.one_of(st.just("2025-11-25"), json_values),
                    "requestId": json_values,
                },
            ),
        ),
        "result": json_values,
        "error": json_values,
    },
)
bodies = st.one_of(
    st.binary(max_size=200),
    messages.map(lambda message: json.dumps(message).encode()),
    st.lists(messages, max_size=3).map(lambda batch: json.dumps(batch).encode()),
    st.tuples(messages, st.integers(0, 300), st.binary(max_size=3)).map(
        lambda t: (text := json.dumps(t[0]).encode())[: t[1]] + t[2] + text[t[1] :]
    ),
)
header_sets = st.fixed_dictionaries(
    {},
    optional={
        "mcp_protocol_version": st.sampled_from([MODERN, "2025-11-25", "2025-03-26", "x"]),
        "mcp_method": methods,
        "mcp_name": st.sampled_from(["echo", "=?base64?ZWNobw==?=", "=?base64??="]),
        "mcp_session_id": st.sampled_from(["s", "ro_x.y", "."]),
        "accept": st.sampled_from(["*/*", "application/json", "text/event-stream", "", "a,b;q=0"]),
    },
)


async def test_no_input_makes_the_endpoint_fail_or_hang(gateway, rollout):
    async def attack(body, headers):
        answer = await gateway.post(f"/r/{rollout}/mcp", body, **headers)
        assert answer.status < 500, answer.body
        if answer.status not in (202, 204):
            if answer.headers["content-type"] == "application/json":
                document = json.loads(answer.body)
                for entry in document if isinstance(document, list) else [document]:
                    assert entry["jsonrpc"] == "2.0"
                    assert ("result" in entry) != ("error" in entry)
            else:
                assert answer.body.startswith(b"event: message\ndata: ")

    await drawn(attack, bodies, header_sets, examples=200)
    assert (await gateway.rpc(rollout, "ping")).status == 200
    assert gateway.plane.in_flight == 0
