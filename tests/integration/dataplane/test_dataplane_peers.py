"""Two gateway processes: what only one of them can go on with finds its way there."""

import asyncio
import contextlib
import json
import sys

import aiohttp
import pytest

from megamcp.dataplane.fake import FakeControl
from megamcp.dataplane.ports import ServerView, UrlTarget
from tests.integration.dataplane import conftest as here

FULL = {"sampling": {}, "elicitation": {"form": {}}, "roots": {}}
META = {"io.modelcontextprotocol/clientCapabilities": FULL}


class PeerControl(FakeControl):
    """Of one of several processes: they have rollouts and environments in common."""

    def __init__(self, peer, addresses, other=None):
        super().__init__()
        self.peer = peer
        self.addresses = addresses
        self.planes = []
        if other is not None:
            self.environments, self.rollouts, self.planes = other.environments, other.rollouts, other.planes

    async def peer_address(self, peer):
        return self.addresses.get(peer)

    async def session_said(self, session, method, value):
        for plane in self.planes:
            if plane._control is not self:
                plane.session_said(session, method, value)


@pytest.fixture(scope="module")
async def pair():
    """Two processes' data planes, and a rollout whose server keeps sessions of the handshake era."""
    command = (sys.executable, "-m", "tests.conformance.everything", "--era", "handshake")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    url = (await process.stdout.readline()).decode().strip()
    addresses = {}
    first = PeerControl("11111111", addresses)
    second = PeerControl("22222222", addresses, first)
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(here.serving(here.LIMITS, first))
        two = await stack.enter_async_context(here.serving(here.LIMITS, second))
        addresses |= {first.peer: one.base, second.peer: two.base}
        first.planes += [one.plane, two.plane]
        environment = one.environment(ServerView("everything", UrlTarget(url), exactly_once=False))
        two.control.environments[environment.id] = environment
        yield one, two, one.control.open(environment)
    process.kill()
    await process.wait()


async def test_a_held_call_is_resumed_at_the_process_that_has_it(pair):
    one, two, rollout = pair
    path = f"/r/{rollout}/mcp"
    call = {"name": "test_input_required_result_elicitation", "arguments": {}}
    asked = (await one.modern(path, "tools/call", call, meta=META)).json["result"]
    ((key, question),) = asked["inputRequests"].items()
    assert question["method"] == "elicitation/create"
    answers = {key: {"action": "accept", "content": {"name": "Ada"}}}
    again = {**call, "requestState": asked["requestState"], "inputResponses": answers}
    other = {**again, "arguments": {"x": 1}}
    assert (await two.modern(path, "tools/call", other, meta=META)).code == "call_not_held"
    answer = await two.modern(path, "tools/call", again, meta=META)
    assert "Ada" in json.dumps(answer.json["result"]["content"])
    assert (await two.modern(path, "tools/call", again, meta=META)).code == "call_not_held"


async def test_an_answer_is_handed_to_the_process_that_asked(pair):
    one, two, rollout = pair
    async with session(one, rollout) as headers:
        call = message("tools/call", {"name": "test_elicitation", "arguments": {"message": "Who?"}}, 7)
        async with one.http.post(one.url(rollout), json=call, headers=headers) as response:
            question = await event(response, "elicitation/create")
            reply = {"jsonrpc": "2.0", "id": question["id"], "result": {"action": "decline"}}
            async with two.http.post(two.url(rollout), json=reply, headers=headers) as acknowledged:
                assert acknowledged.status == 202
            assert "decline" in json.dumps((await event(response, None))["result"])


async def test_an_answer_to_a_process_that_is_gone_is_acknowledged(pair):
    one, _, rollout = pair
    async with session(one, rollout) as headers:
        reply = {"jsonrpc": "2.0", "id": "33333333-gone", "result": {"action": "accept"}}
        async with one.http.post(one.url(rollout), json=reply, headers=headers) as acknowledged:
            assert (acknowledged.status, await acknowledged.read()) == (202, b"")


async def test_a_batch_is_not_handed_on_for_one_of_its_members(pair):
    one, _, rollout = pair
    before = len(one.control.journal)
    call = message("tools/call", {"name": "test_simple_text", "arguments": {}}, 1)
    foreign = {"jsonrpc": "2.0", "id": "22222222-question", "result": {}}
    answer = await one.post(f"/r/{rollout}/mcp", [call, foreign])
    assert [entry.get("id") for entry in answer.json] == [1, "22222222-question"]
    assert answer.json[0]["result"]["content"]
    assert answer.json[1]["error"]["data"]["code"] == "batch_refused"
    assert len(one.control.journal) == before + 1


async def test_a_broken_stream_is_resumed_at_another_process(pair):
    one, two, rollout = pair
    async with session(one, rollout) as headers:
        call = message("tools/call", {"name": "test_elicitation", "arguments": {"message": "Who?"}}, 8)
        async with one.http.post(one.url(rollout), json=call, headers=headers) as response:
            seen = []
            question = await event(response, "elicitation/create", seen)
        resumed = {**headers, "last-event-id": seen[-1], "accept": "text/event-stream"}
        async with two.http.get(two.url(rollout), headers=resumed) as rest:
            reply = {"jsonrpc": "2.0", "id": question["id"], "result": {"action": "cancel"}}
            async with one.http.post(one.url(rollout), json=reply, headers=headers) as acknowledged:
                assert acknowledged.status == 202
            assert (await event(rest, None))["id"] == 8


async def test_calls_that_wait_for_their_client_keep_no_other_call_from_its_turn(pair):
    one, _, rollout = pair
    path = f"/r/{rollout}/mcp"
    call = {"name": "test_input_required_result_elicitation", "arguments": {}}
    for _ in range(here.LIMITS.readers_per_rollout + 1):
        answer = await one.modern(path, "tools/call", call, meta=META)
        assert answer.json["result"]["resultType"] == "input_required"
    answer = await one.modern(path, "tools/call", {"name": "test_simple_text", "arguments": {}}, meta=META)
    assert answer.json["result"]["resultType"] == "complete"


async def test_what_went_with_its_process_is_told(pair):
    _, two, rollout = pair
    call = {"name": "test_simple_text", "arguments": {}, "requestState": "io.megamcp/call:33333333-gone"}
    answer = await two.modern(f"/r/{rollout}/mcp", "tools/call", call, meta=META)
    assert answer.code == "call_not_held"


def message(method, params, number):
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


@contextlib.asynccontextmanager
async def session(gateway, rollout):
    params = {"protocolVersion": "2025-11-25", "capabilities": FULL, "clientInfo": {"name": "t", "version": "1"}}
    answer = await gateway.rpc(rollout, "initialize", params)
    yield {
        "mcp-session-id": answer.headers["mcp-session-id"],
        "mcp-protocol-version": "2025-11-25",
        "accept": "application/json, text/event-stream",
    }


async def event(response: aiohttp.ClientResponse, method: str | None, ids: list[str] | None = None):
    """The next message of this method (None: the reply) on an event stream."""
    async with asyncio.timeout(20):
        async for line in response.content:
            if line.startswith(b"id: ") and ids is not None:
                ids.append(line[4:].strip().decode())
            if line.startswith(b"data: {"):
                found = json.loads(line[6:])
                if found.get("method") == method:
                    return found
    raise AssertionError(f"the stream ended without {method}")
