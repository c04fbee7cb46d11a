"""The gateway over a Docker engine: what a rollout gets back, and what it is told when something has gone."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from megamcp.client import Client, MegaMCPError, Rollout, Unavailable, Unprocessable, UpstreamError
from megamcp.sandboxed.own import OwnKeeper
from megamcp.serve import READY
from megamcp.settings import Settings
from tests.integration.docker.conftest import docker
from tests.integration.sandboxed.conftest import Sandboxed, database_with, gateway_on

pytestmark = [pytest.mark.docker, pytest.mark.slow]

SERVER = Path(__file__).parent / "keeping_server.py"
ENGINE = "/var/run/docker.sock"
PATIENCE_S = 60


@dataclass(eq=False)
class Way:
    """The way to the engine: a socket of the test's own, which can be away."""

    path: Path
    server: asyncio.Server | None = None
    open: set[asyncio.StreamWriter] = field(default_factory=set)

    async def there(self) -> None:
        if self.server is not None:
            return
        self.server = await asyncio.start_unix_server(self._pass, self.path)

    async def away(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None
            self.path.unlink(missing_ok=True)
        for writer in list(self.open):
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_unix_connection(ENGINE)
        self.open |= {writer, ours}
        try:
            await asyncio.gather(_copy(reader, ours), _copy(theirs, writer))
        finally:
            self.open -= {writer, ours}
            for one in (writer, ours):
                one.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()


@dataclass(frozen=True, slots=True)
class House:
    running: Sandboxed
    way: Way
    dsn: str
    keeper: str

    @property
    def client(self) -> Client:
        return self.running.client

    async def begun(self) -> Rollout:
        """A rollout that keeps one word."""
        await self.way.there()
        rollout = await self.client.open("keeping")
        await rollout.call("keep", word="first")
        return rollout

    async def container(self, rollout: Rollout) -> str:
        name = await self.running.gateway.services.store.value(
            "select name from megamcp.sandboxes where rollout = $1", rollout.id
        )
        return docker("ps", "-aq", "--no-trunc", "--filter", f"label=megamcp.name={name}").strip()


def toml(name: str, image: str) -> str:
    return f"""
name = "{name}"
[servers.{name}]
command = "python3"
args = ["-u", "keeping_server.py"]
[servers.{name}.state]
kind = "process"
files = "start"
image = "{image}"
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def house(base_image: str, postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folders = []
    for name, image in (("keeping", base_image), ("absent", "megamcp-test/there-is-none:1")):
        folder = tmp_path_factory.mktemp(name)
        (folder / "start").mkdir()
        shutil.copy(SERVER, folder / "start")
        (folder / "environment.toml").write_text(toml(name, image))
        folders.append(folder)
    top = tmp_path_factory.mktemp("docker")
    way = Way(top / "engine.sock")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(way.away)
        dsn = await stack.enter_async_context(database_with(postgres_dsn, *folders))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", f"unix://{way.path}")
            keeper = await stack.enter_async_context(OwnKeeper(Settings(sandbox_dir=top / "keeper")))
        running = await stack.enter_async_context(
            gateway_on(dsn, sandbox_socket=keeper.socket, call_timeout_s=PATIENCE_S)
        )
        yield House(running, way, dsn, keeper.socket)
        # Containers of rollouts that are open would wait for the next gateway.
        await way.there()
        services = running.gateway.services
        for row in await services.store.rows("select id from megamcp.rollouts where status = 'open'"):
            await services.rollouts.close(row["id"])
        label = f"label=megamcp.keeper={hashlib.sha256((top / 'keeper' / 'name').read_bytes()).hexdigest()[:12]}"
        async with asyncio.timeout(60):
            while docker("ps", "-aq", "--filter", label):
                await asyncio.sleep(0.5)
    if images := docker("images", "-q", "--filter", label).split():  # of checkpoints, which nobody has given up
        docker("rmi", "--force", *images)


async def test_an_engine_that_is_not_there_is_told_and_may_come_later(house: House) -> None:
    rollout = await house.client.open("keeping")
    with pytest.raises(Unprocessable) as caught:
        await rollout.call("kept")
    assert caught.value.code == "no_runtime"
    assert "no Docker engine answers" in str(caught.value)
    await house.way.there()
    assert (await rollout.call("kept")).structured == {"file": [], "memory": []}


async def test_files_are_checkpointed_forked_and_rolled_back_and_memory_begins_anew(house: House) -> None:
    rollout = await house.begun()
    point = await rollout.checkpoint()
    assert (await rollout.call("keep", word="second")).structured == {
        "file": ["first", "second"],
        "memory": ["first", "second"],
    }
    (fork,) = await point.fork()
    assert (await fork.call("keep", word="other")).structured == {"file": ["first", "other"], "memory": ["other"]}
    assert [change.path for change in (await rollout.diff(point)).servers["keeping"].files.changed] == ["kept.txt"]
    before = await rollout.digest()
    await rollout.rollback(point)
    assert (await rollout.call("kept")).structured == {"file": ["first"], "memory": []}
    assert (await rollout.digest()).digest == point.digest != before.digest
    containers = [await house.container(rollout), await house.container(fork)]
    await rollout.close()
    await fork.close()
    for container in containers:
        await gone(container)


async def test_a_container_that_was_killed_is_told_of_and_rolled_back(house: House) -> None:
    rollout = await house.begun()
    point = await rollout.checkpoint()
    await rollout.call("keep", word="second")
    docker("kill", await house.container(rollout))
    assert "signal 9" in str(await lost(rollout))
    await rollout.rollback(point)
    assert (await rollout.call("kept")).structured == {"file": ["first"], "memory": []}
    with pytest.raises(UpstreamError) as caught:
        await rollout.call("crash")
    assert "'keeping'" in str(caught.value)
    assert "out of marbles" in str(await lost(rollout))


async def test_an_image_that_is_not_there_is_named_with_its_server(house: House) -> None:
    await house.way.there()
    rollout = await house.client.open("absent")
    with pytest.raises(UpstreamError) as caught:
        await rollout.call("kept")
    assert caught.value.code == "tool_server_start_failed"
    assert "'absent'" in str(caught.value)
    assert "megamcp-test/there-is-none:1" in str(caught.value)
    assert "its name is right" in str(caught.value.hint)


async def test_what_is_lost_with_the_engine_is_told_and_checkpoints_are_good_when_it_is_back(house: House) -> None:
    rollout = await house.begun()
    point = await rollout.checkpoint()
    await rollout.call("keep", word="second")
    container = await house.container(rollout)
    await house.way.away()
    try:
        assert "no Docker engine answers" in str(await lost(rollout))
        await rollout.rollback(point)
        with pytest.raises(Unavailable) as caught:
            await rollout.call("kept")
        assert "'keeping'" in str(caught.value)
        assert "no Docker engine answers" in str(caught.value)
        with pytest.raises(MegaMCPError):
            await (await house.client.open("keeping")).call("kept")
    finally:
        await house.way.there()
    assert (await rollout.call("kept")).structured == {"file": ["first"], "memory": []}
    await gone(container)  # it ran on, and nobody could be asked to end it


async def test_another_gateway_goes_on_with_the_container_of_one_that_was_killed(house: House) -> None:
    await house.way.there()
    environ = os.environ | {
        "MEGAMCP_DATABASE_URL": house.dsn,
        "MEGAMCP_SANDBOX_SOCKET": house.keeper,
        "MEGAMCP_BUNDLED_ENVIRONMENTS": "false",
        "MEGAMCP_PORT": "0",
    }
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "megamcp.cli", "serve", env=environ, stderr=asyncio.subprocess.PIPE
    )
    assert other.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while READY not in (line := (await other.stderr.readline()).decode()):
                assert line, "it has ended"
        async with Client(line.split()[-1]) as client:
            rollout = await client.open("keeping")
            await rollout.call("keep", word="first")
    finally:
        other.send_signal(signal.SIGKILL)
        await other.wait()
    told = await (await house.client.rollout(rollout.id)).call("kept")
    assert told.structured == {"file": ["first"], "memory": ["first"]}


async def lost(rollout: Rollout) -> MegaMCPError:
    """What a rollout is told whose sandbox has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with pytest.raises(MegaMCPError) as caught:
                await rollout.call("kept")
            if caught.value.code == "state_lost":
                assert "'keeping'" in str(caught.value)
                return caught.value
            await asyncio.sleep(0.1)  # the end isn't booked yet


async def gone(container: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while docker("ps", "-aq", "--filter", f"id={container}"):
            await asyncio.sleep(0.1)
