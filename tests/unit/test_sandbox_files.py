"""Digest and diff of working folders."""

import os
import resource
import socket
from pathlib import Path

import pytest

from sandboxes import files, layers
from sandboxes.types import SandboxError


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (tmp_path / name / "folder").mkdir(parents=True)
        (tmp_path / name / "folder" / "text").write_text("one\ntwo\n")
        (tmp_path / name / "link").symlink_to("folder/text")
    return tmp_path / "a", tmp_path / "b"


def changes(older: Path, newer: Path) -> list[tuple[str, str]]:
    return [(change.path, change.change) for change in files.diff(older, newer, 100)]


def test_equal_folders_have_equal_digests_whatever_their_times(two: tuple[Path, Path]) -> None:
    os.utime(two[1] / "folder" / "text", (1, 1))
    assert files.digest(two[0]) == files.digest(two[1])
    assert changes(*two) == []


def test_every_kind_of_change_shows_in_diff_and_digest(two: tuple[Path, Path]) -> None:
    first = files.digest(two[0])
    for change, expected in (
        (lambda: (two[1] / "folder" / "text").write_text("one\n2\n"), ("folder/text", "changed")),
        (lambda: (two[1] / "link").unlink(), ("link", "removed")),
        (lambda: (two[1] / "link").symlink_to("/etc"), ("link", "changed")),
        (lambda: (two[1] / "empty").mkdir(), ("empty", "added")),
        (lambda: (two[1] / "folder").chmod(0o700), ("folder", "changed")),
        (lambda: os.mkfifo(two[1] / "pipe"), ("pipe", "added")),
    ):
        before = files.digest(two[1])
        change()
        assert files.digest(two[1]) not in (before, first)
        assert expected in changes(*two)


def test_undoing_a_change_by_hand_gives_the_old_digest(two: tuple[Path, Path]) -> None:
    before = files.digest(two[1])
    (two[1] / "new").write_text("x")
    (two[1] / "new").unlink()
    assert files.digest(two[1]) == before


def test_a_text_file_has_a_unified_diff(two: tuple[Path, Path]) -> None:
    (two[1] / "folder" / "text").write_text("one\n2")
    (two[1] / "new").write_text("n\n")
    by_path = {change.path: change.text for change in files.diff(*two, 100)}
    assert by_path["folder/text"] == (
        "--- a/folder/text\n+++ b/folder/text\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n\\ No newline at end of file\n"
    )
    assert by_path["new"] == "--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+n\n"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\0b", b"x" * (files.TEXT_BYTES + 1)])
def test_what_is_no_text_of_moderate_size_has_none(two: tuple[Path, Path], content: bytes) -> None:
    (two[1] / "folder" / "text").write_bytes(content)
    (change,) = files.diff(*two, 100)
    assert change.text is None
    assert change.size == len(content)


def test_a_link_out_of_the_folder_is_not_followed(two: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (two[1] / "way").symlink_to(tmp_path / "outside")
    (two[1] / "file").symlink_to(tmp_path / "outside" / "secret")
    found = files.diff(*two, 100)
    assert [(change.path, change.kind) for change in found] == [("file", "link"), ("way", "link")]
    assert not any("secret" in (change.text or "").replace("outside/secret", "") for change in found)


def test_sockets_and_pipes_are_there_and_nothing_waits_for_them(two: tuple[Path, Path]) -> None:
    os.mkfifo(two[1] / "pipe")
    folder = os.getcwd()
    os.chdir(two[1])  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("socket")
    finally:
        os.chdir(folder)
    assert [(change.path, change.kind) for change in files.diff(*two, 100)] == [("pipe", "other"), ("socket", "other")]


def test_a_diff_ends_one_after_its_limit(two: tuple[Path, Path]) -> None:
    for number in range(10):
        (two[1] / f"f{number}").touch()
    assert len(files.diff(*two, 3)) == 4


def test_names_that_are_no_text_are_shown_and_told_apart(two: tuple[Path, Path]) -> None:
    (two[1] / os.fsdecode(b"\xff")).touch()
    (two[1] / os.fsdecode(b"\xfe")).touch()
    assert [change.path for change in files.diff(*two, 100)] == ["\\xfe", "\\xff"]


def test_a_link_that_takes_a_folders_place_during_a_diff_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer, outside = tmp_path / "older", tmp_path / "newer", tmp_path / "outside"
    for path in (older, newer / "d", outside):
        path.mkdir(parents=True)
    (newer / "d" / "f").write_text("own")
    (outside / "f").write_text("the host's")
    entries = files.entries

    def then_swapped(tree: Path) -> list[tuple[str, files.Entry]]:
        found = list(entries(tree))
        if tree == newer:
            (newer / "d").rename(newer / "was d")
            (newer / "d").symlink_to(outside)
        return found

    monkeypatch.setattr(files, "entries", then_swapped)
    changes = {change.path: change.text for change in files.diff(older, newer, 10)}
    assert changes == {"d": None, "d/f": None}
    assert layers.size(newer) < 1 << 20


async def test_folders_nested_thousands_deep_are_measured_and_removed_and_refused(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    place = os.open(tree, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=place)
        inner = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 4000:
        assert layers.size(tree) >= 3000 * 4096
    with pytest.raises(SandboxError, match="nested more than"):
        files.digest(tree)
    await layers.remove(tree)
    assert not tree.exists()
