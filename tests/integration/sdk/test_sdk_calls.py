"""One call is one transaction: its record, its effects and its result, or none of them."""

import asyncio
import json
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text

from megamcp.handles import Mode
from tests.integration.sdk.conftest import Client
from tests.integration.sdk.counter_database import CounterDatabase
from tests.integration.sdk.counter_server import cancelled, kept


async def test_a_write_is_recorded_with_its_effect_and_its_exact_bytes(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    reply = await client.call("add", {"name": "a", "by": 4}, handle=counters.handle(rollout))
    assert reply.result["structuredContent"] == {"name": "a", "value": 5}
    assert await counters.value() == 5
    (event,) = await counters.calls(rollout)
    assert (event["tool"], event["state"], event["is_error"]) == ("add", "done", False)
    assert json.loads(event["arguments"]) == {"name": "a", "by": 4}
    assert reply.raw == b'{"jsonrpc":"2.0","id":1,"result":' + event["result"].encode() + b"}"


async def test_arguments_are_recorded_as_the_bytes_that_came(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    raw = b'{"words" : "caf\\u00e9 \xc3\xa9\\u0000"}'
    body = b'{"jsonrpc":"2.0","id":"x","method":"tools/call","params":{"name":"say","arguments":' + raw + b"}}"
    reply = await client.post(body, {"megamcp-handle": counters.handle(rollout)})
    assert reply.result["structuredContent"] == {"result": "café é\0"}
    (event,) = await counters.calls(rollout)
    assert event["arguments"].encode() == raw


async def test_a_read_is_recorded_and_changes_nothing(client: Client, counters: CounterDatabase, rollout: str) -> None:
    reply = await client.call("read", {"name": "b"}, handle=counters.handle(rollout, mode=Mode.READ))
    assert reply.result["structuredContent"] == {"name": "b", "value": 10}
    (event,) = await counters.calls(rollout)
    assert (event["tool"], event["state"]) == ("read", "done")


async def test_reads_of_one_rollout_run_in_parallel_and_writes_do_not(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    replies = await asyncio.gather(
        *(client.call("add", {"name": "a"}, handle=counters.handle(rollout)) for _ in range(8)),
        *(client.call("read", {"name": "a"}, handle=counters.handle(rollout, mode=Mode.READ)) for _ in range(8)),
    )
    assert not any(reply.result.get("isError") for reply in replies)
    assert await counters.value() == 9
    assert len(await counters.calls(rollout)) == 16


async def test_a_tool_marked_read_only_can_not_write(client: Client, counters: CounterDatabase, rollout: str) -> None:
    for mode in (Mode.READ, Mode.WRITE):
        reply = await client.call("write_in_read", handle=counters.handle(rollout, mode=mode))
        assert reply.result["isError"] is True
        assert reply.result["structuredContent"]["sqlstate"] == "25006"
    assert await counters.value() == 1


@pytest.mark.parametrize(
    ("how", "code"),
    [("refuse", "refused"), ("bug", "tool_failed"), ("sql", "sql_error"), ("swallow", "transaction_aborted")],
)
async def test_a_tool_that_fails_is_rolled_back_and_its_error_is_the_recorded_result(
    client: Client, counters: CounterDatabase, rollout: str, how: str, code: str
) -> None:
    reply = await client.call("add_then_raise", {"how": how}, handle=counters.handle(rollout))
    assert (reply.status, reply.result["isError"], reply.code) == (200, True, code)
    assert await counters.value() == 1
    (event,) = await counters.calls(rollout)
    assert (event["state"], event["is_error"]) == ("done", True)
    assert json.loads(event["result"]) == reply.result


async def test_an_sql_error_says_what_postgresql_said_without_statement_or_values(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    reply = await client.call("add_then_raise", {"how": "sql"}, handle=counters.handle(rollout))
    error = reply.result["structuredContent"]
    assert (error["sqlstate"], error["constraint"]) == ("23505", "counter_pkey")
    assert "insert into" not in error["message"].lower()


async def test_a_nested_transaction_undoes_a_part(client: Client, counters: CounterDatabase, rollout: str) -> None:
    reply = await client.call("add_then_raise", {"how": "nested"}, handle=counters.handle(rollout))
    assert "isError" not in reply.result
    assert await counters.value() == 2


@pytest.mark.parametrize(
    "how",
    ["commit", "rollback", "quiet commit", "sync commit", "driver commit", "driver rollback", "driver new transaction"],
)
async def test_a_tool_that_ends_the_transaction_gets_an_error_and_nothing_is_kept(
    client: Client, counters: CounterDatabase, rollout: str, how: str
) -> None:
    reply = await client.call("end_transaction", {"how": how}, handle=counters.handle(rollout))
    assert reply.result["isError"] is True
    assert reply.code == "tool_committed"
    assert await counters.value() == 1
    (event,) = await counters.calls(rollout)
    assert event["is_error"] is True
    after = await client.call("add", {"name": "a"}, handle=counters.handle(rollout))
    assert after.result["structuredContent"]["value"] == 2


async def test_sql_text_that_commits_is_refused_by_name(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    reply = await client.call("end_transaction", {"how": "sql commit"}, handle=counters.handle(rollout))
    assert reply.code == "unsupported_statement"
    assert await counters.value() == 1


async def test_a_connection_that_a_tool_kept_is_dead(client: Client, counters: CounterDatabase, rollout: str) -> None:
    await client.call("keep_connection", handle=counters.handle(rollout))
    with pytest.raises(Exception, match=r"closed|ended"):
        await kept["db"].execute(text("update counter set value = 100"))
    other = await counters.rollout()
    running = asyncio.create_task(client.call("wait", {"seconds": 0.2}, handle=counters.handle(other)))
    await asyncio.sleep(0.1)
    with pytest.raises(Exception, match=r"closed|ended"):
        await kept["db"].execute(text("update counter set value = 100"))
    await running
    assert await counters.value() == 2


async def test_a_statement_left_running_fails_the_call(client: Client, counters: CounterDatabase, rollout: str) -> None:
    reply = await client.call("leave_statement_running", handle=counters.handle(rollout))
    assert (reply.result["isError"], reply.code) == (True, "statement_running")
    await kept["task"]
    assert await counters.value() == 1


async def test_a_retry_with_its_key_gets_the_recorded_bytes_and_runs_nothing(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    first = await client.call("add", {"name": "a"}, handle=counters.handle(rollout, key="k"))
    second = await client.call("add", {"name": "a"}, handle=counters.handle(rollout, key="k"))
    assert first.raw == second.raw
    assert await counters.value() == 2
    other = await client.call("add", {"name": "b"}, handle=counters.handle(rollout, key="k", request=b"other"))
    assert (other.status, other.code) == (200, "idempotency_key_reused")
    assert other.message["error"]["code"] == -32602


@pytest.mark.parametrize("damage", ["forged", "expired", "replayed", "foreign", "garbage", "closed"])
async def test_a_bad_handle_is_refused(client: Client, counters: CounterDatabase, rollout: str, damage: str) -> None:
    handle = counters.handle(rollout)
    code = f"handle_{damage}"
    match damage:
        case "forged":
            handle = handle.replace(".0.w.", ".1.w.")
        case "expired":
            handle = counters.handle(rollout, seconds=-1)
        case "replayed":
            await client.call("read", {"name": "a"}, handle=handle)
        case "foreign":
            handle = counters.handle(rollout, server="other")
        case "garbage":
            handle, code = "nonsense", "handle_forged"
        case "closed":
            await counters.admin.execute("update megamcp.rollouts set status = 'closed' where id = $1", rollout)
            code = "rollout_closed"
    reply = await client.call("add", {"name": "a"}, handle=handle)
    assert (reply.status, reply.code) == (200, code)
    assert await counters.value() == 1


async def test_a_stateful_tool_without_a_handle_is_refused(client: Client, counters: CounterDatabase) -> None:
    reply = await client.call("add", {"name": "a"})
    assert reply.code == "no_state"
    assert await counters.value() == 1


async def test_invalid_arguments_are_a_recorded_tool_error_with_paths(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    reply = await client.call("add", {"by": "7", "colour": 1}, handle=counters.handle(rollout))
    assert (reply.result["isError"], reply.code) == (True, "invalid_arguments")
    paths = {problem["path"] for problem in reply.result["structuredContent"]["errors"]}
    assert paths == {"name", "by", "colour"}
    (event,) = await counters.calls(rollout)
    assert event["is_error"] is True


async def test_an_unknown_tool_is_a_protocol_error(client: Client, counters: CounterDatabase, rollout: str) -> None:
    reply = await client.call("nope", handle=counters.handle(rollout))
    assert reply.message["error"]["code"] == -32602
    assert await counters.calls(rollout) == []


async def test_time_and_chance_come_from_the_state(client: Client, counters: CounterDatabase, rollout: str) -> None:
    async def draw(**arguments: int) -> dict[str, Any]:
        reply = await client.call("draw", arguments, handle=counters.handle(rollout))
        return dict(reply.result["structuredContent"])

    first = await draw(hours=2)
    second = await draw()
    assert (first["before"], first["after"]) == ("2026-01-15T09:00:00+00:00", "2026-01-15T11:00:00+00:00")
    assert second["before"] == first["after"]
    assert first["uuid"] != second["uuid"]
    await counters.admin.execute("update v_test.hidden set draws = 0")
    again = await draw()
    assert [again[k] for k in ("uuid", "number", "die", "chosen")] == [
        first[k] for k in ("uuid", "number", "die", "chosen")
    ]


async def test_a_killed_backend_loses_nothing_and_the_retry_runs(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    handle = counters.handle(rollout, key="k")
    call = asyncio.create_task(client.call("wait_in_sql", {"seconds": 30}, handle=handle))
    await asyncio.sleep(0.2)
    await counters.admin.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where wait_event = 'PgSleep' and datname = current_database()"
    )
    reply = await call
    assert (reply.status, reply.code) == (200, "database_unavailable")
    assert reply.message["error"]["data"]["outcome"] == "none"
    assert await counters.value() == 1
    retry = await client.call("add", {"name": "a"}, handle=counters.handle(rollout, key="k"))
    assert retry.result["structuredContent"]["value"] == 2


async def test_a_tool_that_waits_for_something_else_ends_with_its_backend(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    call = asyncio.create_task(client.call("wait", {"seconds": 30}, handle=counters.handle(rollout)))
    await asyncio.sleep(0.2)
    await counters.admin.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where state = 'idle in transaction' and datname = current_database()"
    )
    async with asyncio.timeout(3):
        reply = await call
    assert (reply.code, cancelled) == ("database_unavailable", ["wait"])
    assert await counters.value() == 1


async def test_connections_that_died_while_idle_are_replaced(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    await client.call("add", {"name": "a"}, handle=counters.handle(rollout))
    await counters.admin.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name = 'megamcp tool server' and datname = current_database()"
    )
    reply = await client.call("add", {"name": "a"}, handle=counters.handle(rollout))
    assert reply.result["structuredContent"]["value"] == 3


async def test_a_commit_whose_answer_was_lost_is_told_by_its_record(
    client: Client, counters: CounterDatabase, rollout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncpg.transaction import Transaction

    commit = Transaction.commit

    async def commit_and_break(self: Transaction) -> None:
        connection = self._connection
        await commit(self)
        monkeypatch.setattr(Transaction, "commit", commit)
        connection.terminate()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    monkeypatch.setattr(Transaction, "commit", commit_and_break)
    reply = await client.call("add", {"name": "a"}, handle=counters.handle(rollout))
    assert reply.result["structuredContent"] == {"name": "a", "value": 2}
    assert len(await counters.calls(rollout)) == 1


async def test_a_commit_that_never_arrived_has_no_effect_and_says_so(
    client: Client, counters: CounterDatabase, rollout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncpg.transaction import Transaction

    commit = Transaction.commit

    async def break_instead(self: Transaction) -> None:
        monkeypatch.setattr(Transaction, "commit", commit)
        self._connection.terminate()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    monkeypatch.setattr(Transaction, "commit", break_instead)
    reply = await client.call("add", {"name": "a"}, handle=counters.handle(rollout, key="k"))
    assert reply.code == "database_unavailable"
    assert await counters.value() == 1
    retry = await client.call("add", {"name": "a"}, handle=counters.handle(rollout, key="k"))
    assert retry.result["structuredContent"]["value"] == 2


async def test_waiting_for_the_rollout_ends_at_the_handles_deadline(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    holder = asyncio.create_task(client.call("wait", {"seconds": 1.0}, handle=counters.handle(rollout)))
    await asyncio.sleep(0.2)
    reply = await client.call("add", {"name": "a"}, handle=counters.handle(rollout, seconds=0.2))
    assert reply.code == "deadline_exceeded"
    await holder


async def test_a_cancelled_call_is_rolled_back_and_frees_its_rollout(
    client: Client, counters: CounterDatabase, rollout: str
) -> None:
    for tool in ("wait", "wait_in_sql") * 3:  # more than the pool holds
        call = asyncio.create_task(client.call(tool, {"seconds": 30}, handle=counters.handle(rollout)))
        await asyncio.sleep(0.15)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    async with asyncio.timeout(5):
        reply = await client.call("add", {"name": "a"}, handle=counters.handle(rollout))
    assert reply.result["structuredContent"]["value"] == 2
    busy = await counters.admin.fetchval(
        "select count(*) from pg_stat_activity"
        " where application_name = 'megamcp tool server' and datname = current_database() and state <> 'idle'"
    )
    assert busy == 0


async def test_no_password_in_any_answer_when_the_database_is_away(counters: CounterDatabase, rollout: str) -> None:
    import httpx

    from tests.integration.sdk.counter_server import server

    for dsn in (
        "postgresql://someone:hunter22secret@/db?host=/nowhere",
        "postgresql://someone:hunter22secret@127.0.0.1:1/db",
    ):
        app = server.asgi_app(dsn)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tool") as http:
            reply = await Client(http).call("add", {"name": "a"}, handle=counters.handle(rollout))
        await app.aclose()
        assert (reply.status, reply.code) == (200, "database_unavailable")
        assert b"hunter22" not in reply.raw
