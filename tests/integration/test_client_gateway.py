"""The client, and the command line on top of it, against a real gateway and the bundled store."""

import asyncio
import json
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from megamcp import errors
from megamcp.cli import app
from megamcp.client import Client, Rollout, RolloutStatus
from megamcp.testing import Gateway, database_named, running_gateway
from megamcp.tree import collect

PENDING = "select id, customer_id from orders where status = 'pending' order by id limit 1"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(postgres_dsn: str, template_database: str) -> AsyncIterator[Gateway]:
    """One for all: tests have rollouts of their own, and the store's server starts once."""
    name = f"mm_client_{secrets.token_hex(6)}"
    async with database_named(postgres_dsn, name, template_database) as dsn, running_gateway(dsn) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def client(gateway: Gateway) -> AsyncIterator[Client]:
    async with Client(gateway.url) as client:
        yield client


@dataclass(frozen=True)
class Order:
    order_id: str
    customer_id: str


async def pending(rollout: Rollout) -> Order:
    order, customer = (await rollout.query(PENDING)).rows[0]
    return Order(f"W{order}", f"C{customer}")


async def cancel(rollout: Rollout, order: Order) -> None:
    result = await rollout.call("cancel_order", order_id=order.order_id, customer_id=order.customer_id, reason="other")
    assert not result.is_error, result.text


async def test_a_rollout_is_worked_on_kept_forked_and_taken_back(client: Client) -> None:
    (environment,) = [found for found in await client.environments() if found.name == "retail"]
    assert (await client.environment("retail")).hash == environment.hash
    async with await client.open("retail", labels={"a": "b"}) as rollout:
        assert rollout.view.labels == {"a": "b"}
        assert rollout.url.endswith(f"/r/{rollout.id}/mcp")
        assert "get_order" in {tool.name for tool in await rollout.tools()}
        order = await pending(rollout)
        start = await rollout.checkpoint("start", turn=7)
        assert (start.turn, (await rollout.refresh()).turn) == (7, 7)

        await cancel(rollout, order)
        changed = (await rollout.diff(start)).servers["retail"].tables["orders"].changed
        assert [change.after["status"] for change in changed] == ["cancelled"]
        assert (await rollout.digest()).digest != start.digest

        left, right = await start.fork(count=2, labels={"side": "x"})
        assert left.group == right.group
        assert (await left.digest()).digest == start.digest
        assert (await left.call("get_order", order_id=order.order_id)).value["status"] == "pending"

        await rollout.rollback(start)
        assert (await rollout.digest()).digest == start.digest
        assert (await rollout.diff(start)).servers == {}
        assert [point.id for point in await rollout.checkpoints()] == [start.id]

        forest = await collect(client, rollout=left.id)
        assert {found.id for found in forest.rollouts} == {rollout.id, left.id, right.id}
        assert [found.id for found in forest.checkpoints] == [start.id]
        by_group = await collect(client, group=left.group)
        assert {found.id for found in by_group.rollouts} == {rollout.id, left.id, right.id}
    assert (await client.rollout(rollout.id)).status is RolloutStatus.CLOSED
    with pytest.raises(errors.Gone):
        await rollout.call("get_order", order_id=order.order_id)
    await left.close()
    await left.close()


async def test_a_refusal_by_the_tool_is_a_result_with_its_code(client: Client) -> None:
    async with await client.open("retail") as rollout:
        result = await rollout.call("get_order", order_id="W1")
    assert result.is_error
    assert result.code == "order_not_found"
    assert "W1" in result.text


async def test_the_same_key_gives_the_recorded_result_and_other_arguments_are_refused(client: Client) -> None:
    async with await client.open("retail") as rollout:
        order = await pending(rollout)
        arguments = {"order_id": order.order_id, "customer_id": order.customer_id, "reason": "other"}
        first = await rollout.call("cancel_order", arguments, idempotency_key="once")
        again = await rollout.call("cancel_order", arguments, idempotency_key="once")
        assert first.raw == again.raw
        with pytest.raises(errors.Unprocessable) as caught:
            await rollout.call("cancel_order", {**arguments, "reason": "found_cheaper"}, idempotency_key="once")
    assert caught.value.code == "idempotency_key_reused"


async def test_the_journal_is_read_followed_and_scored(client: Client) -> None:
    async with await client.open("retail") as rollout:
        order = await pending(rollout)

        async def watch() -> list[str]:
            return [event.kind async for event in rollout.follow()]

        watching = asyncio.create_task(watch())
        await rollout.call("get_order", order_id=order.order_id)
        event = await rollout.score("reward", 0.5, turn=1, data={"why": "test"})
        assert event.data is not None
        assert event.data["value"] == 0.5
        kinds = [event.kind for event in await rollout.events()]
        assert kinds == ["open", "call", "score"]
        assert [event.kind for event in await rollout.events(after=2)] == ["score"]
        await rollout.close()
        async with asyncio.timeout(10):
            assert (await watching)[:3] == kinds


async def test_a_pinned_checkpoint_is_not_released_by_others(client: Client) -> None:
    async with await client.open("retail") as rollout:
        point = await rollout.checkpoint()
        assert (await point.pin("trainer 1 ü?#", ttl_s=60)).view.pins == ["trainer 1 ü?#"]
        with pytest.raises(errors.Conflict):
            await point.release()
        await point.unpin("trainer 1 ü?#")
        await point.release()
        with pytest.raises(errors.Gone):
            await point.fork()
        with pytest.raises(errors.Gone):
            await client.checkpoint(point.id)


async def test_a_kept_rollout_outlives_its_lease_and_a_plain_one_does_not(database: str) -> None:
    async with running_gateway(database, reap_interval_s=0.1) as gateway, Client(gateway.url) as client:
        kept = await client.open("retail", ttl_s=1.2, keep=True)
        plain = await client.open("retail", ttl_s=1.2)
        async with asyncio.timeout(20):
            async for _ in plain.follow():
                pass  # ends when the rollout does
        assert plain.status is RolloutStatus.EXPIRED
        assert (await kept.refresh()).status is RolloutStatus.OPEN
        await kept.close()


async def test_rollouts_are_listed_by_group_and_status(client: Client) -> None:
    rollouts = await client.open_many("retail", 3, group="listed")
    await rollouts[0].close()
    found = [one.id async for one in client.rollouts(group="listed", status="open")]
    assert sorted(found) == sorted(one.id for one in rollouts[1:])
    for one in rollouts:
        await one.close()


@pytest.mark.parametrize(
    ("attempt", "expected", "code"),
    [
        (lambda c: c.rollout("ro_none"), errors.NotFound, "rollout_not_found"),
        (lambda c: c.rollout("../environments"), errors.NotFound, None),
        (lambda c: c.checkpoint("cp_none"), errors.NotFound, "checkpoint_not_found"),
        (lambda c: c.environment("none"), errors.NotFound, "environment_not_found"),
        (lambda c: c.open("none"), errors.NotFound, "environment_not_found"),
        (lambda c: c.load_environment("/does/not/exist"), errors.Unprocessable, "environment_not_there"),
        (lambda c: c.open("retail", ttl_s=1e12), errors.BadRequest, "ttl_too_long"),
    ],
)
async def test_errors_keep_class_and_code(
    client: Client, attempt: Any, expected: type[errors.MegaMCPError], code: str | None
) -> None:
    with pytest.raises(expected) as caught:
        await attempt(client)
    assert code is None or caught.value.code == code


async def test_a_query_that_fails_says_why(client: Client) -> None:
    async with await client.open("retail") as rollout:
        with pytest.raises(errors.Unprocessable) as caught:
            await rollout.query("select nonsense from orders")
    assert "nonsense" in caught.value.message


# -- the command line -------------------------------------------------------------------------------------------------


async def megamcp(gateway: Gateway, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command, run in a thread: a process each would spend its time on imports."""
    runner = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"})
    result = await asyncio.to_thread(runner.invoke, app, [*arguments, "--url", gateway.url])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


async def document(gateway: Gateway, *arguments: str) -> Any:
    """The JSON that a command answers with, and nothing beside it."""
    status, out, said = await megamcp(gateway, *arguments, "--json")
    assert (status, said) == (0, ""), said
    return json.loads(out)


async def test_a_whole_rollout_from_the_command_line(gateway: Gateway) -> None:
    (opened,) = (await document(gateway, "rollout", "open", "retail", "--label", "a=b"))["rollouts"]
    rollout = opened["id"]
    rows = (await document(gateway, "rollout", "query", rollout, PENDING))["rows"]
    order, customer = f"order_id=W{rows[0][0]}", f"customer_id=C{rows[0][1]}"
    point = (await document(gateway, "rollout", "checkpoint", rollout, "--label", "start"))["id"]
    await document(gateway, "rollout", "call", rollout, "cancel_order", order, customer, "reason=other")
    diff = await document(gateway, "rollout", "diff", rollout, "--from", point)
    assert diff["from"] == point
    assert "orders" in diff["servers"]["retail"]["tables"]
    forks = (await document(gateway, "rollout", "fork", point, "--count", "2", "--seed", "fresh"))["rollouts"]
    assert {fork["parent_checkpoint"] for fork in forks} == {point}
    await document(gateway, "rollout", "rollback", rollout, point)
    at_head = await document(gateway, "rollout", "digest", rollout)
    assert at_head["digest"] == (await document(gateway, "checkpoint", "show", point))["digest"]
    assert len((await document(gateway, "tree", rollout))["rollouts"]) == 3
    kinds = [event["kind"] for event in (await document(gateway, "rollout", "events", rollout))["events"]]
    assert kinds == ["open", "checkpoint", "call", "rollback"]
    ids = [rollout, *(fork["id"] for fork in forks)]
    assert (await document(gateway, "rollout", "close", *ids))["closed"] == ids
    lines = (await megamcp(gateway, "rollout", "events", rollout, "--follow", "--json"))[1].splitlines()
    assert [json.loads(line)["kind"] for line in lines][:4] == kinds


async def test_a_tool_that_refuses_ends_with_status_3(gateway: Gateway) -> None:
    (opened,) = (await document(gateway, "rollout", "open", "retail"))["rollouts"]
    status, out, _ = await megamcp(gateway, "rollout", "call", opened["id"], "get_order", "order_id=W1")
    assert status == 3
    assert "order_not_found" in out


async def test_what_people_see_fits_80_columns(gateway: Gateway) -> None:
    (opened,) = (await document(gateway, "rollout", "open", "retail"))["rollouts"]
    rollout = opened["id"]
    await document(gateway, "rollout", "checkpoint", rollout, "--label", "a label")
    for command in (
        ("env", "list"),
        ("rollout", "list"),
        ("rollout", "tools", rollout),
        ("rollout", "events", rollout),
        ("rollout", "checkpoints", rollout),
        ("tree",),
    ):
        status, out, said = await megamcp(gateway, *command)
        assert (status, said) == (0, "")
        assert max(map(len, out.splitlines())) <= 80, command


async def test_an_error_of_the_gateway_is_a_line_and_a_hint(gateway: Gateway) -> None:
    """In a process of its own, as people use it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megamcp.cli", "rollout", "show", "ro_none", "--url", gateway.url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, said = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert said.startswith(b"error: There is no rollout ro_none.")
    assert b"hint: " in said
