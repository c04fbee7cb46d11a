"""What a container is: its root, its mounts, its limits, what it may ask the kernel, as runc reads it (OCI 1.0).

A container's root is a folder of mount points. What is seen of the host is mounted on them, read-only; a link of the
host stays a link, since CRIU can't follow a mount over one. Its processes have a user of their own, which is nobody
outside and has no capabilities. (Not a user namespace: runc can't dump one.)
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sandboxes.confine import seccomp
from sandboxes.types import SandboxError, Spec

SHOWN = ("/bin", "/etc", "/lib", "/lib32", "/lib64", "/opt", "/sbin", "/usr")
PATH = "/usr/local/bin:/usr/bin:/bin"
PACKAGES = "/packages"
"""Where a container sees what its template got from npm or PyPI."""
FIRST_UID = 0x38000000
"""Of users that are nobody's on the host."""
_INTERPRETERS = ("python", "node", "deno", "bun", "bash", "sh", "ruby", "perl")
_MASKED = ("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
           "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/firmware")  # fmt: skip
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class Seen:
    """Of the host: links by path, and what is mounted at the path where it is."""

    links: dict[str, str]
    mounts: tuple[str, ...]


def uid_of(template: str) -> int:
    """The same at every start: restored processes have the user that they were dumped with."""
    return FIRST_UID + int(hashlib.sha256(template.encode()).hexdigest()[:6], 16)


def found(
    command: tuple[str, ...], environ: Mapping[str, str] | None = None, cwd: str = ""
) -> tuple[list[str], list[str]]:
    """A command with the path of its program, and the folders of the host that it needs beside the usual ones: where
    the program is, the script that an interpreter is given, where `environ` says that modules are. `cwd` is the folder
    of the host that it is started in, if it is one."""
    program = shutil.which(os.path.join(cwd, command[0]) if os.path.dirname(command[0]) else command[0])
    if program is None:
        raise SandboxError(
            "start_failed",
            f"There is no program {command[0]!r} on this host.",
            hint=f"Install it, or write its path. PATH is {os.environ.get('PATH', '')}",
        )
    program = place = os.path.abspath(program)
    needed = [_prefix(place), _prefix(os.path.realpath(place))]
    while os.path.islink(place):
        place = os.path.normpath(os.path.join(os.path.dirname(place), os.readlink(place)))
        needed.append(_prefix(place))
    for name in ("PYTHONPATH", "NODE_PATH"):
        needed += filter(os.path.isabs, (environ or {}).get(name, "").split(os.pathsep))
    if len(command) > 1 and Path(program).name.rstrip("0123456789.") in _INTERPRETERS:
        script = command[1]
        if os.path.isabs(script) and os.path.isfile(script):
            needed.append(os.path.dirname(script))
    return [program, *command[1:]], needed


def _prefix(program: str) -> str:
    """The folder with a program and its libraries: of `x/bin/name` it is x."""
    folder = os.path.dirname(program)
    return os.path.dirname(folder) if os.path.basename(folder) in ("bin", "sbin") and folder.count("/") > 1 else folder


def seen(paths: list[str]) -> Seen:
    """Those of the paths that are there."""
    links: dict[str, str] = {}
    mounts: set[str] = set()
    for path in paths:
        for _ in range(40):
            if not os.path.islink(path):
                break
            links[path] = os.readlink(path)
            path = os.path.normpath(os.path.join(os.path.dirname(path), links[path]))
        if os.path.exists(path) and path != "/":
            mounts.add(path)
    inner = {path for path in mounts if any(str(parent) in mounts for parent in Path(path).parents)}
    links = {path: to for path, to in links.items() if not any(str(parent) in mounts for parent in Path(path).parents)}
    return Seen(links, tuple(sorted(mounts - inner)))


def make_root(root: Path, shown: Seen, folders: tuple[str, ...]) -> None:
    """The folder of mount points."""
    root.mkdir(parents=True)
    for path in ("/proc", "/dev", *folders, *shown.mounts):
        place = root / path.lstrip("/")
        if path in shown.mounts and not os.path.isdir(path):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        else:
            place.mkdir(parents=True, exist_ok=True)
    for path, target in shown.links.items():
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(place):
            place.symlink_to(target)
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o755)


@dataclass(frozen=True, slots=True)
class Room:
    """Where on the host a container's things are. `copies` are seen at a path instead of what the host has there;
    `network` is a descriptor's path, None for the host's network."""

    root: Path
    merged: Path
    mounts: tuple[str, ...]
    copies: dict[str, Path]
    packages: Path | None
    network: str | None
    group: str
    settings: Path


def write(bundle: Path, spec: Spec, command: list[str], room: Room) -> None:
    """`config.json`."""
    (bundle / "config.json").write_bytes(msgspec.json.encode(_config(spec, command, room)))


def _config(spec: Spec, command: list[str], room: Room) -> dict[str, Any]:
    uid = uid_of(spec.template)
    environ = {"PATH": PATH, "HOME": spec.workdir, "LANG": "C.UTF-8", "TMPDIR": "/tmp", **spec.environ}
    limits = spec.limits
    bound = [(path, path, "ro") for path in room.mounts if path not in room.copies]
    bound += [(str(copy), path, "ro") for path, copy in room.copies.items()]
    if room.packages is not None:
        bound.append((str(room.packages), PACKAGES, "ro"))
    bound.append((str(room.merged / "tmp"), "/tmp", "rw"))
    bound.sort(key=lambda mount: mount[1].startswith("/tmp/"))  # what lies there is mounted onto it
    bound.append((str(room.merged / "work"), spec.workdir, "rw"))
    network = [] if room.network is None else [{"type": "network", "path": room.network}]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": uid, "gid": uid},
            "args": command,
            "env": [f"{name}={value}" for name, value in environ.items()],
            "cwd": spec.cwd or spec.workdir,
            "capabilities": {name: [] for name in ("bounding", "effective", "inheritable", "permitted", "ambient")},
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "soft": 1024, "hard": 4096},
                {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
                {"type": "RLIMIT_FSIZE", "soft": limits.disk, "hard": limits.disk},
            ],
            "noNewPrivileges": True,
        },
        "root": {"path": str(room.root), "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
            _mount("/dev", "tmpfs", "nosuid", "noexec", "mode=755", "size=64k"),
            _mount("/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", "size=64m"),
            *(
                {"destination": to, "type": "bind", "source": source, "options": ["bind", how, "nosuid", "nodev"]}
                for source, to, how in bound
            ),
        ],
        "linux": {
            "cgroupsPath": room.group,
            "resources": {
                "devices": [{"allow": False, "access": "rwm"}],
                "memory": {"limit": limits.memory, "swap": limits.memory},
                "pids": {"limit": limits.pids},
                "cpu": {"quota": max(1000, int(limits.cpus * _PERIOD_US)), "period": _PERIOD_US},
            },
            "namespaces": [*({"type": kind} for kind in ("pid", "mount", "ipc", "uts")), *network],
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
            "seccomp": _seccomp(),
        },
        "annotations": {"org.criu.config": str(room.settings)},
    }


def _mount(place: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": place, "type": kind, "source": kind, "options": list(options)}


_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
_EPERM, _ENOSYS = 1, 38


def _seccomp() -> dict[str, Any]:
    def rule(names: tuple[str, ...], errno: int, **more: Any) -> dict[str, Any]:
        return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": errno, **more}

    masked = [
        rule(("clone",), _EPERM, args=[{"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"}])
        for flag in _NAMESPACES
    ]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [rule(seccomp.REFUSED, _EPERM), rule(seccomp.ABSENT, _ENOSYS), *masked],
    }
