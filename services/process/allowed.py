"""Filters of system calls without a library, as lists of what is allowed.

For processes in jails that have nothing but Python's own library, or little more: the vsock
device and the network worker add one when they have started. A call that is not on the list
fails with EPERM; one of another architecture ends the process.

Source: seccomp(2), linux/filter.h, linux/seccomp.h, the kernel's tables of system calls.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

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
_X32: Final = 0x40000000
PROT_EXEC: Final = 4
FIONBIO: Final = 0x5421


class NoFilter(Exception):
    """There is none for this machine. One line."""


class Check(NamedTuple):
    """What the lower half of an argument, counted from 0, has to be."""

    argument: int
    test: Literal["is", "has none of"]
    value: int


NOT_EXECUTABLE: Final = Check(2, "has none of", PROT_EXEC)  # of mmap and mprotect


class _Machine(NamedTuple):
    audit: int
    calls: dict[str, int]


_X86_64: Final = _Machine(
    0xC000003E,
    {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9,
        "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
        "rt_sigreturn": 15, "ioctl": 16, "pread64": 17, "writev": 20, "sched_yield": 24,
        "mremap": 25, "madvise": 28, "getpid": 39, "socket": 41, "connect": 42, "sendto": 44,
        "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "bind": 49,
        "getsockname": 51, "getpeername": 52, "socketpair": 53, "setsockopt": 54,
        "getsockopt": 55, "exit": 60, "uname": 63, "fcntl": 72, "getcwd": 79, "readlink": 89,
        "sigaltstack": 131, "gettid": 186, "futex": 202, "getdents64": 217,
        "restart_syscall": 219, "clock_gettime": 228, "exit_group": 231, "epoll_wait": 232,
        "epoll_ctl": 233, "openat": 257, "newfstatat": 262, "ppoll": 271, "splice": 275,
        "epoll_pwait": 281, "accept4": 288, "epoll_create1": 291, "pipe2": 293, "recvmmsg": 299,
        "sendmmsg": 307, "getrandom": 318, "statx": 332,
    },
)  # fmt: skip
_AARCH64: Final = _Machine(
    0xC00000B7,
    {
        "getcwd": 17, "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22, "fcntl": 25,
        "ioctl": 29, "openat": 56, "close": 57, "pipe2": 59, "getdents64": 61, "lseek": 62,
        "read": 63, "write": 64, "writev": 66, "pread64": 67, "ppoll": 73, "splice": 76,
        "newfstatat": 79, "fstat": 80, "exit": 93, "exit_group": 94, "futex": 98,
        "clock_gettime": 113, "sched_yield": 124, "restart_syscall": 128, "sigaltstack": 132,
        "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "uname": 160,
        "getpid": 172, "gettid": 178, "socket": 198, "socketpair": 199, "bind": 200,
        "connect": 203, "getsockname": 204, "getpeername": 205, "sendto": 206, "recvfrom": 207,
        "setsockopt": 208, "getsockopt": 209, "shutdown": 210, "sendmsg": 211, "recvmsg": 212,
        "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233,
        "accept4": 242, "recvmmsg": 243, "sendmmsg": 269, "getrandom": 278, "statx": 291,
    },
)  # fmt: skip
_MACHINES: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}
# There under other names only.
_OLD: Final = frozenset({"poll", "readlink", "epoll_wait"})

# Calls that a loop makes over what it has, Python's memory management, or the end.
LOOP: Final = (
    "read", "write", "sendmsg", "recvmsg", "recvfrom", "sendto", "epoll_wait", "epoll_pwait",
    "epoll_ctl", "clock_gettime", "close", "accept4", "mmap", "munmap", "brk", "mremap", "madvise",
    "mprotect", "poll", "ppoll", "fstat", "newfstatat", "lseek", "rt_sigaction", "rt_sigprocmask",
    "rt_sigreturn", "ioctl", "writev", "sched_yield", "getpid", "shutdown", "getsockname",
    "getsockopt", "exit", "fcntl", "sigaltstack", "gettid", "futex", "restart_syscall",
    "exit_group", "getrandom",
)  # fmt: skip


def program(machine: str, calls: Sequence[str], checks: Mapping[str, Check]) -> bytes:
    """The filter for a machine, as an array of struct sock_filter.

    Args:
        machine: as `os.uname` names it.
        calls: what is allowed, the most frequent first; one that the machine knows under
            another name only is passed over.
        checks: of those, what is allowed under a condition.

    Raises:
        NoFilter: a machine that we do not know.
    """
    known = _MACHINES.get(machine)
    if known is None:
        raise NoFilter(f"no filter for {machine}")
    code = [
        _op(_LOAD, _ARCHITECTURE),
        _op(_EQUAL, known.audit, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
        _op(_AT_LEAST, _X32, 0, 1),
        _op(_RETURN, _KILL),
    ]
    for name in calls:
        if name in _OLD and name not in known.calls:
            continue
        number, check = known.calls[name], checks.get(name)
        if check is None:
            code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW)]
            continue
        met = check.test == "is"
        code += [
            _op(_EQUAL, number, 0, 4),
            _op(_LOAD, _FIRST_ARGUMENT + 8 * check.argument),
            _op(_EQUAL if met else _SET, check.value, 0, 1),
            _op(_RETURN, _ALLOW if met else _EPERM),
            _op(_RETURN, _EPERM if met else _ALLOW),
        ]
    code.append(_op(_RETURN, _EPERM))
    return b"".join(code)


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
