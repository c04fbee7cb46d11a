"""System calls that Python has no name for. Each raises OSError with what was tried."""

import contextlib
import ctypes
import fcntl
import os
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE, MS_SLAVE = 16384, 1 << 18, 1 << 19
MNT_DETACH = 2
_MADV_COLLAPSE = 25
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
# Numbers that are the same on every architecture that this runs on (asm-generic numbers; x86-64 has its own below 424).
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
# ioctl PIDFD_GET_INFO with the first version of its struct (64 bytes), and what to ask for.
_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 3 << 30 | 64 << 16 | 0xFF << 8 | 11, 1 << 3
_BY_MACHINE = {
    "x86_64": {"capset": 126, "pivot_root": 155, "seccomp": 317},
    "aarch64": {"capset": 91, "pivot_root": 41, "seccomp": 277},
}
NUMBERS = _BY_MACHINE.get(os.uname().machine, {})

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """New namespaces for this thread; a new pid namespace is for its next children."""
    _checked(_libc.unshare(flags), "unshare")


def enter_mounts(path: str) -> None:
    """Into the mount namespace that `path` (below /proc) names; this process must have one thread."""
    place = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(place, CLONE_NEWNS), "setns")
    finally:
        os.close(place)


def many_users() -> bool:
    """Whether this process is root over more than itself: it may give things to other users."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map") as table:
        return sum(int(line.split()[2]) for line in table) > 1 << 16


def become_root_of_oneself() -> None:
    """Into a user and a mount namespace in which this user is root over what is its own. One thread only."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWNS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def exit_status(pidfd: int) -> int | None:
    """Of a process that has ended and was reaped, negative for a signal. None where the kernel doesn't say (it does
    since Linux 6.15), or doesn't yet."""
    told = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT).ljust(64, b"\0"))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, told)
    except OSError:
        return None
    if not struct.unpack_from("Q", told)[0] & _PIDFD_INFO_EXIT:
        return None
    return os.waitstatus_to_exitcode(struct.unpack_from("i", told, 60)[0])


def collapse(start: int, end: int) -> None:
    """Backs a part of this process's memory by large pages, as far as that is possible. Raises OSError."""
    arguments = ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE
    _checked(_libc.madvise(*arguments), "madvise")


def sethostname(name: str) -> None:
    encoded = name.encode()
    _checked(_libc.sethostname(encoded, len(encoded)), "sethostname")


def mount(
    source: str | None, target: str | os.PathLike[str], kind: str | None, flags: int = 0, data: str | None = None
) -> None:
    words = [word.encode() if word is not None else None for word in (source, kind, data)]
    _checked(_libc.mount(words[0], os.fsencode(target), words[1], ctypes.c_ulong(flags), words[2]), f"mount {target}")


def unmount(target: str | os.PathLike[str]) -> None:
    """At once; for good when its last user is gone."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _checked(_libc.syscall(NUMBERS["pivot_root"], os.fsencode(new), os.fsencode(old)), "pivot_root")


def prctl(option: int, *arguments: int) -> int:
    padded = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    return _checked(_libc.prctl(option, *padded), f"prctl {option}")


def drop_capabilities() -> None:
    """All of this thread's, for good."""
    with contextlib.suppress(OSError):  # the first number that the kernel doesn't know
        for number in range(64):
            prctl(PR_CAPBSET_DROP, number)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _checked(_libc.syscall(NUMBERS["capset"], ctypes.byref(header), ctypes.byref(nothing)), "capset")


def landlock_version() -> int:
    """Of the kernel's Landlock; 0 where there is none."""
    found = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    return int(found) if found > 0 else 0


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scope", ctypes.c_uint64)]


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 1, 2, 4, 8
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
_ALL_RIGHTS = (1 << 16) - 1


def landlock(readable: list[str], writable: list[str], *, network: bool) -> None:
    """Confines this thread, and all that it starts, for good: files below these paths only, no signal and no abstract
    socket out of itself and, without `network`, no TCP. Raises OSError where the kernel can't do all of it."""
    if landlock_version() < 6:
        raise OSError(f"Landlock of version 6 is needed, this kernel has {landlock_version()}")
    wanted = _Ruleset(_ALL_RIGHTS, 0 if network else 3, 3)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    rules = _checked(_libc.syscall(_LANDLOCK_CREATE, ctypes.byref(wanted), size, 0), "landlock")
    try:
        read = EXECUTE | READ_FILE | READ_FOLDER
        for paths, rights in ((readable, read), (writable, _ALL_RIGHTS)):
            for path in paths:
                _allow(rules, path, rights)
        _checked(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = _PathRule(rights, place)
        _checked(_libc.syscall(_LANDLOCK_ADD, rules, 1, ctypes.byref(rule), 0), f"landlock {path}")
    finally:
        os.close(place)
