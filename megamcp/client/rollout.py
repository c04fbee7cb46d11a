"""Rollouts and checkpoints as objects. They hold what the gateway last said of them and send what is asked for."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from megamcp import types as t
from megamcp.client.leases import Leases
from megamcp.client.transport import Transport, build, events_of
from megamcp.errors import DeadlineExceeded, Unavailable, UpstreamError

PAGE = 1000
REOPEN_S = 0.2
BASE, HEAD = "base", "head"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered. `is_error` is the tool's own refusal or failure, which the agent sees too."""

    content: Sequence[Mapping[str, Any]]
    """MCP content blocks, as they came."""
    structured: Any = None
    """`structuredContent`, or None."""
    is_error: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The whole CallToolResult."""

    @property
    def text(self) -> str:
        """The text blocks, joined by line ends."""
        return "\n".join(str(block["text"]) for block in self.content if block.get("type") == "text")

    @property
    def value(self) -> Any:
        """`structured`, without the `{"result": …}` that MCP puts around what isn't an object."""
        if isinstance(self.structured, dict) and self.structured.keys() == {"result"}:
            return self.structured["result"]
        return self.structured

    @property
    def code(self) -> str | None:
        """The stable code of an error, if the tool gave one."""
        if self.is_error and isinstance(self.structured, dict) and isinstance(self.structured.get("code"), str):
            return str(self.structured["code"])
        return None


class Checkpoint:
    """An immutable point over all state of a rollout. It outlives the rollout, until its own lease ends."""

    def __init__(self, transport: Transport, leases: Leases, view: t.Checkpoint) -> None:
        self._transport = transport
        self._leases = leases
        self.view = view
        """As the gateway last showed it."""

    def __repr__(self) -> str:
        return f"<Checkpoint {self.id} turn={self.turn}>"

    @property
    def id(self) -> str:
        return self.view.id

    @property
    def turn(self) -> int:
        return self.view.turn

    @property
    def seq(self) -> int:
        """The last journal row before it."""
        return self.view.seq

    @property
    def digest(self) -> str | None:
        """Equal states have equal digests. None after DDL in a database (`Rollout.digest` computes it), and where the
        memory of a process belongs to the state."""
        return self.view.digest

    @property
    def expires_at(self) -> datetime:
        return self.view.expires_at

    async def fork(
        self,
        count: int = 1,
        *,
        group: str | None = None,
        ttl_s: float | None = None,
        seed: t.SeedChoice = "inherit",
        labels: Mapping[str, str] | None = None,
        keep: bool = False,
    ) -> list["Rollout"]:
        """New rollouts that start here. Raises `Gone` when it was released. Repeated like `Client.open_many`."""
        body = build(t.Fork, count=count, group=group, ttl_s=ttl_s, seed=seed, labels=dict(labels or {}))
        made = await self._transport.post(f"{self._path}/fork", t.Rollouts, body, repeatable=True)
        forks = [Rollout(self._transport, self._leases, view) for view in made.rollouts]
        if keep:
            for fork in forks:
                fork.keep(ttl_s)
        return forks

    async def pin(self, owner: str, ttl_s: float | None = None) -> Self:
        """Hold it under a name, whatever its lease says; pinning again renews."""
        body = build(t.Pin, owner=owner, ttl_s=ttl_s)
        self.view = await self._transport.post(f"{self._path}/pin", t.Checkpoint, body, repeatable=True)
        return self

    async def unpin(self, owner: str) -> None:
        """Let go of a pin. Idempotent."""
        await self._transport.delete(f"{self._path}/pin/{quote(owner, safe='')}")

    async def renew(self, ttl_s: float | None = None) -> Self:
        """A longer lease, counted from now."""
        body = build(t.Renew, ttl_s=ttl_s)
        self.view = await self._transport.post(f"{self._path}/renew", t.Checkpoint, body, repeatable=True)
        return self

    def keep(self, ttl_s: float | None = None) -> Self:
        """Renew the lease by itself while the client is open, `ttl_s` seconds at a time."""
        self._leases.keep(self, ttl_s or _seconds_left(self.expires_at))
        return self

    async def release(self) -> None:
        """End its lease now. Idempotent. Raises `Conflict` while somebody pins it."""
        self._leases.drop(self.id)
        await self._transport.delete(self._path)

    @property
    def _path(self) -> str:
        return f"/v1/checkpoints/{quote(self.id, safe='')}"


class Rollout:
    """One agent's run, with a state of its own. As an async context manager it is released at the end."""

    def __init__(self, transport: Transport, leases: Leases, view: t.Rollout) -> None:
        self._transport = transport
        self._leases = leases
        self.view = view
        """As the gateway last showed it; `refresh` asks again."""

    def __repr__(self) -> str:
        return f"<Rollout {self.id} {self.environment} {self.view.status} turn={self.turn}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def id(self) -> str:
        return self.view.id

    @property
    def url(self) -> str:
        """Point any MCP client here."""
        return self.view.url

    @property
    def environment(self) -> str:
        """name@hash"""
        return self.view.environment

    @property
    def group(self) -> str:
        return self.view.group

    @property
    def turn(self) -> int:
        return self.view.turn

    @property
    def status(self) -> t.RolloutStatus:
        return self.view.status

    @property
    def expires_at(self) -> datetime:
        return self.view.expires_at

    # -- life ---------------------------------------------------------------------------------------------------

    async def refresh(self) -> Self:
        """Ask the gateway how it stands."""
        self.view = await self._transport.get(self._path, t.Rollout)
        return self

    async def renew(self, ttl_s: float | None = None) -> Self:
        """A longer lease, counted from now. Raises `Gone` when it is too late."""
        body = build(t.Renew, ttl_s=ttl_s)
        self.view = await self._transport.post(f"{self._path}/renew", t.Rollout, body, repeatable=True)
        return self

    def keep(self, ttl_s: float | None = None) -> Self:
        """Renew the lease by itself while the client is open, `ttl_s` seconds at a time."""
        self._leases.keep(self, ttl_s or _seconds_left(self.expires_at))
        return self

    async def close(self) -> None:
        """Release it. Idempotent; its checkpoints live on."""
        self._leases.drop(self.id)
        await self._transport.delete(self._path)

    # -- what the agent sees ------------------------------------------------------------------------------------

    async def tools(self) -> list[t.Tool]:
        """The tools as the agent sees them."""
        return (await self._transport.get(f"{self._path}/tools", t.Tools)).tools

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        /,
        *,
        idempotency_key: str | None = None,
        **named: Any,
    ) -> ToolResult:
        """Call a tool as the agent would; arguments as a mapping, by name, or both.

        Sent again after a lost answer: the key (made here if none is given) keeps it from being done twice. A tool's
        own error is a result with `is_error`. When the outcome stays unknown, the error's `extra["idempotency_key"]` is
        what to call with again.
        """
        key = idempotency_key or uuid.uuid4().hex
        body = build(t.Call, tool=tool, arguments={**(arguments or {}), **named}, idempotency_key=key)
        try:
            response = await self._transport.send(
                "POST", f"{self._path}/call", body=body.model_dump(exclude_none=True), repeatable=True
            )
        except (Unavailable, DeadlineExceeded, UpstreamError) as error:
            error.extra["idempotency_key"] = key
            raise
        document = json.loads(response.content)
        return ToolResult(
            content=document.get("content", []),
            structured=document.get("structuredContent"),
            is_error=bool(document.get("isError", False)),
            raw=document,
        )

    # -- moving in history --------------------------------------------------------------------------------------

    async def checkpoint(
        self, label: str | None = None, *, turn: int | None = None, ttl_s: float | None = None, keep: bool = False
    ) -> Checkpoint:
        """Freeze the state as it is now. Waits for running calls. Not repeated after a lost answer."""
        body = build(t.MakeCheckpoint, label=label, turn=turn, ttl_s=ttl_s)
        view = await self._transport.post(f"{self._path}/checkpoints", t.Checkpoint, body)
        made = Checkpoint(self._transport, self._leases, view)
        return made.keep(ttl_s) if keep else made

    async def checkpoints(self) -> list[Checkpoint]:
        """Its own checkpoints that are still there, oldest first."""
        found = await self._transport.get(f"{self._path}/checkpoints", t.Checkpoints)
        return [Checkpoint(self._transport, self._leases, view) for view in found.checkpoints]

    async def rollback(self, checkpoint: Checkpoint | str) -> Self:
        """Go back to a checkpoint of its own, or to the one that it was forked from. Ends calls in flight."""
        body = build(t.Rollback, checkpoint=_point(checkpoint))
        self.view = await self._transport.post(f"{self._path}/rollback", t.Rollout, body, repeatable=True)
        return self

    # -- reading ------------------------------------------------------------------------------------------------

    async def diff(self, from_: Checkpoint | str = BASE, to: Checkpoint | str = HEAD) -> t.Diff:
        """Row by row and file by file, what differs between two points: checkpoints, `base` or `head`."""
        return await self._transport.get(f"{self._path}/diff", t.Diff, **{"from": _point(from_), "to": _point(to)})

    async def digest(self, at: Checkpoint | str = HEAD) -> t.Digest:
        """A hash of the effective state at a point, and the counters that it leaves out. None where the memory of a
        process belongs to the state: its server's part is `opaque`."""
        return await self._transport.get(f"{self._path}/digest", t.Digest, at=_point(at))

    async def query(self, sql: str, *, server: str | None = None, at: Checkpoint | str | None = None) -> t.QueryResult:
        """One SELECT on its state. `server` may be left out where only one has SQL state."""
        body = build(t.Query, server=server, sql=sql, at=None if at is None else _point(at))
        return await self._transport.post(f"{self._path}/query", t.QueryResult, body, repeatable=True)

    async def dsn(self, server: str | None = None) -> t.Dsn:
        """Where SQL clients find its own database (state of kind `database`)."""
        return await self._transport.get(f"{self._path}/dsn", t.Dsn, **({"server": server} if server else {}))

    async def score(
        self, name: str, value: float, *, turn: int | None = None, data: dict[str, Any] | None = None
    ) -> t.Event:
        """Keep a reward or advantage beside the journal. Not repeated after a lost answer."""
        body = build(t.Score, name=name, value=value, turn=turn, data=data)
        return await self._transport.post(f"{self._path}/scores", t.Event, body)

    async def events(self, after: int = 0) -> list[t.Event]:
        """The journal as it is now, its ancestors' part first; only rows numbered above `after`."""
        found: list[t.Event] = []
        while True:
            page = await self._transport.get(f"{self._path}/events", t.Events, after=after, limit=PAGE)
            found += page.events
            if page.next_after is None:
                return found
            after = page.next_after

    async def follow(self, after: int = 0) -> AsyncIterator[t.Event]:
        """The journal and what is added to it, until the rollout ends. Goes on after a lost connection.

        Raises `Unavailable` when the gateway does not come back.
        """
        while True:
            before = after
            try:
                async with self._transport.stream(f"{self._path}/events", {"after": after}) as lines:
                    async for _, data in events_of(lines):
                        event = t.Event.model_validate_json(data)
                        after = event.seq
                        yield event
            except Unavailable:
                pass  # the request below waits for the gateway as patiently as any other, or raises
            await self.refresh()
            if self.status is not t.RolloutStatus.OPEN:
                for event in await self.events(after):
                    yield event
                return
            if after == before:
                await asyncio.sleep(REOPEN_S)

    @property
    def _path(self) -> str:
        return f"/v1/rollouts/{quote(self.id, safe='')}"


def _point(point: Checkpoint | str) -> str:
    return point if isinstance(point, str) else point.id


def _seconds_left(expires_at: datetime) -> float:
    return max(1.0, (expires_at - datetime.now(UTC)).total_seconds())
