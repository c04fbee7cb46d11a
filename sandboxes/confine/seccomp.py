"""Which system calls a confined thread, and all that it starts, may make.

What is refused is what could reach out of a sandbox, or widens what an attacker of the kernel can try: namespaces,
mounts, other processes' memory, kernel keys, programs and modules, asynchronous calls past this filter, clocks,
accounting, raw file handles. Everything else is allowed; the same calls are refused by the profiles that container
engines ship. `EPERM` says refused; `ENOSYS` says that there is no such call, for those that programs try first and can
do without, for calls newer than this list, and for calls of another architecture.

The filter is classic BPF, assembled here. It doesn't look into memory (clone3's flags lie there, so clone3 isn't
there), and it isn't undone by anything that the thread does later.
"""

import ctypes
import errno
import os
import struct

from sandboxes.confine import kernel

# Name: number on x86-64, number on arm64 (None: not there).
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "open_tree_attr": (467, 467),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "statmount": (457, 457), "listmount": (458, 458),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # programs and keys in the kernel, events of all
    "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "userfaultfd": (323, 282),
    "lookup_dcookie": (212, 18), "syslog": (103, 116),
    # the machine: clocks, modules, reboot, swap, accounting, ports
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "settimeofday": (164, 170),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "vhangup": (153, 58),
    "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "nfsservctl": (180, 42), "sysfs": (139, None), "uselib": (134, None),
    "ustat": (136, None), "create_module": (174, None), "get_kernel_syms": (177, None), "query_module": (178, None),
    "_sysctl": (156, None),
    # files by handle, past all paths
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    # where memory lies
    "mbind": (237, 235), "migrate_pages": (256, 238), "move_pages": (279, 239), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
}  # fmt: skip
_ABSENT: dict[str, tuple[int | None, int | None]] = {
    "clone3": (435, 435), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
}  # fmt: skip
REFUSED, ABSENT = tuple(_REFUSED), tuple(_ABSENT)
"""Names, for whoever writes filters of another kind."""
_NEWEST = 469
"""What this list knows of; a call with a higher number isn't there."""
_CLONE, _SOCKET, _IOCTL, _PERSONALITY = (56, 220), (41, 198), (16, 29), (135, 92)
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NAMESPACES = 0x7E020080
"""All CLONE_NEW* flags of clone(2): time, mount, cgroup, uts, ipc, user, pid, network."""
_FAMILIES = (1, 2, 10, 16)
"""Of sockets: unix, IPv4, IPv6, netlink (programs ask it for their interfaces)."""
_TERMINAL = (0x5412, 0x541C)
"""ioctls that put characters into a terminal's input: TIOCSTI, TIOCLINUX."""
_PERSONALITIES = (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)

_LOAD, _EQUAL, _ABOVE, _SET, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_PR_SET_SECCOMP, _FILTER = 22, 2

Line = tuple[int, int, int, int]
"""Code, lines to skip when true, when false, constant."""


def program(machine: str) -> list[Line]:
    """For `os.uname().machine`. Raises KeyError for one that isn't known."""
    architecture, column = _ARCHITECTURES[machine]
    refused, absent = (_RETURN, 0, 0, _ERROR | errno.EPERM), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    allowed = (_RETURN, 0, 0, _ALLOW)
    lines: list[Line] = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), absent, (_LOAD, 0, 0, _NUMBER)]
    # The second ABI of x86-64 sets a high bit in its numbers, so it is above too.
    lines += [(_ABOVE, 0, 1, _NEWEST), absent]
    for table, answer in ((_REFUSED, refused), (_ABSENT, absent)):
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                lines += [(_EQUAL, 0, 1, number), answer]
    # Each looks at the lower half of one argument and ends the program.
    for numbers, argument, body in (
        (_CLONE, 0, [(_SET, 0, 1, _NAMESPACES), refused, allowed]),
        (_SOCKET, 0, [*_any(_FAMILIES, allowed), refused]),
        (_IOCTL, 1, [*_any(_TERMINAL, refused), allowed]),
        (_PERSONALITY, 0, [*_any(_PERSONALITIES, allowed), refused]),
    ):
        lines += [(_EQUAL, 0, len(body) + 1, numbers[column]), (_LOAD, 0, 0, _ARGUMENT + 8 * argument), *body]
    return [*lines, allowed]


def _any(values: tuple[int, ...], answer: Line) -> list[Line]:
    return [line for value in values for line in ((_EQUAL, 0, 1, value), answer)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_void_p)]


def _assembled() -> ctypes.Array[ctypes.c_char]:
    lines = program(os.uname().machine)
    return ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines), 8 * len(lines))


KNOWN = os.uname().machine in _ARCHITECTURES
_code = _assembled() if KNOWN else None


def install() -> None:
    """Confines this thread for good; it must have set no_new_privs. Raises OSError."""
    if _code is None:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {os.uname().machine}")
    filtered = _Program(len(_code) // 8, ctypes.addressof(_code))
    kernel.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.addressof(filtered))
