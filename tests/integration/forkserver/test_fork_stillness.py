"""What keeps a sandbox from being forked, each by name; and what doesn't, and goes on in the fork."""

import os
import time

import pytest

from sandboxes.types import SandboxError, Spec
from tests.integration.forkserver.conftest import Server, code_spec, read_line

ALIVE = {
    "thread": ("import threading as t\nt.Thread(target=t.Event().wait, name='pump', daemon=True).start()", "pump"),
    "foreign thread": (
        "import _thread, time\n_thread.start_new_thread(time.sleep, (60,))\n", "that Python did not start"
    ),
    "listening socket": (
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('/tmp/s')\ns.listen()", "unix, at '/tmp/s'"
    ),
    "udp socket": ("import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", "a socket (IPv4"),
    "pair of sockets": ("import socket\ns = socket.socketpair()", "a socket (unix"),
    "event loop": ("import asyncio\nloop = asyncio.new_event_loop()", "is open (descriptor"),
    "epoll": ("import select\ne = select.epoll()", "an event loop is open"),
    "pipe": ("import os\nends = os.pipe()", "a pipe is open"),
    "shared memory": ("import mmap\nm = mmap.mmap(-1, 4096)", "memory is mapped that others may share"),
    "memory file": ("import os\nm = os.memfd_create('x')", "memory that can be shared"),
    "mapped file": (
        "import mmap, os\nopen('m', 'wb').write(bytes(9000))\n"
        "with open('m', 'rb') as f: m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)",
        "/workspace/m is mapped into memory",
    ),
    "deleted file": ("import os\nf = open('gone', 'w')\nos.unlink('gone')", "/workspace/gone (deleted) is open"),
    "sqlite database": (
        "import sqlite3\ndb = sqlite3.connect('data.db')\ndb.execute('create table t (x)')",
        "the SQLite database /workspace/data.db is open",
    ),
    "process": ("import subprocess\np = subprocess.Popen(['sleep', '60'])", "still running ('sleep')"),
    "daemon": (
        "import subprocess\nsubprocess.run('setsid -f sleep 60 </dev/null >/dev/null 2>&1', shell=True)",
        "still running ('sleep')",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ALIVE)
async def test_what_is_alive_keeps_a_sandbox_from_being_forked_and_is_named(
    server: Server, spec: Spec, what: str
) -> None:
    code, named = ALIVE[what]
    sandbox = await server.start(spec)
    await sandbox.run(code)
    with pytest.raises(SandboxError) as refused:
        await server.freeze(sandbox)
    assert refused.value.code == "not_forkable"
    assert named in refused.value.message
    assert await sandbox.run("result = 'goes on'") == "goes on"


async def test_a_server_with_a_thread_from_the_beginning_is_refused_with_its_name(server: Server) -> None:
    with pytest.raises(SandboxError, match="heartbeat") as refused:
        await server.start(code_spec("Threaded"))
    assert refused.value.code == "not_forkable"


async def test_a_thread_that_has_ended_is_no_obstacle(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    await sandbox.run(
        "import threading, concurrent.futures as c, asyncio\n"
        "t = threading.Thread(target=print)\nt.start()\nt.join()\n"
        "with c.ThreadPoolExecutor(4) as pool: list(pool.map(str, range(9)))\n"
        "async def two(): return await asyncio.gather(asyncio.to_thread(str, 1), asyncio.sleep(0))\n"
        "asyncio.run(two())\n"
    )
    for _ in range(20):
        await server.freeze(sandbox)


async def test_an_open_file_goes_on_at_its_place_and_in_the_forks_own_folder(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    await sandbox.run("f = open('log', 'w+')\nf.write('one ')\nf.flush()\nimport os\nos.mkdir('d')\nos.chdir('d')")
    frozen = await server.freeze(sandbox)
    forks = [await server.start(spec, frozen.image) for _ in range(2)]
    await sandbox.run("f.write('parent')\nf.flush()")
    for number, fork in enumerate(forks):
        await fork.run(f"f.write('fork {number}')\nf.flush()")
    seen = "f.seek(0)\nresult = f.read(), open('/workspace/log').read(), os.getcwd()"
    assert await sandbox.run(seen) == ["one parent", "one parent", "/workspace/d"]
    for number, fork in enumerate(forks):
        assert await fork.run(seen) == [f"one fork {number}"] * 2 + ["/workspace/d"]


async def test_a_file_that_was_opened_before_the_first_fork_is_read_by_each_at_its_own_place(
    server: Server, spec: Spec
) -> None:
    a, b = await server.start(spec), await server.start(spec)
    read = "result = source.read(5).decode()"
    first, second = await a.run(read), await a.run(read)
    c = await server.fork(spec, a)
    third = await c.run(read)
    assert [await b.run(read) for _ in range(3)] == [first, second, third]
    assert await a.run(read) == third


async def test_a_database_in_a_file_goes_on_where_it_is_opened_by_each_call(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    add = (
        "import sqlite3, contextlib\nwith contextlib.closing(sqlite3.connect('data.db')) as db, db:\n"
        "  db.execute('create table if not exists t (x)')\n  db.execute('insert into t values (1)')\n"
        "  result = db.execute('select count(*) from t').fetchone()[0]"
    )
    assert await sandbox.run(add) == 1
    fork = await server.fork(spec, sandbox)
    assert [await fork.run(add), await fork.run(add), await sandbox.run(add)] == [2, 3, 2]


async def test_what_a_thread_keeps_for_itself_does_not_outlive_a_call(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    await sandbox.run("import threading\nown = threading.local()\nown.x = 1\nresult = own.x")
    assert await sandbox.run("result = hasattr(own, 'x')") is False


async def test_threads_and_processes_have_the_same_numbers_in_a_fork_of_a_fork(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    ident = "import threading\nresult = threading.get_ident()"
    first = await sandbox.run(ident)
    fork = await server.fork(spec, sandbox)
    assert await fork.run(ident) == first
    assert await (await server.fork(spec, fork)).run(ident) == first


async def test_a_freeze_during_a_call_is_refused_and_one_after_it_is_not(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    sandbox.say("import time\nprint('in')\ntime.sleep(2)\nresult = 'slept'")
    assert await read_line(sandbox.pipes.stderr) == b"in\n"
    began = time.monotonic()
    with pytest.raises(SandboxError) as refused:
        await server.freeze(sandbox)
    assert refused.value.code == "busy"
    assert time.monotonic() - began < 1.9
    assert await sandbox.heard() == "slept"
    await server.freeze(sandbox)


async def test_an_answered_call_never_keeps_a_sandbox_busy(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    for number in range(50):
        assert await sandbox.run(f"result = {number}") == number
        await server.freeze(sandbox)


async def test_what_is_printed_is_no_message(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    assert await sandbox.run("print('junk', flush=True)\nimport os\nos.system('echo more junk')\nresult = 1") == 1
    assert os.read(sandbox.pipes.stderr, 100) == b"junk\nmore junk\n"
