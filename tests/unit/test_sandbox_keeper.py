"""The keeper between its clients and a runtime. The runtime here runs real processes and freezes their files only."""

import asyncio
import contextlib
import os
import select
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandboxes import files
from sandboxes.client import Client
from sandboxes.keeper import Keeper
from sandboxes.runtime import Died, Folders
from sandboxes.types import Exited, Frozen, Kind, Pipes, Report, SandboxError, Spec

SPEC = Spec(kind=Kind.CRIU, command=("/bin/cat",))


class FilesOnly:
    """`cat` in a folder of its own."""

    def __init__(self, folders: Folders, died: Died) -> None:
        self.folders = folders
        self.died = died
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.watching: dict[str, asyncio.Task[None]] = {}
        self.trials = self.most_trials = 0
        self.freezing = asyncio.Event()
        self.freezing.set()

    async def report(self) -> Report:
        self.trials += 1
        self.most_trials = max(self.trials, self.most_trials)
        await asyncio.sleep(0.01)
        self.trials -= 1
        return Report(kind=Kind.CRIU, works=True)

    async def prepare(self, spec: Spec) -> None:
        self.folders.template(spec.template).mkdir(parents=True, exist_ok=True)

    async def start(self, spec: Spec, sandbox: str, origin: str | None) -> Pipes:
        source = self.folders.image(origin) if origin else self.folders.template(spec.template)
        shutil.copytree(source, self.folders.sandbox(sandbox))
        pairs = [os.pipe() for _ in range(3)]
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=pairs[0][0],
            stdout=pairs[1][1],
            stderr=pairs[2][1],
            cwd=self.folders.sandbox(sandbox),
            env={**os.environ, **spec.environ, "PYTHONPATH": os.pathsep.join((*spec.pythonpath, *sys.path))},
        )
        for descriptor in (pairs[0][0], pairs[1][1], pairs[2][1]):
            os.close(descriptor)
        self.processes[sandbox] = process
        self.watching[sandbox] = asyncio.create_task(self.watch(sandbox, process))
        return Pipes(pairs[0][1], pairs[1][0], pairs[2][0])

    async def watch(self, sandbox: str, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        self.died(Exited(sandbox=sandbox, status=status, reason="it ended by itself"))

    async def freeze(self, sandbox: str, image: str) -> Frozen:
        await self.freezing.wait()
        shutil.copytree(self.folders.sandbox(sandbox), self.folders.image(image))
        return Frozen(image=image, bytes=0, memory=False, digest=files.digest(self.folders.image(image)))

    async def remove(self, sandbox: str) -> None:
        if (process := self.processes.pop(sandbox, None)) is None:
            return
        self.watching.pop(sandbox).cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        shutil.rmtree(self.folders.sandbox(sandbox))

    async def drop(self, image: str) -> None:
        shutil.rmtree(self.folders.image(image), ignore_errors=True)

    def pid(self, sandbox: str) -> int:
        return self.processes[sandbox].pid

    def images(self) -> list[str]:
        return [path.name for path in (self.folders.state / "images").iterdir()]

    @asynccontextmanager
    async def tree(self, spec: Spec, name: str | None) -> AsyncIterator[Path]:
        if name is None:
            yield self.folders.template(spec.template)
        else:
            yield self.folders.sandbox(name) if name in self.processes else self.folders.image(name)

    async def recover(self) -> None:
        for name in ("templates", "sandboxes", "images"):
            (self.folders.state / name).mkdir()

    async def aclose(self) -> None:
        for name in list(self.processes):
            await self.remove(name)


class Host:
    """A keeper that runs, and its socket."""

    def __init__(self, keeper: Keeper, runtime: FilesOnly, path: Path, folders: Folders) -> None:
        self.keeper = keeper
        self.runtime = runtime
        self.path = str(path)
        self.folders = folders


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    folders = Folders(tmp_path)
    keeper: Keeper
    runtime = FilesOnly(folders, lambda exited: keeper.died(exited))
    keeper = Keeper("host", {Kind.CRIU: runtime})
    await keeper.recover()
    path = tmp_path / "s"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    serving = asyncio.create_task(keeper.serve(listener))
    yield Host(keeper, runtime, path, folders)
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    listener.close()


@pytest.fixture
async def client(host: Host) -> AsyncIterator[Client]:
    client = Client(host.path)
    yield client
    await client.aclose()


async def echo(pipes: Pipes, text: bytes) -> bytes:
    os.write(pipes.stdin, text)
    return await asyncio.to_thread(os.read, pipes.stdout, 1000)


def let_go(pipes: Pipes) -> None:
    for descriptor in pipes.all:
        os.close(descriptor)


async def test_a_started_sandbox_is_spoken_to_over_its_pipes(client: Client) -> None:
    pipes = await client.start(SPEC, "a")
    assert await echo(pipes, b"hello") == b"hello"
    let_go(pipes)
    inventory = await client.inventory()
    assert [(info.sandbox, info.held) for info in inventory.sandboxes] == [("a", True)]


async def test_a_sandbox_goes_on_when_its_client_is_gone_and_another_takes_it_over(host: Host) -> None:
    first, second = Client(host.path), Client(host.path)
    pipes = await first.start(SPEC, "a")
    let_go(pipes)
    await first.aclose()
    taken = await second.attach("a")
    assert not taken.clean  # half a line may be in the pipes
    assert await echo(taken, b"again") == b"again"
    let_go(taken)
    await second.aclose()


async def test_who_holds_a_sandbox_is_asked_to_let_go(host: Host) -> None:
    first, second = Client(host.path), Client(host.path)
    pipes = await first.start(SPEC, "a")

    async def hand_over(sandbox: str) -> None:
        let_go(pipes)
        await first.detach(sandbox)

    first.on_wanted = hand_over
    taken = await second.attach("a")
    assert taken.clean
    assert await echo(taken, b"x") == b"x"
    let_go(taken)
    await first.aclose()
    await second.aclose()


async def test_a_sandbox_that_is_not_let_go_of_is_busy(host: Host) -> None:
    first, second = Client(host.path), Client(host.path)
    pipes = await first.start(SPEC, "a")
    with pytest.raises(SandboxError) as refused:
        await second.attach("a", patience_s=0.05)
    assert refused.value.code == "busy"
    let_go(pipes)
    await first.aclose()
    await second.aclose()


async def test_two_who_want_the_same_get_it_one_after_the_other(host: Host) -> None:
    clients = [Client(host.path) for _ in range(3)]
    pipes = {0: await clients[0].start(SPEC, "a")}

    def letting_go(number: int) -> None:
        async def hand_over(sandbox: str) -> None:
            let_go(pipes.pop(number))
            await clients[number].detach(sandbox)

        clients[number].on_wanted = hand_over

    async def take(number: int) -> None:
        pipes[number] = await clients[number].attach("a")

    for number in range(3):
        letting_go(number)
    await asyncio.gather(take(1), take(2))
    assert len(pipes) == 1
    (last,) = pipes.values()
    assert await echo(last, b"one") == b"one"
    let_go(last)
    for client in clients:
        await client.aclose()


async def test_a_start_that_is_repeated_hands_the_same_sandbox_over(client: Client, host: Host) -> None:
    first = await client.start(SPEC, "a")
    pid = host.runtime.pid("a")
    second = await client.start(SPEC, "a")
    assert host.runtime.pid("a") == pid
    let_go(first)
    let_go(second)


async def test_what_is_under_way_in_the_pipes_keeps_a_sandbox_from_being_frozen(client: Client) -> None:
    pipes = await client.start(SPEC, "a")
    os.write(pipes.stdin, b"x")
    for _ in range(100):
        with pytest.raises(SandboxError) as refused:
            await client.freeze("a", "i")
        if "written" in refused.value.message:  # cat has read it and answered
            break
    assert refused.value.code == "busy"
    assert "written" in refused.value.message
    os.read(pipes.stdout, 1)
    assert (await client.freeze("a", "i")).image == "i"
    let_go(pipes)


async def test_an_image_starts_sandboxes_that_differ_from_then_on(client: Client, host: Host) -> None:
    pipes = [await client.start(SPEC, "a")]
    (host.folders.sandbox("a") / "f").write_text("one\n")
    await client.freeze("a", "i")
    pipes += [await client.start(SPEC, name, origin="i") for name in ("b", "c")]
    (host.folders.sandbox("b") / "f").write_text("two\n")
    assert await client.diff(SPEC, "i", "c") == []
    (change,) = await client.diff(SPEC, "i", "b")
    assert (change.path, change.change, change.kind) == ("f", "changed", "file")
    assert change.text is not None
    assert "-one" in change.text
    assert "+two" in change.text
    assert await client.digest(SPEC, "c") == await client.digest(SPEC, "i") != await client.digest(SPEC, "b")
    for each in pipes:
        let_go(each)


async def test_the_holder_is_told_of_a_death_and_the_sandbox_is_gone(client: Client) -> None:
    told: asyncio.Future[Exited] = asyncio.get_running_loop().create_future()

    async def on_exit(exited: Exited) -> None:
        told.set_result(exited)

    client.on_exit = on_exit
    pipes = await client.start(SPEC, "a")
    (info,) = (await client.inventory()).sandboxes
    os.kill(info.pid, 9)
    assert (await told).status == -9
    assert (await client.inventory()).sandboxes == []
    with pytest.raises(SandboxError) as refused:
        await client.attach("a")
    assert refused.value.code == "gone"
    let_go(pipes)


async def test_what_nobody_reads_any_more_keeps_no_sandbox_from_being_frozen(host: Host) -> None:
    first, second = Client(host.path), Client(host.path)
    pipes = await first.start(SPEC, "a")
    os.write(pipes.stdin, b"asked by one who dies\n")
    await asyncio.to_thread(select.select, [pipes.stdout], [], [])  # answered, and not read
    let_go(pipes)
    await first.aclose()
    while (await second.inventory()).sandboxes[0].held:
        await asyncio.sleep(0.001)
    assert (await second.freeze("a", "i")).image == "i"
    taken = await second.attach("a")
    assert await echo(taken, b"x") == b"x"
    let_go(taken)
    await second.aclose()


async def test_a_sandbox_that_is_left_in_the_middle_of_something_is_not_clean(client: Client) -> None:
    pipes = await client.start(SPEC, "a")
    let_go(pipes)
    await client.detach("a", clean=False)
    again = await client.attach("a")
    assert not again.clean
    let_go(again)


async def test_runtimes_are_tried_out_by_one_client_at_a_time(host: Host) -> None:
    clients = [Client(host.path) for _ in range(3)]
    found = await asyncio.gather(*(client.reports() for client in clients))
    assert found == [[Report(kind=Kind.CRIU, works=True)]] * 3
    assert host.runtime.most_trials == 1
    for client in clients:
        await client.aclose()


async def test_a_keeper_without_clients_is_deserted_after_a_while(host: Host) -> None:
    waiting = asyncio.create_task(host.keeper.deserted(0.05))
    client = Client(host.path)
    await client.hello()
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await client.aclose()
    async with asyncio.timeout(5):
        await waiting


async def test_operations_on_one_sandbox_wait_for_each_other(client: Client, host: Host) -> None:
    pipes = await client.start(SPEC, "a")
    host.runtime.freezing.clear()
    freezing = asyncio.create_task(client.freeze("a", "i"))
    removing = asyncio.create_task(client.remove("a"))
    await client.inventory()  # both are there by now: requests of a connection arrive in order
    assert not freezing.done()
    assert not removing.done()
    host.runtime.freezing.set()
    await freezing
    await removing
    assert (await client.inventory()).images == ["i"]
    let_go(pipes)


async def test_removing_what_is_not_there_is_done(client: Client) -> None:
    await client.remove("nothing")
    await client.drop("nothing")


@pytest.mark.parametrize("name", ["../up", "", "A", "a" * 61, "a/b"])
async def test_a_name_that_could_be_a_path_is_refused(client: Client, name: str) -> None:
    with pytest.raises(SandboxError) as refused:
        await client.start(SPEC, name)
    assert refused.value.code == "invalid_spec"


async def test_an_image_that_is_gone_starts_nothing(client: Client) -> None:
    with pytest.raises(SandboxError) as refused:
        await client.start(SPEC, "a", origin="gone")
    assert refused.value.code == "gone"
    assert (await client.inventory()).sandboxes == []


async def test_a_runtime_that_the_keeper_lacks_is_said(client: Client) -> None:
    with pytest.raises(SandboxError) as refused:
        await client.start(Spec(kind=Kind.DOCKER, command=("x",)), "a")
    assert refused.value.code == "not_available"


async def test_a_keeper_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SandboxError) as refused:
        await Client(str(tmp_path / "none")).inventory()
    assert refused.value.code == "keeper_lost"


async def test_junk_ends_its_own_connection_only(client: Client, host: Host) -> None:
    reader, writer = await asyncio.open_unix_connection(host.path)
    writer.write(b"\0\0\0\3\0abc")
    assert await reader.read() == b""
    writer.close()
    assert (await client.inventory()).sandboxes == []


def test_a_spec_names_contents_and_not_places() -> None:
    def spec(files: str, content: str) -> Spec:
        return Spec(kind=Kind.CRIU, command=("x",), files=files, content=content)

    assert spec("/a", "1").template == spec("/b", "1").template != spec("/a", "2").template
