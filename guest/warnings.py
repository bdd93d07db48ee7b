"""A FIFO in the agent's root through which any program there puts a line into the journal:

    echo 'the cache is gone: builds will be slow' > /run/agent-box/warnings

A line is an event `guest-warning`, cut at `claims.TEXT_MAX` characters. They have a rate of their
own, well below that of all events, so that no program can keep a fuller disk from being told.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import stat
import time

from agent_box.guest import claims, system
from agent_box.guest.claims import Rate
from agent_box.guest.events import Events
from agent_box.guest.loop import Loop

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Final

DIRECTORY: Final = "agent-box"  # in /run of the agent's root
NAME: Final = "warnings"
READ_MAX: Final = 4096
BURST: Final = 8
EVERY_S: Final = 10.0
PAUSE_S: Final = 1.0  # between two looks, once there were too many


class Warnings:
    """Reads what programs wrote there.

    Args:
        run: the directory /run of the agent's root, whose content is the agent's affair.
    """

    def __init__(self, loop: Loop, events: Events, run: str) -> None:
        self._loop = loop
        self._events = events
        self._rate = Rate(time.monotonic(), BURST, EVERY_S)
        self._line = bytearray()
        try:
            self._fd = _fifo(run)
            loop.watch(self._fd, selectors.EVENT_READ, self._ready)
        except OSError as error:
            system.log(f"no program can warn: {error}")

    def _ready(self, _: int = 0) -> None:
        try:
            untrusted = os.read(self._fd, READ_MAX)
        except BlockingIOError:
            return
        *lines, rest = untrusted.split(b"\n")
        missed = 0
        for line in lines:
            text = _text(self._line + line)
            self._line.clear()
            if text and self._rate.take(time.monotonic()):
                self._events.tell("guest-warning", text=text)
            elif text:
                missed += 1
        self._line += rest[: READ_MAX - len(self._line)]
        if missed:
            self._events.missed(missed)
            # Writers wait when the pipe is full: a flood costs them time, and not us.
            self._loop.watch(self._fd, 0, self._ready)
            self._loop.later(PAUSE_S, self._again)

    def _again(self) -> None:
        self._loop.watch(self._fd, selectors.EVENT_READ, self._ready)


def _text(untrusted: bytes | bytearray) -> str:
    text = untrusted.decode(errors="replace")
    return "".join(c if c.isprintable() else " " for c in text).strip()[: claims.TEXT_MAX]


def _fifo(run: str) -> int:
    """Makes it anew, for an agent process before this one may be gone; follows no link.

    Raises:
        OSError: what is in its place is not ours.
    """
    above = os.open(run, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(DIRECTORY, 0o755, dir_fd=above)
        inside = os.open(DIRECTORY, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(NAME, dir_fd=inside)
            os.mkfifo(NAME, 0o600, dir_fd=inside)
            # For writing, too: then it never ends when a writer closes it.
            flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(NAME, flags, dir_fd=inside)
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(f"{NAME} is no FIFO")
            os.fchmod(fd, 0o622)
            return fd
        finally:
            os.close(inside)
    finally:
        os.close(above)
