"""Takes away what the device does not need once it has started.

Afterwards it can read, write and close what it has, accept clients, receive descriptors from
the VMM and map them; it cannot open a file, make a socket, start a program or thread, or touch
another process. A call that is not on the list fails with EPERM; one of another architecture
ends the process.

The filter is written here because the device has to run with nothing but Python's own library.
Source: seccomp(2), linux/filter.h, linux/seccomp.h, the kernel's tables of system calls.
"""

from __future__ import annotations

import os
import resource
import struct
from typing import Final, NamedTuple

from agent_box.process import linux

RESERVED_FDS: Final = 64  # for bells, memory and our own
MAX_FDS: Final = 4096 + RESERVED_FDS
DATA_BYTES: Final = 512 << 20  # anonymous memory; the guest's is not counted

_LOAD: Final = 0x20
_EQUAL: Final = 0x15
_SET: Final = 0x45
_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_EPERM: Final = 0x00050001
_KILL: Final = 0x80000000
_NUMBER: Final = 0  # offsets in struct seccomp_data
_ARCHITECTURE: Final = 4
_FIRST_ARGUMENT: Final = 16
_PROT_EXEC: Final = 4
_FIONBIO: Final = 0x5421
_X32: Final = 0x40000000


class SealError(Exception):
    """A right could not be dropped, so the device must not serve. One line."""


class _Machine(NamedTuple):
    audit: int
    calls: dict[str, int]


# Calls that are made by the loop, by Python's memory management, or at the end.
_X86_64: Final = _Machine(
    0xC000003E,
    {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9,
        "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
        "rt_sigreturn": 15, "ioctl": 16, "writev": 20, "sched_yield": 24, "mremap": 25,
        "madvise": 28, "getpid": 39, "sendto": 44, "recvfrom": 45, "sendmsg": 46,
        "recvmsg": 47, "shutdown": 48, "getsockname": 51, "getsockopt": 55, "exit": 60,
        "fcntl": 72, "sigaltstack": 131, "gettid": 186, "futex": 202, "restart_syscall": 219,
        "clock_gettime": 228, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233,
        "newfstatat": 262, "ppoll": 271, "epoll_pwait": 281, "accept4": 288, "getrandom": 318,
    },
)  # fmt: skip
_AARCH64: Final = _Machine(
    0xC00000B7,
    {
        "epoll_ctl": 21, "epoll_pwait": 22, "fcntl": 25, "ioctl": 29, "close": 57, "lseek": 62,
        "read": 63, "write": 64, "writev": 66, "ppoll": 73, "newfstatat": 79, "fstat": 80,
        "exit": 93, "exit_group": 94, "futex": 98, "clock_gettime": 113, "sched_yield": 124,
        "restart_syscall": 128, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135,
        "rt_sigreturn": 139, "getpid": 172, "gettid": 178, "getsockname": 204, "sendto": 206,
        "recvfrom": 207, "getsockopt": 209, "shutdown": 210, "sendmsg": 211, "recvmsg": 212,
        "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233,
        "accept4": 242, "getrandom": 278,
    },
)  # fmt: skip
_MACHINES: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}


def program(machine: str) -> bytes:
    """The filter for a machine, as an array of struct sock_filter.

    Args:
        machine: as `os.uname` names it.

    Raises:
        SealError: a machine that we do not know.
    """
    known = _MACHINES.get(machine)
    if known is None:
        raise SealError(f"no filter for {machine}")
    code = [
        _op(_LOAD, _ARCHITECTURE),
        _op(_EQUAL, known.audit, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
        _op(_AT_LEAST, _X32, 0, 1),
        _op(_RETURN, _KILL),
    ]
    for name, number in known.calls.items():
        if name in ("mmap", "mprotect"):  # not executable; the argument's lower half says so
            code += [
                _op(_EQUAL, number, 0, 4),
                _op(_LOAD, _FIRST_ARGUMENT + 8 * 2),
                _op(_SET, _PROT_EXEC, 0, 1),
                _op(_RETURN, _EPERM),
                _op(_RETURN, _ALLOW),
            ]
        elif name == "ioctl":
            code += [
                _op(_EQUAL, number, 0, 4),
                _op(_LOAD, _FIRST_ARGUMENT + 8),
                _op(_EQUAL, _FIONBIO, 0, 1),
                _op(_RETURN, _ALLOW),
                _op(_RETURN, _EPERM),
            ]
        else:
            code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW)]
    code.append(_op(_RETURN, _EPERM))
    return b"".join(code)


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def limit_descriptors() -> int:
    """Raises the limit of descriptors as far as it may be and is of use.

    Returns:
        How many clients there may be.

    Raises:
        SealError: there is room for none.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FDS if hard == resource.RLIM_INFINITY else min(hard, MAX_FDS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if limit <= RESERVED_FDS:
        raise SealError(f"only {limit} descriptors may be open")
    return limit - RESERVED_FDS


def seal() -> None:
    """Gives up rights for good. Once, before the first byte of a guest is read.

    Raises:
        SealError: a right could not be dropped.
    """
    try:
        for name in (resource.RLIMIT_CORE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK):
            resource.setrlimit(name, (0, 0))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        data = DATA_BYTES if hard == resource.RLIM_INFINITY else min(DATA_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (data, data))
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        linux.add_seccomp_filter(program(os.uname().machine))
    except (OSError, ValueError) as error:
        raise SealError(f"a right cannot be dropped: {error}") from error
    _prove()


def _prove() -> None:
    """That nothing can be opened, by trying."""
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except PermissionError:
        return
    except OSError as error:
        raise SealError(f"opening a file fails for another reason: {error}") from error
    raise SealError("a file can still be opened")
