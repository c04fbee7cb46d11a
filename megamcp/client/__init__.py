"""A typed async client of the gateway's control plane; all that a trainer needs.

    async with Client("http://127.0.0.1:8600") as client:
        async with await client.open("retail") as rollout:
            order = await rollout.call("get_order", order_id="W100001")
            point = await rollout.checkpoint("looked up")
            for attempt in await point.fork(count=4):
                ...

`transport` sends requests and decides what may be sent twice, `leases` keeps rollouts alive, `rollout` holds the
objects, `gateway` the client itself. Agents don't need any of it: they point an MCP client at `rollout.url`. Light on
purpose: httpx and pydantic, neither `mcp` nor a web framework. The errors and models that it raises and returns are
exported here too, so that a program needs this one import.
"""

from megamcp.client.gateway import DEFAULT_URL, Client
from megamcp.client.rollout import Checkpoint, Rollout, ToolResult
from megamcp.client.transport import Retry
from megamcp.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    Gone,
    MegaMCPError,
    NoCapacity,
    NotFound,
    TooLarge,
    Unauthorized,
    Unavailable,
    Unprocessable,
    UnsupportedSchema,
    UnsupportedStatement,
    UpstreamError,
)
from megamcp.types import (
    Diff,
    Digest,
    DocumentDiff,
    Environment,
    EnvironmentServer,
    Event,
    Key,
    NewKey,
    QueryResult,
    RolloutStatus,
    SeedChoice,
    ServerDiff,
    TableDiff,
    Tool,
)

__all__ = [
    "DEFAULT_URL",
    "BadRequest",
    "Checkpoint",
    "Client",
    "Conflict",
    "DeadlineExceeded",
    "Diff",
    "Digest",
    "DocumentDiff",
    "Environment",
    "EnvironmentServer",
    "Event",
    "Forbidden",
    "Gone",
    "Key",
    "MegaMCPError",
    "NewKey",
    "NoCapacity",
    "NotFound",
    "QueryResult",
    "Retry",
    "Rollout",
    "RolloutStatus",
    "SeedChoice",
    "ServerDiff",
    "TableDiff",
    "TooLarge",
    "Tool",
    "ToolResult",
    "Unauthorized",
    "Unavailable",
    "Unprocessable",
    "UnsupportedSchema",
    "UnsupportedStatement",
    "UpstreamError",
]
