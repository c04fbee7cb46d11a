"""Copy-on-write state against plain tables: the same statement on the same rows of the same server, as
ratios.

    python -m benchmarks.overlay [--quick] [--dsn postgresql://superuser@/postgres]

A store of customers, orders and items (1 M, 1.5 M and 2 M rows; `--quick`: 50,000 each, to see that it
runs) is loaded as a copy-on-write state and as plain tables with the same indexes. The tool's connection
prepares every statement on the *empty* delta and keeps it; then 400,000 rows of other rollouts (`--quick`:
40,000) fill each delta, and one rollout's chain grows from 1 to 10 to 40 layers. Every layer, the others'
too, holds 5 rows a table: what a turn writes. Index scan, joins and EXISTS start from a key that gives 100
rows; the aggregate reads a whole table into 100 groups. A measurement runs statements on both sides in turn,
and compares medians as seen by the client, inside one transaction that is bound already. Single-row writes
are timed as statements of such a transaction. Both sides are the tool's role, so both run under its settings:
no JIT, no parallel workers, the same page costs. The client and both backends are kept on one core where the
server is at hand: elsewhere a round trip costs 40 or 100 µs by chance, and the dearer one flatters the ratios.

`…_scale` (see benchmarks/overlay_scale.py) is what the same statement costs among 100,000 rollouts, for one that forked
the last of 100 checkpoints, as multiple of what it costs among 10 for one with a single checkpoint.

Figures without a target: the reads once more with 25 rows a table in each of 40 layers; joins from a range
given by two parameters, which PostgreSQL plans anew at every run, on either side.

Left out: the round trip of binding (see benchmarks.fork and benchmarks.gateway), and concurrency.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.crowd import Crowd
from benchmarks.report import Target, report, say
from megamcp.environments import Environments
from megamcp.migrate import migrate
from megamcp.settings import Settings
from megamcp.state import schema
from megamcp.state.names import LAYER, OVER
from megamcp.store import Store

CLOCK = datetime(2026, 1, 15, 9, tzinfo=UTC)
ROWS_PER_LAYER = 5
MANY_OWN_ROWS = 50_000
DEPTHS = (1, 10, 40)

DDL = """
create table customers (
  id int primary key, email text not null unique, city text not null, vip bool not null default false
);
create table orders (
  id int primary key, customer int not null references customers, status text not null,
  total bigint not null check (total >= 0), placed timestamptz not null default now()
);
create index orders_customer on orders (customer);
create index orders_placed on orders (placed);
create table items (
  id int primary key, ord int not null references orders on delete cascade, sku int not null, quantity int
  not null ); create index items_ord on items (ord); create index items_sku on items (sku);
"""
SEEDS = """
insert into customers select n, 'c' || n || '@example.org', 'city ' || n % 500, n % 50 = 0
  from generate_series(1::bigint, {customers}) n;
insert into orders select n, 1 + n * 7919 % {customers}, (array['new', 'paid', 'sent', 'done'])[(1 + n % 4)::int],
  n * 37 % 100000, timestamptz '2025-01-01' + n * interval '17 seconds' from generate_series(1::bigint, {orders}) n;
insert into items select n, 1 + n * 6151 % {orders}, n * 31 % ({items} / 100), 1 + n % 5
  from generate_series(1::bigint, {items}) n;
"""
TABLES = ("customers", "orders", "items")
ENVIRONMENT = """
name = "bench"
clock = "2026-01-15T09:00:00Z"
[servers.bench]
entry = "bench:server"
[servers.bench.state]
kind = "schema"
schema = "schema.sql"
seed = ["seed.sql"]
"""


@dataclass(frozen=True, slots=True)
class Size:
    customers: int
    orders: int
    items: int
    rounds: int
    foreign_rows: int
    rollouts: int


FULL = Size(1_000_000, 1_500_000, 2_000_000, 20, 400_000, 100_000)
QUICK = Size(50_000, 50_000, 50_000, 4, 40_000, 1000)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One statement: how often it runs in a batch, and its argument for run `n`."""

    name: str
    sql: str
    target: float
    repeat: int = 20

    def argument(self, number: int, rows: int) -> tuple[int, ...]:
        """The argument of run `number`, if the statement has one; 100 items share a `sku`."""
        if "$1" not in self.sql:
            return ()
        if self.name in MANY_ROWS:
            return (1,)  # where the rollout's own rows are, and the others'
        return (1 + number % (rows // 100 if "sku = $1" in self.sql else rows - 200),)


READS = (
    Measurement("point_read", "select * from orders where id = $1", 2),
    Measurement("index_scan", "select id, ord, quantity from items where sku = $1", 2),
    Measurement(
        "join_2",
        "select i.id, o.status, o.total from items i join orders o on o.id = i.ord where i.sku = $1",
        2,
    ),
    Measurement(
        "join_3",
        "select i.id, o.total, c.email from items i join orders o on o.id = i.ord"
        " join customers c on c.id = o.customer where i.sku = $1",
        2,
    ),
    Measurement(
        "exists",
        "select i.id from items i where i.sku = $1"
        " and exists (select from orders o where o.id = i.ord and o.status = 'paid')",
        3,
    ),
    Measurement("order_by_limit", "select id, placed from orders order by placed desc limit 20", 5),
    Measurement("max", "select max(placed) from orders", 5),
    Measurement("aggregate", "select total / 1000, count(*), sum(total) from orders group by 1", 2, 1),
)
WRITES = (
    Measurement("update_row", "update orders set status = 'sent', total = total + 1 where id = $1", 3),
    Measurement(
        "insert_row",
        "insert into items (id, ord, sku, quantity) values ($1 + 10000000, $1, 5, 1)",
        3,
    ),
    Measurement("delete_row", "delete from items where id = $1", 3),
    Measurement("update_50000", "update orders set total = total + 1 where id between $1 and $1 + 49999", 5, 1),
)
BULK = (
    Measurement(
        "insert_50000",
        "insert into items (id, ord, sku, quantity) select n, $1, 5, 1 from generate_series(10000000, 10049999) n",
        5,
        1,
    ),
    Measurement(
        "update_50000_unique",
        "update customers set email = email || '.eu' where id between $1 and $1 + 49999",
        5,
        1,
    ),
    Measurement(
        "update_50000_foreign_key",
        "update orders set customer = customer % 1000 + 1 where id between $1 and $1 + 49999",
        5,
        1,
    ),
)
MANY_ROWS = ("update_50000", *(measurement.name for measurement in BULK))
AGAIN = 25  # rows a layer
PLANNED = (
    Measurement(
        "join_2_planned",
        "select o.id, o.status, i.sku from orders o join items i on i.ord = o.id"
        " where o.customer between $1 and $1 + 50",
        0,
    ),
)
# On a rollout with 50,000 own rows in a table.
OWN = (
    Measurement("point_read", "select * from orders where id = $1", 3),
    Measurement("update_row", "update orders set status = 'sent', total = total + 1 where id = $1", 4),
    Measurement("join_2", READS[2].sql, 4),
)


class Side:
    """A connection with every statement prepared once, on whatever the tables held then."""

    def __init__(self, conn: asyncpg.Connection, size: Size) -> None:
        self.conn = conn
        self._rows = min(size.customers, size.orders, size.items)
        self._statements: dict[str, Any] = {}

    async def prepare(self) -> None:
        for measurement in (*READS, *PLANNED, *WRITES, *BULK):
            self._statements[measurement.name] = await self.conn.prepare(measurement.sql)

    async def run(self, measurement: Measurement, number: int) -> float:
        """Seconds of one run. Both sides get the same arguments, which differ from run to run."""
        argument = measurement.argument(number, self._rows)
        statement = self._statements[measurement.name]
        start = time.perf_counter()
        await statement.fetch(*argument)
        return time.perf_counter() - start

    async def bind(self) -> None:
        """Nothing to bind: the schema of the tables is the whole state."""


class Overlay(Side):
    """The tool's connection. `bench.bind` stands in for the gateway's call_begin."""

    chain: tuple[int, ...] = ()
    head = 0

    async def bind(self) -> None:
        await self.conn.execute("select bench.bind($1, $2)", [*self.chain, self.head], self.head)


async def load(dsn: str, size: Size, stack: contextlib.AsyncExitStack) -> Crowd:
    """The store as an environment, in an empty database."""
    seeds = SEEDS.format(customers=size.customers, orders=size.orders, items=size.items)
    say(f"loading {size.customers + size.orders + size.items:,} rows as copy-on-write state")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mm-bench-")))
    for name, text in {"environment.toml": ENVIRONMENT, "schema.sql": DDL, "seed.sql": seeds}.items():
        (folder / name).write_text(text)
    signer = await migrate(dsn)
    store = await stack.enter_async_context(Store.open(dsn, 8))
    loaded = await Environments(store, signer).load(folder)
    role = loaded.schemas[0].tool_role
    async with store.connection() as admin:
        await admin.execute(
            f"""
            create schema bench; grant usage on schema bench to {role};
            create function bench.bind(chain bigint[], head bigint) returns void language sql volatile
            security definer set search_path = pg_catalog, pg_temp
            as $$ select megamcp.bind(chain, head, 1, '{CLOCK.isoformat()}', true) $$;
            """
        )
    return Crowd(store, signer, Settings(max_rollouts=10**9), loaded, dsn)


async def _load_plain(admin: asyncpg.Connection, size: Size, role: str) -> None:
    say("loading the same rows as plain tables")
    await admin.execute(
        "set search_path = bench, pg_catalog;"
        f"create function now() returns timestamptz stable return '{CLOCK.isoformat()}'::timestamptz; {DDL}"
    )
    for statement in SEEDS.format(customers=size.customers, orders=size.orders, items=size.items).split(";\n")[:3]:
        await admin.execute(statement)
    await admin.execute(
        f"grant select, insert, update, delete on all tables in schema bench to {role}; reset search_path;"
    )


async def _tables(admin: asyncpg.Connection, *schemas: str) -> list[str]:
    rows = await admin.fetch(
        "select c.oid::regclass::text from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = any($1::text[]) and relkind = 'r'",
        schemas,
    )
    return [row[0] for row in rows]


async def _fill(admin: asyncpg.Connection, state: schema.SchemaState, foreign_rows: int) -> None:
    """Rows of other rollouts: changed copies of base rows, as many a layer as the measured rollout writes."""
    layers = foreign_rows // ROWS_PER_LAYER
    say(f"filling each delta with {foreign_rows:,} rows in {layers:,} layers of other rollouts")
    first = await admin.fetchval(
        "select min(n) from (select nextval('megamcp.layer_seq') n from generate_series(1, $1)) x", layers
    )
    for table in TABLES:
        names = await admin.fetchval(
            "select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute"
            " where attrelid = $1::text::regclass and attnum > 0",
            f"bench.{table}",
        )
        count = await admin.fetchval(f"select count(*) from bench.{table}")
        copies = -(-foreign_rows // count)
        await admin.execute(
            f"insert into s_{state.hash}.{table} ({names}, {LAYER}, {OVER})"
            f" select {names}, {first} + (id + copy * 7) % {layers} as layer, 0 from bench.{table},"
            f" generate_series(1, {copies}) copy where id <= {foreign_rows // copies} order by layer, id"
        )
    for table in await _tables(admin, state.hidden_schema):
        await admin.execute(f"vacuum analyze {table}")


async def _layer(admin: asyncpg.Connection) -> int:
    number: int = await admin.fetchval("select nextval('megamcp.layer_seq')")
    return number


def turn(first: int, rows: int) -> list[str]:
    """What a turn writes: these rows of each table."""
    where = f"where id between {first} and {first + rows - 1}"
    return [
        f"update customers set vip = not vip {where}",
        f"update orders set total = total + 1 {where}",
        f"update items set quantity = 9 {where}",
    ]


async def _deepen(admin: asyncpg.Connection, overlay: Overlay, depth: int, rows: int = ROWS_PER_LAYER) -> None:
    """Grow the rollout's chain; every layer changes some rows of each table."""
    while len(overlay.chain) < depth:
        overlay.head = await _layer(admin)
        first = 1 + len(overlay.chain) * rows * 3
        async with overlay.conn.transaction():
            await overlay.bind()
            for statement in turn(first, rows):
                await overlay.conn.execute(statement)
        overlay.chain = (*overlay.chain, overlay.head)
    overlay.head = await _layer(admin)


async def compare(plain: Side, overlay: Overlay, measurement: Measurement, rounds: int) -> float:
    """Ratio of medians. Runs alternate between the sides one by one, so that a busy machine is busy for both."""
    seconds: dict[Side, list[float]] = {plain: [], overlay: []}
    for round_ in range(rounds):
        async with contextlib.AsyncExitStack() as stack:
            for side in (plain, overlay):
                transaction = side.conn.transaction()
                await transaction.start()
                stack.push_async_callback(transaction.rollback)
                await side.bind()
            for run in range(measurement.repeat):
                for side in (plain, overlay) if run % 2 else (overlay, plain):
                    taken = await side.run(measurement, round_ * 104_729 + run * 7_907)
                    if round_:  # the first one warms caches and plans
                        seconds[side].append(taken)
    medians = [statistics.median(seconds[side]) for side in (plain, overlay)]
    ratio = medians[1] / medians[0]
    say(f"  {measurement.name:<16} {medians[0] * 1e3:9.3f} ms {medians[1] * 1e3:9.3f} ms  {ratio:6.2f}")
    return ratio


def rounds_of(measurement: Measurement, size: Size) -> int:
    return min(
        {"aggregate": 9, **dict.fromkeys(MANY_ROWS, max(2, size.rounds // 5))}.get(measurement.name, size.rounds),
        size.rounds,
    )


async def settle(admin: asyncpg.Connection, state: schema.SchemaState) -> None:
    """What autovacuum and the checkpointer would do in the next minutes, so that they don't while we measure."""
    for table in await _tables(admin, "bench", state.hidden_schema):
        await admin.execute(f"vacuum analyze {table}")
    await admin.execute("checkpoint")


def one_core(backends: list[int]) -> None:
    try:
        core = {max(os.sched_getaffinity(0))}
        for process in (*backends, 0):
            os.sched_setaffinity(process, core)
    except (AttributeError, OSError) as error:
        say(f"not kept on one core ({error}): ratios of short statements vary more")


class Bench:
    """Both sides, and what was measured on them."""

    def __init__(
        self, admin: asyncpg.Connection, state: schema.SchemaState, plain: Side, overlay: Overlay, size: Size
    ) -> None:
        self.admin, self.state, self.plain, self.overlay, self.size = admin, state, plain, overlay, size
        self.figures: dict[str, float] = {}
        self.targets: list[Target] = []

    async def measure(self, measurements: Sequence[Measurement], suffix: str, *, judged: bool = True) -> None:
        """Ratios to the plain tables, as they are now."""
        for measurement in measurements:
            name = f"{measurement.name}_{suffix}"
            rounds = rounds_of(measurement, self.size)
            self.figures[name] = await compare(self.plain, self.overlay, measurement, rounds)
            if judged and measurement.target:
                self.targets.append(Target(name, "<=", measurement.target))

    async def depths(self) -> None:
        """A chain that grows by hand, never squashed, among rows of others."""
        await _fill(self.admin, self.state, self.size.foreign_rows)
        self.overlay.head = await _layer(self.admin)
        for depth in DEPTHS:
            await _deepen(self.admin, self.overlay, depth)
            await settle(self.admin, self.state)
            say(f"chain depth {depth}")
            await self.measure((*READS, *PLANNED, *WRITES), f"depth_{depth}")
        await self.measure(BULK, f"depth_{DEPTHS[-1]}")
        filled, self.overlay.chain = self.overlay.chain, ()
        await _deepen(self.admin, self.overlay, DEPTHS[-1], AGAIN)
        await settle(self.admin, self.state)
        say(f"chain depth {DEPTHS[-1]}, {AGAIN} rows a layer")
        await self.measure(READS, f"depth_{DEPTHS[-1]}_rows_{AGAIN}", judged=False)
        self.overlay.chain = filled
        say(f"a rollout with {MANY_OWN_ROWS:,} own rows")
        async with self.overlay.conn.transaction():
            await self.overlay.bind()
            await self.overlay.conn.execute(f"update orders set total = total + 1 where id <= {MANY_OWN_ROWS}")
        await self.measure(OWN, f"{MANY_OWN_ROWS}_own")
        self.overlay.chain = ()


async def run(dsn: str, size: Size) -> tuple[dict[str, float], list[Target]]:
    """All figures. The database of `dsn` is left with the loaded state in it."""
    async with contextlib.AsyncExitStack() as stack:
        admin = await asyncpg.connect(dsn)
        stack.push_async_callback(admin.close)
        crowd = await load(dsn, size, stack)
        state = crowd.state
        await _load_plain(admin, size, state.tool_role)
        await settle(admin, state)
        sides: list[Any] = []
        for kind, path in ((Side, "bench"), (Overlay, f"v_{state.hash}")):
            connection = await stack.enter_async_context(crowd.tool())
            await connection.execute(f"set search_path = {path}, pg_catalog")
            sides.append(kind(connection, size))
            await sides[-1].prepare()
        bench = Bench(admin, state, *sides, size)
        bench.overlay.head = await _layer(admin)
        one_core([await side.conn.fetchval("select pg_backend_pid()") for side in sides])
        say("warming prepared statements on the empty delta")
        for measurement in READS:
            await compare(*sides, measurement, 3)
        await bench.depths()
        return bench.figures, bench.targets


@contextlib.asynccontextmanager
async def database(dsn: str | None, name: str = "mm_bench_overlay") -> AsyncIterator[str]:
    """A migrated database: in the server of `dsn` (dropped afterwards), or in an embedded one."""
    from sqlalchemy.engine import make_url

    from megamcp.postgres import EmbeddedPostgres

    async with contextlib.AsyncExitStack() as stack:
        if dsn is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mm-bench-"))
            os.chmod(folder, 0o755)
            dsn = (await stack.enter_async_context(EmbeddedPostgres(Path(folder, "pg")))).dsn
        admin = await asyncpg.connect(dsn)
        stack.push_async_callback(admin.close)
        await admin.execute(f"drop database if exists {name} with (force)")
        await admin.execute(f"create database {name} template template0")
        stack.push_async_callback(admin.execute, f"drop database if exists {name} with (force)")
        own = make_url(dsn).set(database=name).render_as_string(hide_password=False)
        yield own


async def _main(arguments: argparse.Namespace) -> None:
    started = time.monotonic()
    size = QUICK if arguments.quick else FULL
    async with database(arguments.dsn) as dsn:
        admin = await asyncpg.connect(dsn)
        version = await admin.fetchval("show server_version")
        await admin.close()
        figures, targets = await run(dsn, size)
        from benchmarks import overlay_scale  # here, since it measures with what this module has

        scaled, more = await overlay_scale.run(dsn, size)
        figures |= scaled
        targets += more
    say(f"took {time.monotonic() - started:.0f} s")
    rows = size.customers + size.orders + size.items
    report("overlay", figures, targets, postgresql=version, base_rows=rows, foreign_rows=3 * size.foreign_rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlay", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="50,000 rows a table instead of millions, a tenth of others' rows"
    )
    parser.add_argument("--dsn", help="a superuser of a PostgreSQL 18 to use instead of the embedded one")
    asyncio.run(_main(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
