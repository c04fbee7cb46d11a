"""`megamcp demo` ends by itself, says only what is true, and leaves nothing."""

import asyncio
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PATIENCE_S = 110


async def start(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    """The demo, with its temporary files in a folder of ours, so that what is left can be seen."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megamcp.cli", "demo", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
        env={**os.environ, "TMPDIR": str(folder), "MEGAMCP_DATABASE_URL": "postgresql://nobody@/nowhere"},
    )


def using(folder: Path) -> list[int]:
    """Processes that name the folder on their command line or work in it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            place = str((process / "cwd").readlink())
        except OSError:
            continue
        if str(folder) in command or place.startswith(str(folder)):
            found.append(int(process.name))
    return found


def left_alone(folder: Path) -> None:
    """Nothing is left of the demo. Its PostgreSQL may take a moment to go."""
    give_up = time.monotonic() + 20
    while (left := using(folder)) and time.monotonic() < give_up:
        time.sleep(0.1)
    assert left == []
    assert list(folder.glob("megamcp-demo-*")) == []


@pytest.fixture
def folder(scratch_folder: Path) -> Path:
    made = scratch_folder / "demo"
    made.mkdir(mode=0o755, exist_ok=True)
    return made


async def test_the_demo_shows_what_it_promises_and_leaves_nothing(folder: Path) -> None:
    process = await start(folder)
    out, said = (part.decode() for part in await asyncio.wait_for(process.communicate(), PATIENCE_S))
    assert process.returncode == 0, out + said
    lines = out.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 80
    for claim in (
        "the agent read and wrote through plain MCP",
        "each fork holds its own change and no other's",
        "the rollout that they came from is untouched",
        "the digest is the checkpoint's again",
        "not one row differs",
        "B, C and D noticed nothing",
    ):
        assert f"✓ {claim}" in out
    assert "claims held" in lines[-2]
    left_alone(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
async def test_a_demo_that_is_stopped_half_way_leaves_nothing(folder: Path, number: signal.Signals) -> None:
    process = await start(folder)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        while b"ready at" not in await process.stdout.readline():
            pass
        process.send_signal(number)
        _, said = await process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in said
    left_alone(folder)


async def test_a_gateway_that_is_not_there_is_told(folder: Path) -> None:
    process = await start(folder, "--url", "http://127.0.0.1:9")
    out, said = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 1
    assert b"gateway_unreachable" in said
    assert b"Traceback" not in out + said
