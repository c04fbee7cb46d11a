"""The keeper as a process: killed, started anew, run by somebody who isn't root."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandboxes.client import Client
from sandboxes.types import Kind, Spec
from tests.integration.forkserver.conftest import Server, code_spec, read_line

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def keeper(folder: Path, python: str = sys.executable, **more: int) -> AsyncIterator[tuple[Client, int]]:
    """A client of one that runs, and its process. Asked to end at the end."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])}
    process = await asyncio.create_subprocess_exec(
        *(python, "-m", "sandboxes", "--socket", str(folder / "s"), "--state", str(folder / "state")),
        stdout=asyncio.subprocess.PIPE,
        env=environ,
        cwd="/",
        **more,
    )
    client = Client(str(folder / "s"))
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield client, process.pid
    finally:
        await client.aclose()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def rooms(folder: Path) -> set[int]:
    """Processes that see a state folder's layers."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        with contextlib.suppress(OSError):
            if str(folder) in path.read_text() and "/.layers" in path.read_text():
                found.add(int(path.parent.name))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """With a short path, as sockets need it."""
    short = Path(f"/tmp/mm-keeper-{os.getpid()}")
    short.mkdir()
    yield short
    shutil.rmtree(short)


async def test_a_killed_keeper_leaves_no_process_and_no_mount_and_the_next_one_no_folder(
    forking: Server, folder: Path, spec: Spec
) -> None:
    async with keeper(folder) as (client, pid):
        pipes = await client.start(spec, "a")
        os.write(pipes.stdin, b"{\"code\": \"import subprocess; subprocess.Popen(['setsid', 'sleep', '99'])\"}\n")
        await read_line(pipes.stdout)
        second = await client.start(spec, "b")
        await client.freeze("b", "i")
        await client.start(spec, "c", origin="i")
        assert len(rooms(folder)) >= 5
        ends = [os.pidfd_open(number) for number in rooms(folder)]
        os.kill(pid, signal.SIGKILL)
        for end in ends:
            await asyncio.to_thread(_wait, end)
        for descriptor in (*pipes.all, *second.all):
            os.close(descriptor)
    assert rooms(folder) == set()
    assert str(folder) not in Path("/proc/self/mounts").read_text()
    async with keeper(folder) as (client, _):
        inventory = await client.inventory()
        assert (inventory.sandboxes, inventory.images) == ([], [])
        assert list((folder / "state" / "templates").iterdir()) == []
        groups = list(Path("/sys/fs/cgroup").glob("**/megamcp-*/b"))
        assert groups == []


def _wait(pidfd: int) -> None:
    import select

    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    assert waiting.poll(10_000)
    os.close(pidfd)


async def test_a_keeper_that_is_asked_to_end_takes_everything_along(forking: Server, folder: Path, spec: Spec) -> None:
    async with keeper(folder) as (client, pid):
        await client.start(spec, "a")
        await client.freeze("a", "i")
        ends = [os.pidfd_open(number) for number in (pid, *rooms(folder))]
        os.kill(pid, signal.SIGTERM)
        for end in ends:
            await asyncio.to_thread(_wait, end)
    assert list((folder / "state" / "templates").iterdir()) == []


def _everybodys_python() -> str | None:
    """An interpreter of this version that user 65534 may run."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        with contextlib.suppress(OSError):
            if subprocess.run([candidate, "-c", ""], user=65534, check=False).returncode == 0:
                return candidate
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="this is another user already, and the other tests show it")
async def test_a_keeper_without_root_does_all_but_limits_and_says_so(forking: Server, folder: Path) -> None:
    python = _everybodys_python()
    if python is None:
        pytest.skip("no Python of this version here that another user may run")
    os.chown(folder, 65534, 65534)
    async with keeper(folder, python, user=65534, group=65534) as (client, _):
        (report,) = [report for report in await client.reports() if report.kind is Kind.FORK]
        if not report.works and "user namespace" in report.reason:
            pytest.skip(f"this kernel gives user namespaces to root only: {report.reason}")
        assert report.works, report.reason
        assert "limits" not in report.features
        assert "control groups" in report.reason
        spec = code_spec(python=python)
        pipes = [await client.start(spec, "a")]
        for line in (
            "import os\\nx = 1\\nopen('f', 'w').write('1')",
            "os.unlink('f')\\nos.mkdir('d')\\nos.chmod('d', 0)",
        ):
            os.write(pipes[0].stdin, b'{"code": "%b"}\n' % line.encode())
            assert await read_line(pipes[0].stdout) == b'{"result": null}\n'
            await client.freeze("a", f"i{len(line)}")
        images = (await client.inventory()).images
        pipes += [await client.start(spec, f"b{n}", origin=image) for n, image in enumerate(images)]
        seen = []
        for each in pipes[1:]:
            os.write(each.stdin, b'{"code": "result = x, os.listdir()"}\n')
            seen.append(await read_line(each.stdout))
        assert sorted(seen) == [b'{"result": [1, ["d"]]}\n', b'{"result": [1, ["f"]]}\n']
        assert [change.path for change in await client.diff(spec, *images)] == ["d", "f"]
        for name in ("a", "b0", "b1"):
            await client.remove(name)
        assert rooms(folder)
        assert list((folder / "state" / "templates" / spec.template / "run").iterdir()) == []
