"""Control groups of both versions: how much memory and processor, how many processes a sandbox may have.

All groups of a keeper lie in one of its own, below the group that the keeper runs in (or, with version 2, at the top,
where that can't have any below it). A sandbox's processes can't leave theirs: the hierarchies aren't shown to them.
Killing a group kills what was forked meanwhile too. Only root may make groups; whoever can't, does without.
"""

import contextlib
import errno
import os
import signal
import time
from pathlib import Path

_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_ROUNDS = 200


class Group:
    """The processes of one sandbox; one folder per hierarchy. What can't be done raises OSError."""

    def __init__(self, places: dict[str, Path]) -> None:
        self._places = places
        """By controller. With version 2 all are the same folder."""
        self._folders = tuple(dict.fromkeys(places.values()))

    def make(self) -> "Group":
        try:
            for folder in self._folders:
                folder.mkdir(exist_ok=True)
        except OSError:
            self.remove()
            raise
        return self

    def limit(self, *, memory: int, pids: int, cpus: float) -> None:
        """In bytes, processes and threads, processors. Swapping out counts as using."""
        quota = max(1000, int(cpus * _PERIOD_US))
        of_memory, of_pids, of_cpu = (self._places[name] for name in _CONTROLLERS)
        if self._unified:
            _write(of_memory / "memory.max", memory)
            _write_if_there(of_memory / "memory.swap.max", 0)
            _write(of_cpu / "cpu.max", f"{quota} {_PERIOD_US}")
        else:
            _write(of_memory / "memory.limit_in_bytes", memory)
            _write_if_there(of_memory / "memory.memsw.limit_in_bytes", memory)
            _write(of_cpu / "cpu.cfs_period_us", _PERIOD_US)
            _write(of_cpu / "cpu.cfs_quota_us", quota)
        _write(of_pids / "pids.max", pids)

    @property
    def _unified(self) -> bool:
        return len(self._folders) == 1

    def add(self, pid: int) -> None:
        """A process with all its threads. What it starts from then on is in it as well."""
        for folder in self._folders:
            _write(folder / "cgroup.procs", pid)

    def processes(self) -> set[int]:
        """As this process numbers them."""
        found: set[int] = set()
        for folder in self._folders:
            with contextlib.suppress(OSError):
                found.update(map(int, (folder / "cgroup.procs").read_text().split()))
        return found - {0}

    def killed_for_memory(self) -> bool:
        """Whether the kernel has ended a process of it for using too much."""
        return killed_for_memory(self._places["memory"], unified=self._unified)

    def kill(self) -> None:
        """Every process of it; returns when none is left."""
        with contextlib.suppress(OSError):
            _write(self._places["pids"] / "pids.max", 0)  # who forks faster than it dies, no longer does
        for round_ in range(_ROUNDS):
            with contextlib.suppress(OSError):
                _write(self._folders[0] / "cgroup.kill", 1)
            processes = self.processes()
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not processes:
                return
            if round_:
                time.sleep(0.002)

    def remove(self) -> None:
        """With its processes. Nothing where it isn't there."""
        self.kill()
        for folder in self._folders:
            for _ in range(_ROUNDS):  # the last of its processes may still be on its way out
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        raise
                    time.sleep(0.005)


def killed_for_memory(folder: Path, *, unified: bool) -> bool:
    """Whether the kernel has ended a process of a memory group for using too much; `unified`: of version 2."""
    with contextlib.suppress(OSError):
        for line in (folder / ("memory.events" if unified else "memory.oom_control")).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1]) > 0
    return False


class Groups:
    """A keeper's own group in each hierarchy, with one group in it per name."""

    def __init__(self, places: dict[str, Path]) -> None:
        self._places = places

    def group(self, name: str) -> Group:
        return Group({controller: place / name for controller, place in self._places.items()})

    def clear(self) -> None:
        """Removes every group in it, with the processes that are in them."""
        for place in set(self._places.values()):
            with contextlib.suppress(FileNotFoundError):
                for folder in place.iterdir():
                    if folder.is_dir():
                        self.group(folder.name).remove()

    def remove(self) -> None:
        self.clear()
        Group(self._places).remove()


def claim(name: str) -> Groups:
    """The keeper's own groups, made now where they aren't there, emptied where they are. Raises OSError: why not."""
    mounts, own = _mounts(), _own()
    if all(controller in mounts for controller in _CONTROLLERS):
        places = {name_: _below(mounts[name_], own.get(name_, "/")) / name for name_ in _CONTROLLERS}
        made = Groups(places)
        Group(places).make()
    elif "" in mounts:
        made = Groups(dict.fromkeys(_CONTROLLERS, _claim_unified(mounts[""], own.get("", "/"), name)))
    else:
        raise OSError(errno.ENOENT, "no control groups with memory, pids and cpu are mounted")
    made.clear()
    return made


def _claim_unified(mount: Path, own: str, name: str) -> Path:
    """A folder whose children have the controllers."""
    told: OSError | None = None
    for parent in dict.fromkeys((_below(mount, own), mount)):
        place = parent / name
        try:
            place.mkdir(exist_ok=True)
            try:
                _enable(parent)
            except OSError as error:
                # A group with processes of its own has none below it that are limited. Ours can move out of the way.
                alone = (parent / "cgroup.procs").read_text().split() == [str(os.getpid())]
                if error.errno != errno.EBUSY or not alone:
                    raise
                (place / "keeper").mkdir(exist_ok=True)
                _write(place / "keeper" / "cgroup.procs", os.getpid())
                _enable(parent)
            sandboxes = place / "sandboxes"
            sandboxes.mkdir(exist_ok=True)
            _enable(place)
            _enable(sandboxes)
            return sandboxes
        except OSError as error:
            told = error
            with contextlib.suppress(OSError):
                place.rmdir()
    assert told is not None
    raise told


def _enable(folder: Path) -> None:
    control = folder / "cgroup.subtree_control"
    if missing := set(_CONTROLLERS) - set(control.read_text().split()):
        _write(control, " ".join(f"+{name}" for name in sorted(missing)))


def _mounts() -> dict[str, Path]:
    """Where each controller's hierarchy is mounted; version 2's is ''."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        place = Path(fields.split()[4])
        if kind == "cgroup":
            for controller in _CONTROLLERS:
                if controller in options.split(","):
                    found.setdefault(controller, place)
        elif kind == "cgroup2":
            with contextlib.suppress(OSError):
                if set(_CONTROLLERS) <= set((place / "cgroup.controllers").read_text().split()):
                    found.setdefault("", place)
    return found


def _own() -> dict[str, str]:
    """This process's group by controller; version 2's is ''."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _below(mount: Path, path: str) -> Path:
    """A group's folder; the top where what is mounted isn't the whole hierarchy."""
    folder = mount / path.strip("/")
    return folder if folder.is_dir() else mount


def _write(file: Path, value: object) -> None:
    # Opened without O_CREAT: a limit that the kernel doesn't know must not become a file elsewhere.
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _write_if_there(file: Path, value: object) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        _write(file, value)
