"""Plans: a delta that fills under a prepared statement, and keys that many rollouts write, stay cheap."""

import json

DDL = """
create table accounts (id int primary key, owner int not null, balance int not null);
create index on accounts (owner);
create table moves (id int primary key, account int not null references accounts on delete cascade, amount int);
"""
SEED = """
insert into accounts select i, i % 500, 0 from generate_series(1, 20000) i;
insert into moves select i, 1 + i % 20000, i from generate_series(1, 20000) i;
"""


def nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


async def explain(db, sql):
    text = await db.fetchval(f"explain (analyze, timing off, format json) {sql}")
    return json.loads(text)[0]["Plan"]


def rows_read(plan):
    """Rows that scans of delta partitions met, kept or not."""
    return sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in nodes(plan)
        if node.get("Relation Name", "").endswith("~delta")
    )


async def test_a_plan_of_an_empty_delta_stays_good_when_others_fill_it(world):
    state = await world.load(DDL, SEED)
    rollout, others = await world.open(state), await world.open(state)
    statement = "execute mine(77)"
    async with rollout.call(writable=False) as db:
        await db.execute("set plan_cache_mode = force_generic_plan")
        await db.execute(
            "prepare mine(int) as select * from accounts a join moves m on m.account = a.id where a.id = $1"
        )
        await explain(db, statement)
    await world.control.execute(
        f"insert into {state.hidden_schema}.moves (id, account, amount, _mm_layer) "
        f"select i, i, 0, {others.head} from generate_series(1, 20000) i; "
        f"insert into {state.hidden_schema}.accounts (id, owner, balance, _mm_layer) "
        f"select i, 7, 7, {others.head} from generate_series(1, 20000) i"
    )
    async with rollout.call(writable=False) as db:
        plan = await explain(db, statement)
        assert plan["Actual Rows"] == 1
        assert rows_read(plan) < 10
        for sql in (
            "select * from accounts where owner = 7",
            "select max(id) from accounts",
            "select * from accounts order by owner limit 10",
            "select count(*) from accounts",
        ):
            assert rows_read(await explain(db, sql)) < 10
    await rollout.tool.execute("deallocate all; reset plan_cache_mode")


async def test_a_key_that_thousands_of_rollouts_wrote_is_read_in_few_pages(world):
    state = await world.load(DDL, SEED)
    await world.control.execute(
        f"insert into {state.hidden_schema}.accounts (id, owner, balance, _mm_layer, _mm_over) "
        "select 5, 5, 5, nextval('megamcp.layer_seq'), 0 from generate_series(1, 20000)"
    )
    await world.control.execute(f"analyze {state.hidden_schema}.accounts")
    rollout = await world.open(state)
    await rollout.run("update accounts set balance = 9 where id = 5")
    async with rollout.call(writable=False) as db:
        plan = await explain(db, "select balance from accounts where id = 5")
    assert plan["Actual Rows"] == 1
    assert rows_read(plan) < 10
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 60
