"""Tenants don't see each other, by any way; quotas of one key don't touch another."""

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest

from megamcp.access.principal import Principal, Quotas, Scope
from megamcp.access.quotas import Meters
from megamcp.errors import NoCapacity
from tests.integration.access.conftest import ADMIN, Guarded
from tests.integration.conftest import LEDGER
from tests.integration.rest import problem


async def test_nothing_of_a_tenants_is_there_for_anothers_key(guarded: Guarded) -> None:
    a, b = guarded.rest(await guarded.key("trainer", "a")), guarded.rest(await guarded.key("trainer", "b"))
    rollout, own = await a.open(group="shared", labels={"secret": "of a"}), await b.open(group="shared")
    point = (await a.done("POST", f"/v1/rollouts/{rollout}/checkpoints"))["id"]
    (fork,) = (await a.done("POST", f"/v1/checkpoints/{point}/fork"))["rollouts"]
    for id_ in (rollout, fork["id"]):
        path = f"/v1/rollouts/{id_}"
        for method, rest, body in [
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/renew", None),
            ("POST", "/rollback", {"checkpoint": point}),
            ("POST", "/checkpoints", None),
            ("GET", "/checkpoints", None),
            ("GET", "/diff", None),
            ("GET", "/digest", None),
            ("POST", "/query", {"sql": "select 1"}),
            ("GET", "/events", None),
            ("POST", "/scores", {"name": "r", "value": 1}),
            ("GET", "/dsn", None),
            ("GET", "/tools", None),
            ("POST", "/call", {"tool": "items"}),
        ]:
            await b.refused(404, "rollout_not_found", method, path + rest, body)
        # The same words as for one that never was.
        assert (await b.http.get(path)).json()["detail"].replace(id_, "x") == (
            await b.http.get("/v1/rollouts/ro_x")
        ).json()["detail"].replace("ro_x", "x")
        events = await b.http.get(f"{path}/events", headers={"accept": "text/event-stream"})
        problem(events, 404, "rollout_not_found")
        for strict in (True, False):
            other = guarded.rest(b.http.headers["authorization"].partition(" ")[2], strict=strict)
            for modern in (True, False):
                answer = await other.mcp(id_, "tools/list", modern=modern)
                assert answer.status_code == 404, answer.text
                assert answer.json()["error"]["data"]["code"] == "rollout_not_found"
    for method, rest, body in [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/renew", None),
        ("POST", "/pin", {"owner": "b"}),
        ("DELETE", "/pin/a", None),
        ("POST", "/fork", None),
    ]:
        await b.refused(404, "checkpoint_not_found", method, f"/v1/checkpoints/{point}{rest}", body)
    # Nor by a rollout of its own.
    mine = f"/v1/rollouts/{own}"
    await b.refused(404, "checkpoint_not_found", "POST", f"{mine}/rollback", {"checkpoint": point})
    await b.refused(404, "checkpoint_not_found", "GET", f"{mine}/diff?from={point}")
    await b.refused(404, "checkpoint_not_found", "GET", f"{mine}/diff?to={point}")
    await b.refused(404, "checkpoint_not_found", "GET", f"{mine}/diff?to=head&to={point}")
    await b.refused(404, "checkpoint_not_found", "GET", f"{mine}/digest?at={point}")
    await b.refused(404, "checkpoint_not_found", "POST", f"{mine}/query", {"sql": "select 1", "at": point})
    listed = (await b.done("GET", "/v1/rollouts?group=shared"))["rollouts"]
    assert [found["id"] for found in listed] == [own]
    everyones = (await guarded.rest(ADMIN).done("GET", "/v1/rollouts?group=shared"))["rollouts"]
    assert {found["id"] for found in everyones} == {rollout, own}
    # All of it is there for its own.
    assert (await a.done("GET", f"/v1/checkpoints/{point}"))["rollout"] == rollout
    assert (await a.mcp(rollout, "tools/list")).status_code == 200


async def test_what_an_admin_forks_stays_its_tenants(guarded: Guarded) -> None:
    a = guarded.rest(await guarded.key("trainer", "forked"))
    point = (await a.done("POST", f"/v1/rollouts/{await a.open()}/checkpoints"))["id"]
    (fork,) = (await guarded.rest(ADMIN).done("POST", f"/v1/checkpoints/{point}/fork"))["rollouts"]
    await a.done("GET", f"/v1/rollouts/{fork['id']}")


async def test_an_environment_of_a_tenants_is_there_for_it_alone(guarded: Guarded, tmp_path: Path) -> None:
    folder = tmp_path / "private"
    shutil.copytree(LEDGER, folder)
    toml = folder / "environment.toml"
    toml.write_text(toml.read_text().replace('name = "ledger"', 'name = "private"'))
    admin = guarded.rest(ADMIN)
    await admin.done("POST", "/v1/environments", {"path": str(folder), "tenant": "a"})
    await admin.done("POST", "/v1/environments", {"path": str(folder), "tenant": "a"})
    await admin.refused(
        409, "environment_of_another_tenant", "POST", "/v1/environments", {"path": str(folder), "tenant": "b"}
    )
    a, b = guarded.rest(await guarded.key("trainer", "a")), guarded.rest(await guarded.key("trainer", "b"))
    assert "private" in [found["name"] for found in (await a.done("GET", "/v1/environments"))["environments"]]
    assert (await a.mcp(await a.open(environment="private"), "tools/list")).status_code == 200
    assert "private" not in (await b.http.get("/v1/environments")).text
    refused = await b.refused(404, "environment_not_found", "POST", "/v1/rollouts", {"environment": "private"})
    assert "private" not in refused["hint"]
    await b.refused(404, "environment_not_found", "GET", "/v1/environments/private")
    answer = await b.http.post(
        "/e/private/mcp",
        json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-11-25"}},
        headers={"accept": "application/json, text/event-stream"},
    )
    assert answer.json()["error"]["data"]["code"] == "environment_not_found"
    for path in ("/readyz", "/metrics"):
        assert "private" not in (await guarded.rest(None).http.get(path)).text


async def test_live_rollouts_of_a_key_are_counted_exactly_over_all_gateways(guarded: Guarded) -> None:
    key = await guarded.key("trainer", "counted", quotas={"rollouts": 3})
    here, there = guarded.rest(key), guarded.rest(key, strict=False)
    body = {"environment": "ledger"}
    answers = await asyncio.gather(
        *(rest.http.post("/v1/rollouts", json=body) for rest in (here, there) for _ in range(5))
    )
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [429] * 7
    refused = next(answer for answer in answers if answer.status_code == 429)
    document = problem(refused, 429, "key_quota_exceeded")
    assert (document["quota"], document["limit"]) == ("rollouts", 3)
    assert int(refused.headers["retry-after"]) >= 1
    rollout = next(answer for answer in answers if answer.status_code == 201).json()["rollouts"][0]["id"]
    point = (await here.done("POST", f"/v1/rollouts/{rollout}/checkpoints"))["id"]
    await here.refused(429, "key_quota_exceeded", "POST", f"/v1/checkpoints/{point}/fork")
    await here.done("DELETE", f"/v1/rollouts/{rollout}")
    await here.done("POST", f"/v1/checkpoints/{point}/fork")


async def test_calls_over_a_keys_rate_are_told_when_to_come_again(guarded: Guarded) -> None:
    key = await guarded.key("trainer", "slow", quotas={"calls_per_s": 0.001})
    rest = guarded.rest(key)
    rollout = await rest.open()
    await rest.call(rollout, "items")
    answer = await rest.http.post(f"/v1/rollouts/{rollout}/call", json={"tool": "items"})
    assert problem(answer, 429, "key_quota_exceeded")["quota"] == "calls_per_s"
    assert int(answer.headers["retry-after"]) > 1
    answer = await rest.mcp(rollout, "tools/list")
    assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (429, "key_quota_exceeded")
    assert int(answer.headers["retry-after"]) > 1
    await rest.done("GET", f"/v1/rollouts/{rollout}")  # no call
    other = guarded.rest(await guarded.key("trainer", "slow"))
    await other.call(rollout, "items")


async def test_bytes_of_a_day_are_counted_both_ways(guarded: Guarded) -> None:
    key = await guarded.key("trainer", "small", quotas={"bytes_per_day": 20_000})
    rest = guarded.rest(key)
    rollout = await rest.open()
    await rest.call(rollout, "put", key="k", value="x" * 30_000)
    answer = await rest.http.get("/v1/rollouts")
    assert problem(answer, 429, "key_quota_exceeded")["quota"] == "bytes_per_day"
    assert int(answer.headers["retry-after"]) <= 86_400


def test_meters_count_what_runs_and_refill_with_time() -> None:
    now = [1000.0]
    meters = Meters(lambda: now[0], lambda: now[0])
    quick = Principal("k", "k", Scope.AGENT, "t", Quotas(calls_per_s=2, concurrent_calls=3))
    meters.begin_call(quick)
    meters.begin_call(quick)
    with pytest.raises(NoCapacity) as refused:
        meters.begin_call(quick)
    assert refused.value.retry_after == 0.5
    now[0] += 0.5
    meters.begin_call(quick)
    now[0] += 60
    with pytest.raises(NoCapacity) as refused:
        meters.begin_call(quick)
    assert refused.value.extra["quota"] == "concurrent_calls"
    meters.end_call(quick)
    meters.begin_call(quick)


async def test_calls_at_once_end_with_their_answers(guarded: Guarded) -> None:
    key = await guarded.key("trainer", "narrow", quotas={"concurrent_calls": 1})
    rest = guarded.rest(key)
    rollout = await rest.open()
    for _ in range(3):
        await rest.call(rollout, "items")
        assert (await rest.mcp(rollout, "tools/list")).status_code == 200
    await rest.refused(404, "unknown_tool", "POST", f"/v1/rollouts/{rollout}/call", {"tool": "nothing"})
    await rest.call(rollout, "items")
    assert isinstance(rest.http, httpx.AsyncClient)
