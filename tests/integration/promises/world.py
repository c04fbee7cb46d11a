"""Short words for what the tests of the promises do with rollouts of the ledger environment."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import asyncpg

from megamcp import store
from megamcp.services import Services


class ToolFailed(Exception):
    """The tool's result is an error."""


@dataclass(frozen=True, slots=True)
class World:
    """Rollouts of one environment, below HTTP."""

    services: Services
    url: str
    dsn: str

    async def open(self, count: int = 1, **options: Any) -> list[str]:
        return [row["id"] for row in await self.services.rollouts.open("ledger", count=count, **options)]

    async def one(self) -> str:
        return (await self.open())[0]

    async def call(self, rollout: str, tool: str, once: str | None = None, **arguments: Any) -> Any:
        raw = await self.services.dataplane.call(rollout, tool, json.dumps(arguments).encode(), idempotency_key=once)
        result = json.loads(raw)
        if result.get("isError"):
            raise ToolFailed(result["content"][0]["text"])
        structured = result.get("structuredContent")
        if structured is None:
            return result["content"][0]["text"]
        return structured["result"] if set(structured) == {"result"} else structured

    async def held(self, rollout: str) -> None:
        """Returns when a call that writes holds the rollout."""
        while not await self.services.store.rows(store.HOLDERS, rollout):
            await asyncio.sleep(0.01)

    async def checkpoint(self, rollout: str, **options: Any) -> asyncpg.Record:
        return await self.services.rollouts.make_checkpoint(rollout, **options)

    async def fork(self, checkpoint: str, count: int = 1, **options: Any) -> list[str]:
        return [row["id"] for row in await self.services.rollouts.fork(checkpoint, count=count, **options)]

    async def roll_back(self, rollout: str, checkpoint: str) -> None:
        await self.services.rollouts.roll_back(rollout, checkpoint)

    async def digest(self, rollout: str, at: str = "head") -> str:
        found = (await self.services.points.digest(rollout, at)).whole
        assert found is not None
        return found

    async def counters(self, rollout: str) -> dict[str, int]:
        return (await self.services.points.digest(rollout, "head")).counters["ledger"]

    async def journal(self, rollout: str) -> list[asyncpg.Record]:
        return list(await self.services.store.rows(store.EVENTS, rollout, 0, 10_000))

    async def execute(self, sql: str, *arguments: Any) -> list[asyncpg.Record]:
        """As the control role."""
        return list(await self.services.store.rows(sql, *arguments))

    async def chain(self, rollout: str) -> list[int]:
        """Layers that the rollout's head builds on."""
        (row,) = await self.execute(store.ROLLOUT_BY_ID, rollout)
        return list(row["chain"])

    async def leftovers(self) -> dict[str, int]:
        """What is left of layers: rows of deltas and counters, by table, and what the control plane knows of them."""
        tables = {f"megamcp.{name}": "true" for name in ("dead_layers", "loose_layers", "squashed_layers")}
        tables["megamcp.replaced_chains"] = "true"
        (state,) = await self.execute("select state from megamcp.servers where state is not null")
        for name in ("account", "entry", "item"):
            tables[f's_{state["state"]}."{name}~delta"'] = "_mm_layer > 0"
        tables[f's_{state["state"]}."~counters"'] = "layer > 0"
        counts = {}
        for table, condition in tables.items():
            (row,) = await self.execute(f"select count(*) as n from {table} where {condition}")
            if row["n"]:
                counts[table] = row["n"]
        return counts
