"""Dedicated servers: a process for each rollout, spoken to over its pipes, made by the official SDK or by an enemy."""

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from megamcp.dataplane import wire
from megamcp.dataplane.ports import DedicatedTarget, Limits, ServerView, StdioTarget

OFFICIAL = str(Path(__file__).with_name("official_server.py"))
HOSTILE = str(Path(__file__).with_name("hostile_server.py"))
LIMITS = Limits(
    call_timeout_s=15.0,
    grace_s=0.3,
    start_timeout_s=10.0,
    response_bytes=1_000_000,
    dedicated_processes=3,
    dedicated_idle_s=600.0,
)


def over_stdio(script, *options, **more):
    return StdioTarget((sys.executable, script, *options), **more)


@pytest.fixture
async def gateway(serve):
    async with serve(LIMITS) as running:
        yield running


def dedicated(gateway, target, *, restart_on_move=False, timeout=None):
    """An environment with one dedicated server. `target` may be a function of the rollout."""
    name = f"own{len(gateway.control.targets)}"
    gateway.control.targets[name] = target if callable(target) else lambda rollout: target
    view = ServerView(name, DedicatedTarget(restart_on_move), exactly_once=False, call_timeout_s=timeout)
    return gateway.environment(view)


def hostile(gateway, *options, timeout=None):
    return gateway.control.open(dedicated(gateway, over_stdio(HOSTILE, *options), timeout=timeout))


async def said(gateway, rollout, tool, arguments=None, **headers):
    answer = await gateway.call(rollout, tool, arguments, **headers)
    return answer.json["result"]["content"][0]["text"]


async def until(condition, seconds=8.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.01)


def processes(gateway):
    return gateway.plane._environments.dedicated


def kill_orphans(before):
    """Ends what the tool `orphan` left behind."""
    for process in set(psutil.process_iter()) - before:
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:] == ["-c", "import time; time.sleep(600)"]:
                process.kill()


# A server as a stranger would write it


async def test_each_rollout_has_a_process_of_its_own(gateway):
    view = dedicated(gateway, over_stdio(OFFICIAL, "stdio"))
    one, other = gateway.control.open(view), gateway.control.open(view)
    pids = [(await gateway.call(rollout, "pid")).json["result"]["structuredContent"] for rollout in (one, other, one)]
    assert pids[0] == pids[2] != pids[1]
    for rollout, times in ((one, 2), (other, 1)):
        for expected in range(1, times + 1):
            answer = await gateway.call(rollout, "count", {"name": "x"})
            assert answer.json["result"]["structuredContent"] == {"result": expected}


async def test_calls_of_one_rollout_run_side_by_side(gateway):
    rollout = gateway.control.open(dedicated(gateway, over_stdio(OFFICIAL, "stdio")))
    await gateway.call(rollout, "pid")
    started = time.monotonic()
    calls = [gateway.call(rollout, "slow", {"name": str(number), "seconds": 1.0}) for number in range(5)]
    answers = await asyncio.gather(*calls)
    assert time.monotonic() - started < 4.5  # 5 one after another
    assert all(answer.json["result"]["structuredContent"] == {"result": 1} for answer in answers)


async def test_progress_reaches_the_client_under_its_own_token(gateway):
    rollout = gateway.control.open(dedicated(gateway, over_stdio(OFFICIAL, "stdio")))
    params = {"name": "steps", "arguments": {"number": 3}, "_meta": {"progressToken": "mine"}}
    answer = await gateway.rpc(rollout, "tools/call", params)
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    assert [(event["params"]["progressToken"], event["params"]["progress"]) for event in events[:-1]] == [
        ("mine", number) for number in (1, 2, 3)
    ]
    assert events[-1]["result"]["structuredContent"] == {"result": "done"}


async def test_a_client_of_either_era_is_served(gateway):
    rollout = gateway.control.open(dedicated(gateway, over_stdio(OFFICIAL, "stdio")))
    meta = {"progressToken": 7}
    answer = await gateway.modern(
        f"/r/{rollout}/mcp", "tools/call", {"name": "steps", "arguments": {"number": 2}}, meta=meta
    )
    assert answer.status == 200
    assert answer.body.count(b'"progressToken":7') == 2
    answer = await gateway.modern(f"/r/{rollout}/mcp", "server/discover")
    assert answer.json["result"]["instructions"] == "Count and echo."


async def test_a_tools_own_error_is_a_result(gateway):
    rollout = gateway.control.open(dedicated(gateway, over_stdio(OFFICIAL, "stdio")))
    answer = await gateway.call(rollout, "broken")
    assert answer.json["result"]["isError"] is True
    (entry,) = gateway.control.journal
    assert entry.is_error


async def test_a_repeated_key_is_answered_from_the_journal(gateway):
    rollout = gateway.control.open(dedicated(gateway, over_stdio(OFFICIAL, "stdio")))
    answers = [await gateway.call(rollout, "count", {"name": "k"}, idempotency_key="once") for _ in range(2)]
    assert answers[0].json["result"] == answers[1].json["result"]
    assert (await gateway.call(rollout, "count", {"name": "k"})).json["result"]["structuredContent"] == {"result": 2}


async def test_the_list_is_asked_for_once_and_starts_no_further_process(gateway):
    view = dedicated(gateway, over_stdio(OFFICIAL, "stdio"))
    first = await gateway.rpc(gateway.control.open(view), "tools/list")
    others = [await gateway.rpc(gateway.control.open(view), "tools/list") for _ in range(3)]
    assert all(answer.json["result"] == first.json["result"] for answer in others)
    assert len(processes(gateway)) == 1


async def test_a_request_without_a_rollout_is_told_to_open_one(gateway):
    view = dedicated(gateway, over_stdio(OFFICIAL, "stdio"))
    answer = await gateway.modern(f"/e/{view.name}/mcp", "tools/list")
    assert (answer.status, answer.code) == (400, "rollout_required")


async def test_large_arguments_and_results_pass_through_pipes(gateway):
    rollout = hostile(gateway)
    value = "x" * 900_000
    assert await said(gateway, rollout, "echo", {"value": value}) == value


async def test_line_ends_between_arguments_do_not_break_the_framing(gateway):
    rollout = hostile(gateway)
    body = (
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"newlines","arguments":{\r\n"a"\n:\r"\\n"\n}}}'
    )
    answer = await gateway.post(f"/r/{rollout}/mcp", body)
    assert json.loads(answer.json["result"]["content"][0]["text"]) == {"a": "\n"}


# Enemies


async def test_garbage_on_stdout_is_logged_and_harms_nothing(gateway, caplog):
    caplog.set_level(logging.INFO)
    rollout = hostile(gateway, "--noisy")
    assert await said(gateway, rollout, "garbage") == "clean"
    for text in ("Welcome to the hostile server!", "Hello!", "[INFO] ready", '{"level":"info"}'):
        assert any(text in record.getMessage() for record in caplog.records), text


async def test_a_death_in_mid_call_is_told_with_its_last_words_and_never_run_again(gateway):
    rollout = hostile(gateway)
    pid = await said(gateway, rollout, "pid")
    waiting = asyncio.create_task(gateway.call(rollout, "sleep", {"seconds": 10}))
    await until(lambda: len(gateway.control.journal) == 2)
    answer = await gateway.call(rollout, "die", {"cause": "boredom"}, idempotency_key="k")
    assert (answer.status, answer.code) == (502, "tool_server_lost")
    assert "I die of boredom" in answer.json["error"]["data"]["hint"]
    assert (await waiting).code == "tool_server_lost"
    again = await gateway.call(rollout, "die", {"cause": "boredom"}, idempotency_key="k")
    assert again.json["error"] == answer.json["error"]
    assert await said(gateway, rollout, "pid") != pid


async def test_a_call_that_ignores_its_cancellation_is_killed_before_it_is_reported(gateway, tmp_path):
    rollout = hostile(gateway, timeout=1.5)
    file = tmp_path / "beats"
    started = time.monotonic()
    answer = await gateway.call(rollout, "ignore", {"path": str(file)})
    assert (answer.status, answer.code) == (504, "deadline_exceeded")
    assert 1.4 < time.monotonic() - started < 20
    beats = len(file.read_text())
    assert await said(gateway, rollout, "echo", {"value": "back"}) == "back"
    await asyncio.sleep(1.2)
    assert len(file.read_text()) == beats


async def test_a_call_that_heeds_its_cancellation_keeps_its_process(gateway):
    rollout = hostile(gateway, timeout=1.5)
    pid = await said(gateway, rollout, "pid")
    answer = await gateway.call(rollout, "sleep", {"seconds": 60})
    assert answer.code == "deadline_exceeded"
    assert await said(gateway, rollout, "pid") == pid


async def test_an_agent_that_leaves_cancels_its_call(gateway):
    rollout = hostile(gateway)
    pid = await said(gateway, rollout, "pid")
    message = {
        "jsonrpc": "2.0",
        "id": 9,
        "method": "tools/call",
        "params": {"name": "sleep", "arguments": {"seconds": 60}},
    }
    call = asyncio.create_task(gateway.post(f"/r/{rollout}/mcp", message))
    await until(lambda: len(gateway.control.journal) == 2)
    notice = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 9}}
    await gateway.post(f"/r/{rollout}/mcp", notice)
    assert (await call).code == "cancelled"
    entry = gateway.control.journal[1]
    assert json.loads(entry.result)["_meta"][wire.ERROR_KEY]["data"]["code"] == "cancelled"
    assert await said(gateway, rollout, "pid") == pid


@pytest.mark.parametrize("stdout", [False, True])
async def test_a_flood_of_output_costs_the_others_nothing(gateway, stdout):
    loud, quiet = hostile(gateway), hostile(gateway)
    await said(gateway, quiet, "echo", {"value": "x"})
    await said(gateway, loud, "echo", {"value": "x"})
    spent = psutil.Process().cpu_times()
    flood = asyncio.create_task(gateway.call(loud, "loud", {"seconds": 3, "stdout": stdout}))
    slowest = 0.0
    for _ in range(20):
        started = time.monotonic()
        await said(gateway, quiet, "echo", {"value": "x"})
        slowest = max(slowest, time.monotonic() - started)
        await asyncio.sleep(0.1)
    assert slowest < 1.0
    assert "result" in (await flood).json
    now = psutil.Process().cpu_times()
    assert now.user + now.system - spent.user - spent.system < 2.5


@pytest.mark.parametrize("tool", ["huge", "huge_last"])
async def test_a_line_over_the_bound_ends_its_own_call_only(gateway, tool):
    rollout = hostile(gateway)
    other = asyncio.create_task(gateway.call(rollout, "sleep", {"seconds": 1}))
    await until(lambda: len(gateway.control.journal) == 1)
    answer = await gateway.call(rollout, tool, {"bytes": 3_000_000})
    assert (answer.status, answer.code) == (502, "result_too_large")
    assert "result" in (await other).json
    assert await said(gateway, rollout, "echo", {"value": "fine"}) == "fine"


async def test_a_grandchild_that_holds_the_pipe_does_not_hold_the_call(gateway):
    rollout = hostile(gateway)
    before = set(psutil.process_iter())
    started = time.monotonic()
    answer = await gateway.call(rollout, "orphan")
    assert (answer.status, answer.code) == (502, "tool_server_lost")
    assert time.monotonic() - started < 30
    assert await said(gateway, rollout, "echo", {"value": "next"}) == "next"
    kill_orphans(before)


async def test_answers_that_are_no_answers_are_a_bad_gateway(gateway):
    rollout = hostile(gateway)
    answer = await gateway.call(rollout, "odd")
    assert (answer.status, answer.code) == (502, "tool_server_protocol")
    answer = await gateway.call(rollout, "null")
    assert answer.json["error"]["message"] == "I can't read that"
    assert (await gateway.call(rollout, "batch")).json["result"] == {"content": []}


async def test_a_flood_of_progress_ends_in_the_result(gateway):
    rollout = hostile(gateway)
    params = {"name": "progress", "arguments": {"steps": 500}, "_meta": {"progressToken": "p"}}
    answer = await gateway.rpc(rollout, "tools/call", params)
    assert b'"text": "done"' in answer.body or b'"text":"done"' in answer.body
    assert b"foreign" not in answer.body


async def test_what_a_server_asks_of_its_client_is_answered_or_refused(gateway):
    rollout = hostile(gateway)
    assert json.loads(await said(gateway, rollout, "ask")) == [
        ["ping", True, None],
        ["sampling/createMessage", False, -32601],
        ["elicitation/create", False, -32601],
        ["roots/list", False, -32601],
    ]


async def test_a_changed_list_is_asked_for_again(gateway):
    view = dedicated(gateway, over_stdio(HOSTILE))
    rollout = gateway.control.open(view)
    assert (await gateway.call(rollout, "novel")).code == "unknown_tool"
    await said(gateway, rollout, "change", {"name": "novel"})
    assert await said(gateway, rollout, "novel", {"a": 1}) == '{"a": 1}'
    answer = await gateway.rpc(gateway.control.open(view), "tools/list")
    assert "novel" in [tool["name"] for tool in answer.json["result"]["tools"]]


async def test_a_server_that_reads_nothing_blocks_only_itself(gateway):
    deaf, other = hostile(gateway, timeout=1.5), hostile(gateway)
    await said(gateway, deaf, "deaf")
    value = "x" * 400_000
    calls = [gateway.call(deaf, "echo", {"value": value}) for _ in range(4)]
    waiting = asyncio.gather(*calls)
    assert await said(gateway, other, "echo", {"value": "x"}) == "x"
    for answer in await waiting:
        assert answer.code in ("deadline_exceeded", "tool_server_lost")
    assert await said(gateway, deaf, "echo", {"value": "awake"}) == "awake"


async def test_a_server_that_closes_its_output_is_replaced(gateway):
    rollout = hostile(gateway)
    assert (await gateway.call(rollout, "shut")).code == "tool_server_lost"
    assert await said(gateway, rollout, "echo", {"value": "x"}) == "x"


async def test_a_server_of_the_new_era_alone_is_spoken_to_in_its_own_words(gateway):
    rollout = hostile(gateway, "--modern")
    assert await said(gateway, rollout, "echo", {"value": "x"}) == "x"
    answer = await gateway.rpc(rollout, "initialize", {"protocolVersion": "2025-11-25"})
    assert answer.json["result"]["instructions"] == "New."


@pytest.mark.parametrize(
    ("option", "code", "text"),
    [
        ("--die", "tool_server_start_failed", "I die at once; my password is ***"),
        ("--refuse", "tool_server_protocol", "refuses MCP's handshake: No."),
        ("--mute", "tool_server_start_timeout", "was not ready in 2 s"),
    ],
)
async def test_a_start_that_fails_says_why(serve, option, code, text):
    async with serve(Limits(start_timeout_s=2.0, grace_s=0.3)) as gateway:
        target = over_stdio(HOSTILE, option, secrets=("hunter2",))
        answer = await gateway.call(gateway.control.open(dedicated(gateway, target)), "echo")
        assert answer.code == code
        assert text in answer.json["error"]["message"]


async def test_a_command_that_is_not_there_is_named(gateway):
    target = StdioTarget(("no-such-command-anywhere",))
    answer = await gateway.call(gateway.control.open(dedicated(gateway, target)), "echo")
    assert answer.code == "tool_server_start_failed"
    assert "no-such-command-anywhere can't be run: No such file or directory" in answer.json["error"]["message"]


async def test_a_server_that_keeps_failing_is_left_alone_for_a_while(gateway):
    rollout = hostile(gateway, "--die")
    codes = [(await gateway.call(rollout, "echo")).code for _ in range(6)]
    assert codes[0] == "tool_server_start_failed"
    assert codes[-1] == "tool_server_unavailable"


async def test_secrets_of_the_gateway_are_not_inherited_and_the_targets_own_are_not_logged(
    gateway, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("MEGAMCP_API_KEY", "the-key")
    target = over_stdio(HOSTILE, environ={"DATABASE_URL": "postgresql://u:hunter2@h/d"}, secrets=("hunter2",))
    rollout = gateway.control.open(dedicated(gateway, target))
    environ = json.loads(await said(gateway, rollout, "environ"))
    assert environ["DATABASE_URL"] == "postgresql://u:hunter2@h/d"
    assert "the-key" not in environ.values()
    answer = await gateway.call(rollout, "die", {"cause": "hunter2"})
    assert "I die of ***" in answer.json["error"]["data"]["hint"]
    assert not any("hunter2" in record.getMessage() for record in caplog.records)


# Lives of processes


async def test_a_process_that_is_idle_is_stopped_and_comes_back(serve):
    async with serve(Limits(dedicated_idle_s=0.5, grace_s=0.3)) as gateway:
        rollout = hostile(gateway, "--stubborn")
        pid = int(await said(gateway, rollout, "pid"))
        await said(gateway, rollout, "sleep", {"seconds": 1.0})
        assert int(await said(gateway, rollout, "pid")) == pid
        await until(lambda: len(processes(gateway)) == 0)
        assert not psutil.pid_exists(pid)
        assert int(await said(gateway, rollout, "pid")) != pid


async def test_the_least_recently_used_process_makes_room(gateway):
    rollouts = [hostile(gateway) for _ in range(4)]
    pids = [await said(gateway, rollout, "pid") for rollout in rollouts[:3]]
    await said(gateway, rollouts[0], "echo")
    await said(gateway, rollouts[3], "pid")
    assert len(processes(gateway)) == 3
    assert await said(gateway, rollouts[0], "pid") == pids[0]
    assert not psutil.pid_exists(int(pids[1]))


async def test_busy_processes_are_not_displaced(gateway):
    busy = [hostile(gateway) for _ in range(3)]
    calls = [asyncio.create_task(gateway.call(rollout, "sleep", {"seconds": 2})) for rollout in busy]
    await until(lambda: len(gateway.control.journal) == 3)
    answer = await gateway.call(hostile(gateway), "echo")
    assert (answer.status, answer.code) == (429, "dedicated_capacity")
    assert all("result" in answer.json for answer in await asyncio.gather(*calls))


async def test_a_call_that_found_no_place_was_not_run_and_its_key_is_free(gateway):
    view = dedicated(gateway, over_stdio(HOSTILE))
    await gateway.rpc(gateway.control.open(view), "tools/list")  # so that a call needs nothing but its process
    busy, late = [gateway.control.open(view) for _ in range(3)], gateway.control.open(view)
    calls = [asyncio.create_task(gateway.call(rollout, "sleep", {"seconds": 2})) for rollout in busy]
    await until(lambda: len(gateway.control.journal) == 3)
    answer = await gateway.call(late, "echo", {"value": "x"}, idempotency_key="k")
    assert (answer.status, answer.code) == (429, "dedicated_capacity")
    assert len(gateway.control.journal) == 3
    await asyncio.gather(*calls)
    assert await said(gateway, late, "echo", {"value": "x"}, idempotency_key="k") == "x"


async def test_many_rollouts_share_few_places(gateway):
    view = dedicated(gateway, over_stdio(HOSTILE))
    await gateway.rpc(gateway.control.open(view), "tools/list")
    rollouts = [gateway.control.open(view) for _ in range(12)]
    pending = set(rollouts)
    for _ in range(20):
        answers = await asyncio.gather(*(gateway.call(rollout, "echo", {"value": rollout}) for rollout in pending))
        for answer in answers:
            if "result" in answer.json:
                pending.discard(answer.json["result"]["content"][0]["text"])
            else:
                assert answer.code == "dedicated_capacity"
        if not pending:
            break
    assert not pending
    assert len(processes(gateway)) <= 3


async def test_a_target_that_changed_gets_another_process_and_an_older_one_is_refused(gateway):
    options, generation = (), 1
    view = dedicated(gateway, lambda rollout: over_stdio(HOSTILE, *options, generation=generation))
    rollout = gateway.control.open(view)
    first = await said(gateway, rollout, "pid")
    assert await said(gateway, rollout, "pid") == first
    options, generation = ("--noisy",), 2
    second = await said(gateway, rollout, "pid")
    assert second != first
    assert not psutil.pid_exists(int(first))
    options, generation = (), 1
    answer = await gateway.call(rollout, "pid")
    assert (answer.status, answer.code) == (409, "rolled_back")
    options, generation = ("--noisy",), 2
    assert await said(gateway, rollout, "pid") == second


def of_epoch(rollout):
    return over_stdio(HOSTILE, generation=rollout.epoch)


@pytest.mark.parametrize("restart", [False, True])
async def test_a_rollback_keeps_an_idle_process_unless_its_server_can_not_be_kept(gateway, restart):
    rollout = gateway.control.open(dedicated(gateway, of_epoch, restart_on_move=restart))
    pid = int(await said(gateway, rollout, "pid"))
    gateway.control.roll_back(rollout)
    await gateway.plane.interrupt(rollout)
    await gateway.plane.moved(rollout, 2)
    assert psutil.pid_exists(pid) is not restart
    now = int(await said(gateway, rollout, "pid"))
    assert (now == pid) is not restart
    await gateway.plane.moved(rollout, 2)  # told late: the process is of this epoch already
    assert int(await said(gateway, rollout, "pid")) == now


@pytest.mark.parametrize("told", ["before", "after", "never"])
async def test_a_call_of_before_a_rollback_ends_with_its_process(gateway, told):
    view = dedicated(gateway, of_epoch)
    rollout, other = gateway.control.open(view), gateway.control.open(view)
    pids = [int(await said(gateway, each, "pid")) for each in (rollout, other)]
    call = asyncio.create_task(gateway.call(rollout, "sleep", {"seconds": 10}))
    await until(lambda: len(gateway.control.journal) == 3)
    if told == "before":
        await gateway.plane.interrupt(rollout)
    gateway.control.roll_back(rollout)
    if told == "after":
        await gateway.plane.moved(rollout, 2)
    if told == "never":  # another gateway process has moved it: the next call finds out
        assert await said(gateway, rollout, "pid") != str(pids[0])
    assert not psutil.pid_exists(pids[0])
    assert psutil.pid_exists(pids[1])
    assert (await call).code == "tool_server_lost"


async def test_the_end_of_a_rollout_is_the_end_of_its_process(gateway):
    rollout = hostile(gateway, "--stubborn")
    pid = int(await said(gateway, rollout, "pid"))
    gateway.control.release(rollout)
    await gateway.plane.moved(rollout, None)
    assert not psutil.pid_exists(pid)
    assert len(processes(gateway)) == 0
    assert (await gateway.call(rollout, "pid")).status == 410


async def test_a_stop_during_the_start_is_no_cancellation_of_the_call(gateway):
    view = dedicated(gateway, over_stdio(HOSTILE, "--mute"), restart_on_move=True)
    rollout = gateway.control.open(view)
    call = asyncio.create_task(gateway.rpc(rollout, "tools/list"))
    await until(lambda: len(processes(gateway)) == 1)
    gateway.control.targets[view.servers[0].name] = lambda _: over_stdio(HOSTILE, generation=2)
    await gateway.plane.moved(rollout, 2)
    assert "result" in (await call).json


async def test_dedicated_processes_end_with_the_gateway(serve):
    async with serve(LIMITS) as gateway:
        rollouts = [hostile(gateway, "--stubborn"), hostile(gateway)]
        pids = [int(await said(gateway, rollout, "pid")) for rollout in rollouts]
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_deaths_are_seen_at_once_on_the_gateways_own_event_loop(tmp_path):
    script = tmp_path / "gateway.py"
    script.write_text(
        "import asyncio, sys, time, uvloop\n"
        "from megamcp.dataplane.piped import StdioChild\n"
        "from megamcp.dataplane.ports import Limits, StdioTarget\n"
        "from megamcp.dataplane.protocol import ToolCall, UpstreamLost\n"
        "async def main():\n"
        f"    child = StdioChild('c', StdioTarget((sys.executable, {HOSTILE!r})), Limits())\n"
        "    for tool in ('shut', 'orphan', 'die'):\n"
        "        client = await child.upstream()\n"
        "        started = time.monotonic()\n"
        "        try:\n"
        "            await asyncio.wait_for(client.call(ToolCall(tool, b'{}')), 10)\n"
        "        except UpstreamLost:\n"
        "            print(tool, time.monotonic() - started < 3, flush=True)\n"
        "        await child.end()\n"
        "    await child.aclose()\n"
        "uvloop.run(main())\n"
    )
    before = set(psutil.process_iter())
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    said_all, _ = await gateway.communicate()
    assert said_all.decode().split() == ["shut", "True", "orphan", "True", "die", "True"]
    kill_orphans(before)


async def test_a_killed_gateway_leaves_no_dedicated_process(tmp_path):
    script = tmp_path / "gateway.py"
    script.write_text(
        "import asyncio, sys\n"
        "from megamcp.dataplane.piped import StdioChild\n"
        "from megamcp.dataplane.ports import Limits, StdioTarget\n"
        "async def main():\n"
        f"    child = StdioChild('c', StdioTarget((sys.executable, {HOSTILE!r}, '--stubborn')), Limits())\n"
        "    print((await child.ready()).process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    gateway = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    pid = int(await gateway.stdout.readline())
    gateway.kill()
    await gateway.wait()
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
