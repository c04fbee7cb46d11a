"""The gateway's own keeper: started, found again, started anew, ended."""

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from megamcp.errors import Unavailable
from megamcp.sandboxed.own import OwnKeeper, socket_path
from megamcp.settings import Settings
from sandboxes.client import Client


async def name_of(socket: str) -> str:
    client = Client(socket)
    try:
        return await client.hello()
    finally:
        await client.aclose()


def pids(state: Path) -> list[int]:
    """Keepers of a folder."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(state) in (process.info["cmdline"] or ()) and "sandboxes" in process.info["cmdline"]
    ]


async def test_a_keeper_ends_with_its_gateway(tmp_path: Path) -> None:
    async with OwnKeeper(Settings(sandbox_dir=tmp_path / "s")) as keeper:
        assert await name_of(keeper.socket)
        assert len(pids(tmp_path / "s")) == 1
    assert pids(tmp_path / "s") == []


async def test_a_keeper_that_dies_is_started_again_at_the_same_place_under_the_same_name(tmp_path: Path) -> None:
    async with OwnKeeper(Settings(sandbox_dir=tmp_path / "s")) as keeper:
        name = await name_of(keeper.socket)
        (first,) = pids(tmp_path / "s")
        psutil.Process(first).kill()
        async with asyncio.timeout(20):
            while pids(tmp_path / "s") in ([], [first]) or not Path(keeper.socket).exists():
                await asyncio.sleep(0.05)
            while keeper._link is None:
                await asyncio.sleep(0.05)
        assert await name_of(keeper.socket) == name
    assert pids(tmp_path / "s") == []


async def test_a_keeper_whose_gateway_was_killed_is_found_by_the_next(tmp_path: Path) -> None:
    state = tmp_path / "s"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sandboxes", "--linger", "30"),
        *("--socket", str(socket_path(state)), "--state", str(state)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    async with OwnKeeper(Settings(sandbox_dir=state)) as keeper:
        assert await name_of(keeper.socket)
        assert pids(state) == [process.pid]
    assert await process.wait() == 0


async def test_a_keeper_that_nobody_comes_for_ends_by_itself(tmp_path: Path) -> None:
    state = tmp_path / "s"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sandboxes", "--linger", "0.2"),
        *("--socket", str(socket_path(state)), "--state", str(state)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(20):
        assert await process.wait() == 0


async def test_a_long_path_gets_its_socket_elsewhere_and_nothing_of_it_stays(tmp_path: Path) -> None:
    state = tmp_path / ("long" * 30)
    async with OwnKeeper(Settings(sandbox_dir=state)) as keeper:
        assert len(keeper.socket) < 100
        assert await name_of(keeper.socket)
        place = Path(keeper.socket).parent
        assert place.stat().st_mode & 0o077 == 0
    assert not place.exists()


async def test_two_gateways_do_not_share_a_folder_by_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamcp.sandboxed.own._ENDING_S", 0.1)
    async with OwnKeeper(Settings(sandbox_dir=tmp_path / "s")):
        with pytest.raises(Unavailable, match="another gateway has it"):
            await OwnKeeper(Settings(sandbox_dir=tmp_path / "s")).__aenter__()


async def test_a_keeper_that_can_not_start_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("no folder")
    keeper = OwnKeeper(Settings(sandbox_dir=tmp_path / "s"))
    with pytest.raises(Unavailable) as told:
        await asyncio.wait_for(keeper.__aenter__(), 10)
    assert told.value.code == "sandboxes_unavailable"
