"""A service is alone, and does not outlive its supervisor.

Both are seen to elsewhere too: bubblewrap and the service ask the kernel to be killed when
their parent dies (`PR_SET_PDEATHSIG`). But that is a request of the child, and a parent that
dies just before it goes unnoticed. The pipe that supervisord gives each program as standard
input has no such moment: when supervisord is gone, or has lost the wall's outer process, it
reads as ended. And until then the lock keeps a second process of the same service from the
sockets and the database.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import time
from pathlib import Path
from typing import Final

STDIN: Final = 0
_LOOK_S: Final = 0.02


class Busy(Exception):
    """Another process of this service is still there. One line."""


def hangs_on_it() -> bool:
    """Whether standard input is a pipe: then somebody started this process to watch it."""
    return stat.S_ISFIFO(os.fstat(STDIN).st_mode)


def gone() -> bool:
    """Whether the other end of the lifeline is closed. False when there is no lifeline."""
    return hangs_on_it() and _ended(0)


def alone(path: Path, *, seconds: float) -> int:
    """Takes the lock of the service; its last process may take a moment to be gone.

    Args:
        path: of the lock file, in a directory that no other service sees: whoever can open
            it, even for reading, can hold it.
        seconds: how long to wait for it; less if the lifeline ends.

    Returns:
        The locked descriptor, to be kept open for life.

    Raises:
        Busy: it is still held.
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + seconds
    watched = hangs_on_it()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            pass
        if time.monotonic() > deadline or (_ended(_LOOK_S) if watched else _nap()):
            os.close(descriptor)
            raise Busy(f"{path} is held: another process of this service is still there")


def _ended(seconds: float) -> bool:
    poll = select.poll()
    poll.register(STDIN, select.POLLHUP)
    return any(events & select.POLLHUP for _, events in poll.poll(seconds * 1000))


def _nap() -> bool:
    select.select([], [], [], _LOOK_S)
    return False
