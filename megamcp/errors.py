"""The error tree: one class a boundary, one mapping to the wire.

    MegaMCPError
    ├── BadRequest             400  the caller's input is wrong (arguments, carriers, JSON, ids of another rollout)
    ├── Unauthorized           401  a key is needed and missing or wrong
    ├── Forbidden              403  the key is known and not for this; or a Host that isn't the gateway's
    ├── NotFound               404  no such rollout, checkpoint, environment or tool
    ├── Conflict               409  the thing is not in a state that allows this (rolled back meanwhile, still in use)
    ├── Gone                   410  released or expired: it was there and is not any more
    ├── TooLarge               413  a body over the limit
    ├── UnsupportedMedia       415  a body that isn't JSON
    ├── Unprocessable          422  well-formed, but refused (idempotency key reused, environment can't be loaded)
    │   ├── UnsupportedSchema       a schema holds a construct that can't be copied on write exactly
    │   └── UnsupportedStatement    a statement that the state can't run exactly (SQLSTATE 0A000)
    ├── AuthorizationRequired  424  a tool server wants a person's consent first; carries the `url` where it is given
    ├── NoCapacity             429  a bound is reached; carries `retry_after`
    ├── UpstreamError          502  the tool server died, is unreachable or broke the protocol
    ├── Unavailable            503  the database is away or the gateway is shutting down
    └── DeadlineExceeded       504  a call, lock or start took longer than its deadline

Every error has a stable `code` (snake case), a message that says what was wrong and where, and a hint that
says what to do: the place's own, or the code's in `hints`.
REST shows them as RFC 9457 problem documents, MCP as JSON-RPC errors with the same code.
"""

from typing import Any, ClassVar

from megamcp.hints import HINTS


class MegaMCPError(Exception):
    """Root of all errors that a caller may see. `code` is stable; `hint` says what the caller can do."""

    status: ClassVar[int] = 500
    jsonrpc: ClassVar[int] = -32603
    default_code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.hint = hint or HINTS.get(self.code)
        self.extra = extra
        self.challenge: str | None = None
        """`WWW-Authenticate`, where the gateway wants another key."""

    def problem(self, instance: str | None = None) -> dict[str, Any]:
        """The RFC 9457 document."""
        document: dict[str, Any] = {
            "type": f"https://megamcp.dev/problems/{self.code}",
            "title": type(self).__name__,
            "status": self.status,
            "detail": self.message,
            "code": self.code,
        }
        if self.hint:
            document["hint"] = self.hint
        if instance:
            document["instance"] = instance
        return {**document, **self.extra}

    def rpc_data(self) -> dict[str, Any]:
        """The `data` member of a JSON-RPC error."""
        data: dict[str, Any] = {"code": self.code}
        if self.hint:
            data["hint"] = self.hint
        return {**data, **self.extra}


class BadRequest(MegaMCPError):
    status, jsonrpc, default_code = 400, -32602, "bad_request"


class Unauthorized(MegaMCPError):
    status, jsonrpc, default_code = 401, -32001, "unauthorized"


class Forbidden(MegaMCPError):
    status, jsonrpc, default_code = 403, -32009, "forbidden"


class NotFound(MegaMCPError):
    status, jsonrpc, default_code = 404, -32602, "not_found"


class Conflict(MegaMCPError):
    status, jsonrpc, default_code = 409, -32003, "conflict"


class Gone(MegaMCPError):
    status, jsonrpc, default_code = 410, -32004, "gone"


class TooLarge(MegaMCPError):
    status, jsonrpc, default_code = 413, -32600, "too_large"


class UnsupportedMedia(MegaMCPError):
    status, jsonrpc, default_code = 415, -32600, "unsupported_media_type"


class Unprocessable(MegaMCPError):
    status, jsonrpc, default_code = 422, -32602, "unprocessable"


class UnsupportedSchema(Unprocessable):
    """Raised at load with every construct that was refused: `problems` = [{construct, object, reason, hint}]."""

    default_code = "unsupported_schema"


class UnsupportedStatement(Unprocessable):
    """A statement that the copy-on-write state can't run exactly as PostgreSQL would."""

    default_code = "unsupported_statement"
    sqlstate: ClassVar[str] = "0A000"


class AuthorizationRequired(MegaMCPError):
    """Nothing was done. Not 401 or 403: those would be about the caller's own standing with the gateway.

    Its number and `elicitations` are those of MCP 2025-11-25 for a URL that a person has to open.
    """

    status, jsonrpc, default_code = 424, -32042, "authorization_required"

    def __init__(self, message: str, *, url: str, **rest: Any) -> None:
        super().__init__(message, url=url, **rest)
        self.url = url

    @classmethod
    def at(cls, url: str, message: str, elicitation: str) -> "AuthorizationRequired":
        """`elicitation` is the id by which MCP tells one such question from another."""
        asked = {"mode": "url", "elicitationId": elicitation, "url": url, "message": message}
        hint = f"Open {url} in a browser, then repeat the request."
        return cls(message, url=url, hint=hint, elicitations=[asked])


class NoCapacity(MegaMCPError):
    status, jsonrpc, default_code = 429, -32005, "no_capacity"

    def __init__(self, message: str, *, retry_after: float = 1.0, **rest: Any) -> None:
        super().__init__(message, retry_after=retry_after, **rest)
        self.retry_after = retry_after


class UpstreamError(MegaMCPError):
    status, jsonrpc, default_code = 502, -32006, "upstream_error"


class Unavailable(MegaMCPError):
    status, jsonrpc, default_code = 503, -32007, "unavailable"


class DeadlineExceeded(MegaMCPError):
    status, jsonrpc, default_code = 504, -32008, "deadline_exceeded"


BY_RPC: dict[int, type[MegaMCPError]] = {
    kind.jsonrpc: kind
    for kind in (Unauthorized, Conflict, Gone, NoCapacity, UpstreamError, Unavailable, DeadlineExceeded)
}
"""The class of an error that a tool server on our SDK answered with; -32602 and -32600 are several classes' number."""
