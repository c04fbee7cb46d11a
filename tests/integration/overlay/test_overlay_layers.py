"""Layers: what a fork shares, what a rollback takes back, digests, diffs, counters, the end of a state."""

import asyncio

import pytest

from megamcp import state as states
from megamcp.state import schema
from tests.integration.overlay.conftest import CLOCK, options

DDL = """
create table notes (
  id bigserial primary key, body text not null unique, at timestamptz default now(), mark uuid default gen_random_uuid()
);
create table tags (note bigint references notes on delete cascade, tag text, primary key (note, tag));
"""
SEED = "insert into notes (body) values ('one'), ('two'); insert into tags values (1, 'x');"


async def test_forks_part_and_a_rollback_restores_counters(world):
    state = await world.load(DDL, SEED)
    root = await world.open(state)
    await root.run("insert into notes (body) values ('three')")
    saved = await root.checkpoint()
    left, right = await root.fork(saved), await root.fork(saved)
    assert await left.run("insert into notes (body) values ('left') returning id") == [(4,)]
    assert await right.run("insert into notes (body) values ('right') returning id") == [(4,)]
    await left.run("update notes set body = 'THREE' where body = 'three'")
    await left.run("delete from notes where id = 1")
    assert await left.read("select id, body from notes order by id") == [(2, "two"), (3, "THREE"), (4, "left")]
    assert await right.read("select id, body from notes order by id") == [
        (1, "one"),
        (2, "two"),
        (3, "three"),
        (4, "right"),
    ]
    assert await root.read("select count(*) from tags") == [(1,)]
    assert await left.read("select count(*) from tags") == [(0,)]
    back = await left.fork(saved)
    assert await back.run("insert into notes (body) values ('again') returning id") == [(4,)]
    here = await schema.counters(world.control, state, [*saved, back.head])
    assert here["sequence:notes_id_seq"] == 4
    assert (await schema.counters(world.control, state, saved))["sequence:notes_id_seq"] == 3


async def test_chance_and_clock_fork_with_the_chain(world):
    state = await world.load(DDL, SEED)
    root = await world.open(state)
    saved = await root.checkpoint()
    left, right = await root.fork(saved), await root.fork(saved)
    draw = "select random(), gen_random_uuid(), random(1, 1000), uuidv7()"
    assert await left.run(draw) == await right.run(draw)
    assert await left.run(draw) != await root.run(draw)
    assert await left.run("select megamcp_advance_clock(90000000)::text") == [("2026-01-15 09:01:30+00",)]
    assert await left.read("select now()::text, clock_timestamp() = now()") == [("2026-01-15 09:01:30+00", True)]
    assert await right.read("select now()::text") == [("2026-01-15 09:00:00+00",)]
    other = await root.fork(saved)
    other.seed = 8
    fresh = await root.fork(saved)
    assert await other.run("select random()") != await fresh.run("select random()")


async def test_undoing_by_hand_gives_back_the_digest(world):
    state = await world.load(DDL, SEED)
    root = await world.open(state)
    assert await schema.digest(world.control, state, [root.head]) == 0
    await root.run("update notes set body = 'ONE' where id = 1")
    changed = await schema.digest(world.control, state, [root.head])
    assert changed != 0
    await root.run("update notes set body = body")
    assert await schema.digest(world.control, state, [root.head]) == changed
    await root.checkpoint()
    await root.run("update notes set body = 'one' where id = 1")
    await root.run("insert into tags values (2, 'y')")
    await root.run("delete from tags where note = 2")
    chain = [*root.chain, root.head]
    assert await schema.digest(world.control, state, chain) == 0
    parts = [await states.freeze(world.control, state, chain[:n], layer) for n, layer in enumerate(chain)]
    assert sum(part.digest for part in parts) % states.MODULUS == 0
    assert [part.rows for part in parts] == [2, 2]


async def test_digests_do_not_depend_on_session_settings(world):
    state = await world.load(DDL, SEED)
    root = await world.open(state)
    await root.run("insert into notes (body) values ('x')")
    first = await states.freeze(world.control, state, [], root.head)
    await world.control.execute("set timezone = 'Asia/Tokyo'; set datestyle = 'German'; set extra_float_digits = 0")
    assert await states.freeze(world.control, state, [], root.head) == first
    await world.control.execute("reset all")


async def test_diff_tells_rows_added_removed_and_changed(world):
    state = await world.load(DDL, SEED)
    root = await world.open(state)
    await root.run("insert into notes (body) values ('new')")
    await root.run("update notes set body = 'ONE' where id = 1")
    await root.run("delete from notes where id = 2")
    await root.run("insert into tags values (3, 'z')")
    await root.run("delete from tags where note = 3")
    found = await schema.diff(world.control, state, [], [root.head], 10)
    assert set(found) == {"notes"}
    notes = found["notes"]
    assert [row["body"] for row in notes.added] == ["new"]
    assert [row["id"] for row in notes.removed] == [2]
    assert [(c.before["body"], c.after["body"]) for c in notes.changed] == [("one", "ONE")]
    assert (notes.total, notes.truncated) == (3, False)
    short = await schema.diff(world.control, state, [root.head], [], 1)
    assert (short["notes"].total, short["notes"].truncated) == (3, True)


async def test_freezing_an_unwritten_head_gives_nothing(world):
    tables = "".join(f"create table t{n} (id int primary key, v text);" for n in range(8))
    state = await world.load(tables)
    assert await states.freeze(world.control, state, [5, 6], 7) == states.Frozen(0, 0)


async def test_discarded_layers_leave_nothing(world):
    state = await world.load(DDL, SEED)
    root = await world.open(state)
    await root.run("insert into notes (body) values ('gone')")
    held = (await states.freeze(world.control, state, [], root.head)).rows
    assert held == 3  # the row, its sequence, its random position
    assert await states.discard(world.control, state, [root.head]) == held
    assert (await states.freeze(world.control, state, [], root.head)).rows == 0


async def test_loading_twice_at_once_makes_one_state(world, database):
    import asyncpg

    other = await asyncpg.connect(**options(database))
    ddl = "create table once (id int primary key)"
    arguments = {"ddl": ddl, "seeds": [], "clock": CLOCK, "seed": 3, "tool_password": "a", "query_password": "b"}
    first, second = await asyncio.gather(states.load(world.control, **arguments), states.load(other, **arguments))
    assert first == second
    assert states.SchemaState.from_json(first.to_json()) == first
    await other.close()
    await states.unload(world.control, first)
    assert not await world.control.fetchval(
        "select count(*) from pg_namespace where nspname like '%' || $1", first.hash
    )
    assert not await world.control.fetchval("select count(*) from pg_roles where rolname like '%' || $1", first.hash)


async def test_draws_of_many_rows_keep_one_counter_row(world):
    state = await world.load(DDL, SEED)
    root = await world.open(state)
    await root.run("insert into notes (body) select 'n' || i from generate_series(1, 500) i")
    assert await root.run("insert into notes (body) values ('last') returning id") == [(503,)]
    rows = await world.control.fetch(
        f'select name, value from {state.hidden_schema}."~counters" where layer = $1 order by name', root.head
    )
    assert [tuple(row) for row in rows] == [("random", 503), ("sequence:notes_id_seq", 503)]


async def test_read_only_draws_repeat_and_leave_nothing(world):
    state = await world.load(DDL, SEED)
    root = await world.open(state)
    first = await root.read("select random(), random()")
    assert first[0][0] != first[0][1]
    assert await root.read("select random(), random()") == first


async def test_a_frozen_layer_can_not_be_bound_for_writing(world):
    import asyncpg

    with pytest.raises(asyncpg.InvalidParameterValueError, match="not the head"):
        await world.control.execute("select megamcp.bind('{3,9}', 3, 1, now(), true)")


async def test_loading_leaves_an_outer_transaction_as_it_was(world):
    import asyncpg

    async with world.control.transaction():
        await world.control.execute("set local search_path = megamcp, public")
        state = await world.load(
            "create table outer_one (id int primary key, r float default random())", "insert into outer_one values (1)"
        )
        assert await world.control.fetchval("show search_path") == "megamcp, public"
        assert await world.control.fetchval("select current_user") == await world.control.fetchval(
            "select session_user"
        )
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with world.control.transaction():
                await world.control.execute("select megamcp.head()")
    assert (await schema.counters(world.control, state, []))["random"] == 1
