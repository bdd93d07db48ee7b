"""Stops a process at its n-th system call of a kind: kills it there, or makes the call fail.

With ptrace, so that every boundary between two effects on the disk is visited, one after the
other, and not only those that a random moment happens to hit.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import pyseccomp

CAN_INJECT = platform.machine() == "x86_64"

# Every call by which a program changes a file, a name or what is durable.
EFFECTS = (
    "write", "pwrite64", "writev", "pwritev", "ftruncate", "fallocate", "fsync", "fdatasync",
    "rename", "renameat", "renameat2", "unlink", "unlinkat", "link", "linkat",
    "mkdir", "mkdirat", "open", "openat",
)  # fmt: skip

_TRACEME, _POKEUSER, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 6, 24, 0x4200, 0x420E
_TRACESYSGOOD, _EXITKILL = 1, 1 << 20
_ENTRY, _EXIT = 1, 2
_ORIG_RAX, _RAX = 15 * 8, 10 * 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


@dataclass(frozen=True)
class Ended:
    """How it went.

    Attributes:
        reached: how many calls of the kind were begun.
        acted: the name of the call at which something was done, None when it ended before.
        status: of `os.waitpid`.
    """

    reached: int
    acted: str | None
    status: int


def names() -> dict[int, str]:
    found = {}
    for name in EFFECTS:
        number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
        if number >= 0:  # negative: this architecture has no such call
            found[number] = name
    return found


def run(work: Callable[[], None], *, at: int, error: int | None = None, times: int = 1) -> Ended:
    """Runs `work` in a child process and acts at its `at`-th call of `EFFECTS`, from 0.

    Args:
        at: negative to act never and only count.
        error: an errno that the call fails with, without having had its effect; None to
            kill the process with SIGKILL just before the call.
        times: how many calls in a row fail.
    """
    wanted = names()
    child = os.fork()
    if child == 0:
        status = 99
        try:
            _ptrace(_TRACEME, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
            status = 0
        except Refused as refused:
            status = refused.status
        except BaseException:  # noqa: BLE001 - the border of this process
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    _ptrace(_SETOPTIONS, child, _TRACESYSGOOD | _EXITKILL)
    reached, acted, failing, pending = 0, None, 0, 0
    while True:
        _ptrace(_SYSCALL, child, pending)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            return Ended(reached, acted, status)
        stopped_by = os.WSTOPSIG(status)
        if stopped_by != signal.SIGTRAP | 0x80:
            pending = stopped_by
            continue
        pending = 0
        op, number = _info(child)
        if op == _ENTRY and number in wanted:
            if at <= reached < at + times and at >= 0:
                acted = acted or wanted[number]
                if error is None:
                    os.kill(child, signal.SIGKILL)
                    _, status = os.waitpid(child, 0)
                    return Ended(reached, acted, status)
                _ptrace(_POKEUSER, child, -1, offset=_ORIG_RAX)
                failing = error
            reached += 1
        elif op == _EXIT and failing:
            _ptrace(_POKEUSER, child, -failing, offset=_RAX)
            failing = 0


class Refused(Exception):
    """Ends the work with an exit status of its own."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def _info(child: int) -> tuple[int, int]:
    buffer = ctypes.create_string_buffer(128)
    size = _libc.ptrace(_GET_SYSCALL_INFO, child, 128, ctypes.addressof(buffer))
    if size < 0:
        raise OSError(ctypes.get_errno(), "PTRACE_GET_SYSCALL_INFO")
    return buffer.raw[0], int.from_bytes(buffer.raw[24:32], "little")


def _ptrace(request: int, pid: int, data: int, *, offset: int = 0) -> None:
    if _libc.ptrace(request, pid, offset, data & (1 << 64) - 1) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace({request:#x})")
