"""One hidden value from stdin: piped in, or typed on a terminal without echo.

Piped, it is read to the end. On a terminal, Enter or Ctrl-D ends it: a value cannot hold a
line feed, so nothing can follow; of lines that were pasted, all are taken together, so that
none is left to be run by the shell afterwards.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

from agent_box.cli.render import Failure, Render, Usage
from agent_box.process.secret import Secret

_LINE_MAX: Final = 4095  # what a terminal passes of a line; it drops the rest (termios(3))
_PASTE_S: Final = 0.1  # in which the next line of a paste follows
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def is_terminal() -> bool:
    """Raises Usage: stdin is closed."""
    if sys.stdin is None:
        raise Usage("stdin is closed: the value is read from it")
    return os.isatty(0)


def read(out: Render, what: str, limit: int) -> Secret:
    """Reads a value and strips exactly one final line feed from it.

    Args:
        what: for the prompt.
        limit: the most bytes that make sense. Of what is longer, enough is read to see that
            it is, and no more: it may have no end.

    Raises:
        Usage: stdin is closed, or a terminal cut the value off.
        Failure: stdin cannot be read.
    """
    try:
        untrusted = _typed(out, what, limit) if is_terminal() else _piped(limit)
    except OSError as error:
        raise Failure(64, "usage", f"stdin cannot be read: {error.strerror}") from None
    return Secret(untrusted.removesuffix(b"\n"))


def _piped(limit: int) -> bytes:
    untrusted = b""
    while len(untrusted) <= limit + 1 and (piece := os.read(0, limit + 2 - len(untrusted))):
        untrusted += piece
    return untrusted


def _typed(out: Render, what: str, limit: int) -> bytes:
    untrusted = b""
    with _woken() as signalled, _hidden(lambda: out.ask(f"{what}: ")):
        try:
            while len(untrusted) <= limit + 1:
                if 0 not in select.select([0, signalled], [], [])[0]:
                    os.read(signalled, 64)
                    continue
                piece = os.read(0, limit + 2)
                if not piece:
                    break
                untrusted += piece
                more = select.select([0], [], [], _PASTE_S)[0]
                if untrusted.endswith(b"\n") and not more:
                    break
        finally:
            out.ask("\n")  # the one that was not echoed
    if any(len(line) >= _LINE_MAX for line in untrusted.split(b"\n")):
        raise Usage(
            f"a terminal passes no more than {_LINE_MAX} bytes of a line: pipe the value in"
        )
    return untrusted


@contextmanager
def _woken() -> Iterator[int]:
    """A descriptor that is readable when a signal came. Python only notes a signal and looks
    at it later; one that comes just before a read would wait for the next key."""
    hear, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    try:
        yield hear
    finally:
        signal.set_wakeup_fd(before)
        os.close(hear)
        os.close(tell)


@contextmanager
def _hidden(ask: Callable[[], None]) -> Iterator[None]:
    """Echo off, and on again however it ends: by Ctrl-C, by a signal that ends the process,
    while it is suspended by Ctrl-Z, or by an exception. What was not read is thrown away."""
    before = termios.tcgetattr(0)
    silent = list(before)
    silent[3] &= ~(termios.ECHO | termios.ECHONL)

    def hide() -> None:
        termios.tcsetattr(0, termios.TCSAFLUSH, silent)
        ask()

    def show() -> None:
        termios.tcsetattr(0, termios.TCSAFLUSH, before)

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        show()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        raise SystemExit(128 + number)  # if the signal is blocked

    def suspend(number: int, _frame: FrameType | None) -> None:
        show()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, suspend)  # here it goes on after `fg`
        hide()

    handlers = {number: signal.signal(number, end) for number in _ENDING}
    handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, suspend)
    try:
        hide()
        yield
    finally:
        show()
        for number, handler in handlers.items():
            signal.signal(number, handler)
