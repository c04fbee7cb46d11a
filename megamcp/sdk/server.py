"""`Server`: a tool server's tools, and the ASGI application that serves them.

Holds the registry and runs one tool for one call; the exactly-once protocol is `calls`, the wire is
`endpoint`. A server object has no connection and no loop of its own: it can be imported anywhere and served
many times.
"""

import asyncio
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import anyio.to_thread
import msgspec
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from megamcp.sdk.classes import Keeper, Kept, is_read_only, methods
from megamcp.sdk.database import Lease
from megamcp.sdk.inject import Clock, Context, Random
from megamcp.sdk.interrupts import Stop, stops_task, stops_thread
from megamcp.sdk.results import Outcome, failure, from_exception, invalid_arguments, success
from megamcp.sdk.signature import Injected, Signature, ToolSignatureError, read_signature

if TYPE_CHECKING:
    from megamcp.sdk.endpoint import ToolApp

log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: what is advertised, and how it runs."""

    name: str
    function: Callable[..., Any]
    signature: Signature
    read_only: bool
    title: str | None
    description: str
    annotations: Mapping[str, Any]

    @property
    def needs_state(self) -> bool:
        return Injected.DB in self.signature.injected.values()

    def advertised(self) -> dict[str, Any]:
        """Its entry in `tools/list`."""
        entry: dict[str, Any] = {"name": self.name}
        if self.title:
            entry["title"] = self.title
        if self.description:
            entry["description"] = self.description
        entry["inputSchema"] = self.signature.input_schema
        if self.signature.output_schema is not None:
            entry["outputSchema"] = self.signature.output_schema
        entry["annotations"] = dict(self.annotations)
        return entry

    def parse(self, raw: bytes) -> dict[str, Any] | Outcome:
        """The arguments as the function takes them, or the tool error that names every problem."""
        adapter = self.signature.arguments
        try:
            return {**self.signature.defaults, **adapter.validate_json(raw, strict=True)}
        except ValidationError as error:
            integral = _integral(raw, error)
            if integral is None:
                return invalid_arguments(self.name, error)
        try:
            return {**self.signature.defaults, **adapter.validate_json(integral, strict=True)}
        except ValidationError as error:
            return invalid_arguments(self.name, error)

    async def run(
        self,
        arguments: dict[str, Any],
        *,
        lease: Lease | None,
        clock: Clock,
        random: Random,
        context: Context,
        instance: Any = None,
    ) -> Outcome:
        """Every exception of the tool becomes an outcome; only cancellation passes."""
        self._inject(arguments, lease=lease, clock=clock, random=random, context=context, instance=instance)
        try:
            if self.signature.is_async:
                value = await self.function(**arguments)
            else:
                bound = functools.partial(self.function, **arguments)
                value = await anyio.to_thread.run_sync(bound, abandon_on_cancel=True)
        except Exception as error:
            return self._raised(error)
        return self._returned(value)

    def run_here(
        self,
        arguments: dict[str, Any],
        *,
        clock: Clock,
        random: Random,
        context: Context,
        started: Callable[[Stop], None],
        instance: Any = None,
    ) -> Outcome:
        """`run` to its end in this thread, for a server without a state of ours. An `async def` tool gets an event loop
        of its own, of which nothing is left afterwards. `started` is told how to stop the tool; that raises
        `interrupts.STOPPED` here."""
        self._inject(arguments, lease=None, clock=clock, random=random, context=context, instance=instance)

        async def alone() -> Any:
            started(stops_task())
            return await self.function(**arguments)

        try:
            if self.signature.is_async:
                value = asyncio.run(alone())
            else:
                started(stops_thread())
                value = self.function(**arguments)
        except Exception as error:
            return self._raised(error)
        return self._returned(value)

    def _inject(
        self,
        arguments: dict[str, Any],
        *,
        lease: Lease | None,
        clock: Clock,
        random: Random,
        context: Context,
        instance: Any,
    ) -> None:
        for name, kind in self.signature.injected.items():
            match kind:
                case Injected.DB:
                    assert lease is not None  # endpoint refuses such a call before
                    arguments[name] = lease.db
                case Injected.CLOCK:
                    arguments[name] = clock
                case Injected.RANDOM:
                    arguments[name] = random
                case Injected.CONTEXT:
                    arguments[name] = context
                case Injected.INSTANCE:
                    arguments[name] = instance

    def _raised(self, error: Exception) -> Outcome:
        outcome, expected = from_exception(error)
        if not expected:
            log.error("tool %s raised", self.name, exc_info=error)
        return outcome

    def _returned(self, value: Any) -> Outcome:
        try:
            return success(value, self.signature.output, self.signature.wraps)
        except (ValidationError, PydanticSerializationError, ValueError) as error:
            log.error("tool %s returned what its return type forbids", self.name, exc_info=error)
            return failure("invalid_result", f"Tool {self.name} returned what its output schema forbids.")


class Server:
    """A tool server: `server = Server("retail")`, then `@server.tool` on typed functions.

    `instructions` tell an agent how the tools belong together. `version` is the tool server's own.
    """

    def __init__(self, name: str, instructions: str | None = None, version: str | None = None) -> None:
        if not name:
            raise ValueError("a tool server needs a name")
        self.name = name
        self.instructions = instructions
        self.version = version or "0"
        self.kept: Keeper | None = None
        """Whose objects hold the state, where a class is the server."""
        self._tools: dict[str, Tool] = {}

    @classmethod
    def of(cls, kept: type) -> "Server":
        """A plain class as a tool server (see `classes`). Raises ToolSignatureError."""
        server = cls(kept.__name__, inspect.getdoc(kept) if kept.__doc__ else None)
        server.kept = Kept.of(kept)
        for name, function in methods(kept):
            server._add(function, name, {"readOnlyHint": is_read_only(function)}, method=True)
        if not server._tools:
            raise ToolSignatureError(f"class {kept.__qualname__} has no public method: nothing to be a tool")
        return server

    def adopt(self, tools: Iterable[Tool]) -> None:
        """Tools that were made elsewhere."""
        self._tools |= {tool.name: tool for tool in tools}

    @property
    def tools(self) -> Mapping[str, Tool]:
        """By name, in the order of their definition, which is the order agents see."""
        return MappingProxyType(self._tools)

    @overload
    def tool(self, function: Function, /) -> Function: ...

    @overload
    def tool(
        self,
        function: None = None,
        /,
        *,
        read_only: bool = False,
        destructive: bool | None = None,
        idempotent: bool | None = None,
        open_world: bool | None = None,
        title: str | None = None,
        name: str | None = None,
        description: str | None = None,
    ) -> Callable[[Function], Function]: ...

    def tool(
        self,
        function: Any = None,
        /,
        *,
        read_only: bool = False,
        destructive: bool | None = None,
        idempotent: bool | None = None,
        open_world: bool | None = None,
        title: str | None = None,
        name: str | None = None,
        description: str | None = None,
    ) -> Any:
        """Makes a function a tool and returns it unchanged.

        `read_only` tools run in parallel, in READ ONLY transactions. The other flags are MCP's hints for
        agents. Raises ToolSignatureError for a function that can't be one, and for a name that is taken.
        """
        hints = {
            "title": title,
            "readOnlyHint": read_only,
            "destructiveHint": destructive,
            "idempotentHint": idempotent,
            "openWorldHint": open_world,
        }

        def add(function: Function) -> Function:
            self._add(function, name or function.__name__, hints, description=description)
            return function

        return add if function is None else add(function)

    def _add(
        self,
        function: Callable[..., Any],
        name: str,
        hints: Mapping[str, Any],
        *,
        method: bool = False,
        description: str | None = None,
    ) -> None:
        """`hints` are MCP's, by its names; those that are None aren't said."""
        read_only = bool(hints["readOnlyHint"])
        if not _NAME.fullmatch(name):
            raise ToolSignatureError(f"{name!r} is no tool name: 1-128 of letters, digits, '_', '-', '.'")
        if name in self._tools:
            taken = self._tools[name].function
            raise ToolSignatureError(f"tool {name!r} is defined twice ({inspect.getfile(taken)}, {taken.__qualname__})")
        if read_only and hints.get("destructiveHint"):
            raise ToolSignatureError(f"tool {name!r}: read_only and destructive contradict each other")
        signature = read_signature(function, name, method=method)
        asked = set(signature.injected.values())
        if read_only and Injected.RANDOM in asked:
            raise ToolSignatureError(f"tool {name!r}: a draw from Random is a write, so it can't be read_only")
        if method and (foreign := sorted(asked & {Injected.DB, Injected.RANDOM})):
            raise ToolSignatureError(
                f"tool {name!r}: a method of a plain class has no {foreign[0]}; keep it in the object"
            )
        self._tools[name] = Tool(
            name=name,
            function=function,
            signature=signature,
            read_only=read_only,
            title=hints.get("title"),
            description=signature.description if description is None else description,
            annotations={key: value for key, value in hints.items() if value is not None},
        )

    def asgi_app(self, dsn: str | None = None, *, pool_size: int = 8, alone: bool = False) -> "ToolApp":
        """MCP at `/mcp`, as an ASGI application for the running loop. `aclose()` it, or let its lifespan do
        so. `alone`: not a gateway's."""
        from megamcp.sdk.endpoint import ToolApp

        return ToolApp(self, dsn=dsn, pool_size=pool_size, alone=alone)


def _integral(raw: bytes, error: ValidationError) -> bytes | None:
    """JSON Schema calls 5.0 an integer, strict validation doesn't: the arguments with such numbers as
    integers."""
    problems = error.errors(include_url=False, include_context=False)
    floats = [
        item["loc"]
        for item in problems
        if item["type"] == "int_type" and isinstance(item["input"], float) and item["input"].is_integer()
    ]
    if not floats or len(floats) != len(problems):
        return None
    arguments: Any = msgspec.json.decode(raw)
    for *path, last in floats:
        target = arguments
        try:
            for step in path:
                target = target[step]
            target[last] = int(target[last])
        except (LookupError, TypeError):
            return None  # a location inside a union names its member, which is no key
    return msgspec.json.encode(arguments)
