"""Plain classes as tool servers: their tools, what keeps their state, and what can be none."""

from typing import Any

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from megamcp.documents.content import packed_whole, unpack
from megamcp.sdk import Clock, Context, Random, Server, ToolSignatureError, read_only
from megamcp.sdk.classes import Kept
from megamcp.sdk.instances import Instance, Pool, first_content
from megamcp.sdk.lines import Lines
from tests.environments.shelf_server import Shelf, Tower

LIMIT = 1 << 20


class Base:
    """A base."""

    kind = "class attribute"

    def __init__(self) -> None:
        self.value = 1

    def first(self) -> int:
        """First."""
        return self.value

    def hidden(self) -> int:
        return 0

    def _private(self) -> int:
        return 0


class Derived(Base):
    hidden = None  # type: ignore[assignment]

    def second(self, clock: Clock, count: int = 2) -> int:
        """Second.

        Args:
            count: How many.
        """
        return count

    @property
    def size(self) -> int:
        return 1

    @staticmethod
    def helper() -> int:
        return 1

    @read_only
    async def third(self, context: Context, names: list[str]) -> dict[str, int]:
        """Third."""
        return dict.fromkeys(names, self.value)


def test_public_methods_are_tools_in_the_order_of_their_text() -> None:
    server = Server.of(Derived)
    assert server.name == "Derived"
    assert list(server.tools) == ["first", "second", "third"]
    second = server.tools["second"].advertised()
    assert second["description"] == "Second."
    assert second["inputSchema"]["properties"] == {
        "count": {"default": 2, "description": "How many.", "type": "integer"}
    }
    assert "required" not in second["inputSchema"]
    assert server.tools["third"].advertised()["annotations"] == {"readOnlyHint": True}
    assert not server.tools["first"].read_only


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class A:\n  def f(self, x) -> int: ...", "parameter 'x' needs a type annotation"),
        ("class A:\n  def f(self): ...", "needs a return annotation"),
        ("class A:\n  x = 1", "no public method"),
        ("class A:\n  def load(self, d: dict) -> None: ...\n  def f(self) -> int: ...", "has load but no dump"),
        ("class A:\n  def __init__(self, x): ...\n  def f(self) -> int: ...", "made without arguments, but needs x"),
        ("class A:\n  __slots__ = ('x',)\n  def f(self) -> int: ...", "write load and dump"),
        (
            "class A:\n  async def load(self, d): ...\n  async def dump(self): ...\n  def f(self) -> int: ...",
            "must be plain functions",
        ),
    ],
)
def test_a_class_that_can_be_no_server_says_why(source: str, said: str) -> None:
    names: dict[str, Any] = {}
    exec(source, names)
    with pytest.raises(ToolSignatureError, match=said):
        Server.of(names["A"])


def test_a_plain_class_gets_no_database_and_no_chance() -> None:
    class WithDatabase:
        async def f(self, db: AsyncConnection) -> int:
            return 1

    class WithChance:
        async def f(self, random: Random) -> int:
            return 1

    for cls, said in ((WithDatabase, "has no db"), (WithChance, "has no random")):
        with pytest.raises(ToolSignatureError, match=said):
            Server.of(cls)


async def test_attributes_come_back_without_the_constructor() -> None:
    kept = Kept.of(Shelf)
    instance = await Instance.of(kept, await first_content(kept, LIMIT))
    instance.object.put("x", "1")
    change = await instance.change(LIMIT)
    assert change is not None
    again = (await Instance.of(kept, change.packed.content())).object
    assert vars(again) == {"things": {"first": "seeded", "x": "1"}, "count": 1}


async def test_load_and_dump_may_keep_other_types() -> None:
    kept = Kept.of(Tower)
    instance = await Instance.of(kept, await first_content(kept, LIMIT))
    assert await instance.change(LIMIT) is None
    instance.object.build("attic")
    change = await instance.change(LIMIT)
    assert change is not None
    assert (await Instance.of(kept, change.packed.content())).object.floors() == ["attic", "ground"]


async def test_another_form_of_the_same_document_is_no_change() -> None:
    kept = Kept.of(Tower)
    content = packed_whole({"floors": [["ground", 0], ["first", 1]]})
    instance = await Instance.of(kept, content)
    assert await instance.change(LIMIT) is None
    instance.object.build("attic")
    change = await instance.change(LIMIT)
    assert change is not None
    assert unpack(change.packed.content()) == {"floors": [["attic", 2], ["first", 1], ["ground", 0]]}


def instance(version: int, size: int = 1) -> Instance:
    return Instance(Kept.of(Shelf), None, b"x" * size, version=version)


def test_a_pool_gives_an_instance_once_and_by_its_version() -> None:
    pool = Pool(8, 100)
    one, two, other = instance(1), instance(1), instance(2)
    for each in (one, two, other):
        pool.give(each)
    assert pool.versions == [1, 2]
    assert pool.take(1) is two
    assert pool.take(1) is one
    assert pool.take(1) is None
    assert pool.take(2) is other


def test_a_pool_forgets_what_is_used_least() -> None:
    pool = Pool(2, 100)
    for version in (1, 2):
        pool.give(instance(version))
    used = pool.take(1)
    assert used is not None
    pool.give(used)
    pool.give(instance(3))
    assert sorted(pool.versions) == [1, 3]
    pool.give(instance(4, 99))
    assert pool.versions == [3, 4] or pool.versions == [4]
    pool.give(instance(5, 101))
    assert 5 not in pool.versions


def test_a_plain_class_behind_lines_keeps_its_object() -> None:
    lines = Lines(Server.of(Shelf))
    answers: list[Any] = []
    for number, (tool, arguments) in enumerate([("put", {"key": "x", "value": "1"}), ("get", {"key": "x"})]):
        params = {
            "name": tool,
            "arguments": arguments,
            "_meta": {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientCapabilities": {},
            },
        }
        request = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
        lines.handle(msgspec.json.encode(request), lambda line: answers.append(msgspec.json.decode(line)))
    assert [answer["result"]["structuredContent"]["result"] for answer in answers] == [1, "1"]
