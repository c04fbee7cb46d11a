"""The wire of a tool server: both eras, JSON and event streams, and clear answers to what is wrong."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from megamcp.sdk import Server
from megamcp.sdk.endpoint import ToolApp
from tests.integration.sdk.conftest import META, Client
from tests.integration.sdk.counter_server import server

MODERN = {"mcp-protocol-version": "2026-07-28"}


@pytest.fixture
async def plain() -> Any:
    """The counter server without a database."""
    app = server.asgi_app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tool") as http:
        yield Client(http)


def request(method: str, params: Any = None, **more: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, **({"params": params} if params is not None else {}), **more}


def modern(method: str, **params: Any) -> tuple[dict[str, Any], dict[str, str]]:
    return request(method, {**params, "_meta": META}), {**MODERN, "mcp-method": method}


async def test_the_handshake_era_is_served_without_a_session(plain: Client) -> None:
    begun = await plain.post(request("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}}))
    assert begun.result == {
        "protocolVersion": "2025-06-18",
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "counter", "version": "7"},
        "instructions": "Counts.",
    }
    newer = await plain.post(request("initialize", {"protocolVersion": "2030-01-01", "capabilities": {}}))
    assert newer.result["protocolVersion"] == "2025-11-25"
    noted = await plain.post({"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert (noted.status, noted.raw) == (202, b"")
    assert (await plain.post(request("ping"))).result == {}
    called = await plain.post(request("tools/call", {"name": "stateless"}), {"mcp-protocol-version": "2025-11-25"})
    assert called.result["structuredContent"] == {"result": "step one"}


async def test_the_stateless_era_is_served(plain: Client) -> None:
    found = (await plain.post(*modern("server/discover"))).result
    assert found["supportedVersions"][0] == "2026-07-28"
    listed = (await plain.post(*modern("tools/list"))).result
    assert (listed["resultType"], listed["cacheScope"]) == ("complete", "public")
    assert [tool["name"] for tool in listed["tools"]] == list(server.tools)
    assert (await plain.call("stateless", {"step": "two"})).result["structuredContent"] == {"result": "step two"}


async def test_tools_are_listed_in_the_order_of_their_definition_with_equal_bytes(plain: Client) -> None:
    first, second = [await plain.post(request("tools/list")) for _ in range(2)]
    assert first.raw == second.raw
    assert first.result["tools"][0]["name"] == "add"


@pytest.mark.parametrize(
    ("change", "code", "status"),
    [
        ({"mcp-method": "tools/list"}, -32020, 400),
        ({"mcp-name": "add"}, -32020, 400),
        ({"mcp-protocol-version": "2025-11-25"}, -32020, 400),
        ({"mcp-protocol-version": "1999-01-01"}, -32022, 400),
    ],
)
async def test_headers_that_contradict_the_body_are_refused(
    plain: Client, change: dict[str, str], code: int, status: int
) -> None:
    body, headers = modern("tools/call", name="stateless")
    reply = await plain.post(body, {**headers, "mcp-name": "stateless", **change})
    assert (reply.message["error"]["code"], reply.status) == (code, status)


@pytest.mark.parametrize(
    ("body", "code", "status"),
    [
        (b"{", -32700, 400),
        (b"", -32700, 400),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":"\xff"}}', -32700, 400),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":' + b"[" * 100_000, -32700, 400),
        (b"[]", -32600, 400),
        (b"7", -32600, 400),
        (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600, 400),
        (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', -32600, 400),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', -32600, 400),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600, 400),
        (b'{"jsonrpc":"2.0","id":1,"method":7}', -32600, 400),
        (b'{"jsonrpc":"2.0","id":1,"method":"resources/list"}', -32601, 200),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":[]}', -32602, 200),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":7}}', -32602, 200),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"say","arguments":"x"}}', -32602, 200),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"nope"}}', -32602, 200),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"say","_meta":7}}', -32602, 200),
    ],
)
async def test_what_is_no_request_gets_a_json_rpc_error(plain: Client, body: bytes, code: int, status: int) -> None:
    reply = await plain.post(body)
    assert (reply.message["error"]["code"], reply.status) == (code, status)
    assert reply.content_type == "application/json"


async def test_a_body_over_the_limit_is_refused(plain: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamcp.sdk.endpoint.MAX_BODY", 100_000)
    reply = await plain.post(b" " * 100_001)
    assert (reply.status, reply.code) == (413, "too_large")


async def test_other_methods_and_paths_have_clear_answers(plain: Client) -> None:
    assert (await plain.http.get("/mcp")).headers["allow"] == "POST"
    assert (await plain.http.get("/mcp")).status_code == 405
    assert (await plain.http.get("/")).status_code == 404
    assert (await plain.post(request("ping"), {"accept": "text/html"})).status == 406
    health = (await plain.http.get("/healthz")).json()
    assert health == {"status": "ok", "server": "counter", "tools": len(server.tools), "running": 0}


async def test_ids_come_back_as_they_went(plain: Client) -> None:
    for text in (b'"\\u00e9"', b"12345678901234567890", b'""', b"0"):
        reply = await plain.post(b'{"jsonrpc":"2.0","method":"ping","id":' + text + b"}")
        assert b'"id":' + text + b"," in reply.raw


async def test_progress_turns_the_answer_into_an_event_stream(plain: Client) -> None:
    reply = await plain.call("count", {"to": 3}, progressToken="p")
    assert reply.content_type == "text/event-stream"
    messages = [json.loads(frame.split("data: ")[1]) for frame in reply.raw.decode().strip().split("\r\n\r\n")]
    assert [m.get("params") for m in messages[:3]] == [
        {"progressToken": "p", "progress": n, "total": 3, "message": str(n)} for n in (1, 2, 3)
    ]
    assert messages[3]["result"]["structuredContent"] == {"result": [1, 2, 3]}


async def test_without_a_token_or_without_events_the_answer_is_json(plain: Client) -> None:
    assert (await plain.call("count", {"to": 3})).content_type == "application/json"
    body, headers = modern("tools/call", name="count", arguments={"to": 3})
    body["params"]["_meta"] = {**META, "progressToken": 7}
    reply = await plain.post(body, {**headers, "mcp-name": "count", "accept": "application/json"})
    assert reply.content_type == "application/json"


async def test_a_def_tool_runs_in_a_thread_and_beside_others(plain: Client) -> None:
    reply = await plain.call("threaded", {"a": 3})
    assert reply.result["structuredContent"] == {"result": 6}


async def test_a_stateful_tool_without_a_database_says_so(plain: Client) -> None:
    reply = await plain.call("add", {"name": "a"}, handle="v1.x")
    assert (reply.status, reply.code) == (200, "no_state")
    assert "database" in reply.message["error"]["message"]


async def test_a_client_that_hangs_up_cancels_the_tool() -> None:
    ended = asyncio.Event()
    began = asyncio.Event()
    waiting = Server("waiting")

    @waiting.tool
    async def forever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    app = ToolApp(waiting)
    body = json.dumps(request("tools/call", {"name": "forever"})).encode()
    inbox = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        await began.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(2):
        await app({"type": "http", "path": "/mcp", "method": "POST", "headers": []}, receive, send)
    assert ended.is_set()
    assert sent == []
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0
