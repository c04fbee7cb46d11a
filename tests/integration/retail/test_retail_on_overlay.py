"""The store on copy-on-write state: gold replays reach their milestones, and random calls do what they do on plain
tables, row for row.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from megamcp.sdk import Clock
from megamcp.state import schema
from tests.integration.retail.books import broken
from tests.integration.retail.desk import FOLDER, NOW, Desk
from tests.integration.retail.test_retail_invariants import MONEY_TOOLS, Chaos
from tests.integration.retail.test_retail_tasks import EVALUATORS, TASKS, play, verdicts

SEQUENCES = (
    "select sequencename, last_value from pg_sequences where schemaname = 'store' and sequencename not like 'identity%'"
)
BIND = "select megamcp.bind(cast(:chain as bigint[]), :head, :seed, :clock, true)"


@dataclass
class Overlay:
    control: asyncpg.Connection
    engine: AsyncEngine
    state: schema.SchemaState

    @asynccontextmanager
    async def rollout(self) -> AsyncIterator[Desk]:
        """A fresh rollout within one transaction of the tool's role; its rows are dropped at the end."""
        head = await self.control.fetchval("select nextval('megamcp.layer_seq')")
        async with self.engine.connect() as db:
            await db.execute(text(BIND), {"chain": [head], "head": head, "seed": 7, "clock": NOW})
            await db.execute(text(f"set local role {self.state.tool_role}"))
            await db.execute(text(f"set local search_path = {self.state.visible_schema}, pg_catalog, pg_temp"))
            yield Desk(db, Clock(NOW))
            await db.rollback()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def overlay(postgres_dsn: str) -> AsyncIterator[Overlay]:
    name = f"retail_{secrets.token_hex(4)}"
    admin = await asyncpg.connect(postgres_dsn)
    await admin.execute(f"create database {name}")
    url = make_url(postgres_dsn).set(database=name)
    control = await asyncpg.connect(url.render_as_string(hide_password=False))
    await control.execute("create schema megamcp; create sequence megamcp.layer_seq")
    await control.execute(schema.state_sql())
    state = await schema.load(
        control,
        ddl=(FOLDER / "schema.sql").read_text(encoding="utf-8"),
        seeds=[(FOLDER / "seed.sql").read_text(encoding="utf-8")],
        clock=NOW,
        seed=7,
        tool_password=secrets.token_hex(16),
        query_password=secrets.token_hex(16),
    )
    engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
    yield Overlay(control, engine, state)
    await engine.dispose()
    await schema.unload(control, state)  # roles belong to the server, not to the database
    await control.close()
    await admin.execute(f"drop database {name} with (force)")
    await admin.close()


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["template"])
async def test_gold_reaches_its_milestones_on_copy_on_write_state(overlay: Overlay, task: dict[str, Any]) -> None:
    checks = EVALUATORS[task["id"]]["milestones"] + EVALUATORS[task["id"]]["guards"]
    async with overlay.rollout() as desk:
        await play(desk, task["gold"])
        assert all((await verdicts(desk, checks)).values())


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_random_calls_do_the_same_on_copy_on_write_state_as_on_plain_tables(overlay: Overlay, desk: Desk) -> None:
    async with overlay.rollout() as copied:
        plain_chaos, copied_chaos = Chaos(desk, 11), Chaos(copied, 11)
        for number in range(150):
            before = (await desk.db.execute(text(SEQUENCES))).all()
            done = sum(count for name, count in plain_chaos.outcomes.items() if name.endswith("done"))
            await plain_chaos.step(plain_chaos.chance.choice(MONEY_TOOLS))
            if done == sum(count for name, count in plain_chaos.outcomes.items() if name.endswith("done")):
                for name, last in before:  # a refused call leaves gaps on plain tables, and none on copied ones
                    await desk.db.execute(text("select setval(cast(:n as regclass), :last)"), {"n": name, "last": last})
            await copied_chaos.step(copied_chaos.chance.choice(MONEY_TOOLS))
            assert plain_chaos.outcomes == copied_chaos.outcomes, f"call {number} went another way"
            if number % 50 == 25:
                await plain_chaos.receive_some_returns()
                await copied_chaos.receive_some_returns()
        assert await broken(copied.db) == {}
        for table in await tables(desk):
            assert await rows(desk, table) == await rows(copied, table), table


async def tables(desk: Desk) -> list[str]:
    found = await desk.db.execute(text("select tablename from pg_tables where schemaname = 'store' order by 1"))
    return list(found.scalars())


async def rows(desk: Desk, table: str) -> list[tuple[Any, ...]]:
    found = await desk.db.execute(text(f"select * from {table}"))
    return sorted((tuple(row) for row in found), key=repr)
