"""Tokens of an issuer: which are good, what they are good for, and how a client finds out who gives them."""

import base64
import hashlib
import hmac
import json
import time
from typing import Any

import jwt
import pytest

from megamcp.access.tokens import Tokens
from megamcp.errors import Unauthorized
from tests.integration.access.conftest import ADMIN, Guarded
from tests.integration.rest import problem


def claims(guarded: Guarded, **more: Any) -> dict[str, Any]:
    return {"aud": guarded.strict.url, "scope": "openid megamcp:trainer", "tenant": "of-tokens", **more}


@pytest.mark.parametrize("kid", ["one", "two", "three"])
async def test_a_token_is_a_key_by_each_algorithm(guarded: Guarded, kid: str) -> None:
    rest = guarded.rest(guarded.issuer.token(kid, claims(guarded)))
    rollout = await rest.open()
    assert (await rest.mcp(rollout, "tools/list")).status_code == 200
    await rest.refused(403, "forbidden", "GET", "/v1/keys")
    other = guarded.rest(guarded.issuer.token(kid, claims(guarded, tenant="another")))
    await other.refused(404, "rollout_not_found", "GET", f"/v1/rollouts/{rollout}")


async def test_what_is_wrong_with_a_token_keeps_it_out(guarded: Guarded) -> None:
    issuer, good = guarded.issuer, claims(guarded)
    private = issuer.keys["two"][1]
    modulus = json.dumps(jwt.get_algorithm_by_name("RS256").to_jwk(private.public_key(), as_dict=True)).encode()
    header = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"two"}').rstrip(b"=")
    body = base64.urlsafe_b64encode(json.dumps({**good, "iss": issuer.url, "exp": time.time() + 60}).encode())
    signed = header + b"." + body.rstrip(b"=")
    confused = signed + b"." + base64.urlsafe_b64encode(hmac.digest(modulus, signed, hashlib.sha256)).rstrip(b"=")
    stranger = type(issuer)(issuer.url)
    stranger.add("one")
    bad = {
        "expired": issuer.token("one", {**good, "exp": time.time() - 60}),
        "without an end": jwt.encode({**good, "iss": issuer.url}, issuer.keys["one"][1], "ES256", {"kid": "one"}),
        "not yet": issuer.token("one", {**good, "nbf": time.time() + 600}),
        "of another issuer": issuer.token("one", {**good, "iss": "https://other.example"}),
        "for another audience": issuer.token("one", {**good, "aud": "https://other.example"}),
        "for a longer name": issuer.token("one", {**good, "aud": f"{guarded.strict.url}.example"}),
        "for nobody": issuer.token("one", {**good, "aud": []}),
        "without tenant": issuer.token("one", {**good, "tenant": None}),
        "of a list of tenants": issuer.token("one", {**good, "tenant": ["of-tokens"]}),
        "signed by another": stranger.token("one", good),
        "unsigned": jwt.encode({**good, "iss": issuer.url, "exp": time.time() + 60}, None, "none", {"kid": "one"}),
        "signed by the public key": confused.decode(),
        "of an algorithm that isn't taken": jwt.encode(
            {**good, "iss": issuer.url, "exp": time.time() + 60}, private, "RS512", {"kid": "two"}
        ),
        "with its end cut off": issuer.token("one", good)[:-2],
        "no token": "a.b.c",
    }
    for what, token in bad.items():
        answer = await guarded.rest(token).http.get("/v1/rollouts")
        assert answer.status_code == 401, what
        assert token not in answer.text
        assert 'error="invalid_token"' in answer.headers["www-authenticate"]
    answer = await guarded.rest(issuer.token("one", {**good, "scope": "openid admin"})).http.get("/v1/rollouts")
    problem(answer, 403, "forbidden")
    await guarded.rest(issuer.token("one", good)).done("GET", "/v1/rollouts")


async def test_keys_of_the_issuer_that_change_are_found(guarded: Guarded) -> None:
    issuer, settings = guarded.issuer, guarded.strict.settings
    tokens = Tokens(settings)
    assert (await tokens.read(issuer.token("one", claims(guarded)))).tenant == "of-tokens"
    asked = issuer.asked
    assert await tokens.read(issuer.token("two", claims(guarded)))
    assert issuer.asked == asked
    issuer.add("new")
    with pytest.raises(Unauthorized):  # just asked: a stranger's kids make nobody ask again and again
        await tokens.read(issuer.token("new", claims(guarded)))
    assert issuer.asked == asked
    tokens._fetched -= 11
    assert await tokens.read(issuer.token("new", claims(guarded)))
    assert issuer.asked == asked + 1
    gone = issuer.token("new", claims(guarded, sub="later"))
    del issuer.keys["new"]
    tokens._fetched -= 601
    with pytest.raises(Unauthorized):
        await tokens.read(gone)


async def test_a_token_for_one_rollout_is_good_for_that_one(guarded: Guarded) -> None:
    trainer = guarded.rest(guarded.issuer.token("one", claims(guarded)))
    rollout, other = await trainer.open(), await trainer.open()
    point = (await trainer.done("POST", f"/v1/rollouts/{other}/checkpoints"))["id"]
    bound = claims(guarded, scope="megamcp:agent", rollout=rollout)
    agent = guarded.rest(guarded.issuer.token("one", bound))
    assert (await agent.mcp(rollout, "tools/list")).status_code == 200
    assert (await agent.mcp(other, "tools/list")).status_code == 400  # the URL and the token name different ones
    hello = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accept = {"accept": "application/json, text/event-stream"}
    assert (await agent.http.post("/mcp", json=hello, headers=accept)).status_code == 200
    await agent.refused(404, "rollout_not_found", "GET", f"/v1/rollouts/{other}/tools")
    await agent.done("GET", f"/v1/rollouts/{rollout}/tools")
    await agent.refused(403, "forbidden", "GET", "/v1/environments")
    mighty = guarded.rest(guarded.issuer.token("one", {**bound, "scope": "megamcp:admin"}))
    await mighty.refused(404, "rollout_not_found", "GET", f"/v1/rollouts/{other}")
    await mighty.refused(403, "forbidden", "GET", f"/v1/checkpoints/{point}")
    await mighty.refused(404, "checkpoint_not_found", "GET", f"/v1/rollouts/{rollout}/diff?from={point}")
    answer = await agent.http.post(
        "/e/ledger/mcp",
        json={**hello, "method": "initialize", "params": {"protocolVersion": "2025-11-25"}},
        headers=accept,
    )
    assert answer.status_code != 500


async def test_a_token_for_one_endpoint_is_good_for_that_one(guarded: Guarded) -> None:
    admin = guarded.rest(ADMIN)
    rollout, other = await admin.open(), await admin.open()
    here = claims(guarded, aud=f"{guarded.strict.url}/r/{rollout}/mcp", tenant="default", scope="megamcp:agent")
    agent = guarded.rest(guarded.issuer.token("one", here))
    assert (await agent.mcp(rollout, "tools/list")).status_code == 200
    answer = await agent.mcp(other, "tools/list")
    assert (answer.status_code, answer.json()["error"]["data"]["code"]) == (401, "invalid_token")
    await agent.refused(401, "invalid_token", "GET", "/v1/environments")


async def test_a_client_that_is_refused_learns_who_gives_tokens(guarded: Guarded) -> None:
    rest, base = guarded.rest(None), guarded.strict.url
    answer = await rest.mcp("ro_x", "tools/list")
    where = f"{base}/.well-known/oauth-protected-resource/r/ro_x/mcp"
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == f'Bearer resource_metadata="{where}", scope="megamcp:agent"'
    document = (await rest.http.get(where)).json()
    assert document["resource"] == f"{base}/r/ro_x/mcp"
    assert document["authorization_servers"] == [guarded.issuer.url]
    assert document["bearer_methods_supported"] == ["header"]
    answer = await rest.http.get("/v1/rollouts")
    whole = f"{base}/.well-known/oauth-protected-resource"
    assert f'resource_metadata="{whole}"' in answer.headers["www-authenticate"]
    assert (await rest.http.get(whole)).json()["resource"] == base
    await guarded.rest(None, strict=False).refused(404, "no_such_path", "GET", "/.well-known/oauth-protected-resource")
