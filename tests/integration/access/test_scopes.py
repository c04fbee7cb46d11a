"""What each scope may do, over every route that there is, and who comes in at all."""

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from megamcp.access.entrance import host_allowed
from megamcp.access.principal import Scope
from megamcp.access.rights import MCP, RIGHTS
from megamcp.client import Client, Forbidden, NoCapacity, Retry, Unauthorized
from megamcp.dataplane.forward import Forwarder
from megamcp.settings import Settings
from tests.integration.access.conftest import ADMIN, Guarded
from tests.integration.promises.world import World
from tests.integration.rest import problem

HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
}
ACCEPT = {"accept": "application/json, text/event-stream"}
SECURITY = Path(__file__).parents[3] / "docs" / "security.md"


async def test_every_route_is_for_the_scopes_of_the_table_and_no_other(guarded: Guarded) -> None:
    document = await guarded.rest(None).done("GET", "/openapi.json")
    routes = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method in methods
        if path.startswith("/v1/")
    }
    assert routes == set(RIGHTS)
    for scope in Scope:
        rest = guarded.rest(await guarded.key(scope))
        for method, path in sorted(routes):
            # Nothing is there by these names, and no body is right: what is refused for its scope is refused first.
            filled = re.sub(r"{\w+}", "nothing", path)
            answer = await rest.http.request(method, filled)
            if scope in RIGHTS[method, path].scopes:
                assert answer.status_code not in (401, 403), (scope, method, path, answer.text)
            else:
                problem(answer, 403, "forbidden")
                assert 'error="insufficient_scope"' in answer.headers["www-authenticate"]
    for method, path in sorted(routes):
        answer = await guarded.rest(None).http.request(method, re.sub(r"{\w+}", "nothing", path))
        problem(answer, 401, "unauthorized")
        assert answer.headers["www-authenticate"].startswith("Bearer ")


@pytest.mark.parametrize("scope", list(Scope))
async def test_endpoints_of_agents_are_for_the_scopes_of_the_table(guarded: Guarded, scope: Scope) -> None:
    rollout = await guarded.rest(ADMIN).open()
    rest = guarded.rest(await guarded.key(scope))
    for path in (f"/r/{rollout}/mcp", "/e/ledger/mcp", "/mcp"):
        answer = await rest.http.post(path, json=HELLO, headers={**ACCEPT, "x-rollout-id": rollout})
        if scope in MCP.scopes:
            assert answer.status_code == 200, answer.text
        else:
            assert answer.status_code == 403
            assert answer.json()["error"]["data"]["code"] == "forbidden"
        answer = await guarded.rest(None).http.post(path, json=HELLO, headers={**ACCEPT, "x-rollout-id": rollout})
        assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (401, "unauthorized")


async def test_a_rollouts_url_is_its_own_key_where_agents_need_none(guarded: Guarded) -> None:
    rollout = await guarded.rest(ADMIN).open()
    for headers in ({}, {"authorization": "Bearer of-somebody-else"}):
        answer = await guarded.rest(None, strict=False).mcp(rollout, "tools/list", **headers)
        assert answer.status_code == 200, answer.text
    answer = await guarded.rest("mmk_0000000000000000_x", strict=False).mcp(rollout, "tools/list")
    assert answer.status_code == 401


async def test_a_key_is_kept_as_a_hash_and_shown_once(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    admin = guarded.rest(ADMIN)
    made = await admin.done("POST", "/v1/keys", {"name": "once", "scope": "trainer", "tenant": "a"})
    listed = await admin.http.get("/v1/keys")
    assert made["secret"] not in listed.text
    (shown,) = [key for key in listed.json()["keys"] if key["id"] == made["id"]]
    assert (shown["name"], shown["scope"], shown["tenant"], shown["created_by"]) == (
        "once",
        "trainer",
        "a",
        "bootstrap",
    )
    await guarded.rest(made["secret"]).open()
    connection = await asyncpg.connect(guarded.strict.settings.database_url.get_secret_value())  # type: ignore[union-attr]
    try:
        row = await connection.fetchrow("select * from megamcp.api_keys where id = $1", made["id"])
    finally:
        await connection.close()
    assert row["hash"] == hashlib.sha256(made["secret"].encode()).digest()
    assert made["secret"] not in repr(dict(row))
    assert made["secret"] not in guarded.audit.read_text()
    assert made["secret"] not in caplog.text


async def test_a_revoked_key_is_refused_by_each_gateway_within_seconds(guarded: Guarded, monkeypatch: Any) -> None:
    key = await guarded.key("trainer")
    here, there = guarded.rest(key), guarded.rest(key, strict=False)
    for rest in (here, there):
        await rest.done("GET", "/v1/rollouts")
    identifier = key.split("_")[1]
    await guarded.rest(ADMIN).done("DELETE", f"/v1/keys/{identifier}")
    await here.refused(401, "unauthorized", "GET", "/v1/rollouts")
    # The other gateway's memory of it ends by itself: it says until when.
    known = guarded.open.services.entrance.keys._known[identifier]
    known.until = 0
    await there.refused(401, "unauthorized", "GET", "/v1/rollouts")
    await guarded.rest(ADMIN).done("DELETE", f"/v1/keys/{identifier}")
    await guarded.rest(ADMIN).refused(404, "key_not_found", "DELETE", "/v1/keys/never")


async def test_the_client_makes_lists_and_revokes_keys(guarded: Guarded) -> None:
    async with Client(guarded.strict.url, api_key=ADMIN) as admin:
        made = await admin.create_key("by the client", "trainer", tenant="c", rollouts=1)
        async with Client(guarded.strict.url, api_key=made.secret, retry=Retry(attempts=1)) as trainer:
            await trainer.open("ledger")
            with pytest.raises(NoCapacity):
                await trainer.open("ledger")
            with pytest.raises(Forbidden):
                await trainer.keys()
            await admin.revoke_key(made.id)
            with pytest.raises(Unauthorized):
                await trainer.environments()
        (listed,) = [key for key in await admin.keys() if key.id == made.id]
        assert listed.revoked_at is not None
        assert listed.quotas.rollouts == 1


async def test_a_key_ends_with_its_time_and_a_changed_one_is_none(guarded: Guarded) -> None:
    key = await guarded.key("trainer", ttl_s=0.001)
    await guarded.rest(key).refused(401, "unauthorized", "GET", "/v1/rollouts")
    good = await guarded.key("trainer")
    await guarded.rest(good).done("GET", "/v1/rollouts")
    for bad in (good[:-1], good + "x", good.swapcase(), good.rpartition("_")[0], "mmk__", "mmk_a_" + "x" * 300):
        await guarded.rest(bad).refused(401, "unauthorized", "GET", "/v1/rollouts")


async def test_deeds_are_written_down_with_who_did_them_and_what_came_of_it(guarded: Guarded) -> None:
    trainer, reader = await guarded.key("trainer", "audited"), await guarded.key("read-only", "audited")
    before = len(guarded.audit.read_text().splitlines())
    rollout = await guarded.rest(trainer).open()
    point = (await guarded.rest(trainer).done("POST", f"/v1/rollouts/{rollout}/checkpoints"))["id"]
    await guarded.rest(reader).refused(403, "forbidden", "POST", f"/v1/checkpoints/{point}/fork")
    await guarded.rest(trainer).done("GET", f"/v1/rollouts/{rollout}")
    await guarded.rest(trainer).call(rollout, "put", key="a", value="b")
    lines = [json.loads(line) for line in guarded.audit.read_text().splitlines()[before:]]
    assert [(line["deed"], line["target"], line["status"], line["who"]["name"]) for line in lines] == [
        ("rollout.open", None, 201, "trainer of audited"),
        ("checkpoint.make", rollout, 201, "trainer of audited"),
        ("checkpoint.fork", point, 403, "read-only of audited"),
    ]
    assert trainer not in guarded.audit.read_text()


async def test_a_host_by_another_name_is_refused(guarded: Guarded, world: World) -> None:
    async with httpx.AsyncClient() as http:
        for host in ("localhost", "127.0.0.1:8600", "[::1]:8600", "a.localhost", "10.0.0.7"):
            assert (await http.get(f"{world.url}/healthz", headers={"host": host})).status_code == 200
        for host in ("evil.example", "evil.example:8600", "localhost.evil.example", "127.0.0.1.evil.example", ""):
            answer = await http.get(f"{world.url}/v1/rollouts", headers={"host": host})
            assert answer.status_code in (400, 403), (host, answer.text)
            answer = await http.post(f"{world.url}/r/ro_x/mcp", json=HELLO, headers={**ACCEPT, "host": host})
            assert answer.status_code in (400, 403), (host, answer.text)
        problem(await http.get(f"{world.url}/v1/rollouts", headers={"host": "evil.example"}), 403, "host_refused")
        assert (await http.get(f"{guarded.open.url}/healthz", headers={"host": "gateway.example"})).status_code == 200
        assert (await http.get(f"{guarded.open.url}/healthz", headers={"host": "evil.example"})).status_code == 403


async def test_a_result_over_the_limit_is_refused_where_the_call_was_done(guarded: Guarded) -> None:
    rest = guarded.rest(ADMIN, strict=False)
    rollout = await rest.open()
    large = {"tool": "put", "arguments": {"key": "k", "value": "x" * 150_000}, "idempotency_key": "once"}
    for _ in range(2):  # a retry is answered by what was recorded
        await rest.refused(502, "result_too_large", "POST", f"/v1/rollouts/{rollout}/call", large)
    assert [call["state"] for call in await rest.calls(rollout)].count("done") == 1


def test_requests_and_results_may_have_64_mebibytes_unless_said_otherwise() -> None:
    settings = Settings()
    assert (settings.max_body_bytes, settings.max_result_bytes) == (64 << 20, 64 << 20)


def test_the_table_of_scopes_is_the_one_in_the_docs() -> None:
    rows = re.findall(r"^\| `(GET|POST|DELETE) (\S+)` \| (.+) \|$", SECURITY.read_text(), re.MULTILINE)
    shown = {(method, path): {name.strip() for name in scopes.split(",")} for method, path, scopes in rows}
    assert shown == {route: {str(scope) for scope in found.scopes} for route, found in RIGHTS.items()}


async def test_a_web_page_of_another_origin_gets_nothing_done(world: World) -> None:
    async with httpx.AsyncClient() as http:
        (rollout,) = [row["id"] for row in await world.services.rollouts.open("ledger")]
        url = f"{world.url}/v1/rollouts/{rollout}/checkpoints"  # without a body no browser asks first
        for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example", "x"):
            problem(await http.post(url, headers={"origin": origin}), 403, "origin_refused")
        for origin in ("http://localhost:3000", world.url, None):
            assert (await http.post(url, headers={"origin": origin} if origin else {})).status_code == 201
        pages = {"host": "10.0.0.7:8600", "origin": "https://10.0.0.7:8600"}
        assert (await http.post(url, headers=pages)).status_code == 201


async def test_what_one_process_hands_to_another_is_let_in_by_its_host(tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def find(peer: str) -> str:
        return f"unix:{tmp_path}/s"

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    scope = {"method": "GET", "path": "/r/ro_x/mcp", "headers": [(b"host", b"of.the.client"), (b"x-a", b"b")]}
    async with await asyncio.start_unix_server(hear, f"{tmp_path}/s"):
        assert await Forwarder(find).forward("00000000", scope, b"", receive, send)
    (host,) = re.findall(rb"(?im)^host: (.+)\r$", heads[0])
    assert host_allowed(host, frozenset({"localhost"}))
