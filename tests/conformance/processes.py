"""The processes behind a run: the everything-server, and a real `megamcp serve` with its embedded PostgreSQL."""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.conformance.suite import ROOT

START_S, STOP_S = 120, 60
URL = re.compile(rb"https?://\S+")


@asynccontextmanager
async def everything(folder: Path, era: str | None) -> AsyncIterator[str]:
    """The URL of an everything-server over HTTP; its log is `everything.log` in the folder."""
    command = (sys.executable, "-m", "tests.conformance.everything", *(("--era", era) if era else ()))
    with (folder / "everything.log").open("wb") as errors:
        async with _running(command, errors.fileno(), asyncio.subprocess.PIPE) as process:
            assert process.stdout is not None
            yield await _line_with_url(process.stdout)


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[str]:
    """The URL of a gateway that knows no environments; its log is `gateway.log` in the folder."""
    serve = ("serve", "--port", "0", "--no-bundled", "--data-dir", str(folder / "data"))
    log = folder / "gateway.log"
    with log.open("wb") as errors:
        async with _running((sys.executable, "-m", "megamcp.cli", *serve), errors.fileno(), None) as process:
            async with asyncio.timeout(START_S):
                while (ready := re.search(rb"megamcp is ready at (\S+)", log.read_bytes())) is None:
                    if process.returncode is not None:
                        raise RuntimeError(f"the gateway did not start:\n{log.read_text()[-2000:]}")
                    await asyncio.sleep(0.05)
            yield ready[1].decode()


async def _line_with_url(output: asyncio.StreamReader) -> str:
    async with asyncio.timeout(START_S):
        line = await output.readline()
    if (url := URL.search(line)) is None:
        raise RuntimeError("the everything-server did not start")
    return url[0].decode()


@asynccontextmanager
async def _running(
    command: tuple[str, ...], errors: int, output: int | None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process in a group of its own, so that Ctrl-C is ours to handle; ended by SIGTERM, or else by SIGKILL."""
    # The user's settings are for the user's own gateway.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MEGAMCP_")}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
