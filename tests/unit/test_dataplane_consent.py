"""How a client is asked to have a URL opened, and what its next try passes on to the tool server."""

import json
from typing import Any

import msgspec
import pytest

from megamcp.dataplane import consent, wire
from megamcp.dataplane.protocol import CAPABILITIES_KEY
from megamcp.errors import AuthorizationRequired

REQUIRED = AuthorizationRequired.at("https://as.example/authorize?x=1", "Consent, please.", "e1")


def envelope(method: str, params: dict[str, Any]) -> wire.Envelope:
    return wire.read_envelope(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode())


def params_of(message: wire.Envelope) -> dict[str, msgspec.Raw]:
    return wire.read_members(message.params, "params")


def told(**capabilities: Any) -> dict[str, Any]:
    return {"name": "t", "arguments": {}, "_meta": {CAPABILITIES_KEY: capabilities}}


def test_a_modern_client_that_can_show_urls_is_asked_by_a_result() -> None:
    reply = consent.asked(REQUIRED, envelope("tools/call", told(elicitation={"url": {}})), modern=True)
    result = json.loads(reply.body)
    assert not reply.failed
    assert result["resultType"] == "input_required"
    [asking] = result["inputRequests"].values()
    assert asking["method"] == "elicitation/create"
    assert asking["params"] == {"mode": "url", "url": REQUIRED.url, "message": "Consent, please."}


@pytest.mark.parametrize(
    ("method", "capabilities"),
    [("tools/list", {"elicitation": {"url": {}}}), ("tools/call", {"elicitation": {}}), ("tools/call", {})],
)
def test_other_modern_requests_get_an_error_that_holds_the_url(method: str, capabilities: dict[str, Any]) -> None:
    with pytest.raises(wire.RpcFailure) as refused:
        consent.asked(REQUIRED, envelope(method, told(**capabilities)), modern=True)
    error = json.loads(wire.error_object(refused.value))
    assert error["code"] != -32042
    assert error["data"]["code"] == "authorization_required"
    assert REQUIRED.url in error["data"]["hint"]


def test_a_client_of_2025_11_25_gets_its_own_error() -> None:
    with pytest.raises(wire.RpcFailure) as refused:
        consent.asked(REQUIRED, envelope("tools/list", {}), modern=False)
    error = json.loads(wire.error_object(refused.value))
    assert (error["code"], refused.value.status) == (-32042, 200)
    [asking] = error["data"]["elicitations"]
    assert asking == {"mode": "url", "elicitationId": "e1", "url": REQUIRED.url, "message": "Consent, please."}


def test_the_next_try_passes_on_what_the_tool_server_was_sent_before() -> None:
    first = told(elicitation={"url": {}}) | {"requestState": "its own", "inputResponses": {"a": {"action": "accept"}}}
    state = json.loads(consent.asked(REQUIRED, envelope("tools/call", first), modern=True).body)["requestState"]
    again = first | {"requestState": state, "inputResponses": {"io.megamcp/authorization": {"action": "accept"}}}
    passed = {name: json.loads(bytes(raw)) for name, raw in consent.unwrapped(params_of(envelope("m", again))).items()}
    assert passed == first


def test_a_first_request_comes_back_without_state() -> None:
    first = told(elicitation={"url": {}})
    state = json.loads(consent.asked(REQUIRED, envelope("tools/call", first), modern=True).body)["requestState"]
    again = first | {"requestState": state, "inputResponses": {}}
    assert set(consent.unwrapped(params_of(envelope("m", again)))) == set(first)


def test_a_state_that_only_looks_like_ours_is_refused() -> None:
    for state in ("io.megamcp/authorization:%%%", "io.megamcp/authorization:e30x"):
        with pytest.raises(wire.RpcFailure):
            consent.unwrapped(params_of(envelope("m", {"requestState": state})))
