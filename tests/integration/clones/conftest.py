"""A state cluster of this folder's own: fsync off, on a file system with reflink where one can be made."""

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from megamcp.handles import Mode, Signer
from megamcp.postgres import EmbeddedPostgres
from megamcp.state.clones import Cluster, Inside, Keys

SIGNER = Signer(b"k" * 32)
KEYS = Keys(*Signer.pads(SIGNER.secret))


@pytest.fixture(scope="session")
def reflink_folder(scratch_folder: Path) -> Iterator[Path]:
    """A folder on a loop-mounted XFS; where that can't be, an ordinary one, and the reason is printed."""
    folder = scratch_folder / "clones"
    folder.mkdir()
    image = scratch_folder / "clones.xfs"
    try:
        if os.geteuid() != 0:
            raise RuntimeError("only root can mount")
        with image.open("wb") as file:
            file.truncate(4 << 30)
        subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", image, folder], check=True, capture_output=True)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"no XFS with reflink here ({error}): clones are plain copies\n")
        yield folder
        return
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=False, capture_output=True)
        shutil.rmtree(image, ignore_errors=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def state_dsn(reflink_folder: Path) -> AsyncIterator[str]:
    async with EmbeddedPostgres(
        reflink_folder / "pg", max_connections=100, settings={"fsync": "off", "full_page_writes": "off"}
    ) as postgres:
        yield postgres.dsn


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(state_dsn: str) -> AsyncIterator[Cluster]:
    cluster = Cluster("test", state_dsn, admin_connections=16)
    await cluster.open()
    yield cluster
    await cluster.close()


_numbers = itertools.count(1)


@dataclass
class Database:
    """A clone with its login, and one of its sessions."""

    cluster: Cluster
    name: str
    password: str
    user: asyncpg.Connection
    rollout: str

    @property
    def login(self) -> str:
        return f"{self.name}_u"

    async def connect(self, **settings: str) -> asyncpg.Connection:
        dsn = self.cluster.dsn_for(self.name, self.login, self.password)
        return await asyncpg.connect(dsn, server_settings=settings)

    def hold(self, **more: Any) -> contextlib.AbstractAsyncContextManager[Inside]:
        return self.cluster.hold(self.name, **{"patience_s": 5, **more})

    async def mark(self) -> Any:
        async with self.hold() as inside:
            return await inside.mark()

    async def rewind(self, position: int) -> None:
        async with self.hold() as inside:
            await inside.rewind(position)

    def handle(self, mode: Mode = Mode.WRITE, *, epoch: int = 1, seconds: float = 10, **more: Any) -> str:
        return SIGNER.mint(
            rollout=self.rollout, server="shop", epoch=epoch, mode=mode, deadline=time.time() + seconds, **more
        )


class World:
    """Makes sources and clones, and takes them away at the end."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._made: list[tuple[str, str]] = []
        self._open: list[asyncpg.Connection] = []

    async def source(self, ddl: str, *seeds: str) -> str:
        name = f"mm_src_{secrets.token_hex(4)}_{next(_numbers)}"
        await self.cluster.build(name, ddl=ddl, seeds=seeds, keys=KEYS)
        self._made.append((name, ""))
        return name

    async def clone(self, source: str) -> Database:
        name = f"mm_db_{secrets.token_hex(4)}_{next(_numbers)}"
        password = secrets.token_hex(16)
        self._made.append((name, f"{name}_u"))
        await self.cluster.clone(source, name, login=f"{name}_u", password=password)
        user = await asyncpg.connect(self.cluster.dsn_for(name, f"{name}_u", password))
        self._open.append(user)
        made = Database(self.cluster, name, password, user, f"ro_{name}")
        async with made.hold() as inside:
            await inside.bind(made.rollout, "shop", 1)
        return made

    async def sealed(self, source: str) -> str:
        name = f"mm_cp_{secrets.token_hex(4)}_{next(_numbers)}"
        self._made.append((name, ""))
        await self.cluster.clone(source, name, login=None)
        return name

    async def start(self, ddl: str, *seeds: str) -> Database:
        return await self.clone(await self.source(ddl, *seeds))

    async def close(self) -> None:
        for connection in self._open:
            connection.terminate()
        for name, login in reversed(self._made):
            await self.cluster.drop(name, login or None)


@pytest_asyncio.fixture(loop_scope="session")
async def world(cluster: Cluster) -> AsyncIterator[World]:
    world = World(cluster)
    yield world
    await world.close()


async def content(connection: Any, tables: Sequence[str]) -> dict[str, list[str]]:
    """All rows of tables as text, sorted: what two states are compared by."""
    return {
        table: sorted(row[0] for row in await connection.fetch(f"select x::text from {table} x")) for table in tables
    }
