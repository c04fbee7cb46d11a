"""Migrations: an empty database becomes a current one, and applying again changes nothing."""

import asyncio
import secrets

import asyncpg
import pytest
from sqlalchemy.engine import make_url

from megamcp.app import prepare
from megamcp.errors import Unprocessable
from megamcp.migrate import fingerprint, migrate
from megamcp.settings import Settings

CATALOG = """select n.nspname, c.relname, c.relkind::text, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull
    from pg_class c join pg_namespace n on n.oid = c.relnamespace join pg_attribute a on a.attrelid = c.oid
    where n.nspname = 'megamcp' and a.attnum > 0
    union all
    select n.nspname, p.proname, 'f', pg_get_function_identity_arguments(p.oid), md5(pg_get_functiondef(p.oid)), true
    from pg_proc p join pg_namespace n on n.oid = p.pronamespace where n.nspname = 'megamcp'
    order by 1, 2, 3, 4"""


@pytest.fixture
async def empty(postgres_dsn: str):
    """DSN of a database with nothing in it."""
    admin, name = await asyncpg.connect(postgres_dsn), f"mm_empty_{secrets.token_hex(4)}"
    await admin.execute(f'create database "{name}" template template0')
    yield make_url(postgres_dsn).set(database=name).render_as_string(hide_password=False)
    await admin.execute(f'drop database "{name}" with (force)')
    await admin.close()


async def catalog(dsn: str) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    connection = await asyncpg.connect(dsn)
    try:
        version_table = await connection.fetchval(
            "select quote_ident(schemaname) || '.' || quote_ident(tablename) from pg_tables"
            " where tablename = 'alembic_version'"
        )
        rows = await connection.fetch(f"select xmin::text, ctid::text, * from {version_table}")
        return [tuple(row) for row in await connection.fetch(CATALOG)], [tuple(row) for row in rows]
    finally:
        await connection.close()


async def test_an_empty_database_is_migrated_and_again_is_a_no_op(empty: str) -> None:
    first = await migrate(empty)
    before = await catalog(empty)
    assert len(before[0]) > 100
    second = await migrate(empty)
    assert second.password("tool") == first.password("tool")  # the deployment's secret stays
    assert await catalog(empty) == before


async def test_functions_of_another_version_are_replaced(empty: str) -> None:
    await migrate(empty)
    before = await catalog(empty)
    connection = await asyncpg.connect(empty)
    await connection.execute("comment on schema megamcp is 'older'")
    await connection.close()
    await migrate(empty)
    assert await catalog(empty) == before
    connection = await asyncpg.connect(empty)
    assert await connection.fetchval("select obj_description('megamcp'::regnamespace)") == fingerprint()
    await connection.close()


async def test_gateways_that_start_at_once_agree(empty: str) -> None:
    signers = await asyncio.gather(*(migrate(empty) for _ in range(4)))
    assert len({signer.password("tool") for signer in signers}) == 1


async def test_a_login_without_rights_is_told_which(empty: str, postgres_dsn: str) -> None:
    name = f"mm_weak_{secrets.token_hex(4)}"
    admin = await asyncpg.connect(postgres_dsn)
    await admin.execute(f"create role {name} login password 'x'")
    try:
        weak = make_url(empty).set(username=name, password="x").render_as_string(hide_password=False)
        with pytest.raises(Unprocessable, match="CREATEROLE and CREATE on the database") as refused:
            await prepare(Settings(database_url=weak), weak)
        assert refused.value.code == "insufficient_rights"
    finally:
        await admin.execute(f"drop role {name}")
        await admin.close()
