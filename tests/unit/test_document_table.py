"""A table packs as a dict of the same does, and only what was touched is packed anew."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamcp.documents.content import NotJson, pack, packed_whole, spliced, splices
from megamcp.documents.table import Table
from megamcp.sdk.classes import Kept

KEYS = st.integers(0, 200).map(str)
STEPS = st.tuples(st.sampled_from(["set", "drop", "change", "look", "clear"]), KEYS)


def step(things: Any, how: str, key: str, number: int) -> None:
    match how:
        case "set":
            things[key] = {"number": number}
        case "drop":
            things.pop(key, None)
        case "change" if key in things:
            things[key]["more"] = [number]
        case "look":
            things.get(key)
        case "clear" if number % 7 == 0:
            things.clear()


@given(st.integers(0, 200), st.lists(st.lists(STEPS, max_size=5), max_size=8))
@settings(deadline=None)
def test_a_table_changes_as_a_dict_of_the_same(count: int, calls: list[list[tuple[str, str]]]) -> None:
    plain = {str(number): {"number": number} for number in range(count)}
    table = Table({key: dict(value) for key, value in plain.items()})
    first = pack({"things": table}, tuples=False)
    content, bounds = first.content(), first.bounds()
    for number, steps in enumerate(calls):
        for how, key in steps:
            step(plain, how, key, number)
            step(table, how, key, number)
        new = pack({"things": table}, tuples=False)
        content = spliced(content, splices(content, bounds, new, tuples=False))
        bounds = new.bounds()
        assert content == new.content() == packed_whole({"things": plain})
    assert table == plain
    assert list(table) == list(plain)


def test_a_call_packs_what_it_touched() -> None:
    table = Table({f"k{number}": {"number": number} for number in range(1000)})
    pack({"things": table}, tuples=False)
    table["k500"]["number"] = -1
    assert "k7" in table
    assert [key for group in table.groups if group.piece is None for key in group.items].count("k500") == 1
    assert sum(group.piece is None for group in table.groups) == 1


def test_what_is_done_to_a_copy_leaves_the_table_as_it_was() -> None:
    table = Table({"a": {"number": 1}, "b": {"number": 2}})
    for copied in (copy.copy(table), copy.deepcopy(table)):
        copied["c"] = {"number": 3}
        del copied["a"]
        assert list(copied) == ["b", "c"]
    assert dict(table) == {"a": {"number": 1}, "b": {"number": 2}}


@pytest.mark.parametrize("bad", [{"here": {1}}, float("nan"), {1: 2}])
def test_what_is_no_json_in_a_table_is_refused_by_its_place(bad: Any) -> None:
    table: Table[Any] = Table({f"k{number}": number for number in range(300)})
    old = pack({"things": table}, tuples=False)
    table["k200"] = bad
    with pytest.raises(NotJson, match="/things/k200"):
        splices(old.content(), old.bounds(), pack({"things": table}, tuples=False), tuples=False)


def test_a_table_is_joined_as_a_dict_is() -> None:
    plain, more = {"a": 1, "b": 2}, {"b": 3, "c": 4}
    table = Table(plain)
    kept = table
    table |= more
    table |= [("d", 5)]
    assert table is kept
    assert list(table.items()) == list((plain | more | {"d": 5}).items())
    for joined in (Table(plain) | more, plain | Table(more), Table(plain) | Table(more)):
        assert type(joined) is Table
        assert list(joined.items()) == list((plain | more).items())
    with pytest.raises(TypeError):
        Table(plain) | [("d", 5)]
    assert list(reversed(table)) == ["d", "c", "b", "a"]
    assert table.popitem() == ("d", 5)
    assert table.copy() == {"a": 1, "b": 3, "c": 4}
    table.clear()
    assert not table
    assert table.groups == []


@pytest.mark.parametrize("equal", [(1, 2), {1, 2}, frozenset({1, 2})])
def test_an_item_that_is_replaced_by_what_only_packs_to_the_same_is_refused(equal: Any) -> None:
    table: Table[Any] = Table({f"k{number}": [1, 2] for number in range(300)})
    pack({"things": table}, tuples=False)
    for put in (equal, {"deep": [equal]}):
        table["k200"] = put
        with pytest.raises(NotJson, match="/things/k200"):
            pack({"things": table}, tuples=False)


@pytest.mark.parametrize(
    "where", [{"a": Table({"b": 1})}, [Table()], {"a": {"b": {"c": [Table()]}}}, Table({"a": Table()})]
)
def test_a_table_inside_of_an_attribute_is_refused_by_its_place(where: Any) -> None:
    with pytest.raises(NotJson, match=r"/things/.* is a Table inside of something else"):
        pack({"things": where}, tuples=False)


class Orders:
    """Says that it has a table."""

    orders: "Table[dict[str, Any]]"

    def __init__(self) -> None:
        self.orders = Table({"one": {"paid": True}})
        self.count = 1


class Forgetful:
    """Doesn't say so."""

    def __init__(self) -> None:
        self.orders = Table({"one": 1})


async def test_an_attribute_that_is_a_table_is_one_again_after_a_load() -> None:
    kept = Kept.of(Orders)
    loaded = await kept.loaded({"orders": {"two": {"paid": False}}, "count": 2})
    assert type(loaded.orders) is Table
    assert dict(loaded.orders) == {"two": {"paid": False}}
    assert packed_whole(await kept.dumped(loaded), tuples=False)


async def test_a_table_that_the_class_does_not_tell_of_is_refused() -> None:
    kept = Kept.of(Forgetful)
    with pytest.raises(NotJson, match="/orders is a Table, but class Forgetful says otherwise"):
        await kept.dumped(await kept.fresh())
    kept = Kept.of(Orders)
    replaced = await kept.fresh()
    replaced.orders = {}
    with pytest.raises(NotJson, match="/orders is a dict, but class Orders says otherwise"):
        await kept.dumped(replaced)
    with pytest.raises(TypeError, match="orders is a Table, so the document must have an object there"):
        await kept.loaded({"orders": []})
