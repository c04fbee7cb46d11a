"""Disk that a database has to itself: where blocks are shared, a copy's files look as large as the original's.

Asks the kernel for each file's extents (FIEMAP) and leaves out those that other files share. Works where the cluster's
data folder is on this machine and may be read; elsewhere the caller asks PostgreSQL for the full size.
"""

import errno
import fcntl
import os
import struct
from pathlib import Path

_FIEMAP = 0xC020660B
_HEADER = struct.Struct("=QQLLLL")  # start, length, flags, mapped, room, reserved
_EXTENT = struct.Struct("=QQQQQLLLL")  # logical, physical, length, 2 reserved, flags, 3 reserved
_LAST, _SHARED = 0x1, 0x2000
_ROOM = 128

_GET_ATTRIBUTES, _SET_ATTRIBUTES = 0x801C581F, 0x401C5820
_ATTRIBUTES = struct.Struct("=LLLLL8x")  # flags, size of extents, their number, project, size of copied extents
_OWN_COPY_SIZE = 0x00010000
_PAGE = 8192


def own_bytes(folder: Path) -> int | None:
    """Bytes of a folder's files that no other file shares. None where that can't be told."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    total += _own_bytes_of(entry.path)
    except FileNotFoundError:
        return 0  # it is being dropped
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EACCES, errno.EPERM):
            return None
        raise
    return total


def _own_bytes_of(path: str) -> int:
    found = start = 0
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        while True:
            buffer = bytearray(_HEADER.size + _ROOM * _EXTENT.size)
            _HEADER.pack_into(buffer, 0, start, (1 << 63) - 1 - start, 0, 0, _ROOM, 0)
            fcntl.ioctl(descriptor, _FIEMAP, buffer)
            mapped = _HEADER.unpack_from(buffer)[3]
            for n in range(mapped):
                logical, _, length, _, _, flags, *_ = _EXTENT.unpack_from(buffer, _HEADER.size + n * _EXTENT.size)
                found += 0 if flags & _SHARED else length
                start = logical + length
                if flags & _LAST:
                    return found
            if not mapped:
                return found
    finally:
        os.close(descriptor)


def copy_by_page(folder: Path) -> bool:
    """From now on, a write to a shared block in what is made in the folder copies PostgreSQL's page and no more: XFS
    takes 128 kB otherwise. Says whether the file system can; it has to be the caller's folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        attributes = bytearray(_ATTRIBUTES.size)
        fcntl.ioctl(descriptor, _GET_ATTRIBUTES, attributes)
        flags, size, number, project, _ = _ATTRIBUTES.unpack(attributes)
        _ATTRIBUTES.pack_into(attributes, 0, flags | _OWN_COPY_SIZE, size, number, project, _PAGE)
        fcntl.ioctl(descriptor, _SET_ATTRIBUTES, attributes)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
