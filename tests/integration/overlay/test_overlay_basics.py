"""A rollout reads the base and its own changes, and nothing of another's."""

import asyncpg
import pytest

DDL = """
create type status as enum ('new', 'paid', 'cancelled');
create table customers (id int primary key, email text not null unique, name text not null check (name <> ''));
create table orders (
  id bigserial primary key, customer int not null references customers, status status not null default 'new',
  placed_at timestamptz not null default now(), token uuid default gen_random_uuid()
);
create index on orders (status);
create table lines (
  order_id bigint references orders on delete cascade, n int, qty int not null check (qty > 0),
  price numeric(10,2) not null,
  total numeric generated always as (qty * price) stored, primary key (order_id, n)
);
"""
SEED = """
insert into customers select i, 'c' || i || '@x.org', 'C' || i from generate_series(1, 20) i;
insert into orders (customer, status) select 1 + i % 20, 'paid' from generate_series(1, 100) i;
insert into lines select o.id, n, n, 9.99 from orders o, generate_series(1, 3) n;
"""


async def test_two_rollouts_write_apart(world):
    state = await world.load(DDL, SEED)
    a, b = await world.open(state), await world.open(state)
    assert await a.run("select count(*) from orders") == [(100,)]
    made = await a.run("insert into orders (customer) values (3) returning id, status, placed_at::text")
    assert made == [(101, "new", "2026-01-15 09:00:00+00")]
    assert await b.run("insert into orders (customer) values (4) returning id") == [(101,)]
    assert await a.run("select customer from orders where id = 101") == [(3,)]
    assert await b.run("select customer from orders where id = 101") == [(4,)]
    assert await a.status("update orders set status = 'cancelled' where id in (1, 2, 101)") == "UPDATE 3"
    assert await a.run("select id, status from orders where id < 4 order by id") == [
        (1, "cancelled"),
        (2, "cancelled"),
        (3, "paid"),
    ]
    assert await b.run("select count(*) from orders where status = 'cancelled'") == [(0,)]
    assert await a.status("delete from orders where id = 5") == "DELETE 1"
    assert await a.run("select count(*) from lines where order_id = 5") == [(0,)]
    assert await b.run("select sum(total) from lines where order_id = 5") == [(await b.run("select 6 * 9.99"))[0]]


async def test_constraints_have_their_names(world):
    state = await world.load(DDL, SEED)
    a = await world.open(state)
    with pytest.raises(asyncpg.UniqueViolationError) as duplicate:
        await a.run("insert into customers values (1, 'n@x.org', 'N')")
    assert duplicate.value.constraint_name == "customers_pkey"
    assert duplicate.value.detail == "Key (id)=(1) already exists."
    with pytest.raises(asyncpg.UniqueViolationError, match="customers_email_key"):
        await a.run("update customers set email = 'c2@x.org' where id = 1")
    with pytest.raises(asyncpg.ForeignKeyViolationError, match="orders_customer_fkey"):
        await a.run("insert into orders (customer) values (77)")
    with pytest.raises(asyncpg.ForeignKeyViolationError, match="orders_customer_fkey"):
        await a.run("delete from customers where id = 1")
    with pytest.raises(asyncpg.CheckViolationError, match="customers_name_check"):
        await a.run("update customers set name = '' where id = 1")
    with pytest.raises(asyncpg.NotNullViolationError):
        await a.run("update customers set name = null where id = 1")


async def test_unbound_transactions_read_nothing(world):
    state = await world.load(DDL, SEED)
    async with world.tool.transaction():
        await world.tool.execute(f"set local role {state.tool_role}")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await world.tool.fetch(f"select * from {state.visible_schema}.orders")
