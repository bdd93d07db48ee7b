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
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from agent_box.cli.render import Failure, Render, Usage
from agent_box.process.secret import Secret

_LINE_MAX: Final = 4095  # what a terminal passes of a line; it drops the rest (termios(3))
_PASTE_S: Final = 0.1  # in which the next line of a paste follows
_NOTED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


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
    with _hidden(lambda: out.ask(f"{what}: ")) as ready:
        try:
            while len(untrusted) <= limit + 1 and ready(None):
                piece = os.read(0, limit + 2)
                if not piece:
                    break
                untrusted += piece
                if untrusted.endswith(b"\n") and not ready(_PASTE_S):
                    break
        finally:
            out.ask("\n")  # the one that was not echoed
    if any(len(line) >= _LINE_MAX for line in untrusted.split(b"\n")):
        raise Usage(
            f"a terminal passes no more than {_LINE_MAX} bytes of a line: pipe the value in"
        )
    return untrusted


@contextmanager
def _hidden(ask: Callable[[], None]) -> Iterator[Callable[[float | None], bool]]:
    """Echo off, and on again however it ends: by Ctrl-C, by a signal that ends the process,
    while it is suspended by Ctrl-Z, or by an exception. What was not read is thrown away.

    Gives a function that waits for something to read, at most so many seconds (None: for
    ever), and tells whether there is; signals are attended to there.
    """
    before = termios.tcgetattr(0)
    silent = list(before)
    silent[3] &= ~(termios.ECHO | termios.ECHONL)
    came: list[int] = []

    def hide() -> None:
        termios.tcsetattr(0, termios.TCSAFLUSH, silent)
        ask()

    def show() -> None:
        with suppress(termios.error):  # the terminal has hung up, and shows nothing any more
            termios.tcsetattr(0, termios.TCSAFLUSH, before)

    def attend() -> None:
        while came:
            number = came.pop(0)
            show()
            handler = signal.signal(number, signal.SIG_DFL)
            signal.pthread_kill(threading.get_ident(), number)
            if number != signal.SIGTSTP:
                raise SystemExit(128 + number)  # it is blocked, or we would not be here
            signal.signal(number, handler)  # here it goes on after `fg`
            hide()

    def ready(seconds: float | None) -> bool:
        while True:
            attend()
            found = select.select([0, signalled], [], [], seconds)[0]
            if signalled not in found:
                return bool(found)
            os.read(signalled, 64)

    with _signals(came) as signalled:
        try:
            hide()
            yield ready
        finally:
            show()
            came[:] = [number for number in came if number != signal.SIGTSTP]
            attend()


@contextmanager
def _signals(came: list[int]) -> Iterator[int]:
    """Notes signals in `came`, and gives a descriptor that is readable when one came.

    A handler that acted at once could come in the middle of a prompt being written; and one
    that comes just before a read would not be heard until the next key.
    """
    hear, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wakeup = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    handlers = {
        number: signal.signal(number, lambda which, _frame: came.append(which)) for number in _NOTED
    }
    try:
        yield hear
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(hear)
        os.close(tell)
