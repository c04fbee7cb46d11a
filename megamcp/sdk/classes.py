"""A plain Python class as a tool server: its public methods are the tools, its object is the state.

    class Shop:
        \"\"\"Sells books.\"\"\"

        def __init__(self) -> None:
            self.stock: dict[str, int] = {"dune": 3}

        def sell(self, title: str, count: int = 1) -> int:
            \"\"\"Sell some copies; gives how many are left.\"\"\"

The state is one JSON document: what `dump()` gives and `load(document)` takes, where the class has both, else the
object's attributes. What an attribute may be is what comes back from JSON as it was: so no tuple, set or object of
another class, and the way out is to write the two methods. `load` is called on an object that `cls()` made. An
attribute with very many items may be a `Table`, where the class's body says so.

Not here: where documents are kept (`documents`), and how one is packed (`megamcp.documents.content`).
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, get_origin

from megamcp.documents.content import NotJson, pointer
from megamcp.documents.table import Table
from megamcp.sdk.signature import ToolSignatureError

LOAD, DUMP = "load", "dump"
_READ_ONLY = "__megamcp_read_only__"

Function = TypeVar("Function", bound=Callable[..., Any])


def read_only(function: Function) -> Function:
    """Says of a method that it changes nothing: calls of it run side by side, and what it did change is not kept."""
    setattr(function, _READ_ONLY, True)
    return function


def is_read_only(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, _READ_ONLY, False))


class Keeper(Protocol):
    """Makes objects that hold a document, and asks them for it."""

    @property
    def tuples(self) -> bool:
        """Whether tuples may stand for arrays in what `dumped` gives."""
        ...

    async def fresh(self) -> Any:
        """An object as the environment starts."""
        ...

    async def loaded(self, document: Any) -> Any:
        """An object that holds what the document says."""
        ...

    async def dumped(self, instance: Any) -> Any:
        """The document, not checked. May share parts with the object."""
        ...

    def usable(self, instance: Any) -> bool:
        """Whether an object that waited can serve a call."""
        ...

    def drop(self, instance: Any) -> None:
        """The object is not used any more."""
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """The `Keeper` of a class's objects."""

    cls: type
    by_methods: bool
    tables: frozenset[str] = frozenset()
    """Attributes that are tables."""

    @classmethod
    def of(cls, kept: type) -> "Kept":
        """Raises ToolSignatureError for a class whose objects can't be kept."""
        found = [name for name in (LOAD, DUMP) if callable(getattr(kept, name, None))]
        if len(found) == 1:
            missing = DUMP if found == [LOAD] else LOAD
            raise ToolSignatureError(
                f"class {kept.__qualname__} has {found[0]} but no {missing}; write both or neither"
            )
        if any(map(inspect.iscoroutinefunction, (getattr(kept, name) for name in found))):
            raise ToolSignatureError(
                f"class {kept.__qualname__}: load and dump must be plain functions, not `async def`"
            )
        if not found and not hasattr(kept, "__dict__"):
            raise ToolSignatureError(f"class {kept.__qualname__} has no attributes to keep; write load and dump")
        for base in kept.__mro__ if not found else ():
            if base.__dict__.get("__slots__"):
                raise ToolSignatureError(f"class {kept.__qualname__}: __slots__ are not kept; write load and dump")
        needed = [
            parameter
            for parameter in inspect.signature(kept).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if needed:
            raise ToolSignatureError(f"class {kept.__qualname__} is made without arguments, but needs {needed[0].name}")
        return cls(kept, bool(found), frozenset() if found else frozenset(_tables(kept)))

    @property
    def tuples(self) -> bool:
        return self.by_methods

    async def fresh(self) -> Any:
        return self.cls()

    async def loaded(self, document: Any) -> Any:
        if self.by_methods:
            made = self.cls()
            made.load(document)
            return made
        made = object.__new__(self.cls)
        if not isinstance(document, dict):
            raise TypeError(f"the document of class {self.cls.__qualname__} is an object with its attributes")
        made.__dict__.update(document)
        for name in self.tables & document.keys():
            if not isinstance(document[name], dict):
                raise TypeError(f"{name} is a Table, so the document must have an object there")
            made.__dict__[name] = Table(document[name])
        return made

    async def dumped(self, instance: Any) -> Any:
        if self.by_methods:
            return instance.dump()
        for name, value in instance.__dict__.items():
            if (type(value) is Table) != (name in self.tables):
                kind = type(value).__qualname__
                raise NotJson(
                    f"{pointer((name,))} is a {kind}, but class {self.cls.__qualname__} says otherwise.",
                    hint=f"Write `{name}: Table` in the class's body, and keep a Table there: a load makes it one.",
                )
        return instance.__dict__

    def usable(self, instance: Any) -> bool:
        return True

    def drop(self, instance: Any) -> None:
        return


def _tables(cls: type) -> Iterator[str]:
    """Attributes of which the class's body says that they are tables."""
    for base in cls.__mro__:
        for name, annotation in inspect.get_annotations(base).items():
            said: Any = annotation
            if isinstance(said, str):
                try:
                    said = eval(said, vars(sys.modules[base.__module__]))
                except Exception:  # a name for type checkers only: a table among them is told of when it is dumped
                    continue
            if said is Table or get_origin(said) is Table:
                yield name


def methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods but load and dump: those of base classes first, each class's in the order of its text."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__[:-1]):
        for name, value in vars(base).items():
            if name.startswith("_") or name in (LOAD, DUMP):
                continue
            if inspect.isfunction(value):
                found[name] = value
            else:  # hidden by something that is no method
                found.pop(name, None)
    yield from found.items()
