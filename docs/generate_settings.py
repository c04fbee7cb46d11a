"""Writes `docs/settings.md` from the settings themselves: `python docs/generate_settings.py`. A test compares."""

import os
import types
import typing
from pathlib import Path

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from megamcp.settings import Settings

PAGE = Path(__file__).parent / "settings.md"
INTRODUCTION = """# Settings

Each one is an environment variable; `megamcp serve` takes the commonest as options too. None is needed: without any,
the gateway listens on 127.0.0.1:8600 and keeps an embedded PostgreSQL in `~/.megamcp`. Durations are seconds, sizes are
bytes, lists are JSON. A variable that looks like one and is none is told in the log at the start. This page is made
from `megamcp/settings.py` by `python docs/generate_settings.py`.

| variable | type | default | meaning |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The text that `settings.md` must have."""
    rows = (
        f"| `MEGAMCP_{name.upper()}` | {_kind(field)} | {_default(name, field)} | {field.description} |\n"
        for name, field in Settings.model_fields.items()
    )
    return INTRODUCTION + "".join(rows)


def _kind(field: FieldInfo) -> str:
    kind = field.annotation
    if isinstance(kind, types.UnionType):
        (kind,) = (each for each in typing.get_args(kind) if each is not type(None))
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path", SecretStr: "secret"}
    if typing.get_origin(kind) is list:
        return f"list of {names[typing.get_args(kind)[0]]}s"
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(typing.get_args(kind))
    return names[kind]  # type: ignore[index]


def _default(name: str, field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if name == "data_dir":
        return "`~/.megamcp`"
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


if __name__ == "__main__":
    assert not any(name.startswith("MEGAMCP_") for name in os.environ)
    PAGE.write_text(page(), encoding="utf-8")
