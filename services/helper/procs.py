"""Processes by number and start time, which together are never used twice; and their end."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import signal
import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final, NamedTuple

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
_HIGH: Final = 100  # above every number that a child is given
# What a shim ignores, and what is set right again for its children.
IGNORED: Final = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1,
    signal.SIGUSR2, signal.SIGPIPE, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF,
    signal.SIGXFSZ, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
)  # fmt: skip


class Proc(NamedTuple):
    """A process, until the host is started anew.

    Attributes:
        pid: in our PID namespace.
        start: in clock ticks since the host was started (proc(5), field 22 of stat).
    """

    pid: int
    start: int


@cache
def boot_id() -> str:
    """Of this run of the kernel: after another, every number means somebody else."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def find(pid: int) -> Proc | None:
    """The process that has this number now; None when there is none, or it is dead.

    One that is dead but not reaped keeps its number and start time, so its state is looked at.
    """
    fields = _stat(pid)
    if fields[0] in (b"Z", b"X", b"x"):
        return None
    return Proc(pid, int(fields[19]))


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; those of a dead one when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        fields = []
    return fields if len(fields) >= 20 else [b"X"] * 20


def _children(pid: int) -> list[int]:
    found = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [each for each in found if _stat(each)[1] == str(pid).encode()]


def alive(proc: Proc | None) -> bool:
    return proc is not None and find(proc.pid) == proc


def handle(proc: Proc) -> int | None:
    """A pidfd of it; None when it is dead."""
    try:
        fd = os.pidfd_open(proc.pid)
    except ProcessLookupError:
        return None
    if alive(proc):  # looked at after the number was taken hold of
        return fd
    os.close(fd)
    return None


def send_signal(fd: int, number: signal.Signals) -> None:
    """To a pidfd; one that is dead is not an error."""
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        pass


def wait(fds: Iterable[int], seconds: float) -> bool:
    """Until all of these pidfds are dead; False when one is not in time."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    left = set(fds)
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        for fd, _ in poll.poll(remaining * 1000):
            poll.unregister(fd)
            left.discard(fd)
    return True


def end(found: Iterable[Proc | None], seconds: float) -> bool:
    """Kills all of them that live, and waits; False when one is still there."""
    handles = [fd for proc in found if proc is not None and (fd := handle(proc)) is not None]
    try:
        for fd in handles:
            send_signal(fd, signal.SIGKILL)
        return wait(handles, seconds)
    finally:
        for fd in handles:
            os.close(fd)


def end_jail(outer: Proc | None, *, patience: float, seconds: float) -> bool:
    """Ends what builds and keeps a jail, when what was in it is dead; False when it is there.

    Mostly it ends by itself, since its program is dead or its gate closed. It is not simply
    killed: the process that it has made for the program may not be the program yet, and then
    waits for it for ever.

    Args:
        patience: for it to end by itself.
        seconds: for each step after that.
    """
    if outer is None or (fd := handle(outer)) is None:
        return True
    try:
        if wait([fd], patience):
            return True
        send_signal(fd, signal.SIGSTOP)  # so that it makes no other while we look
        deadline = time.monotonic() + seconds
        while alive(outer) and _stat(outer.pid)[0] not in (b"T", b"t"):
            if time.monotonic() > deadline:
                return False
            select.select([], [], [], 0.005)
        end([find(child) for child in _children(outer.pid)], seconds)
        send_signal(fd, signal.SIGKILL)
        return wait([fd], seconds)
    finally:
        os.close(fd)


def spawn(argv: Sequence[str], fds: Sequence[int]) -> int:
    """Starts a program with exactly these descriptors, numbered from 0, and no environment.

    Raises:
        OSError: it cannot be started.
    """
    high = []
    try:
        for fd in fds:
            high.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH))
        actions: list[tuple[int, ...]] = [
            (os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(high)
        ]
        # Ours are all close-on-exec; these were left to us by whoever started us.
        actions += [(os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable() if fd >= len(high)]
        return os.posix_spawn(
            argv[0], list(argv), {}, file_actions=actions, setsigmask=[], setsigdef=IGNORED
        )
    finally:
        for fd in high:
            os.close(fd)


def _inheritable() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            continue  # closed meanwhile, as the one that read the directory was
    return found


def prctl(option: int, argument: int) -> None:
    """prctl(2) with one argument.

    Raises:
        OSError: as the kernel says.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *map(ctypes.c_long, (argument, 0, 0, 0))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")


def die_with(parent: int) -> None:
    """Asks to be killed when `parent` dies, by whose thread we were started.

    Raises:
        OSError: ESRCH when it is dead already.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise OSError(errno.ESRCH, "the parent is gone")
