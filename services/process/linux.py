"""The few system calls for which Python has no name, and nothing around them.

ctypes is imported here alone, and late: it costs 2 ms and 0.4 MB (measured), and the daemon
and the CLI do without.
"""

from __future__ import annotations

import os
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1
PR_GET_PDEATHSIG: Final = 2
PR_GET_DUMPABLE: Final = 3
PR_SET_DUMPABLE: Final = 4
PR_SET_NO_NEW_PRIVS: Final = 38

_LANDLOCK_CREATE_RULESET: Final = 444  # one number on every architecture
_LANDLOCK_ADD_RULE: Final = 445
_LANDLOCK_RESTRICT_SELF: Final = 446
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER: Final = 1
_SECCOMP_FILTER_FLAG_TSYNC: Final = 1
_RULE_PATH_BENEATH: Final = 1
_CREATE_RULESET_VERSION: Final = 1


def prctl(option: int, argument: int = 0) -> int:
    """prctl(2) with one argument.

    Raises:
        OSError: as the kernel says.
    """
    return _check(_libc().prctl(*map(_long, (option, argument, 0, 0, 0))), "prctl")


def prctl_get(option: int) -> int:
    """prctl(2) for the options that write an int through a pointer, e.g. PR_GET_PDEATHSIG."""
    import ctypes

    value = ctypes.c_int(0)
    result = _libc().prctl(_long(option), ctypes.byref(value), *map(_long, (0, 0, 0)))
    _check(result, "prctl")
    return value.value


def add_seccomp_filter(program: bytes) -> None:
    """Adds a BPF program to the filters of every thread of this process (seccomp(2), TSYNC).

    Raises:
        OSError: as the kernel says; ENOSYS on an architecture that we do not know.
        ValueError: the program's length is no multiple of eight.
    """
    import ctypes
    import errno

    if not program or len(program) % 8:
        raise ValueError("not a BPF program")
    number = _SECCOMP.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"seccomp on {os.uname().machine}")

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    result = _libc().syscall(
        _long(number),
        _long(_SECCOMP_SET_MODE_FILTER),
        _long(_SECCOMP_FILTER_FLAG_TSYNC),
        ctypes.byref(Program(len(program) // 8, program)),
    )
    if result > 0:
        raise OSError(errno.EBUSY, f"thread {result} has filters of its own")
    _check(result, "seccomp")


def landlock_abi() -> int:
    """The Landlock version of the kernel; 0 when it has none or it is switched off."""
    result = _libc().syscall(
        _long(_LANDLOCK_CREATE_RULESET), None, _long(0), _long(_CREATE_RULESET_VERSION)
    )
    return max(0, int(result))


def landlock_ruleset(filesystem: int, network: int, scoped: int) -> int:
    """A new ruleset that handles these rights.

    Returns:
        Its descriptor.

    Raises:
        OSError: as the kernel says, e.g. EINVAL for a right that it does not know.
    """
    import ctypes

    class Attributes(ctypes.Structure):
        _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))

    attributes = Attributes(filesystem, network, scoped)
    # An older kernel takes a longer structure as long as what it does not know is zero.
    result = _libc().syscall(
        _long(_LANDLOCK_CREATE_RULESET),
        ctypes.byref(attributes),
        _long(ctypes.sizeof(attributes)),
        _long(0),
    )
    return _check(result, "landlock_create_ruleset")


def landlock_allow(ruleset: int, directory: int, rights: int) -> None:
    """Allows rights beneath an open path.

    Raises:
        OSError: as the kernel says.
    """
    import ctypes

    class Beneath(ctypes.Structure):
        _pack_ = 1
        _layout_ = "ms"
        _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))

    beneath = Beneath(rights, directory)
    result = _libc().syscall(
        _long(_LANDLOCK_ADD_RULE),
        _long(ruleset),
        _long(_RULE_PATH_BENEATH),
        ctypes.byref(beneath),
        _long(0),
    )
    _check(result, "landlock_add_rule")


def landlock_enforce(ruleset: int) -> None:
    """Restricts this thread, and every one that it starts, for good. Needs no_new_privs.

    Raises:
        OSError: as the kernel says.
    """
    _check(
        _libc().syscall(_long(_LANDLOCK_RESTRICT_SELF), _long(ruleset), _long(0)),
        "landlock_restrict_self",
    )


def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def _long(value: int) -> Any:
    import ctypes

    return ctypes.c_long(value)  # a bare int would pass 32 bits of an argument that has 64


def _check(result: int, call: str) -> int:
    import ctypes

    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
