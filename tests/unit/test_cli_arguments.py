"""Tool arguments written on a command line become what the tool's schema asks for."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from megamcp.cli.arguments import from_json, from_pairs, labels, pairs, takes_text

SCHEMA = {
    "$defs": {"Color": {"enum": ["red", "blue"]}, "Item": {"type": "object"}},
    "properties": {
        "postal_code": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "quantity": {"type": "integer"},
        "price": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "urgent": {"type": "boolean"},
        "color": {"$ref": "#/$defs/Color"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
        "either": {"type": ["integer", "string"]},
    },
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("postal_code=02134", "02134"),
        ("postal_code=12345", "12345"),
        ("note=true", "true"),
        ("quantity=2", 2),
        ("price=1.5", 1.5),
        ("urgent=true", True),
        ("color=red", "red"),
        ('items=[{"sku":"A"}]', [{"sku": "A"}]),
        ("either=7", "7"),
        ("either:=7", 7),
        ("note:=null", None),
        ("note=a=b:=c", "a=b:=c"),
        ("note=", ""),
        ("unknown=5", "5"),
        ("quantity=two", "two"),
    ],
)
def test_a_pair_becomes_what_the_schema_allows(given: str, expected: Any) -> None:
    name = given.partition("=")[0].rstrip(":")
    assert from_pairs(pairs([given]), SCHEMA) == {name: expected}


@pytest.mark.parametrize("given", ["nothing", "=x", "", ":=1", " a=1"])
def test_what_is_no_pair_is_a_usage_error(given: str) -> None:
    with pytest.raises(typer.BadParameter):
        pairs([given])


def test_broken_json_after_colon_equals_is_a_usage_error() -> None:
    with pytest.raises(typer.BadParameter):
        from_pairs(pairs(["a:={"]), {})


def test_whole_arguments_come_from_text_file_or_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"order_id": "W1", "text": "ü"}
    text = json.dumps(wanted)
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert from_json(text) == from_json(f"@{tmp_path / 'a.json'}") == from_json("-") == wanted


@pytest.mark.parametrize("text", ["[1]", "x", "@/does/not/exist", "null"])
def test_whole_arguments_that_are_no_object_are_a_usage_error(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        from_json(text)


def test_labels_are_texts() -> None:
    assert labels(["a=1", "b=x=y"]) == {"a": "1", "b": "x=y"}


def test_when_in_doubt_text_is_allowed() -> None:
    assert takes_text({}, {})
    assert takes_text({"$ref": "#/elsewhere"}, {})
    assert not takes_text(False, {})
