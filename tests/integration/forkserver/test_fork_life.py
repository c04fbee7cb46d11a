"""From start to end: generations, crowds, deaths and their reasons, and that nothing is left."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from sandboxes import disks, layers
from sandboxes.forkserver import runtime
from sandboxes.types import Limits, SandboxError, Spec
from tests.integration.forkserver.conftest import Raised, Server, code_spec


def template(server: Server, spec: Spec) -> Path:
    return server.state / "templates" / spec.template


async def test_forty_generations_keep_memory_and_files(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    await sandbox.run("seen = []")
    images = []
    for number in range(40):
        await sandbox.run(
            f"seen.append({number})\nfor name in ('f{number}', 'last'): open(name, 'w').write('{number}')"
        )
        frozen = await server.freeze(sandbox)
        images.append(frozen.image)
        await server.runtime.remove(sandbox.name)
        sandbox = await server.start(spec, frozen.image)
    names = "sorted(['last', *map('f{}'.format, seen)])"
    seen = f"import os\nresult = len(seen), sorted(os.listdir()) == {names}, open('last').read()"
    assert await sandbox.run(seen) == [40, True, "39"]
    middle = await server.start(spec, images[19])
    assert await middle.run(seen) == [20, True, "19"]
    for image in images:
        await server.runtime.drop(image)
    assert await sandbox.run(seen) == [40, True, "39"]
    await server.runtime.remove(middle.name)
    await server.runtime.remove(sandbox.name)
    assert list((template(server, spec) / "images").iterdir()) == []
    assert list((template(server, spec) / "run").iterdir()) == []


async def test_a_layer_stays_as_long_as_somebody_stands_on_it_and_no_longer(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    await sandbox.run("open('f', 'w').write('kept')")
    frozen = await server.freeze(sandbox)
    fork = await server.start(spec, frozen.image)
    images = template(server, spec) / "images"
    (layer,) = images.iterdir()
    assert layer.stat().st_mode & 0o777 == 0o700
    await server.runtime.drop(frozen.image)
    assert await fork.run("result = open('f').read()") == "kept"
    assert list(images.iterdir()) == [layer]
    await server.runtime.remove(fork.name)
    assert list(images.iterdir()) == []


async def test_two_hundred_forks_at_once_are_each_their_own(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    await sandbox.run("mine = None")
    frozen = await server.freeze(sandbox)
    forks = await asyncio.gather(*(server.start(spec, frozen.image) for _ in range(200)))
    await asyncio.gather(*(fork.run(f"mine = {n}\nopen('f', 'w').write('{n}')") for n, fork in enumerate(forks)))
    seen = await asyncio.gather(*(fork.run("result = mine, open('f').read()") for fork in forks))
    assert seen == [[n, str(n)] for n in range(200)]
    await asyncio.gather(*(server.runtime.remove(fork.name) for fork in forks))


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("import os\nos._exit(7)", 7, "ended with status 7"),
        ("import os\nos.abort()", -signal.SIGABRT, "SIGABRT"),
        ("import ctypes\nctypes.string_at(0)", -signal.SIGSEGV, "SIGSEGV"),
    ],
)
async def test_a_death_is_told_with_its_reason(server: Server, spec: Spec, code: str, status: int, reason: str) -> None:
    sandbox = await server.start(spec)
    sandbox.say(code)
    exited = await server.death(sandbox)
    assert exited.status in (status, None)  # kernels before 6.15 don't say
    assert reason in exited.reason or exited.status is None


@pytest.mark.usefixtures("limited")
async def test_a_sandbox_that_uses_too_much_memory_is_ended_and_that_is_the_reason(server: Server) -> None:
    spec = code_spec(limits=Limits(memory=64 << 20))
    sandbox, other = await server.start(spec), await server.start(spec)
    sandbox.say("bomb = [bytearray(1 << 20) for _ in range(1000)]")
    assert (await server.death(sandbox)).reason == "it was killed for memory: its limit is 64 MiB"
    assert await other.run("result = len(bytes(1 << 20))") == 1 << 20


async def test_a_sandbox_that_is_over_its_disk_limit_is_ended_and_that_is_the_reason(server: Server) -> None:
    spec = code_spec(limits=Limits(disk=8 << 20))
    sandbox, other = await server.start(spec), await server.start(spec)
    sandbox.say("for n in range(20): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))")
    assert (await server.death(sandbox)).reason == "it was over its disk limit of 8 MiB"
    assert await other.run("result = 1") == 1


async def test_one_file_can_not_become_larger_than_the_disk_limit_and_who_tried_goes_on(server: Server) -> None:
    sandbox = await server.start(code_spec(limits=Limits(disk=8 << 20)))
    with pytest.raises(Raised, match="File too large"):
        await sandbox.run("with open('big', 'wb', 0) as f:\n  while True: f.write(bytes(1 << 20))")
    status, _ = await sandbox.shell("head -c 9M /dev/zero > big")
    assert status != 0
    await sandbox.shell("head -c 2M /dev/zero > beside; mkdir folder")
    await disks.look(server.runtime._watched)
    assert await sandbox.run("import os; result = os.path.getsize('big')") == 8 << 20
    sandbox.say("for n in range(7): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))")
    assert "disk limit" in (await server.death(sandbox)).reason


async def test_an_image_whose_process_was_ended_is_not_there_any_more(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    frozen = await server.freeze(sandbox)
    assert server.runtime.images() == [frozen.image]
    os.kill(server.runtime._images[frozen.image].control.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while server.runtime.images():
            await asyncio.sleep(0.01)
    assert await sandbox.run("result = 1") == 1


async def test_a_tool_that_hangs_is_removed_at_once(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    sandbox.say("import signal\nwhile True: pass")
    began = time.monotonic()
    await server.runtime.remove(sandbox.name)
    assert time.monotonic() - began < 20


async def test_a_driver_that_does_not_answer_is_busy_in_bounded_time(
    server: Server, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_FREEZE_S", 0.3)
    sandbox = await server.start(spec)
    # Python's lock is held all the time: the driver's thread gets no turn.
    sandbox.say("import ctypes\nctypes.PyDLL(None).sleep(2)\nresult = 'woke up'")
    await asyncio.sleep(0.1)
    with pytest.raises(SandboxError) as refused:
        await server.freeze(sandbox)
    assert refused.value.code == "busy"
    assert await sandbox.heard() == "woke up"
    monkeypatch.undo()
    frozen = await server.freeze(sandbox)  # the late answer to the first is not taken for this one's
    assert await (await server.start(spec, frozen.image)).run("result = 1") == 1


async def test_what_tools_have_started_ends_with_the_sandbox(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    mark = f"4242.{os.getpid()}"
    await sandbox.shell(f"setsid -f sleep {mark} </dev/null >/dev/null 2>&1; nohup sleep {mark} >/dev/null 2>&1 &")

    def running() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if mark.encode() in path.read_bytes():
                    found.append(path.parent.name)
            except OSError:
                pass
        return found

    assert len(running()) == 2
    await server.runtime.remove(sandbox.name)
    assert running() == []


async def test_a_call_that_comes_during_a_freeze_waits_until_the_files_are_kept(
    server: Server, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await server.start(spec)
    await sandbox.run("x = 'old'\nopen('f', 'w').write(x)")
    copy = layers.copy

    async def slow_copy(source: Path, target: Path) -> None:
        sandbox.say("x = 'new'\nopen('f', 'w').write(x)")
        await asyncio.sleep(0.2)
        await copy(source, target)

    monkeypatch.setattr(layers, "copy", slow_copy)
    frozen = await server.freeze(sandbox)
    await sandbox.heard()
    seen = "result = x, open('f').read()"
    assert await sandbox.run(seen) == ["new", "new"]
    assert await (await server.start(spec, frozen.image)).run(seen) == ["old", "old"]


async def test_two_images_of_the_same_files_have_one_digest(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    await sandbox.run("open('f', 'w').write('x')")
    first = await server.freeze(sandbox)
    fork = await server.start(spec, first.image)
    second = await server.freeze(fork)
    assert first.digest == second.digest
    await fork.run("open('f', 'w').write('y')")
    assert (await server.freeze(fork)).digest != first.digest


async def test_a_warm_server_without_a_sandbox_and_an_image_ends_and_comes_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = code_spec(argument="1")
    sandbox = await server.start(spec)
    frozen = await server.freeze(sandbox)
    warm = server.runtime._zygotes[spec.template]
    await server.runtime.remove(sandbox.name)
    monkeypatch.setattr(server.runtime, "_warm_s", 0)
    await server.runtime.end_idle()
    assert warm.alive
    await server.runtime.drop(frozen.image)
    _, again = await asyncio.gather(server.runtime.end_idle(), server.start(spec))
    assert not warm.alive
    assert await again.run("result = 'back'") == "back"
    _, other = await asyncio.gather(server.runtime.end_idle(), server.start(spec))
    for each in (again, other):
        assert await each.run("result = 'stays'") == "stays"


async def test_an_interpreter_below_tmp_is_seen_there_by_every_fork(server: Server) -> None:
    """Also where it lies in a folder with code that is seen there too, as in a checkout with its environment."""
    with tempfile.TemporaryDirectory(dir="/tmp") as outer:
        Path(outer).chmod(0o755)
        folder = f"{outer}/venv"
        made = ("-m", "venv", "--copies", "--without-pip", folder)
        assert await (await asyncio.create_subprocess_exec(sys.executable, *made)).wait() == 0
        packages = next(Path(folder).glob("lib/python3.*/site-packages"))
        (packages / "late.py").write_text("here = __file__")
        Path(folder).chmod(0o755)
        spec = code_spec(python=f"{folder}/bin/python")
        spec = msgspec.structs.replace(spec, pythonpath=(*spec.pythonpath, outer))
        sandbox = await server.start(spec)
        await sandbox.run("open('/tmp/own', 'w').write('kept')")
        fork = await server.fork(spec, await server.fork(spec, sandbox))
        assert await fork.run("import late\nresult = late.here") == str(packages / "late.py")
        assert await fork.run("result = open('/tmp/own').read()") == "kept"
        with pytest.raises(Raised, match="Read-only file system"):
            await fork.run(f"open('{packages}/late.py', 'w')")
