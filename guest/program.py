"""One program that runs for the host: a terminal or a command, with or without an attachment.

It is kept until its end was told and a while longer, so that whoever lost the connection can
come back for the rest. While somebody is attached, or may come back, what was not seen is
never dropped: the program is read no more when `window` bytes wait. A terminal that was left
runs on freely, and the last `RING` bytes of it are kept. A command that was left is hung up,
as a command over ssh is when its connection ends.
"""

from __future__ import annotations

import os
import selectors
import signal
from abc import ABC, abstractmethod

from agent_box.guest import launch
from agent_box.guest.kept import Input, Output
from agent_box.guest.loop import Loop, Timer
from agent_box.guest.streams import Refused
from agent_box.guest.wire import FrameError

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

RING: Final = 1 << 20  # of a terminal, bytes that are kept for whoever joins it
TERMINAL_WINDOW: Final = 1 << 20
COMMAND_WINDOW: Final = 1 << 18  # of each source
HOLD_S: Final = 60.0  # for a stream that broke; then nobody comes back
KEEP_S: Final = 60.0  # after its end
QUIET_S: Final = 0.1  # after the end of a terminal's program, until its output is complete
KILL_S: Final = 2.0  # between SIGTERM and SIGKILL at a timeout

IN: Final = selectors.EVENT_READ
OUT: Final = selectors.EVENT_WRITE


class Watcher(ABC):
    """One stream of the host's, as its program sees it."""

    @abstractmethod
    def opened(self) -> None:
        """The program runs."""

    @abstractmethod
    def pump(self) -> None:
        """There is more to send, or more room."""

    @abstractmethod
    def finish(self, fields: dict[str, Any]) -> None:
        """This is the end of it."""

    @abstractmethod
    def refuse(self, why: Refused) -> None:
        """It never ran."""


class Program:
    """A program from before its start until nobody asks for it any more.

    Args:
        gone: called when it may be forgotten.

    Attributes:
        outputs: the terminal's, or standard output and standard error.
        ended: the fields of its end, None while it runs or its output is not complete.
    """

    def __init__(
        self,
        loop: Loop,
        id: str,
        wanted: launch.Launch,
        timeout_ms: int | None,
        gone: Callable[[Program], None],
    ) -> None:
        self._loop = loop
        self.id = id
        self.user = wanted.user
        self.terminal = wanted.size is not None
        self.words = b" ".join(wanted.argv).decode(errors="replace")[:200]
        self._gone = gone
        self._timeout_ms = timeout_ms
        window, ring = (TERMINAL_WINDOW, RING) if self.terminal else (COMMAND_WINDOW, 0)
        self.outputs = [Output(window, ring) for _ in range(1 if self.terminal else 2)]
        self.input = Input()
        self.ended: dict[str, Any] | None = None
        self.attachment: Watcher | None = None
        self.began = False
        self._held = True  # somebody is attached, or may come back
        self._child: launch.Started | None = None
        self._open: dict[int, int] = {}  # of each source that is not at its end: its descriptor
        self._left: dict[int, int] = {}  # of each, what may still be read after the end
        self._status: int | None = None
        self._is_full = False  # with what an ended terminal's program has put out
        self._timed_out = False
        self._said = b""
        self._timers: list[Timer] = []
        self._deadline: Timer | None = None

    def start(self, wanted: launch.Launch, ground: launch.Ground) -> None:
        """Raises:
        Refused: exhausted.
        """
        child = self._child = launch.start(wanted, ground)
        self._open = dict(enumerate(child.outputs))
        self._loop.watch(child.said, IN, self._told)
        self._loop.watch(child.pidfd, IN, self._exited)

    # ------------------------------------------------------------------ attachments

    def attach(self, attachment: Watcher, size: tuple[int, int] | None) -> None:
        """The newest attachment has it."""
        before, self.attachment = self.attachment, attachment
        if before is not None:
            before.finish({"how": "taken", "status": None, "signal": None})
        self._held = True
        self.input.discard()
        self._cancel()
        if size is not None:
            self.resize(*size)
        if self.began:
            attachment.opened()
        self.flow()

    def detach(self, attachment: Watcher, *, for_good: bool) -> None:
        """Its stream ended; when not for good, whoever had it may come back for a while."""
        if self.attachment is not attachment:
            return
        self.attachment = None
        if for_good:
            self.input.commit()
            self._leave()
        elif self.ended is None:
            self._timers.append(self._loop.later(HOLD_S, self._leave))
        if self.ended is not None:
            self._timers.append(self._loop.later(KEEP_S, self.forget))

    def _leave(self) -> None:
        if self.attachment is not None:
            return
        self._held = False
        for output in self.outputs:
            output.unwatched()
        if not self.terminal:
            self._hang_up()
        self.flow()

    def _hang_up(self) -> None:
        self._close_input()
        for source in list(self._open):
            self._close_output(source)
        self._kill(signal.SIGHUP)
        if self._status is not None:
            self.forget()

    def _cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    # ------------------------------------------------------------------ what the host does

    def typed(self, offset: int, data: bytes) -> None:
        """Raises FrameError, as `kept.Input.add`."""
        self.input.add(offset, data)
        self._write()

    def no_more(self, offset: int) -> None:
        """Raises FrameError: a terminal's input has no end, or it is not there."""
        if self.terminal:
            raise FrameError("the end of a terminal's input")
        self.input.close(offset)
        self._write()

    def saw(self, source: int, offset: int) -> None:
        """Raises FrameError: there is no such source, or it never put out that much."""
        if source >= len(self.outputs):
            raise FrameError("a source that does not exist")
        self.outputs[source].saw(offset)
        self.flow()

    def resize(self, rows: int, columns: int) -> None:
        """Raises FrameError: it has no terminal."""
        if not self.terminal:
            raise FrameError("a size for a command")
        if self._child is not None and 0 in self._open:
            launch.resize(self._open[0], rows, columns)

    def signal(self, number: int) -> None:
        """Raises FrameError: there is no such signal."""
        if not 1 <= number <= 64:
            raise FrameError("a signal that does not exist")
        self._kill(number)

    # ------------------------------------------------------------------ the child

    def _told(self, _: int) -> None:
        """It began, or says why not."""
        assert self._child is not None
        try:
            data = os.read(self._child.said, launch.WORDS_MAX)
        except BlockingIOError:
            return
        if data:
            self._said += data[: launch.WORDS_MAX - len(self._said)]
            return
        self._loop.watch(self._child.said, 0, self._told)
        os.close(self._child.said)
        if self._said:
            self.refuse(Refused("bad-request", self._said.decode(errors="replace")))
            return
        self.began = True
        if self._timeout_ms is not None and self._status is None:
            self._deadline = self._loop.later(self._timeout_ms / 1000, self._time_out)
        if self.attachment is not None:
            self.attachment.opened()
        self._write()
        self._over()
        self.flow()

    def refuse(self, why: Refused) -> None:
        """It never ran."""
        attachment, self.attachment = self.attachment, None
        if attachment is not None:
            attachment.refuse(why)
        self._close_input()
        for source in list(self._open):
            self._close_output(source)
        self._gone(self)

    def _time_out(self) -> None:
        if self._status is None:
            self._timed_out = True
            self._kill(signal.SIGTERM)
            self._loop.later(KILL_S, lambda: self._kill(signal.SIGKILL))

    def _kill(self, number: int) -> None:
        """To its process group, whose number is its own as long as it is not reaped."""
        if self._child is not None and self._status is None:
            try:
                os.killpg(self._child.pid, number)
            except (ProcessLookupError, PermissionError):
                pass  # it is just ending; or a test's may not

    def _exited(self, _: int) -> None:
        child = self._child
        assert child is not None
        if self._timed_out:
            self._kill(signal.SIGKILL)  # what of its group is left
        _, status = os.waitpid(child.pid, 0)
        self._status = os.waitstatus_to_exitcode(status)
        if self._deadline is not None:
            self._deadline.cancel()
        self._loop.watch(child.pidfd, 0, self._exited)
        os.close(child.pidfd)
        self._close_input()
        if self.terminal:
            self._loop.later(QUIET_S, self._quiet)
        for source, fd in list(self._open.items()):
            # what it put out before its end; a child of its may hold the pipe for ever
            self._left[source] = launch.unread(fd)
            if not self._left[source] and not self.terminal:
                self._close_output(source)
        self._over()
        self.flow()

    def _quiet(self) -> None:
        """A terminal's output comes through a queue of the kernel's, a moment late. The end of
        that is told by the kernel, which hangs the terminal up with its session; only a program
        that gave its terminal up before leaves it to those who have it still."""
        if 0 not in self._open:
            return
        if not self.outputs[0].room(watched=self._held):
            self._is_full = True  # until somebody reads
        elif launch.unread(self._open[0]):
            self._loop.later(QUIET_S, self._quiet)
        else:
            self._close_output(0)
            self._over()
            self.flow()

    def _over(self) -> None:
        """When it has ended and all of its output is here, its end can be told."""
        if self._status is None or self._open or self.ended is not None or not self.began:
            return
        if self._timed_out:
            self.ended = {"how": "timed-out", "status": None, "signal": None}
        elif self._status < 0:
            self.ended = {"how": "signalled", "status": None, "signal": -self._status}
        else:
            self.ended = {"how": "exited", "status": self._status, "signal": None}
        if self.attachment is None:
            if self._held or self.terminal:
                self._cancel()
                self._timers.append(self._loop.later(KEEP_S, self.forget))
            else:
                self.forget()

    def forget(self) -> None:
        """Unless somebody has it."""
        if self.attachment is None:
            self._cancel()
            self._gone(self)

    # ------------------------------------------------------------------ bytes

    def flow(self) -> None:
        """Reads what there is room for, and sends what there is."""
        if self._is_full and self.outputs[0].room(watched=self._held):
            self._is_full = False
            self._loop.later(QUIET_S, self._quiet)
        for source, fd in list(self._open.items()):
            room = self.began and self.outputs[source].room(watched=self._held)
            self._loop.watch(fd, IN if room else 0, self._reading(source))
        if self.attachment is not None and self.began:
            self.attachment.pump()

    def _reading(self, source: int) -> Callable[[int], None]:
        return self._read_first if source == 0 else self._read_second

    def _read_first(self, _: int) -> None:
        self._read(0)

    def _read_second(self, _: int) -> None:
        self._read(1)

    def _read(self, source: int) -> None:
        output = self.outputs[source]
        most = output.room(watched=self._held)
        if source in self._left and not self.terminal:
            most = min(most, self._left[source])
        try:
            data = os.read(self._open[source], most)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # EIO: nobody has the terminal any more (pty(7))
        output.add(data, watched=self._held)
        if source in self._left and not self.terminal:
            self._left[source] -= len(data)
        if not data or (not self.terminal and self._left.get(source) == 0):
            self._close_output(source)
            self._over()
        self.flow()

    def _write(self, _: int = 0) -> None:
        child = self._child
        if child is None or not self.began:
            return
        before = self.input.taken
        while data := self.input.waiting():
            if child.input < 0:
                self.input.drop()
                break
            try:
                self.input.took(os.write(child.input, data))
            except BlockingIOError:
                break
            except OSError:
                self._close_input()  # EPIPE: the program closed it
        if child.input >= 0:
            waits = bool(self.input.waiting())
            self._loop.watch(child.input, OUT if waits else 0, self._write)
            if not waits and self.input.ending:
                self._close_input()
        if self.input.taken != before and self.attachment is not None:
            self.attachment.pump()

    def _close_input(self) -> None:
        child = self._child
        if child is not None and child.input >= 0:
            self._loop.watch(child.input, 0, self._write)
            os.close(child.input)
            child.input = -1
        self.input.drop()

    def _close_output(self, source: int) -> None:
        fd = self._open.pop(source)
        self._loop.watch(fd, 0, self._reading(source))
        os.close(fd)
