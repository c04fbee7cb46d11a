"""What each scope may do: one table, and the only place that knows.

A route of the control plane that isn't in it is for admins. docs/security.md shows the table; tests hold both against
each other, and try every route with every scope.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megamcp.access.principal import Scope

_ADMIN = frozenset({Scope.ADMIN})
_TRAINER = _ADMIN | {Scope.TRAINER}
_CALLS = _TRAINER | {Scope.AGENT}
_LOOKS = _TRAINER | {Scope.READ_ONLY}
_ALL = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Right:
    """Who may use a route. `deed` is what the audit log calls it, where it is one."""

    scopes: frozenset[Scope]
    deed: str | None = None
    call: bool = False
    """It is a tool call, for the quotas."""


_ROLLOUT, _CHECKPOINT = "/v1/rollouts/{rollout}", "/v1/checkpoints/{checkpoint}"

RIGHTS: Mapping[tuple[str, str], Right] = {
    ("GET", "/v1/keys"): Right(_ADMIN),
    ("POST", "/v1/keys"): Right(_ADMIN, "key.create"),
    ("DELETE", "/v1/keys/{key}"): Right(_ADMIN, "key.revoke"),
    ("GET", "/v1/environments"): Right(_ALL),
    ("POST", "/v1/environments"): Right(_ADMIN, "environment.load"),
    ("GET", "/v1/environments/{name}"): Right(_ALL),
    ("POST", "/v1/environments/{name}/servers/{server}/authorize"): Right(_ADMIN, "environment.authorize"),
    ("GET", "/v1/rollouts"): Right(_LOOKS),
    ("POST", "/v1/rollouts"): Right(_TRAINER, "rollout.open"),
    ("GET", _ROLLOUT): Right(_ALL),
    ("DELETE", _ROLLOUT): Right(_TRAINER, "rollout.release"),
    ("POST", f"{_ROLLOUT}/renew"): Right(_TRAINER, "rollout.renew"),
    ("POST", f"{_ROLLOUT}/rollback"): Right(_TRAINER, "rollout.rollback"),
    ("GET", f"{_ROLLOUT}/checkpoints"): Right(_LOOKS),
    ("POST", f"{_ROLLOUT}/checkpoints"): Right(_TRAINER, "checkpoint.make"),
    ("GET", f"{_ROLLOUT}/diff"): Right(_LOOKS),
    ("GET", f"{_ROLLOUT}/digest"): Right(_LOOKS),
    ("GET", f"{_ROLLOUT}/events"): Right(_LOOKS),
    ("POST", f"{_ROLLOUT}/query"): Right(_LOOKS),
    ("POST", f"{_ROLLOUT}/scores"): Right(_TRAINER),
    ("GET", f"{_ROLLOUT}/dsn"): Right(_TRAINER, "rollout.dsn"),
    ("GET", f"{_ROLLOUT}/tools"): Right(_ALL),
    ("POST", f"{_ROLLOUT}/call"): Right(_CALLS, call=True),
    ("GET", _CHECKPOINT): Right(_LOOKS),
    ("DELETE", _CHECKPOINT): Right(_TRAINER, "checkpoint.release"),
    ("POST", f"{_CHECKPOINT}/renew"): Right(_TRAINER, "checkpoint.renew"),
    ("POST", f"{_CHECKPOINT}/pin"): Right(_TRAINER, "checkpoint.pin"),
    ("DELETE", f"{_CHECKPOINT}/pin/{{owner}}"): Right(_TRAINER, "checkpoint.unpin"),
    ("POST", f"{_CHECKPOINT}/fork"): Right(_TRAINER, "checkpoint.fork"),
}
MCP = Right(_CALLS, call=True)
"""The endpoints of agents: `/r/…`, `/e/…`, `/mcp`."""
_UNKNOWN = Right(_ADMIN, "unknown")


def right(method: str, path: str) -> Right:
    """Of a route, by its template as OpenAPI has it."""
    return RIGHTS.get((method, path), _UNKNOWN)
