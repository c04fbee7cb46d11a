"""Processes that benchmarks start and look at: a gateway on a database, and the CPU time that a process has used."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

_TICK = os.sysconf("SC_CLK_TCK")
READY = "megamcp is ready at "


def cpu_s(pids: Iterable[int]) -> float:
    """Seconds of user and system time of the processes, and of those of their children that have ended."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / _TICK


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def postgres_pids(postmaster: int) -> list[int]:
    """The postmaster and its backends."""
    return [postmaster, *children(postmaster)]


def resident_kib(pid: int) -> int:
    """Memory that is the process's own (private, resident)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


@asynccontextmanager
async def gateway(dsn: str | None, *options: str, **environment: str) -> AsyncIterator[tuple[str, int]]:
    """A gateway process with one worker: its URL and pid. With a DSN it uses that database."""
    environ = {**os.environ, **environment}
    if dsn:
        environ["MEGAMCP_DATABASE_URL"] = dsn
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "megamcp",
        "serve",
        "--port",
        "0",
        *options,
        env=environ,
        stderr=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
    )
    assert process.stderr is not None
    told: list[str] = []
    try:
        async with asyncio.timeout(120):
            async for raw in process.stderr:
                line = raw.decode(errors="replace").rstrip()
                told.append(line)
                if READY in line:
                    break
            else:
                raise RuntimeError("the gateway did not start:\n" + "\n".join(told[-20:]))
        drain = asyncio.create_task(_drain(process.stderr))
        yield told[-1].partition(READY)[2].split()[0], process.pid
        drain.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass


async def create_database(server: str, name: str) -> str:
    """A new, empty database; an old one of that name goes first. Gives its DSN."""
    from sqlalchemy.engine import make_url

    connection = await asyncpg.connect(server)
    try:
        await connection.execute(f'drop database if exists "{name}" with (force)')
        await connection.execute(f'create database "{name}" template template0')
    finally:
        await connection.close()
    return make_url(server).set(database=name).render_as_string(hide_password=False)
