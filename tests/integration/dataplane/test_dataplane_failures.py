"""What goes wrong with a tool server, and what is said and recorded about it."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megamcp.dataplane import wire
from megamcp.dataplane.ports import Limits, Recorded, ServerView, UrlTarget

IMPATIENT = Limits(call_timeout_s=1.0, grace_s=0.4, probe_s=0.6, start_timeout_s=15.0, connect_timeout_s=0.5)


@pytest.fixture
async def own(serve):
    """A gateway of the test's own, whose calls have one second."""
    async with serve(IMPATIENT) as running:
        yield running


def entries(gateway, rollout):
    return [entry for entry in gateway.control.journal if entry.rollout == rollout]


async def warm(gateway, view):
    """Starts the view's servers, so that a test's deadline is not spent on that."""
    answer = await gateway.rpc(gateway.control.open(view), "tools/list")
    assert "result" in answer.json


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


async def test_a_call_past_its_deadline_is_ended_and_recorded(own, make_child):
    view = own.environment(ServerView("shop", make_child(), exactly_once=True))
    await warm(own, view)
    rollout = own.control.open(view)
    started = time.monotonic()
    answer = await own.call(rollout, "slow", {"name": "a", "seconds": 30})
    assert time.monotonic() - started < 20
    assert (answer.status, answer.code) == (504, "deadline_exceeded")
    (entry,) = entries(own, rollout)
    assert entry.is_error
    assert json.loads(entry.result)["_meta"][wire.ERROR_KEY]["data"]["code"] == "deadline_exceeded"
    # The server is alive, so it was not killed, and the tool noticed.
    answer = await own.call(own.control.open(view), "peek", {"name": "a.cancelled"})
    assert answer.json["result"]["structuredContent"] == {"result": 1}


async def test_a_result_committed_before_the_deadline_is_the_answer(own, make_child):
    view = own.environment(ServerView("shop", make_child(), exactly_once=True))
    await warm(own, view)
    call = asyncio.create_task(own.call(own.control.open(view), "slow", {"name": "a", "seconds": 30}))
    await until(lambda: own.control.handles)
    (handle,) = own.control.handles.values()
    handle.recorded = Recorded(b'{"content": [], "structuredContent" :  {"committed": true}}', False)
    answer = await call
    assert answer.status == 200
    assert b'"result":{"content": [], "structuredContent" :  {"committed": true}}' in answer.body


async def test_a_server_that_blocks_is_killed_and_the_others_calls_are_run_again(own, make_child):
    view = own.environment(ServerView("shop", make_child(), exactly_once=True))
    await warm(own, view)
    culprit, bystander = own.control.open(view), own.control.open(view)
    first = (await own.call(bystander, "pid")).json["result"]["structuredContent"]["result"]
    blocked = asyncio.create_task(own.call(culprit, "block", {"seconds": 60}))
    await asyncio.sleep(0.6)
    answer = await own.call(bystander, "echo", {"value": "still here"})
    assert (await blocked).code == "deadline_exceeded"
    # The bystander's own second may end before the successor is up; then it is told so, and the next call works.
    assert "result" in answer.json or answer.code in ("deadline_exceeded", "tool_server_lost")
    for _ in range(20):
        answer = await own.call(bystander, "pid")
        if "result" in answer.json:
            break
    assert answer.json["result"]["structuredContent"]["result"] != first


async def test_a_call_that_kills_its_server_without_effect_is_run_again(gateway, make_child, tmp_path):
    view = gateway.environment(ServerView("shop", make_child(), exactly_once=True))
    rollout = gateway.control.open(view)
    answer = await gateway.call(rollout, "crash", {"path": str(tmp_path / "once")})
    assert answer.json["result"]["structuredContent"] == {"result": "survived"}
    handles = [handle for handle in gateway.control.handles.values() if handle.rollout == rollout]
    assert [handle.dead for handle in handles] == [True, False]
    assert entries(gateway, rollout) == []


async def test_a_call_that_kills_its_server_twice_is_an_error(gateway, make_child):
    view = gateway.environment(ServerView("shop", make_child(), exactly_once=True))
    rollout = gateway.control.open(view)
    await gateway.call(rollout, "pid")
    server = gateway.plane._environments.of(view).links["shop"].way(None)

    async def killer():
        for _ in range(2):
            await until(lambda: server.child.pid)
            pid = server.child.pid
            await asyncio.sleep(0.3)
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: server.child.pid != pid)

    kill = asyncio.create_task(killer())
    answer = await gateway.call(rollout, "slow", {"name": "x", "seconds": 10})
    await kill
    assert (answer.status, answer.code) == (502, "tool_server_lost")
    (entry,) = entries(gateway, rollout)
    assert entry.is_error


async def test_at_most_once_a_cut_off_call_is_never_run_again(gateway, make_child, tmp_path):
    view = gateway.environment(ServerView("plain", make_child(), exactly_once=False))
    rollout = gateway.control.open(view)
    marker = tmp_path / "once"
    answer = await gateway.call(rollout, "crash", {"path": str(marker)}, idempotency_key="k")
    assert (answer.status, answer.code) == (502, "tool_server_lost")
    assert marker.exists()
    again = await gateway.call(rollout, "crash", {"path": str(marker)}, idempotency_key="k")
    assert again.json["error"] == answer.json["error"]
    assert len(entries(gateway, rollout)) == 1


async def test_a_repeated_key_gets_the_recorded_result_byte_for_byte(gateway, make_child):
    view = gateway.environment(ServerView("plain", make_child(), exactly_once=False))
    rollout = gateway.control.open(view)
    first = await gateway.call(rollout, "count", {"name": "r"}, idempotency_key="k")
    meta = {"io.megamcp/idempotency-key": "k"}
    second = await gateway.rpc(rollout, "tools/call", {"name": "count", "arguments": {"name": "r"}, "_meta": meta})
    assert first.json["result"] == second.json["result"]
    assert first.json["result"]["structuredContent"] == {"result": 1}
    other = await gateway.call(rollout, "count", {"name": "other"}, idempotency_key="k")
    assert other.code == "idempotency_key_reused"
    both = await gateway.rpc(
        rollout,
        "tools/call",
        {"name": "count", "arguments": {"name": "r"}, "_meta": meta},
        idempotency_key="another",
    )
    assert both.code == "bad_idempotency_key"


async def test_a_server_that_can_not_start_says_why_and_waits_longer_each_time(gateway, make_child):
    rollout = gateway.open(ServerView("dead", make_child("--die"), exactly_once=True))
    answer = await gateway.call(rollout, "echo", {"value": "x"})
    assert (answer.status, answer.code) == (502, "tool_server_start_failed")
    assert "I die at once" in answer.json["error"]["message"]
    for _ in range(5):
        answer = await gateway.call(rollout, "echo", {"value": "x"})
        if answer.code == "tool_server_unavailable":
            break
    assert answer.code == "tool_server_unavailable"
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_dead_server_harms_only_its_own_tools(gateway, make_child):
    rollout = gateway.open(
        ServerView("good", make_child(), exactly_once=True),
        ServerView("bad", make_child("--die"), exactly_once=True),
    )
    answer = await gateway.call(rollout, "good__echo", {"value": "x"})
    assert answer.json["result"]["structuredContent"] == {"result": "x"}
    assert (await gateway.call(rollout, "bad__echo", {"value": "x"})).status == 502
    # A list without some of its tools would be another environment.
    assert (await gateway.rpc(rollout, "tools/list")).status == 502


async def test_an_unreachable_server_is_a_bad_gateway(own):
    rollout = own.open(ServerView("gone", UrlTarget("http://127.0.0.1:9/mcp"), exactly_once=False))
    answer = await own.call(rollout, "echo", {"value": "x"})
    assert (answer.status, answer.code) == (502, "tool_server_unreachable")


async def test_an_address_that_can_not_be_used_is_a_bad_gateway(own):
    for target in (UrlTarget("ftp://x/mcp"), UrlTarget("http://127.0.0.1:9/mcp", {"A": "b\r\nC: d"})):
        answer = await own.call(own.open(ServerView("odd", target, exactly_once=False)), "echo", {"value": "x"})
        assert (answer.status, answer.code) == (502, "bad_server_address")


async def test_while_the_database_is_away_calls_are_503_and_then_work_again(gateway, shared):
    rollout = gateway.control.open(shared)
    gateway.control.away = True
    try:
        answer = await gateway.call(rollout, "echo", {"value": "x"})
        assert (answer.status, answer.code) == (503, "unavailable")
        assert answer.headers["retry-after"] == "1"
    finally:
        gateway.control.away = False
    assert (await gateway.call(rollout, "echo", {"value": "x"})).status == 200


async def test_an_outcome_that_can_not_be_recorded_is_not_acknowledged(gateway, make_child):
    rollout = gateway.open(ServerView("plain", make_child(), exactly_once=False))
    await gateway.call(rollout, "pid")
    call = asyncio.create_task(gateway.call(rollout, "slow", {"name": "u", "seconds": 0.3}))
    await until(lambda: len(entries(gateway, rollout)) == 2)
    gateway.control.away = True
    try:
        assert (await call).code == "unavailable"
    finally:
        gateway.control.away = False


async def test_the_children_end_with_the_gateway(serve, make_child):
    async with serve(IMPATIENT) as running:
        view = running.environment(ServerView("shop", make_child(), exactly_once=True))
        await warm(running, view)
        pid = running.plane._environments.of(view).links["shop"].way(None).child.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_writers_of_a_rollout_take_turns_and_readers_do_not(gateway, shared):
    rollout = gateway.control.open(shared)
    started = time.monotonic()
    await asyncio.gather(*(gateway.call(rollout, "peek", {"name": "t", "seconds": 1.0}) for _ in range(8)))
    assert time.monotonic() - started < 6  # 8 one after another
    started = time.monotonic()
    await asyncio.gather(*(gateway.call(rollout, "slow", {"name": "t", "seconds": 0.1}) for _ in range(4)))
    assert time.monotonic() - started > 0.4
    assert len(gateway.plane._calls._gates) == 0


async def test_a_full_queue_is_429(serve, make_child):
    async with serve(Limits(waiting_per_rollout=2, call_timeout_s=20)) as running:
        view = running.environment(ServerView("shop", make_child(), exactly_once=True))
        await warm(running, view)
        rollout = running.control.open(view)
        calls = [asyncio.create_task(running.call(rollout, "slow", {"name": "q", "seconds": 0.3})) for _ in range(5)]
        answers = await asyncio.gather(*calls)
        assert sorted(answer.status for answer in answers) == [200, 200, 200, 429, 429]
        refused = next(answer for answer in answers if answer.status == 429)
        assert refused.code == "rollout_busy"
        assert refused.headers["retry-after"] == "1"
        # In a session of the older era the status would break the client's connection.
        calls = [
            asyncio.create_task(
                running.call(rollout, "slow", {"name": "q", "seconds": 0.3}, mcp_session_id=f"{rollout}.s")
            )
            for _ in range(5)
        ]
        answers = await asyncio.gather(*calls)
        assert {answer.status for answer in answers} == {200}
        assert sum("error" in answer.json for answer in answers) == 2


async def test_a_healthy_server_with_all_its_connections_busy_is_not_killed(serve, make_child):
    limits = Limits(call_timeout_s=1.0, probe_s=0.6, connections_per_server=1)
    async with serve(limits) as running:
        view = running.environment(ServerView("shop", make_child(), exactly_once=True))
        await warm(running, view)
        server = running.plane._environments.of(view).links["shop"].way(None)
        pid = server.child.pid
        calls = [running.call(running.control.open(view), "slow", {"name": "b", "seconds": 9}) for _ in range(3)]
        assert {answer.code for answer in await asyncio.gather(*calls)} == {"deadline_exceeded"}
        await asyncio.sleep(0.8)
        assert server.child.pid == pid


@pytest.mark.parametrize("blocked", [False, True])
async def test_a_killed_gateway_leaves_no_child_behind(tmp_path, blocked):
    script = tmp_path / "gateway.py"
    script.write_text(
        "import asyncio, sys\n"
        "from megamcp.dataplane.children import SocketChild, SocketFolder\n"
        "from megamcp.dataplane.ports import SOCKET, ChildTarget, Limits\n"
        "CODE = 'import os, socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen();'\n"
        f"CODE += {'time.sleep(600)' if blocked else 'sys.stdin.read()'!r}\n"
        "async def main():\n"
        "    target = ChildTarget((sys.executable, '-c', CODE, SOCKET))\n"
        "    child = SocketChild('c', target, SocketFolder(), Limits())\n"
        "    print((await child.ready()).process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    gateway = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        stdout=asyncio.subprocess.PIPE,
        cwd=os.getcwd(),
        env={**os.environ, "PYTHONPATH": "."},
    )
    pid = int(await gateway.stdout.readline())
    gateway.kill()
    await gateway.wait()

    def gone():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    await until(gone)


async def test_a_server_that_is_not_mcp_is_a_bad_gateway(own):
    async def nonsense(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %b\r\nconnection: close\r\n\r\n%b" % (status, body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    try:
        for status, body in [
            (b"404 Not Found\r\ncontent-type: text/html", b"<html>"),
            (b"404 Not Found\r\ncontent-type: application/json", b'{"detail":"no"}'),
            (b"200 OK\r\ncontent-type: application/json", b"nonsense"),
            (b"200 OK\r\ncontent-type: application/json", b'{"jsonrpc":"2.0","id":0,"result":5}'),
            (b"200 OK\r\ncontent-type: text/event-stream", b"data: nonsense\n\n"),
            (b"200 OK\r\ncontent-type: text/event-stream", b""),
            (b"307 Elsewhere\r\nlocation: /other", b""),
            (b"garbage", b""),
        ]:
            rollout = own.open(ServerView("odd", UrlTarget(url), exactly_once=False))
            answer = await own.call(rollout, "echo", {"value": "x"})
            assert answer.status == 502, (status, body, answer.body)
            assert answer.code in ("tool_server_protocol", "tool_server_lost")
    finally:
        server.close()
        await server.wait_closed()
