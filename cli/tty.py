"""Our own terminal: raw while a guest has it, as it was whenever it has not; and signals."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final

FALLBACK: Final = (24, 80)  # where a terminal says that it has no size
FENCE_S: Final = 0.3  # for answers of the terminal that are still on their way
WRITE_S: Final = 1.0  # for the last sequences, at a terminal that takes nothing
_SIZE: Final = struct.Struct("HHHH")
# Every signal that ends a process by default and can be caught; not those of a broken program.
ENDING: Final = tuple(
    getattr(signal, name)
    for name in [
        "SIGHUP",
        "SIGINT",
        "SIGQUIT",
        "SIGTERM",
        "SIGUSR1",
        "SIGUSR2",
        "SIGALRM",
        "SIGVTALRM",
        "SIGPROF",
        "SIGIO",
        "SIGPWR",
        "SIGSTKFLT",
        "SIGXCPU",
        "SIGABRT",
        "SIGSYS",
        "SIGTRAP",
    ]
) + tuple(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))


def size(number: int) -> tuple[int, int]:
    """Rows and columns of a terminal; `FALLBACK` for what it does not know (0)."""
    try:
        packed = fcntl.ioctl(number, termios.TIOCGWINSZ, b"\0" * _SIZE.size)
    except OSError:
        return FALLBACK
    rows, columns, _, _ = _SIZE.unpack(packed)
    return rows or FALLBACK[0], columns or FALLBACK[1]


class Raw:
    """The terminal on descriptor `number`, raw between `enter` and `leave`.

    Raises:
        termios.error: it is none, or has hung up.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._before: list[Any] | None = None
        self._raw: list[Any] = []

    def enter(self) -> None:
        """As cfmakeraw(3): every byte comes as it is typed, and goes as it is written."""
        self._before = before = termios.tcgetattr(self._number)
        raw = list(before)
        raw[0] &= ~(
            termios.IGNBRK
            | termios.BRKINT
            | termios.PARMRK
            | termios.ISTRIP
            | termios.INLCR
            | termios.IGNCR
            | termios.ICRNL
            | termios.IXON
        )
        raw[1] &= ~termios.OPOST
        raw[2] = raw[2] & ~(termios.CSIZE | termios.PARENB) | termios.CS8
        raw[3] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.ISIG | termios.IEXTEN)
        raw[6] = list(raw[6])
        raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0
        self._raw = raw
        termios.tcsetattr(self._number, termios.TCSANOW, raw)

    def again(self) -> None:
        """Raw once more: who was stopped and goes on finds the modes of the shell."""
        if self._before is not None:
            termios.tcsetattr(self._number, termios.TCSANOW, self._raw)

    def leave(self, last: bytes, *, fence: bool) -> None:
        """As it was before, also when it has hung up.

        Never waits for a terminal that takes nothing: TCSADRAIN would.

        Args:
            last: sequences that undo what the guest's programs have set.
            fence: whether answers may be on their way, which would be typed into the shell.
        """
        before, self._before = self._before, None
        if before is None:
            return
        try:
            if _written(self._number, last) and fence:
                self._pass_answers()
            termios.tcsetattr(self._number, termios.TCSANOW, before)
            if fence:
                termios.tcflush(self._number, termios.TCIFLUSH)
        except (OSError, termios.error):
            pass  # it has hung up, and has no modes any more

    def _pass_answers(self) -> None:
        """Asks the terminal whether it is well and reads up to its answer: it answers in order,
        so nothing comes after that."""
        if not _written(self._number, b"\x1b[5n"):
            return
        until = time.monotonic() + FENCE_S
        seen = b""
        while b"\x1b[0n" not in seen and (left := until - time.monotonic()) > 0:
            if not select.select([self._number], [], [], left)[0]:
                return
            piece = os.read(self._number, 4096)
            if not piece:
                return
            seen = seen[-3:] + piece


def _written(number: int, data: bytes) -> bool:
    """Writes to a terminal in pieces that it has room for. False: it takes nothing."""
    try:
        own = os.open(
            f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        )
    except OSError:  # somebody else's terminal
        os.write(number, data)
        return True
    until = time.monotonic() + WRITE_S
    try:
        while data:
            left = until - time.monotonic()
            if left <= 0 or not select.select([], [own], [], left)[1]:
                return False
            try:
                data = data[os.write(own, data) :]
            except BlockingIOError:
                continue
        return True
    finally:
        os.close(own)


class Signals:
    """Notes signals and tells by a descriptor, so that they are heard in a loop, between two
    steps, and never in the middle of one. What was ignored before stays ignored.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = tuple(numbers)
        self._handlers: dict[int, Any] = {}
        self._wakeup = -1
        self.descriptor, self._tell = -1, -1

    def __enter__(self) -> Signals:
        self.descriptor, self._tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, _noted)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.descriptor)
        os.close(self._tell)

    def came(self) -> list[int]:
        """The signals since the last call, in order."""
        try:
            return list(os.read(self.descriptor, 1024))
        except BlockingIOError:
            return []

    def stop(self) -> None:
        """Stops this process as Ctrl-Z does, and returns when it goes on."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)


def _noted(number: int, frame: object) -> None:
    """The wakeup descriptor has the number."""
