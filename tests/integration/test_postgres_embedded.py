"""The embedded PostgreSQL: what's committed stays whoever is killed, nothing is left behind.

Everything is real: clusters are made, processes killed. "Owner" below is a process of its own that stands for
the gateway. `LOCKED_DOWN` puts it into a user namespace that allows no further ones, as containers do.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from megamcp import errors
from megamcp.postgres import EmbeddedPostgres, check_server, identity, layout

REPOSITORY = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be refused by PostgreSQL")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

OWNER = """
import asyncio, json, sys
from pathlib import Path
from megamcp import errors
from megamcp.postgres import EmbeddedPostgres

async def main():
    try:
        async with EmbeddedPostgres(Path(sys.argv[1])) as postgres:
            pids = {"postmaster": postgres.postmaster_pid, "supervisor": postgres.supervisor_pid}
            print(json.dumps({"dsn": postgres.dsn, **pids}), flush=True)
            await asyncio.to_thread(sys.stdin.read)
    except errors.MegaMCPError as error:
        print(json.dumps({"code": error.code, "message": error.message, **error.extra}), flush=True)

asyncio.run(main())
"""

LOCKED_DOWN = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
reader, writer = os.pipe()
outside = os.fork()
if outside == 0:
    os.read(reader, 1)
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{os.getppid()}/{name}", "w") as file:
            file.write("0 0 65536")
    os._exit(0)
assert libc.unshare(0x10000000) == 0
os.write(writer, b"x")
assert os.waitpid(outside, 0)[1] == 0
with open("/proc/sys/user/max_user_namespaces", "w") as file:
    file.write("0")
"""
WITHOUT_CAPABILITY = "assert libc.prctl(24, {number}, 0, 0, 0) == 0\n"  # leaves the bounding set: gone after exec


@asynccontextmanager
async def owner(folder: Path, preamble: str = "") -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """A process that owns the PostgreSQL of `folder`: its pid and what it says about it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", preamble + OWNER, str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.pid, json.loads(await asyncio.wait_for(process.stdout.readline(), 60) or "{}")
    finally:
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 60)


def kill(*pids: int | None) -> None:
    for pid in pids:
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):  # the death of one ends others
            os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> list[int]:
    """Everything that works in the cluster or was started for the folder, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                command = (entry / "cmdline").read_bytes()
                supervises = b"megamcp.postgres.supervise" in command and os.fsencode(folder) in command
                works_in = (entry / "cwd").readlink().is_relative_to(folder)
                if supervises or works_in:
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


async def gone(folder: Path, within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while processes_of(folder):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def run(dsn: str, *statements: str) -> Any:
    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        for statement in statements:
            result = await connection.fetchval(statement)
        return result
    finally:
        await connection.close()


def shared_memory(folder: Path, postmaster: int) -> tuple[str, set[Path]]:
    """Id of the System V segment and files of the dynamic segments of a running server."""
    segment = (folder / "cluster/postmaster.pid").read_text().splitlines()[6].split()[1]
    maps = Path(f"/proc/{postmaster}/maps").read_text().split()
    return segment, {Path(word) for word in maps if word.startswith("/dev/shm/PostgreSQL.")}


def leaked(memory: tuple[str, set[Path]]) -> list[object]:
    segments = [line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    return [*(segment for segment in segments if segment == memory[0]), *(f for f in memory[1] if f.exists())]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="pg-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def made_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder that each test may use, one after the other; data in it may be of earlier tests."""
    return tmp_path_factory.mktemp("made") / "postgres"


# -- the plain life --------------------------------------------------------------------------------


async def test_data_survives_stop_and_start_and_nothing_is_left_running(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "postgres"
    async with EmbeddedPostgres(folder, settings={"work_mem": "7MB"}) as postgres:
        assert await run(postgres.dsn, "create table kept as select 7 as n", "select n from kept") == 7
        assert await run(postgres.dsn, "show work_mem") == "7MB"
        memory = shared_memory(folder, postgres.postmaster_pid or 0) if sys.platform == "linux" else ("", set())
        first = postgres.postmaster_pid
    if sys.platform == "linux":
        assert not processes_of(folder)
        assert not leaked(memory)
    assert not list((folder / "run").iterdir())
    async with EmbeddedPostgres(folder) as postgres:
        assert postgres.postmaster_pid != first
        assert await run(postgres.dsn, "select n from kept") == 7


async def test_settings_are_durable_and_reachable_over_the_socket_only(made_folder: Path) -> None:
    async with EmbeddedPostgres(made_folder, max_connections=123, settings={"listen_addresses": "*"}) as postgres:
        names = "fsync synchronous_commit listen_addresses jit max_connections max_locks_per_transaction"
        shown = [await run(postgres.dsn, f"show {name}") for name in names.split()]
        assert shown == ["on", "on", "", "off", "123", "256"]
        assert (
            await run(postgres.dsn, "select datlocprovider::text || datlocale from pg_database limit 1") == "bC.UTF-8"
        )
        assert await run(postgres.dsn, "show server_encoding") == "UTF8"
        assert (made_folder / "run").stat().st_mode & 0o777 == 0o700
        assert (made_folder / "password").stat().st_mode & 0o777 == 0o600


async def test_roles_log_in_with_their_own_password_and_sqlalchemy_takes_the_dsn(made_folder: Path) -> None:
    async with EmbeddedPostgres(made_folder) as postgres:
        await run(postgres.dsn, "create role tool login password 'p@ss/w?rd'", "create database tools")
        dsn = postgres.dsn_for("tools", user="tool", password="p@ss/w?rd")
        assert await run(dsn, "select current_user || current_database()") == "tooltools"
        with pytest.raises(asyncpg.InvalidPasswordError):
            await run(postgres.dsn_for("tools", user="tool", password="wrong"), "select 1")
        engine = create_async_engine(dsn.replace("postgresql://", "postgresql+asyncpg://"))
        async with engine.connect() as connection:
            assert (await connection.execute(text("select current_user"))).scalar() == "tool"
        await engine.dispose()


async def test_stop_is_idempotent_and_a_stopped_server_can_be_started_again(made_folder: Path) -> None:
    postgres = EmbeddedPostgres(made_folder)
    await postgres.stop()
    for _ in range(2):
        await postgres.start()
        assert await run(postgres.dsn, "select 1") == 1
        assert await postgres.ready() == postgres.generation == 1
        await asyncio.gather(postgres.stop(), postgres.stop())
    with pytest.raises(errors.Unavailable):
        _ = postgres.dsn


async def test_the_log_is_bounded(made_folder: Path) -> None:
    async with EmbeddedPostgres(made_folder) as postgres:
        os.truncate(made_folder / "postgres.log", 17 << 20)
        deadline = time.monotonic() + 10
        while (made_folder / "postgres.log").stat().st_size > 1 << 20:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        with pytest.raises(asyncpg.PostgresError):
            await run(postgres.dsn, "select no_such_column")
        assert "no_such_column" in (made_folder / "postgres.log").read_text()


# -- kill -9 ---------------------------------------------------------------------------------------


@needs_linux
async def test_a_killed_postmaster_comes_back_with_what_was_committed(made_folder: Path) -> None:
    async with EmbeddedPostgres(made_folder) as postgres:
        await run(postgres.dsn, "drop table if exists kept", "create table kept as select 1 as n")
        busy = await asyncpg.connect(postgres.dsn)
        pid = await busy.fetchval("select pg_backend_pid()")
        query = asyncio.create_task(busy.execute("select count(*) from generate_series(1, 1e12::bigint)"))
        await asyncio.sleep(0.2)
        memory = shared_memory(made_folder, postgres.postmaster_pid or 0)
        for expected in (2, 3):
            await run(postgres.dsn, f"update kept set n = {expected}")
            kill(postgres.postmaster_pid)
            assert await postgres.ready(after=expected - 1, timeout=20) == expected
            assert await run(postgres.dsn, "select n from kept") == expected
        assert not Path(f"/proc/{pid}").exists(), "a computing backend of the dead postmaster is still there"
        with pytest.raises((asyncpg.PostgresError, OSError, asyncpg.InterfaceError)):
            await query
        busy.terminate()
    assert not leaked(memory)


@needs_linux
async def test_a_killed_supervisor_is_replaced(made_folder: Path) -> None:
    async with EmbeddedPostgres(made_folder) as postgres:
        before = postgres.supervisor_pid, postgres.dsn
        kill(postgres.supervisor_pid)
        await postgres.ready(after=1, timeout=20)
        assert postgres.supervisor_pid != before[0]
        assert await run(before[1], "select 1") == 1
    assert not processes_of(made_folder)


@needs_linux
@pytest.mark.parametrize("victims", ["owner", "owner and supervisor", "all"])
async def test_nothing_is_left_when_the_owner_is_killed(made_folder: Path, victims: str) -> None:
    async with owner(made_folder) as (pid, known):
        await run(known["dsn"], "drop table if exists kept", f"create table kept as select '{victims}'::text as n")
        memory = shared_memory(made_folder, known["postmaster"])
        also = {"owner": [], "owner and supervisor": ["supervisor"], "all": ["supervisor", "postmaster"]}[victims]
        kill(pid, *(known[name] for name in also))
    if victims != "all":
        assert await gone(made_folder)
        assert not leaked(memory)
    async with EmbeddedPostgres(made_folder) as postgres:
        assert await run(postgres.dsn, "select n from kept") == victims
    assert not leaked(memory)


@needs_linux
async def test_a_start_while_the_killed_owners_server_is_still_ending_waits_for_it(made_folder: Path) -> None:
    async with owner(made_folder) as (pid, known):
        await run(known["dsn"], "drop table if exists kept", "create table kept as select 5 as n")
        os.kill(known["supervisor"], signal.SIGSTOP)  # so that it still holds its lock when the next one comes
        kill(pid)
    postgres = EmbeddedPostgres(made_folder)
    starting = asyncio.create_task(postgres.start())
    await asyncio.sleep(0.5)
    assert not starting.done()
    os.kill(known["supervisor"], signal.SIGCONT)
    await asyncio.wait_for(starting, 20)
    assert await run(postgres.dsn, "select n from kept") == 5
    await postgres.stop()


@needs_linux
async def test_the_next_start_ends_a_backend_that_outlived_everyone(made_folder: Path) -> None:
    async with owner(made_folder) as (pid, known):
        busy = await asyncpg.connect(known["dsn"])
        backend = await busy.fetchval("select pg_backend_pid()")
        query = asyncio.create_task(busy.execute("select count(*) from generate_series(1, 1e12::bigint)"))
        await asyncio.sleep(0.2)
        kill(pid, known["supervisor"], known["postmaster"])
        assert Path(f"/proc/{backend}").exists()
    async with EmbeddedPostgres(made_folder) as postgres:
        assert await run(postgres.dsn, "select 1") == 1
        assert backend not in processes_of(made_folder)
    with pytest.raises((asyncpg.PostgresError, OSError, asyncpg.InterfaceError)):
        await query
    busy.terminate()


@needs_linux
async def test_a_stale_lock_file_with_the_pid_of_another_process_is_no_obstacle(made_folder: Path) -> None:
    async with owner(made_folder) as (pid, known):
        kill(pid, known["supervisor"], known["postmaster"])
    assert await gone(made_folder)
    for name in ("cluster/postmaster.pid", "run/.s.PGSQL.5432.lock"):
        lines = (made_folder / name).read_text().splitlines(keepends=True)
        (made_folder / name).write_text("".join([f"{os.getpid()}\n", *lines[1:]]))
    async with EmbeddedPostgres(made_folder) as postgres:
        assert await run(postgres.dsn, "select 1") == 1


@needs_linux
async def test_an_initdb_that_was_killed_is_done_again(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, str(tmp_path), cwd=REPOSITORY)
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("cluster.new-*/base/1")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    kill(process.pid, *processes_of(tmp_path))
    await process.wait()
    assert await gone(tmp_path)
    assert not (tmp_path / "cluster").exists()
    async with EmbeddedPostgres(tmp_path) as postgres:
        assert await run(postgres.dsn, "select 1") == 1
    assert not list(tmp_path.glob("cluster.new*"))


# -- whose folder it is ----------------------------------------------------------------------------


async def test_a_second_owner_is_refused_and_told_who_has_it(made_folder: Path) -> None:
    async with EmbeddedPostgres(made_folder) as postgres:
        with pytest.raises(errors.Conflict) as caught:
            await EmbeddedPostgres(made_folder).start()
        assert (caught.value.code, caught.value.extra["pid"]) == ("data_folder_in_use", os.getpid())
        async with owner(made_folder) as (_, known):
            assert (known["code"], known["pid"]) == ("data_folder_in_use", os.getpid())
        assert await run(postgres.dsn, "select 1") == 1


@needs_linux
async def test_a_forked_child_of_a_killed_owner_blocks_nothing(made_folder: Path) -> None:
    forks = "import os, time, threading\nthreading.Timer(0.3, lambda: os.fork() or time.sleep(60)).start()\n"
    async with owner(made_folder, forks) as (pid, known):
        await asyncio.sleep(0.6)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        threads = [Path(p).read_text().split() for p in Path(f"/proc/{pid}/task").glob("*/children")]
        forked = {int(child) for found in (children, *threads) for child in found} - {known["supervisor"]}
        assert len(forked) == 1
        kill(pid)
        try:
            async with EmbeddedPostgres(made_folder) as postgres:
                assert await run(postgres.dsn, "select 1") == 1
        finally:
            kill(*forked)


async def test_a_long_path_gets_a_short_socket_that_goes_when_it_stops(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 20) / "with, a comma"
    for _ in range(2):
        async with EmbeddedPostgres(folder) as postgres:
            socket_folder = Path((folder / "run.path").read_text())
            assert socket_folder.stat().st_mode & 0o777 == 0o700
            assert await run(postgres.dsn, "select 1") == 1
        assert not socket_folder.exists()


@pytest.mark.parametrize("case", ["foreign", "major", "not a folder", "password", "newer"])
def test_a_folder_that_cant_be_used_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    cluster = tmp_path / "cluster"
    code = {
        "foreign": "data_folder_foreign",
        "newer": "data_folder_foreign",
        "major": "postgres_major_mismatch",
    }
    if case in {"major", "password"}:
        cluster.mkdir()
        (cluster / "PG_VERSION").write_text("17\n" if case == "major" else f"{layout.MAJOR}\n")
        (tmp_path / "megamcp-postgres").write_text("1")
    elif case == "newer":
        (tmp_path / "megamcp-postgres").write_text("2")
    else:
        (tmp_path / "letters.txt").write_text("dear")
    folder = tmp_path / "letters.txt" / "postgres" if case == "not a folder" else tmp_path
    with pytest.raises(errors.Unprocessable) as caught:
        layout.claim(folder)
    expected = {"not a folder": "data_folder_not_writable", "password": "password_missing"}
    assert caught.value.code == {**code, **expected}[case]
    assert caught.value.hint


@needs_root
@needs_linux
@pytest.mark.parametrize(("options", "code"), [("size=8m", "no_space"), ("ro", "data_folder_not_writable")])
def test_a_full_or_read_only_disk_is_named(tmp_path: Path, options: str, code: str) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(tmp_path)], check=False)
    if mounted.returncode != 0:
        pytest.skip("may not mount")
    try:
        with pytest.raises(errors.MegaMCPError) as caught:
            layout.claim(tmp_path)
        assert caught.value.code == code
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


async def test_a_server_that_cant_start_says_why_and_frees_the_folder(made_folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(errors.Unavailable, match="shared_buffers") as caught:
            await EmbeddedPostgres(made_folder, settings={"shared_buffers": "lots"}).start()
        assert caught.value.code == "postgres_start_failed"


# -- root ------------------------------------------------------------------------------------------


@needs_root
@needs_linux
async def test_as_root_the_server_has_no_capability(made_folder: Path) -> None:
    async with EmbeddedPostgres(made_folder) as postgres:
        status = Path(f"/proc/{postgres.postmaster_pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in status


@needs_root
@needs_linux
@pytest.mark.parametrize("lacks", [[], [2]], ids=["all capabilities", "without CAP_DAC_READ_SEARCH"])
async def test_as_root_without_namespaces_another_user_is_found(tmp_path: Path, lacks: list[int]) -> None:
    folder = tmp_path / "postgres"
    again = f"import sys; os.execv(sys.executable, [sys.executable, '-c', {OWNER!r}, sys.argv[1]])\n"
    preamble = LOCKED_DOWN + "".join(WITHOUT_CAPABILITY.format(number=number) for number in lacks) + again
    async with owner(folder, preamble) as (pid, known):
        assert "dsn" in known, known
        await run(known["dsn"], "create table kept as select 3 as n")
        assert os.stat(f"/proc/{known['postmaster']}").st_uid != 0
        kill(pid, known["supervisor"])
    assert await gone(folder)
    async with EmbeddedPostgres(folder) as postgres:  # the files keep their owner, where namespaces are allowed too
        assert await run(postgres.dsn, "select n from kept") == 3
        kill(postgres.postmaster_pid)
        await postgres.ready(after=1, timeout=20)


@needs_root
@needs_linux
async def test_as_root_where_every_user_may_enter_no_capability_is_kept(short_folder: Path) -> None:
    if not _reachable(layout.binaries()):
        pytest.skip("the installation lies where only root may enter")
    async with owner(short_folder / "postgres", LOCKED_DOWN) as (_, known):
        assert "dsn" in known, known
        status = Path(f"/proc/{known['postmaster']}/status").read_text()
        assert "CapEff:\t0000000000000000" in status
        assert "Uid:\t0" not in status


@needs_root
@needs_linux
async def test_as_root_with_no_way_out_the_error_says_what_to_do(tmp_path: Path) -> None:
    again = f"import sys; os.execv(sys.executable, [sys.executable, '-c', {OWNER!r}, sys.argv[1]])\n"
    no_setuid = WITHOUT_CAPABILITY.format(number=6) + WITHOUT_CAPABILITY.format(number=7)
    async with owner(tmp_path / "postgres", LOCKED_DOWN + no_setuid + again) as (_, known):
        assert known["code"] == "postgres_needs_a_user"
        assert "unshare" in known["message"]


def _reachable(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in (path, *path.parents))


# -- a server of the user's own --------------------------------------------------------------------


async def test_check_server_tells_the_version_or_what_is_wrong(made_folder: Path) -> None:
    async with EmbeddedPostgres(made_folder) as postgres:
        assert await check_server(postgres.dsn) == 18
        assert await check_server(postgres.dsn.replace("postgresql://", "postgresql+asyncpg://")) == 18
        wrong = postgres.dsn_for(user="postgres", password="not-this-one")
        with pytest.raises(errors.Unprocessable, match="password") as caught:
            await check_server(wrong)
        assert "not-this-one" not in str(caught.value)
        dsn = postgres.dsn
    for unreachable in (dsn, "postgresql://someone:secret@127.0.0.1:1/nowhere"):
        with pytest.raises(errors.Unavailable) as caught:
            await check_server(unreachable)
        assert caught.value.code == "database_unreachable"
        assert "secret" not in str(caught.value)
    for bad in ("mysql://localhost/x", "", "postgresql://localhost:port/x"):
        with pytest.raises(errors.Unprocessable) as refused:
            await check_server(bad)
        assert refused.value.code == "bad_database_url"


async def test_check_server_refuses_an_old_server(short_folder: Path) -> None:
    programs = layout.binaries().parents[1] / "pginstall" / "bin"  # the wheel holds PostgreSQL 16 too
    if not (programs / "postgres").exists():
        pytest.skip("no older PostgreSQL in this wheel")
    way = identity.candidates(None)[0]
    cluster = short_folder / "old"

    def start(*command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [programs / command[0], *command[1:]],
            preexec_fn=lambda: identity.become(way),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    assert start("initdb", "-D", str(cluster), "-U", "postgres", "-A", "trust", "-N").wait() == 0
    server = start("postgres", "-D", str(cluster), "-k", str(short_folder), "-c", "listen_addresses=")
    try:
        dsn = f"postgresql://postgres@/postgres?host={short_folder}&port=5432"
        deadline = time.monotonic() + 20
        lock_file = cluster / "postmaster.pid"
        while not lock_file.exists() or "ready" not in lock_file.read_text():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        with pytest.raises(errors.Unprocessable, match="16") as caught:
            await check_server(dsn)
        assert caught.value.code == "postgres_too_old"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
