"""Servers and clients that misbehave harm nobody but themselves, and leave nothing behind."""

import asyncio
import contextlib
import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from megamcp.dataplane.ports import DedicatedTarget, Limits, ServerView, StdioTarget
from tests.integration.dataplane.conftest import serving
from tests.integration.dataplane.hostile_http import hostile_http
from tests.integration.drawing import drawn

LIMITS = Limits(call_timeout_s=30.0, grace_s=0.5, ask_timeout_s=5.0)
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "40"))
"""Opens and closes of each kind."""
HOSTILE = str(Path(__file__).with_name("hostile_server.py"))
WATCHED = "test://watched"
MODERN = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/logLevel": "debug",
}


@pytest.fixture(scope="module")
async def bad():
    async with hostile_http() as (server, target):
        yield server, target


@pytest.fixture(scope="module")
async def own():
    async with serving(LIMITS) as running:
        yield running


@pytest.fixture
async def fresh():
    """One that nobody else listens to."""
    async with hostile_http() as (server, target):
        yield server, target


def view(target, name="bad", **more):
    return ServerView(name, target, exactly_once=False, **more)


async def until(condition):
    async with asyncio.timeout(50):
        while not condition():
            await asyncio.sleep(0.01)


async def session_of(gateway, rollout):
    answer = await gateway.rpc(rollout, "initialize", {"protocolVersion": "2025-11-25", "capabilities": {}})
    return {"mcp_session_id": answer.headers["mcp-session-id"], "mcp_protocol_version": "2025-11-25"}


def dashed(head, **more):
    return {name.replace("_", "-"): value for name, value in {**head, **more}.items()}


def said(answer):
    return answer.json["result"]["content"][0]["text"]


# One misdeed each


@pytest.mark.parametrize(
    ("tool", "code"),
    [
        ("die", "tool_server_lost"),
        ("junk", "tool_server_protocol"),
        ("odd_result", "tool_server_protocol"),
        ("wrong_id", "tool_server_protocol"),
        ("cut_short", "tool_server_lost"),
        ("no_reply", "tool_server_lost"),
    ],
)
async def test_a_call_that_goes_wrong_is_an_error_and_the_next_one_works(own, bad, tool, code):
    rollout = own.open(view(bad[1]))
    answer = await own.call(rollout, tool)
    assert (answer.status, answer.code) == (502, code)
    assert said(await own.call(rollout, "echo", {"value": "still here"})) == "still here"
    assert [entry.result is not None for entry in own.control.journal if entry.rollout == rollout] == [True, True]


async def test_large_answers_pass_whole(own, bad):
    rollout = own.open(view(bad[1]))
    assert len(said(await own.call(rollout, "utf8", {"bytes": 6_000_000}))) == 6_000_000 // 11 * 6
    assert len(said(await own.call(rollout, "line", {"bytes": 1 << 20}))) == 1 << 20


async def test_an_answer_in_crumbs_or_twice_is_one_answer(own, bad):
    rollout = own.open(view(bad[1]))
    for tool in ("slow", "twice", "echo"):
        assert said(await own.call(rollout, tool, {"value": "done"})) == "done"


async def test_a_cancellation_that_makes_no_sense_is_ignored(own, bad):
    assert said(await own.call(own.open(view(bad[1])), "bad_cancel")) == "done"


async def test_a_cancelled_call_is_cancelled_at_its_server_and_a_late_answer_is_nobodys(own, bad):
    server, target = bad
    rollout = own.open(view(target))
    head = await session_of(own, rollout)
    body = {"jsonrpc": "2.0", "id": "c", "method": "tools/call", "params": {"name": "late", "arguments": {}}}
    call = asyncio.ensure_future(own.post(f"/r/{rollout}/mcp", body, **head))
    cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "c"}}
    server.cancel_told.clear()
    async with asyncio.timeout(50):
        while not server.cancel_told.is_set():
            await own.post(f"/r/{rollout}/mcp", cancel, **head)
            await asyncio.sleep(0.02)
    answer = await call
    assert (answer.status, answer.code) == (200, "cancelled")
    assert said(await own.call(rollout, "echo", {"value": "x"}, **head)) == "x"


async def test_sessions_of_one_rollout_have_each_its_own_at_the_server(own, bad):
    rollout = own.open(view(bad[1]))
    one, other = await session_of(own, rollout), await session_of(own, rollout)
    counted = [said(await own.call(rollout, "count", **head)) for head in (one, one, other, one)]
    assert counted == ["1", "2", "1", "3"]


async def test_a_server_that_hangs_holds_up_no_other(own, bad):
    rollout = own.open(view(bad[1], call_timeout_s=1.0), view(bad[1], "good"))
    hanging = [asyncio.ensure_future(own.call(rollout, "bad__hang")) for _ in range(3)]
    assert said(await own.call(own.open(view(bad[1])), "echo", {"value": "x"})) == "x"
    assert {answer.code for answer in await asyncio.gather(*hanging)} == {"deadline_exceeded"}
    await until(lambda: bad[0].hanging == 0)


@pytest.mark.parametrize("prompts", [{"prompts": 5}, {"prompts": [5]}, {"prompts": [{}]}, {"nextCursor": 5}])
async def test_prompts_that_are_none_are_the_servers_fault(own, bad, prompts):
    server, target = bad
    rollout = own.open(view(target), view(target, "other"))
    server.prompts = prompts
    answer = await own.rpc(rollout, "prompts/list")
    assert (answer.status, answer.code) == (502, "tool_server_protocol")


# Those who listen


@contextlib.asynccontextmanager
async def listening(gateway, rollout, head):
    headers = dashed(head, accept="text/event-stream")
    async with gateway.http.get(gateway.url(rollout), headers=headers) as response:
        assert response.status == 200
        yield response.content


@contextlib.asynccontextmanager
async def asked(gateway, rollout, method, params, **more):
    """The event stream of a request of 2026-07-28."""
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": META}}
    headers = dashed({"mcp_protocol_version": MODERN, "mcp_method": method}, **more)
    headers["accept"] = "application/json, text/event-stream"
    async with gateway.http.post(gateway.url(rollout), json=body, headers=headers) as response:
        assert response.status == 200, await response.read()
        yield response.content


def subscribed(gateway, rollout):
    wants = {"resourceSubscriptions": [WATCHED], "toolsListChanged": True}
    return asked(gateway, rollout, "subscriptions/listen", {"notifications": wants})


async def next_message(content):
    async with asyncio.timeout(50):
        async for line in content:
            if line.startswith(b"data: {"):
                return json.loads(line[6:])
    raise AssertionError("the stream ended")


async def heard_of_watched(content):
    while (await next_message(content))["params"] != {"uri": WATCHED}:
        pass


async def test_nonsense_on_a_stream_does_not_end_it(own, fresh):
    server, target = fresh
    rollout = own.open(view(target))
    head = await session_of(own, rollout)
    async with listening(own, rollout, head) as content:
        assert (await own.rpc(rollout, "resources/subscribe", {"uri": WATCHED}, **head)).json["result"] == {}
        await until(lambda: server.streams)
        for _ in range(6):
            await own.call(rollout, "updated", {"uri": WATCHED}, **head)
            await heard_of_watched(content)
    await until(lambda: own.plane.streams == 0)


async def test_who_listens_is_told_again_after_a_server_was_lost(own, fresh):
    server, target = fresh
    rollout = own.open(view(target))
    head = await session_of(own, rollout)
    async with listening(own, rollout, head) as content:
        assert (await own.rpc(rollout, "resources/subscribe", {"uri": WATCHED}, **head)).json["result"] == {}
        await until(lambda: server.streams)
        known = len(server.subscribed)
        assert (await own.call(rollout, "die", **head)).json["error"]["data"]["code"] == "tool_server_lost"
        await until(lambda: not server.streams)
        assert said(await own.call(rollout, "echo", {"value": 1}, **head)) == "1"
        await until(lambda: server.streams and len(server.subscribed) > known)
        await own.call(rollout, "updated", {"uri": WATCHED}, **head)
        await heard_of_watched(content)
    await until(lambda: own.plane.streams == 0)


async def test_who_leaves_a_subscription_leaves_the_process_that_it_was_to(own):
    own.control.targets["own"] = lambda _: StdioTarget((sys.executable, HOSTILE, "--modern"))
    rollout = own.open(view(DedicatedTarget(False), "own"))
    pid = said(await own.call(rollout, "pid"))
    async with subscribed(own, rollout) as content:
        assert (await next_message(content))["method"] == "notifications/subscriptions/acknowledged"
        known = own.control.rollouts[rollout]
        link = own.plane._environments.of(own.control.environments[known.environment_id]).links["own"]
        upstream = await link.way(known).upstream()
        await until(lambda: upstream.busy)
    await until(lambda: not upstream.busy)
    assert said(await own.call(rollout, "pid")) == pid


async def test_nonsense_in_a_subscription_does_not_end_it(own, fresh):
    server, target = fresh
    rollout = own.open(view(target))
    async with subscribed(own, rollout) as content:
        assert (await next_message(content))["method"] == "notifications/subscriptions/acknowledged"
        await until(lambda: server.streams)
        for _ in range(2):
            await own.call(rollout, "updated", {"uri": WATCHED})
            assert (await next_message(content))["params"]["uri"] == WATCHED
    await until(lambda: own.plane.streams == 0)


@pytest.mark.parametrize("uris", [5, "abc", True, {"a": 1}, [1, None]])
async def test_a_subscription_to_what_is_no_list_of_uris_is_refused(own, bad, uris):
    rollout = own.open(view(bad[1]))
    wants = {"notifications": {"resourceSubscriptions": uris}}
    answer = await own.modern(f"/r/{rollout}/mcp", "subscriptions/listen", wants)
    assert (answer.status, answer.code) == (400, "invalid_params")


# Whatever a client says

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def mostly(good, junk):
    """Junk in one place at a time is what goes furthest."""
    return st.integers(0, 9).flatmap(lambda n: junk if n == 0 else good)


METHODS = (
    *("initialize", "ping", "tools/list", "tools/call", "resources/list", "resources/templates/list", "prompts/list"),
    *("resources/read", "resources/subscribe", "resources/unsubscribe", "prompts/get", "completion/complete"),
    *("logging/setLevel", "server/discover", "tasks/get", "notifications/cancelled", "notifications/progress"),
    *("notifications/roots/list_changed", "notifications/initialized", "x"),
)
odd = st.sampled_from([1e308, -(10**40), "\ud800", "", {}, [], 5, None, True])
params = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["echo", "one__echo", "one__", "__"]) | values,
        "arguments": values,
        "uri": st.sampled_from([WATCHED, ""]) | values,
        "ref": st.fixed_dictionaries(
            {"type": st.just("ref/prompt") | values}, optional={"name": values | st.just("one__a"), "uri": values}
        )
        | values,
        "argument": values,
        "level": st.sampled_from(["debug", "none"]) | values,
        "cursor": st.sampled_from(["WyJvbmUiLCAieCJd", "é", "WyJvbmUiXQ=="]) | values,
        "requestState": st.sampled_from(["io.megamcp/call:", "io.megamcp/call:00000000-x"]) | values,
        "inputResponses": values,
        "requestId": values,
        "taskId": values,
        "progressToken": values,
        "protocolVersion": st.just("2025-11-25") | values,
        "capabilities": values,
        "_meta": mostly(
            st.fixed_dictionaries(
                {
                    "io.modelcontextprotocol/protocolVersion": mostly(st.just(MODERN), values),
                    "io.modelcontextprotocol/clientCapabilities": mostly(st.just({"elicitation": {}}), values | odd),
                },
                optional={
                    "io.modelcontextprotocol/logLevel": mostly(st.just("debug"), values | odd),
                    "progressToken": values,
                },
            ),
            values,
        ),
    },
)
requests = st.fixed_dictionaries(
    {
        "jsonrpc": st.just("2.0"),
        "id": mostly(st.integers(), st.text(max_size=4)),
        "method": st.sampled_from(METHODS),
        "params": mostly(params, values),
    },
)
latin = st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f\xa0\x85"), max_size=12)
heads = st.fixed_dictionaries(
    {},
    optional={
        "mcp-protocol-version": mostly(st.sampled_from([MODERN, MODERN, "2025-11-25", "2025-03-26"]), latin),
        "mcp-session-id": mostly(st.just("OWN"), st.sampled_from([".", "a.b.c", "\xe9.\xb2"]) | latin),
        "last-event-id": st.sampled_from(["x.1", "00000000-x.\xb2", "."]) | latin,
        "accept": mostly(st.sampled_from(["*/*", "application/json", "text/event-stream"]), latin),
        "origin": mostly(st.just("http://localhost"), latin),
        "idempotency-key": latin,
        "traceparent": st.just("00-" + "1" * 32 + "-" + "2" * 16 + "-01") | latin,
        "authorization": st.just("Bearer x") | latin,
    },
)


async def test_no_request_of_any_kind_makes_the_gateway_fail_or_hang(own, bad):
    rollout = own.open(view(bad[1], "one"), view(bad[1], "two"))
    bad[0].prompts = {"prompts": [{"name": "a"}]}
    session = (await session_of(own, rollout))["mcp_session_id"]

    async def attack(verb, message, head):
        """As bytes: no client's library would send some of these."""
        given = message["params"] if isinstance(message["params"], dict) else {}
        if head.get("mcp-protocol-version") != MODERN:
            given.pop("_meta", None)
        else:
            given.setdefault("_meta", META)
        body = json.dumps(message).encode() if verb == "POST" else b""
        method, name = message["method"], given.get("uri" if message["method"] == "resources/read" else "name")
        fields = {"content-type": "application/json", **head}
        fields["mcp-session-id"] = session if head.get("mcp-session-id") == "OWN" else head.get("mcp-session-id", "")
        fields |= {"mcp-method": method, "mcp-name": name if isinstance(name, str) and name.isascii() else ""}
        lines = "".join(f"{key}: {value}\r\n" for key, value in fields.items() if value)
        lines = f"host: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n{lines}"
        start = f"{verb} /r/{rollout}/mcp HTTP/1.1\r\n{lines}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(own.base.rpartition(":")[2]))
        writer.write(start.encode("latin-1", "replace") + body)
        status = int((await reader.readline()).split()[1])
        said = b"" if verb == "GET" and status == 200 else await reader.read(1 << 16)
        writer.close()
        assert status < 500 or b'"tool_server' in said, (status, said)
        assert b'"code":"internal"' not in said

    await drawn(attack, st.sampled_from([*["POST"] * 12, "GET", "DELETE", "PUT"]), requests, heads, examples=300)
    assert (await own.rpc(rollout, "ping")).status == 200
    await until(lambda: own.plane.in_flight == 0 and own.plane.streams == 0)


@pytest.mark.parametrize("level", [None, 5, {}])
async def test_a_log_level_that_is_no_text_is_refused(own, bad, level):
    rollout = own.open(view(bad[1]))
    answer = await own.rpc(rollout, "logging/setLevel", {"level": level}, **await session_of(own, rollout))
    assert (answer.status, answer.code) == (200, "invalid_params")


# Nothing stays


class Left:
    """What a process holds, counted."""

    def __init__(self, gateway):
        gc.collect()
        endpoint = gateway.plane._endpoint
        methods, heard = endpoint._methods, endpoint._methods.listening
        self.tasks = len(asyncio.all_tasks())
        self.files = len(os.listdir("/proc/self/fd"))
        self.timers = len([timer for timer in asyncio.get_running_loop()._scheduled if not timer._cancelled])
        self.timers -= len(endpoint._records._records)  # kept for two minutes, for who resumes
        self.kept = {
            "in flight": gateway.plane.in_flight + len(methods._in_flight) + len(methods._watches),
            "questions": len(methods.answers._waiting) + len(methods._held._calls),
            "listening": len(heard._standing) + len(heard._changes) + len(heard._watching) + heard.open,
        }
        self.memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def leave_a_stream(gateway, rollout):
    async with listening(gateway, rollout, await session_of(gateway, rollout)):
        pass


async def leave_a_subscription(gateway, rollout):
    async with subscribed(gateway, rollout) as content:
        await next_message(content)


async def leave_a_call_in_mid_stream(gateway, rollout):
    params = {"name": "events", "arguments": {"steps": 3}}
    async with asked(gateway, rollout, "tools/call", params, mcp_name="events") as content:
        await next_message(content)


async def open_and_end_a_session(gateway, rollout):
    head = await session_of(gateway, rollout)
    assert said(await gateway.call(rollout, "count", **head)) == "1"
    async with gateway.http.delete(gateway.url(rollout), headers=dashed(head)) as response:
        assert response.status == 204


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "kind", [leave_a_stream, leave_a_subscription, leave_a_call_in_mid_stream, open_and_end_a_session]
)
async def test_what_is_opened_and_closed_many_times_leaves_nothing(bad, kind):
    server, target = bad
    async with serving(replace(LIMITS, call_timeout_s=300.0)) as gateway:
        rollout = gateway.open(view(target))

        async def times(number):
            for start in range(0, number, 8):
                await asyncio.gather(*(kind(gateway, rollout) for _ in range(min(8, number - start))))
            await until(lambda: server.hanging == 0 and not any(Left(gateway).kept.values()))
            await asyncio.sleep(0)

        await times(16)
        before = Left(gateway)
        await times(ROUNDS)
        after = Left(gateway)
        assert after.timers <= before.timers + 20
        assert after.tasks <= before.tasks + 20
        assert after.files <= before.files + 20
        assert after.memory - before.memory < 64 << 20
        assert gateway.plane.sessions <= 1
