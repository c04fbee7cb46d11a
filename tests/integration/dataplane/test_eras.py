"""Clients of both eras in front of servers of both, over HTTP and stdio, at the wire."""

import asyncio
import contextlib
import itertools
import json
import sys
from dataclasses import replace

import pytest

from megamcp.dataplane.ports import DedicatedTarget, ServerView, StdioTarget, UrlTarget
from tests.integration.dataplane.conftest import LIMITS

FULL = {"sampling": {}, "elicitation": {"form": {}, "url": {}}, "roots": {}}
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
LEVEL = "io.modelcontextprotocol/logLevel"
EVERYTHING = (sys.executable, "-m", "tests.conformance.everything")
WATCHED = "test://watched-resource"
ANSWERS = {
    "elicitation/create": {"action": "accept", "content": {"name": "Ada", "ok": True}},
    "sampling/createMessage": {
        "role": "assistant",
        "content": {"type": "text", "text": "Paris"},
        "model": "scripted",
    },
    "roots/list": {"roots": [{"uri": "file:///work", "name": "work"}]},
}


@contextlib.asynccontextmanager
async def listening(era):
    process = await asyncio.create_subprocess_exec(*EVERYTHING, "--era", era, stdout=asyncio.subprocess.PIPE)
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


@pytest.fixture(scope="module")
async def servers(gateway):
    """Views of the everything-server, by how it is reached."""
    async with listening("handshake") as old, listening("modern") as new:
        gateway.control.targets["piped"] = lambda rollout: StdioTarget((*EVERYTHING, "--stdio"))
        yield {
            "handshake": ServerView("old", UrlTarget(old), exactly_once=False),
            "modern": ServerView("new", UrlTarget(new), exactly_once=False),
            "stdio": ServerView("piped", DedicatedTarget(), exactly_once=False, call_timeout_s=20),
        }


class Handshake:
    """A client of 2025-11-25 that answers what it is asked."""

    def __init__(self, gateway, rollout, capabilities):
        self.gateway, self.url, self.capabilities = gateway, gateway.url(rollout), capabilities
        self.asked, self.told = [], []
        self.ids = itertools.count(1)

    async def open(self):
        about = {"name": "t", "version": "1"}
        params = {"protocolVersion": "2025-11-25", "capabilities": self.capabilities, "clientInfo": about}
        self.headers = {"accept": "application/json, text/event-stream"}
        async with self.post({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}) as response:
            self.headers["mcp-session-id"] = response.headers["mcp-session-id"]
            self.headers["mcp-protocol-version"] = "2025-11-25"
            self.server = (await response.json())["result"]["capabilities"]
        return self

    def post(self, message):
        return self.gateway.http.post(self.url, json=message, headers=self.headers)

    async def request(self, method, params):
        number = next(self.ids)
        async with self.post({"jsonrpc": "2.0", "id": number, "method": method, "params": params}) as response:
            if response.content_type == "application/json":
                return await response.json()
            async for message in events(response):
                if message.get("id") == number and "method" not in message:
                    return message
                await self.heard(message)
        raise AssertionError("the stream ended without a reply")

    async def heard(self, message):
        if "id" not in message:
            self.told.append(message)
            return
        self.asked.append(message["method"])
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": ANSWERS[message["method"]]}
        async with self.post(reply) as acknowledged:
            assert acknowledged.status == 202

    async def set_level(self, level):
        assert (await self.request("logging/setLevel", {"level": level}))["result"] == {}

    @contextlib.asynccontextmanager
    async def subscribed(self, uri):
        headers = {**self.headers, "accept": "text/event-stream"}
        async with self.gateway.http.get(self.url, headers=headers) as response:
            assert response.status == 200
            await self.request("resources/subscribe", {"uri": uri})
            yield events(response)


class Modern:
    """The same of 2026-07-28."""

    def __init__(self, gateway, rollout, capabilities):
        self.gateway, self.path, self.capabilities = gateway, f"/r/{rollout}/mcp", capabilities
        self.asked, self.told = [], []
        self.meta = {CAPABILITIES: capabilities}

    async def open(self):
        self.server = (await self.request("server/discover", {}))["result"]["capabilities"]
        return self

    async def request(self, method, params):
        more = {}
        for _ in range(10):
            named = {"mcp_name": params["uri"]} if "uri" in params else {}
            answer = await self.gateway.modern(self.path, method, {**params, **more}, meta=self.meta, **named)
            message = self.last(answer)
            result = message.get("result", {})
            if result.get("resultType") != "input_required":
                return message
            questions = result.get("inputRequests", {})
            self.asked += [question["method"] for question in questions.values()]
            more = {"inputResponses": {key: ANSWERS[one["method"]] for key, one in questions.items()}}
            if "requestState" in result:
                more["requestState"] = result["requestState"]
        raise AssertionError("no end of questions")

    def last(self, answer):
        if answer.headers["content-type"].startswith("application/json"):
            return answer.json
        *told, reply = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line[:7] == "data: {"]
        self.told += told
        return reply

    async def set_level(self, level):
        self.meta = {**self.meta, LEVEL: level}

    @contextlib.asynccontextmanager
    async def subscribed(self, uri):
        meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", **self.meta}
        params = {"notifications": {"resourceSubscriptions": [uri]}, "_meta": meta}
        message = {"jsonrpc": "2.0", "id": "listen", "method": "subscriptions/listen", "params": params}
        headers = {
            "mcp-protocol-version": "2026-07-28",
            "mcp-method": "subscriptions/listen",
            "accept": "application/json, text/event-stream",
        }
        async with self.gateway.http.post(self.gateway.base + self.path, json=message, headers=headers) as response:
            heard = events(response)
            first = await anext(heard)
            assert first["method"] == "notifications/subscriptions/acknowledged"
            assert first["params"]["notifications"] == {"resourceSubscriptions": [uri]}
            yield heard


async def events(response):
    """The messages of an event stream."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


CLIENTS = pytest.mark.parametrize("kind", [Handshake, Modern], ids=["2025-11-25", "2026-07-28"])
SERVERS = pytest.mark.parametrize("server", ["handshake", "modern", "stdio"])


async def client(kind, gateway, servers, server, capabilities=FULL):
    return await kind(gateway, gateway.open(servers[server]), capabilities).open()


def text(message):
    return message["result"]["content"][0]["text"]


@CLIENTS
@SERVERS
async def test_a_server_asks_its_client_whatever_the_era_of_either(gateway, servers, kind, server):
    ours = await client(kind, gateway, servers, server)
    for tool, method, said in [
        ("test_input_required_result_elicitation", "elicitation/create", "Ada"),
        ("test_input_required_result_sampling", "sampling/createMessage", "Paris"),
        ("test_input_required_result_list_roots", "roots/list", "file:///work"),
    ]:
        answer = await ours.request("tools/call", {"name": tool, "arguments": {}})
        assert said in text(answer), answer
        assert ours.asked.pop() == method
    answer = await ours.request("prompts/get", {"name": "test_input_required_result_prompt", "arguments": {}})
    assert ours.asked == ["elicitation/create"], answer


@CLIENTS
@SERVERS
async def test_who_can_not_be_asked_is_not(gateway, servers, kind, server):
    ours = await client(kind, gateway, servers, server, {})
    call = {"name": "test_input_required_result_elicitation", "arguments": {}}
    answer = await ours.request("tools/call", call)
    assert "error" in answer or answer["result"].get("isError"), answer
    assert ours.asked == []


@CLIENTS
@SERVERS
async def test_log_messages_come_to_who_wants_them(gateway, servers, kind, server):
    ours = await client(kind, gateway, servers, server)
    call = {"name": "test_tool_with_logging", "arguments": {}}
    if kind is Modern:
        await ours.request("tools/call", call)
        assert ours.told == []
    await ours.set_level("debug")
    await ours.request("tools/call", call)
    assert [one["method"] for one in ours.told] == ["notifications/message"] * 3


@CLIENTS
@SERVERS
async def test_a_resource_is_read_and_its_changes_are_told(gateway, servers, kind, server):
    ours = await client(kind, gateway, servers, server)
    assert ours.server["resources"]["subscribe"] is True
    read = await ours.request("resources/read", {"uri": WATCHED})
    assert read["result"]["contents"][0]["uri"] == WATCHED
    async with ours.subscribed(WATCHED) as heard, asyncio.timeout(30):
        # A server of 2026-07-28 says when it has heard of a subscription, an older one of the stream: told until it is.
        hearing = asyncio.ensure_future(anext(heard))
        while not hearing.done():
            await ours.request("tools/call", {"name": "test_trigger_resource_update", "arguments": {}})
            await asyncio.wait({hearing}, timeout=0.3)
        told = hearing.result()
    assert told["method"] == "notifications/resources/updated"
    assert told["params"]["uri"] == WATCHED


@SERVERS
async def test_a_log_level_that_is_none_is_refused(gateway, servers, server):
    ours = await client(Handshake, gateway, servers, server)
    answer = await ours.request("logging/setLevel", {"level": "loud"})
    assert answer["error"]["code"] == -32602
    assert "emergency" in answer["error"]["message"]


async def test_a_list_that_a_session_is_told_has_changed_is_asked_for_again(gateway, servers):
    ours = await client(Handshake, gateway, servers, "handshake")

    async def names():
        return [tool["name"] for tool in (await ours.request("tools/list", {}))["result"]["tools"]]

    assert "test_extra_tool" not in await names()
    async with ours.subscribed(WATCHED) as heard, asyncio.timeout(30):
        await ours.request("tools/call", {"name": "test_trigger_tool_change", "arguments": {}})
        while (await anext(heard))["method"] != "notifications/tools/list_changed":
            pass
        assert "test_extra_tool" in await names()
        await ours.request("tools/call", {"name": "test_trigger_tool_change", "arguments": {}})


@pytest.mark.parametrize("server", ["modern", "handshake"])
async def test_a_key_is_for_one_round_of_answers(gateway, servers, server):
    rollout = gateway.open(servers[server])
    call = {"name": "test_input_required_result_elicitation", "arguments": {}}
    send = {"meta": {CAPABILITIES: FULL}, "idempotency_key": "once"}
    asked = (await gateway.modern(f"/r/{rollout}/mcp", "tools/call", call, **send)).json["result"]
    answers = {key: ANSWERS[one["method"]] for key, one in asked["inputRequests"].items()}
    more = {**call, "inputResponses": answers}
    if "requestState" in asked:
        more["requestState"] = asked["requestState"]
    done = await gateway.modern(f"/r/{rollout}/mcp", "tools/call", more, **send)
    assert "Ada" in text(done.json)
    if server == "modern":  # a retry of the same round is that round's result
        again = await gateway.modern(f"/r/{rollout}/mcp", "tools/call", more, **send)
        assert again.json["result"] == done.json["result"]
    rows = [entry for entry in gateway.control.journal if entry.rollout == rollout]
    assert len(rows) == (2 if server == "modern" else 1)


@CLIENTS
async def test_two_servers_share_a_url_and_keep_what_is_theirs(gateway, servers, kind):
    rollout = gateway.open(servers["handshake"], servers["modern"])
    ours = await kind(gateway, rollout, FULL).open()
    prompts, params = [], {}
    while True:
        page = (await ours.request("prompts/list", params))["result"]
        prompts += [prompt["name"] for prompt in page["prompts"]]
        if not page.get("nextCursor"):
            break
        params = {"cursor": page["nextCursor"]}
    assert [name for name in prompts if name.endswith("test_simple_prompt")] == [
        "old__test_simple_prompt",
        "new__test_simple_prompt",
    ]
    got = await ours.request("prompts/get", {"name": "new__test_simple_prompt", "arguments": {}})
    assert got["result"]["messages"]
    read = await ours.request("resources/read", {"uri": "test://static-text"})
    assert "static text" in read["result"]["contents"][0]["text"]
    reference = {"type": "ref/prompt", "name": "old__test_prompt_with_arguments"}
    argument = {"ref": reference, "argument": {"name": "arg1", "value": "par"}}
    completed = await ours.request("completion/complete", argument)
    assert completed["result"]["completion"]["values"] == ["paris", "park", "party"]
    missing = await ours.request("resources/read", {"uri": "test://nothing"})
    assert missing["error"]["code"] in (-32002, -32602)


async def test_sessions_of_one_rollout_stay_apart(gateway, servers):
    rollout = gateway.open(servers["handshake"])
    one = await Handshake(gateway, rollout, FULL).open()
    other = await Handshake(gateway, rollout, FULL).open()
    await one.set_level("error")
    await other.set_level("debug")
    call = {"name": "test_tool_with_logging", "arguments": {}}
    await asyncio.gather(one.request("tools/call", call), other.request("tools/call", call))
    assert (len(one.told), len(other.told)) == (0, 3)


async def test_a_held_call_ends_with_its_time_and_leaves_one_row_and_nothing_else(gateway, servers, serve):
    async with serve(replace(LIMITS, ask_timeout_s=0.5)) as quick:
        rollout = quick.open(servers["handshake"])
        call = {"name": "test_input_required_result_elicitation", "arguments": {}}
        answer = await quick.modern(f"/r/{rollout}/mcp", "tools/call", call, meta={CAPABILITIES: FULL})
        state = answer.json["result"]["requestState"]
        async with asyncio.timeout(30):
            while quick.plane.in_flight:
                await asyncio.sleep(0.05)
        assert [entry.result is not None for entry in quick.control.journal] == [True]
        late = {**call, "requestState": state, "inputResponses": {}}
        answer = await quick.modern(f"/r/{rollout}/mcp", "tools/call", late, meta={CAPABILITIES: FULL})
        assert "error" in answer.json or answer.json["result"]["isError"]
        answer = await quick.modern(f"/r/{rollout}/mcp", "tools/call", late, meta={CAPABILITIES: FULL})
        assert answer.code == "call_not_held"


async def test_a_client_that_cancels_while_it_is_asked_ends_the_question_and_the_call(gateway, servers):
    ours = await client(Handshake, gateway, servers, "handshake")
    call = {"jsonrpc": "2.0", "id": 99, "method": "tools/call"}
    call["params"] = {"name": "test_input_required_result_elicitation", "arguments": {}}
    async with ours.post(call) as response:
        heard = events(response)
        question = await anext(heard)
        cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 99}}
        async with ours.post(cancel) as acknowledged:
            assert acknowledged.status == 202
        told = [message async for message in heard]
    assert told[-1]["id"] == 99
    assert told[-1]["error"]["data"]["code"] == "cancelled"
    assert {"requestId": question["id"]}.items() <= told[0]["params"].items()
    assert gateway.plane.in_flight == 0
