"""The command line says clearly what is wrong, keeps stdout for answers, and starts quickly."""

import ast
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

import megamcp
from megamcp.cli import app
from megamcp.cli.output import COMMANDS as REQUESTS
from megamcp.cli.output import DEFAULT_URL, REQUEST, Output, as_commands
from megamcp.client import DEFAULT_URL as CLIENT_URL
from megamcp.demands import no_checkpoint, no_rollout
from megamcp.errors import Unprocessable
from megamcp.serve import _serve, demand_key
from megamcp.settings import Settings, unknown_variables

COMMANDS = [
    *(["serve"], ["demo"], ["tool-server"], ["tree"], ["top"], ["version"], ["doctor"]),
    *(["env", name] for name in ("list", "show", "load")),
    *(["key", name] for name in ("create", "list", "revoke")),
    *(["checkpoint", name] for name in ("show", "pin", "unpin", "renew", "release")),
    *(
        ["rollout", name]
        for name in (
            *("open", "list", "show", "renew", "close", "tools", "call", "checkpoint", "checkpoints"),
            *("fork", "rollback", "diff", "digest", "events", "query"),
        )
    ),
]


@pytest.fixture
def cli() -> CliRunner:
    return CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"})


@pytest.fixture
def nowhere() -> str:
    """A URL where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_that_fits_80_columns(cli: CliRunner, command: list[str]) -> None:
    result = cli.invoke(app, [*command, "--help"])
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] not in ("serve", "tool-server")], ids=" ".join)
def test_every_command_that_answers_can_answer_in_json(cli: CliRunner, command: list[str]) -> None:
    assert "--json" in cli.invoke(app, [*command, "--help"]).stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["rollout", "show"],
        ["rollout", "open", "retail", "--count", "0"],
        ["rollout", "open", "retail", "--label", "novalue"],
        ["rollout", "list", "--status", "asleep"],
        ["rollout", "fork", "cp_1", "--seed", "often"],
        ["rollout", "call", "ro_1", "get", "--arguments", "{"],
        ["rollout", "call", "ro_1", "get", "order"],
        ["tree", "ro_1", "--group", "g"],
        ["key", "create", "x", "--scope", "god"],
        ["serve", "--port", "70000"],
        ["serve", "--log-level", "loud"],
    ],
    ids=" ".join,
)
def test_wrong_use_ends_with_status_2_and_says_why_on_stderr(
    cli: CliRunner, nowhere: str, arguments: list[str]
) -> None:
    result = cli.invoke(app, arguments, env={"MEGAMCP_URL": nowhere})
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Error" in result.stderr


def test_a_gateway_that_is_not_there_is_one_red_line_and_a_hint(cli: CliRunner, nowhere: str) -> None:
    result = cli.invoke(app, ["rollout", "list", "--url", nowhere])
    assert result.exit_code == 1
    assert result.stdout == ""
    error, hint = result.stderr.strip().splitlines()
    assert error.startswith(f"error: There is no gateway at {nowhere}")
    assert error.endswith("[gateway_unreachable]")
    assert "megamcp serve" in hint


def test_with_json_the_error_is_a_problem_document_on_stderr(cli: CliRunner, nowhere: str) -> None:
    result = cli.invoke(app, ["env", "list", "--json"], env={"MEGAMCP_URL": nowhere})
    assert result.exit_code == 1
    assert result.stdout == ""
    assert json.loads(result.stderr)["code"] == "gateway_unreachable"


def test_a_setting_that_is_wrong_is_told_by_name(cli: CliRunner) -> None:
    result = cli.invoke(app, ["serve"], env={"MEGAMCP_CALL_TIMEOUT_S": "soon"})
    assert result.exit_code == 1
    assert "variable MEGAMCP_CALL_TIMEOUT_S" in result.stderr
    assert "--" not in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        (
            ["--log-level", "info"],
            {"MEGAMCP_STATE_URLS": "postgresql://secret"},
            "from the variable MEGAMCP_STATE_URLS",
        ),
        ([], {"MEGAMCP_ENVIRONMENTS": '[1, "a"]'}, "from the variable MEGAMCP_ENVIRONMENTS"),
        (["--log-level", "info"], {"MEGAMCP_WORKERS": "0"}, "from the variable MEGAMCP_WORKERS"),
        (["--workers", "99"], {}, "--workers"),
    ],
)
def test_a_wrong_setting_is_told_by_where_it_comes_from(
    cli: CliRunner, arguments: list[str], variables: dict[str, str], told: str
) -> None:
    result = cli.invoke(app, ["serve", *arguments], env=variables)
    assert result.exit_code in (1, 2)
    assert told in result.stderr
    assert "secret" not in result.output
    assert "Traceback" not in result.output


def test_a_variable_that_is_no_setting_is_told_with_the_one_that_is_meant() -> None:
    right = ["PATH", "megamcp_port", "MEGAMCP_SECRET_OF_A_SERVER"]
    told = dict(unknown_variables([*right, "MEGAMCP_CALL_TIMEOUT", "MEGAMCP_PROT", "MEGAMCP_XYZZY"]))
    assert told == {
        "MEGAMCP_CALL_TIMEOUT": "MEGAMCP_CALL_TIMEOUT_S",
        "MEGAMCP_PROT": "MEGAMCP_PORT",
        "MEGAMCP_XYZZY": None,
    }


def test_every_variable_that_this_repository_names_is_known() -> None:
    root = Path(megamcp.__file__).parents[1]
    files = [root / "compose.yaml", root / ".env.example", root / "README.md", *(root / "docs").glob("*.md")]
    files += [file for folder in ("megamcp", "sandboxes") for file in (root / folder).rglob("*.py")]
    named = {
        name for file in files for name in re.findall(r"\bMEGAMCP_[A-Z_]*[A-Z]\b", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert dict(unknown_variables(named)) == {}


async def test_a_gateway_without_a_key_listens_on_loopback_only() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "gateway.example"):
        with pytest.raises(Unprocessable) as refused:
            await _serve(Settings(host=host, port=0, data_dir=Path("/nonexistent")))
        assert refused.value.code == "key_required"
        for kept in ({"api_key": SecretStr("k")}, {"jwt_issuer": "https://issuer.example"}, {"open_to_all": True}):
            demand_key(Settings(host=host, **kept))  # type: ignore[arg-type]
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        demand_key(Settings(host=host))


@pytest.mark.parametrize("setting", ["MEGAMCP_PORT", "MEGAMCP_RELAY_PORT"])
def test_a_port_that_is_taken_is_told_before_anything_starts(setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"MEGAMCP_PORT": "0", setting: str(taken.getsockname()[1]), "MEGAMCP_WORKRES": "2"}
        done = subprocess.run(
            [sys.executable, "-m", "megamcp.cli", "serve", "--data-dir", "/nonexistent/megamcp"],
            env={**os.environ, **ports},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert "port_in_use" in done.stderr
    assert "no setting MEGAMCP_WORKRES" in done.stderr
    assert "did you mean MEGAMCP_WORKERS?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("nocolon", "package.module:attribute"),
        ("no.such.module:server", "No module named"),
        ("json:dumps", "json:dumps is of type function"),
        ("json.decoder:Nope", "json.decoder has no Nope; it has: JSONDecodeError, JSONDecoder"),
    ],
)
def test_an_entry_that_is_no_tool_server_is_told(entry: str, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megamcp.cli", "tool-server", entry],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "invalid_entry" in done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_told(cli: CliRunner) -> None:
    assert cli.invoke(app, ["version"]).stdout.strip() == megamcp.__version__
    assert json.loads(cli.invoke(app, ["version", "--json"]).stdout) == {"version": megamcp.__version__}
    assert cli.invoke(app, ["--version"]).stdout.strip() == megamcp.__version__


def test_the_default_url_is_the_client_s() -> None:
    assert DEFAULT_URL == CLIENT_URL


def test_help_imports_nothing_heavy() -> None:
    heavy = ["httpx", "pydantic", "fastapi", "asyncpg", "sqlalchemy", "mcp", "uvicorn", "megamcp.types"]
    code = f"import sys, megamcp.cli; sys.exit(str([m for m in {heavy} if m in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_a_hint_names_the_command_that_does_it_not_the_request() -> None:
    told = as_commands("Fork it instead (POST /v1/checkpoints/{id}/fork): that gives a new rollout at this point.")
    assert told == "Fork it instead (`megamcp rollout fork CHECKPOINT`): that gives a new rollout at this point."
    assert as_commands("Read /v1/rollouts.") == "Read /v1/rollouts."


def test_every_request_that_a_hint_names_has_a_command() -> None:
    named: set[str] = set()
    for path in Path(megamcp.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        hints = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == "hint"]
        for hint in [*hints, *(tree.body if path.name == "hints.py" else ())]:
            texts = [node.value for node in ast.walk(hint) if isinstance(node, ast.Constant)]
            named.update(found for text in texts if isinstance(text, str) for found in REQUEST.findall(text))
    assert len(named) > 5
    assert named - set(REQUESTS) == set()


def test_an_error_of_postgresql_shows_its_sqlstate(capsys: pytest.CaptureFixture[str]) -> None:
    Output(False).fail(Unprocessable("The query failed: no", code="query_failed", sqlstate="42P01"))
    assert "[query_failed, SQLSTATE 42P01]" in capsys.readouterr().err


def test_ids_that_are_swapped_are_told() -> None:
    assert "a checkpoint's id" in no_rollout("cp_1").message
    assert "a rollout's id" in no_checkpoint("ro_1").message
    assert no_rollout("ro_1").hint
    assert no_checkpoint("nothing").hint
