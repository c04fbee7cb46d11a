"""The client: what can be opened, and the way to what was opened before."""

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from os import PathLike, fspath
from types import TracebackType
from typing import Self
from urllib.parse import quote

import httpx

from megamcp import types as t
from megamcp.client.leases import Leases
from megamcp.client.rollout import Checkpoint, Rollout
from megamcp.client.transport import Retry, Transport, build, error_of, events_of
from megamcp.errors import Unavailable

DEFAULT_URL = "http://127.0.0.1:8600"
PAGE = 500


class Client:
    """Talks to one gateway. Use it as an async context manager, from one event loop.

    `timeout` is the longest wait for an answer in seconds; leave it above the gateway's `call_timeout_s`, or give calls
    a deadline of your own with `asyncio.timeout`. Rollouts that are opened here are released by their owner (`async
    with`, or `close()`); leaving the client releases none, so that another process can go on with them.

    Every method raises a `MegaMCPError`: the gateway's, by class and code; `Unavailable` when it can't be reached.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float = 90.0,
        connections: int = 100,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`api_key` is MEGAMCP_API_KEY where it isn't given; an empty one sends none. `transport` reaches a gateway in
        this process: `httpx.ASGITransport(app)`."""
        self._transport = Transport(
            url,
            api_key=os.environ.get("MEGAMCP_API_KEY") if api_key is None else api_key,
            timeout=timeout,
            connections=connections,
            retry=retry or Retry(),
            asgi=transport,
        )
        self._leases = Leases()

    @property
    def url(self) -> str:
        """The gateway's base URL."""
        return self._transport.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop keeping leases and close the connections."""
        await self._leases.stop()
        await self._transport.close()

    async def metrics(self) -> str:
        """What the gateway tells Prometheus, as text."""
        return (await self._transport.send("GET", "/metrics", repeatable=True)).text

    # -- environments -------------------------------------------------------------------------------------------

    async def environments(self) -> list[t.Environment]:
        """What can be opened."""
        return (await self._transport.get("/v1/environments", t.Environments)).environments

    async def environment(self, name: str) -> t.Environment:
        """One environment, by name (its newest version) or name@hash. Raises `NotFound`."""
        return await self._transport.get(f"/v1/environments/{quote(name, safe='@')}", t.Environment)

    async def load_environment(
        self, path: str | PathLike[str], *, progress: Callable[[str, int, int], None] | None = None
    ) -> t.Environment:
        """Load a folder (or `mcp.json`) that the *gateway* can read. Idempotent. Raises `UnsupportedSchema`.

        `progress` is told what is being done, how much of it, of how much (0 of 0: a remark). With it there is no
        deadline, and leaving (by an exception, or by cancelling) ends the load; nothing of it stays.
        """
        body = build(t.LoadEnvironment, path=fspath(path))
        if progress is None:
            return await self._transport.post("/v1/environments", t.Environment, body, repeatable=True)
        async with self._transport.stream("/v1/environments", method="POST", body=body) as lines:
            async for kind, data in events_of(lines):
                match kind:
                    case "progress" | "remark":
                        told = json.loads(data)
                        progress(told["what"], told.get("done", 0), told.get("total", 0))
                    case "loaded":
                        return t.Environment.model_validate_json(data)
                    case "problem":
                        document = json.loads(data)
                        raise error_of(document, document["status"])
        raise Unavailable(
            "The gateway went away while it was loading the environment.",
            code="connection_lost",
            hint="Nothing was loaded half. Load it again.",
        )

    async def authorize(self, environment: str, server: str, *, again: bool = False) -> str | None:
        """The URL where a person consents that the gateway uses a server; None where it may already.

        `again` forgets the consent that was given.
        """
        path = f"/v1/environments/{quote(environment, safe='@')}/servers/{quote(server, safe='')}/authorize"
        return (await self._transport.post(path, t.Authorization, build(t.Authorize, again=again))).url

    # -- keys ---------------------------------------------------------------------------------------------------

    async def create_key(
        self, name: str, scope: str, *, tenant: str = "default", ttl_s: float | None = None, **quotas: float | None
    ) -> t.NewKey:
        """A key; its `secret` is shown this once. `quotas` are those of `types.KeyQuotas`. For admins."""
        limits = build(t.KeyQuotas, **quotas)
        body = build(t.MakeKey, name=name, scope=scope, tenant=tenant, ttl_s=ttl_s, quotas=limits)
        return await self._transport.post("/v1/keys", t.NewKey, body)

    async def keys(self) -> list[t.Key]:
        """All keys. For admins."""
        return (await self._transport.get("/v1/keys", t.Keys)).keys

    async def revoke_key(self, key: str) -> None:
        """Idempotent; every gateway refuses it within two seconds. Raises `NotFound`. For admins."""
        await self._transport.delete(f"/v1/keys/{quote(key, safe='')}")

    # -- rollouts -----------------------------------------------------------------------------------------------

    async def open(
        self,
        environment: str,
        *,
        group: str | None = None,
        ttl_s: float | None = None,
        seed: int | None = None,
        labels: Mapping[str, str] | None = None,
        keep: bool = False,
    ) -> Rollout:
        """One new rollout; see `open_many`."""
        (rollout,) = await self.open_many(environment, 1, group=group, ttl_s=ttl_s, seed=seed, labels=labels, keep=keep)
        return rollout

    async def open_many(
        self,
        environment: str,
        count: int,
        *,
        group: str | None = None,
        ttl_s: float | None = None,
        seed: int | None = None,
        labels: Mapping[str, str] | None = None,
        keep: bool = False,
    ) -> list[Rollout]:
        """New rollouts, in one group. `keep=True` renews their leases while this client is open.

        Repeated when the gateway is away for a moment; a rollout that was made but never told of ends with its lease.
        """
        body = build(
            t.OpenRollouts,
            environment=environment,
            count=count,
            group=group,
            ttl_s=ttl_s,
            seed=seed,
            labels=dict(labels or {}),
        )
        made = await self._transport.post("/v1/rollouts", t.Rollouts, body, repeatable=True)
        rollouts = [self._rollout(view) for view in made.rollouts]
        if keep:
            for rollout in rollouts:
                rollout.keep(ttl_s)
        return rollouts

    async def rollout(self, id: str) -> Rollout:
        """A rollout that was opened before, ended or not. Raises `NotFound`."""
        return self._rollout(await self._transport.get(f"/v1/rollouts/{quote(id, safe='')}", t.Rollout))

    async def rollouts(
        self,
        *,
        group: str | None = None,
        status: t.RolloutStatus | str | None = None,
        environment: str | None = None,
    ) -> AsyncIterator[Rollout]:
        """All rollouts that match, oldest first, fetched page by page."""
        cursor: str | None = None
        while True:
            page = await self._transport.get(
                "/v1/rollouts",
                t.Rollouts,
                group=group,
                status=status,
                environment=environment,
                cursor=cursor,
                limit=PAGE,
            )
            for view in page.rollouts:
                yield self._rollout(view)
            cursor = page.next_cursor
            if cursor is None:
                return

    async def checkpoint(self, id: str) -> Checkpoint:
        """A checkpoint that is still there. Raises `NotFound`, `Gone`."""
        view = await self._transport.get(f"/v1/checkpoints/{quote(id, safe='')}", t.Checkpoint)
        return Checkpoint(self._transport, self._leases, view)

    def _rollout(self, view: t.Rollout) -> Rollout:
        return Rollout(self._transport, self._leases, view)
