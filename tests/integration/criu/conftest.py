"""A keeper as a process, with its CRIU runtime; skipped with the runtime's own reason where that doesn't work."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandboxes.client import Client
from sandboxes.types import Exited, Kind, Limits, Pipes, Spec

PROGRAM = """
import json, os, sys
kept = {}
for line in sys.stdin:
    try:
        told = eval(compile(line, "line", "eval"), {"kept": kept, "os": os})
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"
    print(json.dumps(told, default=str), flush=True)
"""
"""Evaluates an expression a line. `kept` is its memory."""


def spec(*, limits: Limits | None = None, environ: dict[str, str] | None = None, network: bool = False) -> Spec:
    return Spec(
        kind=Kind.CRIU,
        command=("/usr/bin/python3", "-c", PROGRAM),
        limits=limits or Limits(),
        environ=environ or {},
        network=network,
    )


class Talk:
    """A conversation with a sandbox. Closes its pipes."""

    def __init__(self, pipes: Pipes) -> None:
        self.pipes = pipes

    async def __call__(self, line: str) -> object:
        os.write(self.pipes.stdin, line.encode() + b"\n")
        async with asyncio.timeout(20):
            return json.loads(await asyncio.to_thread(self._line))

    def _line(self) -> bytes:
        told = b""
        while not told.endswith(b"\n"):
            more = os.read(self.pipes.stdout, 1 << 16)
            if not more:
                raise EOFError(os.read(self.pipes.stderr, 1 << 16).decode())
            told += more
        return told

    def close(self) -> None:
        for descriptor in self.pipes.all:
            os.close(descriptor)


class Host:
    """A keeper that can be killed and started again on its state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.client = Client(str(folder / "s"))
        self.talks: list[Talk] = []
        self.exited: asyncio.Queue[Exited] = asyncio.Queue()
        self.client.on_exit = self.exited.put
        self.process: asyncio.subprocess.Process | None = None

    async def begin(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sandboxes", "--socket", str(self.folder / "s"), "--state", str(self.state),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert await self.process.stdout.readline() == b"ready\n"

    async def end(self, *, kill: bool = False) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.kill() if kill else self.process.terminate()
        await self.process.wait()

    async def start(self, spec: Spec, sandbox: str, origin: str | None = None) -> Talk:
        talk = Talk(await self.client.start(spec, sandbox, origin))
        self.talks.append(talk)
        return talk


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def host() -> AsyncIterator[Host]:
    folder = Path(tempfile.mkdtemp(prefix="criu-"))
    host = Host(folder)
    await host.begin()
    try:
        reports = {report.kind: report for report in await host.client.reports()}
        if not reports[Kind.CRIU].works:
            pytest.skip(f"CRIU: {reports[Kind.CRIU].reason}")
        yield host
    finally:
        for talk in host.talks:
            talk.close()
        await host.client.aclose()
        await host.end()
        shutil.rmtree(folder)
