"""Servers over the transport of 2024-11-05, and servers that can't be reached."""

import asyncio
import contextlib
import socket
import sys

import pytest
from mcp.client.client import Client

from megamcp.dataplane.ports import ServerView, UrlTarget
from tests.integration.dataplane.conftest import SCRIPT, free_port


@contextlib.asynccontextmanager
async def legacy(port):
    process = await asyncio.create_subprocess_exec(sys.executable, SCRIPT, str(port), "--sse")
    try:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.05)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def view(port):
    return ServerView("old", UrlTarget(f"http://127.0.0.1:{port}/sse", sse=True), exactly_once=False)


@pytest.fixture(scope="module")
async def old(gateway):
    port = free_port()
    async with legacy(port):
        yield gateway.environment(view(port))


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_a_server_of_the_older_transport_serves_clients_of_both_eras(gateway, old, mode):
    seen = []

    async def progressed(progress, total, message):
        seen.append(message)

    async with Client(gateway.url(gateway.control.open(old)), mode=mode) as client:
        assert "echo" in [tool.name for tool in (await client.list_tools()).tools]
        result = await client.call_tool("echo", {"value": "größe 😀" * 1000})
        assert result.content[0].text == "größe 😀" * 1000
        await client.call_tool("steps", {"number": 2}, progress_callback=progressed)
    assert seen == ["step 1", "step 2"]


async def test_calls_of_one_session_run_side_by_side(gateway, old):
    rollout = gateway.control.open(old)
    slow = asyncio.create_task(gateway.call(rollout, "slow", {"name": "beside", "seconds": 1.5}))
    answer = await gateway.call(rollout, "echo", {"value": "x"})
    assert answer.json["result"]["content"][0]["text"] == "x"
    assert not slow.done()
    assert (await slow).json["result"]["structuredContent"]["result"] == 1


async def test_a_cancelled_call_is_cancelled_there_and_the_session_goes_on(gateway, old):
    rollout = gateway.control.open(old)
    async with Client(gateway.url(rollout), mode="legacy") as client:
        call = asyncio.create_task(client.call_tool("slow", {"name": "left", "seconds": 30}))
        await until(gateway, rollout, "left.started")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(gateway, rollout, "left.cancelled")
        assert (await client.call_tool("echo", {"value": "on"})).content[0].text == "on"


async def until(gateway, rollout, counter):
    for _ in range(200):
        answer = await gateway.call(rollout, "peek", {"name": counter})
        if answer.json["result"]["structuredContent"]["result"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"never {counter}")


async def test_a_server_that_dies_is_met_again_when_it_is_back(gateway):
    port = free_port()
    environment = gateway.environment(view(port))
    rollout = gateway.control.open(environment)
    async with legacy(port) as process:
        assert (await gateway.call(rollout, "count", {"name": "a"})).status == 200
        call = asyncio.create_task(gateway.call(rollout, "slow", {"name": "a", "seconds": 30}))
        await asyncio.sleep(0.2)
        process.kill()
        assert (await call).code == "tool_server_lost"
    async with legacy(port):
        assert (await gateway.call(rollout, "count", {"name": "a"})).json["result"]["structuredContent"]["result"] == 1


async def test_an_address_that_is_no_event_stream_is_told(gateway, strangers):
    target = UrlTarget(strangers["modern"].url, sse=True)
    rollout = gateway.control.open(gateway.environment(ServerView("wrong", target, exactly_once=False)))
    answer = await gateway.rpc(rollout, "tools/list")
    assert answer.code == "tool_server_protocol"
    assert "/sse" in answer.json["error"]["data"]["hint"]


async def test_messages_are_sent_to_no_other_host(gateway):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        writer.write(b"event: endpoint\ndata: http://elsewhere.example/messages\n\n")
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    target = UrlTarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/sse", sse=True)
    rollout = gateway.control.open(gateway.environment(ServerView("lured", target, exactly_once=False)))
    answer = await gateway.rpc(rollout, "tools/list")
    assert answer.code == "tool_server_protocol"
    assert "elsewhere.example" in answer.json["error"]["message"]
    server.close()


async def test_a_server_that_cannot_be_reached_is_left_alone_for_a_while_and_then_tried_again(gateway):
    port = free_port()
    target = UrlTarget(f"http://127.0.0.1:{port}/mcp")
    rollout = gateway.control.open(gateway.environment(ServerView("away", target, exactly_once=False)))
    answers = [await gateway.rpc(rollout, "tools/list") for _ in range(5)]
    assert {answer.code for answer in answers} == {"tool_server_unreachable"}
    assert answers[-1].json["error"]["data"]["retry_after"] > 0
    (states,) = [one for one in gateway.plane.server_states().values() if "away" in one]
    assert states == {"away": "unreachable"}
    tried = []
    with socket.create_server(("127.0.0.1", port)) as listening:
        listening.setblocking(False)
        # Nothing is tried before its time: the connection that ends the pause is the first one.
        assert (await gateway.rpc(rollout, "tools/list")).code == "tool_server_unreachable"
        with pytest.raises(BlockingIOError):
            listening.accept()
    process = await asyncio.create_subprocess_exec(sys.executable, SCRIPT, str(port))
    try:
        for _ in range(100):
            tried.append(await gateway.rpc(rollout, "tools/list"))
            if "result" in tried[-1].json:
                break
            await asyncio.sleep(0.2)
        assert "result" in tried[-1].json
    finally:
        process.kill()
        await process.wait()
