"""What a typed function becomes: schemas, argument checks, results; and what is refused when it is decorated."""

import enum
import json
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from mcp_types import CallToolResult, Tool
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import TypedDict

from megamcp.sdk import Clock, Context, Random, Server, ToolError, ToolSignatureError
from megamcp.sdk.results import Outcome, failure, from_exception
from megamcp.sdk.server import Tool as SdkTool


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    street: str = Field(description="With the number.")
    country: str = "DE"


class Order(BaseModel):
    id: UUID
    total: Decimal
    placed: date
    to: Address


class Tree(BaseModel):
    children: list["Tree"] = []


@dataclass
class Point:
    x: int
    y: int


class Range(TypedDict):
    low: int
    high: int


def tool_of(function: Any, **options: Any) -> SdkTool:
    server = Server("s")
    server.tool(**options)(function)
    return next(iter(server.tools.values()))


async def find(
    db: AsyncConnection,
    order_id: str,
    colour: Colour = Colour.RED,
    address: Address | None = None,
    size: Annotated[int, Field(ge=1, description="From Field.")] = 3,
    mode: Literal["fast", "slow"] = "fast",
    limit: int = Field(10, le=50),
) -> Order:
    """Find an order.

    Looks everywhere.

    Args:
        db: is not shown
        order_id: The order's id,
            as on the invoice.
        colour (Colour): Its colour.
        size: not this one

    Returns:
        An order.
    """
    raise NotImplementedError


def test_the_input_schema_says_all_that_types_and_docstring_say() -> None:
    entry = tool_of(find).advertised()
    assert entry["description"] == "Find an order.\n\nLooks everywhere."
    schema = entry["inputSchema"]
    assert (schema["type"], schema["additionalProperties"], schema["required"]) == ("object", False, ["order_id"])
    properties = schema["properties"]
    assert list(properties) == ["order_id", "colour", "address", "size", "mode", "limit"]
    assert properties["order_id"] == {"type": "string", "description": "The order's id, as on the invoice."}
    assert properties["size"] == {"type": "integer", "minimum": 1, "description": "From Field.", "default": 3}
    assert properties["mode"] == {"type": "string", "enum": ["fast", "slow"], "default": "fast"}
    assert properties["limit"] == {"type": "integer", "maximum": 50, "default": 10}
    assert properties["colour"]["default"] == "red"
    assert schema["$defs"]["Colour"]["enum"] == ["red", "blue"]
    assert schema["$defs"]["Address"]["required"] == ["street"]


def test_every_advertised_tool_is_valid_mcp() -> None:
    Tool.model_validate(tool_of(find, title="T", read_only=True).advertised())


def test_hints_are_given_only_where_the_author_said_so() -> None:
    async def f() -> None: ...

    assert tool_of(f).advertised()["annotations"] == {"readOnlyHint": False}
    entry = tool_of(f, destructive=True, idempotent=False, open_world=True, title="T", name="g.h").advertised()
    assert entry["name"] == "g.h"
    assert entry["annotations"] == {
        "title": "T",
        "readOnlyHint": False,
        "destructiveHint": True,
        "idempotentHint": False,
        "openWorldHint": True,
    }
    assert "outputSchema" not in entry


@pytest.mark.parametrize(
    ("hint", "value", "structured", "text"),
    [
        (str, 'a "b"', {"result": 'a "b"'}, 'a "b"'),
        (int, 3, {"result": 3}, "3"),
        (list[Point], [Point(1, 2)], {"result": [{"x": 1, "y": 2}]}, '[{"x":1,"y":2}]'),
        (Point, Point(1, 2), {"x": 1, "y": 2}, '{"x":1,"y":2}'),
        (Range, {"low": 1, "high": 2}, {"low": 1, "high": 2}, '{"low":1,"high":2}'),
        (Address, {"street": "é"}, {"street": "é", "country": "DE"}, '{"street":"é","country":"DE"}'),
        (dict[str, int], {"a": 1}, {"a": 1}, '{"a":1}'),
        (Address | None, None, {"result": None}, "null"),
        (Tree, Tree(children=[Tree()]), {"children": [{"children": []}]}, '{"children":[{"children":[]}]}'),
        (timedelta, timedelta(hours=1), {"result": "PT1H"}, "PT1H"),
    ],
)
async def test_results_have_text_and_structure_that_fit_the_output_schema(
    hint: Any, value: Any, structured: Any, text: str
) -> None:
    async def f() -> None:
        return value

    f.__annotations__["return"] = hint
    tool = tool_of(f)
    schema = tool.advertised()["outputSchema"]
    assert schema["type"] == "object"
    outcome = await tool.run({}, lease=None, clock=Clock(), random=Random(), context=Context("f"))
    result = CallToolResult.model_validate_json(outcome.result)
    assert not result.is_error
    assert result.structured_content == structured
    assert result.content[0].text == text  # type: ignore[union-attr]
    import jsonschema

    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(structured, schema)


def refused(function: Any, **options: Any) -> str:
    with pytest.raises(ToolSignatureError) as caught:
        tool_of(function, **options)
    return str(caught.value)


def test_signatures_that_can_not_work_are_refused_with_the_parameter_named() -> None:
    async def star(*names: str) -> None: ...

    async def stars(**names: str) -> None: ...

    async def bare(name) -> None: ...  # type: ignore[no-untyped-def]

    async def no_result(name: str): ...  # type: ignore[no-untyped-def]

    async def positional(name: str, /) -> None: ...

    async def generator() -> Any:
        yield 1

    async def maybe(db: AsyncConnection | None) -> None: ...

    async def hidden_default(name: Annotated[str, Field(default="x")]) -> None: ...

    async def no_json(thing: Server) -> None: ...

    async def no_json_result() -> Server: ...

    def sync_db(db: AsyncConnection) -> None: ...

    async def wrong_doc(name: str) -> None:
        """Text.

        Args:
            nome: a typo
        """

    async def bad_default(name: str = object()) -> None: ...  # type: ignore[assignment]

    assert "*names" in refused(star)
    assert "**names" in refused(stars)
    assert "'name'" in refused(bare)
    assert "return annotation" in refused(no_result)
    assert "'name'" in refused(positional)
    assert "generators" in refused(generator)
    assert "'db'" in refused(maybe)
    assert "'name'" in refused(hidden_default)
    assert "type" in refused(no_json)
    assert "return type" in refused(no_json_result)
    assert "async def" in refused(sync_db)
    assert "nome" in refused(wrong_doc)
    assert "'name'" in refused(bad_default)


def test_names_are_checked_when_the_tool_is_defined() -> None:
    server = Server("s")

    @server.tool
    async def twice() -> None: ...

    with pytest.raises(ToolSignatureError, match="twice"):
        server.tool(name="twice")(twice)
    with pytest.raises(ToolSignatureError, match="tool name"):
        server.tool(name="with space")(twice)
    with pytest.raises(ToolSignatureError, match="contradict"):
        server.tool(name="x", read_only=True, destructive=True)(twice)


@pytest.mark.parametrize(
    ("arguments", "paths"),
    [
        ({}, {"order_id"}),
        ({"order_id": 5}, {"order_id"}),
        ({"order_id": "x", "size": "3"}, {"size"}),
        ({"order_id": "x", "size": 0}, {"size"}),
        ({"order_id": "x", "size": True}, {"size"}),
        ({"order_id": "x", "size": 2.5}, {"size"}),
        ({"order_id": "x", "colour": "green"}, {"colour"}),
        ({"order_id": "x", "address": {"country": 3}}, {"address.street", "address.country"}),
        ({"order_id": "x", "sise": 3, "mode": None}, {"sise", "mode"}),
    ],
)
def test_arguments_that_break_the_schema_are_named_by_path(arguments: Any, paths: set[str]) -> None:
    outcome = tool_of(find).parse(json.dumps(arguments).encode())
    assert isinstance(outcome, Outcome)
    result = json.loads(outcome.result)
    assert result["isError"] is True
    assert {problem["path"] for problem in result["structuredContent"]["errors"]} == paths
    for path in paths:
        assert path in result["content"][0]["text"]


def test_arguments_keep_their_types_and_defaults() -> None:
    raw = b'{"order_id":"x","colour":"blue","address":{"street":"s"},"size":5.0}'
    parsed = tool_of(find).parse(raw)
    assert parsed == {
        "order_id": "x",
        "colour": Colour.BLUE,
        "address": Address(street="s"),
        "size": 5,
        "mode": "fast",
        "limit": 10,
    }
    assert type(parsed["size"]) is int


def test_hostile_arguments_are_tool_errors_not_crashes() -> None:
    tool = tool_of(find)
    for raw in (b'{"order_id":"\\ud800"}', b'{"order_id":' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"order_id":1e999}'):
        assert isinstance(tool.parse(raw), Outcome)


async def test_errors_say_type_and_message_and_no_traceback() -> None:
    outcome, expected = from_exception(KeyError("colour"))
    assert not expected
    assert json.loads(outcome.result)["content"][0]["text"] == "KeyError: 'colour'"
    outcome, expected = from_exception(ToolError("refused", "No.", order="W1"))
    assert expected
    assert json.loads(outcome.result) == {
        "content": [{"type": "text", "text": "No."}],
        "structuredContent": {"code": "refused", "message": "No.", "order": "W1"},
        "isError": True,
        "resultType": "complete",
    }
    CallToolResult.model_validate_json(failure("x", "y").result)


async def test_a_result_that_breaks_its_type_is_an_error_of_the_tool() -> None:
    async def wrong() -> Point:
        return "x"  # type: ignore[return-value]

    async def surrogate() -> str:
        return "\ud800"

    for function in (wrong, surrogate):
        tool = tool_of(function)
        outcome = await tool.run({}, lease=None, clock=Clock(), random=Random(), context=Context("f"))
        assert json.loads(outcome.result)["structuredContent"]["code"] == "invalid_result"


async def test_without_state_time_and_chance_are_the_machines() -> None:
    random, clock = Random(), Clock()
    assert 1 <= await random.randint(1, 3) <= 3
    assert await random.choice("ab") in "ab"
    assert 0 <= await random.random() < 1
    assert (await random.uuid()).version == 4
    assert clock.now().tzinfo is not None
    with pytest.raises(RuntimeError):
        await clock.advance(timedelta(hours=1))
    with pytest.raises(ValueError, match="empty range"):
        await random.randint(2, 1)


async def test_a_randints_range_is_covered_from_the_states_bytes() -> None:
    drawn = iter(range(1000))

    async def fetch(_sql: str) -> bytes:
        return next(drawn).to_bytes(24, "big") + bytes(8)

    random = Random(fetch)
    assert {await random.randint(-1, 1) for _ in range(9)} == {-1, 0, 1}


def test_the_public_surface_is_what_all_says() -> None:
    import megamcp.sdk as sdk

    public = {"Clock", "Context", "Random", "Server", "Table", "Tool", "ToolError", "ToolSignatureError"}
    public |= {"read_only", "serve_tool_server"}
    assert set(sdk.__all__) == public
    for name in public:
        assert getattr(sdk, name).__module__.startswith(("megamcp.sdk.", "megamcp.documents.table"))
    with pytest.raises(AttributeError):
        sdk.nothing  # noqa: B018
