"""What an environment may say of its servers, and what it is told when it says something else."""

import json
from pathlib import Path
from typing import Any

import pytest

from megamcp.contradictions import contradictions
from megamcp.definitions import ServerConfig
from megamcp.environments import LoadedEnvironment, LoadedServer
from megamcp.errors import Unprocessable
from megamcp.reading import Source, read
from megamcp.targets import stdio_target

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


@pytest.mark.parametrize(
    ("server", "state", "words"),
    [
        ({"command": "x"}, {"kind": "process", "runtime": "fork"}, ("command", "runtime = fork", "take criu")),
        ({"command": "x"}, {"kind": "process", "runtime": "docker"}, ("runtime = docker", "no state.image", "image =")),
        (
            {"command": "x"},
            {"kind": "process", "runtime": "docker", "image": "/srv/root"},
            ("runtime = docker", "image = /srv/root", "criu takes a folder"),
        ),
        (
            {"command": "x"},
            {"kind": "process", "runtime": "criu", "image": "python:3.13-slim"},
            ("runtime = criu", "image = python:3.13-slim", "Docker's"),
        ),
        ({"command": "x"}, {"kind": "process", "image": "Notes Server"}, ("'Notes Server' is no name of an image",)),
        ({"entry": "a:B"}, {"kind": "process", "image": "a"}, ("entry", "state.image", "take the image out")),
        ({"command": "x"}, {"kind": "process", "workdir": "/"}, ("state.workdir is /", "below /")),
        ({"command": "x"}, {"kind": "process", "workdir": "/a/../b"}, ("state.workdir is /a/../b",)),
        ({"command": "x", "restart": "on_move"}, {"kind": "process"}, ("restart", "kind process", "take it out")),
        ({"entry": "a:B"}, {"kind": "document", "load": "put"}, ("entry", "state.load", "tools of a command")),
        ({"entry": "a:B"}, {"kind": "schema", "source_schema": "s"}, ("state.source_schema without state.dump",)),
        ({"command": "x", "headers": {"A": "b"}}, {"kind": "process"}, ("headers belong to a url",)),
        ({"url": "http://example.org", "env": {"A": "b"}}, {"kind": "none"}, ("env and url", "take env out")),
        ({"entry": "a:B", "env": {"A": "{dsn}"}}, {"kind": "document"}, ("{dsn}", "only state of kind database")),
    ],
    ids=lambda part: "" if isinstance(part, dict) else part[0][:40],
)
def test_fields_that_contradict_each_other_are_refused_with_the_way_out(
    server: dict[str, Any], state: dict[str, Any], words: tuple[str, ...]
) -> None:
    (told,) = contradictions({"shop": ServerConfig.model_validate({**server, "state": state})})
    assert told["where"] == "servers.shop"
    assert all(word in told["problem"] for word in words), told


@pytest.mark.parametrize(
    ("server", "state"),
    [
        ({"command": "x"}, {"kind": "process", "runtime": "docker", "image": "Registry.example.org:5000/a/b-c_d:1.2"}),
        ({"command": "x"}, {"kind": "process", "image": f"ghcr.io/a/b@sha256:{'0' * 64}"}),
        ({"command": "x"}, {"kind": "process", "image": "megamcp-test/notes"}),
        ({"command": "x"}, {"kind": "process", "runtime": "criu", "image": "/srv/root"}),
        ({"entry": "a:B"}, {"kind": "process", "runtime": "fork"}),
        ({"command": "x", "args": ["{dsn}"], "restart": "on_move"}, {"kind": "database"}),
    ],
)
def test_what_goes_together_is_let_be(server: dict[str, Any], state: dict[str, Any]) -> None:
    assert contradictions({"shop": ServerConfig.model_validate({**server, "state": state})}) == []


def test_every_contradiction_is_told_at_once_and_by_its_server(tmp_path: Path) -> None:
    text = 'name = "a"\n[servers.one]\ncommand = "x"\nheaders = { A = "b" }\n[servers.two]\ncommand = "x"\n'
    (tmp_path / "environment.toml").write_text(f'{text}[servers.two.state]\nkind = "process"\nruntime = "fork"\n')
    with pytest.raises(Unprocessable) as caught:
        read(tmp_path)
    assert caught.value.code == "invalid_environment"
    assert [problem["where"] for problem in caught.value.extra["problems"]] == ["servers.one", "servers.two"]
    assert "servers.two: command and state.runtime = fork" in caught.value.message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('nam = "b"', "file: there is no key 'nam'; did you mean 'name'?"),
        ('[servers.b]\nentri = "a:B"', "servers.b: there is no key 'entri'; did you mean 'entry'?"),
        (
            '[servers.b]\nentry = "a:B"\n[servers.b.state]\nkind = "process"\nmemory_mib = 5',
            "servers.b.state: there is no key 'memory_mib'; did you mean 'memory_mb'?",
        ),
        (
            '[servers.b]\nentry = "a:B"\n[servers.b.state]\nkind = "schema"\nshema = "x"',
            "servers.b.state: there is no key 'shema'; did you mean 'schema'?",
        ),
        (
            '[servers.b]\nentry = "a:B"\n[servers.b.state]\nkind = "document"\nqqqq = 1',
            "servers.b.state: there is no key 'qqqq'; there are: kind, initial, load, dump",
        ),
        (
            '[servers.b]\nentry = "a:B"\n[servers.b.state]\nkind = "documents"',
            "servers.b.state: there is no kind 'documents'; did you mean 'document'?",
        ),
        (
            '[servers.b]\nentry = "a:B"\n[servers.b.state]\ninitial = "x"',
            "servers.b.state: say its kind: schema, database, document, process, none",
        ),
        ('[servers.b]\nentry = "a.B"', "servers.b.entry: "),
    ],
)
def test_an_unknown_key_is_told_with_the_one_that_was_meant(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "environment.toml").write_text(f'name = "a"\n{text}\n' if "nam =" not in text else text)
    with pytest.raises(Unprocessable) as caught:
        read(tmp_path)
    assert told in caught.value.message


def test_a_misspelt_key_of_an_mcp_json_is_told_and_other_programs_fields_are_left_alone(tmp_path: Path) -> None:
    others = {"type": "stdio", "disabled": False, "autoApprove": [], "envFile": ".env", "timeout": 5, "env_vars": []}
    source(tmp_path, command="npx", args=["server"], **others)
    error = refusal(tmp_path, comand="npx", args=["server"], evn={})
    assert "mcpServers.db: there is no key 'comand'; did you mean 'command'?" in error.message
    assert "an entry needs an environment.toml" in refusal(tmp_path, entry="a:B").message
    (tmp_path / "mcp.json").write_text(json.dumps({"servers": {}, "inputs": []}))
    with pytest.raises(Unprocessable, match="there is no object mcpServers, but servers, inputs"):
        read(tmp_path)
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"good": {"command": "a"}, "bad": "npx"}}))
    with pytest.raises(Unprocessable, match=r"servers\.bad: "):
        read(tmp_path)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ('kind = "process"\nfiles = "start"', r"start: there is no folder .*/start \(servers\.b\.state\.files\)"),
        ('kind = "process"\nfiles = "file"', r"file: there is no folder .*/file \(servers\.b\.state\.files\)"),
        ('kind = "process"\nfiles = "../x"', r"outside of the environment's folder \(servers\.b\.state\.files\)"),
        ('kind = "process"\nfiles = "a\\u0000"', r"null.* \(servers\.b\.state\.files\)"),
        ('kind = "document"\ninitial = "i.json"', r"i\.json: No such file .* \(servers\.b\.state\.initial\)"),
        ('kind = "schema"\nseed = ["s.sql"]', r"schema\.sql: No such file .* \(servers\.b\.state\.schema\)"),
        ('kind = "database"\ndump = "d.sql"', r"d\.sql: No such file .* \(servers\.b\.state\.dump\)"),
    ],
)
def test_a_file_that_is_not_there_is_told_by_the_field_that_names_it(tmp_path: Path, state: str, told: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "environment.toml").write_text(f'name = "a"\n[servers.b]\nentry = "a:B"\n[servers.b.state]\n{state}\n')
    with pytest.raises(Unprocessable, match=told):
        read(tmp_path)


def test_a_folder_to_start_in_that_is_not_there_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, command="x", cwd="server")
    assert f"server: there is no folder {tmp_path}/server (servers.db.cwd)" in error.message
    source(tmp_path, command="x", cwd="/of/the/keepers/host")
    source(tmp_path, command="x", cwd="server", state={"kind": "process", "image": "python:3.13"})


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
