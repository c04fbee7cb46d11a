"""What goes over the wire of the control plane: one pydantic model a body. No behaviour."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class RolloutStatus(StrEnum):
    """Where a rollout is in its life."""

    OPEN = "open"
    """Takes calls until its lease ends."""
    CLOSED = "closed"
    """Released by its owner; its checkpoints live on until their own leases end."""
    EXPIRED = "expired"
    """Its lease ended and the reaper released it."""


class Model(BaseModel):
    """Base of request bodies: no guessing. An unknown field is most often a misspelt one, `"4"` is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


def example(document: dict[str, Any]) -> ConfigDict:
    """The configuration of a request body whose documentation shows `document`."""
    return ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [document]})


class View(BaseModel):
    """Base of answers: fields may be added, so a client ignores what it doesn't know."""

    model_config = ConfigDict(extra="ignore")


def storable(value: Any) -> Any:
    """The value, if PostgreSQL can store all of its text. Raises ValueError at a NUL character."""
    pending = [value]
    while pending:
        match pending.pop():
            case str() as text if "\0" in text:
                raise ValueError("text must not hold the NUL character")
            case dict() as members:
                pending += [*members.keys(), *members.values()]
            case list() as items:
                pending += items
    return value


Text = Annotated[str, AfterValidator(storable)]
Labels = Annotated[
    dict[Annotated[Text, Field(max_length=100)], Annotated[Text, Field(max_length=1000)]], Field(max_length=64)
]
MAX_TURN = 2**31 - 1

Ttl = Field(None, gt=0, description="Length of the lease in seconds. Omitted: the gateway's default.", examples=[3600])
GroupName = Field(
    None,
    min_length=1,
    max_length=200,
    description="Rollouts that are compared with each other. Omitted: a new group for this request.",
)
SeedChoice = Literal["inherit", "fresh"] | int


class OpenRollouts(Model):
    """Ask for new rollouts of an environment."""

    environment: Text = Field(
        description="Name, or name@hash for one fixed version.",
        examples=["retail"],
        min_length=1,
        max_length=300,
    )
    count: int = Field(1, ge=1, description="How many.")
    group: Text | None = GroupName
    ttl_s: float | None = Ttl
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="Seed of the environment's randomness. Omitted: the environment's own, the same each time.",
    )
    labels: Labels = Field(default_factory=dict, description="Free text, kept with each rollout.")

    model_config = example({"environment": "retail", "count": 4, "ttl_s": 3600})


class Rollout(View):
    """One agent's run against an environment, with a state of its own."""

    id: str = Field(examples=["ro_5f0c7d0e2b1a4c3d9e8f7a6b5c4d3e2f"])
    url: str = Field(description="Point any MCP client here.")
    environment: str = Field(description="name@hash")
    group: str
    turn: int = Field(description="Turn of the checkpoint that its head stands on; 0 at the start.")
    depth: int = Field(description="Checkpoints between the root and its head.")
    seq: int = Field(description="Number of its last journal row.")
    status: RolloutStatus
    parent_checkpoint: str | None = Field(description="The checkpoint that it was forked from.")
    checkpoint: str | None = Field(description="The checkpoint that its head stands on.")
    seed: int
    labels: dict[str, str]
    created_at: datetime
    expires_at: datetime


class Rollouts(View):
    """Rollouts, oldest first, and where to go on."""

    rollouts: list[Rollout]
    next_cursor: str | None = Field(None, description="Pass as `cursor` for the next page; null on the last one.")


class Renew(Model):
    """Ask for a longer lease, counted from now."""

    ttl_s: float | None = Ttl

    model_config = example({"ttl_s": 3600})


class MakeCheckpoint(Model):
    """Ask for a checkpoint of a rollout as it is now."""

    label: Text | None = Field(None, max_length=200, description="A name for people to read.")
    turn: int | None = Field(
        None, ge=0, le=MAX_TURN, description="The caller's turn number. Omitted: the parent's + 1."
    )
    ttl_s: float | None = Ttl

    model_config = example({"label": "after look-up", "turn": 3})


class Checkpoint(View):
    """An immutable, consistent point over all state of a rollout."""

    id: str = Field(examples=["cp_0a1b2c3d4e5f60718293a4b5c6d7e8f9"])
    rollout: str
    environment: str
    parent: str | None
    turn: int
    depth: int = Field(description="Checkpoints from the root to this one.")
    seq: int = Field(description="The last journal row before it.")
    digest: str | None = Field(
        description="Hash of the effective state; equal states have equal digests. Null where the memory of a process"
        " belongs to it; and after DDL in a database: ask for it (`GET /v1/rollouts/{id}/digest`), and it is computed."
    )
    label: str | None
    pins: list[str] = Field(default_factory=list, description="Owners that hold it.")
    created_at: datetime
    expires_at: datetime


class Checkpoints(View):
    """A rollout's own checkpoints, oldest first."""

    checkpoints: list[Checkpoint]


class Pin(Model):
    """Hold a checkpoint under a name, whatever its own lease says."""

    owner: Text = Field(min_length=1, max_length=200, description="Who holds it; the same name again renews.")
    ttl_s: float | None = Ttl

    model_config = example({"owner": "trainer-7", "ttl_s": 86400})


class Fork(Model):
    """Ask for rollouts that start from a checkpoint."""

    count: int = Field(1, ge=1, description="How many.")
    group: Text | None = GroupName
    ttl_s: float | None = Ttl
    seed: SeedChoice = Field(
        "inherit",
        description="`inherit` keeps the checkpoint's seed, `fresh` gives each fork its own, a number sets it.",
    )
    labels: Labels = Field(default_factory=dict, description="Free text, kept with each rollout.")

    model_config = example({"count": 4, "seed": "fresh"})


class Rollback(Model):
    """Move a rollout back to a checkpoint of its own, or to the one that it was forked from."""

    checkpoint: Text = Field(max_length=100, description="A checkpoint id.")

    model_config = example({"checkpoint": "cp_0a1b2c3d4e5f60718293a4b5c6d7e8f9"})


class RowChange(View):
    """A row with the same key at both points."""

    before: dict[str, Any]
    after: dict[str, Any]


class TableDiff(View):
    """Rows of one table that differ between two points, in key order."""

    added: list[dict[str, Any]]
    removed: list[dict[str, Any]]
    changed: list[RowChange]
    total: int = Field(description="Rows that differ, listed or not.")
    truncated: bool = Field(False, description="More rows differ than the gateway lists.")


class FileChange(View):
    """A path of a working folder that differs between two points."""

    path: str = Field(description="Relative to the working folder.")
    kind: str = Field(description="file, folder, link or other; of the newer side, unless the path was removed.")
    size: int | None = Field(None, description="Bytes of a file.")
    mode: int | None = Field(None, description="Permission bits.")
    text: str | None = Field(None, description="A unified diff, where both sides are text of moderate size.")


class FilesDiff(View):
    """Paths of one server's working folder that differ between two points, in order."""

    added: list[FileChange]
    removed: list[FileChange]
    changed: list[FileChange]
    truncated: bool = Field(False, description="More paths differ than the gateway lists.")


class Place(View):
    """A place in a document that is there at one of two points."""

    path: str = Field(description="JSON pointer (RFC 6901).")
    value: Any


class PlaceChange(View):
    """A place in a document with another value."""

    path: str = Field(description="JSON pointer (RFC 6901).")
    before: Any
    after: Any


class DocumentDiff(View):
    """Places of a document that differ between two points."""

    added: list[Place]
    removed: list[Place]
    changed: list[PlaceChange]
    total: int = Field(description="Places that differ, listed or not.")
    truncated: bool = Field(False, description="More places differ than the gateway lists.")


class ServerDiff(View):
    """What differs in one server's state: what its kind has, and nothing else."""

    kind: str
    tables: dict[str, TableDiff] = Field(default_factory=dict)
    files: FilesDiff | None = Field(None, description="Of a server in a sandbox. Its memory can't be compared.")
    document: DocumentDiff | None = Field(None, description="Of a server that keeps a document.")


class Diff(View):
    """What differs between two points, per server. What has no difference is left out."""

    rollout: str
    from_: str = Field(alias="from", serialization_alias="from")
    to: str
    servers: dict[str, ServerDiff]

    model_config = ConfigDict(extra="ignore", populate_by_name=True)


class Dsn(View):
    """Where SQL clients find a rollout's own database."""

    rollout: str
    server: str
    dsn: str = Field(description="The DSN as a URL. Holds the password.")
    host: str
    port: int
    user: str
    database: str
    password: str


class Digest(View):
    """A path-independent hash of the effective state at a point."""

    rollout: str
    at: str
    digest: str | None = Field(description="Null where a server's part is `opaque`.")
    servers: dict[str, str | None] = Field(
        description="Each server's part; null without a state, `opaque` where memory, which has none, belongs to it."
    )
    files: dict[str, str] = Field(
        default_factory=dict, description="Digest of the working folder, of servers in sandboxes."
    )
    counters: dict[str, dict[str, int]] = Field(
        default_factory=dict, description="Sequences, clock and random position; not part of the digest."
    )


class Event(View):
    """One row of the journal."""

    rollout: str
    seq: int
    kind: str = Field(description="open, fork, call, checkpoint, rollback, score or close")
    at: datetime
    server: str | None = None
    tool: str | None = None
    arguments: Any = None
    result: Any = Field(None, description="The MCP result of a call, as it was given to the agent.")
    is_error: bool | None = None
    state: str | None = Field(None, description="Of a call: running, done, failed or unknown.")
    duration_ms: float | None = None
    data: dict[str, Any] | None = None


class Events(View):
    """Journal rows in order, the ancestors' part first."""

    events: list[Event]
    next_after: int | None = Field(None, description="Pass as `after` for the next page; null on the last one.")


class Tool(View):
    """A tool as the agent sees it, in MCP's own shape."""

    model_config = ConfigDict(extra="allow")
    name: str


class Tools(View):
    """The agent's view of a rollout's tools, in stable order."""

    tools: list[Tool]


class Call(Model):
    """Call a tool as the agent would."""

    tool: str = Field(examples=["get_order"], min_length=1, max_length=300)
    arguments: dict[str, Any] = Field(default_factory=dict, examples=[{"order_id": "W1000001"}])
    idempotency_key: str | None = Field(
        None, min_length=1, max_length=512, description="The same key again gives the recorded result."
    )

    model_config = example({"tool": "get_order", "arguments": {"order_id": "W100001"}})


class ToolResult(View):
    """MCP's `CallToolResult`, in the tool server's own bytes."""

    model_config = ConfigDict(extra="allow")
    content: list[dict[str, Any]] = Field(description="Content blocks of MCP.")
    structuredContent: dict[str, Any] | None = Field(None, description="The result as the tool's output schema has it.")
    isError: bool = Field(False, description="The tool refused or failed; nothing of the call was kept.")


class Query(Model):
    """Read-only SQL on a rollout's state."""

    server: str | None = Field(None, description="May be omitted where the environment has one server with SQL state.")
    sql: str = Field(min_length=1, max_length=100_000, examples=["select count(*) from orders"])
    at: Text | None = Field(None, max_length=100, description="A checkpoint id, `base` or `head`. Omitted: head.")

    model_config = example({"sql": "select count(*) from orders where status = 'cancelled'", "at": "head"})


class QueryResult(View):
    """Rows of a query."""

    columns: list[str]
    rows: list[list[Any]]
    truncated: bool = Field(description="The query had more rows than the gateway returns.")


class Score(Model):
    """A reward or advantage, kept beside the journal."""

    name: Text = Field(min_length=1, max_length=200, description="What is measured.")
    value: float = Field(allow_inf_nan=False)
    turn: int | None = Field(None, ge=0, le=MAX_TURN, description="The turn that it belongs to.")
    data: Annotated[dict[str, Any], AfterValidator(storable)] | None = Field(
        None, description="Whatever belongs to it, as JSON."
    )

    model_config = example({"name": "reward", "value": 1.0, "turn": 3})


class EnvironmentServer(View):
    """One tool server of an environment."""

    name: str
    kind: str
    tables: list[str] = Field(default_factory=list, description="Of kind schema. Of others they are not known here.")
    url: str | None = Field(None, description="Where it is, if the gateway doesn't run it.")


class Environment(View):
    """A named, versioned set of tool servers with their initial state."""

    name: str
    hash: str
    clock: datetime
    seed: int
    loaded_at: datetime
    servers: list[EnvironmentServer]


class Environments(View):
    """What can be opened, newest version of each name first."""

    environments: list[Environment]


class Authorize(Model):
    """Have a tool server at a URL authorized."""

    again: bool = Field(False, description="Forget the token that is there, and ask for consent anew.")

    model_config = example({"again": False})


class Authorization(View):
    """Whether a tool server takes requests, or what a person has to open first."""

    authorized: bool
    url: str | None = None


class LoadEnvironment(Model):
    """Load an environment from a folder (or `mcp.json`) that the gateway can read."""

    path: Text = Field(min_length=1, max_length=4096, description="Of the folder, or of the file.")
    tenant: Text | None = Field(None, min_length=1, max_length=100, description="Only its keys see it. Omitted: all.")

    model_config = example({"path": "/srv/environments/retail"})


class KeyQuotas(Model):
    """What a key may use; null for as much as it wants. All but `rollouts` are counted by each gateway process."""

    rollouts: int | None = Field(None, ge=0, description="Open at once.")
    calls_per_s: float | None = Field(None, gt=0, description="Calls; a second's worth may come at once.")
    concurrent_calls: int | None = Field(None, ge=1, description="Calls under way at once.")
    bytes_per_day: int | None = Field(None, ge=1, description="Of requests and answers, in a day of UTC.")


class MakeKey(Model):
    """Ask for a key."""

    model_config = example({"name": "trainer of team a", "scope": "trainer", "tenant": "a"})
    name: Text = Field(min_length=1, max_length=200, description="Whose it is; audits say it.")
    scope: Literal["admin", "trainer", "agent", "read-only"]
    tenant: Text = Field("default", min_length=1, max_length=100, description="Whose rollouts it sees and opens.")
    ttl_s: float | None = Field(None, gt=0, le=10**9, description="Omitted: until it is revoked.")
    quotas: KeyQuotas = Field(default_factory=KeyQuotas)


class Key(View):
    """A key, without what is shown for it."""

    id: str
    name: str
    scope: str
    tenant: str
    quotas: KeyQuotas
    created_at: datetime
    created_by: str | None = None
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class NewKey(Key):
    """A key as it is shown once."""

    secret: str = Field(description="What goes after `Authorization: Bearer`. It is kept nowhere.")


class Keys(View):
    """All keys, oldest first."""

    keys: list[Key]


class Problem(View):
    """An error (RFC 9457)."""

    model_config = ConfigDict(extra="allow")
    type: str
    title: str
    status: int
    detail: str
    code: str = Field(description="Stable; compare with this, not with the text.")
    hint: str | None = None
