"""Takes away what a network worker does not need once it has started.

Afterwards it can make and use sockets, and read the few files that its jail shows; it cannot
write or make a file, start a program, a process or a thread, listen anywhere (the listeners of
forwards come from the service), map memory that can be executed, or touch another process. This
comes on top of the jail's own filter, which only refuses what no program there needs.
"""

from __future__ import annotations

import os
import resource
from typing import Final

from agent_box.process import allowed, linux

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CALLS: Final = (
    *allowed.LOOP,
    # flows, the resolver, the broker, and the host's own addresses by netlink
    "socket", "connect", "setsockopt", "bind", "getpeername", "socketpair", "sendmmsg", "recvmmsg",
    # the resolver's files, and modules of Python that are imported late
    "openat", "pread64", "getdents64", "readlink", "statx", "getcwd", "uname",
    # a plane for another boot, and bytes that need not be seen
    "epoll_create1", "pipe2", "splice",
)  # fmt: skip
_CHECKS: Final = {
    "mmap": allowed.NOT_EXECUTABLE,
    "mprotect": allowed.NOT_EXECUTABLE,
    "ioctl": allowed.Check(1, "is", allowed.FIONBIO),
    "openat": allowed.Check(2, "has none of", _WRITES),
}


class SealError(Exception):
    """A right could not be dropped, so the worker must not serve. One line."""


def seal() -> None:
    """Gives up rights for good. Once, before the first byte of a guest is read; whatever brings
    machine code with it has to be imported by then.

    Raises:
        SealError: a right could not be dropped.
    """
    try:
        for name in (resource.RLIMIT_CORE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK):
            resource.setrlimit(name, (0, 0))
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        linux.add_seccomp_filter(allowed.program(os.uname().machine, _CALLS, _CHECKS))
    except (OSError, ValueError, allowed.NoFilter) as error:
        raise SealError(f"a right cannot be dropped: {error}") from error
    _prove()


def _prove() -> None:
    """That no other process can be touched, by trying it with this one."""
    try:
        os.kill(os.getpid(), 0)
    except PermissionError:
        return
    except OSError as error:
        raise SealError(f"a signal fails for another reason: {error}") from error
    raise SealError("a signal can still be sent")
