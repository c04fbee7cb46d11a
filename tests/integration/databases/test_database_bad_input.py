"""What state of kind `database` can't serve: a clear error, nothing half made, and the next try works."""

import dataclasses
import shutil
import time
from pathlib import Path

import asyncpg
import pytest

from megamcp.errors import DeadlineExceeded, MegaMCPError, Unprocessable
from tests.integration.databases.conftest import SQL
from tests.integration.databases.shop import Shop, SqlFailed

pytestmark = pytest.mark.asyncio(loop_scope="session")

FOREVER = "select count(*) from generate_series(1, 1000000) a, generate_series(1, 1000000) b"
SPILLING = """with big as materialized (select repeat('x', 8000) from generate_series(1, 1000000))
    select count(*) from big, big again"""
MILLION = "select n, repeat('x', 10) as word from generate_series(1, 1000000) n"


async def dsn(shop: Shop, rollout: str) -> str:
    return str((await shop.services.door.dsn(rollout, None))["dsn"])


def environment(folder: Path, name: str, schema: str, seed: str = "") -> Path:
    """A copy of the bundled one with other SQL."""
    path = folder / name
    shutil.copytree(SQL, path, dirs_exist_ok=True)
    (path / "schema.sql").write_text(schema)
    (path / "seed.sql").write_text(seed)
    text = (SQL / "environment.toml").read_text()
    (path / "environment.toml").write_text(text.replace('name = "sql"', f'name = "{name}"'))
    return path


async def left(shop: Shop) -> tuple[set[str], set[str]]:
    """Databases and roles of ours on the state cluster, but for those of the shop's own rows."""
    state = await asyncpg.connect(shop.state_dsn)
    known = {row["name"] for row in await shop.services.store.rows("select name from megamcp.databases")}
    databases = {row[0] for row in await state.fetch("select datname from pg_database where datname ~ '^mm_'")}
    roles = {row[0] for row in await state.fetch("select rolname from pg_roles where rolname ~ '^mm_'")}
    await state.close()
    return databases - known, roles - known - {f"{name}_hand" for name in known} - {"mm_owner", "mm_hands"}


@pytest.mark.parametrize(
    ("schema", "seed", "words"),
    [
        ("create table t (id int;", "", "42601"),
        ("create table t (id int primary key)", "insert into t values (1), (1)", "23505"),
        ("create table t (id int check (id > 0))", "insert into t values (1); insert into t values (0)", "23514"),
        ("create table t (id int references nowhere)", "", "42P01"),
        ("create table t (id int)", "select pg_sleep(1000000)", "57014"),
        ("create table t (id int); do $$ begin loop end loop; end $$", "", "57014"),
        ("create role intruder", "", "42501"),
        ("create table t (id int)", "copy t from '/etc/passwd'", "42501"),
    ],
)
async def test_an_environment_whose_sql_fails_leaves_nothing_and_the_next_one_loads(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: str, seed: str, words: str
) -> None:
    for cluster in await shop.services.databases.clusters.ready():
        monkeypatch.setattr(cluster, "_statement_s", 0.5)
    load, build = shop.services.environments.load, shop.services.databases.sources.build
    with pytest.raises(Unprocessable, match=words) as refused:
        await load(environment(tmp_path, "broken", schema, seed), build=build)
    assert refused.value.code == "environment_sql_failed"
    await shop.services.keeper.once()
    assert await left(shop) == (set(), set())
    good = await load(
        environment(tmp_path, "broken", "create table t (id int)", "insert into t values (7)"), build=build
    )
    made = (await shop.services.rollouts.open(good.full_name))[0]["id"]
    assert await shop.read(made, "select id from t") == [[7]]


async def test_a_statement_that_runs_for_ever_ends_at_the_calls_deadline(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "update books set stock = 1")
    calls = shop.services.dataplane._calls
    monkeypatch.setattr(calls, "_limits", dataclasses.replace(calls._limits, call_timeout_s=1.5))
    began = time.monotonic()
    with pytest.raises((MegaMCPError, SqlFailed)):
        await shop.run(rollout, "update books set stock = 2 where pg_sleep(1000) is not null")
    assert time.monotonic() - began < 20
    assert await shop.read(rollout, "select distinct stock from books") == [[1]]


@pytest.mark.parametrize("tool", ["query", "execute"])
async def test_a_tool_answers_a_million_rows_with_a_bounded_part(shop: Shop, tool: str) -> None:
    rollout = await shop.one()
    found = await shop.call(rollout, tool, sql=MILLION)
    assert found["truncated"]
    assert len(found["rows"]) == 1000
    wide = await shop.call(rollout, tool, sql="select repeat('x', 100000) from generate_series(1, 1000000)")
    assert wide["truncated"]
    assert len(wide["rows"]) < 20


async def test_an_evaluator_gets_a_bounded_part_of_a_million_rows(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "update books set stock = 1")
    _, rows, truncated = await shop.services.queries.run(rollout, None, MILLION, None)
    assert truncated
    assert len(rows) == 10_000
    with pytest.raises(DeadlineExceeded) as late:
        await shop.services.queries.run(rollout, None, FOREVER, None)
    assert late.value.code == "query_timeout"


@pytest.mark.parametrize(
    "statement",
    [
        "commit",
        "rollback",
        "savepoint a",
        "create role intruder",
        "alter role current_user password 'mine'",
        "create database more",
        "alter system set fsync = on",
        "select 1; select 2",
        "listen me",
        "drop owned by current_user",
        "select $1",
        "copy books to '/tmp/out'",
        "copy books to program 'cat'",
        "set session authorization postgres",
        "set role postgres",
        "vacuum",
        "prepare transaction 'x'",
        "drop schema megamcp cascade",
        "truncate megamcp.log",
        "selec 1",
    ],
)
async def test_a_refused_statement_says_why_and_changes_nothing(shop: Shop, statement: str) -> None:
    rollout = await shop.one()
    before = await shop.digest(rollout)
    with pytest.raises(SqlFailed) as refused:
        await shop.run(rollout, statement)
    assert len(str(refused.value)) > 20
    assert await shop.run(rollout, "select 1") == [[1]]
    assert await shop.digest(rollout) == before


HARM = [
    "alter role {login} password 'mine'",
    "alter role {login} password null",
    "alter role {login} set statement_timeout = '1ms'",
    "alter role {login} set default_transaction_read_only = on",
    "alter role {login} in database {login} set role = none",
    "alter role {login} set search_path = nowhere",
]


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("healer", ["keeper", "rollback"])
async def test_a_login_that_changes_itself_is_mended(shop: Shop, harm: str, healer: str) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "update books set stock = 1")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "update books set stock = 2")
    client = await asyncpg.connect(await dsn(shop, rollout))
    login = await client.fetchval("select current_database()")
    await client.execute("set role none; " + harm.format(login=f'"{login}"'))
    await client.close()
    stock = 2
    if healer == "rollback":
        await shop.roll_back(rollout, point["id"])
        stock = 1
    else:
        shop.services.keeper._looked = float("-inf")
        await shop.services.keeper.once()
    fresh = await asyncpg.connect(await dsn(shop, rollout))
    assert await fresh.fetchval("select distinct stock from books") == stock
    assert await fresh.fetchval("select current_user") == "mm_owner"
    await fresh.execute("update books set stock = 3 where pg_sleep(0.01) is not null")
    await fresh.close()
    assert await shop.read(rollout, "select distinct stock from books") == [[3]]
    await shop.checkpoint(rollout)


async def test_a_fork_of_a_rollout_whose_login_changed_itself_is_untouched(shop: Shop) -> None:
    rollout = await shop.one()
    client = await asyncpg.connect(await dsn(shop, rollout))
    login = await client.fetchval("select current_database()")
    await client.execute(
        f'set role none; alter role "{login}" set search_path = nowhere; alter role "{login}" password \'\''
    )
    await client.close()
    fork = (await shop.fork((await shop.checkpoint(rollout))["id"]))[0]
    assert await shop.read(fork, "show search_path") != [["nowhere"]]
    assert (await shop.read(fork, "select count(*) from books"))[0][0] > 10


async def test_a_statement_that_spills_without_end_is_refused_and_the_rollout_goes_on(shop: Shop) -> None:
    rollout = await shop.one()
    await shop.run(rollout, "create table kept (n int)")
    with pytest.raises(SqlFailed, match=r"temporary file size exceeds .*temp_file_limit.* \(2097152kB\)"):
        await shop.run(rollout, SPILLING)
    await shop.run(rollout, "insert into kept values (1)")
    connection = await asyncpg.connect((await shop.services.door.dsn(rollout, None))["dsn"])
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute("set temp_file_limit = -1")
    assert await connection.fetchval("show temp_file_limit") == "2GB"
    assert await connection.fetchval("select n from kept") == 1
    await connection.close()
