"""What a call that has no answer is told, and how that is recorded."""

from megamcp.dataplane import wire
from megamcp.dataplane.links import Route
from megamcp.dataplane.protocol import ToolCall, UpstreamLost
from megamcp.dataplane.ways import Way
from megamcp.errors import DeadlineExceeded, MegaMCPError


def too_late(call: ToolCall, route: Route, end: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"Tool {call.name!r} of server {route.server.name!r} did not answer before its deadline; it was ended: {end}.",
        hint="Call it with less to do, or raise MEGAMCP_CALL_TIMEOUT_S.",
    )


def with_tail(error: UpstreamLost, way: Way) -> UpstreamLost:
    """A dead child's own last words are the best explanation there is."""
    if not (tail := way.tail):
        return error
    return UpstreamLost(error.message, sent=error.sent, code=error.code, hint=f"It printed last: {tail[-500:]}")


def as_result(error: MegaMCPError) -> bytes:
    return wire.error_as_result(wire.error_object(wire.RpcFailure.of(error)), error.message)
