"""The retail store on plain PostgreSQL. Each test gets one connection whose transaction is rolled back.

Each statement that a tool sends is checked against what copy-on-write state can run.
"""

import secrets
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest_asyncio
from sqlalchemy import event, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from megamcp.sdk import Clock
from megamcp.state.statements import check_statement
from tests.integration.retail.desk import FOLDER, NOW, Desk

# Shadows the machine's clock as the gateway's state does, so that defaults agree with the environment.
PREAMBLE = """
create schema store;
create function store.now() returns timestamptz language sql stable return timestamptz '2026-01-15 09:00+00';
"""
LAST_VALUES = "select sequencename, last_value from pg_sequences where schemaname = 'store'"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def store(postgres_dsn: str) -> AsyncIterator[AsyncEngine]:
    """A database of its own with the retail schema and seed."""
    name = f"retail_{secrets.token_hex(4)}"
    admin = await asyncpg.connect(postgres_dsn)
    await admin.execute(f"create database {name}")
    await admin.execute(f"alter database {name} set search_path = store, pg_catalog")
    url = make_url(postgres_dsn).set(database=name)
    connection = await asyncpg.connect(url.render_as_string(hide_password=False))
    await connection.execute(PREAMBLE)
    for file in ("schema.sql", "seed.sql"):
        await connection.execute((FOLDER / file).read_text(encoding="utf-8"))
    await connection.execute("analyze")
    await connection.close()
    engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
    yield engine
    await engine.dispose()
    await admin.execute(f"drop database {name} with (force)")
    await admin.close()


@pytest_asyncio.fixture(loop_scope="session")
async def desk(store: AsyncEngine) -> AsyncIterator[Desk]:
    async with store.connect() as db:

        @event.listens_for(db.sync_connection, "before_cursor_execute")
        def check(_c: Any, _cursor: Any, statement: str, _p: Any, _x: Any, _many: bool) -> None:
            if not statement.startswith("set local"):
                check_statement(statement, savepoints=True)

        transaction = await db.begin()
        sequences = (await db.execute(text(LAST_VALUES))).all()
        yield Desk(db, Clock(NOW))
        await transaction.rollback()
        for name, last in sequences:  # plain sequences don't roll back; gold calls name the next ids
            await db.execute(text("select setval(cast(:name as regclass), :last)"), {"name": name, "last": last})
        await db.commit()
