"""From a typed function to a tool: what is advertised, and how a call's JSON becomes its arguments.

Reads the signature once, when the function is decorated, so that a tool which can't work is an error at
import, never at its first call. The schemas are JSON Schema 2020-12 made by pydantic from the annotations;
the same type adapters check what comes in and what goes out, so a schema and its check can't disagree.

Not done here: running a tool, transactions, the wire.
"""

import inspect
import types
import typing
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, NotRequired, cast, get_args, get_origin

import pydantic
from pydantic import ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticUndefined, to_jsonable_python
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import TypedDict

from megamcp.sdk.docstring import parse_docstring
from megamcp.sdk.inject import Clock, Context, Random


class Injected(StrEnum):
    """What the SDK hands to a tool; never part of its schema."""

    DB = "db"
    CLOCK = "clock"
    RANDOM = "random"
    CONTEXT = "context"
    INSTANCE = "instance"
    """The object whose method the tool is."""


INJECTED_TYPES: dict[Any, Injected] = {
    AsyncConnection: Injected.DB,
    Clock: Injected.CLOCK,
    Random: Injected.RANDOM,
    Context: Injected.CONTEXT,
}


_ANYWHERE = (Injected.CLOCK, Injected.INSTANCE)
"""What needs no event loop."""


class ToolSignatureError(TypeError):
    """A function that can't be a tool; raised where it is decorated, names the parameter and the fix."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What is known about a tool's function.

    `injected`: parameter name → what goes in. `wraps`: the structured result is `{"result": value}`, since
    MCP (2025-11-25) wants an object at the root. `output` is None for a tool that returns nothing.
    """

    is_async: bool
    description: str
    injected: dict[str, Injected]
    defaults: dict[str, Any]
    arguments: TypeAdapter[Any]
    input_schema: dict[str, Any]
    output: TypeAdapter[Any] | None
    output_schema: dict[str, Any] | None
    wraps: bool


class _Schema(GenerateJsonSchema):
    """Without the title that pydantic makes of each field's name: it only costs an agent tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def read_signature(function: Callable[..., Any], tool: str, *, method: bool = False) -> Signature:
    """Raises ToolSignatureError where the function can't be called from JSON arguments. Of a `method`, the first
    parameter is the object."""
    where = f"tool {tool!r} ({getattr(function, '__qualname__', function)!s})"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ToolSignatureError(f"{where}: generators can't be tools; return a list, or report progress by Context")
    hints = _hints(function, where)
    doc = parse_docstring(inspect.getdoc(function) or "")
    injected: dict[str, Injected] = {}
    fields: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolSignatureError(f"{where}: {parameter} has no JSON Schema; name every parameter")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolSignatureError(f"{where}: parameter {name!r} is positional-only, but arguments come by name")
        if method and not injected and not fields:
            injected[name] = Injected.INSTANCE
            continue
        if name not in hints:
            raise ToolSignatureError(f"{where}: parameter {name!r} needs a type annotation")
        if kind := INJECTED_TYPES.get(hints[name]):
            injected[name] = kind
            continue
        _refuse_optional_injection(hints[name], name, where)
        fields[name], default = _field(hints[name], parameter.default, name, where)
        if default is not PydanticUndefined:
            defaults[name] = default
    if unknown := sorted(set(doc.arguments) - set(fields) - set(injected)):
        raise ToolSignatureError(f"{where}: the docstring describes {', '.join(unknown)}, which is no parameter")
    if "return" not in hints:
        raise ToolSignatureError(f"{where}: needs a return annotation (-> None if there is no result)")
    is_async = inspect.iscoroutinefunction(function)
    if not is_async and (loop := sorted(k for k, kind in injected.items() if kind not in _ANYWHERE)):
        raise ToolSignatureError(f"{where}: takes {', '.join(loop)}, so it must be `async def` (def runs in a thread)")
    arguments = _arguments_adapter(tool, fields, defaults, where)
    output, output_schema, wraps = _output(hints["return"], where)
    return Signature(
        is_async=is_async,
        description=doc.description,
        injected=injected,
        defaults=defaults,
        arguments=arguments,
        input_schema=_input_schema(arguments, doc.arguments, defaults, where),
        output=output,
        output_schema=output_schema,
        wraps=wraps,
    )


def _hints(function: Callable[..., Any], where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, SyntaxError) as error:
        raise ToolSignatureError(
            f"{where}: an annotation can't be resolved ({error}); types must be importable at module level"
        ) from error


def _refuse_optional_injection(hint: Any, name: str, where: str) -> None:
    inside = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType, Annotated) else ()
    if any(INJECTED_TYPES.get(arg) for arg in inside if isinstance(arg, type)):
        raise ToolSignatureError(f"{where}: annotate {name!r} with the plain type, it is always given")


def _field(hint: Any, default: Any, name: str, where: str) -> tuple[Any, Any]:
    """(annotation without a default, default or PydanticUndefined)."""
    if any(
        isinstance(extra, FieldInfo) and not extra.is_required()
        for extra in (get_args(hint)[1:] if get_origin(hint) is Annotated else ())
    ):
        raise ToolSignatureError(f"{where}: give the default of {name!r} by `= …`, not inside Annotated")
    if isinstance(default, FieldInfo):
        constraints = copy(default)
        constraints.default, constraints.default_factory = PydanticUndefined, None
        value = default.get_default(call_default_factory=True, validated_data={})
        return Annotated[hint, constraints], value
    return hint, PydanticUndefined if default is inspect.Parameter.empty else default


def _arguments_adapter(tool: str, fields: dict[str, Any], defaults: dict[str, Any], where: str) -> TypeAdapter[Any]:
    # A TypedDict and not a model: any parameter name is allowed, and what is absent stays absent, so that the
    # function's own default applies.
    shape = {name: NotRequired[hint] if name in defaults else hint for name, hint in fields.items()}
    arguments = cast("Any", TypedDict)(f"{tool}_arguments", shape)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    try:
        return TypeAdapter(arguments)
    except (pydantic.errors.PydanticUserError, pydantic.errors.PydanticUndefinedAnnotation) as error:
        raise ToolSignatureError(f"{where}: a parameter's type can't come from JSON: {_first_line(error)}") from error


def _input_schema(
    arguments: TypeAdapter[Any], descriptions: dict[str, str], defaults: dict[str, Any], where: str
) -> dict[str, Any]:
    try:
        schema = arguments.json_schema(schema_generator=_Schema)
    except pydantic.errors.PydanticUserError as error:
        raise ToolSignatureError(f"{where}: a parameter's type has no JSON Schema: {_first_line(error)}") from error
    schema.pop("title", None)
    properties = schema.setdefault("properties", {})
    for name, text in descriptions.items():
        if name in properties:
            properties[name].setdefault("description", text)
    for name, value in defaults.items():
        try:
            properties[name]["default"] = to_jsonable_python(value)
        except ValueError as error:
            raise ToolSignatureError(f"{where}: the default of {name!r} is no JSON value") from error
    return {"type": "object", **schema, "additionalProperties": False}


def _output(hint: Any, where: str) -> tuple[TypeAdapter[Any] | None, dict[str, Any] | None, bool]:
    if hint is None or hint is type(None):
        return None, None, False
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        schema = adapter.json_schema(mode="serialization", schema_generator=_Schema)
    except (pydantic.errors.PydanticUserError, pydantic.errors.PydanticUndefinedAnnotation) as error:
        raise ToolSignatureError(f"{where}: the return type has no JSON Schema: {_first_line(error)}") from error
    if _is_object(schema):
        schema.pop("title", None)
        return adapter, {"type": "object", **schema}, False
    definitions = schema.pop("$defs", None)
    wrapped: dict[str, Any] = {"type": "object", "properties": {"result": schema}, "required": ["result"]}
    return adapter, wrapped | ({"$defs": definitions} if definitions else {}), True


def _is_object(schema: dict[str, Any]) -> bool:
    if reference := schema.get("$ref"):
        target = schema.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {})
        return bool(target.get("type") == "object")
    return bool(schema.get("type") == "object")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
