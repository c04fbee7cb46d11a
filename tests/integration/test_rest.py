"""Every route of the control plane at work over HTTP, and the interface's own documentation complete."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from megamcp.testing import running_gateway
from tests.integration.conftest import LEDGER, copy_of
from tests.integration.promises.world import World
from tests.integration.rest import Rest, problem, rpc_error


@pytest_asyncio.fixture(loop_scope="session")
async def rest(world: World) -> AsyncIterator[Rest]:
    async with httpx.AsyncClient(base_url=world.url, timeout=20) as http:
        yield Rest(http)


async def keys(rest: Rest, rollout: str) -> set[str]:
    return set(await rest.items(rollout))


# -- environments -------------------------------------------------------------------------------------------------


async def test_environments_are_listed_shown_and_loaded_idempotently(rest: Rest, tmp_path: Path) -> None:
    listed = await rest.done("GET", "/v1/environments")
    (ledger,) = (each for each in listed["environments"] if each["name"] == "ledger")
    assert ledger["servers"] == [
        {"name": "ledger", "kind": "schema", "tables": ["account", "entry", "item"], "url": None}
    ]
    assert await rest.done("GET", "/v1/environments/ledger") == ledger
    assert await rest.done("GET", f"/v1/environments/ledger@{ledger['hash']}") == ledger
    await rest.refused(404, "environment_not_found", "GET", "/v1/environments/ledger@0000")
    await rest.refused(404, "environment_not_found", "GET", "/v1/environments/ledger@")

    again = await rest.http.post("/v1/environments", json={"path": str(LEDGER)})
    assert again.status_code == 201
    assert again.json()["hash"] == ledger["hash"]
    folder = tmp_path / "env"
    folder.mkdir()
    for file in LEDGER.iterdir():
        if file.is_file():
            (folder / file.name).write_text(file.read_text())
    same = await rest.done("POST", "/v1/environments", {"path": str(folder / "environment.toml")})
    assert same["hash"] == ledger["hash"]  # a version is its content, not its place
    (folder / "seed.sql").write_text("insert into item values ('base-1', 'other');")
    other = await rest.done("POST", "/v1/environments", {"path": str(folder)})
    assert other["hash"] != ledger["hash"]
    versions = [each["hash"] for each in (await rest.done("GET", "/v1/environments"))["environments"]]
    assert versions[0] == other["hash"]  # newest first
    fixed = await rest.done("POST", "/v1/rollouts", {"environment": f"ledger@{ledger['hash']}"})
    assert fixed["rollouts"][0]["environment"] == f"ledger@{ledger['hash']}"
    await rest.done("POST", "/v1/environments", {"path": str(LEDGER)})  # the plain name means this one again


async def test_an_mcp_json_loads_too(rest: Rest, tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"name": "elsewhere", "mcpServers": {"one": {"url": "http://127.0.0.1:9/mcp"}}}))
    loaded = await rest.done("POST", "/v1/environments", {"path": str(file)})
    assert loaded["servers"] == [{"name": "one", "kind": "none", "tables": [], "url": "http://127.0.0.1:9/mcp"}]


# -- rollouts -----------------------------------------------------------------------------------------------------


async def test_opening_gives_urls_that_speak_mcp_and_one_group(rest: Rest) -> None:
    answer = await rest.done(
        "POST", "/v1/rollouts", {"environment": "ledger", "count": 3, "labels": {"task": "größe"}, "seed": 7}
    )
    made = answer["rollouts"]
    assert answer["next_cursor"] is None
    assert len({each["id"] for each in made}) == 3
    assert len({each["group"] for each in made}) == 1
    for each in made:
        assert each["id"].startswith("ro_")
        assert len(each["id"]) >= 32
        assert (each["turn"], each["depth"], each["seq"], each["status"]) == (0, 0, 1, "open")
        assert (each["parent_checkpoint"], each["labels"], each["seed"]) == (None, {"task": "größe"}, 7)
        message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        assert (await rest.http.post(each["url"], json=message)).json()["result"] == {}
        assert await rest.done("GET", f"/v1/rollouts/{each['id']}") == each


async def test_the_list_has_filters_and_pages(rest: Rest) -> None:
    group, other = secrets.token_hex(8), secrets.token_hex(8)
    mine = [await rest.open(group=group) for _ in range(7)]
    await rest.open(group=other)
    await rest.done("DELETE", f"/v1/rollouts/{mine[2]}")

    async def listed(**query: Any) -> list[str]:
        found, cursor = [], None
        while True:
            page = await rest.done("GET", "/v1/rollouts", params={**query, **({"cursor": cursor} if cursor else {})})
            assert len(page["rollouts"]) <= query.get("limit", 100)
            found += [each["id"] for each in page["rollouts"]]
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    assert await listed(group=group) == mine
    for limit in (1, 2, 3, 7, 8):
        assert await listed(group=group, limit=limit) == mine
    assert await listed(group=group, status="closed") == [mine[2]]
    assert await listed(group=group, status="open") == [each for each in mine if each != mine[2]]
    assert await listed(group=group, environment="ledger") == mine
    assert await listed(group=group, environment="retail") == []
    name = (await rest.done("GET", f"/v1/rollouts/{mine[0]}"))["environment"]
    assert await listed(group=group, environment=name, status="open", limit=2) == [e for e in mine if e != mine[2]]


async def test_leases_are_renewed_and_release_is_idempotent(rest: Rest) -> None:
    rollout = await rest.open(ttl_s=60)
    path = f"/v1/rollouts/{rollout}"
    before = (await rest.done("GET", path))["expires_at"]
    assert (await rest.done("POST", f"{path}/renew", {"ttl_s": 600}))["expires_at"] > before
    assert (await rest.done("POST", f"{path}/renew"))["expires_at"] > before  # the default, an hour
    for _ in range(2):
        assert (await rest.http.delete(path)).status_code == 204
    assert (await rest.done("GET", path))["status"] == "closed"
    assert (await rest.http.delete("/v1/rollouts/ro_nobody")).status_code == 204


# -- checkpoints --------------------------------------------------------------------------------------------------


async def test_checkpoints_carry_turn_depth_seq_digest_and_label(rest: Rest) -> None:
    rollout = await rest.open()
    path = f"/v1/rollouts/{rollout}"
    first = await rest.done("POST", f"{path}/checkpoints")
    await rest.call(rollout, "put", key="x", value="1")
    second = await rest.done("POST", f"{path}/checkpoints", {"label": "after x", "turn": 7, "ttl_s": 60})
    third = await rest.done("POST", f"{path}/checkpoints", {})
    assert [(each["turn"], each["depth"], each["seq"]) for each in (first, second, third)] == [
        (1, 1, 1),
        (7, 2, 3),
        (8, 3, 4),
    ]
    assert [each["parent"] for each in (first, second, third)] == [None, first["id"], second["id"]]
    assert first["digest"] != second["digest"] == third["digest"] == await rest.digest(rollout)
    assert second["label"] == "after x"
    assert (await rest.done("GET", f"{path}/checkpoints"))["checkpoints"] == [first, second, third]
    assert await rest.done("GET", f"/v1/checkpoints/{second['id']}") == second
    shown = await rest.done("GET", path)
    assert (shown["turn"], shown["depth"], shown["checkpoint"]) == (8, 3, third["id"])
    longer = await rest.done("POST", f"/v1/checkpoints/{second['id']}/renew", {"ttl_s": 600})
    assert longer["expires_at"] > second["expires_at"]


async def test_pins_hold_a_checkpoint_whatever_its_lease_says(world: World, rest: Rest) -> None:
    rollout = await rest.open()
    point = await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints", {"ttl_s": 0.2})
    path = f"/v1/checkpoints/{point['id']}"
    assert (await rest.done("POST", f"{path}/pin", {"owner": "trainer/7", "ttl_s": 60}))["pins"] == ["trainer/7"]
    assert (await rest.done("POST", f"{path}/pin", {"owner": "b"}))["pins"] == ["b", "trainer/7"]
    await asyncio.sleep(0.3)
    await world.services.reaper.once()
    told = await rest.refused(409, "checkpoint_pinned", "DELETE", path)
    assert "trainer/7" in told["detail"]
    await rest.done("POST", f"{path}/fork")
    await rest.done("DELETE", f"{path}/pin/b")
    await rest.done("DELETE", f"{path}/pin/trainer%2F7")
    await rest.done("DELETE", f"{path}/pin/nobody")
    await rest.refused(410, "checkpoint_gone", "POST", f"{path}/fork")
    await rest.refused(410, "checkpoint_gone", "POST", f"{path}/pin", {"owner": "late"})
    await rest.done("DELETE", path)


async def test_a_checkpoint_outlives_its_rollout(rest: Rest) -> None:
    rollout = await rest.open()
    await rest.call(rollout, "put", key="x", value="1")
    point = await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints")
    await rest.done("DELETE", f"/v1/rollouts/{rollout}")
    (fork,) = (await rest.done("POST", f"/v1/checkpoints/{point['id']}/fork"))["rollouts"]
    assert await rest.items(fork["id"]) == {"x": "1"}
    for _ in range(2):
        await rest.done("DELETE", f"/v1/checkpoints/{point['id']}")
    await rest.refused(410, "checkpoint_gone", "GET", f"/v1/checkpoints/{point['id']}")
    assert await rest.items(fork["id"]) == {"x": "1"}


async def test_forks_start_from_the_point_and_choose_their_seed(rest: Rest) -> None:
    rollout = await rest.open()
    await rest.call(rollout, "put", key="x", value="1")
    await rest.call(rollout, "draw")
    point = await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints")
    path = f"/v1/checkpoints/{point['id']}/fork"
    inherited = (await rest.done("POST", path, {"count": 2, "group": "g", "labels": {"a": "b"}}))["rollouts"]
    fresh = (await rest.done("POST", path, {"count": 2, "seed": "fresh"}))["rollouts"]
    chosen = (await rest.done("POST", path, {"count": 2, "seed": 42}))["rollouts"]
    for each in inherited + fresh + chosen:
        assert (each["parent_checkpoint"], each["turn"], each["depth"]) == (point["id"], 1, 1)
        assert await rest.items(each["id"]) == {"x": "1"}
    assert {(each["group"], json.dumps(each["labels"])) for each in inherited} == {("g", '{"a": "b"}')}
    draws = {each["id"]: (await rest.call(each["id"], "draw"))["number"] for each in inherited + fresh + chosen}
    following = (await rest.call(rollout, "draw"))["number"]
    assert {draws[each["id"]] for each in inherited} == {following}
    assert len({draws[each["id"]] for each in fresh} | {following}) == 3
    assert len({draws[each["id"]] for each in chosen}) == 1
    await rest.call(inherited[0]["id"], "put", key="y", value="2")
    assert await keys(rest, inherited[1]["id"]) == await keys(rest, rollout) == {"x"}


async def test_rollback_gives_the_rollout_at_that_point(rest: Rest) -> None:
    rollout = await rest.open()
    point = await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints")
    await rest.call(rollout, "put", key="x", value="1")
    await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints")
    back = await rest.done("POST", f"/v1/rollouts/{rollout}/rollback", {"checkpoint": point["id"]})
    assert (back["id"], back["turn"], back["checkpoint"]) == (rollout, 1, point["id"])
    assert await rest.items(rollout) == {}
    (fork,) = (await rest.done("POST", f"/v1/checkpoints/{point['id']}/fork"))["rollouts"]
    await rest.call(fork["id"], "put", key="y", value="1")
    await rest.done("POST", f"/v1/rollouts/{fork['id']}/rollback", {"checkpoint": point["id"]})  # its parent's
    assert await rest.items(fork["id"]) == {}


# -- reading points -----------------------------------------------------------------------------------------------


async def test_diff_between_all_points_digest_and_query_at_each(rest: Rest) -> None:
    rollout = await rest.open()
    path = f"/v1/rollouts/{rollout}"
    states: dict[str, dict[str, str]] = {"base": {}}
    for name, changes in [("a", {"k": "1"}), ("b", {"k": "2", "l": "1"}), ("head", {"m": "1"})]:
        for key, value in changes.items():
            await rest.call(rollout, "put", key=key, value=value)
        point = "head" if name == "head" else (await rest.done("POST", f"{path}/checkpoints"))["id"]
        states[point] = {**states[list(states)[-1]], **changes}
    for start, before in states.items():
        for end, after in states.items():
            diff = await rest.done("GET", f"{path}/diff", params={"from": start, "to": end})
            assert (diff["rollout"], diff["from"], diff["to"]) == (rollout, start, end)
            table = diff["servers"].get("ledger", {"tables": {}})["tables"].get("item")
            if before == after:
                assert diff["servers"] == {}
                continue
            assert {row["key"]: row["value"] for row in table["added"]} == {k: after[k] for k in after.keys() - before}
            assert {row["key"]: row["value"] for row in table["removed"]} == {
                k: before[k] for k in before.keys() - after
            }
            changed = {
                row["before"]["key"]: (row["before"]["value"], row["after"]["value"]) for row in table["changed"]
            }
            assert changed == {k: (before[k], after[k]) for k in before.keys() & after if before[k] != after[k]}
            assert table["total"] == len(table["added"]) + len(table["removed"]) + len(table["changed"])
            assert table["truncated"] is False
    assert await rest.done("GET", f"{path}/diff") == await rest.done("GET", f"{path}/diff?from=base&to=head")
    digests = {point: (await rest.done("GET", f"{path}/digest", params={"at": point})) for point in states}
    assert len({each["digest"] for each in digests.values()}) == 4
    assert set(digests["head"]["servers"]) == {"ledger"}
    assert (await rest.done("GET", f"{path}/digest"))["digest"] == digests["head"]["digest"]
    for point, state in states.items():
        sql = "select key, value from item where key not like 'base-%' order by key"
        result = await rest.done("POST", f"{path}/query", {"server": "ledger", "sql": sql, "at": point})
        assert result == {
            "columns": ["key", "value"],
            "rows": [list(item) for item in state.items()],
            "truncated": False,
        }
    stranger = await rest.open()
    foreign = (await rest.done("POST", f"/v1/rollouts/{stranger}/checkpoints"))["id"]
    assert (await rest.done("GET", f"{path}/diff", params={"from": foreign, "to": "base"}))["servers"] == {}


async def test_the_digest_names_counters_apart(rest: Rest) -> None:
    rollout = await rest.open()
    before = await rest.done("GET", f"/v1/rollouts/{rollout}/digest")
    await rest.call(rollout, "draw")
    after = await rest.done("GET", f"/v1/rollouts/{rollout}/digest")
    assert before["digest"] == after["digest"]
    assert before["counters"] != after["counters"]


# -- the journal --------------------------------------------------------------------------------------------------


async def test_events_have_the_ancestors_part_first_in_pages(rest: Rest) -> None:
    rollout = await rest.open()
    await rest.call(rollout, "put", key="x", value="1")
    point = await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints")
    await rest.call(rollout, "put", key="only here", value="1")
    (fork,) = (await rest.done("POST", f"/v1/checkpoints/{point['id']}/fork"))["rollouts"]
    await rest.failed(fork["id"], "refuse_after_write", key="y")
    score = {"name": "reward", "value": 0.5, "turn": 1, "data": {"why": ["a", {"b": None}]}}
    kept = await rest.done("POST", f"/v1/rollouts/{fork['id']}/scores", score)
    assert (kept["kind"], kept["data"]) == ("score", score)
    await rest.done("DELETE", f"/v1/rollouts/{fork['id']}")
    late = await rest.done("POST", f"/v1/rollouts/{fork['id']}/scores", {"name": "late", "value": -1})
    path = f"/v1/rollouts/{fork['id']}/events"
    events = (await rest.done("GET", path))["events"]
    assert [event["kind"] for event in events] == ["open", "call", "fork", "call", "score", "close", "score"]
    assert [event["rollout"] for event in events] == [rollout] * 2 + [fork["id"]] * 5
    assert events[-1]["seq"] == late["seq"]
    assert events[1]["arguments"] == {"key": "x", "value": "1"}
    assert events[1]["result"]["structuredContent"] == {"result": "1"}
    assert (events[1]["state"], events[1]["is_error"], events[3]["is_error"]) == ("done", False, True)
    assert events[1]["duration_ms"] >= 0
    paged, after = [], 0
    while after is not None:
        page = await rest.done("GET", path, params={"after": after, "limit": 2})
        paged += page["events"]
        after = page["next_after"]
    assert paged == events


async def test_the_stream_of_events_goes_on_and_is_resumed(rest: Rest) -> None:
    rollout = await rest.open()
    path = f"/v1/rollouts/{rollout}/events"
    await rest.call(rollout, "put", key="x", value="1")

    async def follow(headers: dict[str, str]) -> list[tuple[str, str, Any]]:
        found = []
        async with rest.http.stream("GET", path, headers={"accept": "text/event-stream", **headers}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            number = kind = ""
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    number = value
                elif name == "event":
                    kind = value
                elif name == "data":
                    found.append((number, kind, json.loads(value)))
        return found

    whole, rest_of_it = asyncio.create_task(follow({})), asyncio.create_task(follow({"last-event-id": "1"}))
    await asyncio.sleep(0.1)
    await rest.call(rollout, "put", key="y", value="1")
    await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints")
    await rest.done("DELETE", f"/v1/rollouts/{rollout}")
    events = await asyncio.wait_for(whole, 10)
    assert [kind for _, kind, _ in events] == ["open", "call", "call", "checkpoint", "close"]
    assert [number for number, _, _ in events] == ["1", "2", "3", "4", "5"]
    assert [data for _, _, data in events] == (await rest.done("GET", path))["events"]
    assert await asyncio.wait_for(rest_of_it, 10) == events[1:]


# -- the agent's view ---------------------------------------------------------------------------------------------


async def test_tools_and_calls_are_the_same_as_over_mcp(rest: Rest) -> None:
    rollout = await rest.open()
    listed = await rest.done("GET", f"/v1/rollouts/{rollout}/tools")
    assert listed["tools"] == (await rest.mcp(rollout, "tools/list")).json()["result"]["tools"]
    assert [tool["name"] for tool in listed["tools"]][:2] == ["put", "delete"]
    by_rest = await rest.done("POST", f"/v1/rollouts/{rollout}/call", {"tool": "items"})
    by_mcp = (await rest.mcp_call(rollout, "items", modern=True)).json()["result"]
    assert by_rest == by_mcp
    body = {"tool": "put", "arguments": {"key": "x", "value": "1"}, "idempotency_key": "once"}
    first, second = [await rest.done("POST", f"/v1/rollouts/{rollout}/call", body) for _ in range(2)]
    assert first == second
    assert [call["tool"] for call in await rest.calls(rollout)] == ["items", "items", "put"]


async def test_a_query_gives_every_kind_of_value_as_json(rest: Rest) -> None:
    rollout = await rest.open()
    values = {
        "1": 1,
        "9007199254740993": 9007199254740993,
        "12.50": 12.5,
        "'NaN'::float8": "NaN",
        "'-Infinity'::numeric": "-Infinity",
        "true": True,
        "null": None,
        "'größe 😀'": "größe 😀",
        "array[1, null, 3]": [1, None, 3],
        "row(1, 'a', date '2026-01-15')": [1, "a", "2026-01-15"],
        """'{"a": [1, {"b": null}]}'::jsonb""": {"a": [1, {"b": None}]},
        "'\\x00ff'::bytea": "\\x00ff",
        "'infinity'::timestamptz": "infinity",
        "'290000-01-01 12:00+00'::timestamptz": "+290000-01-01T12:00:00Z",
        "'4713-01-01 BC'::date": "-004712-01-01",
        "'2026-01-15 09:00:00.25+00'::timestamptz": "2026-01-15T09:00:00.250000Z",
        "'1 mon -2 days 03:00:01.5'::interval": "P1M-2DT10801.500000S",
        "'10.0.0.1'::inet": "10.0.0.1",
        "int4range(1, 5)": "[1,5)",
        "b'0101'": "0101",
        "'00000000-0000-0000-0000-000000000001'::uuid": "00000000-0000-0000-0000-000000000001",
        "now()": "2026-01-15T09:00:00Z",
    }
    result = await rest.done("POST", f"/v1/rollouts/{rollout}/query", {"sql": "select " + ", ".join(values)})
    assert dict(zip(values, result["rows"][0], strict=True)) == values


# -- settings that change the interface ---------------------------------------------------------------------------


async def test_an_api_key_closes_v1_and_leaves_rollout_urls_open(postgres_dsn: str, ledger_template: str) -> None:
    async with (
        copy_of(postgres_dsn, ledger_template, f"mm_key_{secrets.token_hex(4)}") as dsn,
        running_gateway(dsn, api_key="s3cret", public_url="https://gateway.example/") as running,
        httpx.AsyncClient(base_url=running.url) as http,
        httpx.AsyncClient(base_url=running.url, headers={"authorization": "Bearer s3cret"}) as owner,
    ):
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "s3cre"},
            {"authorization": "Basic x"},
        ):
            for method, path in [("GET", "/v1/rollouts"), ("POST", "/v1/rollouts"), ("GET", "/v1/rollouts/x")]:
                problem(await http.request(method, path, headers=headers), 401, "unauthorized")
        mine = Rest(owner)
        opened = (await mine.done("POST", "/v1/rollouts", {"environment": "ledger"}))["rollouts"][0]
        assert opened["url"] == f"https://gateway.example/r/{opened['id']}/mcp"
        agent = Rest(http)
        assert not (await agent.mcp_call(opened["id"], "put", key="x", value="1")).json()["result"].get("isError")
        rpc_error(await agent.mcp_call("ro_guessed", "put", key="x", value="1"), "rollout_not_found")
        for path in ("/healthz", "/readyz", "/openapi.json", "/docs"):
            assert (await http.get(path)).status_code == 200


# -- the interface's own documentation ----------------------------------------------------------------------------

Operation = tuple[str, str, dict[str, Any]]


@pytest_asyncio.fixture(loop_scope="session")
async def openapi(rest: Rest) -> dict[str, Any]:
    document: dict[str, Any] = await rest.done("GET", "/openapi.json")
    return document


def operations(document: dict[str, Any]) -> list[Operation]:
    return [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


async def test_every_row_of_the_design_is_there(openapi: dict[str, Any]) -> None:
    there = {(method, path) for method, path, _ in operations(openapi)}
    assert there >= {
        ("GET", "/v1/environments"),
        ("GET", "/v1/environments/{name}"),
        ("POST", "/v1/environments"),
        ("POST", "/v1/rollouts"),
        ("GET", "/v1/rollouts"),
        ("GET", "/v1/rollouts/{rollout}"),
        ("DELETE", "/v1/rollouts/{rollout}"),
        ("POST", "/v1/rollouts/{rollout}/renew"),
        ("POST", "/v1/rollouts/{rollout}/checkpoints"),
        ("GET", "/v1/rollouts/{rollout}/checkpoints"),
        ("GET", "/v1/checkpoints/{checkpoint}"),
        ("DELETE", "/v1/checkpoints/{checkpoint}"),
        ("POST", "/v1/checkpoints/{checkpoint}/renew"),
        ("POST", "/v1/checkpoints/{checkpoint}/pin"),
        ("DELETE", "/v1/checkpoints/{checkpoint}/pin/{owner}"),
        ("POST", "/v1/checkpoints/{checkpoint}/fork"),
        ("POST", "/v1/rollouts/{rollout}/rollback"),
        ("GET", "/v1/rollouts/{rollout}/diff"),
        ("GET", "/v1/rollouts/{rollout}/digest"),
        ("GET", "/v1/rollouts/{rollout}/events"),
        ("GET", "/v1/rollouts/{rollout}/tools"),
        ("POST", "/v1/rollouts/{rollout}/call"),
        ("POST", "/v1/rollouts/{rollout}/query"),
        ("POST", "/v1/rollouts/{rollout}/scores"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
    }


async def test_every_operation_says_what_it_does_takes_and_answers(openapi: dict[str, Any]) -> None:
    for method, path, operation in operations(openapi):
        where = f"{method} {path}"
        assert operation["summary"], where
        assert operation["tags"], where
        success = [status for status in operation["responses"] if status.startswith("2")]
        assert len(success) == 1, where
        if success != ["204"]:
            (kind,) = [
                each
                for each in operation["responses"][success[0]]["content"]
                if each in {"application/json", "text/plain"}
            ]
            assert operation["responses"][success[0]]["content"][kind]["schema"], where
        for parameter in operation.get("parameters", []):
            assert parameter.get("description"), (where, parameter["name"])
        if not path.startswith("/v1"):
            continue
        for status in ("400", "401", "404", "409", "410", "413", "415", "422", "429", "503"):
            response = operation["responses"][status]
            assert "`" in response["description"], (where, status)
            schema = response["content"]["application/problem+json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Problem"}, (where, status)
        for content in operation.get("requestBody", {"content": {}})["content"].values():
            body = content["schema"]
            reference = body.get("$ref") or next(each["$ref"] for each in body["anyOf"] if "$ref" in each)
            model = openapi["components"]["schemas"][reference.split("/")[-1]]
            assert model["examples"], where


async def test_every_field_has_a_type(openapi: dict[str, Any]) -> None:
    schemas = openapi["components"]["schemas"]
    assert len(schemas) > 25
    untyped = {("Event", "arguments"), ("Event", "result"), ("Place", "value")}  # any JSON
    untyped |= {("PlaceChange", "before"), ("PlaceChange", "after")}
    for name, schema in schemas.items():
        assert schema.get("description"), name
        for field, details in schema.get("properties", {}).items():
            typed = {"type", "$ref", "anyOf", "enum", "const"} & set(details)
            assert typed or (name, field) in untyped, (name, field)


async def test_the_examples_are_valid_bodies(openapi: dict[str, Any]) -> None:
    from megamcp import types

    for name, schema in openapi["components"]["schemas"].items():
        for example in schema.get("examples", []):
            getattr(types, name).model_validate(example)
