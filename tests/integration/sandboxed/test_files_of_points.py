"""What differs between two points of a server in a sandbox, and the digest at one."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megamcp.cli import app
from megamcp.client import Conflict, DeadlineExceeded
from tests.integration.sandboxed.conftest import MEMO, Sandboxed, database_with, environment, gateway_on


async def test_files_that_were_added_changed_and_removed_are_told_with_their_lines(running: Sandboxed) -> None:
    rollout = await running.client.open("memo")
    await rollout.call("write", path="kept/a.txt", text="one\ntwo\n")
    await rollout.call("write", path="gone.txt", text="gone\n")
    point = await rollout.checkpoint()
    await rollout.call("write", path="kept/a.txt", text="one\nthree\n")
    await rollout.call("remove", path="gone.txt")
    await rollout.call("write", path="new.txt", text="new\n")
    files = (await rollout.diff(point)).servers["memo"].files
    assert files is not None
    assert [change.path for change in files.added] == ["new.txt"]
    assert [change.path for change in files.removed] == ["gone.txt"]
    (changed,) = files.changed
    assert (changed.path, changed.kind, changed.size) == ("kept/a.txt", "file", 10)
    assert changed.text is not None
    assert "-two\n+three\n" in changed.text
    whole = (await rollout.diff("base", "head")).servers["memo"].files
    assert whole is not None
    assert [change.path for change in whole.added] == ["kept", "kept/a.txt", "new.txt"]
    back = (await rollout.diff("head", point)).servers["memo"].files
    assert back is not None
    assert [change.path for change in back.removed] == ["new.txt"]


async def test_a_point_does_not_differ_from_itself_nor_a_fork_from_its_checkpoint(running: Sandboxed) -> None:
    rollout = await running.client.open("memo")
    assert (await rollout.diff()).servers == {}
    await rollout.call("put", key="k", value="v")
    point = await rollout.checkpoint()
    assert (await rollout.diff(point)).servers == {}
    await rollout.call("put", key="k", value="later")
    (fork,) = await point.fork()
    assert (await fork.diff(point)).servers == {}
    await fork.call("put", key="k", value="of the fork")
    files = (await fork.diff(point)).servers["memo"].files
    assert files is not None
    assert [change.path for change in files.changed] == ["items.json"]
    found = (await rollout.diff(await fork.checkpoint(), "head")).servers["memo"].files
    assert found is not None
    assert "later" in (found.changed[0].text or "")


async def test_a_digest_says_opaque_where_memory_belongs_to_the_state(running: Sandboxed) -> None:
    rollout = await running.client.open("memo")
    untouched = await rollout.digest()
    assert untouched.digest is not None  # it stands as its environment starts
    await rollout.call("put", key="k", value="v")
    found = await rollout.digest()
    assert (found.digest, found.servers) == (None, {"memo": "opaque"})
    assert found.files["memo"] != untouched.files["memo"]
    point = await rollout.checkpoint()
    assert point.digest is None
    assert (await rollout.digest(point)).files == found.files
    await rollout.call("put", key="k", value="w")
    assert (await rollout.digest()).files != found.files
    await rollout.call("put", key="k", value="v")
    assert (await rollout.digest()).files == found.files  # equal files, whatever way led there
    assert (await rollout.digest("base")).files == untouched.files


async def test_reading_the_head_waits_for_a_call_and_says_when_that_takes_too_long(running: Sandboxed) -> None:
    rollout = await running.client.open("memo")
    await rollout.call("put", key="k", value="v")
    point = await rollout.checkpoint()
    slow = asyncio.create_task(rollout.call("put", key="slow", value="v", pause=0.4))
    await _runs(rollout.id, running)
    files = (await rollout.diff(point)).servers["memo"].files
    assert slow.done() or (await slow)
    assert files is not None
    assert "slow" in (files.changed[0].text or "")
    hanging = asyncio.create_task(rollout.call("hang"))
    await _runs(rollout.id, running)
    with pytest.raises(DeadlineExceeded) as refused:
        await rollout.digest()
    assert refused.value.code == "rollout_busy"
    assert (await rollout.digest(point)).files  # what can't change is read meanwhile
    await rollout.rollback(point)
    await asyncio.gather(hanging, return_exceptions=True)


async def _runs(rollout: str, running: Sandboxed) -> None:
    query = "select exists (select 1 from megamcp.events where rollout = $1 and state = 'running')"
    while not await running.gateway.services.store.value(query, rollout):
        await asyncio.sleep(0.01)


async def test_files_that_died_with_their_sandbox_are_no_empty_diff(running: Sandboxed) -> None:
    rollout = await running.client.open("memo")
    await rollout.call("put", key="k", value="v")
    point = await rollout.checkpoint()
    await rollout.call("put", key="k", value="lost")
    with pytest.raises(Exception, match="ended"):
        await rollout.call("crash", words="bye")
    for ask in (rollout.diff(point), rollout.digest()):
        with pytest.raises(Conflict) as refused:
            await ask
        assert refused.value.code == "state_lost"
        assert point.id in str(refused.value.hint)
    assert (await rollout.diff("base", point)).servers["memo"].files is not None


async def test_a_diff_lists_so_many_files_and_says_that_there_are_more(postgres_dsn: str, tmp_path: Path) -> None:
    folder = environment(tmp_path / "memo", MEMO, "memo_server")
    async with (
        database_with(postgres_dsn, folder) as dsn,
        gateway_on(dsn, sandbox_dir=tmp_path / "keeper", diff_rows=2) as small,
    ):
        rollout = await small.client.open("memo")
        for number in range(4):
            await rollout.call("write", path=f"{number}.txt", text="x")
        files = (await rollout.diff()).servers["memo"].files
        assert files is not None
        assert (len(files.added), files.truncated) == (2, True)


async def test_the_command_line_shows_files_and_their_lines(running: Sandboxed) -> None:
    rollout = await running.client.open("memo")
    await rollout.call("write", path="a.txt", text="one\n")
    point = await rollout.checkpoint()
    await rollout.call("write", path="a.txt", text="two \x1b[31m\n")
    cli = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80", "MEGAMCP_URL": running.gateway.url})

    async def run(*words: str) -> str:
        result = await asyncio.to_thread(cli.invoke, app, list(words))
        assert result.exit_code == 0, result.output
        return result.stdout

    shown = await run("rollout", "diff", rollout.id, "--from", point.id)
    assert "memo files  ~1" in shown
    assert "~ a.txt  10 bytes" in shown
    assert "-one" in shown
    assert "+two \\x1b[31m" in shown  # a terminal is not told to do anything
    assert "opaque" in await run("rollout", "digest", rollout.id)
    document = json.loads(await run("rollout", "diff", rollout.id, "--json"))
    assert document["servers"]["memo"]["files"]["added"][0]["path"] == "a.txt"
