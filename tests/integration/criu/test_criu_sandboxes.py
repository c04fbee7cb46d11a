"""Sandboxes that CRIU freezes: what an image keeps, what sandboxes share, what is left when something dies."""

import asyncio
import os
import re
import select
import shutil
import stat
from pathlib import Path

import pytest

from sandboxes.types import Kind, Limits, SandboxError, Spec
from tests.integration.criu.conftest import PROGRAM, Host, Talk, spec

pytestmark = pytest.mark.criu


async def test_a_sandbox_goes_on_from_an_image_with_its_memory_and_files(host: Host) -> None:
    first = await host.start(spec(), "keeps-1")
    pid = await first("os.getpid()")
    await first("kept.update(name='ada')")
    await first("open('notes', 'w').write('one')")
    frozen = await host.client.freeze("keeps-1", "keeps-image")
    await first("kept.update(name='grace')")
    await first("open('notes', 'w').write('later')")
    second = await host.start(spec(), "keeps-2", "keeps-image")
    assert frozen.memory
    assert [await second("kept['name']"), await second("open('notes').read()")] == ["ada", "one"]
    assert [await first("kept['name']"), await first("open('notes').read()")] == ["grace", "later"]
    assert await second("os.getpid()") == pid


async def test_many_sandboxes_of_one_image_don_t_see_each_other(host: Host) -> None:
    first = await host.start(spec(), "many-0")
    await first("kept.update(total=0)")
    await host.client.freeze("many-0", "many-image")
    talks = await asyncio.gather(*(host.start(spec(), f"many-{n}", "many-image") for n in range(1, 6)))
    for number, talk in enumerate(talks):
        await talk(f"kept.update(total=kept['total'] + {number})")
        await talk(f"open('total', 'w').write('{number}')")
    assert [await talk("kept['total']") for talk in talks] == [0, 1, 2, 3, 4]
    assert [await talk("open('total').read()") for talk in talks] == ["0", "1", "2", "3", "4"]
    assert not await first("os.path.exists('total')")


async def test_an_image_of_an_image_has_the_layers_of_both(host: Host) -> None:
    first = await host.start(spec(), "stack-1")
    await first("[open(name, 'w').write(name) for name in 'ab']")
    await host.client.freeze("stack-1", "stack-a")
    second = await host.start(spec(), "stack-2", "stack-a")
    await second("os.remove('a')")
    await second("open('c', 'w').write('c')")
    await host.client.freeze("stack-2", "stack-b")
    await host.client.drop("stack-a")
    third = await host.start(spec(), "stack-3", "stack-b")
    assert await third("sorted(os.listdir())") == ["b", "c"]
    changes = await host.client.diff(spec(), None, "stack-b")
    assert [(change.path, change.change, change.text) for change in changes] == [
        ("b", "added", "--- /dev/null\n+++ b/b\n@@ -0,0 +1 @@\n+b\n\\ No newline at end of file\n"),
        ("c", "added", "--- /dev/null\n+++ b/c\n@@ -0,0 +1 @@\n+c\n\\ No newline at end of file\n"),
    ]
    assert await host.client.digest(spec(), "stack-b") == await host.client.digest(spec(), "stack-3")


async def test_threads_children_and_an_open_transaction_are_kept(host: Host) -> None:
    first = await host.start(spec(), "alive-1")
    await first("kept.update(db=__import__('sqlite3').connect('db', check_same_thread=False))")
    sql = ("pragma journal_mode=wal", "create table t (x)", "insert into t values (1)")
    await first(f"[kept['db'].execute(sql).fetchall() for sql in {sql}]")
    await first("kept.update(go=__import__('threading').Event(), done=[])")
    wait = "(kept['go'].wait(), kept['done'].append(1))"
    await first(f"__import__('threading').Thread(target=lambda: {wait}, daemon=True).start()")
    await first("kept.update(child=__import__('subprocess').Popen(['/bin/cat'], stdin=-1, stdout=-1))")
    await first("kept.update(gone=open('gone', 'w+'))")
    await first("(kept['gone'].write('still here'), kept['gone'].flush(), os.remove('gone'))")
    await host.client.freeze("alive-1", "alive-image")
    second = await host.start(spec(), "alive-2", "alive-image")
    assert await second("kept['child'].communicate(b'hello')[0].decode()") == "hello"
    await second("(kept['go'].set(), __import__('time').sleep(0.2))")
    assert await second("kept['done']") == [1]
    assert await second("(kept['gone'].seek(0), kept['gone'].read())[1]") == "still here"
    await second("kept['db'].commit()")
    await second("(kept['db'].execute('insert into t values (2)'), kept['db'].commit())")
    rows = "__import__('sqlite3').connect('db').execute('select x from t').fetchall()"
    assert await second(rows) == [[1], [2]]
    await first("kept['db'].rollback()")
    assert await first(rows) == []


async def test_a_database_that_could_not_be_written_to_again_is_named(host: Host) -> None:
    first = await host.start(spec(), "sqlite-1")
    await first("kept.update(db=__import__('sqlite3').connect('notes.db'))")
    await first("[kept['db'].execute(sql) for sql in ('create table t (x)', 'insert into t values (1)')]")
    await first("kept['db'].commit()")
    with pytest.raises(SandboxError, match=r"SQLite database /workspace/notes\.db is open") as refused:
        await host.client.freeze("sqlite-1", "sqlite-image")
    assert refused.value.code == "not_forkable"
    await first("kept['db'].close()")
    await host.client.freeze("sqlite-1", "sqlite-image")


async def test_a_connection_inside_a_sandbox_is_kept(host: Host) -> None:
    first = await host.start(spec(), "inside-1")
    await first("kept.update(s=__import__('socket'))")
    await first("kept.update(listener=kept['s'].create_server(('127.0.0.1', 4000)))")
    await first("kept.update(near=kept['s'].create_connection(('127.0.0.1', 4000)))")
    await first("kept.update(far=kept['listener'].accept()[0])")
    await host.client.freeze("inside-1", "inside-image")
    second = await host.start(spec(), "inside-2", "inside-image")
    for talk in (second, first):
        await talk("kept['near'].sendall(b'hello')")
        assert await talk("kept['far'].recv(9).decode()") == "hello"


async def test_what_waits_in_a_pipe_makes_it_busy(host: Host) -> None:
    first = await host.start(spec(), "busy-1")
    os.write(first.pipes.stdin, b"'not read'\n")
    await asyncio.to_thread(select.select, [first.pipes.stdout], [], [], 20)
    with pytest.raises(SandboxError, match="has written") as caught:
        await host.client.freeze("busy-1", "busy-image")
    assert caught.value.code == "busy"
    assert "busy-image" not in (await host.client.inventory()).images


async def test_an_image_is_for_root_alone_and_dropping_it_leaves_nothing(host: Host) -> None:
    first = await host.start(spec(), "mode-1")
    await first("open('big', 'w').write('x' * 100000)")
    await host.client.freeze("mode-1", "mode-image")
    folder = host.state / "criu" / "images" / "mode-image"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o600}
    await host.client.drop("mode-image")
    await host.client.remove("mode-1")
    assert not list((host.state / "criu").rglob("*mode-*"))
    assert "mode-1" not in Path("/proc/self/mountinfo").read_text()


async def test_a_death_is_told_with_its_cause(host: Host) -> None:
    first = await host.start(spec(), "dies-1")
    os.write(first.pipes.stdin, b"os._exit(7)\n")
    exited = await asyncio.wait_for(host.exited.get(), 20)
    assert (exited.sandbox, exited.status, exited.reason) == ("dies-1", 7, "it ended with status 7")
    small = spec(limits=Limits(memory=64 << 20))
    second = await host.start(small, "dies-2")
    os.write(second.pipes.stdin, b"kept.update(x=b'x' * (200 << 20))\n")
    exited = await asyncio.wait_for(host.exited.get(), 20)
    assert exited.sandbox == "dies-2"
    assert exited.status == -9
    assert "memory" in exited.reason


async def test_a_command_that_is_not_there_is_refused_by_name(host: Host) -> None:
    with pytest.raises(SandboxError, match="no program 'no-such-server'") as caught:
        await host.client.start(Spec(kind=Kind.CRIU, command=("no-such-server",)), "absent-1")
    assert caught.value.code == "start_failed"
    talk = await host.start(Spec(kind=Kind.CRIU, command=("/etc/hostname",)), "absent-2")
    exited = await asyncio.wait_for(host.exited.get(), 20)
    assert (exited.sandbox, exited.status) == ("absent-2", 1)
    assert b"/etc/hostname" in os.read(talk.pipes.stderr, 1000)


async def test_a_program_below_tmp_is_seen_there_if_everybody_may_read_it(host: Host) -> None:
    folder = host.folder / "program"
    folder.mkdir(mode=0o700)
    (folder / "server.py").write_text(PROGRAM)
    (folder / "late.py").write_text("here = __file__")
    made = Spec(kind=Kind.CRIU, command=("/usr/bin/python3", str(folder / "server.py")))
    with pytest.raises(SandboxError, match=f"{folder}, which only its owner may read") as refused:
        await host.client.start(made, "private-1")
    assert refused.value.code == "invalid_spec"
    folder.chmod(0o755)
    made = Spec(kind=Kind.CRIU, command=("/usr/bin/python3", "server.py"), cwd=str(folder))
    first = await host.start(made, "below-1")
    assert await first("os.getcwd()") == str(folder)
    await first("open('/tmp/own', 'w').write('first')")
    await host.client.freeze("below-1", "below-image")
    second = await host.start(made, "below-2", "below-image")
    assert await second("__import__('late').here") == str(folder / "late.py")
    assert await second("open('/tmp/own').read()") == "first"


@pytest.mark.parametrize(
    ("attempt", "refused"),
    [
        ("open('/usr/x', 'w')", "Read-only file system"),
        ("open('/x', 'w')", "Read-only file system"),
        ("open('/etc/shadow').read()", "Permission denied"),
        ("os.listdir('/root')", "No such file"),
        ("os.listdir('/var')", "No such file"),
        ("open('/proc/sys/kernel/hostname', 'w')", "Read-only file system"),
        ("open('/proc/interrupts').read() or 1/0", "ZeroDivisionError"),
        ("open('/proc/irq/default_smp_affinity', 'w')", "Read-only file system"),
        ("os.setuid(0)", "Operation not permitted"),
        ("os.chroot('/tmp')", "Operation not permitted"),
        ("os.kill(-1, 9) or os.kill(2, 9)", "No such process"),
        ("__import__('socket').create_connection(('1.1.1.1', 53), 2)", "unreachable"),
        ("os.mknod('disk', 0o60600, os.makedev(8, 0))", "Operation not permitted"),
        ("__import__('subprocess').check_output(['/usr/bin/unshare', '-U', 'true'])", "CalledProcessError"),
        ("os.symlink('/root', 'out') or os.listdir('out')", "No such file"),
        ("open('/proc/1/environ').read().count('SECRET_OF_HOST') or 1/0", "ZeroDivisionError"),
    ],
)
async def test_the_way_out_is_shut(host: Host, attempt: str, refused: str) -> None:
    name = f"walls-{abs(hash(attempt)) % 10**8}"
    for talk in (await host.start(spec(), name), await _restored(host, name)):
        assert refused in str(await talk(attempt)), attempt
    await host.client.remove(name)
    await host.client.remove(f"{name}-again")


async def _restored(host: Host, name: str) -> Talk:
    await host.client.freeze(name, f"{name}-image")
    talk = await host.start(spec(), f"{name}-again", f"{name}-image")
    await host.client.drop(f"{name}-image")
    return talk


async def test_a_restored_sandbox_has_no_right_that_its_first_had_not(host: Host) -> None:
    await host.start(spec(), "rights")
    talk = await _restored(host, "rights")
    told = str(await talk("open('/proc/self/status').read()"))
    found = {line.split(":")[0]: line.split(":")[1].split() for line in told.splitlines() if ":" in line}
    assert {found[name][0] for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")} == {"0" * 16}
    assert found["NoNewPrivs"] == ["1"]
    assert found["Seccomp"] == ["2"]
    assert "0" not in found["Uid"]


async def test_limits_hold_after_a_restore(host: Host) -> None:
    small = spec(limits=Limits(pids=16, memory=128 << 20, disk=1 << 20))
    await host.start(small, "limits-1")
    await host.client.freeze("limits-1", "limits-image")
    talk = await host.start(small, "limits-2", "limits-image")
    bomb = "[kept.setdefault('p', []).append(__import__('subprocess').Popen(['/bin/sleep', '60'])) for _ in range(40)]"
    assert "Resource temporarily unavailable" in str(await talk(bomb))
    assert "File too large" in str(await talk("open('big', 'wb').write(b'x' * (2 << 20))"))
    await talk("os.remove('big')")
    os.write(talk.pipes.stdin, b"kept.update(x=b'x' * (300 << 20))\n")
    exited = await asyncio.wait_for(host.exited.get(), 20)
    assert (exited.sandbox, "memory" in exited.reason) == ("limits-2", True)


async def test_who_writes_more_than_it_may_is_ended(host: Host) -> None:
    talk = await host.start(spec(limits=Limits(disk=1 << 20)), "disk-1")
    assert "File too large" in str(await talk("open('big', 'wb').write(b'x' * (2 << 20))"))
    os.write(talk.pipes.stdin, b"[open(f'{n}', 'wb').write(b'x' * (1 << 19)) for n in range(4)]\n")
    exited = await asyncio.wait_for(host.exited.get(), 20)
    assert (exited.sandbox, exited.reason) == ("disk-1", "it was over its disk limit of 1 MiB")


async def test_a_folder_can_be_the_root(host: Host) -> None:
    root = host.folder / "root"
    for path in ("bin", "lib", "data"):
        (root / path).mkdir(parents=True)
    (root / "data" / "hello").write_text("from the image")
    for program in ("/bin/sh", "/bin/cat"):
        await _copy_with_libraries(program, root)
    made = Spec(kind=Kind.CRIU, command=("/bin/sh", "-c", 'while read -r f; do /bin/cat "$f"; done'), image=str(root))
    first = await host.start(made, "root-1")
    await host.client.freeze("root-1", "root-image")
    second = await host.start(made, "root-2", "root-image")
    for talk in (first, second):
        os.write(talk.pipes.stdin, b"/data/hello\n")
        assert await asyncio.to_thread(os.read, talk.pipes.stdout, 100) == b"from the image"
        os.write(talk.pipes.stdin, b"/etc/passwd\n")
        assert await asyncio.to_thread(os.read, talk.pipes.stderr, 100)


async def _copy_with_libraries(program: str, root: Path) -> None:
    process = await asyncio.create_subprocess_exec("ldd", program, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    for path in [program, *re.findall(r"(/\S+)", told.decode())]:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def _alive(pid: int) -> bool:
    """A zombie isn't: whose child it was is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_images_outlive_a_killed_keeper_and_nothing_else_does(host: Host) -> None:
    first = await host.start(spec(), "crash-1")
    await first("kept.update(name='ada')")
    await first("open('notes', 'w').write('one')")
    await host.client.freeze("crash-1", "crash-image")
    pids = [info.pid for info in (await host.client.inventory()).sandboxes]
    half = host.state / "criu" / "images" / "half"
    half.mkdir()
    await host.end(kill=True)
    await host.begin()
    assert not [pid for pid in pids if _alive(pid)]
    inventory = await host.client.inventory()
    assert inventory.sandboxes == []
    assert "crash-image" in inventory.images
    assert not half.exists()
    assert list((host.state / "criu" / "sandboxes").iterdir()) == []
    assert "/crash-1/" not in Path("/proc/self/mountinfo").read_text()
    assert list(Path("/sys/fs/cgroup").glob("*/sandboxes-*/crash-1")) == []
    second = await host.start(spec(), "crash-2", "crash-image")
    assert [await second("kept['name']"), await second("open('notes').read()")] == ["ada", "one"]
