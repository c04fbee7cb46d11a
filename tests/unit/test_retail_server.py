"""What can be said about the retail environment without a database."""

import ast
import json
import re
import tomllib
from datetime import datetime
from pathlib import Path

import pytest

from megamcp.sdk import Server, ToolError
from megamcp.sdk.signature import read_signature
from tool_servers.retail import server
from tool_servers.retail.generate_seed import CLOCK, SEED_FILE, Store
from tool_servers.retail.references import Ref, to_cents
from tool_servers.retail.seed_rows import render

FOLDER = Path(server.__file__).parent
TOOLS = (*server.READING, *server.WRITING, *server.FINAL)
COLUMNS = {"return_id", "add_or_change"}  # arguments that look like tools
NAMES = {tool.__name__ for tool in TOOLS}


def test_the_committed_seed_is_what_its_generator_writes() -> None:
    assert SEED_FILE.read_text(encoding="utf-8") == render(Store().build())


def test_another_seed_gives_another_store() -> None:
    assert render(Store(seed=1).build()) != render(Store(seed=2).build())


def test_the_environment_names_this_server_and_the_seeds_clock() -> None:
    described = tomllib.loads((FOLDER / "environment.toml").read_text(encoding="utf-8"))
    assert described["name"] == "retail"
    assert datetime.fromisoformat(described["clock"]) == CLOCK
    entry = described["servers"]["retail"]
    assert entry["entry"] == "tool_servers.retail.server:server"
    assert isinstance(server.server, Server)
    for file in (entry["state"]["schema"], *entry["state"]["seed"]):
        assert (FOLDER / file).is_file()


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
def test_an_agent_is_told_what_each_tool_and_each_parameter_is_for(tool: server.Tool) -> None:
    signature = read_signature(tool, tool.__name__)
    assert len(signature.description) > 30
    for name, schema in signature.input_schema["properties"].items():
        assert len(schema.get("description", "")) > 4, f"{tool.__name__}.{name}"
    assert signature.output_schema is not None


def test_task_and_evaluator_files_speak_of_existing_tools_with_valid_arguments() -> None:
    signatures = {tool.__name__: read_signature(tool, tool.__name__) for tool in TOOLS}
    for line in (FOLDER / "tasks.jsonl").read_text(encoding="utf-8").splitlines():
        task = json.loads(line)
        for call in (*task["gold"], *(call for calls in task.get("alternatives", ()) for call in calls)):
            signatures[call["tool"]].arguments.validate_python(call["arguments"])
    for line in (FOLDER / "evaluators.jsonl").read_text(encoding="utf-8").splitlines():
        evaluator = json.loads(line)
        ids = [check["id"] for check in (*evaluator["milestones"], *evaluator["guards"])]
        assert len(ids) == len(set(ids))
        assert {check["kind"] for check in evaluator["milestones"]} == {"state"}


def test_texts_for_agents_name_only_tools_that_exist() -> None:
    """A refusal or description that sends an agent to a tool of another name would teach it to invent calls."""
    verbs = "search|list|get|check|find|verify|update|add|place|modify|change|apply|remove|return|exchange|cancel|issue"
    mentioned = re.compile(rf"\b(?:{verbs}|open|escalate|resolve|track)_[a-z_]+\b")
    for file in FOLDER.glob("*.py"):
        if "seed" in file.name:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            # Prose has spaces; SQL has them too, but is written with its keyword first.
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
                if re.match(
                    r"\s*(select|insert|update|delete|from|join|where|union|values|order|group|returning)\b", node.value
                ):
                    continue
                unknown = set(mentioned.findall(node.value)) - NAMES - COLUMNS
                assert not unknown, (file.name, unknown)


@pytest.mark.parametrize("kind", list(Ref))
def test_an_id_survives_showing_and_parsing(kind: Ref) -> None:
    assert kind.parse(kind.show(123456)) == 123456
    assert kind.parse(f" #{kind.show(7).lower()} ") == 7
    for wrong in ("", "12", "X1", f"{kind.value}", f"{kind.value}1x", f"{kind.value}99999999999", "W1; drop table"):
        with pytest.raises(ToolError):
            kind.parse(wrong)


def test_amounts_are_whole_cents_above_zero() -> None:
    assert [to_cents(amount) for amount in (0.01, 0.29, 19.99, 1234.56, 999_999.99)] == [1, 29, 1999, 123456, 99999999]
    for amount in (0, -1, 0.001, 1e9, float("nan"), float("inf")):
        with pytest.raises(ToolError):
            to_cents(amount)
