"""Checkpoint, fork, rollback, diff and digest of servers that keep a document."""

import asyncio
from typing import Any

import pytest

from megamcp.client import Gone, Rollout
from tests.integration.documents.conftest import Library


async def held(rollout: Rollout) -> Any:
    return (await rollout.call("all")).value


async def things(rollout: Rollout) -> Any:
    return (await held(rollout))["things"]


async def test_a_document_is_its_rollouts_own(library: Library) -> None:
    a, b = await library.client.open_many("shelf", 2)
    await asyncio.gather(a.call("put", key="x", value="a"), b.call("put", key="x", value="b"))
    assert await things(a) == {"first": "seeded", "x": "a"}
    assert await things(b) == {"first": "seeded", "x": "b"}


async def test_a_fork_starts_as_the_checkpoint_and_goes_its_own_way(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("put", key="kept", value="1")
    point = await rollout.checkpoint()
    await rollout.call("put", key="parent", value="2")
    left, right = await point.fork(count=2)
    await left.call("put", key="left", value="3")
    assert set(await things(left)) == {"first", "kept", "left"}
    assert set(await things(right)) == {"first", "kept"}
    assert set(await things(rollout)) == {"first", "kept", "parent"}
    await rollout.close()
    grandchild = (await (await left.checkpoint()).fork())[0]
    await grandchild.call("take", key="kept")
    assert set(await things(grandchild)) == {"first", "left"}
    assert set(await things(left)) == {"first", "kept", "left"}


async def test_a_rollback_restores_the_document_and_its_digest(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("put", key="kept", value="1")
    point = await rollout.checkpoint()
    before = await held(rollout)
    for attempt in ("one", "two"):
        await rollout.call("put", key="kept", value=attempt)
        await rollout.call("fill", count=500, size=100)
        assert (await rollout.digest()).digest != point.digest
        await rollout.rollback(point)
        assert await held(rollout) == before
        assert (await rollout.digest()).digest == point.digest


async def test_a_change_that_is_undone_by_hand_gives_the_first_digest(library: Library) -> None:
    rollout = await library.client.open("tower")
    first = (await rollout.checkpoint()).digest
    await rollout.call("shelf__fill", count=3, size=1)
    other = (await rollout.checkpoint()).digest
    for number in range(3):
        await rollout.call("shelf__take", key=f"thing-{number:06}")
    assert other != first
    counted = (await rollout.digest()).digest
    assert counted not in (first, other), "the count is part of the document"
    again = await library.client.open("tower")
    await again.call("shelf__take", key="first")
    await again.rollback(await again.checkpoint())
    fresh = await library.client.open("tower")
    assert (await fresh.digest()).digest == first


async def test_the_order_of_keys_is_kept_and_is_no_part_of_the_digest(library: Library) -> None:
    a, b = await library.client.open_many("shelf", 2)
    for key in ("x", "y"):
        await a.call("put", key=key, value="v")
    for key in ("y", "x"):
        await b.call("put", key=key, value="v")
    assert list(await things(a)) == ["first", "x", "y"]
    assert list(await things(b)) == ["first", "y", "x"]
    assert (await a.digest()).digest == (await b.digest()).digest


async def test_a_tool_that_raises_changes_nothing(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("put", key="x", value="1")
    refused = await rollout.call("take", key="nothing")
    assert refused.is_error
    assert refused.code == "not_there"
    assert await held(rollout) == {"things": {"first": "seeded", "x": "1"}, "count": 1}
    assert (await rollout.call("put", key="y", value="2")).value == 2


async def test_a_retried_call_has_one_effect(library: Library) -> None:
    rollout = await library.client.open("shelf")
    answers = [await rollout.call("put", key="x", value="1", idempotency_key="once") for _ in range(3)]
    assert [answer.value for answer in answers] == [1, 1, 1]
    assert (await held(rollout))["count"] == 1


async def test_an_unbroken_run_of_calls_loads_nothing(library: Library) -> None:
    rollout = await library.client.open("tower")
    await rollout.call("tower__build", name="a")
    point = await rollout.checkpoint()
    for name in ("b", "c"):
        await rollout.call("tower__build", name=name)
    assert (await rollout.call("tower__loads")).value == 1, "also across a checkpoint"
    assert (await rollout.call("tower__refuse")).is_error
    assert (await rollout.call("tower__loads")).value == 1, "another object, loaded after the refusal"
    assert (await rollout.call("tower__floors")).value == ["a", "b", "c", "first", "ground"]
    await rollout.rollback(point)
    assert (await rollout.call("tower__floors")).value == ["a", "first", "ground"]


async def test_two_gateways_see_each_others_calls(library: Library) -> None:
    here = await library.client.open("shelf")
    there = await library.other_client.rollout(here.id)
    await here.call("fill", count=300, size=50)
    for number in range(120):  # more than are gathered before a document is written whole
        rollout = (here, there)[number % 2]
        assert (await rollout.call("put", key=f"k{number % 7}", value=str(number))).value == number + 1
    assert await held(here) == await held(there)
    assert len(await things(here)) == 1 + 300 + 7


async def test_two_gateways_write_at_once_and_lose_nothing(library: Library) -> None:
    here = await library.client.open("shelf")
    there = await library.other_client.rollout(here.id)
    calls = [
        rollout.call("put", key=f"{name}{number}", value="x")
        for number in range(10)
        for name, rollout in (("here", here), ("there", there))
    ]
    assert sorted(answer.value for answer in await asyncio.gather(*calls)) == list(range(1, 21))
    assert len(await things(here)) == 21


async def test_reads_run_side_by_side(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("put", key="x", value="1")
    answers = await asyncio.gather(*(rollout.call("get", key="x") for _ in range(12)))
    assert {answer.value for answer in answers} == {"1"}


async def test_a_checkpoint_sees_each_call_done_or_not_begun(library: Library) -> None:
    rollout = await library.client.open("shelf")

    async def write() -> None:
        for number in range(30):
            await rollout.call("put", key=f"k{number}", value="x")

    writing = asyncio.create_task(write())
    points = [await rollout.checkpoint() for _ in range(5)]
    await writing
    for fork in [(await point.fork())[0] for point in points]:
        found = await held(fork)
        assert len(found["things"]) == 1 + found["count"]


async def test_one_checkpoint_holds_all_documents_of_a_rollout(library: Library) -> None:
    rollout = await library.client.open("tower")
    assert (await rollout.call("tower__floors")).value == ["first", "ground"], "as the file says"
    await rollout.call("tower__build", name="attic")
    await rollout.call("shelf__put", key="x", value="1")
    point = await rollout.checkpoint()
    await rollout.call("shelf__put", key="x", value="2")
    later = await rollout.checkpoint()
    assert (await rollout.digest()).servers.keys() == {"tower", "shelf"}
    for made, value in ((point, "1"), (later, "2")):
        fork = (await made.fork())[0]
        assert (await fork.call("tower__floors")).value == ["attic", "first", "ground"]
        assert (await fork.call("shelf__get", key="x")).value == value


async def test_a_fork_copies_nothing_and_a_checkpoint_only_what_was_written(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("fill", count=200, size=100)
    point = await rollout.checkpoint()
    before = await library.rows()
    again = await rollout.checkpoint()
    forks = await again.fork(count=20)
    after = await library.rows()
    assert after == {**before, "document_points": before["document_points"] + 1}
    assert again.digest == point.digest
    await forks[0].call("put", key="x", value="1")
    await forks[1].call("put", key="x", value="1")
    first, second = [await fork.checkpoint() for fork in forks[:2]]
    assert first.digest == second.digest
    assert (await library.rows())["document_blobs"] == before["document_blobs"] + 1, "equal contents are kept once"


async def test_nothing_is_left_of_a_rollout_that_ended(library: Library) -> None:
    services = library.gateway.services
    before = await library.rows()
    rollout = await library.client.open("shelf")
    await rollout.call("fill", count=200, size=100)
    point = await rollout.checkpoint()
    for number in range(3):
        await rollout.call("put", key=f"k{number}", value="leak")
    await rollout.close()
    await services.rollouts.release_checkpoint(point.id)
    with pytest.raises(Gone):
        await point.fork()
    await services.store.value("update megamcp.document_blobs set created_at = created_at - interval '1 hour'")
    await services.reaper.once()
    after = await library.rows()
    assert {name: after[name] - before[name] for name in ("documents", "document_deltas", "document_points")} == {
        "documents": 0,
        "document_deltas": 0,
        "document_points": 0,
    }
    assert after["document_blobs"] <= before["document_blobs"]


async def test_a_diff_names_places_by_their_pointers(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("put", key="a/b~c", value="1")
    point = await rollout.checkpoint()
    await rollout.call("put", key="a/b~c", value="2")
    await rollout.call("take", key="first")
    await rollout.call("put", key="new", value="3")
    found = (await rollout.diff(point)).servers["shelf"].document
    assert found is not None
    assert [(place.path, place.value) for place in found.added] == [("/things/new", "3")]
    assert [(place.path, place.value) for place in found.removed] == [("/things/first", "seeded")]
    assert {(one.path, one.before, one.after) for one in found.changed} == {
        ("/things/a~1b~0c", "1", "2"),
        ("/count", 1, 4),
    }
    assert (await rollout.diff("base", point)).servers["shelf"].document is not None
    assert not (await rollout.diff(point, point)).servers
    fork = (await point.fork())[0]
    assert not (await fork.diff(point)).servers


async def test_a_diff_lists_no_more_than_the_limit(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("fill", count=1500, size=1)
    found = (await rollout.diff()).servers["shelf"].document
    assert found is not None
    assert found.truncated
    assert (len(found.added), found.total) == (1000, 1500)


async def test_a_clock_is_the_environments(library: Library) -> None:
    rollout = await library.client.open("shelf")
    assert (await rollout.call("now")).value == "2026-03-04T05:06:07+00:00"


async def test_async_methods_are_tools_too(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("later", key="x")
    assert (await rollout.call("get", key="x")).value == "later"
