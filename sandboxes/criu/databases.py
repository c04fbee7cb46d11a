"""SQLite databases that a container's processes have open: what keeps it from being frozen.

A restored process has a copy of the file, with another inode. SQLite remembers the one that it opened and, where it
keeps a rollback journal, won't begin to write to another: "attempt to write a readonly database". With a write-ahead
log (`pragma journal_mode=wal`) it goes on. A database that is still empty can't be told from any other empty file.
"""

import contextlib
import os
import stat
from collections.abc import Iterable

_MAGIC = b"SQLite format 3\0"
_ROLLBACK = b"\1"
"""The byte behind magic and page size: how the file is written to."""


def held(pids: Iterable[int]) -> str | None:
    """The path of one that is open to be written to, with a rollback journal. The processes stand still."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                link = f"/proc/{pid}/fd/{name}"
                begins = _begins(link) if _writable(pid, name) else b""
                path = os.readlink(link)
                if begins.startswith(_MAGIC) and begins.endswith(_ROLLBACK) and not path.endswith(" (deleted)"):
                    return path
    return None


def _writable(pid: int, descriptor: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{descriptor}") as told:
        flags = next(int(line.split()[1], 8) for line in told if line.startswith("flags:"))
    return flags & os.O_ACCMODE == os.O_RDWR


def _begins(link: str) -> bytes:
    if not stat.S_ISREG(os.stat(link).st_mode):
        return b""
    file = os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.pread(file, len(_MAGIC) + 3, 0)
    finally:
        os.close(file)
