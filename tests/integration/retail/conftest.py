"""The retail store on plain PostgreSQL: its tools are called directly, without SDK or gateway.

Each test gets one connection whose transaction is rolled back, and `call`, which does what the SDK does around a tool:
checks the arguments against the advertised schema and each statement against what copy-on-write state can run, undoes a
tool that raises, and checks the result's type.
"""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from sqlalchemy import event, make_url, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from megamcp.sdk import Clock, ToolError
from megamcp.sdk.signature import Injected, read_signature
from megamcp.state.statements import check_statement
from tool_servers.retail import server

FOLDER = Path(server.__file__).parent
NOW = datetime(2026, 1, 15, 9, 0, tzinfo=UTC)
TOOLS = {tool.__name__: tool for tool in (*server.READING, *server.WRITING, *server.FINAL)}
SIGNATURES = {name: read_signature(tool, name) for name, tool in TOOLS.items()}
READ_ONLY = {tool.__name__ for tool in server.READING}

# Shadows the machine's clock as the gateway's state does, so that defaults agree with the environment.
PREAMBLE = """
create schema store;
create function store.now() returns timestamptz language sql stable return timestamptz '2026-01-15 09:00+00';
"""


@dataclass
class Desk:
    """Calls tools by name with JSON arguments; `clock` may be replaced."""

    db: AsyncConnection
    clock: Clock

    async def call(self, tool: str, **arguments: Any) -> Any:
        signature = SIGNATURES[tool]
        assert signature.output is not None
        given = signature.arguments.validate_python(arguments)
        injected = {
            name: self.db if kind is Injected.DB else self.clock for name, kind in signature.injected.items()
        }
        if tool in READ_ONLY:
            async with self.db.begin_nested():
                await self.db.execute(text("set local transaction_read_only = on"))
                return signature.output.validate_python(await TOOLS[tool](**injected, **given))
        async with self.db.begin_nested():
            return signature.output.validate_python(await TOOLS[tool](**injected, **given))

    async def refused(self, tool: str, **arguments: Any) -> str:
        """The code of the refusal."""
        with pytest.raises(ToolError) as caught:
            await self.call(tool, **arguments)
        assert len(caught.value.message) > 30, "a refusal says what to do instead"
        return caught.value.code

    async def value(self, sql: str, **values: Any) -> Any:
        return (await self.db.execute(text(sql), values)).scalar()

    async def verify(self, customer: str) -> None:
        phone = await self.value("select phone from customers where id = :id", id=int(customer[1:]))
        check = await self.call("verify_customer", customer_id=customer, proof="phone_last4", value=phone[-4:])
        assert check.verified


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
                check_statement(statement)

        transaction = await db.begin()
        yield Desk(db, Clock(NOW))
        await transaction.rollback()
