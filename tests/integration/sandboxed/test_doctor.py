"""`megamcp doctor` says what works here and why the rest doesn't."""

import asyncio
import json
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from megamcp import doctor
from megamcp.cli import app
from megamcp.settings import Settings
from sandboxes.types import Kind


async def test_a_runtime_that_works_says_what_it_keeps(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in await doctor.examine(Settings(data_dir=tmp_path / "data"))}
    assert found["PostgreSQL"].works
    assert "18." in found["PostgreSQL"].told
    assert found["sandboxes: fork"].works
    assert "memory" in found["sandboxes: fork"].told
    for kind in Kind:
        finding = found[f"sandboxes: {kind}"]
        assert finding.works or finding.told
    assert list(tmp_path.rglob("*")) == []  # what was made for the trial went with it


async def test_what_is_missing_is_said_with_what_to_do(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path,
        database_url=SecretStr("postgresql://nobody@127.0.0.1:1/none"),
        sandbox_socket=tmp_path / "nobody.sock",
    )
    found = {finding.name: finding for finding in await doctor.examine(settings)}
    assert not found["PostgreSQL"].works
    assert found["PostgreSQL"].hint
    assert not found["sandboxes"].works
    assert "MEGAMCP_SANDBOX_SOCKET" in str(found["sandboxes"].hint)


@pytest.mark.parametrize("ready", [True, False])
async def test_the_command_answers_people_and_programs(tmp_path: Path, ready: bool) -> None:
    environ = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80", "MEGAMCP_DATA_DIR": str(tmp_path / "data")}
    if not ready:
        environ["MEGAMCP_DATABASE_URL"] = "postgresql://nobody@127.0.0.1:1/none"
    cli = CliRunner(env=environ)
    shown = await asyncio.to_thread(cli.invoke, app, ["doctor"])
    told = await asyncio.to_thread(cli.invoke, app, ["doctor", "--json"])
    assert {shown.exit_code, told.exit_code} == {0 if ready else 1}
    document = json.loads(told.stdout)
    assert document["ready"] is ready
    for finding in document["findings"]:
        assert finding["name"] in shown.stdout
