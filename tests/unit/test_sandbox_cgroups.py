"""Control groups: the words of both versions, and killing, where this machine lets us."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.confine import cgroups


def folder(path: Path, *files: str) -> Path:
    """A stand-in for a group's folder: the kernel's files are there before anything is written."""
    path.mkdir()
    for name in files:
        (path / name).write_text("")
    return path


def test_limits_are_said_in_the_words_of_version_1(tmp_path: Path) -> None:
    places = {
        "memory": folder(tmp_path / "memory", "memory.limit_in_bytes"),
        "pids": folder(tmp_path / "pids", "pids.max"),
        "cpu": folder(tmp_path / "cpu", "cpu.cfs_period_us", "cpu.cfs_quota_us"),
    }
    cgroups.Group(places).limit(memory=1 << 20, pids=7, cpus=1.5)
    assert (places["memory"] / "memory.limit_in_bytes").read_text() == str(1 << 20)
    assert (places["pids"] / "pids.max").read_text() == "7"
    assert (places["cpu"] / "cpu.cfs_quota_us").read_text() == "150000"
    assert not (places["memory"] / "memory.memsw.limit_in_bytes").exists()  # a kernel without it


def test_limits_are_said_in_the_words_of_version_2(tmp_path: Path) -> None:
    place = folder(tmp_path / "one", "memory.max", "memory.swap.max", "pids.max", "cpu.max")
    cgroups.Group(dict.fromkeys(("memory", "pids", "cpu"), place)).limit(memory=1 << 20, pids=7, cpus=0.5)
    told = {path.name: path.read_text() for path in place.iterdir()}
    assert told == {"memory.max": str(1 << 20), "memory.swap.max": "0", "pids.max": "7", "cpu.max": "50000 100000"}


def test_what_the_kernel_has_killed_for_memory_is_known_in_both_versions(tmp_path: Path) -> None:
    one = {name: folder(tmp_path / name) for name in ("memory", "pids", "cpu")}
    assert not cgroups.Group(one).killed_for_memory()
    (one["memory"] / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert cgroups.Group(one).killed_for_memory()
    two = folder(tmp_path / "two")
    (two / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 0\n")
    assert not cgroups.Group(dict.fromkeys(one, two)).killed_for_memory()


@pytest.fixture
def groups() -> Iterator[cgroups.Groups]:
    try:
        found = cgroups.claim(f"megamcp-test-{os.getpid()}")
    except OSError as error:
        pytest.skip(f"no control groups here: {error}")
    yield found
    found.remove()


def test_a_group_ends_with_all_that_was_started_in_it(groups: cgroups.Groups) -> None:
    group, other = groups.group("a").make(), groups.group("b").make()
    with subprocess.Popen(["sh", "-c", "read go; sleep 99 & sleep 99 & wait"], stdin=subprocess.PIPE) as process:
        group.add(process.pid)
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        while len(group.processes()) < 3:
            pass
        other.remove()
        assert len(group.processes()) == 3
        group.remove()
    assert process.returncode == -9
    assert group.processes() == set()
    group.remove()  # again


def test_claiming_again_ends_what_is_there(groups: cgroups.Groups) -> None:
    group = groups.group("a").make()
    with subprocess.Popen(["sleep", "99"]) as process:
        group.add(process.pid)
        again = cgroups.claim(f"megamcp-test-{os.getpid()}")
        assert process.wait(10) == -9
    assert again.group("a").processes() == set()
