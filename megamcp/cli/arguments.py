"""Tool arguments from a command line: `key=value`, `key:=JSON`, `--arguments JSON | @FILE | -`."""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

_PAIR = re.compile(r"([^=:\s][^=]*?)(:=|=)(.*)", re.DOTALL)


def from_json(text: str) -> dict[str, Any]:
    """The object of `--arguments`: JSON, `@FILE`, or `-` for stdin. Raises `BadParameter`."""
    if text == "-":
        text = sys.stdin.read()
    elif text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"{text[1:]}: {error}", param_hint="--arguments") from error
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--arguments") from error
    if not isinstance(found, dict):
        raise typer.BadParameter("must be a JSON object", param_hint="--arguments")
    return found


def pairs(given: Iterable[str]) -> list[tuple[str, str, bool]]:
    """(name, text, is JSON) of each `key=value` or `key:=JSON`. Raises `BadParameter`."""
    found = []
    for text in given:
        match = _PAIR.fullmatch(text)
        if match is None:
            raise typer.BadParameter(f"{text!r} is not key=value or key:=JSON", param_hint="ARGUMENT")
        found.append((match[1], match[3], match[2] == ":="))
    return found


def labels(given: Iterable[str]) -> dict[str, str]:
    """`key=value` texts as a mapping. Raises `BadParameter`."""
    return {name: text for name, text, _ in pairs(given)}


def from_pairs(given: Iterable[tuple[str, str, bool]], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as the tool's input schema wants them: text stays text where it may, else it is read as JSON."""
    properties = schema.get("properties") or {}
    definitions = schema.get("$defs") or {}
    return {
        name: _json(name, text)
        if is_json
        else text
        if takes_text(properties.get(name, True), definitions)
        else _json_or_text(text)
        for name, text, is_json in given
    }


def takes_text(schema: Any, definitions: Mapping[str, Any]) -> bool:
    """Whether a string may be valid under this JSON Schema. When in doubt, yes."""
    if not isinstance(schema, Mapping):
        return bool(schema)
    if isinstance(reference := schema.get("$ref"), str):
        return takes_text(definitions.get(reference.rpartition("/")[2], True), definitions)
    for word in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(word), list):
            return any(takes_text(branch, definitions) for branch in branches)
    if isinstance(values := schema.get("enum"), list):
        return any(isinstance(value, str) for value in values)
    kinds = schema.get("type")
    if kinds is None:
        return True
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{name}: not JSON: {error}", param_hint="ARGUMENT") from error


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
