"""Bad arguments and bad tools: each a clear error of a documented shape, nothing lost or leaked, nobody else concerned.

While each test runs, a bystander of the same gateway and the same tool server goes on calling; after it, no lock is
held, no journal row is left running and no call is in flight (`conftest.py`).
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import SecretStr

from megamcp.app import prepare
from megamcp.postgres import EmbeddedPostgres
from megamcp.settings import Settings
from megamcp.testing import running_gateway
from tests.integration.bad_input.cases import JSON, OPERATIONS
from tests.integration.conftest import LEDGER
from tests.integration.promises.world import World
from tests.integration.rest import Rest, problem, rpc_error

# -- arguments, keys and carriers ---------------------------------------------------------------------------------

WRONG_ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"key": "k"},
    {"key": 1, "value": "v"},
    {"key": "k", "value": None},
    {"key": "k", "value": "v", "extra": 1},
    {"key": ["k"], "value": {"a": "v"}},
]


@pytest.mark.parametrize("arguments", WRONG_ARGUMENTS, ids=str)
async def test_arguments_that_break_the_schema_are_a_recorded_tool_error(rest: Rest, arguments: dict[str, Any]) -> None:
    rollout = await rest.open()
    digest = await rest.digest(rollout)
    result = await rest.failed(rollout, "put", **arguments)
    assert result["structuredContent"]["code"] == "invalid_arguments"
    for modern in (False, True):
        answer = await rest.mcp_call(rollout, "put", modern=modern, **arguments)
        assert answer.json()["result"]["isError"] is True
    assert [(call["is_error"], call["arguments"]) for call in await rest.calls(rollout)] == [(True, arguments)] * 3
    assert await rest.digest(rollout) == digest
    await rest.call(rollout, "put", key="k", value="v")


@pytest.mark.parametrize("text", ["a\0b", "\0"], ids=["inside", "alone"])
async def test_a_nul_that_a_tool_would_store_is_its_own_error(rest: Rest, text: str) -> None:
    rollout = await rest.open()
    for tool, arguments in [("put", {"key": text, "value": "v"}), ("put", {"key": "k", "value": text})]:
        assert "22021" in json.dumps(await rest.failed(rollout, tool, **arguments))
        answer = await rest.mcp_call(rollout, tool, modern=False, **arguments)
        assert answer.json()["result"]["isError"] is True
    assert [call["arguments"]["key"] for call in await rest.calls(rollout)] == [text, text, "k", "k"]
    assert await rest.items(rollout) == {}


async def test_a_lone_surrogate_is_no_text(rest: Rest) -> None:
    rollout = await rest.open()
    raw = b'{"tool":"put","arguments":{"key":"\\ud800","value":"v"}}'
    problem(await rest.http.post(f"/v1/rollouts/{rollout}/call", content=raw, headers=JSON), 400, "invalid_json")
    message = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"put","arguments":%b}}'
    for arguments in (b'{"key":"\\ud800","value":"v"}', b'{"key":"k","value":"\\udc00\\ud800"}'):
        answer = await rest.http.post(f"/r/{rollout}/mcp", content=message % arguments, headers=JSON)
        document = answer.json()
        assert "error" in document or document["result"]["isError"], document
        assert answer.status_code < 500
    assert await rest.items(rollout) == {}
    await rest.call(rollout, "put", key="😀", value="größe")
    assert await rest.items(rollout) == {"😀": "größe"}


@pytest.mark.parametrize("by", [2**31, 2**63, 10**30, -(10**30)])
async def test_a_number_that_no_column_holds_is_the_tools_error(rest: Rest, by: int) -> None:
    rollout = await rest.open()
    await rest.failed(rollout, "increment", owner="owner-1", by=by)
    assert (await rest.calls(rollout))[0]["arguments"]["by"] == by
    assert await rest.call(rollout, "increment", owner="owner-1") == 101


async def test_idempotency_keys_have_bounds_and_one_meaning(rest: Rest) -> None:
    rollout = await rest.open()
    call = {"tool": "book", "arguments": {"account_id": 1, "amount": 1}}
    path = f"/v1/rollouts/{rollout}/call"
    for key in ("é" * 300, "a\0b"):
        await rest.refused(400, "bad_idempotency_key", "POST", path, {**call, "idempotency_key": key})
        answer = await rest.mcp(
            rollout,
            "tools/call",
            {"name": "book", "arguments": call["arguments"], "_meta": {"io.megamcp/idempotency-key": key}},
        )
        rpc_error(answer, "bad_idempotency_key")
    await rest.refused(
        400, "bad_idempotency_key", "POST", path, {**call, "idempotency_key": "a"}, headers={"idempotency-key": "b"}
    )
    assert await rest.calls(rollout) == []
    made = [
        await rest.done("POST", path, call, headers={"idempotency-key": "k"}),
        await rest.done("POST", path, {**call, "idempotency_key": "k"}),
        (
            await rest.mcp(
                rollout, "tools/call", {"name": "book", "arguments": call["arguments"]}, **{"idempotency-key": "k"}
            )
        ).json()["result"],
    ]
    assert made[0] == made[1] == made[2]
    other = {"tool": "book", "arguments": {"account_id": 1, "amount": 2}, "idempotency_key": "k"}
    await rest.refused(422, "idempotency_key_reused", "POST", path, other)
    assert len(await rest.calls(rollout)) == 1


async def test_carriers_that_disagree_are_refused_and_reach_neither(rest: Rest) -> None:
    mine, other = await rest.open(), await rest.open()
    put = {"name": "put", "arguments": {"key": "x", "value": "1"}}
    for modern in (False, True):
        for headers in ({"x-rollout-id": other}, {"authorization": f"Bearer {other}"}):
            answer = await rest.mcp(mine, "tools/call", put, modern=modern, **headers)
            assert answer.status_code == 400
            rpc_error(answer, "rollout_carriers_disagree")
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": put}
    answer = await rest.http.post(f"/r/{mine}/mcp?rollout={other}", json=message)
    rpc_error(answer, "rollout_carriers_disagree")
    for rollout in (mine, other):
        assert await rest.calls(rollout) == []
    for path, headers in [
        ("/mcp", {"x-rollout-id": mine}),
        (f"/mcp?rollout={mine}", {}),
        ("/mcp", {"authorization": f"Bearer {mine}"}),
    ]:
        answer = await rest.http.post(path, json=message, headers=headers)
        assert answer.json()["result"]["structuredContent"] == {"result": "1"}
    assert await rest.items(other) == {}


# -- tools that misbehave -----------------------------------------------------------------------------------------

FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("refuse_after_write", {"key": "x"}, "refused"),
    ("crash_after_write", {"key": "x"}, "tool_failed"),
    ("commit_after_write", {"key": "x"}, "tool_committed"),
    ("run_sql", {"sql": "selec"}, "sql_error"),
    ("run_sql", {"sql": "select 1/0"}, "sql_error"),
    ("run_sql", {"sql": "insert into item values ('base-1', 'again')"}, "sql_error"),
    ("run_sql", {"sql": "insert into entry (account_id, amount) values (999, 1)"}, "sql_error"),
    ("run_sql", {"sql": "update account set balance = -1"}, "sql_error"),
    ("run_sql", {"sql": "select * from nowhere"}, "sql_error"),
    ("run_sql", {"sql": "select * from megamcp.keys"}, "unsupported_statement"),
    ("run_sql", {"sql": "commit"}, "unsupported_statement"),
    ("run_sql", {"sql": "rollback"}, "unsupported_statement"),
    ("run_sql", {"sql": "select 1; select 2"}, "unsupported_statement"),
    ("run_sql", {"sql": "drop table item"}, "unsupported_statement"),
    ("run_sql", {"sql": "set role postgres"}, "unsupported_statement"),
    ("run_sql", {"sql": "select pg_advisory_lock(1)"}, "unsupported_statement"),
    ("run_sql", {"sql": "select set_config('megamcp.binding', '', true)"}, "unsupported_statement"),
    ("run_sql", {"sql": "select pg_terminate_backend(pg_backend_pid())"}, "unsupported_statement"),
]


@pytest.mark.parametrize(("tool", "arguments", "code"), FAULTS, ids=lambda part: str(part)[:50])
async def test_a_tool_that_fails_is_undone_and_its_error_recorded(
    rest: Rest, tool: str, arguments: dict[str, Any], code: str
) -> None:
    rollout = await rest.open()
    await rest.call(rollout, "put", key="before", value="1")
    digest = await rest.digest(rollout)
    result = await rest.failed(rollout, tool, **arguments)
    assert result["structuredContent"]["code"] == code, result
    again = (await rest.mcp_call(rollout, tool, modern=True, **arguments)).json()["result"]
    assert again["content"] == result["content"]
    assert await rest.digest(rollout) == digest
    calls = await rest.calls(rollout)
    assert [call["is_error"] for call in calls] == [False, True, True]
    assert all(call["state"] in ("done", "failed") and call["result"] for call in calls)
    await rest.call(rollout, "put", key="after", value="1")
    assert await rest.items(rollout) == {"before": "1", "after": "1"}


@pytest.mark.usefixtures("harms_the_server")
@pytest.mark.parametrize(("tool", "more"), [("hang", {}), ("block", {"seconds": 60})], ids=["never returns", "blocks"])
async def test_a_tool_that_does_not_return_is_ended_at_its_deadline(
    strict: World, rest: Rest, tool: str, more: dict[str, Any]
) -> None:
    rollout = await rest.open()
    digest = await rest.digest(rollout)
    body = {"tool": tool, "arguments": {"key": "x", **more}}
    await rest.refused(504, "deadline_exceeded", "POST", f"/v1/rollouts/{rollout}/call", body)
    (row,) = await rest.calls(rollout)
    assert (row["state"], row["is_error"]) == ("failed", True)
    assert "deadline" in row["result"]["content"][0]["text"]
    answer = await rest.mcp_call(rollout, tool, modern=True, key="x", **more)
    assert answer.status_code == 504, answer.text
    rpc_error(answer, "deadline_exceeded")
    for _ in range(100):  # a blocked server is killed and started again meanwhile
        answer = await rest.http.post(f"/v1/rollouts/{rollout}/call", json={"tool": "items"})
        if answer.status_code == 200:
            break
        await asyncio.sleep(0.1)
    assert await rest.items(rollout) == {}
    assert await rest.digest(rollout) == digest
    servers = [p for p in psutil.Process().children(recursive=True) if strict.dsn.split("/")[-1] in _dsn(p)]
    assert len(servers) == 1, servers


def _dsn(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("MEGAMCP_TOOL_DSN", ""))
    except psutil.Error:
        return ""


@pytest.mark.usefixtures("harms_the_server")
@pytest.mark.parametrize("tool", ["hang", "block"])
async def test_rollback_and_release_end_calls_that_run(rest: Rest, tool: str) -> None:
    rollout = await rest.open()
    point = (await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints", {}))["id"]
    more = {"seconds": 1.0} if tool == "block" else {}
    body = {"tool": tool, "arguments": {"key": "late", **more}}
    for path, method, then in [
        (f"/v1/rollouts/{rollout}/rollback", "POST", {"checkpoint": point}),
        (f"/v1/rollouts/{rollout}", "DELETE", None),
    ]:
        running = asyncio.create_task(rest.http.post(f"/v1/rollouts/{rollout}/call", json=body))
        await asyncio.sleep(0.4)
        await rest.done(method, path, then)
        answer = await asyncio.wait_for(running, 15)
        if answer.status_code == 200:  # told as the tool's result: what was done to the call
            assert answer.json()["isError"] is True
        else:
            problem(answer, answer.status_code, answer.json()["code"])
            assert answer.json()["code"] in ("rolled_back", "rollout_closed", "deadline_exceeded")
        if method == "POST":
            assert await rest.items(rollout) == {}
            assert await rest.digest(rollout) == (await rest.done("GET", f"/v1/checkpoints/{point}"))["digest"]
    await rest.refused(410, "rollout_closed", "POST", f"/v1/rollouts/{rollout}/call", {"tool": "items"})


async def test_a_checkpoint_while_a_call_runs_waits_for_it(rest: Rest) -> None:
    rollout = await rest.open()
    running = asyncio.create_task(rest.call(rollout, "book", account_id=1, amount=5, pause=0.5))
    await asyncio.sleep(0.2)
    point = await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints", {})
    await running
    assert point["digest"] == await rest.digest(rollout)
    sql = {
        "sql": "select (select sum(balance) from account) - 1000, (select sum(amount) from entry)",
        "at": point["id"],
    }
    assert (await rest.done("POST", f"/v1/rollouts/{rollout}/query", sql))["rows"] == [[5, 5]]


# -- no capacity --------------------------------------------------------------------------------------------------


async def test_a_full_queue_is_429_with_retry_after(rest: Rest) -> None:
    rollout = await rest.open()
    slow = {"tool": "book", "arguments": {"account_id": 1, "amount": 1, "pause": 0.2}}
    answers = await asyncio.gather(*(rest.http.post(f"/v1/rollouts/{rollout}/call", json=slow) for _ in range(8)))
    busy = [answer for answer in answers if answer.status_code == 429]
    assert [answer.status_code for answer in answers if answer.status_code != 429] == [200] * (8 - len(busy))
    assert busy
    for answer in busy:
        problem(answer, 429, "rollout_busy")
        assert int(answer.headers["retry-after"]) >= 1
    answers = await asyncio.gather(
        *(rest.mcp_call(rollout, **slow["arguments"], tool="book", modern=True) for _ in range(8))
    )
    busy_mcp = [answer for answer in answers if answer.status_code == 429]
    assert busy_mcp
    for answer in busy_mcp:
        rpc_error(answer, "rollout_busy")
        assert int(answer.headers["retry-after"]) >= 1
    done = 16 - len(busy) - len(busy_mcp)
    assert await rest.call(rollout, "sums") == {"balances": done, "entries": done}
    assert len([call for call in await rest.calls(rollout) if call["tool"] == "book"]) == done


@pytest.mark.usefixtures("harms_the_server")
async def test_a_full_gateway_is_429_and_recovers(rest: Rest) -> None:
    rollouts = [(await rest.open()) for _ in range(8)]
    slow = {"tool": "slow_items", "arguments": {"seconds": 0.4}}
    calls = [rest.http.post(f"/v1/rollouts/{rollout}/call", json=slow) for rollout in rollouts for _ in range(4)]
    answers = await asyncio.gather(*calls)
    busy = [answer for answer in answers if answer.status_code == 429]
    assert busy
    assert {answer.status_code for answer in answers} <= {200, 429}
    for answer in busy:
        problem(answer, 429, "no_capacity")
    for rollout in rollouts:
        await rest.call(rollout, "items")


async def test_too_many_rollouts_are_429_until_some_are_released(rest: Rest) -> None:
    rollout = await rest.open()
    point = (await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints", {}))["id"]
    opened = []
    while True:
        answer = await rest.http.post("/v1/rollouts", json={"environment": "ledger", "count": 8})
        if answer.status_code != 201:
            break
        opened += [made["id"] for made in answer.json()["rollouts"]]
        assert len(opened) <= 40
    assert "DELETE" in problem(answer, 429, "too_many_rollouts")["hint"]
    problem(await rest.http.post(f"/v1/checkpoints/{point}/fork", json={"count": 8}), 429, "too_many_rollouts")
    for each in opened[:8]:
        await rest.done("DELETE", f"/v1/rollouts/{each}")
    await rest.done("POST", f"/v1/checkpoints/{point}/fork", {"count": 8})


# -- a database that goes away ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("harms_the_server")  # making a cluster takes the processors for a while
async def test_a_database_that_goes_away_is_503_and_everything_is_there_when_it_is_back(scratch_folder: Path) -> None:
    folder = scratch_folder / "away"
    first = EmbeddedPostgres(folder)
    await first.__aenter__()
    running, dsn = True, first.dsn
    settings = Settings(database_url=SecretStr(dsn), bundled_environments=False, environments=[LEDGER])
    try:
        await prepare(settings, dsn)
        async with (
            running_gateway(dsn, call_timeout_s=5) as gateway,
            httpx.AsyncClient(base_url=gateway.url, timeout=30) as http,
        ):
            rest = Rest(http)
            rollout = await rest.open()
            await rest.call(rollout, "put", key="kept", value="1")
            point = await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints", {})
            path = f"/v1/rollouts/{rollout}"
            late = asyncio.create_task(http.post(f"{path}/call", json={"tool": "hang", "arguments": {"key": "late"}}))
            await asyncio.sleep(0.3)
            await first.__aexit__(None, None, None)
            running = False

            answer = await late
            problem(answer, 503, "database_unavailable")
            for method, tail, body in OPERATIONS:
                body = {"checkpoint": point["id"]} if tail == "/rollback" else body
                answer = await http.request(method, path + tail, json=body)
                problem(answer, 503, answer.json()["code"])
                assert answer.json()["code"] in ("database_unavailable", "unavailable"), answer.text
            for modern in (False, True):
                answer = await rest.mcp_call(rollout, "put", modern=modern, key="lost", value="1")
                assert answer.status_code == 503
                assert rpc_error(answer, answer.json()["error"]["data"]["code"])["data"]["code"] in (
                    "database_unavailable",
                    "unavailable",
                )
            assert (await http.get("/healthz")).status_code == 200
            assert (await http.get("/readyz")).status_code == 503

            async with EmbeddedPostgres(folder) as second:
                assert second.dsn == dsn
                await _until(lambda: http.get("/readyz"))
                assert await rest.items(rollout) == {"kept": "1"}
                assert await rest.digest(rollout) == point["digest"]
                await rest.call(rollout, "put", key="new", value="1")
                await rest.done("POST", f"{path}/rollback", {"checkpoint": point["id"]})
                assert await rest.items(rollout) == {"kept": "1"}
                assert next(call["state"] for call in await rest.calls(rollout)) == "done"
                assert "running" not in {call["state"] for call in await rest.calls(rollout)}
    finally:
        if running:
            await first.__aexit__(None, None, None)


async def _until(ask: Callable[[], Any]) -> None:
    for _ in range(200):
        if (await ask()).status_code == 200:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("never")
