"""`python -I -S launch.py PLAN`: makes a room of its own for a program and runs it there as process 1.

The room is a new root with only what the plan names, read-only, in namespaces of its own. Run by root, the program is
root of a user namespace whose only user is, outside, one that nobody else is; run by another user, that is the one.
PLAN is JSON: `show` (paths of the host, seen at the same place), `layers` (a folder that is seen at /.layers, to be
written to), `folders` (empty ones to be mounted on), `uid` (null where this process has no users to give away),
`hostname`, `network`, `command`, `environ`, and `control`, a descriptor that the program gets as number 3.

Ends when the program does, and takes it along when it is killed.
"""

import json
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from sandboxes.confine import kernel

OLD, NEW = "/old", "/new"
"""Where the host's root and the new one are while that is put together, on a file system that nobody else sees."""
MASKED = tuple(
    f"/proc/{name}"
    for name in ("acpi", "asound", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list", "timer_stats")
)
DEVICES = ("null", "zero", "full", "random", "urandom")


def main() -> int:
    """The program's exit status."""
    plan = json.loads(sys.argv[1])
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    # Memory that runs out is taken from sandboxes before it is from others.
    _write("/proc/self/oom_score_adj", "500")
    os.dup2(plan["control"], 3)
    apart = kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    if not plan["network"]:
        apart |= kernel.CLONE_NEWNET
    if plan["uid"] is not None:
        kernel.unshare(kernel.CLONE_NEWNS)
        _build_root(plan)
        os.setgroups([])
        _with_user(plan["uid"], kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | apart)
        # Taken away with the old user.
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        kernel.become_root_of_oneself()
        _build_root(plan)
        kernel.unshare(apart)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.closerange(4, 1 << 16)
    kernel.sethostname(plan["hostname"])
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, "hidepid=4")
    _mask()
    os.execve(plan["command"][0], plan["command"], plan["environ"])
    return 1


def _mask() -> None:
    """What of the kernel's own is nobody's business."""
    for path in MASKED:
        if os.path.isdir(path):
            kernel.mount("tmpfs", path, "tmpfs", kernel.MS_RDONLY, "size=4k")
        elif os.path.exists(path):
            kernel.mount("/dev/null", path, None, kernel.MS_BIND)


def _build_root(plan: dict[str, object]) -> None:
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # On a folder that every host has; what it covers is seen again at /old.
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID, "mode=755,size=1m")
    os.mkdir(f"/tmp{OLD}")
    os.mkdir(f"/tmp{NEW}")
    kernel.pivot_root("/tmp", f"/tmp{OLD}")
    os.chdir("/")
    kernel.mount("tmpfs", NEW, "tmpfs", kernel.MS_NOSUID, "mode=755,size=1m")
    show, folders = plan["show"], plan["folders"]
    assert isinstance(show, list)
    assert isinstance(folders, list)
    for path in sorted(show):  # parents before what lies in them
        _show(path)
    for folder in ("/proc", "/dev", "/.layers", "/.host", *folders):
        os.makedirs(NEW + folder, exist_ok=True)
    _bind(str(plan["layers"]), "/.layers", kernel.MS_NOSUID | kernel.MS_NODEV)
    for name in DEVICES:
        _empty(f"{NEW}/dev/{name}")
        kernel.mount(f"{OLD}/dev/{name}", f"{NEW}/dev/{name}", None, kernel.MS_BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{NEW}/dev/{name}")
    # A fresh proc may be mounted only where a whole one is seen already.
    kernel.mount(f"{OLD}/proc", f"{NEW}/proc", None, kernel.MS_BIND | kernel.MS_REC)
    kernel.pivot_root(NEW, f"{NEW}/.host")
    os.chdir("/")
    kernel.unmount("/.host")
    os.rmdir("/.host")
    kernel.mount(None, "/", None, kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID)


def _show(path: str) -> None:
    """A path of the host at the same place, read-only. A link stays a link, and what it leads to is shown too."""
    for _ in range(40):
        if not os.path.islink(OLD + path):
            break
        target = os.readlink(OLD + path)
        os.makedirs(os.path.dirname(NEW + path), exist_ok=True)
        if not os.path.lexists(NEW + path):
            os.symlink(target, NEW + path)
        path = os.path.normpath(os.path.join(os.path.dirname(path), target))
    if os.path.lexists(NEW + path) and not os.path.isdir(NEW + path):
        return
    if os.path.isdir(OLD + path):
        os.makedirs(NEW + path, exist_ok=True)
    elif os.path.exists(OLD + path):
        os.makedirs(os.path.dirname(NEW + path), exist_ok=True)
        _empty(NEW + path)
    else:
        return
    _bind(path, path, kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV)


def _bind(source: str, target: str, flags: int) -> None:
    kernel.mount(OLD + source, NEW + target, None, kernel.MS_BIND)
    kernel.mount(None, NEW + target, None, kernel.MS_BIND | kernel.MS_REMOUNT | flags)


def _with_user(uid: int, namespaces: int) -> None:
    """Into a user namespace in which this process is root, and outside `uid`. A child that stays outside says so."""
    inside, outside = os.pipe()
    done_read, done_write = os.pipe()
    parent = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(outside)
        os.read(inside, 1)
        for kind in ("uid", "gid"):
            _write(f"/proc/{parent}/{kind}_map", f"0 {uid} 1")
        os.write(done_write, b"x")
        os._exit(0)
    kernel.unshare(namespaces)
    os.write(outside, b"x")
    os.read(done_read, 1)
    os.waitpid(helper, 0)
    for descriptor in (inside, outside, done_read, done_write):
        os.close(descriptor)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _empty(path: str) -> None:
    with open(path, "w"):
        pass


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main())
