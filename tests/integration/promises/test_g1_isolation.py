"""G1: a read returns only what is on its own chain, and no expression ever sees another rollout's row."""

import asyncio
import secrets

import pytest

from tests.integration.promises.world import ToolFailed, World


async def test_two_hundred_rollouts_that_write_at_once_read_only_their_own_tokens(world: World) -> None:
    rollouts = await world.open(200)
    tokens = {rollout: secrets.token_hex(8) for rollout in rollouts}
    gate = asyncio.Semaphore(50)

    async def live(rollout: str) -> None:
        async with gate:
            await world.call(rollout, "put", key="token", value=tokens[rollout])
            await world.call(rollout, "put", key=f"of-{tokens[rollout]}", value="mine")

    await asyncio.gather(*map(live, rollouts))

    async def look(rollout: str) -> None:
        async with gate:
            found = await world.call(rollout, "items")
        assert {k: v for k, v in found.items() if not k.startswith("base-")} == {
            "token": tokens[rollout],
            f"of-{tokens[rollout]}": "mine",
        }

    await asyncio.gather(*map(look, rollouts))


LEAKS = {
    "a cast that fails on foreign text": "select count(*) from item where value::int > 0",
    "a division by a foreign zero": "select count(*) from item where 1 / (length(value) - 6) > 0",
    "a division in the select list": "select sum(1 / (length(value) - 6)) from item",
    "a join on a cast": "select count(*) from item a join item b on a.value::int = b.value::int",
    "an aggregate over a cast": "select max(value::int) from item",
    "an order by a cast": "select key from item order by value::int limit 1",
}


@pytest.mark.parametrize("statement", LEAKS.values(), ids=LEAKS.keys())
@pytest.mark.parametrize("foreign_rows", [1, 3000], ids=["tiny delta", "huge delta"])
async def test_no_expression_meets_a_foreign_row(world: World, statement: str, foreign_rows: int) -> None:
    # Own rows are all harmless to the expression; each foreign row would make it fail, with its value in the error.
    mine, foreign = await world.open(2)
    await world.call(mine, "run_sql", sql="update item set value = '1234567'")
    await world.call(
        foreign,
        "run_sql",
        sql=f"insert into item select 'secret-' || n, 'secret' from generate_series(1, {foreign_rows}) as g(n)",
    )
    if foreign_rows > 1000:
        await world.execute("analyze")
    await world.call(mine, "run_sql", sql=statement)
    with pytest.raises(ToolFailed, match=r"secret|seeded|division"):
        await world.call(foreign, "run_sql", sql=statement)


async def test_foreign_keys_and_unique_checks_do_not_see_other_rollouts(world: World) -> None:
    a, b = await world.open(2)
    assert await world.call(a, "open_account", id=77, owner="same") == 77
    assert await world.call(b, "open_account", id=77, owner="same") == 77
    assert (await world.call(a, "book", account_id=77, amount=5))["id"] == 1
    assert (await world.call(b, "book", account_id=77, amount=6))["id"] == 1
    await world.call(a, "run_sql", sql="delete from entry where account_id = 77")
    await world.call(a, "close_account", id=77)
    assert await world.call(b, "sums") == {"balances": 6, "entries": 6}


async def test_a_closed_rollouts_rows_are_collected_and_nobody_elses(world: World) -> None:
    dead, alive = await world.open(2)
    for rollout in (dead, alive):
        await world.call(rollout, "put", key="k", value=rollout)
    await world.services.rollouts.close(dead)
    await world.services.reaper.once()
    assert (await world.call(alive, "items"))["k"] == alive
    assert not await world.execute("select 1 from megamcp.dead_layers")
