"""Short words for what the tests do with rollouts of the `sql` environment."""

import json
from dataclasses import dataclass
from typing import Any

import asyncpg

from megamcp import store
from megamcp.services import Services


class SqlFailed(Exception):
    """The tool's result is an error."""


@dataclass(frozen=True, slots=True)
class Shop:
    """Rollouts of one environment, below HTTP."""

    services: Services
    url: str
    dsn: str
    state_dsn: str

    async def open(self, count: int = 1, **options: Any) -> list[str]:
        return [row["id"] for row in await self.services.rollouts.open("sql", count=count, **options)]

    async def one(self) -> str:
        return (await self.open())[0]

    async def call(self, rollout: str, tool: str, once: str | None = None, **arguments: Any) -> Any:
        raw = await self.services.dataplane.call(rollout, tool, json.dumps(arguments).encode(), idempotency_key=once)
        result = json.loads(raw)
        if result.get("isError"):
            raise SqlFailed(result["content"][0]["text"])
        return result["structuredContent"]

    async def run(self, rollout: str, sql: str, once: str | None = None) -> Any:
        """Rows of a statement that may write."""
        return (await self.call(rollout, "execute", once, sql=sql))["rows"]

    async def read(self, rollout: str, sql: str) -> Any:
        return (await self.call(rollout, "query", sql=sql))["rows"]

    async def checkpoint(self, rollout: str, **options: Any) -> asyncpg.Record:
        return await self.services.rollouts.make_checkpoint(rollout, **options)

    async def fork(self, checkpoint: str, count: int = 1, **options: Any) -> list[str]:
        return [row["id"] for row in await self.services.rollouts.fork(checkpoint, count=count, **options)]

    async def roll_back(self, rollout: str, checkpoint: str) -> None:
        await self.services.rollouts.roll_back(rollout, checkpoint)

    async def close(self, rollout: str) -> bool:
        return await self.services.rollouts.close(rollout)

    async def digest(self, rollout: str, at: str = "head") -> str:
        found = (await self.services.points.digest(rollout, at)).whole
        assert found is not None
        return found

    async def diff(self, rollout: str, start: str, end: str) -> Any:
        return (await self.services.points.diff(rollout, start, end))["sql"].tables

    async def query(self, rollout: str, sql: str, at: str | None = None) -> list[Any]:
        _, rows, _ = await self.services.queries.run(rollout, None, sql, at)
        return [json.loads(bytes(row)) for row in rows]

    async def journal(self, rollout: str) -> list[asyncpg.Record]:
        return list(await self.services.store.rows(store.EVENTS, rollout, 0, 10_000))
