"""Bad input and bad tools: each a clear error of a documented shape, nothing lost or leaked, nobody else concerned.

While each test runs, a bystander of the same gateway and the same tool server goes on calling; after it, no lock is
held, no journal row is left running and no call is in flight. What never gets past the data plane's parser is in
`dataplane/test_dataplane_input.py`; what an evaluator may send is in `test_bad_queries.py`.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from pydantic import SecretStr

from megamcp.app import prepare
from megamcp.postgres import EmbeddedPostgres
from megamcp.settings import Settings
from megamcp.testing import running_gateway
from tests.integration.conftest import LEDGER, copy_of
from tests.integration.promises.world import World
from tests.integration.rest import Rest, problem, rpc_error

HELD = """select a.application_name, l.mode from pg_locks l join pg_stat_activity a using (pid)
    where l.locktype = 'advisory' and a.datname = current_database() and a.application_name <> 'megamcp instance'"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def strict(postgres_dsn: str, ledger_template: str) -> AsyncIterator[World]:
    """A gateway with short deadlines and little room."""
    async with (
        copy_of(postgres_dsn, ledger_template, f"mm_strict_{secrets.token_hex(4)}") as dsn,
        running_gateway(
            dsn,
            call_timeout_s=2.5,
            quiesce_timeout_s=2,
            rollback_grace_s=0.2,
            queue_per_rollout=3,
            calls_in_flight=12,
            max_rollouts=40,
            max_fork=8,
            max_ttl_s=1000,
            max_body_bytes=100_000,
            reap_interval_s=3600,
        ) as running,
    ):
        yield World(running.services, running.url, dsn)


@pytest_asyncio.fixture(loop_scope="session")
async def rest(strict: World) -> AsyncIterator[Rest]:
    async with httpx.AsyncClient(base_url=strict.url, timeout=20) as http:
        made = Rest(http)
        yield made
        for rollout in (await made.done("GET", "/v1/rollouts?status=open&limit=1000"))["rollouts"]:
            await http.delete(f"/v1/rollouts/{rollout['id']}")


@pytest.fixture
def harms_the_server() -> None:
    """Asked for by tests whose tool blocks the whole server: the bystander's calls may fail, and are repeated."""


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def bystander(strict: World, rest: Rest, request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Another rollout goes on meanwhile, and nothing is left at the end."""
    other = await rest.open()
    over = asyncio.Event()

    async def go_on() -> int:
        number = 0
        while not over.is_set() or number == 0:
            number += 1
            answer = await rest.http.post(
                f"/v1/rollouts/{other}/call",
                json={"tool": "increment", "arguments": {"owner": "owner-1"}, "idempotency_key": f"k{number}"},
            )
            if answer.status_code in (429, 502, 504) and "harms_the_server" in request.fixturenames:
                number -= 1  # whole server is blocked or full: the bystander is told so, and repeats
            else:
                assert answer.status_code == 200, answer.text
                assert answer.json()["structuredContent"] == {"result": 100 + number}, answer.text
            await asyncio.sleep(0.02)
        return number

    task = asyncio.create_task(go_on())
    yield
    over.set()
    done = await asyncio.wait_for(task, 20)
    assert await rest.items(other) == {}
    assert len([call for call in await rest.calls(other) if call["state"] == "done"]) == done + 1
    for _ in range(100):
        left = [
            *await strict.execute(HELD),
            *await strict.execute("select * from megamcp.events where state='running'"),
        ]
        if not left and strict.services.dataplane.in_flight == 0:
            break
        await asyncio.sleep(0.05)
    assert left == []
    assert strict.services.dataplane.in_flight == 0


# -- names and ids ------------------------------------------------------------------------------------------------

OPERATIONS: list[tuple[str, str, Any]] = [
    ("GET", "", None),
    ("POST", "/renew", {}),
    ("POST", "/checkpoints", {}),
    ("GET", "/checkpoints", None),
    ("POST", "/rollback", {"checkpoint": "cp_none"}),
    ("GET", "/diff", None),
    ("GET", "/digest", None),
    ("POST", "/query", {"sql": "select 1"}),
    ("GET", "/events", None),
    ("POST", "/scores", {"name": "reward", "value": 1}),
    ("GET", "/tools", None),
    ("POST", "/call", {"tool": "items"}),
]


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

JSON = {"content-type": "application/json"}


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
    told = await rest.refused(422, "invalid_environment", "POST", "/v1/environments", {"path": path})
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
