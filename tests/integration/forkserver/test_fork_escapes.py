"""A server's tools and what they start try to get out of their sandbox.

In each test a tool, or a program that it starts, is as hostile as can be. What a tool's own code can do to the process
it runs in is not here: see docs/security.md.
"""

import asyncio
import os
import secrets
import socket
import time
from pathlib import Path

import pytest

from sandboxes import files
from sandboxes.types import Limits, Spec
from tests.integration.forkserver.conftest import Raised, Server, code_spec

ATTEMPT = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    found = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return errno.errorcode.get(ctypes.get_errno(), found) if found == -1 else found
"""
X86_ONLY = pytest.mark.skipif(os.uname().machine != "x86_64", reason="system calls by their numbers on x86-64")


@pytest.mark.parametrize(
    "path",
    [
        "/etc/written",
        "/usr/written",
        "/written",
        "/workspace/../etc/written",
        "/dev/written",
        "/proc/sys/kernel/hostname",
    ],
)
async def test_nothing_outside_of_the_working_folder_can_be_written(server: Server, spec: Spec, path: str) -> None:
    sandbox = await server.start(spec)
    with pytest.raises(Raised, match=r"PermissionError|Read-only"):
        await sandbox.run(f"open({path!r}, 'w').write('x')")
    status, _ = await sandbox.shell(f"echo x > {path}")
    assert status != 0


async def test_what_the_host_has_elsewhere_is_not_there(server: Server, spec: Spec, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    sandbox = await server.start(spec)
    for path in (tmp_path / "secret", "/home", "/var", "/sys/kernel", "/boot"):
        with pytest.raises(Raised, match=r"FileNotFoundError|PermissionError"):
            await sandbox.run(f"import os\nos.stat({str(path)!r})\nos.listdir({str(path)!r})")


async def test_another_rollouts_files_can_be_neither_read_nor_written(server: Server, spec: Spec) -> None:
    victim, attacker = await server.start(spec), await server.start(spec)
    await victim.run("open('secret', 'w').write('mine')\nopen('/tmp/secret', 'w').write('mine')")
    await server.freeze(victim)
    for path in (
        f"/.layers/run/{victim.name}/upper/work/secret",
        "/.layers/run",
        "/.layers/images",
        "/.layers/base/work",
    ):
        with pytest.raises(Raised, match="PermissionError"):
            await attacker.run(f"open({path!r})" if "secret" in path else f"import os\nos.listdir({path!r})")
        status, printed = await attacker.shell(f"cat {path}; ls {path}; echo x > {path}; cp /etc/passwd {path}/")
        assert status != 0
        assert "mine" not in printed
    status, printed = await attacker.shell("cat secret /tmp/secret; ls -A . /tmp")
    assert "mine" not in printed
    assert await victim.run("result = open('secret').read()") == "mine"


async def test_modes_and_attributes_of_layers_that_others_share_can_not_be_changed(server: Server, spec: Spec) -> None:
    parent = await server.start(spec)
    await parent.run("import os\nos.mkdir('d')\nopen('d/f', 'w').write('x')")
    frozen = await server.freeze(parent)
    fork = await server.start(spec, frozen.image)
    for path in ("/.layers", "/.layers/base", f"/.layers/images/{frozen.image}/work/d"):
        for attempt in ("chmod({0!r}, 0o777)", "utime({0!r}, (1, 1))", "setxattr({0!r}, 'user.overlay.opaque', b'y')"):
            with pytest.raises(Raised, match="Read-only file system"):
                await fork.run(f"import os\nos.{attempt.format(path)}")
    await fork.run("import os\nos.chmod('d', 0o700)\nopen('d/f', 'w').write('own')")
    sibling = await server.start(spec, frozen.image)
    assert await sibling.run("import os\nresult = oct(os.stat('d').st_mode), open('d/f').read()") == ["0o40755", "x"]


async def test_links_out_of_the_folder_lead_the_keeper_nowhere(server: Server, spec: Spec, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("the host's own")
    sandbox = await server.start(spec)
    frozen = await server.freeze(sandbox)
    await sandbox.run(
        f"import os\nos.symlink({str(outside)!r}, 'folder')\nos.symlink({str(outside / 'precious')!r}, 'file')\n"
        "os.symlink('/etc/passwd', '/tmp/passwd')\nos.mkfifo('pipe')\nos.symlink('loop', 'loop')\n"
        "os.mkdir('locked')\nopen('locked/f', 'w').write('x')\nos.chmod('locked', 0)"
    )
    later = await server.freeze(sandbox)
    assert later.digest != frozen.digest
    fork = await server.start(spec, later.image)
    assert await fork.run("result = os.readlink('folder')") == str(outside)
    async with server.runtime.tree(spec, frozen.image) as a, server.runtime.tree(spec, sandbox.name) as b:
        changes = await asyncio.to_thread(files.diff, a, b, 100)
    assert {change.path: change.kind for change in changes} == {
        "folder": "link",
        "file": "link",
        "pipe": "other",
        "loop": "link",
        "locked": "folder",
        "locked/f": "file",
    }
    assert not [change for change in changes if change.text and "host" in change.text]
    for one in (sandbox, fork):
        await server.runtime.remove(one.name)
    await server.runtime.drop(later.image)
    assert (outside / "precious").read_text() == "the host's own"


@pytest.mark.usefixtures("limited")
async def test_a_fork_bomb_stays_in_its_sandbox_and_ends_with_it(server: Server) -> None:
    spec = code_spec(limits=Limits(pids=40))
    sandbox, other = await server.start(spec), await server.start(spec)
    sandbox.say("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass")
    assert await other.run("import os\nresult = os.waitpid(os.spawnlp(0 or os.P_NOWAIT, 'true', 'true'), 0)[1]") == 0
    group = server.runtime._sandboxes[sandbox.name].group
    assert group is not None
    while len(group.processes()) < 20:
        await asyncio.sleep(0.01)
    assert len(group.processes()) <= 40
    began = time.monotonic()
    await server.runtime.remove(sandbox.name)
    assert time.monotonic() - began < 30
    assert group.processes() == set()


async def test_nobody_outside_of_the_sandbox_gets_its_signals(server: Server, spec: Spec) -> None:
    victim, attacker = await server.start(spec), await server.start(spec)
    process = await victim.run("import os\nresult = os.getpid()")
    driver = await attacker.run("import os\nresult = os.getpid()")
    for number in (1, process):
        with pytest.raises(Raised, match="PermissionError"):
            await attacker.run(f"import os\nos.kill({number}, 9)")
        status, _ = await attacker.shell(f"kill -9 {number}")
        assert status != 0
    await attacker.shell(f"kill -9 {driver}; kill -STOP {driver}; setsid kill -9 -1")
    assert await attacker.run("result = 1") == 1
    assert await victim.run("result = 1") == 1


async def test_processes_of_others_can_not_be_seen(server: Server, spec: Spec) -> None:
    victim, attacker = await server.start(spec), await server.start(spec)
    process = await victim.run("import os\nresult = os.getpid()")
    _, printed = await attacker.shell("ls /proc | grep -E '^[0-9]+$' | wc -l")
    assert int(printed) <= 6  # the pipeline's own
    for name in ("environ", "cmdline", "maps", "root/", "cwd/", "fd/"):
        for number in (1, process):
            status, printed = await attacker.shell(f"ls /proc/{number}/{name} && cat /proc/{number}/{name}")
            assert status != 0, printed


async def test_memory_of_the_driver_and_of_others_can_not_be_opened(server: Server, spec: Spec) -> None:
    victim, attacker = await server.start(spec), await server.start(spec)
    process = await victim.run("import os\nresult = os.getpid()")
    own = await attacker.run("import os, threading\nresult = os.getpid(), threading.get_native_id()")
    for path in (
        f"{process}/mem",
        "1/mem",
        f"{own[0]}/mem",
        f"{own[0]}/task/{own[1]}/mem",
        f"{own[0]}/task/{own[0]}/mem",
    ):
        for mode in ("<", ">", "<>"):
            status, _ = await attacker.shell(f"exec 3{mode}/proc/{path}")
            assert status != 0, (path, mode)
    for path in ("/proc/self/mem", "/proc/thread-self/mem", f"/proc/self/task/{own[0]}/mem"):
        with pytest.raises(Raised, match="PermissionError"):
            await attacker.run(f"open({path!r}, 'r+b')")


async def test_neither_tools_nor_what_they_start_have_any_right(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    told = [
        await sandbox.run("result = open('/proc/thread-self/status').read()"),
        (await sandbox.shell("cat /proc/self/status"))[1],
    ]
    for status in told:
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert {fields[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")


async def test_a_confined_thread_is_followed_by_what_it_starts(server: Server, spec: Spec) -> None:
    """Also where that is a thread, and in forks of forks."""
    sandbox = await server.start(spec)
    code = (
        "import threading\nseen = []\n"
        "def look(): seen.extend(l for l in open('/proc/thread-self/status') if l.startswith(('CapEff', 'Seccomp:')))\n"
        "t = threading.Thread(target=look)\nt.start()\nt.join()\nresult = ''.join(seen).split()"
    )
    for _ in range(3):
        assert await sandbox.run(code) == ["CapEff:", "0" * 16, "Seccomp:", "2"]
        sandbox = await server.fork(spec, sandbox)


@X86_ONLY
@pytest.mark.parametrize(
    ("name", "call", "refused"),
    [
        ("unshare", "call(272, 0x10000000)", "EPERM"),
        ("clone into namespaces", "call(56, 0x10000000 | 17, 0, 0, 0, 0)", "EPERM"),
        ("clone3", "call(435, 0, 0)", "ENOSYS"),
        ("setns", "call(308, 0, 0)", "EPERM"),
        ("mount", "call(165, b'none', b'/tmp', b'tmpfs', 0, 0)", "EPERM"),
        ("fsopen", "call(430, b'tmpfs', 0)", "EPERM"),
        ("chroot", "call(161, b'/tmp')", "EPERM"),
        ("pivot_root", "call(155, b'/tmp', b'/tmp')", "EPERM"),
        ("ptrace", "call(101, 16, 1, 0, 0)", "EPERM"),
        ("process_vm_writev", "call(311, 1, 0, 0, 0, 0, 0)", "EPERM"),
        ("bpf", "call(321, 0, 0, 0)", "EPERM"),
        ("perf_event_open", "call(298, 0, 0, 0, 0, 0)", "EPERM"),
        ("keyctl", "call(250, 0, 0)", "EPERM"),
        ("io_uring_setup", "call(425, 1, 0)", "ENOSYS"),
        ("userfaultfd", "call(323, 0)", "EPERM"),
        ("clock_settime", "call(227, 0, 0)", "EPERM"),
        ("kexec_load", "call(246, 0, 0, 0, 0)", "EPERM"),
        ("init_module", "call(175, 0, 0, b'')", "EPERM"),
        ("open_by_handle_at", "call(304, 0, 0, 0)", "EPERM"),
        ("syslog", "call(103, 3, 0, 0)", "EPERM"),
        ("a vsock", "call(41, 40, 1, 0)", "EPERM"),
        ("a raw packet socket", "call(41, 17, 3, 0)", "EPERM"),
        ("typing into a terminal", "call(16, 0, 0x5412, b'x')", "EPERM"),
        ("another personality", "call(135, 0x0040000)", "EPERM"),
        ("the other ABI", "call(0x40000000 | 39)", "ENOSYS"),
        ("a call that is too new", "call(900)", "ENOSYS"),
    ],
)
async def test_a_system_call_that_reaches_out_is_refused(
    server: Server, spec: Spec, name: str, call: str, refused: str
) -> None:
    sandbox = await server.start(spec)
    assert await sandbox.run(f"{ATTEMPT}\nresult = {call}") == refused


async def test_devices_can_not_be_made(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    with pytest.raises(Raised, match="PermissionError"):
        await sandbox.run("import os\nos.mknod('mem', 0o20666, os.makedev(1, 1))")


async def test_the_network_is_not_there(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        for code in (
            f"s.connect(('127.0.0.1', {listener.getsockname()[1]}))",
            "s.connect(('10.0.0.1', 80))",
            "s.bind(('0.0.0.0', 0))\ns.listen()\nsocket.create_connection(s.getsockname(), 1)",
        ):
            with pytest.raises(Raised, match=r"PermissionError|OSError"):
                await sandbox.run(f"import socket\ns = socket.socket()\ns.settimeout(1)\n{code}")
        code = f"s.sendto(b'x', ('127.0.0.1', {udp.getsockname()[1]}))"
        with pytest.raises(Raised, match="OSError"):
            await sandbox.run(f"s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n{code}")


async def test_unix_sockets_of_others_can_not_be_reached(server: Server, spec: Spec, tmp_path: Path) -> None:
    attacker, victim = await server.start(spec), await server.start(spec)
    name = f"\0{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as by_path, socket.socket(socket.AF_UNIX) as abstract:
        by_path.bind(str(tmp_path / "s"))
        by_path.listen()
        abstract.bind(name)
        abstract.listen()
        for address in (str(tmp_path / "s"), name):
            with pytest.raises(Raised, match=r"FileNotFoundError|PermissionError|ConnectionRefused"):
                await attacker.run(f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({address!r})")
    await victim.run(
        f"import socket\na = socket.socket(socket.AF_UNIX)\na.bind({name!r})\na.listen()\n"
        "p = socket.socket(socket.AF_UNIX)\np.bind('/tmp/p')\np.listen()"
    )
    for address in (name, "/tmp/p"):
        with pytest.raises(Raised, match=r"FileNotFoundError|PermissionError"):
            await attacker.run(f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({address!r})")


async def test_shared_memory_of_others_can_not_be_reached(server: Server, spec: Spec) -> None:
    victim, attacker = await server.start(spec), await server.start(spec)
    assert await victim.run("import ctypes\nresult = ctypes.CDLL(None).shmget(77, 4096, 0o1666)") >= 0
    assert await attacker.run("import ctypes\nresult = ctypes.CDLL(None).shmget(77, 4096, 0o666)") == -1


async def test_programs_inherit_nothing_but_their_three_descriptors(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    await sandbox.run("import os\nos.system('ls -l /proc/self/fd >/tmp/seen; readlink /proc/self/fd/1 >&2')")
    lines = (await sandbox.run("result = open('/tmp/seen').read()")).splitlines()[1:]
    numbers = {line.split(" -> ")[0].split()[-1]: line.split(" -> ")[1] for line in lines}
    assert {number for number, target in numbers.items() if not target.startswith("/proc/")} <= {"0", "1", "2"}
    assert numbers["0"] == "/dev/null"


async def test_a_program_can_not_speak_to_the_client_in_the_servers_name(server: Server, spec: Spec) -> None:
    sandbox = await server.start(spec)
    await sandbox.run("import os\nos.system('echo forged; echo forged >/dev/stdout; echo forged >&1')")
    assert await sandbox.run("result = 'own'") == "own"
