"""What the Docker runtime keeps, what it doesn't, and what a program in it can't do."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from sandboxes import files
from sandboxes.docker import Containers, runtime
from sandboxes.runtime import Folders
from sandboxes.types import Limits, Pipes, SandboxError, Spec
from tests.integration.docker.conftest import BASE, Kept, docker

pytestmark = [pytest.mark.docker, pytest.mark.slow]


class Talk:
    """A sandbox's pipes, a line at a time."""

    def __init__(self, pipes: Pipes) -> None:
        self.pipes = pipes

    async def ask(self, line: str) -> str:
        return await asyncio.to_thread(self._ask, line)

    def _ask(self, line: str) -> str:
        os.write(self.pipes.stdin, f"{line}\n".encode())
        answer = b""
        while not answer.endswith(b"\n"):
            chunk = os.read(self.pipes.stdout, 4096)
            assert chunk, "it has ended"
            answer += chunk
        return answer.decode().strip()


@asynccontextmanager
async def started(kept: Kept, spec: Spec, name: str, origin: str | None = None) -> AsyncIterator[Talk]:
    await kept.runtime.prepare(spec)
    pipes = await kept.runtime.start(spec, name, origin)
    try:
        yield Talk(pipes)
    finally:
        for descriptor in pipes.all:
            os.close(descriptor)
        await kept.runtime.remove(name)


async def test_its_own_trial_says_that_files_are_all_it_keeps(kept: Kept) -> None:
    report = await kept.runtime.report()
    assert report.works, report.reason
    assert report.features == ("files",)
    assert report.reason == "memory is not kept"
    assert kept.labelled() == []


async def test_an_image_keeps_files_and_no_memory(kept: Kept, spec: Spec) -> None:
    async with started(kept, spec, "one") as one:
        await one.ask("Path('notes.txt').write_text('second')")
        await one.ask("memory.append('here')")
        frozen = await kept.runtime.freeze("one", "im_1")
        assert frozen.memory is False
        assert frozen.bytes > 0
        await one.ask("Path('notes.txt').write_text('third')")
        assert await one.ask("memory") == "['here']"
        async with started(kept, spec, "two", "im_1") as two:
            assert await two.ask("Path('notes.txt').read_text()") == "'second'"
            assert await two.ask("memory") == "[]"
            await two.ask("Path('notes.txt').unlink()")
            assert await one.ask("Path('notes.txt').read_text()") == "'third'"


async def test_diff_and_digest_see_the_working_folder_alone(kept: Kept, spec: Spec) -> None:
    async with started(kept, spec, "one") as one:
        await one.ask("Path('notes.txt').write_text('second\\n')")
        await one.ask("Path('/tmp/outside').write_text('x')")
        await one.ask("os.symlink('/etc/passwd', 'way')")
        await one.ask("os.link('way', 'hard', follow_symlinks=False)")
        await one.ask("Path('private').mkdir(0o700)")
        frozen = await kept.runtime.freeze("one", "im_1")
        async with kept.runtime.tree(spec, None) as before, kept.runtime.tree(spec, "one") as now:
            found = {change.path: change for change in files.diff(before, now, 100)}
            assert files.digest(now) == frozen.digest != files.digest(before)
        assert {path: change.change for path, change in found.items()} == {
            "hard": "added",
            "notes.txt": "changed",
            "private": "added",
            "way": "added",
        }
        assert (found["hard"].kind, found["way"].kind) == ("link", "link")
        assert found["notes.txt"].text == "--- a/notes.txt\n+++ b/notes.txt\n@@ -1 +1 @@\n-first\n+second\n"
        assert found["private"].mode == 0o700


async def test_a_program_has_no_rights_no_network_and_no_root(kept: Kept, spec: Spec) -> None:
    async with started(kept, spec, "one") as one:
        status = {
            name: value.strip()
            for name, _, value in (
                line.partition(":")
                for line in (await one.ask("Path('/proc/self/status').read_text()"))[1:-1].split("\\n")
            )
        }
        assert {status[name].removeprefix("\\t") for name in ("CapEff", "CapBnd", "CapPrm")} == {"0" * 16}
        assert status["NoNewPrivs"].removeprefix("\\t") == "1"
        assert status["Seccomp"].removeprefix("\\t") == "2"
        assert await one.ask("os.getuid()") == "65532"
        for path in ("/etc/passwd", "/usr/bin/python3", "/new"):
            assert await one.ask(f"Path({path!r}).write_text('x')") == "PermissionError"
        assert await one.ask("os.listdir('/sys/class/net')") == "['lo']"
        assert await one.ask("socket.create_connection(('1.1.1.1', 80), 1)") == "OSError"


async def test_memory_and_processes_have_limits_and_a_death_says_which(kept: Kept, spec: Spec) -> None:
    small = msgspec.structs.replace(spec, limits=Limits(memory=64 << 20, pids=8))
    async with started(kept, small, "one") as one:
        # Children sleep, so that one process alone goes on to the limit and tells of it.
        forks = "[os.fork() or __import__('time').sleep(600) for _ in range(20)]"
        assert await one.ask(forks) == "BlockingIOError"
    async with started(kept, small, "two") as two:
        os.write(two.pipes.stdin, b"len(bytearray(200 << 20))\n")
        async with asyncio.timeout(60):
            while not kept.dead:
                await asyncio.sleep(0.02)
        assert kept.dead[0].sandbox == "two"
        assert "memory than 64 MiB" in kept.dead[0].reason


async def test_a_layer_over_its_limit_is_not_frozen(kept: Kept, spec: Spec) -> None:
    small = msgspec.structs.replace(spec, limits=Limits(disk=1 << 20))
    async with started(kept, small, "one") as one:
        await one.ask("Path('big').write_bytes(bytes(3 << 20))")
        with pytest.raises(SandboxError) as caught:
            await kept.runtime.freeze("one", "im_1")
        assert caught.value.code == "disk_full"
        assert "limit is 1" in caught.value.message
        await one.ask("Path('big').unlink()")
        await kept.runtime.freeze("one", "im_1")


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"image": "megamcp-test/there-is-none:1"}, "start_failed", "megamcp-test/there-is-none:1"),
        ({"image": None}, "invalid_spec", "needs an image"),
        ({"command": ("no-such-program",)}, "start_failed", "no-such-program"),
        ({"workdir": "/"}, "invalid_spec", "can't be /"),
    ],
)
async def test_what_can_not_start_says_why(
    kept: Kept, spec: Spec, change: dict[str, object], code: str, words: str
) -> None:
    wrong = msgspec.structs.replace(spec, **change)
    with pytest.raises(SandboxError) as caught:
        async with started(kept, wrong, "one"):
            pass
    assert caught.value.code == code
    assert words in caught.value.message
    assert docker("ps", "-aq", "--filter", f"name=megamcp-{kept.runtime._keeper}") == ""


async def test_a_working_folder_in_a_volume_would_not_be_kept_and_is_refused(kept: Kept, spec: Spec) -> None:
    image = kept.runtime._tag("with-a-volume")
    container = docker("create", BASE, "-").strip()
    docker("commit", "--change", "VOLUME /data", container, image)
    docker("rm", container)
    try:
        with pytest.raises(SandboxError, match="declares /data a volume") as caught:
            await kept.runtime.prepare(msgspec.structs.replace(spec, image=image, workdir="/data/work"))
        assert caught.value.code == "invalid_spec"
    finally:
        docker("rmi", image)


async def test_images_outlive_their_sandboxes_and_dropped_ones_theirs(kept: Kept, spec: Spec) -> None:
    async with started(kept, spec, "one") as one:
        await one.ask("Path('notes.txt').write_text('kept')")
        await kept.runtime.freeze("one", "im_1")
    async with started(kept, spec, "two", "im_1") as two:
        await kept.runtime.drop("im_1")
        assert await two.ask("Path('notes.txt').read_text()") == "'kept'"
    assert kept.runtime.images() == []


async def test_a_chain_of_images_that_got_deep_becomes_one_layer(
    kept: Kept, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "DEEPEST", 3)
    origin = None
    for number in range(2):
        async with started(kept, spec, f"sandbox-{number}", origin) as one:
            await one.ask(f"Path('{number}').write_text('x')")
            origin = f"im_{number}"
            await kept.runtime.freeze(f"sandbox-{number}", origin)
    async with started(kept, spec, "last", origin) as last:
        assert await last.ask("sorted(os.listdir())") == "['0', '1', 'notes.py', 'notes.txt']"
        assert await last.ask("os.getuid()") == "65532"
    layers = docker("image", "inspect", "--format", "{{len .RootFS.Layers}}", kept.runtime._tag("im_1"))
    assert int(layers) <= 3


async def test_the_next_keeper_ends_what_a_killed_one_left_and_keeps_its_images_also_if_the_engine_comes_later(
    kept: Kept, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kept.runtime.prepare(spec)
    pipes = await kept.runtime.start(spec, "one", None)
    talk = Talk(pipes)
    await talk.ask("Path('notes.txt').write_text('kept')")
    await kept.runtime.freeze("one", "im_1")
    # A killed keeper says nothing to anybody: here is the next one.
    following = Kept(kept.state)
    following.runtime = Containers(Folders(kept.state), following.dead.append)
    with monkeypatch.context() as patch:
        patch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
        await following.runtime.recover()
        report = await following.runtime.report()
        assert "no Docker engine answers" in report.reason
        assert following.runtime.images() == ["im_1"]
    assert (await following.runtime.report()).works
    await following.runtime.prepare(spec)
    assert docker("ps", "-aq", "--filter", f"name=megamcp-{kept.runtime._keeper}") == ""
    assert following.runtime.images() == ["im_1"]
    async with started(following, spec, "two", "im_1") as two:
        assert await two.ask("Path('notes.txt').read_text()") == "'kept'"
    await following.runtime.drop("im_1")
    await following.runtime.aclose()
    for descriptor in pipes.all:
        os.close(descriptor)
