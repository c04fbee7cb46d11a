"""Working folders: what a sandbox writes goes into a layer of its own above layers that nobody writes any more.

A *stack* is a list of folders, newest first. On overlayfs a sandbox's working folder is a mount of its stack with a
fresh upper folder; its frozen state is a copy of that upper folder on top of the same stack, with shared blocks where
the file system has them (reflink). Where nothing can be mounted the working folder is a plain copy, and so is what is
frozen of it.

Removing follows no link and crosses no mount. What a sandbox wrote is hostile: nothing here executes or trusts it.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sandboxes import copying
from sandboxes.confine import kernel
from sandboxes.types import SandboxError

DEEPEST = 24
"""Layers of a stack; a deeper one is flattened into one when it is frozen."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers, newest first; the last is what the working folder starts with."""

    layers: tuple[Path, ...]

    def options(self, upper: Path, work: Path, *, user: bool) -> str:
        """Of an overlay mount. `user`: made in a user namespace, whose attributes have names of their own."""
        for path in (*self.layers, upper, work):
            if any(mark in str(path) for mark in ':,\\"'):
                raise SandboxError("invalid_spec", f"An overlay can't have a layer at {path}.")
        lower = ":".join(map(str, self.layers))
        return f"lowerdir={lower},upperdir={upper},workdir={work}" + (",userxattr" if user else "")


def unmount(target: Path | str) -> None:
    """At once, and for good when the last user is gone. Nothing where nothing is mounted. Raises OSError."""
    try:
        kernel.unmount(target)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise


@asynccontextmanager
async def shown(folder: Path, stack: Sequence[str], *, user: bool) -> AsyncIterator[Path]:
    """What a stack of layers in a folder shows, for reading. `user` as in `Stack.options`."""
    if len(stack) == 1:
        yield folder / stack[0]
        return
    place = folder / f"view-{os.urandom(6).hex()}"
    place.mkdir()
    try:
        lower = ":".join(str(folder / layer) for layer in stack)
        kernel.mount(
            "overlay", place, "overlay", kernel.MS_RDONLY, f"lowerdir={lower}" + (",userxattr" if user else "")
        )
        yield place
    finally:
        with contextlib.suppress(OSError):
            unmount(place)
        place.rmdir()


async def copy(source: Path, target: Path) -> None:
    """A folder with all that overlayfs keeps in it: whiteouts, opaque marks, links. `target` must not be there.

    Raises `SandboxError` (`disk_full`, `failed`); then `target` isn't there either.
    """
    try:
        if not await asyncio.to_thread(copying.copy_small, source, target):
            await _copy_by_program(source, target)
    except OSError as error:
        await remove(target)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(source) from error
        raise SandboxError("failed", f"A folder could not be copied: {error}.") from error
    except BaseException:
        await remove(target)
        raise


async def _copy_by_program(source: Path, target: Path) -> None:
    """What is large, or has holes: `cp` is better at it."""
    process = await asyncio.create_subprocess_exec(
        "cp",
        "--archive",
        "--reflink=auto",
        "--no-target-directory",
        "--",
        str(source),
        str(target),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"},
    )
    try:
        _, told = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode:
        words = told.decode(errors="replace").strip()[-500:]
        if "No space left" in words or "Disk quota" in words:
            raise _full(source)
        raise SandboxError("failed", f"A folder could not be copied: {words}.")


def _full(source: Path) -> SandboxError:
    return SandboxError("disk_full", f"There is no room to copy {source.name}.", hint="Make room, or drop images.")


async def remove(tree: Path) -> None:
    """Everything below a folder, and itself; mounts on it are let go of first. Nothing where it isn't there."""
    try:
        await asyncio.to_thread(_remove, tree)
    except (OSError, RecursionError):  # folders in folders in folders, more of them than can be open at once
        process = await asyncio.create_subprocess_exec("rm", "-rf", "--", str(tree), stdin=asyncio.subprocess.DEVNULL)
        if await process.wait():
            raise SandboxError("failed", f"The folder {tree} could not be removed.") from None


def _remove(tree: Path) -> None:
    if not os.path.lexists(tree):
        return
    with contextlib.suppress(OSError):
        unmount(tree)

    def unlocked(function: object, path: str, error: BaseException) -> None:
        # What a sandbox may do to its own folder: take the right to enter or to change it.
        parent = os.path.dirname(path)
        with contextlib.suppress(OSError):
            os.chmod(parent, 0o700, follow_symlinks=True)
        told = os.lstat(path)
        if stat.S_ISDIR(told.st_mode):
            os.chmod(path, 0o700)
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def on_error(function: object, path: str, info: tuple[type, BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            unlocked(function, path, info[1])

    shutil.rmtree(tree, onerror=on_error)


def open_to_all(tree: str | Path) -> bool:
    """Whether any user may read the folders and the modules of Python in a folder."""
    for place, _, names in os.walk(tree):
        modules = [os.path.join(place, name) for name in names if name.endswith(".py")]
        for path, needed in ((place, 0o005), *((path, 0o004) for path in modules)):
            with contextlib.suppress(FileNotFoundError):  # an editor's link to nowhere
                if os.stat(path).st_mode & needed != needed:
                    return False
    return True


def size(tree: Path, spared: int | None = None) -> int:
    """Bytes on disk of a folder, each file counted once and for a page at least. What vanishes meanwhile counts
    nothing, and no link is followed, also none that takes a folder's place meanwhile. Nor does one file that
    has `spared` bytes."""
    total = 0
    seen: set[tuple[int, int]] = set()
    try:
        open_folders = [(os.open(tree, _FOLDER), [""])]
    except OSError:
        return 0
    try:
        while open_folders:
            folder, names = open_folders[-1]
            if not names:
                os.close(open_folders.pop()[0])
                continue
            name = names.pop()
            with contextlib.suppress(OSError):
                inner = os.open(name, _FOLDER, dir_fd=folder) if name else os.dup(folder)
                open_folders.append((inner, inside := []))
                with os.scandir(inner) as found:
                    for entry in found:
                        told = os.stat(entry.name, dir_fd=inner, follow_symlinks=False)
                        if (told.st_dev, told.st_ino) in seen:
                            continue
                        seen.add((told.st_dev, told.st_ino))
                        if spared is not None and stat.S_ISREG(told.st_mode) and told.st_size >= spared:
                            spared = None
                            continue
                        total += max(told.st_blocks * 512, _PAGE)
                        if stat.S_ISDIR(told.st_mode):
                            inside.append(entry.name)
    finally:
        for folder, _ in open_folders:
            os.close(folder)
    return total
