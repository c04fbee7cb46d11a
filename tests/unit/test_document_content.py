"""How documents are packed, what a change of one is, and what two differ in."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamcp.documents.canonical import canonical, digest
from megamcp.documents.content import NotJson, Splice, check, pack, packed_whole, pointer, spliced, splices, unpack
from megamcp.documents.difference import difference

KEYS = st.text(max_size=3)
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
SMALL = st.recursive(LEAVES | st.text(max_size=8), lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner))
MANY = st.integers(0, 700).map(lambda count: {f"k{number}": [number] for number in range(count)})
LONG = st.integers(0, 700).map(lambda count: list(range(count)))
DOCUMENTS = SMALL | st.dictionaries(KEYS, SMALL | MANY | LONG) | MANY | LONG


@given(DOCUMENTS)
@settings(deadline=None)
def test_a_document_comes_back_as_it_was_packed(document: Any) -> None:
    content = packed_whole(document, tuples=False)
    assert content == msgspec.msgpack.encode(document), "it is plain MessagePack"
    assert repr(unpack(content)) == repr(document), "types and order of keys included"


@given(DOCUMENTS, DOCUMENTS)
@settings(deadline=None)
def test_a_splice_makes_the_new_document_of_the_old_one(old: Any, new: Any) -> None:
    before, after = packed_whole(old), packed_whole(new)
    for bounds in (pack(old, tuples=False).bounds(), [0]):
        change = splices(before, bounds, pack(new, tuples=False), tuples=False)
        assert bool(change) == (before != after)
        assert spliced(before, change) == after


@given(st.integers(0, 699), st.sampled_from(["set", "drop", "add"]))
@settings(deadline=None)
def test_a_small_change_of_a_large_document_is_a_small_splice(number: int, how: str) -> None:
    document: dict[str, Any] = {"things": {f"k{n}": {"id": n, "text": "x" * 50} for n in range(700)}, "count": 1}
    before, bounds = packed_whole(document), pack(document, tuples=False).bounds()
    things = document["things"]
    if how == "set":
        things[f"k{number}"]["text"] = "changed"
    elif how == "drop":
        del things[f"k{number}"]
    else:
        things["new"] = {"id": number}
    document["count"] += 1
    change = splices(before, bounds, pack(document, tuples=False), tuples=False)
    assert spliced(before, change) == packed_whole(document)
    # An item less moves all that come after it, until the count at the end differs too.
    assert sum(len(one.added) for one in change) < (100 if how == "set" else len(before))
    assert len(change) <= 9


def test_splices_are_applied_in_their_order() -> None:
    assert spliced(b"abcdef", [Splice(0, 1, b"XYZ"), Splice(2, 2, b"")]) == b"XYcdef"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": {1: 2}}, "/a has a key 1 that is an int"),
        ({"a": {None: 2}}, "/a has a key None"),
        ({"a": [1, float("nan")]}, "/a/1 is nan"),
        ({"a": float("-inf")}, "/a is -inf"),
        ({"a": (1,)}, "/a is a tuple"),
        ({"a/b": {"~": {1}}}, "/a~1b/~0 is a set"),
        ({"a": "\ud800"}, "/a holds text with a lone surrogate"),
        ({"\ud800": 1}, "The document holds text with a lone surrogate"),
        ({"a": 2**64}, "/a is an integer of more than 64 bits"),
        ({"a": [0] * 300 + [b"x"]}, "/a/300 is a bytes"),
        ({"a": {"b": [object()]}}, "/a/b/0 is an object"),
        (1j, "The document is a complex"),
    ],
)
def test_what_is_no_json_is_named_by_its_place(value: Any, said: str) -> None:
    with pytest.raises(NotJson) as refused:
        packed_whole(value, tuples=False)
    assert said in refused.value.message
    old = packed_whole({"a": 1, "rest": list(range(300))})
    with pytest.raises(NotJson) as refused:
        splices(old, [0], pack(value, tuples=False), tuples=False)
    assert said in refused.value.message


def test_a_document_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotJson, match="holds itself"):
        packed_whole({"a": loop})


def test_tuples_stand_for_arrays_where_that_is_said() -> None:
    assert unpack(packed_whole({"a": (1, (2,))}, tuples=True)) == {"a": [1, [2]]}
    check({"a": (1,)}, (), tuples=True)


def test_the_canonical_form_does_not_hang_on_the_order_of_keys() -> None:
    one, two = (
        packed_whole({"b": 1, "a": {"d": [1.5, "ü"], "c": None}}),
        packed_whole({"a": {"c": None, "d": [1.5, "ü"]}, "b": 1}),
    )
    assert canonical(one) == canonical(two) == '{"a":{"c":null,"d":[1.5,"ü"]},"b":1}'.encode()
    assert digest(one) == digest(two)
    assert digest(packed_whole({"a": 1})) != digest(packed_whole({"a": 1.0})), "a server can tell them apart"


def test_a_difference_lists_added_removed_and_changed_places() -> None:
    before = {"same": 1, "gone": [1], "list": ["a", "b", "c", "d"], "deep": {"x": {"y": 1}}, "type": 1}
    after = {"same": 1, "list": ["a", "X", "d"], "deep": {"x": {"y": 2}}, "type": True, "new": {"z": None}}
    found = difference(before, after, 100)
    assert found.added == [("/new", {"z": None})]
    assert found.removed == [("/gone", [1]), ("/list/2", "c")]
    assert [(one.path, one.before, one.after) for one in found.changed] == [
        ("/list/1", "b", "X"),
        ("/deep/x/y", 1, 2),
        ("/type", 1, True),
    ]
    assert found.total == 6
    assert not found.truncated


def test_a_difference_counts_what_it_does_not_list() -> None:
    found = difference({}, {f"k{number}": number for number in range(10)}, 3)
    assert (len(found.added), found.total, found.truncated) == (3, 10, True)


@given(DOCUMENTS, DOCUMENTS)
@settings(deadline=None)
def test_only_equal_documents_have_no_difference(a: Any, b: Any) -> None:
    assert difference(a, a, 1).total == 0
    assert (difference(a, b, 1).total == 0) == (digest(packed_whole(a)) == digest(packed_whole(b)))


def test_a_root_that_has_another_type_is_one_change() -> None:
    found = difference([1], {"a": 1}, 10)
    assert [(one.path, one.before, one.after) for one in found.changed] == [("", [1], {"a": 1})]


def test_pointers_escape_as_rfc_6901_says() -> None:
    assert pointer(["a/b", "m~n", 0, ""]) == "/a~1b/m~0n/0/"
    assert pointer([]) == ""
