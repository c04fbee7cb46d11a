"""What an environment may say of servers that are started by a command."""

import json
from pathlib import Path
from typing import Any

import pytest

from megamcp.control import stdio_target
from megamcp.environments import LoadedEnvironment, LoadedServer, ServerConfig, Source, read
from megamcp.errors import Unprocessable

DATABASE = {"kind": "database"}


def source(folder: Path, **server: Any) -> Source:
    (folder / "schema.sql").write_text("create table t (id int primary key);")
    (folder / "mcp.json").write_text(json.dumps({"name": "env", "mcpServers": {"db": server}}))
    return read(folder)


def refusal(folder: Path, **server: Any) -> Unprocessable:
    with pytest.raises(Unprocessable) as caught:
        source(folder, **server)
    return caught.value


def test_an_mcp_json_with_a_command_loads_when_it_says_its_database(tmp_path: Path) -> None:
    found = source(tmp_path, command="npx", args=["-y", "server", "{dsn}"], state=DATABASE, disabled=False)
    config = found.config.servers["db"]
    assert (config.command, config.restart, config.cwd) == ("npx", "never", None)


def test_a_command_without_a_word_on_its_state_gets_a_sandbox(tmp_path: Path) -> None:
    assert source(tmp_path, command="npx", args=["-y", "server"]).config.servers["db"].state.kind == "process"


def test_a_command_without_state_is_refused_with_the_way_out(tmp_path: Path) -> None:
    error = refusal(tmp_path, command="npx", args=["-y", "server"], state={"kind": "none"})
    assert error.code == "unsupported_server"
    assert "state of kind process or database, not none" in error.message


@pytest.mark.parametrize("state", [None, {"kind": "process"}])
def test_a_command_that_wants_a_database_and_has_none_is_refused(tmp_path: Path, state: Any) -> None:
    error = refusal(tmp_path, command="npx", args=["{dsn}"], **({"state": state} if state else {}))
    assert error.code == "invalid_environment"
    assert "only state of kind database has a DSN" in error.message


def test_a_command_on_a_schema_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, command="npx", args=["{dsn}"], state={"kind": "schema"})
    assert "only a server on megamcp.sdk can use it" in error.message


def test_a_command_that_is_not_told_its_database_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, command="npx", args=["{DSN}"], env={"A": "dsn"}, state=DATABASE)
    assert error.code == "invalid_environment"
    assert "no {dsn} in args or env" in error.message


@pytest.mark.parametrize("field", [{"args": ["x"]}, {"cwd": "/"}, {"restart": "on_move"}])
def test_fields_of_a_command_are_refused_without_one(tmp_path: Path, field: dict[str, Any]) -> None:
    error = refusal(tmp_path, url="http://example.org/mcp", **field)
    assert "args, cwd and restart belong to a command" in error.message


def test_an_unknown_restart_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, command="a", args=["{dsn}"], state=DATABASE, restart="always")
    assert error.code == "invalid_environment"


def test_what_a_server_does_not_say_is_no_part_of_the_versions_hash() -> None:
    text = ServerConfig.model_validate({"url": "http://example.org/mcp"}).model_dump_json()
    assert "cwd" not in text
    assert "restart" not in text


def test_the_dsn_is_put_into_arguments_and_variables_and_kept_out_of_the_log() -> None:
    config = ServerConfig.model_validate(
        {
            "command": "run",
            "args": ["--db={dsn}", "x"],
            "env": {"DATABASE_URL": "{dsn}"},
            "cwd": "sub",
            "state": DATABASE,
        }
    )
    environment = LoadedEnvironment.__new__(LoadedEnvironment)
    object.__setattr__(environment, "folder", Path("/env"))
    dsn = "postgresql://ro_1:secret@127.0.0.1:1/db"
    target = stdio_target(LoadedServer("db", config, None, "h"), environment, dsn, "secret", 7)
    assert target.command == ("run", f"--db={dsn}", "x")
    assert target.environ == {"DATABASE_URL": dsn}
    assert (target.cwd, target.generation) == ("/env/sub", 7)
    assert set(target.secrets) == {dsn, "secret"}
