"""Copies of small folders, without a process for it: what a sandbox has written since its last image is often a few
files.

A copy has everything that overlayfs and programs look at: owners, permissions, times, extended attributes, whiteouts;
blocks are shared where the file system can (reflink). No link is followed: each step is taken from an open folder.
Folders that are larger, or in which a file has several names, are not for this.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MOST_ENTRIES = 256
MOST_BYTES = 4 << 20
_FICLONE = 0x40049409
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_SHARED = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS)


class _NotSmall(Exception):
    pass


def copy_small(source: Path, target: Path) -> bool:
    """Makes `target` a copy of `source`. False, with nothing made, where that is more than small. Raises OSError; then
    part of it may be there."""
    with _opened(source, _FOLDER) as old:
        try:
            _measure(old, [MOST_ENTRIES, MOST_BYTES])
        except _NotSmall:
            return False
        os.mkdir(target, 0o700)
        with _opened(target, _FOLDER) as new:
            _fill(old, new)
            _dress(old, new, os.fstat(old))
    return True


def _measure(folder: int, left: list[int]) -> None:
    with os.scandir(folder) as found:
        for entry in found:
            told = entry.stat(follow_symlinks=False)
            left[0] -= 1
            left[1] -= told.st_size if entry.is_file(follow_symlinks=False) else 0
            if min(left) < 0 or (entry.is_file(follow_symlinks=False) and told.st_nlink > 1):
                raise _NotSmall
            if entry.is_dir(follow_symlinks=False):
                with _opened(entry.name, _FOLDER, folder) as inner:
                    _measure(inner, left)


def _fill(source: int, target: int) -> None:
    with os.scandir(source) as found:
        names = [entry.name for entry in found]
    for name in names:
        told = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(told.st_mode):
            os.mkdir(name, 0o700, dir_fd=target)
            with _opened(name, _FOLDER, source) as old, _opened(name, _FOLDER, target) as new:
                _fill(old, new)
                _dress(old, new, told)
        elif stat.S_ISREG(told.st_mode):
            created = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE
            with _opened(name, os.O_RDONLY | _FILE, source) as old, _opened(name, created, target) as new:
                _share(old, new)
                _dress(old, new, told)
        else:
            if stat.S_ISLNK(told.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            else:  # a whiteout is a device without a number
                os.mknod(name, told.st_mode, told.st_rdev, dir_fd=target)
            os.chown(name, told.st_uid, told.st_gid, dir_fd=target, follow_symlinks=False)
            os.utime(name, ns=(told.st_atime_ns, told.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def _share(source: int, target: int) -> None:
    """The content, by shared blocks if that is possible."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno not in _NOT_SHARED:
            raise
        while os.sendfile(target, source, None, MOST_BYTES):
            pass


def _dress(source: int, target: int, told: os.stat_result) -> None:
    """All but the content. The owner first: it takes special bits away."""
    os.fchown(target, told.st_uid, told.st_gid)
    os.fchmod(target, stat.S_IMODE(told.st_mode))
    for name in os.listxattr(source):
        os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(told.st_atime_ns, told.st_mtime_ns))


@contextlib.contextmanager
def _opened(path: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
