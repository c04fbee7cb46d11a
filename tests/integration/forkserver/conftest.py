"""A fork server that runs, and sandboxes to be told what to do: see `tests/environments/code_server.py`."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sandboxes.forkserver.runtime import ForkServer
from sandboxes.runtime import Folders
from sandboxes.types import Exited, Frozen, Kind, Limits, Pipes, Report, Spec

ENVIRONMENTS = Path(__file__).parents[2] / "environments"


class Raised(Exception):
    """What code in a sandbox raised, in words."""


class Sandbox:
    """One that runs."""

    def __init__(self, server: ForkServer, name: str, pipes: Pipes) -> None:
        self.server, self.name, self.pipes = server, name, pipes

    def say(self, code: str) -> None:
        os.write(self.pipes.stdin, json.dumps({"code": code}).encode() + b"\n")

    async def heard(self) -> Any:
        """The next answer. Raises `Raised`, EOFError."""
        told = json.loads(await read_line(self.pipes.stdout))
        if "raised" in told:
            raise Raised(told["raised"])
        return told["result"]

    async def run(self, code: str) -> Any:
        """What the code leaves in `result`. Raises `Raised`, EOFError."""
        self.say(code)
        return await self.heard()

    async def shell(self, command: str) -> tuple[int, str]:
        """Exit status, and what it printed."""
        code = f"import subprocess\np = subprocess.run({command!r}, shell=True, stdout=-1, stderr=-2, text=True)\n"
        status, printed = await self.run(code + "result = p.returncode, p.stdout")
        return status, printed


async def read_line(descriptor: int) -> bytes:
    """Raises EOFError."""
    loop = asyncio.get_running_loop()
    told = bytearray()
    while not told.endswith(b"\n"):
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(descriptor, lambda waiting=ready: waiting.done() or waiting.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(descriptor)
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            raise EOFError
        told += chunk
    return bytes(told)


class Server:
    """The fork server with all that tests made on it."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.deaths: dict[str, asyncio.Future[Exited]] = {}
        self.runtime = ForkServer(Folders(state), self._died)
        self._made: list[Sandbox] = []
        self._images: list[str] = []
        self._number = 0

    def _died(self, exited: Exited) -> None:
        if (waiting := self.deaths.get(exited.sandbox)) is not None and not waiting.done():
            waiting.set_result(exited)

    def name(self) -> str:
        self._number += 1
        return f"t{self._number}"

    async def start(self, spec: Spec, origin: str | None = None) -> Sandbox:
        await self.runtime.prepare(spec)
        name = self.name()
        self.deaths[name] = asyncio.get_running_loop().create_future()
        sandbox = Sandbox(self.runtime, name, await self.runtime.start(spec, name, origin))
        self._made.append(sandbox)
        return sandbox

    async def freeze(self, sandbox: Sandbox) -> Frozen:
        frozen = await self.runtime.freeze(sandbox.name, self.name())
        self._images.append(frozen.image)
        return frozen

    async def fork(self, spec: Spec, sandbox: Sandbox) -> Sandbox:
        return await self.start(spec, (await self.freeze(sandbox)).image)

    async def death(self, sandbox: Sandbox) -> Exited:
        async with asyncio.timeout(20):
            return await self.deaths[sandbox.name]

    async def clear(self) -> None:
        """Removes what a test has left."""
        for sandbox in self._made:
            await self.runtime.remove(sandbox.name)
            for descriptor in sandbox.pipes.all:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        for image in self._images:
            await self.runtime.drop(image)
        self._made.clear()
        self._images.clear()


def code_spec(
    entry: str = "Code", argument: str = "", limits: Limits | None = None, python: str = sys.executable
) -> Spec:
    return Spec(
        kind=Kind.FORK,
        entry=f"code_server:{entry}",
        argument=argument,
        python=python,
        pythonpath=(str(ENVIRONMENTS),),
        limits=limits or Limits(),
    )


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def forking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    state = tmp_path_factory.mktemp("keeper")
    for name in ("templates", "sandboxes", "images"):
        (state / name).mkdir()
    server = Server(state)
    await server.runtime.recover()
    report: Report = await server.runtime.report()
    if not report.works:
        pytest.skip(f"the fork server doesn't work here: {report.reason}")
    try:
        yield server
    finally:
        await server.runtime.aclose()


@pytest_asyncio.fixture(loop_scope="session")
async def server(forking: Server) -> AsyncIterator[Server]:
    yield forking
    await forking.clear()


@pytest.fixture
def limited(forking: Server) -> None:
    """Only where limits hold."""
    if forking.runtime._groups is None:
        pytest.skip(f"no control groups here: {forking.runtime._no_groups}")


@pytest.fixture
def spec() -> Spec:
    return code_spec()
