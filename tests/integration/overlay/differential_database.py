"""A migrated database for one search, on whatever server the session has."""

import secrets
from dataclasses import dataclass

import asyncpg
from sqlalchemy.engine import make_url

from megamcp.migrate import migrate


@dataclass(slots=True)
class Database:
    name: str
    server: str
    dsn: str
    connection: asyncpg.Connection

    @classmethod
    async def create(cls, server: str) -> "Database":
        name = f"mm_differential_{secrets.token_hex(4)}"
        admin = await asyncpg.connect(server)
        await admin.execute(f'create database "{name}" template template0')
        await admin.execute(f'alter database "{name}" set synchronous_commit = off')  # nothing here outlives the test
        await admin.close()
        dsn = make_url(server).set(database=name).render_as_string(hide_password=False)
        await migrate(dsn)
        return cls(name, server, dsn, await asyncpg.connect(dsn))

    async def drop(self) -> None:
        await self.connection.close()
        admin = await asyncpg.connect(self.server)
        await admin.execute(f'drop database if exists "{self.name}" with (force)')
        await admin.close()
