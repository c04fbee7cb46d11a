"""The log and the way back are bounded in memory and time, whatever rows an agent writes."""

import asyncio
import hashlib
import tracemalloc

import pytest

from megamcp.errors import DeadlineExceeded
from megamcp.state.clones import compare
from megamcp.state.schema import Change
from tests.integration.clones.conftest import World

# Longest side of an entry, and the longest one without its last row.
SIDES = """select coalesce(max(b.bytes), 0) as most, coalesce(max(b.bytes - b.last), 0) as beyond, count(*) as entries
  from megamcp.log l, lateral (values (l.removed), (l.added)) s (images),
       lateral (select sum(octet_length(i.image)) as bytes,
                       max(octet_length(i.image)) filter (where i.n = cardinality(s.images)) as last
                  from unnest(s.images) with ordinality i (image, n)) b"""


async def test_an_entry_of_the_log_is_bounded_by_bytes(world: World) -> None:
    db = await world.start("create table t (id int primary key, x text)")
    mark = await db.mark()
    await db.user.execute(
        "insert into t select n, repeat('x', case when n % 10 = 0 then 5000000 else 1000 end)"
        " from generate_series(1, 30) n; update t set id = -id; delete from t where id > -5"
    )
    later = await db.mark()
    async with db.hold() as inside:
        bound = await inside.connection.fetchval("select megamcp.entry_bytes()")
        sides = await inside.connection.fetchrow(SIDES)
        assert sides["beyond"] <= bound < 5_000_000 < sides["most"]
        assert sides["entries"] > 12
    await db.user.execute("update t set x = x || 'y'")
    await db.rewind(later.position)
    assert await db.user.fetchval("select sum(length(x)) from t") == 3 * 5_000_000 + 23 * 1000
    async with db.hold() as inside:
        assert await inside.digest() == later.digest
    await db.rewind(mark.position)
    assert await db.user.fetchval("select count(*) from t") == 0


@pytest.mark.parametrize("key", ["primary key", ""])
async def test_a_rewind_handles_long_rows_in_portions(world: World, key: str) -> None:
    db = await world.start(
        f"create table t (id int {key}, x text)",
        "insert into t select n, repeat(n::text, 150000) from generate_series(10, 50) n",
    )
    mark = await db.mark()
    await db.user.execute("update t set id = -id")
    async with db.hold() as inside:
        bound = await inside.connection.fetchval("select megamcp.entry_bytes()")
        portions = await inside.connection.fetch(PORTIONS, mark.position)
        assert sum(row["n"] for row in portions) == 2 * 41
        assert all(row["bytes"] is None or row["bytes"] < bound + 300_100 for row in portions)
        assert len(portions) > (5 if key else 3)
        await inside.rewind(mark.position)
        assert await inside.digest() == mark.digest
    assert tuple(await db.user.fetchrow("select min(id), max(id), sum(length(x)) from t")) == (10, 50, 41 * 300_000)


def told(text: str) -> dict[str, object]:
    return {"long": True, "bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}


async def test_long_values_are_exact_and_never_whole_in_the_gateway(world: World) -> None:
    long = "abcdefgh" * 600_000
    db = await world.start("create table t (id int primary key, x text)", "insert into t values (1, 'x')")
    await db.user.execute("insert into t values (2, repeat('abcdefgh', 600000))")
    point = await db.mark()
    await db.user.execute("update t set x = x || 'y' where id = 2")
    later = await db.mark()
    other = await world.clone(db.name)
    await other.user.execute("update t set x = 'z' where id = 1; update t set x = x || 'z' where id = 2")
    tracemalloc.start()
    try:
        async with db.hold() as inside:
            assert await inside.digest() == later.digest
            differ = (await inside.changes(point.position, later.position, 100) or {})["t"]
            await inside.rewind(point.position)
            assert await inside.digest() == point.digest
        async with db.hold() as inside, other.hold() as its:
            found = (await compare(inside, its, 100))["t"].changed
            at = await its.mark()
            await inside.redo(its, point.position, at.position)
            assert await inside.digest() == at.digest
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert differ.changed == (Change({"id": 2, "x": told(long)}, {"id": 2, "x": told(long + "y")}),)
    assert found == (
        Change({"id": 1, "x": "x"}, {"id": 1, "x": "z"}),
        Change({"id": 2, "x": told(long)}, {"id": 2, "x": told(long + "yz")}),
    )
    assert peak < len(long)


PORTIONS = """select coalesce(cardinality(p.places), cardinality(p.hashes)) as n, (select sum(octet_length(i.image))
    from unnest(megamcp.images(p.places)) i (image)) as bytes
  from megamcp.plan(megamcp.way_back($1), true, megamcp.keyless()) p"""
SESSIONS = """select count(*) from pg_stat_get_activity(null) a join pg_authid u on u.oid = a.usesysid
 where u.rolname = $1"""
STUBBORN = """create function patient(x int) returns boolean language plpgsql as $$
begin
    if current_setting('session_replication_role') = 'replica' then
        begin
            perform pg_sleep(60);
        exception when query_canceled then
            perform pg_sleep(60);
        end;
    end if;
    return true;
end $$;
create table t (id int primary key, x int check (patient(x)))"""


async def test_a_rewind_that_takes_too_long_ends_with_nothing_changed(world: World) -> None:
    db = await world.start(STUBBORN, "insert into t select n, n from generate_series(1, 20) n")
    mark = await db.mark()
    await db.user.execute("delete from t where id > 10")
    later = await db.mark()
    async with asyncio.timeout(20), db.hold() as inside:
        with pytest.raises(DeadlineExceeded) as refused:
            await inside.rewind(mark.position, within_s=0.3)
        assert refused.value.code == "rewind_too_slow"
        assert not await inside.go_back(mark.position, within_s=0.3)
        assert await inside.digest() == later.digest
        assert (await inside.mark()).position == later.position
        assert await inside.connection.fetchval(SESSIONS, f"{db.name}_hand") == 0
    again = await db.connect()
    assert await again.fetchval("select count(*) from t") == 10
    await again.close()
