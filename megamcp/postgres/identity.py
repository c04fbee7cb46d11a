"""Which user PostgreSQL runs as. It refuses to be root, and gateways in containers often are root.

Three ways, tried in this order, and each is probed before it is used:

1. *namespace*: a user namespace in which root's uid is shown as an unprivileged one. Nothing has to be
   chowned and folders that only root may enter stay reachable; the server has no capability. Often forbidden
   in containers.
2. *user*: become a real unprivileged user, to whom the cluster's files are given.
3. the same, keeping one capability, for when the binaries or the data folder lie below a folder (such as
   /root) that this user can't enter: first the one for reading only, then, where a container withholds that,
   the one for writing too.

A cluster that already belongs to an unprivileged user keeps that user. Runs inside the supervisor, between
fork and exec, so: standard library only, no threads. Doesn't start anything itself.
"""

import ctypes
import os
import pwd
import sys
from typing import Final, NamedTuple

_CLONE_NEWUSER: Final = 0x10000000
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_KEEPCAPS: Final = 8
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_RAISE: Final = 2
_CAPABILITY_VERSION_3: Final = 0x20080522
_CAP_DAC_OVERRIDE: Final = 1
_CAP_DAC_READ_SEARCH: Final = 2
_CAPABILITY_NAMES: Final = {
    _CAP_DAC_OVERRIDE: "CAP_DAC_OVERRIDE",
    _CAP_DAC_READ_SEARCH: "CAP_DAC_READ_SEARCH",
}

_LINUX: Final = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


class Identity(NamedTuple):
    """`uid` and `gid` own the cluster's files; `shown_uid` is what a namespace shows instead of `uid`."""

    uid: int
    gid: int
    shown_uid: int | None = None
    becomes: bool = False
    capability: int | None = None

    def __str__(self) -> str:
        if self.shown_uid is not None:
            return "in a user namespace"
        if self.capability is not None:
            return f"as uid {self.uid} with {_CAPABILITY_NAMES[self.capability]}"
        return f"as uid {self.uid}"


def candidates(owner: tuple[int, int] | None) -> list[Identity]:
    """The ways to try, best first. `owner` is uid and gid of the existing cluster's files, if any."""
    uid, gid = os.geteuid(), os.getegid()
    shown = _account("nobody")
    namespace = [Identity(uid, gid, shown_uid=shown[0] if shown else 65534)] if _LINUX else []
    if uid != 0:
        # initdb wants a name for its user; where containers run under a uid without one, borrow nobody's.
        return [Identity(uid, gid)] if _has_name(uid) else [*namespace, Identity(uid, gid)]
    keeps = owner is not None and owner[0] != 0
    user = owner if keeps else _account("megamcp") or _account("postgres") or shown
    users: list[Identity] = []
    if user is not None:
        capabilities = [None, _CAP_DAC_READ_SEARCH, _CAP_DAC_OVERRIDE] if _LINUX else [None]
        users = [Identity(*user, becomes=True, capability=capability) for capability in capabilities]
    return [*users, *namespace] if keeps else [*namespace, *users]


def become(identity: Identity) -> None:
    """Turn this process, a fresh fork, into `identity`. Raises OSError."""
    if identity.shown_uid is not None:
        _check(_libc.unshare(_CLONE_NEWUSER), "unshare")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{identity.shown_uid} {identity.uid} 1")
        _write("/proc/self/gid_map", f"{identity.shown_uid} {identity.gid} 1")
    elif identity.becomes:
        if identity.capability is not None:
            _prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
        if identity.capability is not None:
            _keep_only(identity.capability)
    if os.geteuid() == 0:
        raise PermissionError("still root")


def die_with_parent(signal_number: int) -> None:
    """Ask the kernel for a signal when the parent ends. Only after `become`: changing the user forgets it."""
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, to find and end them."""
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _account(name: str) -> tuple[int, int] | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return (entry.pw_uid, entry.pw_gid) if entry.pw_uid else None


def _has_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _keep_only(capability: int) -> None:
    """Drop all capabilities but this one and let it survive exec."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    bit = 1 << capability
    data = (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)  # effective, permitted, inheritable; low, high
    _check(_libc.capset(header, data), "capset")
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)


def _prctl(option: int, first: int, second: int = 0) -> None:
    arguments = [ctypes.c_ulong(value) for value in (first, second, 0, 0)]
    _check(_libc.prctl(option, *arguments), f"prctl {option}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
