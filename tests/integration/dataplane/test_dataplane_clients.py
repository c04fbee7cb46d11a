"""The official client, in both eras, sees plain MCP."""

import asyncio

import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError

from megamcp.dataplane.ports import ServerView

ERAS = ["legacy", "2026-07-28", "auto"]


@pytest.mark.parametrize("mode", ERAS)
async def test_the_official_client_lists_and_calls(gateway, shared, mode):
    rollout = gateway.control.open(shared)
    async with Client(gateway.url(rollout), mode=mode) as client:
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools][:3] == ["echo", "count", "pid"]
        result = await client.call_tool("echo", {"value": "größe 😀"})
        assert result.content[0].text == "größe 😀"
        assert result.structured_content == {"result": "größe 😀"}
        assert not result.is_error


@pytest.mark.parametrize("mode", ERAS)
async def test_a_tools_error_is_a_tool_result(gateway, shared, mode):
    async with Client(gateway.url(gateway.control.open(shared)), mode=mode) as client:
        result = await client.call_tool("broken", {})
        assert result.is_error
        assert "broken" in result.content[0].text


@pytest.mark.parametrize("mode", ERAS)
async def test_an_unknown_tool_is_a_protocol_error(gateway, shared, mode):
    async with Client(gateway.url(gateway.control.open(shared)), mode=mode) as client:
        with pytest.raises(MCPError) as error:
            await client.call_tool("nothing", {})
        assert error.value.error.data["code"] == "unknown_tool"


@pytest.mark.parametrize("mode", ERAS)
async def test_progress_reaches_the_client_that_asked_for_it(gateway, shared, mode):
    seen = []

    async def progressed(progress, total, message):
        seen.append((progress, total, message))

    async with Client(gateway.url(gateway.control.open(shared)), mode=mode) as client:
        result = await client.call_tool("steps", {"number": 3}, progress_callback=progressed)
        assert result.content[0].text == "done"
    assert seen == [(1.0, 3.0, "step 1"), (2.0, 3.0, "step 2"), (3.0, 3.0, "step 3")]


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_a_cancelled_call_is_cancelled_at_the_tool(gateway, shared, mode):
    rollout = gateway.control.open(shared)
    name = f"cancel-{mode}"

    async def until(counter):
        # From another rollout: readers of this one wait for its writer.
        for _ in range(100):
            answer = await gateway.call(observer, "peek", {"name": name + counter})
            if answer.json["result"]["structuredContent"]["result"]:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never {counter}")

    observer = gateway.control.open(shared)
    async with Client(gateway.url(rollout), mode=mode) as client:
        call = asyncio.create_task(client.call_tool("slow", {"name": name, "seconds": 30}))
        await until(".started")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(".cancelled")
    assert gateway.plane.in_flight == 0
    assert [entry.tool for entry in gateway.control.journal if entry.rollout == rollout] == ["slow"]


@pytest.mark.parametrize("mode", ERAS)
@pytest.mark.parametrize("kind", ["modern", "stateful"])
async def test_servers_of_others_work_in_either_era(gateway, strangers, mode, kind):
    rollout = gateway.open(ServerView("other", strangers[kind], exactly_once=False))
    seen = []

    async def progressed(progress, total, message):
        seen.append(progress)

    async with Client(gateway.url(rollout), mode=mode) as client:
        assert (await client.call_tool("echo", {"value": "x"})).structured_content == {"result": "x"}
        await client.call_tool("steps", {"number": 2}, progress_callback=progressed)
        assert seen == [1.0, 2.0]
    entries = [entry for entry in gateway.control.journal if entry.rollout == rollout]
    assert [(entry.tool, entry.is_error) for entry in entries] == [("echo", False), ("steps", False)]


async def test_several_servers_have_prefixed_names(gateway, strangers, make_child):
    rollout = gateway.open(
        ServerView("first", strangers["modern"], exactly_once=False),
        ServerView("second", strangers["stateful"], exactly_once=False),
    )
    async with Client(gateway.url(rollout)) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        assert names[0] == "first__echo"
        assert "second__echo" in names
        result = await client.call_tool("second__echo", {"value": "y"})
        assert result.content[0].text == "y"


async def test_a_fixed_url_opens_a_rollout_per_session(gateway, shared):
    url = f"{gateway.base}/e/{shared.name}/mcp"
    before = len(gateway.control.rollouts)
    async with Client(url, mode="legacy") as client:
        await client.call_tool("echo", {"value": "x"})
        assert len(gateway.control.rollouts) == before + 1
    assert len(gateway.control.rollouts) == before
