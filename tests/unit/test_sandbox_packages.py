"""Commands that start a package manager, taken apart."""

import json
from pathlib import Path

import pytest

from sandboxes.criu.packages import Wanted, command, wanted
from sandboxes.types import SandboxError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("npx -y @x/server-y /a", Wanted("npm", ("@x/server-y",), None, ("/a",))),
        ("/usr/bin/npx server@1.2.3 -y", Wanted("npm", ("server@1.2.3",), None, ("-y",))),
        ("npx -y -p @x/y --package=z tool --flag", Wanted("npm", ("@x/y", "z"), "tool", ("--flag",))),
        ("npx -y -- @x/y", Wanted("npm", ("@x/y",), None, ())),
        ("uvx mcp-git --repository r", Wanted("pypi", ("mcp-git",), "mcp-git", ("--repository", "r"))),
        ("uvx server@1.0", Wanted("pypi", ("server@1.0",), "server", ())),
        ("uvx --from pkg[cli] tool", Wanted("pypi", ("pkg[cli]",), "tool", ())),
        ("uv tool run --with mcp<2 server", Wanted("pypi", ("server", "mcp<2"), "server", ())),
        ("pipx run --spec pkg==2 tool", Wanted("pypi", ("pkg==2",), "tool", ())),
    ],
)  # fmt: skip
def test_what_is_to_be_got_is_read_from_the_command(text: str, found: Wanted) -> None:
    assert wanted(tuple(text.split())) == found


@pytest.mark.parametrize("text", ["node server.js", "python -m server", "uv run server", "npm start"])
def test_other_commands_are_left_alone(text: str) -> None:
    assert wanted(tuple(text.split())) is None


@pytest.mark.parametrize(
    "text",
    [
        "npx",
        "npx -y",
        "npx -c ls",
        "npx ./folder",
        "npx github:user/repository",
        "npx -y file:/etc",
        "uvx --from git+https://example.org/x y",
        "uvx --python 3.12 server",
        "uvx --index-url=https://example.org server",
    ],
)
def test_what_can_t_be_got_ahead_of_time_is_refused(text: str) -> None:
    with pytest.raises(SandboxError) as refused:
        wanted(tuple(text.split()))
    assert refused.value.code == "invalid_spec"


@pytest.mark.parametrize(
    ("programs", "chosen"),
    [("index.js", "server-y"), ({"other": "a.js"}, "other"), ({"a": "a.js", "server-y": "b.js"}, "server-y")],
)
def test_the_program_of_a_package_is_chosen_as_npx_does(tmp_path: Path, programs: object, chosen: str) -> None:
    folder = tmp_path / "node_modules" / "@x" / "server-y"
    folder.mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps({"bin": programs}))
    scripts = tmp_path / "node_modules" / ".bin"
    scripts.mkdir()
    for name in programs if isinstance(programs, dict) else ["server-y"]:
        (scripts / name).write_text("#!/bin/sh\n")
    told = command(Wanted("npm", ("@x/server-y@2",), None, ("/a",)), tmp_path)
    assert told == [f"/packages/node_modules/.bin/{chosen}", "/a"]


def test_a_package_without_such_a_program_says_what_it_has(tmp_path: Path) -> None:
    scripts = tmp_path / "venv" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "other").touch()
    with pytest.raises(SandboxError, match="no program tool") as refused:
        command(Wanted("pypi", ("pkg",), "tool", ()), tmp_path)
    assert "other" in refused.value.hint
