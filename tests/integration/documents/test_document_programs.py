"""An unmodified MCP server that loads and dumps its document by two tools: checkpoints, forks, rollbacks, deaths."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from megamcp.client import MegaMCPError, Rollout, Unprocessable, UpstreamError
from tests.integration.documents.conftest import Library

JOTTER = Path(__file__).parents[2] / "environments" / "jotter.py"


def text(name: str = "jotter", takes: str = "object", load: str = "import_state", more: str = "") -> str:
    return (
        f'name = "{name}"\n[servers.jotter]\ncommand = "{sys.executable}"\nargs = ["{JOTTER}"]\n'
        f'env = {{ JOTTER_TAKES = "{takes}" }}\n'
        f'[servers.jotter.state]\nkind = "document"\nload = "{load}"\ndump = "export_state"\n{more}'
    )


async def load(library: Library, folder: Path, content: str) -> None:
    (folder / "environment.toml").write_text(content)
    await library.client.load_environment(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def jotters(library: Library, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Library]:
    await load(library, tmp_path_factory.mktemp("jotter"), text())
    yield library


async def jottings(rollout: Rollout) -> Any:
    return json.loads((await rollout.call("jottings")).text)


async def test_agents_see_the_programs_tools_but_for_two(jotters: Library) -> None:
    rollout = await jotters.client.open("jotter")
    names = [tool.name for tool in await rollout.tools()]
    assert names == ["jot", "jottings", "refuse", "crash", "junk", "process", "secrets"]
    assert json.loads((await rollout.call("secrets")).text) == [], "it is not told where its document is kept"
    for hidden in ("import_state", "export_state"):
        with pytest.raises(MegaMCPError) as refused:
            await rollout.call(hidden, document={"jottings": ["forged"]})
        assert refused.value.code == "unknown_tool"
    assert await jottings(rollout) == []


async def test_a_programs_document_forks_and_rolls_back(jotters: Library) -> None:
    rollout = await jotters.client.open("jotter")
    await rollout.call("jot", text="kept")
    point = await rollout.checkpoint()
    assert (await rollout.call("jot", text="parent")).text == "2"
    left, right = await point.fork(count=2)
    await asyncio.gather(left.call("jot", text="left"), right.call("jot", text="right"))
    assert await jottings(left) == ["kept", "left"]
    assert await jottings(right) == ["kept", "right"]
    assert await jottings(rollout) == ["kept", "parent"]
    found = (await rollout.diff(point)).servers["jotter"].document
    assert found is not None
    assert [(place.path, place.value) for place in found.added] == [("/jottings/1", "parent")]
    await rollout.rollback(point)
    assert await jottings(rollout) == ["kept"]
    assert (await rollout.digest()).digest == point.digest


async def test_an_unbroken_run_stays_in_one_process(jotters: Library) -> None:
    rollout = await jotters.client.open("jotter")
    seen = set()
    for number in range(4):
        await rollout.call("jot", text=str(number))
        seen.add((await rollout.call("process")).text)
    assert len(seen) == 1


async def test_two_gateways_see_each_others_jottings(jotters: Library) -> None:
    here = await jotters.client.open("jotter")
    there = await jotters.other_client.rollout(here.id)
    for number in range(4):
        await (here, there)[number % 2].call("jot", text=str(number))
    assert await jottings(here) == await jottings(there) == ["0", "1", "2", "3"]


async def test_a_tool_that_refuses_changes_nothing(jotters: Library) -> None:
    rollout = await jotters.client.open("jotter")
    refused = await rollout.call("refuse", text="half")
    assert refused.is_error
    assert refused.text == "I would rather not."
    assert await jottings(rollout) == []


@pytest.mark.parametrize(("tool", "said"), [("crash", "it has ended"), ("junk", "no message")])
async def test_a_program_that_breaks_costs_nothing_but_its_call(jotters: Library, tool: str, said: str) -> None:
    rollout = await jotters.client.open("jotter")
    await rollout.call("jot", text="kept")
    broken = await rollout.call(tool, text="lost")
    assert broken.is_error
    assert said in broken.text
    assert await jottings(rollout) == ["kept"]
    if tool == "crash":
        assert "something is very wrong" in broken.text


async def test_a_program_that_is_killed_between_calls_is_started_again(jotters: Library) -> None:
    rollout = await jotters.client.open("jotter")
    await rollout.call("jot", text="kept")
    os.kill(int((await rollout.call("process")).text), signal.SIGKILL)
    assert (await rollout.call("jot", text="after")).text == "2"
    assert await jottings(rollout) == ["kept", "after"]


async def test_a_load_may_take_the_document_as_text(library: Library, tmp_path: Path) -> None:
    (tmp_path / "first.json").write_text('{"jottings": ["from the file"]}')
    await load(library, tmp_path, text("texter", "string", more='initial = "first.json"\n'))
    rollout = await library.client.open("texter")
    await rollout.call("jot", text="more")
    assert await jottings(rollout) == ["from the file", "more"]


async def test_a_document_that_the_program_cannot_load_says_so(library: Library, tmp_path: Path) -> None:
    (tmp_path / "first.json").write_text('{"walls": 4}')
    await load(library, tmp_path, text("unloadable", more='initial = "first.json"\n'))
    refused = await (await library.client.open("unloadable")).call("jottings")
    assert refused.code == "document_failed"
    assert "KeyError: 'jottings'" in refused.text, "its last words"


async def test_a_program_without_the_named_tools_does_not_start(library: Library, tmp_path: Path) -> None:
    await load(library, tmp_path, text("toolless", load="absorb"))
    with pytest.raises(UpstreamError, match="it has no tool 'absorb'"):
        await (await library.client.open("toolless")).call("jottings")


async def test_a_program_at_a_url_with_tools_for_its_document_is_refused_at_load(
    library: Library, tmp_path: Path
) -> None:
    state = 'kind = "document"\nload = "import_state"\ndump = "export_state"\n'
    url = 'name = "far"\n[servers.jotter]\nurl = "http://127.0.0.1:9/mcp"\n[servers.jotter.state]\n'
    with pytest.raises(Unprocessable, match=r"servers\.jotter: .*a program at a url serves others too"):
        await load(library, tmp_path, url + state)


async def test_a_command_without_the_names_of_its_tools_is_refused_at_load(library: Library, tmp_path: Path) -> None:
    with pytest.raises(Unprocessable, match="names of its tools"):
        await load(library, tmp_path, text().replace('load = "import_state"\n', ""))
