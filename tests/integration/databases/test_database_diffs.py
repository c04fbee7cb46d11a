"""Any two points of one environment can be compared: where no log connects them, by what is in them."""

from typing import Any

import pytest

from megamcp.state.schema import Change
from tests.integration.databases.shop import Shop

pytestmark = pytest.mark.asyncio(loop_scope="session")


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


async def pair(shop: Shop, ddl: str, seed: str) -> tuple[str, str]:
    rollout = await shop.one()
    for sql in (ddl, seed):
        await shop.run(rollout, sql)
    point = await shop.checkpoint(rollout)
    return rollout, (await shop.fork(point["id"]))[0]


async def test_two_lines_that_diverged_are_compared_by_key(shop: Shop) -> None:
    one, two = await pair(
        shop,
        "create table t (id int primary key, v text)",
        "insert into t select n, 'x' from generate_series(1, 2000) n",
    )
    await shop.run(one, "update t set v = 'one' where id = 3")
    await shop.run(one, "delete from t where id in (20, 100)")
    await shop.run(two, "update t set v = 'two' where id in (3, 7)")
    await shop.run(two, "insert into t values (5000, 'new'), (4000, 'new')")
    there = await shop.checkpoint(two)
    diff = await shop.diff(one, "head", there["id"])
    assert list(diff) == ["t"]
    assert diff["t"].changed == (
        Change({"id": 3, "v": "one"}, {"id": 3, "v": "two"}),
        Change({"id": 7, "v": "x"}, {"id": 7, "v": "two"}),
    )
    assert ids(diff["t"].added) == [20, 100, 4000, 5000]
    assert (diff["t"].removed, diff["t"].total, diff["t"].truncated) == ((), 6, False)
    back = await shop.diff(one, there["id"], "head")
    assert back["t"] == diff["t"].reversed()


async def test_equal_states_on_two_lines_have_no_diff(shop: Shop) -> None:
    one, two = await pair(shop, "create table t (id int primary key, v text)", "insert into t values (1, 'x')")
    for rollout in (one, two):
        await shop.run(rollout, "update t set v = 'y'")
    assert await shop.diff(one, "head", (await shop.checkpoint(two))["id"]) == {}


async def test_a_diff_over_ddl_shows_tables_that_came_and_went_and_rows_that_got_a_column(shop: Shop) -> None:
    rollout, _ = await pair(
        shop,
        "create table t (id int primary key, v int)",
        "insert into t values (1, 1), (2, 2)",
    )
    await shop.run(rollout, "create table old (id int)")
    await shop.run(rollout, "insert into old values (8), (8)")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "drop table old")
    await shop.run(rollout, "create table fresh (id int primary key)")
    await shop.run(rollout, "insert into fresh values (4), (3)")
    await shop.run(rollout, "alter table t add w text")
    diff = await shop.diff(rollout, point["id"], "head")
    assert {name: (ids(d.added), ids(d.removed), d.total) for name, d in diff.items()} == {
        "fresh": ([3, 4], [], 2),
        "old": ([], [8, 8], 2),
        "t": ([], [], 2),
    }
    assert diff["t"].changed[0] == Change({"id": 1, "v": 1}, {"id": 1, "v": 1, "w": None})


async def test_a_diff_over_truncate_is_of_the_rows(shop: Shop) -> None:
    rollout, _ = await pair(shop, "create table t (id int primary key)", "insert into t values (1), (2)")
    point = await shop.checkpoint(rollout)
    await shop.run(rollout, "truncate t")
    await shop.run(rollout, "insert into t values (2), (3)")
    diff = await shop.diff(rollout, point["id"], "head")
    assert (ids(diff["t"].added), ids(diff["t"].removed)) == ([3], [1])


async def test_rows_without_a_key_are_counted_with_their_copies(shop: Shop) -> None:
    one, two = await pair(shop, "create table t (id int)", "insert into t values (1), (1), (1), (2)")
    await shop.run(one, "delete from t where ctid in (select ctid from t where id = 1 limit 1)")
    await shop.run(two, "insert into t values (2), (2), (null)")
    diff = await shop.diff(one, "head", (await shop.checkpoint(two))["id"])
    assert (sorted(map(str, ids(diff["t"].added))), diff["t"].removed) == (["1", "2", "2", "None"], ())
    assert diff["t"].total == 4


async def test_a_diff_of_two_lines_is_cut_at_the_limit_and_its_total_is_exact(shop: Shop) -> None:
    one, two = await pair(shop, "create table t (id int primary key)", "insert into t values (1)")
    await shop.run(two, "insert into t select n from generate_series(2, 3001) n")
    await shop.run(one, "insert into t values (-1)")
    diff = await shop.diff(one, "head", (await shop.checkpoint(two))["id"])
    assert (diff["t"].total, diff["t"].truncated) == (3001, True)
    assert len(diff["t"].added) + len(diff["t"].removed) == shop.services.settings.diff_rows
