"""A container's control groups, of both versions: stopped and let go on, killed for memory, what is left of them."""

import contextlib
import os
import signal
import time
from pathlib import Path

from sandboxes.confine import cgroups

_MOUNT = Path("/sys/fs/cgroup")
_WAIT_S = 5.0
_ASK_AGAIN = 50


class Groups:
    """Of one process, as the kernel says."""

    def __init__(self, pid: int) -> None:
        found: dict[str, Path] = {}
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                place = _MOUNT / controller / path.lstrip("/")
                found[controller] = place if place.is_dir() else _MOUNT / controller
        self._unified = not (_MOUNT / "memory").is_dir()
        self._freezer = found["" if self._unified else "freezer"]
        self._memory = found["" if self._unified else "memory"]

    def freeze(self) -> None:
        """Every process stands still afterwards. Raises OSError, TimeoutError."""
        give_up = time.monotonic() + _WAIT_S
        while time.monotonic() < give_up:
            # Version 1 can be stuck with one that is on its way into the kernel: let go and ask again.
            for _ in range(_ASK_AGAIN):
                if self._stands():
                    return
                time.sleep(0.0005)
            self.thaw()
            time.sleep(0.001)
        raise TimeoutError("its processes did not come to a stop")

    def _stands(self) -> bool:
        if self._unified:
            (self._freezer / "cgroup.freeze").write_text("1")
            return "frozen 1" in (self._freezer / "cgroup.events").read_text()
        (self._freezer / "freezer.state").write_text("FROZEN")
        return (self._freezer / "freezer.state").read_text().strip() == "FROZEN"

    def thaw(self) -> None:
        """Nothing where they are gone."""
        with contextlib.suppress(OSError):
            if self._unified:
                (self._freezer / "cgroup.freeze").write_text("0")
            else:
                (self._freezer / "freezer.state").write_text("THAWED")

    def processes(self) -> list[int]:
        """As this process numbers them."""
        with contextlib.suppress(OSError):
            return [int(pid) for pid in (self._freezer / "cgroup.procs").read_text().split()]
        return []

    def killed_for_memory(self) -> bool:
        """Whether the kernel has ended a process of it for using too much."""
        return cgroups.killed_for_memory(self._memory, unified=self._unified)


def clear(name: str) -> None:
    """Ends what is in the groups below those called `name`, and removes them: what a killed keeper left."""
    for top in [_MOUNT, *(path for path in _MOUNT.iterdir() if path.is_dir() and not path.is_symlink())]:
        folder = top / name
        if not folder.is_dir():
            continue
        for group in [path for path in folder.iterdir() if path.is_dir()]:
            for file, word in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
                if (group / file).exists():
                    (group / file).write_text(word)
            _empty(group)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _empty(group: Path) -> None:
    for _ in range(500):
        try:
            pids = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.005)
