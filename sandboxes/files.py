"""What is in a working folder: a digest of it, and what differs between two.

Only what a program can rely on counts: paths, kinds, permission bits, links' targets, contents. Owners, times and the
order on disk don't. Nothing here follows a link or leaves the folder: what is in it may be hostile.
"""

import difflib
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes.types import FileChange, SandboxError

TEXT_BYTES = 256 << 10
TEXTS_BYTES = 4 << 20
"""Of all text diffs together; what comes after it is told without."""
_CHUNK = 1 << 20
_DEEPEST = 200


@dataclass(frozen=True, slots=True)
class Entry:
    """A path that is there. `mark` is equal for equal contents."""

    kind: str
    mode: int
    size: int
    mark: bytes


def digest(tree: Path) -> str:
    """64 hex digits: SHA-256 over the sorted entries."""
    total = hashlib.sha256()
    for path, entry in sorted(entries(tree)):
        told = b"\0".join((os.fsencode(path), entry.kind.encode(), b"%o" % entry.mode, entry.mark))
        total.update(len(told).to_bytes(8) + told)
    return total.hexdigest()


def diff(older: Path, newer: Path, most: int) -> list[FileChange]:
    """By path. At most `most` and one more, by which one sees that there are more."""
    before, after = dict(entries(older)), dict(entries(newer))
    found: list[FileChange] = []
    room = TEXTS_BYTES
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        if len(found) > most:
            break
        shown = new or old
        assert shown is not None
        text = _text(older, newer, path, old, new) if room > 0 else None
        room -= len(text or "")
        found.append(
            FileChange(
                path=os.fsencode(path).decode("utf-8", "backslashreplace"),
                change="added" if old is None else "removed" if new is None else "changed",
                kind=shown.kind,
                size=shown.size if shown.kind == "file" else None,
                mode=shown.mode,
                text=text,
            )
        )
    return found


def entries(tree: Path) -> Iterator[tuple[str, Entry]]:
    """Every path below a folder, relative to it, in no order."""
    top = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield from _entries(top, "", _DEEPEST)
    finally:
        os.close(top)


def _entries(folder: int, prefix: str, deeper: int) -> Iterator[tuple[str, Entry]]:
    if not deeper:
        raise SandboxError("failed", f"Folders are nested more than {_DEEPEST} deep: {prefix[:80]}…")
    with os.scandir(folder) as found:
        names = [entry.name for entry in found]
    for name in names:
        told = os.stat(name, dir_fd=folder, follow_symlinks=False)
        mode = stat.S_IMODE(told.st_mode)
        path = prefix + name
        if stat.S_ISDIR(told.st_mode):
            yield path, Entry("folder", mode, 0, b"")
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                yield from _entries(inner, path + "/", deeper - 1)
            finally:
                os.close(inner)
        elif stat.S_ISLNK(told.st_mode):
            yield path, Entry("link", 0, 0, os.fsencode(os.readlink(name, dir_fd=folder)))
        elif stat.S_ISREG(told.st_mode):
            yield path, Entry("file", mode, told.st_size, _content(folder, name))
        else:  # a pipe, a socket, a device: that it is there is all there is to it
            yield path, Entry("other", mode, 0, b"%o" % stat.S_IFMT(told.st_mode))


def _content(folder: int, name: str) -> bytes:
    total = hashlib.sha256()
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(descriptor, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            total.update(chunk)
    return total.digest()


def _text(older: Path, newer: Path, path: str, old: Entry | None, new: Entry | None) -> str | None:
    """A unified diff, where both sides are text or not there."""
    if not any(entry is not None and entry.kind == "file" for entry in (old, new)):
        return None
    sides = []
    for tree, entry in ((older, old), (newer, new)):
        if entry is None:
            sides.append("")
        elif entry.kind != "file" or entry.size > TEXT_BYTES:
            return None
        else:
            try:
                sides.append(_start(tree, path).decode())
            except (OSError, UnicodeDecodeError):
                return None
            if "\0" in sides[-1]:
                return None
    if sides[0] == sides[1]:
        return None
    name = os.fsencode(path).decode("utf-8", "backslashreplace")
    lines = difflib.unified_diff(
        sides[0].splitlines(keepends=True),
        sides[1].splitlines(keepends=True),
        f"a/{name}" if old else "/dev/null",
        f"b/{name}" if new else "/dev/null",
    )
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def _start(tree: Path, path: str) -> bytes:
    """What a file begins with. No step follows a link: a program that still runs may put one in a folder's place."""
    *folders, name = path.split("/")
    place = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = inner
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place), "rb") as file:
            return file.read(TEXT_BYTES + 1)
    finally:
        os.close(place)
