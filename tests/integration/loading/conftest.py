"""A gateway that loads, and a database that was there before: every construct that both kinds take, and many rows."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest_asyncio
from sqlalchemy.engine import make_url

from megamcp.databases.clusters import SETTINGS
from megamcp.migrate import migrate
from megamcp.postgres import EmbeddedPostgres
from megamcp.services import Services
from megamcp.testing import running_gateway

ROWS = 20_000
DDL = """
create type status as enum ('new', 'paid', 'sent');
create domain money_amount as numeric(10, 2) check (value >= 0);
create domain short_name as varchar(30) not null;
create function net(gross numeric) returns numeric language sql immutable as $$ select round(gross / 1.19, 2) $$;
create function open_orders(of int) returns bigint language sql stable
  begin atomic select count(*) from (select 1 where of > 0) x; end;
create table customers (
  id int generated always as identity primary key, name short_name, "E-Mail" text collate "C" unique,
  tags text[] not null default '{}', profile jsonb, photo bytea, seen timestamptz default now(),
  referred_by int references customers (id)
);
create table products (
  sku varchar(12) primary key, title text not null, price money_amount not null, net numeric generated always as
  (round(price / 1.19, 2)) stored, sizes int4range, words tsvector, note text default 'shop.x'
);
create table "order" (
  id serial primary key, customer int not null references customers (id) on delete cascade, state status default 'new',
  states status[], at timestamp, day date, weight double precision, key uuid default gen_random_uuid(),
  check (weight > 0)
);
create table lines (
  "order" int references "order" (id) on delete cascade, line smallint, sku varchar(12) references products (sku) on
  update cascade, quantity int not null check (quantity > 0), primary key ("order", line)
);
create sequence tickets start 100 increment 5;
create index lines_by_sku on lines (sku);
create index cheap on products (price) where price < 10;
create view spent as select c.id, sum(l.quantity * p.price) as total
  from customers c join "order" o on o.customer = c.id join lines l on l."order" = o.id
  join products p on p.sku = l.sku group by c.id;
create function customers_of(state_ status) returns setof int language sql stable as
  $$ select distinct customer from shop."order" where state = state_ $$;
comment on table customers is 'who buys; shop.customers';
"""
FILL = """
insert into customers (name, "E-Mail", tags, profile, photo, referred_by)
  select 'Name ' || n, E'a\\\\b\\t' || n || '@x', array['a,b', 'it''s', null],
    jsonb_build_object('n', n, 't', E'x\\ny'),
    decode(md5(n::text), 'hex'), nullif(n - 1, 0) from generate_series(1, 500) n;
insert into products (sku, title, price, sizes, words)
  select 'sku-' || n, E'Title\\\\.\\n\\\\. ' || n || ' ü€😀', n / 7.0, int4range(n, n + 3),
    to_tsvector('simple', 'one two ' || n) from generate_series(1, 200) n;
insert into "order" (customer, state, states, at, day, weight)
  select 1 + n % 500, (array['new', 'paid', 'sent'])[1 + n % 3]::status, array['new', 'sent']::status[],
    timestamp '2025-01-01' + n * interval '1 minute', date '2025-01-01' + n % 300, n / 3.0 + 0.1
  from generate_series(1, 1000) n;
insert into lines select 1 + n % 1000, n / 1000, 'sku-' || 1 + n % 200, 1 + n % 9 from generate_series(0, %d) n;
select nextval('tickets');
"""
TABLES = ("customers", "products", "order", "lines")


@dataclass(frozen=True, slots=True)
class Old:
    """A database that exists."""

    dsn: str
    connection: asyncpg.Connection

    async def content(self) -> dict[str, Any]:
        """Number and hash of the rows of each table."""
        return {
            table: tuple(await self.connection.fetchrow(f"select {HASH} from (select * from shop.{table}) r"))
            for table in ("customers", "products", '"order"', "lines")
        }


HASH = "count(*), sum(hashtextextended(r::text, 0)::numeric)"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def old(postgres_dsn: str) -> AsyncIterator[Old]:
    """Schema `shop` with all of it, schema `void` with nothing."""
    name = f"old_{secrets.token_hex(4)}"
    admin = await asyncpg.connect(postgres_dsn)
    await admin.execute(f'create database "{name}"')
    dsn = make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    connection = await asyncpg.connect(dsn)
    await connection.execute("create schema void; create schema shop; set search_path = shop")
    await connection.execute(DDL)
    await connection.execute(FILL.replace("%d", str(ROWS - 1)))
    await connection.execute("create schema few; set search_path = few")
    await connection.execute(
        "create type kind as enum ('x'); create table a (id serial primary key, kind kind);"
        "create table b (id int primary key, a int references a (id)); create table c (id serial primary key);"
        "create view only_a as select kind from a"
    )
    yield Old(dsn, connection)
    await connection.close()
    await admin.execute(f'drop database "{name}" with (force)')
    await admin.close()


@dataclass(frozen=True, slots=True)
class Place:
    """Where environments are loaded to."""

    services: Services
    url: str
    dsn: str
    state_dsn: str
    control: asyncpg.Connection

    async def load(self, folder: Path, progress: Any = None) -> Any:
        return await self.services.environments.load(folder, progress, self.services.databases.sources.build)

    async def left(self) -> tuple[set[str], int, int]:
        """What loads leave: schemas of states, versions, databases."""
        schemas = await self.control.fetch("select nspname::text from pg_namespace where nspname ~ '^[svw]_'")
        versions = await self.control.fetchval("select count(*) from megamcp.environments")
        databases = await self.control.fetchval("select count(*) from megamcp.databases where status <> 'dropping'")
        return {row[0] for row in schemas}, versions, databases


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def state_dsn(scratch_folder: Path) -> AsyncIterator[str]:
    async with EmbeddedPostgres(scratch_folder / "states", max_connections=100, settings=SETTINGS) as postgres:
        yield postgres.dsn


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def place(postgres_dsn: str, state_dsn: str) -> AsyncIterator[Place]:
    name = f"mm_place_{secrets.token_hex(4)}"
    admin = await asyncpg.connect(postgres_dsn)
    await admin.execute(f'create database "{name}"')
    dsn = make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    await migrate(dsn)
    control = await asyncpg.connect(dsn)
    async with running_gateway(
        dsn, state_urls=[state_dsn], reap_interval_s=3600, spare_databases=0, disk_reserve=0
    ) as running:
        yield Place(running.services, running.url, dsn, state_dsn, control)
    await control.close()
    await admin.execute(f'drop database "{name}" with (force)')
    await admin.close()


def folder_of(path: Path, kind: str = "schema", **files: str | bytes) -> Path:
    """An environment with these files; `dump` is its dump, else `schema` and `seed`."""
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        raw = content.encode() if isinstance(content, str) else content
        (path / f"{name}.sql").write_bytes(raw)
    named = 'dump = "dump.sql"' if "dump" in files else 'schema = "schema.sql"'
    named += '\nseed = ["seed.sql"]' if "seed" in files else ""
    (path / "environment.toml").write_text(
        f'name = "{path.name}"\n[servers.shop]\nentry = "tool_servers.sql.server:server"\n'
        f'[servers.shop.state]\nkind = "{kind}"\n{named}\n'
    )
    return path
