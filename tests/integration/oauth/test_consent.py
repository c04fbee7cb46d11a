"""Tool servers that want a person's consent: asked for once, kept for all gateways, renewed, widened, taken back."""

import asyncio
import json
import logging
import sys
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from megamcp.testing import Gateway
from tests.integration.oauth.conftest import Scene


def scopes_of(url: str) -> set[str]:
    return set(parse_qs(urlsplit(url).query)["scope"][0].split())


async def test_a_call_waits_for_consent_and_runs_after_it(scene: Scene) -> None:
    await scene.load()
    url = await scene.refused()
    assert scene.guarded.ran == []
    assert await scene.refused() == url  # who asks again is not asked something else
    page = await scene.visit(url)
    assert (page.status_code, "Authorized" in page.text) == (200, True)
    await scene.done()
    assert scene.guarded.ran == ["look"]
    assert len(scene.guarded.issuer.clients) == 1


async def test_both_eras_are_told_in_their_own_words(scene: Scene) -> None:
    await scene.load()
    old = (await scene.rpc("tools/list", {}, modern=False))["error"]
    assert (old["code"], old["data"]["elicitations"][0]["mode"]) == (-32042, "url")
    call = {"name": "look", "arguments": {}}
    asking = (await scene.rpc("tools/call", call, modern=True))["result"]
    assert asking["resultType"] == "input_required"
    [(key, question)] = asking["inputRequests"].items()
    assert question["params"]["url"] == old["data"]["elicitations"][0]["url"]
    await scene.visit(question["params"]["url"])
    answered = {"requestState": asking["requestState"], "inputResponses": {key: {"action": "accept"}}}
    done = (await scene.rpc("tools/call", {**call, **answered}, modern=True))["result"]
    assert done["content"][0]["text"] == "seen"


async def test_a_call_that_was_refused_leaves_its_idempotency_key_free(scene: Scene) -> None:
    await (await scene.load()).authorized()
    await scene.done()
    scene.guarded.issuer.access.clear()
    scene.guarded.issuer.refresh.clear()
    url = await scene.refused(idempotency_key="once")
    await scene.visit(url)
    for _ in range(2):
        await scene.done(idempotency_key="once")
    assert scene.guarded.ran == ["look", "look"]


async def test_a_revoked_token_is_renewed_without_asking_anybody(scene: Scene) -> None:
    await (await scene.load()).authorized()
    await scene.done()
    scene.guarded.issuer.access.clear()
    await scene.done()
    assert scene.guarded.issuer.refreshed == 1
    assert len(scene.guarded.issuer.asked) == 1


async def test_a_token_whose_time_is_over_is_renewed_once_for_all_gateways(
    scene: Scene, gateways: tuple[Gateway, Gateway, str]
) -> None:
    issuer = scene.guarded.issuer
    await scene.load()
    issuer.lifetime = 0
    await scene.authorized()
    await scene.done(at=scene.second)  # both have a token that has no time left
    before = issuer.shown
    issuer.lifetime = 3600
    issuer.may_refresh.clear()
    calls = [asyncio.create_task(scene.done(at=at)) for at in (scene.first, scene.second) for _ in range(5)]
    connection = await asyncpg.connect(gateways[2])
    waits = "select exists (select from pg_locks where locktype = 'advisory' and not granted)"
    while not await connection.fetchval(waits) and issuer.shown < before + 2:
        await asyncio.sleep(0.01)
    await connection.close()
    issuer.may_refresh.set()
    await asyncio.gather(*calls)
    assert issuer.shown == before + 1


async def test_more_scopes_are_asked_for_beside_those_that_were_given(scene: Scene) -> None:
    await (await scene.load()).authorized()
    await scene.done()
    url = await scene.refused("change")
    assert scopes_of(url) == {"read", "write"}
    await scene.done()  # what the token is good for goes on meanwhile
    await scene.visit(url)
    await scene.done("change")
    await scene.done()
    assert scene.guarded.ran == ["look", "look", "change", "look"]


async def test_scopes_that_a_consent_does_not_give_are_not_asked_for_again(scene: Scene) -> None:
    scene.guarded.issuer.grants = {"read"}
    await (await scene.load()).authorized()
    await scene.visit(await scene.refused("change"))
    asked = len(scene.guarded.issuer.asked)
    for _ in range(2):
        answer = await scene.call("change")
        assert (answer.status_code, answer.json()["code"]) == (502, "insufficient_scope")
    assert len(scene.guarded.issuer.asked) == asked


async def test_an_answer_is_taken_once_in_time_and_with_its_own_state(
    scene: Scene, gateways: tuple[Gateway, Gateway, str]
) -> None:
    await scene.load()
    url = await scene.refused()
    back = (await scene.http.get(url)).headers["location"]
    forged = await scene.visit(back.replace("state=", "state=x"))
    assert (forged.status_code, "Nobody waits" in forged.text) == (400, True)
    assert (await scene.visit(back)).status_code == 200
    assert (await scene.visit(back)).status_code == 400
    await scene.done()

    scene.guarded.issuer.access.clear()
    scene.guarded.issuer.refresh.clear()
    late = (await scene.http.get(await scene.refused())).headers["location"]
    connection = await asyncpg.connect(gateways[2])
    await connection.execute("update megamcp.oauth_consents set expires_at = clock_timestamp()")
    await connection.close()
    assert (await scene.visit(late)).status_code == 400
    await scene.refused()


async def test_without_consent_the_next_call_asks_again(scene: Scene) -> None:
    await scene.load()
    scene.guarded.issuer.consents = False
    url = await scene.refused()
    assert (await scene.visit(url)).status_code == 400
    again = await scene.refused()
    assert again != url
    scene.guarded.issuer.consents = True
    assert (await scene.visit(again)).status_code == 200
    await scene.done()


async def test_a_consent_may_come_back_to_another_gateway_and_is_good_for_all(scene: Scene) -> None:
    await scene.load()
    await scene.refused(at=scene.second)  # it has asked, too
    back = (await scene.http.get(await scene.refused())).headers["location"]
    elsewhere = f"{scene.second.url}/oauth/callback?{urlsplit(back).query}"
    assert (await scene.visit(elsewhere)).status_code == 200
    await scene.done()
    await scene.done(at=scene.second)
    assert len(scene.guarded.issuer.asked) == 1


async def test_no_secret_is_told_kept_in_clear_or_logged(
    scene: Scene,
    gateways: tuple[Gateway, Gateway, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GUARDED_EXTRA", "very-secret-extra")
    caplog.set_level(logging.DEBUG, "megamcp")
    await scene.load(headers={"X-Extra": "${env:GUARDED_EXTRA}"})
    said = [(await scene.call()).text]
    await scene.visit(await scene.refused())
    await scene.done()
    scene.guarded.issuer.access.clear()
    await scene.done()
    scene.guarded.issuer.access.clear()
    scene.guarded.issuer.refresh.clear()
    said.append((await scene.call()).text)
    said.append((await scene.http.get(f"{scene.first.url}/v1/environments/{scene.environment}")).text)
    said.append((await scene.http.get(f"{scene.first.url}/v1/rollouts/{scene.rollout}/events")).text)
    connection = await asyncpg.connect(gateways[2])
    for table in ("environments", "servers", "events", "blobs", "oauth_grants", "oauth_consents"):
        said += [row[0] for row in await connection.fetch(f"select t::text from megamcp.{table} t")]
        said += [bytes.fromhex(text[2:]).decode("latin-1") for text in said[-1:] if text.startswith("\\x")]
    sealed = [bytes(row[0]) for row in await connection.fetch("select sealed from megamcp.oauth_grants")]
    await connection.close()
    told = "\n".join([*said, caplog.text])
    assert len(scene.guarded.issuer.made) >= 6
    for secret in [*scene.guarded.issuer.made, "very-secret-extra"]:
        assert secret not in told
        assert all(secret.encode() not in row for row in sealed)


async def test_the_command_says_where_consent_is_given_and_that_it_was(scene: Scene) -> None:
    async def authorize(*more: str) -> dict[str, object]:
        command = ("env", "authorize", scene.environment, "--no-wait", "--json", "--url", scene.first.url, *more)
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "megamcp", *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, errors = await run.communicate()
        assert run.returncode == 0, errors.decode()
        return dict(json.loads(out))

    await scene.load()
    waiting = (await authorize())["waiting"]
    assert isinstance(waiting, dict)
    await scene.visit(waiting["guarded"])
    await scene.done()
    assert await authorize() == {"authorized": ["guarded"], "waiting": {}}
    assert list(dict((await authorize("--again"))["waiting"])) == ["guarded"]  # type: ignore[call-overload]


async def test_a_caller_that_leaves_while_a_token_is_renewed_does_not_cost_the_grant(scene: Scene) -> None:
    issuer = scene.guarded.issuer
    await (await scene.load()).authorized()
    await scene.done()
    issuer.access.clear()
    issuer.may_refresh.clear()
    call = asyncio.create_task(scene.first.services.dataplane.call(scene.rollout, "look", b"{}"))
    await issuer.refreshing.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    issuer.may_refresh.set()
    await scene.done()
    assert (issuer.refreshed, len(issuer.asked)) == (1, 1)


async def test_a_header_takes_its_secret_from_a_file_and_takes_it_anew_when_it_is_refused(scene: Scene) -> None:
    file = scene.folder / "word"
    file.write_text("sesame")
    scene.guarded.word = "sesame"
    await scene.load(headers={"Authorization": f"Bearer ${{file:{file}}}"})
    await scene.done()
    scene.guarded.issuer.access.clear()
    scene.guarded.word = "another"
    refused = await scene.call()
    assert (refused.status_code, refused.json()["code"]) == (502, "tool_server_refuses")
    assert "sesame" not in refused.text
    file.write_text("another")
    await scene.done()
    assert scene.guarded.issuer.asked == []
