"""Requests that are wrong: names of nothing, bodies that are no JSON, values out of bounds, paths that lead nowhere.

What never gets past the data plane's parser is in `dataplane/test_dataplane_input.py`; what an evaluator may send, in
`../test_bad_queries.py`. See `conftest.py` for what is demanded after each test.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.bad_input.cases import JSON, OPERATIONS
from tests.integration.conftest import LEDGER
from tests.integration.promises.world import World
from tests.integration.rest import Rest, problem, rpc_error

# -- names and ids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path", "body"), OPERATIONS, ids=lambda part: str(part)[:20])
async def test_an_unknown_rollout_is_404_everywhere(rest: Rest, method: str, path: str, body: Any) -> None:
    code = "checkpoint_not_found" if path == "/rollback" else "rollout_not_found"
    for rollout in ("ro_" + "0" * 32, "..%2F..%2Fetc", "x" * 100, "%F0%9F%98%80"):
        answer = await rest.http.request(method, f"/v1/rollouts/{rollout}{path}", json=body)
        if "/" in answer.request.url.path.removeprefix("/v1/rollouts/").removesuffix(path):
            assert answer.status_code in (404, 405)
        else:
            problem(answer, 404, code)


async def test_an_unknown_rollout_is_404_over_mcp_in_both_eras(rest: Rest) -> None:
    for modern in (False, True):
        answer = await rest.mcp_call("ro_" + "0" * 32, "items", modern=modern)
        assert answer.status_code == 404
        rpc_error(answer, "rollout_not_found")


async def test_a_released_rollout_is_410_for_what_needs_it_and_still_readable(rest: Rest) -> None:
    rollout = await rest.open()
    await rest.call(rollout, "put", key="x", value="1")
    point = await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints", {})
    await rest.done("DELETE", f"/v1/rollouts/{rollout}")
    await rest.done("DELETE", f"/v1/rollouts/{rollout}")
    path = f"/v1/rollouts/{rollout}"
    for method, tail, body in [
        ("POST", "/call", {"tool": "items"}),
        ("POST", "/checkpoints", None),
        ("POST", "/renew", None),
        ("POST", "/rollback", {"checkpoint": point["id"]}),
        ("GET", "/tools", None),
        ("GET", "/digest", None),
        ("GET", "/diff", None),
        ("POST", "/query", {"sql": "select 1"}),
    ]:
        told = await rest.refused(410, "rollout_closed", method, path + tail, body)
        assert "fork" in told.get("hint", "fork")
    for modern in (False, True):
        answer = await rest.mcp_call(rollout, "items", modern=modern)
        assert answer.status_code == 410
        rpc_error(answer, "rollout_closed")
    assert (await rest.done("GET", path))["status"] == "closed"
    assert len(await rest.calls(rollout)) == 1
    diff = await rest.done("GET", f"{path}/diff?to={point['id']}")
    assert diff["servers"]["ledger"]["tables"]["item"]["total"] == 1
    await rest.done("POST", f"/v1/checkpoints/{point['id']}/fork", {})


async def test_an_expired_rollout_takes_no_call(strict: World, rest: Rest) -> None:
    rollout = await rest.open(ttl_s=0.05)
    await asyncio.sleep(0.1)
    await strict.services.reaper.once()
    await rest.refused(410, "rollout_expired", "POST", f"/v1/rollouts/{rollout}/call", {"tool": "items"})
    rpc_error(await rest.mcp_call(rollout, "items"), "rollout_expired")


@pytest.mark.parametrize("tool", ["nothing", "", "put ", "PUT", "p\0t", "x" * 300, "../put", "größe", "\u202eput"])
async def test_an_unknown_tool_is_an_error_that_names_it_and_leaves_no_row(rest: Rest, tool: str) -> None:
    rollout = await rest.open()
    answer = await rest.http.post(f"/v1/rollouts/{rollout}/call", json={"tool": tool})
    problem(answer, *(404, "unknown_tool") if tool else (400, "invalid_request"))
    for modern in (False, True) if tool.isascii() and tool.strip() == tool and "\0" not in tool else (False,):
        answer = await rest.mcp_call(rollout, tool, modern=modern)
        rpc_error(answer, "unknown_tool")
    assert await rest.calls(rollout) == []


async def test_a_checkpoint_of_another_rollout_is_refused(rest: Rest) -> None:
    mine, other = await rest.open(), await rest.open()
    await rest.call(mine, "put", key="x", value="1")
    digest = await rest.digest(mine)
    point = await rest.done("POST", f"/v1/rollouts/{other}/checkpoints", {})
    told = await rest.refused(
        409, "foreign_checkpoint", "POST", f"/v1/rollouts/{mine}/rollback", {"checkpoint": point["id"]}
    )
    assert "Fork" in told["hint"]
    assert await rest.digest(mine) == digest


# -- bodies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"{", "invalid_json"),
        (b'{"environment": "ledger"} x', "invalid_json"),
        (b'{"environment": "ledger", "ttl_s": NaN}', "invalid_json"),
        (b'{"environment": "ledger", "ttl_s": Infinity}', "invalid_json"),
        (b'{"environment": "ledger", "ttl_s": 1e400}', "invalid_json"),
        (b'{"environment": "ledger", "count": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"environment": "ledger", "group": "\\ud800"}', "invalid_json"),
        (b'{"environment": "ledger", "labels": {"a": "\\udfff"}}', "invalid_json"),
        (b'\xef\xbb\xbf{"environment": "ledger"}', "invalid_json"),
        ('{"environment": "ledger"}'.encode("utf-16"), "invalid_utf8"),
        (b'{"environment": "led\xffger"}', "invalid_utf8"),
        (b'{"environment": "\xed\xa0\x80"}', "invalid_utf8"),
        (b"[" * 5000, "too_deep"),
        (b'{"environment": "ledger", "labels": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}", "too_deep"),
        (b"[]", "invalid_request"),
        (b"null", "invalid_request"),
        (b"7", "invalid_request"),
        (b"", "invalid_request"),
    ],
    ids=lambda part: part if isinstance(part, str) else repr(part[:40]),
)
async def test_a_body_that_is_no_json_is_400(rest: Rest, raw: bytes, code: str) -> None:
    problem(await rest.http.post("/v1/rollouts", content=raw, headers=JSON), 400, code)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"put","arguments":{"key":NaN}}}', None),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"put","arguments":{"key":"\xff"}}}', None),
        (b"{", "invalid_json"),
    ],
)
async def test_over_mcp_it_is_a_parse_error(rest: Rest, raw: bytes, code: str | None) -> None:
    rollout = await rest.open()
    answer = await rest.http.post(f"/r/{rollout}/mcp", content=raw, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == -32700
    assert answer.json()["error"]["data"]["code"] in ((code,) if code else ("invalid_json", "invalid_utf8"))
    assert await rest.calls(rollout) == []


@pytest.mark.parametrize("kind", ["text/plain", "", "application/x-www-form-urlencoded", "application/json; charset=x"])
async def test_another_content_type_is_415(rest: Rest, kind: str) -> None:
    answer = await rest.http.post(
        "/v1/rollouts", content=b'{"environment": "ledger"}', headers={"content-type": kind} if kind else {}
    )
    problem(answer, 415, "unsupported_media_type")


async def test_a_body_over_the_limit_is_413_and_costs_no_memory(rest: Rest) -> None:
    rollout = await rest.open()
    large = json.dumps({"tool": "put", "arguments": {"key": "k", "value": "x" * 100_000}}).encode()
    path = f"/v1/rollouts/{rollout}/call"
    told = problem(await rest.http.post(path, content=large, headers=JSON), 413, "body_too_large")
    assert told["limit"] == 100_000

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 4096

    problem(await rest.http.post(path, content=pieces(), headers=JSON), 413, "body_too_large")
    for modern in (False, True):
        answer = await rest.mcp_call(rollout, "put", modern=modern, key="k", value="x" * 100_000)
        assert answer.status_code == 413
        rpc_error(answer, "body_too_large")
    assert await rest.calls(rollout) == []


@pytest.mark.parametrize(
    "body",
    [
        {"environment": 7},
        {"environment": ""},
        {"environment": "x" * 301},
        {"environment": "led\0ger"},
        {"environment": "ledger", "count": 0},
        {"environment": "ledger", "count": -1},
        {"environment": "ledger", "count": "1"},
        {"environment": "ledger", "count": True},
        {"environment": "ledger", "count": 1.5},
        {"environment": "ledger", "ttl_s": 0},
        {"environment": "ledger", "ttl_s": -3600},
        {"environment": "ledger", "ttl_s": "60"},
        {"environment": "ledger", "seed": 2**63},
        {"environment": "ledger", "seed": -(2**63) - 1},
        {"environment": "ledger", "seed": "1"},
        {"environment": "ledger", "group": ""},
        {"environment": "ledger", "group": "x" * 201},
        {"environment": "ledger", "group": "a\0b"},
        {"environment": "ledger", "labels": []},
        {"environment": "ledger", "labels": {"a": 1}},
        {"environment": "ledger", "labels": {"a": "\0"}},
        {"environment": "ledger", "labels": {"\0": "a"}},
        {"environment": "ledger", "labels": {"a": "x" * 1001}},
        {"environment": "ledger", "labels": {str(n): "x" for n in range(65)}},
        {"environment": "ledger", "environmemt": "ledger"},
    ],
    ids=lambda body: str(body)[-40:],
)
async def test_opening_with_a_wrong_value_is_400_and_says_which(rest: Rest, body: dict[str, Any]) -> None:
    told = await rest.refused(400, "invalid_request", "POST", "/v1/rollouts", body)
    assert told["problems"][0]["where"].startswith("body.")
    assert told["problems"][0]["problem"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("rollouts/{rollout}/checkpoints", {"label": "a\0"}),
        ("rollouts/{rollout}/checkpoints", {"label": "x" * 201}),
        ("rollouts/{rollout}/checkpoints", {"label": 5}),
        ("rollouts/{rollout}/checkpoints", {"turn": -1}),
        ("rollouts/{rollout}/checkpoints", {"turn": 2**31}),
        ("rollouts/{rollout}/checkpoints", {"turn": 10**30}),
        ("rollouts/{rollout}/checkpoints", {"turn": "1"}),
        ("rollouts/{rollout}/checkpoints", {"ttl_s": -1}),
        ("rollouts/{rollout}/renew", {"ttl_s": 0}),
        ("rollouts/{rollout}/renew", {"ttl_s": []}),
        ("rollouts/{rollout}/rollback", {}),
        ("rollouts/{rollout}/rollback", {"checkpoint": 5}),
        ("rollouts/{rollout}/rollback", {"checkpoint": "a\0"}),
        ("rollouts/{rollout}/rollback", {"checkpoint": "x" * 101}),
        ("rollouts/{rollout}/scores", {"name": "r"}),
        ("rollouts/{rollout}/scores", {"name": "", "value": 1}),
        ("rollouts/{rollout}/scores", {"name": "r\0", "value": 1}),
        ("rollouts/{rollout}/scores", {"name": "r", "value": "NaN"}),
        ("rollouts/{rollout}/scores", {"name": "r", "value": True}),
        ("rollouts/{rollout}/scores", {"name": "r", "value": 1, "turn": 2**70}),
        ("rollouts/{rollout}/scores", {"name": "r", "value": 1, "data": {"deep": [{"x\0": 1}]}}),
        ("rollouts/{rollout}/scores", {"name": "r", "value": 1, "data": [1]}),
        ("rollouts/{rollout}/call", {}),
        ("rollouts/{rollout}/call", {"tool": 1}),
        ("rollouts/{rollout}/call", {"tool": "items", "arguments": []}),
        ("rollouts/{rollout}/call", {"tool": "items", "arguments": "{}"}),
        ("rollouts/{rollout}/call", {"tool": "items", "idempotency_key": ""}),
        ("rollouts/{rollout}/call", {"tool": "items", "idempotency_key": "x" * 513}),
        ("rollouts/{rollout}/query", {"sql": ""}),
        ("rollouts/{rollout}/query", {"sql": "x" * 100_001}),
        ("rollouts/{rollout}/query", {"sql": 1}),
        ("rollouts/{rollout}/query", {"sql": "select 1", "at": "a\0"}),
        ("checkpoints/{checkpoint}/fork", {"count": 0}),
        ("checkpoints/{checkpoint}/fork", {"seed": "random"}),
        ("checkpoints/{checkpoint}/fork", {"seed": 1.5}),
        ("checkpoints/{checkpoint}/fork", {"seed": True}),
        ("checkpoints/{checkpoint}/fork", {"group": ""}),
        ("checkpoints/{checkpoint}/fork", {"labels": {"a": "\0"}}),
        ("checkpoints/{checkpoint}/pin", {}),
        ("checkpoints/{checkpoint}/pin", {"owner": ""}),
        ("checkpoints/{checkpoint}/pin", {"owner": "a\0"}),
        ("checkpoints/{checkpoint}/pin", {"owner": "me", "ttl_s": -1}),
        ("checkpoints/{checkpoint}/renew", {"ttl": 1}),
    ],
    ids=lambda part: str(part)[:60],
)
async def test_every_other_body_is_checked_too(rest: Rest, path: str, body: dict[str, Any]) -> None:
    rollout = await rest.open()
    point = await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints", {})
    before = await rest.done("GET", f"/v1/rollouts/{rollout}/events")
    # JSON text over the body limit has a status of its own.
    code = (413, "body_too_large") if len(str(body)) > 100_000 else (400, "invalid_request")
    await rest.refused(*code, "POST", "/v1/" + path.format(rollout=rollout, checkpoint=point["id"]), body)
    assert await rest.done("GET", f"/v1/rollouts/{rollout}/events") == before


async def test_numbers_beyond_the_bounds_of_this_gateway_have_codes_of_their_own(rest: Rest) -> None:
    rollout = await rest.open()
    point = (await rest.done("POST", f"/v1/rollouts/{rollout}/checkpoints", {}))["id"]
    for path, body, code in [
        ("/v1/rollouts", {"environment": "ledger", "count": 9}, "count_too_large"),
        ("/v1/rollouts", {"environment": "ledger", "count": 10**30}, "count_too_large"),
        ("/v1/rollouts", {"environment": "ledger", "ttl_s": 1001}, "ttl_too_long"),
        ("/v1/rollouts", {"environment": "ledger", "ttl_s": 1e308}, "ttl_too_long"),
        (f"/v1/rollouts/{rollout}/renew", {"ttl_s": 1e300}, "ttl_too_long"),
        (f"/v1/rollouts/{rollout}/checkpoints", {"ttl_s": 1001}, "ttl_too_long"),
        (f"/v1/checkpoints/{point}/fork", {"count": 10**9}, "count_too_large"),
        (f"/v1/checkpoints/{point}/fork", {"seed": 2**64}, "invalid_seed"),
        (f"/v1/checkpoints/{point}/pin", {"owner": "me", "ttl_s": 1e9}, "ttl_too_long"),
        (f"/v1/checkpoints/{point}/renew", {"ttl_s": 1e9}, "ttl_too_long"),
    ]:
        await rest.refused(400, code, "POST", path, body)


@pytest.mark.parametrize(
    "query",
    [
        "rollouts?cursor=x",
        "rollouts?cursor=~",
        "rollouts?cursor=9999-12-31T23:59:59.999999-23:59~x",
        "rollouts?cursor=0001-01-01T00:00:00%2B23:00~x",
        "rollouts?cursor=2026-01-01T00:00:00Z~%00",
        "rollouts?group=%00",
        "rollouts?status=running",
        "rollouts?limit=0",
        "rollouts?limit=1001",
        "rollouts?limit=x",
        "rollouts/%00",
        "rollouts/" + "x" * 101,
        "checkpoints/%00",
        "environments/%00",
        "rollouts/{rollout}/events?after=-1",
        "rollouts/{rollout}/events?after=9223372036854775808",
        "rollouts/{rollout}/events?after=" + "9" * 40,
        "rollouts/{rollout}/digest?at=%00",
        "rollouts/{rollout}/diff?from=%00",
        "rollouts/{rollout}/diff?to=" + "x" * 101,
    ],
)
async def test_a_bad_path_or_query_string_is_400(rest: Rest, query: str) -> None:
    answer = await rest.http.get("/v1/" + query.format(rollout=await rest.open()))
    assert answer.status_code == 400, answer.text
    problem(answer, 400, answer.json()["code"])
    assert answer.json()["code"] in ("invalid_request", "invalid_cursor", "nul_character")


async def test_paths_and_methods_that_are_not_there(rest: Rest) -> None:
    rollout = await rest.open()
    for path in ("/", "/v1", "/v2/rollouts", "/v1/rollouts/x/y", "/r/", "/r/x", f"/r/{rollout}", "/e/x/y", "/mcpx"):
        for method in ("GET", "POST", "DELETE", "OPTIONS", "PUT"):
            await rest.refused(404, "no_such_path", method, path)
        assert (await rest.http.head(path)).status_code == 404
    for method in ("PUT", "PATCH", "OPTIONS", "TRACE"):
        answer = await rest.http.request(method, f"/v1/rollouts/{rollout}")
        problem(answer, 405, "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) & {"GET", "DELETE"}
    for path in ("../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd"):
        assert (await rest.http.get(f"/v1/environments/{path}")).status_code in (404, 405)


@pytest.mark.parametrize(
    "path",
    ["/nonexistent", "../../etc", "/etc/passwd", "/dev/null", "/dev/zero", "~nobody-at-all/x", "x" * 300, "relative"],
)
async def test_loading_what_is_no_environment_is_422_and_names_the_file(rest: Rest, path: str) -> None:
    before = await rest.done("GET", "/v1/environments")
    code = "environment_not_there" if path in ("/nonexistent", "../../etc", "relative") else "invalid_environment"
    told = await rest.refused(422, code, "POST", "/v1/environments", {"path": path})
    assert told["hint"]
    assert await rest.done("GET", "/v1/environments") == before


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("schema.sql", "../secret.sql"), "outside of the environment's folder"),
        (("schema.sql", "/etc/passwd"), "outside of the environment's folder"),
        (("schema.sql", "."), "not a regular file"),
        (("schema.sql", "missing.sql"), "No such file"),
        (("schema.sql", "a\\u0000b"), "null"),
        (('kind = "schema"', 'kind = "magic"'), "kind"),
        (("ledger_server:server", "os; rm"), "entry"),
        (('clock = "2026-01-15T09:00:00Z"', 'clock = "2026-01-15"'), "clock"),
        (('name = "ledger"', 'name = "led ger"'), "name"),
        (("[servers.ledger]", "[servers.a__b]"), "double underscore"),
    ],
    ids=lambda part: str(part)[:40],
)
async def test_an_environment_with_a_fault_is_refused_by_name(
    rest: Rest, tmp_path: Path, change: tuple[str, str], expected: str
) -> None:
    (tmp_path / "secret.sql").write_text("select 1;")
    folder = tmp_path / "env"
    folder.mkdir()
    for file in ("schema.sql", "seed.sql"):
        (folder / file).write_text((LEDGER / file).read_text())
    text = (LEDGER / "environment.toml").read_text()
    changed = text.replace(*change).replace(
        "servers.ledger.state", "servers.a__b.state" if "a__b" in change[1] else "servers.ledger.state"
    )
    assert changed != text
    (folder / "environment.toml").write_text(changed)
    told = await rest.refused(422, "invalid_environment", "POST", "/v1/environments", {"path": str(folder)})
    assert expected in told["detail"], told
