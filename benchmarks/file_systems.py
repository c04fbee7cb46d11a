"""A folder on a file system that can share blocks between files, where this machine can have one."""

import asyncio
import fcntl
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.report import say

_FICLONE = 0x40049409
_SIZE = 40 << 30  # sparse: what is not written takes no room


def shares_blocks(folder: Path) -> bool:
    """Whether a copy within the folder can share its blocks."""
    with tempfile.NamedTemporaryFile(dir=folder) as one, tempfile.NamedTemporaryFile(dir=folder) as two:
        one.write(b"x" * 4096)
        one.flush()
        try:
            fcntl.ioctl(two.fileno(), _FICLONE, one.fileno())
        except OSError:
            return False
    return True


@asynccontextmanager
async def with_reflink(folder: Path) -> AsyncIterator[tuple[Path, str]]:
    """A folder, and what it is on. As root, with mkfs.xfs: a loop-mounted XFS; else `folder` itself."""
    if shares_blocks(folder):
        yield folder, "reflink"
        return
    if os.geteuid() != 0 or not shutil.which("mkfs.xfs"):
        say("no reflink here (it takes XFS or btrfs, or root and mkfs.xfs): databases are copied in full")
        yield folder, "plain copies"
        return
    image, mount = folder / "xfs.image", folder / "xfs"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(_SIZE)
    await _run("mkfs.xfs", "-q", "-m", "reflink=1", str(image))
    await _run("mount", "-o", "loop,noatime", str(image), str(mount))
    try:
        mount.chmod(0o755)
        yield mount, "loop-mounted XFS with reflink"
    finally:
        await _run("umount", "-l", str(mount))
        image.unlink()


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    if await process.wait():
        raise RuntimeError(f"{command[0]} failed")
