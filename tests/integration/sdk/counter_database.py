"""A database for the counter server: the real control plane, and plain tables where a state's views would be.

What is tested with it is the SDK's part of a call, so no row here is copied on write; `megamcp_draw` and the
other functions of a state are minimal stand-ins with the same names.
"""

import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from sqlalchemy.engine import make_url

from megamcp.handles import Mode, Signer, fingerprint, new_id
from megamcp.migrate import migrate

TABLES = """
create schema v_test;
create table v_test.counter (name text primary key, value integer not null);
insert into v_test.counter values ('a', 1), ('b', 10);
create table v_test.hidden (draws bigint not null, clock timestamptz not null);
insert into v_test.hidden values (0, '2026-01-15T09:00:00Z');
create function v_test.megamcp_draw() returns bytea language sql volatile
    as 'update v_test.hidden set draws = draws + 1 returning sha256(int8send(draws))';
create function v_test.megamcp_advance_clock(microseconds bigint) returns timestamptz language sql volatile
    as $$update v_test.hidden set clock = clock + microseconds * interval '1 microsecond' returning clock$$;
create function v_test.now() returns timestamptz language sql stable as 'select clock from v_test.hidden';
"""


@dataclass
class CounterDatabase:
    """`dsn` is the tool role's; `admin` the superuser's connection to the same database."""

    dsn: str
    admin: asyncpg.Connection
    signer: Signer
    environment: int
    rollouts: list[str] = field(default_factory=list)

    async def rollout(self) -> str:
        identifier = new_id("ro")
        await self.admin.execute(
            'insert into megamcp.rollouts (id, environment, "group", layer, seed, expires_at)'
            " values ($1, $2, 'g', nextval('megamcp.layer_seq'), 7, now() + interval '1 hour')",
            identifier,
            self.environment,
        )
        return identifier

    def handle(
        self,
        rollout: str,
        *,
        mode: Mode = Mode.WRITE,
        seconds: float = 30.0,
        key: str | None = None,
        request: bytes = b"",
        server: str = "counter",
        epoch: int = 0,
        nonce: uuid.UUID | None = None,
    ) -> str:
        return self.signer.mint(
            rollout=rollout,
            server=server,
            epoch=epoch,
            mode=mode,
            deadline=time.time() + seconds,
            idempotency_key=key,
            request=fingerprint(server, "", request),
            nonce=nonce,
        )

    async def value(self, name: str = "a") -> int:
        return int(await self.admin.fetchval("select value from v_test.counter where name = $1", name))

    async def calls(self, rollout: str) -> list[Any]:
        rows: list[Any] = await self.admin.fetch(
            "select tool, arguments, state, is_error, result from megamcp.events"
            " where rollout = $1 and kind = 'call' order by seq",
            rollout,
        )
        return rows


@asynccontextmanager
async def counter_database(server_dsn: str) -> AsyncIterator[CounterDatabase]:
    name = f"mm_sdk_{secrets.token_hex(5)}"
    role, password = f"{name}_tool", secrets.token_hex(8)
    outside = await asyncpg.connect(server_dsn)
    await outside.execute(f"create database {name}")
    url = make_url(server_dsn).set(database=name)
    admin = await asyncpg.connect(url.render_as_string(hide_password=False))
    try:
        signer = await migrate(url.render_as_string(hide_password=False))
        await admin.execute(TABLES)
        await admin.execute(f"""
            create role {role} login password '{password}';
            grant megamcp_tools to {role};
            grant usage on schema v_test to {role};
            grant all on all tables in schema v_test to {role};
            alter role {role} in database {name} set search_path = v_test, pg_catalog;
        """)
        environment = await admin.fetchval(
            "insert into megamcp.environments (name, hash, definition, clock, seed)"
            " values ('counter', 'x', '{}', '2026-01-15T09:00:00Z', 7) returning id"
        )
        await admin.execute(
            "insert into megamcp.servers (environment, name, position, kind, role)"
            " values ($1, 'counter', 0, 'schema', $2)",
            environment,
            role,
        )
        dsn = url.set(username=role, password=password).render_as_string(hide_password=False)
        yield CounterDatabase(dsn, admin, signer, environment)
    finally:
        await admin.close()
        await outside.execute(f"drop database {name} with (force)")
        await outside.execute(f"drop role if exists {role}")
        await outside.close()
