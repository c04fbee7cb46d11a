"""The filter of system calls, run line by line for both architectures."""

import errno
import struct

import pytest

from sandboxes.confine import seccomp

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, REFUSED, ABSENT = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel's interpreter would find."""
    data = struct.pack("<IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *(*arguments, *[0] * 6)[:6])
    lines = seccomp.program(machine)
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, constant = lines[at]
        at += 1
        match code:
            case 0x20:
                (loaded,) = struct.unpack_from("<I", data, constant)
            case 0x15:
                at += if_true if loaded == constant else if_false
            case 0x25:
                at += if_true if loaded > constant else if_false
            case 0x45:
                at += if_true if loaded & constant else if_false
            case 0x06:
                return constant
            case _:
                raise AssertionError(f"unknown code {code}")


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_refused_call_is_refused_and_its_neighbours_are_not(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    refused = {numbers[column] for numbers in seccomp._REFUSED.values()}
    absent = {numbers[column] for numbers in seccomp._ABSENT.values()}
    special = {numbers[column] for numbers in (seccomp._CLONE, seccomp._SOCKET, seccomp._IOCTL, seccomp._PERSONALITY)}
    for number in range(seccomp._NEWEST + 1):
        expected = REFUSED if number in refused else ABSENT if number in absent else ALLOWED
        if number not in special:
            assert verdict(machine, number) == expected, number
    for number in (seccomp._NEWEST + 1, 1000, 0x40000000, 0x40000000 | 39, 0xFFFFFFFF):
        assert verdict(machine, number) == ABSENT


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_matters_of_arguments_is_looked_at(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    clone, socket, ioctl, personality = (
        numbers[column] for numbers in (seccomp._CLONE, seccomp._SOCKET, seccomp._IOCTL, seccomp._PERSONALITY)
    )
    assert verdict(machine, clone, 0x003D0F00) == ALLOWED  # a thread
    assert verdict(machine, clone, 0x01200011) == ALLOWED  # a fork
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, clone, flag | 17) == REFUSED
    assert [verdict(machine, socket, family) for family in (1, 2, 10, 16)] == [ALLOWED] * 4
    assert [verdict(machine, socket, family) for family in (0, 17, 38, 40)] == [REFUSED] * 4
    assert verdict(machine, ioctl, 0, 0x5413) == ALLOWED
    assert verdict(machine, ioctl, 0x5412, 0) == ALLOWED
    assert [verdict(machine, ioctl, 0, what) for what in (0x5412, 0x541C)] == [REFUSED] * 2
    assert verdict(machine, personality, 0xFFFFFFFF) == ALLOWED
    assert verdict(machine, personality, 0x40000) == REFUSED


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_another_architectures_calls_are_not_there(machine: str) -> None:
    assert verdict(machine, 20, architecture=0x40000003) == ABSENT


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_filter_fits_into_the_kernel(machine: str) -> None:
    lines = seccomp.program(machine)
    assert len(lines) <= 4096
    assert all(max(if_true, if_false) < 256 for _, if_true, if_false, _ in lines)
