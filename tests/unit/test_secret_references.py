"""Secrets by reference: what an environment may say, where they are put in place, and where they never are."""

import json
from pathlib import Path
from typing import Any

import pytest

from megamcp import references
from megamcp.definitions import ServerConfig
from megamcp.environments import LoadedEnvironment, LoadedServer
from megamcp.errors import Unprocessable
from megamcp.reading import read
from megamcp.targets import stdio_target

URL = "https://tools.example/mcp"


def written(folder: Path, **server: Any) -> Path:
    (folder / "mcp.json").write_text(json.dumps({"name": "e", "mcpServers": {"s": server}}))
    return folder / "mcp.json"


def refusal(folder: Path, **server: Any) -> str:
    with pytest.raises(Unprocessable) as caught:
        read(written(folder, **server))
    assert caught.value.code == "invalid_environment"
    return caught.value.message


def test_references_are_put_in_place_and_their_secrets_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONE", "1st")
    (tmp_path / "two").write_text("2nd\n")
    text = f"a ${{env:ONE}} b ${{file:{tmp_path}/two}} $env ${{ONE}}"
    assert references.resolve(text) == ("a 1st b 2nd $env ${ONE}", ("1st", "2nd"))
    assert "1st" not in repr(references.resolve_all({"A": text}, "s"))


def test_a_variable_that_is_not_there_is_told_when_the_environment_is_loaded(tmp_path: Path) -> None:
    message = refusal(tmp_path, url=URL, headers={"Authorization": "Bearer ${env:NO_SUCH_TOKEN}"})
    assert "servers.s.headers.Authorization" in message
    assert "NO_SUCH_TOKEN" in message


def test_no_server_is_given_a_setting_of_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMCP_DATABASE_URL", "postgresql://sesame")
    message = refusal(
        tmp_path, url=URL, headers={"X": "${env:megamcp_database_url}", "Y": "${env:MEGAMCP_DATABASE_URL}"}
    )
    assert message.count("setting of the gateway") == 2
    assert "sesame" not in message


@pytest.mark.parametrize("name", ["relative", "/no/such/file", "/dev/zero"])
def test_a_file_that_is_no_secret_is_told_too(tmp_path: Path, name: str) -> None:
    assert name in refusal(tmp_path, command="x", env={"KEY": f"${{file:{name}}}"})


def test_a_versions_hash_and_definition_hold_the_reference_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, url=URL, headers={"Authorization": "Bearer ${env:TOKEN}"})
    monkeypatch.setenv("TOKEN", "sesame")
    one = read(file)
    monkeypatch.setenv("TOKEN", "another")
    assert read(file).hash == one.hash
    assert "sesame" not in one.config.model_dump_json()


@pytest.mark.parametrize(
    "server",
    [
        {"url": f"{URL}?key=${{env:HOME}}"},
        {"command": "x", "args": ["--key=${env:HOME}"]},
        {"url": URL, "oauth": {"client_id": "c", "client_secret": "in clear"}},
        {"url": URL, "oauth": {"client_secret": "${env:HOME}"}},
        {"url": URL, "oauth": {"grant": "client_credentials", "client_id": "c"}},
        {"url": URL, "oauth": {}, "headers": {"authorization": "Bearer ${env:HOME}"}},
        {"command": "x", "oauth": {}},
    ],
)
def test_what_can_not_work_is_refused(tmp_path: Path, server: dict[str, Any]) -> None:
    assert "servers.s" in refusal(tmp_path, **server)


def test_a_commands_secrets_are_left_out_of_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "sesame")
    config = ServerConfig.model_validate(
        {"command": "x", "args": ["{dsn}"], "env": {"T": "t ${env:TOKEN}"}, "state": {"kind": "database"}}
    )
    environment = LoadedEnvironment.__new__(LoadedEnvironment)
    object.__setattr__(environment, "folder", Path("/env"))
    target = stdio_target(LoadedServer("s", config, None, "h"), environment, "dsn", "password", 1)
    assert target.environ == {"T": "t sesame"}
    assert "sesame" in target.secrets
