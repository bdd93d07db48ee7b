"""Takes away what the device does not need once it has started.

Afterwards it can read, write and close what it has, accept clients, receive descriptors from
the VMM and map them; it cannot open a file, make a socket, start a program or thread, or touch
another process.
"""

from __future__ import annotations

import os
import resource
from typing import Final

from agent_box.process import allowed, linux

RESERVED_FDS: Final = 64  # for bells, memory and our own
MAX_FDS: Final = 4096 + RESERVED_FDS
DATA_BYTES: Final = 512 << 20  # anonymous memory; the guest's is not counted
_CHECKS: Final = {
    "mmap": allowed.NOT_EXECUTABLE,
    "mprotect": allowed.NOT_EXECUTABLE,
    "ioctl": allowed.Check(1, "is", allowed.FIONBIO),
}


class SealError(Exception):
    """A right could not be dropped, so the device must not serve. One line."""


def program(machine: str) -> bytes:
    """The filter for a machine, as an array of struct sock_filter.

    Raises:
        SealError: a machine that we do not know.
    """
    try:
        return allowed.program(machine, allowed.LOOP, _CHECKS)
    except allowed.NoFilter as error:
        raise SealError(str(error)) from None


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
