"""Port 5004: harnesses, which speak ACP with the host on their standard input and output.

The same frames as port 5001, and the same programs; but a harness belongs to its run and not
to its stream. A stream that breaks changes nothing: the harness goes on, its input stays open,
what it puts out is kept until the host has it, and it waits when much is kept. It ends by
itself, or when the host leaves it for good: then SIGTERM, and SIGKILL after a while.
"""

from __future__ import annotations

import signal

from agent_box.guest.program import KEEP_S, Program
from agent_box.guest.terminal import ENDED_MAX, Terminals

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Final

    from agent_box.guest.program import Watcher

KILL_S: Final = 5.0  # between SIGTERM and SIGKILL


class Harness(Program):
    """A harness from before its start until the host needs nothing more of it."""

    _released = False

    def detach(self, attachment: Watcher, *, for_good: bool) -> None:
        if self.attachment is not attachment:
            return
        self.attachment = None
        if for_good:
            self._release()
        elif self.ended is not None:  # and that was told, or is told to whoever comes back
            self._loop.later(KEEP_S, self.discard)

    def forget(self) -> None:
        """Not before the host said so, or there are too many that ended."""
        if self._released:
            super().forget()

    def discard(self) -> None:
        """Whether or not the host said so, unless it is there."""
        if self.attachment is None:
            self._released = True
            self.forget()

    def _release(self) -> None:
        self._released = True
        for output in self.outputs:
            output.unwatched()
        self._held = False  # what it still says is read and dropped, so that it can end
        if self._status is not None:
            self._close_rest()
            self.forget()
            return
        self._kill(signal.SIGTERM)
        self._loop.later(KILL_S, lambda: self._kill(signal.SIGKILL))
        self.flow()

    def _exited(self, events: int) -> None:
        super()._exited(events)
        if self._released:
            self._close_rest()
            self.forget()

    def _close_rest(self) -> None:
        """A child of its may hold a pipe for ever."""
        for source in list(self._open):
            self._close_output(source)


class Harnesses(Terminals):
    """All harnesses of this guest."""

    programs = Harness

    def _tidy(self) -> None:
        over = [p for p in self._programs.values() if p.ended and p.attachment is None]
        for program in over[: max(0, len(over) - ENDED_MAX)]:
            assert isinstance(program, Harness)
            program.discard()
