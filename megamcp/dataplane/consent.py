"""How a client is told that a person has to open a URL before its request can be done.

2025-11-25 has an error for it (-32042), and so has every request that this module leaves alone. 2026-07-28 has results
of the kind `input_required`, for the requests that may have them and clients that can show a URL. What the client had
sent along for the tool server (`requestState`, `inputResponses`) waits in the state that it is handed meanwhile.
"""

import base64
from typing import Any

import msgspec

from megamcp.dataplane import wire
from megamcp.dataplane.protocol import CAPABILITIES_KEY
from megamcp.dataplane.request import ANSWERS
from megamcp.errors import AuthorizationRequired, UpstreamError

_MAY_ASK = frozenset({"tools/call", "prompts/get", "resources/read"})
_STATE = "io.megamcp/authorization:"
_KEY = "io.megamcp/authorization"


class _Capabilities(msgspec.Struct):
    elicitation: dict[str, Any] | None = None


def asked(required: AuthorizationRequired, envelope: wire.Envelope, *, modern: bool) -> wire.Reply:
    """The result that asks for it. Raises an error that says the same where there can't be one."""
    # Not its status in REST: clients take anything but 200 for a broken connection, and some codes for our own door's.
    number = UpstreamError.jsonrpc if modern else required.jsonrpc
    refused = wire.RpcFailure(number, required.message, status=200, data=required.rpc_data())
    if not modern or envelope.method not in _MAY_ASK:
        raise refused from None
    params = unwrapped(wire.read_members(envelope.params, "params"))
    if not _takes_urls(params):
        raise refused from None
    waiting = wire.encode({name: params[name] for name in ANSWERS if name in params})
    elicitation = {"mode": "url", "url": required.url, "message": required.message}
    asking = {
        "resultType": "input_required",
        "inputRequests": {_KEY: {"method": "elicitation/create", "params": elicitation}},
        "requestState": _STATE + base64.urlsafe_b64encode(waiting).decode(),
    }
    return wire.Reply(wire.encode(asking))


def unwrapped(params: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Parameters as they were before `asked`: what answers our own question is not for the tool server."""
    raw = params.get("requestState")
    if raw is None or not bytes(raw).startswith(b'"' + _STATE.encode()):
        return params
    try:
        state = base64.urlsafe_b64decode(wire.read_string(raw, "requestState").removeprefix(_STATE))
        waiting = msgspec.json.decode(state, type=dict[str, msgspec.Raw])
    except ValueError:  # msgspec's and binascii's are too
        raise wire.RpcFailure(
            wire.INVALID_PARAMS, "This requestState is not one of ours.", data={"code": "invalid_params"}
        ) from None
    found = {name: value for name, value in params.items() if name not in ANSWERS}
    return found | {name: waiting[name] for name in ANSWERS if name in waiting}


def _takes_urls(params: dict[str, msgspec.Raw]) -> bool:
    try:
        meta = wire.read_members(params["_meta"], "_meta")
        capabilities = msgspec.json.decode(meta[CAPABILITIES_KEY], type=_Capabilities)
    except (KeyError, msgspec.DecodeError):
        return False
    return capabilities.elicitation is not None and "url" in capabilities.elicitation
