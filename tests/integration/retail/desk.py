"""The service desk under test: calls retail's tools by name, on any connection, without SDK or gateway.

`Desk.call` does what the SDK does around a tool: checks the arguments against the advertised schema, undoes a tool that
raises, runs reading tools read-only, and checks the result's type.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.sdk import Clock, ToolError
from megamcp.sdk.signature import Injected, read_signature
from tool_servers.retail import server

FOLDER = Path(server.__file__).parent
NOW = datetime(2026, 1, 15, 9, 0, tzinfo=UTC)
TOOLS = {tool.__name__: tool for tool in (*server.READING, *server.WRITING, *server.FINAL)}
SIGNATURES = {name: read_signature(tool, name) for name, tool in TOOLS.items()}
READ_ONLY = {tool.__name__ for tool in server.READING}


@dataclass
class Desk:
    """Calls tools by name with JSON arguments; `clock` may be replaced."""

    db: AsyncConnection
    clock: Clock

    async def call(self, tool: str, **arguments: Any) -> Any:
        signature = SIGNATURES[tool]
        assert signature.output is not None
        given = signature.arguments.validate_python(arguments)
        injected = {name: self.db if kind is Injected.DB else self.clock for name, kind in signature.injected.items()}
        nested = await self.db.begin_nested()
        try:
            if tool in READ_ONLY:
                await self.db.execute(text("set local transaction_read_only = on"))
            result = signature.output.validate_python(await TOOLS[tool](**injected, **given))
        except BaseException:
            await nested.rollback()
            raise
        # What was set for a reading tool goes with its savepoint.
        await (nested.rollback() if tool in READ_ONLY else nested.commit())
        return result

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
