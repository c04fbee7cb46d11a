"""Copies of layers: what is in them, and who makes them."""

import asyncio
import os
import stat
from pathlib import Path

import pytest

from sandboxes import copying, layers
from sandboxes.types import SandboxError


def listing(tree: Path) -> dict[str, tuple[object, ...]]:
    """All that a copy must have."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (tree, *tree.rglob("*")):
        told = path.lstat()
        kind = stat.S_IFMT(told.st_mode)
        content = path.read_bytes() if kind == stat.S_IFREG else os.readlink(path) if kind == stat.S_IFLNK else None
        attributes = {} if kind == stat.S_IFLNK else {name: os.getxattr(path, name) for name in os.listxattr(path)}
        found[str(path.relative_to(tree))] = (
            told.st_mode, told.st_uid, told.st_gid, told.st_mtime_ns, told.st_rdev, content, attributes
        )  # fmt: skip
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """One of everything."""
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "f").write_bytes(bytes(range(256)) * 100)
    (tree / "a" / "empty").touch(mode=0o400)
    (tree / "link").symlink_to("/etc/passwd")
    (tree / "dangling").symlink_to("nowhere")
    os.mkfifo(tree / "pipe")
    os.mknod(tree / "whiteout", stat.S_IFCHR, 0)
    os.chmod(tree / "a" / "b", 0o1755)
    os.utime(tree / "a" / "f", ns=(1, 2))
    os.utime(tree / "a", ns=(3, 4))
    return tree


async def test_a_copy_is_the_same_in_all_that_counts(tree: Path, tmp_path: Path) -> None:
    os.setxattr(tree / "a" / "b", "user.overlay.opaque", b"y")
    expected = listing(tree)
    await layers.copy(tree, tmp_path / "small")
    assert listing(tmp_path / "small") == expected
    await layers._copy_by_program(tree, tmp_path / "large")
    assert listing(tmp_path / "large") == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
async def test_a_copy_keeps_owners(tree: Path, tmp_path: Path) -> None:
    for path in (tree, *tree.rglob("*")):
        os.chown(path, 12345, 23456, follow_symlinks=False)
    await layers.copy(tree, tmp_path / "copy")
    assert listing(tmp_path / "copy") == listing(tree)


@pytest.mark.parametrize("what", ["many", "large", "linked"])
async def test_what_is_not_small_is_left_to_a_program_and_copied_all_the_same(
    tree: Path, tmp_path: Path, what: str
) -> None:
    match what:
        case "many":
            for number in range(copying.MOST_ENTRIES):
                (tree / f"f{number}").touch()
        case "large":
            os.truncate(tree / "a" / "f", copying.MOST_BYTES + 1)
        case _:
            os.link(tree / "a" / "f", tree / "other name")
    assert not copying.copy_small(tree, tmp_path / "no")
    assert not (tmp_path / "no").exists()
    await layers.copy(tree, tmp_path / "copy")
    assert listing(tmp_path / "copy") == listing(tree)


async def test_a_folder_that_became_a_link_is_not_followed(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "in its place").symlink_to(tree)
    with pytest.raises(SandboxError):
        await layers.copy(tmp_path / "in its place", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


async def test_a_copy_that_fails_leaves_nothing(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: int, target: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copying, "_share", full)
    with pytest.raises(SandboxError) as refused:
        await layers.copy(tree, tmp_path / "copy")
    assert refused.value.code == "disk_full"
    await asyncio.sleep(0)
    assert not (tmp_path / "copy").exists()
