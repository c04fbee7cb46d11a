"""Commands that misbehave, over CRIU: each error names the server and says what it printed, and others go on."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from megamcp.client import Conflict, MegaMCPError, UpstreamError
from sandboxes.criu import bundle
from tests.integration.criu.conftest import Host
from tests.integration.sandboxed.conftest import Sandboxed, database_with, gateway_on

pytestmark = pytest.mark.criu

SERVER = Path(__file__).parents[1] / "dataplane" / "hostile_server.py"
COMMANDS = {
    "missing": ["no-such-server"],
    "dies": ["/bin/sh", "-c", "echo loading >&2; echo the model file is corrupt >&2; exit 7"],
    "refuses": ["/usr/bin/python3", SERVER.name, "--refuse"],
    "daemon": ["/usr/bin/python3", SERVER.name, "--daemon"],
    "noisy": ["/usr/bin/python3", SERVER.name, "--noisy"],
    "stubborn": ["/usr/bin/python3", SERVER.name, "--stubborn"],
}
MOST = 1_000_000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bad(host: Host, postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sandboxed]:
    programs = host.folder / "programs"
    programs.mkdir(mode=0o755)
    shutil.copy(SERVER, programs)
    folders = []
    for name, command in COMMANDS.items():
        folder = tmp_path_factory.mktemp(name)
        server = {"command": command[0], "args": command[1:], "cwd": str(programs)}
        (folder / "mcp.json").write_text(json.dumps({"name": name, "mcpServers": {name: server}}))
        folders.append(folder)
    async with (
        database_with(postgres_dsn, *folders) as dsn,
        gateway_on(dsn, sandbox_socket=host.folder / "s", max_result_bytes=MOST) as running,
    ):
        yield running


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("missing", "tool_server_start_failed", "no program 'no-such-server'"),
        ("dies", "tool_server_start_failed", "status 7).\nloading\nthe model file is corrupt"),
        ("refuses", "tool_server_protocol", "refuses MCP's handshake"),
        ("daemon", "tool_server_start_failed", "status 0).\nto work, child"),
    ],
)
async def test_a_command_that_can_not_be_started_is_named_with_its_last_words(
    bad: Sandboxed, name: str, code: str, words: str
) -> None:
    rollout = await bad.client.open(name)
    for _ in range(2):  # the second try is not answered otherwise
        with pytest.raises(MegaMCPError) as told:
            await rollout.call("echo", value="x")
        assert told.value.code == code
        assert repr(name) in str(told.value)
        assert words in str(told.value)


async def test_junk_and_floods_of_output_harm_nobody_and_are_no_obstacle_to_a_checkpoint(bad: Sandboxed) -> None:
    rollout = await bad.client.open("noisy")
    assert (await rollout.call("garbage")).text == "clean"
    assert (await rollout.call("loud", seconds=0.5, stdout=True)).text == "said"
    await rollout.call("change", name="later")
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(MegaMCPError):  # while it is still loud
                point = await rollout.checkpoint()
                break
    (fork,) = await point.fork()
    assert (await fork.call("later", a=1)).text == '{"a": 1}'


async def test_a_line_without_an_end_is_cut_off_and_its_server_with_it(bad: Sandboxed) -> None:
    rollout, other = await bad.client.open_many("noisy", 2)
    assert (await other.call("echo", value="before")).text == "before"
    for tool in ("huge", "huge_last"):
        with pytest.raises(UpstreamError) as told:
            await rollout.call(tool, bytes=2 * MOST)
        assert told.value.code == "result_too_large"
        assert (await rollout.call("echo", value="goes on")).text == "goes on"
    with pytest.raises(UpstreamError) as told:
        await rollout.call("endless")
    assert told.value.code == "result_too_large"
    with pytest.raises(Conflict, match="it wrote a line of more than") as lost:
        await rollout.call("echo", value="x")
    assert lost.value.code == "state_lost"
    assert (await other.call("echo", value="after")).text == "after"


async def test_a_death_in_a_call_is_told_with_its_reason(bad: Sandboxed) -> None:
    rollout = await bad.client.open("noisy")
    for _ in range(2):  # nothing was answered before: it is made again
        with pytest.raises(UpstreamError, match="'noisy' ended during a call") as told:
            await rollout.call("die", cause="boredom")
        assert "I die of boredom" in str(told.value.hint)
    await rollout.call("echo", value="x")
    with pytest.raises(UpstreamError):
        await rollout.call("orphan")
    with pytest.raises(Conflict) as lost:
        await rollout.call("echo", value="x")
    assert lost.value.code == "state_lost"
    assert not running("time.sleep(600)")  # what it had left running ended with it


async def test_who_ignores_sigterm_ends_with_its_rollout(bad: Sandboxed) -> None:
    rollout = await bad.client.open("stubborn")
    await rollout.call("echo", value="x")
    assert (await rollout.call("deaf")).text == "what?"  # and reads no more
    assert running("--stubborn")
    await rollout.close()
    assert not running("--stubborn")


def running(word: str) -> bool:
    """Whether a process of a user of sandboxes has a word in its command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.stat().st_uid >= bundle.FIRST_UID and word.encode() in path.read_bytes())
    return any(found)
