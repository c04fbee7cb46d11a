"""A working folder as a tar: on its way into a container, and out of one to be looked at.

What comes out was made by a program that nobody trusts. It is unpacked into a fresh folder, without owners, devices and
following no link; a hard link to a symbolic link stays one.
"""

import errno
import io
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from sandboxes.types import SandboxError


def packed(name: str, files: Path | None, owner: int) -> IO[bytes]:
    """A tar of a folder `name` with what is in `files`, all of it `owner`'s. The caller closes it."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = owner
        member.uname = member.gname = ""
        return member

    spool = tempfile.TemporaryFile()  # noqa: SIM115 - handed over
    try:
        with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as tar:
            if files is not None:
                tar.add(files, name, filter=owned)
            else:
                top = tarfile.TarInfo(name)
                top.type, top.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(owned(top))
        spool.seek(0)
    except BaseException:
        spool.close()
        raise
    return spool


def unpack(chunks: Iterable[bytes], target: Path, most: int) -> None:
    """What is in the tar's one folder, into `target`, which is empty. Raises `SandboxError`."""
    target = target.resolve()
    folders: list[tuple[Path, int]] = []
    total = 0
    try:
        with tarfile.open(fileobj=io.BufferedReader(_Stream(iter(chunks))), mode="r|") as tar:
            for member in tar:
                total += member.size
                if total > most:
                    raise SandboxError("disk_full", f"The working folder has more than {most} bytes.")
                place = _below(target, member.name)
                if member.isdir():
                    if place != target:
                        place.mkdir(mode=0o700)
                    folders.append((place, stat.S_IMODE(member.mode)))
                elif place != target:
                    _unpack_one(tar, member, place, target)
    except (tarfile.TarError, OSError, EOFError) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        code = "disk_full" if full else "failed"
        raise SandboxError(code, f"The working folder could not be copied to be looked at: {error}.") from error
    for place, mode in reversed(folders):
        place.chmod(mode)


def _unpack_one(tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path, target: Path) -> None:
    if member.issym():
        place.symlink_to(member.linkname)
    elif member.islnk():
        os.link(_below(target, member.linkname), place, follow_symlinks=False)
    elif member.isreg():
        source = tar.extractfile(member)
        assert source is not None
        with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            while chunk := source.read(1 << 20):
                file.write(chunk)
        place.chmod(stat.S_IMODE(member.mode))
    elif member.isfifo():
        os.mkfifo(place)
        place.chmod(stat.S_IMODE(member.mode))


def _below(target: Path, name: str) -> Path:
    """The first part of a member's name is the folder itself."""
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or parts[0] == "/":
        raise SandboxError("failed", f"The engine sent a path that leads out of the folder: {name[:80]!r}.")
    place = target.joinpath(*parts[1:])
    # A folder that became a link while the engine read it is sent as both.
    if os.path.realpath(place.parent) not in (str(place.parent), str(target.parent)):
        raise SandboxError("failed", f"{name[:80]!r} changed while it was read.")
    return place


class _Stream(io.RawIOBase):
    """Chunks as a file that can be read once."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(self._chunks, b"")
        part = self._rest[: len(buffer)]
        buffer[: len(part)] = part
        self._rest = self._rest[len(part) :]
        return len(part)
