"""What a rewind can't do it refuses; what a step leaves half done, the next attempt clears."""

import secrets
from typing import Any

import asyncpg
import pytest

from megamcp.errors import Conflict, Unprocessable
from megamcp.failpoints import VARIABLE, FailpointError, failpoint, reset
from megamcp.state.clones import Cluster
from tests.integration.clones.conftest import KEYS, Database, World

DDL = "create table t (id int primary key, x int); create table other (id int generated always as identity, x int)"
READ = """select count(*) from megamcp.log l, unnest(megamcp.way_back($1)) r (span)
    where l.id >= lower(r.span) and l.id < upper(r.span)"""
SEED = "insert into t select n, n from generate_series(1, 20) n"


async def rows(database: Database) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await database.user.fetch("select id, x from t order by id")]


async def test_a_trigger_that_changes_what_is_put_back_is_noticed(world: World) -> None:
    db = await world.start(
        DDL + "; create function meddle() returns trigger language plpgsql as"
        " $$ begin insert into other (x) values (1); return new; end $$;"
        "create trigger meddle before insert on t for each row execute function meddle();"
        "alter table t enable always trigger meddle",
        SEED,
    )
    mark, before = await db.mark(), await rows(db)
    await db.user.execute("delete from t where id = 1")
    after = await rows(db)
    with pytest.raises(Conflict) as refused:
        await db.rewind(mark.position)
    assert refused.value.code == "not_exact"
    assert await rows(db) == after != before  # whole or not at all
    await db.user.execute("select 1")


async def test_a_check_that_refuses_old_rows_stops_the_rewind_whole(world: World) -> None:
    db = await world.start(
        "create function limit_now() returns int language plpgsql stable as"
        " 'begin return (select coalesce(max(id), 100) from public.setting); end';"
        "create table t (id int primary key, x int check (x < limit_now())); create table setting (id int)",
        SEED,
    )
    mark = await db.mark()
    await db.user.execute("update t set x = 1 where id = 20; insert into setting values (5)")
    later = await db.mark()
    with pytest.raises(Conflict) as refused:
        await db.rewind(mark.position)
    assert (refused.value.code, refused.value.extra["sqlstate"]) == ("not_exact", "23514")
    async with db.hold() as inside:
        assert await inside.digest() == later.digest


async def test_what_a_login_owned_or_was_granted_is_the_owners_in_a_clone(world: World) -> None:
    db = await world.start(DDL, SEED)
    await db.user.execute(
        f"set role none; create schema mine; create table mine.own (x int); reset role;"
        f'grant select on t to "{db.login}"'
    )
    fork = await world.clone(db.name)
    owner = await fork.user.fetchval("select tableowner from pg_tables where tablename = 'own'")
    assert owner == "mm_owner"
    await fork.user.execute("insert into mine.own values (1)")
    await (await db.connect()).close()  # and the login still has its own database
    await world.cluster.drop(db.name, db.login)
    async with world.cluster.inside(fork.name) as inside:
        left = "select count(*) from pg_roles where rolname = any ($1::text[])"
        assert await inside.connection.fetchval(left, [db.login, f"{db.name}_hand"]) == 0


async def test_a_rewind_ends_sessions_that_hold_temporary_tables(world: World) -> None:
    db = await world.start(DDL, SEED)
    mark = await db.mark()
    await db.user.execute("create temporary table scratch as select * from t; update t set x = 0")
    assert (await db.mark()).exact  # a temporary table is no change of the state
    await db.rewind(mark.position)
    again = await db.connect()
    assert await again.fetchval("select to_regclass('pg_temp.scratch')") is None
    await again.close()


async def test_a_rewind_does_not_read_again_what_was_undone_before(world: World) -> None:
    db = await world.start(DDL, SEED)
    mark = await db.mark()
    for _ in range(3):
        await db.user.execute("update t set x = x + 1")
        await db.rewind(mark.position)
        async with db.hold() as inside:
            assert await inside.connection.fetchval(READ, mark.position) == 0
            assert (await inside.mark()).digest == mark.digest
    await db.user.execute("update t set x = x + 1")
    async with db.hold() as inside:
        assert await inside.connection.fetchval(READ, mark.position) == 1


async def test_large_changes_come_back(world: World) -> None:
    db = await world.start("create table t (id int primary key, x int); create table h (x text)")
    mark = await db.mark()
    await db.user.execute(
        "insert into t select n, n from generate_series(1, 5000) n; insert into h select 'r' || n % 7 from"
        " generate_series(1, 3000) n"
    )
    later = await db.mark()
    await db.user.execute("update t set x = x + 1, id = -id; delete from h where x = 'r3'")
    await db.rewind(later.position)
    async with db.hold() as inside:
        assert await inside.digest() == later.digest
        await inside.rewind(mark.position)
        assert await inside.digest() == mark.digest


@pytest.mark.parametrize("place", ["clone.drained", "clone.created", "clone.cleaned", "clone.admitted", "drain.closed"])
async def test_a_clone_that_was_cut_off_can_be_dropped_and_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    db = await world.start(DDL, SEED)
    name = f"mm_cut_{secrets.token_hex(4)}"
    reset()
    monkeypatch.setenv(VARIABLE, f"{place}=error@1")
    with pytest.raises(FailpointError):
        await world.cluster.clone(db.name, name, login=f"{name}_u", password="p")
    monkeypatch.delenv(VARIABLE)
    await world.cluster.drop(name, f"{name}_u")
    await world.cluster.unseal(db.name)
    await world.cluster.clone(db.name, name, login=f"{name}_u", password="p")
    connection = await asyncpg.connect(world.cluster.dsn_for(name, f"{name}_u", "p"))
    assert await connection.fetchval("select count(*) from t") == 20
    await connection.close()
    await world.cluster.drop(name, f"{name}_u")


@pytest.mark.parametrize("place", ["build.filled", "build.installed", "build.renamed"])
async def test_a_build_that_was_cut_off_can_be_made_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    name = f"mm_cut_{secrets.token_hex(4)}"
    reset()
    monkeypatch.setenv(VARIABLE, f"{place}=error@1")
    with pytest.raises(FailpointError):
        await cluster.build(name, ddl=DDL, seeds=[SEED], keys=KEYS)
    monkeypatch.delenv(VARIABLE)
    await cluster.drop(name)
    await cluster.build(name, ddl=DDL, seeds=[SEED], keys=KEYS)
    await cluster.drop(name)
    async with cluster._access.maintenance() as connection:
        left = "select count(*) from pg_roles where starts_with(rolname, $1)"
        assert await connection.fetchval(left, name) == 0


async def test_a_login_without_rights_is_refused_with_the_reason(cluster: Cluster, state_dsn: str) -> None:
    async with cluster._access.maintenance() as connection:
        await connection.execute(
            "create role plain login createdb createrole password 'p'; grant connect on database postgres to plain"
        )
        try:
            plain = Cluster("plain", cluster.dsn_for("postgres", "plain", "p"))
            with pytest.raises(Unprocessable) as refused:
                await plain.open()
            assert refused.value.code == "postgres_rights"
            await plain.close()
        finally:
            await connection.execute("revoke all on database postgres from plain; drop role plain")


async def test_a_misspelt_failpoint_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "here=explode")
    with pytest.raises(ValueError, match="here=explode"):
        await failpoint("here")
    await failpoint("elsewhere")


async def test_a_login_gets_back_its_password_and_its_settings(world: World, cluster: Cluster) -> None:
    def password(of: str) -> str:
        return f"p {of}"

    db = await world.start("create table t (a int)")
    name = f"{db.name}_own"
    await cluster.clone(db.name, name, login=name, password=password(name))
    assert await cluster.mend_logins(name, password) == []
    user = await asyncpg.connect(cluster.dsn_for(name, name, password(name)))
    await user.execute("set role none; alter role session_user password 'mine'")
    assert await cluster.mend_logins(name, password) == [name]
    await user.execute("alter role session_user set search_path = pg_catalog")
    assert await cluster.mend_logins(name, password) == [name]
    assert await cluster.mend_logins(name, password) == []
    await user.close()
    await cluster.drop(name, name)


@pytest.mark.parametrize("key", ["primary key", ""])
async def test_a_generated_column_of_a_domain_that_takes_no_null_comes_back(world: World, key: str) -> None:
    db = await world.start(
        "create domain positive as int not null check (value > 0);"
        f"create table t (a int {key}, b positive generated always as (a + 1) stored)",
        "insert into t select generate_series(1, 5)",
    )
    mark = await db.mark()
    await db.user.execute("update t set a = a + 10 where a > 2; delete from t where a = 1; insert into t values (7)")
    later = await db.mark()
    other = await world.clone(db.name)
    async with db.hold() as inside:
        assert (await inside.changes(mark.position, later.position, 10) or {})["t"].total >= 5
        await inside.rewind(mark.position)
        assert await inside.digest() == mark.digest
    async with db.hold() as inside, other.hold() as its:
        await inside.redo(its, mark.position, later.position)
        assert await inside.digest() == later.digest


async def test_a_database_whose_sealing_was_cut_off_before_its_sessions_ended_can_be_copied(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = await world.start(DDL, SEED)
    monkeypatch.setenv(VARIABLE, "drain.closed=error")
    with pytest.raises(FailpointError):
        await world.cluster.seal(db.name)
    monkeypatch.delenv(VARIABLE)
    assert await db.user.fetchval("select count(*) from t") == 20  # it is still inside
    fork = await world.clone(db.name)
    assert await rows(fork) == [(n, n) for n in range(1, 21)]
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
        await db.user.fetchval("select 1")
