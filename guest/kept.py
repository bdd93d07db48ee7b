"""Output that is kept until the host has it, and input until the program has it. No I/O.

Every byte has an absolute offset in all that ever flowed in its direction, so whoever comes
back says where it stopped.
"""

from __future__ import annotations

from agent_box.guest.streams import INPUT_MAX
from agent_box.guest.wire import FrameError

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Final

READ_MAX: Final = 1 << 16  # bytes that are read of a program at once
SURE_MAX: Final = 1 << 20  # bytes that wait for a program that does not read, left by callers


class Output:
    """One source of output.

    Args:
        window: bytes that may be kept unseen before the program is read no more.
        ring: bytes that are kept although they were seen, or although nobody sees them.
    """

    def __init__(self, window: int, ring: int) -> None:
        self._window = window
        self._ring = ring
        self._held = bytearray()
        self.base = 0  # offset of the oldest byte that is kept
        self.seen = 0

    @property
    def end(self) -> int:
        """The offset after the newest byte."""
        return self.base + len(self._held)

    def room(self, *, watched: bool) -> int:
        """How many bytes may be read of the program now. Whom nobody watches it runs freely,
        and what was before the last `ring` bytes is forgotten."""
        if not watched:
            return READ_MAX
        return min(READ_MAX, max(0, self._window - (self.end - self.seen)))

    def add(self, data: bytes, *, watched: bool) -> None:
        self._held += data
        self._forget(self.end if not watched else self.seen)

    def saw(self, offset: int) -> None:
        """The host has everything up to there.

        Raises:
            FrameError: it cannot: that much was never put out.
        """
        if offset > self.end:
            raise FrameError("output was seen that never was")
        self.seen = max(self.seen, offset)
        self._forget(self.seen)

    def unwatched(self) -> None:
        """Nobody will come back for what was not seen."""
        self._forget(self.end)

    def slice(self, offset: int, most: int) -> bytes:
        """Up to `most` bytes from `offset` on, which is not before `base`."""
        start = offset - self.base
        return bytes(self._held[start : start + most])

    def _forget(self, upto: int) -> None:
        cut = min(upto, self.end - self._ring) - self.base
        if cut > 0:
            del self._held[:cut]
            self.base += cut
            self.seen = max(self.seen, self.base)


class Input:
    """What was typed and not yet written to the program."""

    def __init__(self) -> None:
        self._sure = bytearray()  # counts as taken; goes to the program first
        self._held = bytearray()
        self.taken = 0
        self.ending = False  # nothing comes after what is held

    @property
    def end(self) -> int:
        """The offset after the last byte that came."""
        return self.taken + len(self._held)

    def add(self, offset: int, data: bytes) -> None:
        """Takes bytes; those that are here already are dropped.

        Raises:
            FrameError: a gap, something after the end, or more than may wait.
        """
        if offset > self.end:
            raise FrameError("a gap in the input")
        fresh = data[self.end - offset :]
        if fresh and self.ending:
            raise FrameError("input after its end")
        if len(self._held) + len(fresh) > INPUT_MAX:
            raise FrameError("more input than may wait")
        self._held += fresh

    def close(self, offset: int) -> None:
        """Nothing follows after `offset`.

        Raises:
            FrameError: the end of the input is not there.
        """
        if offset != self.end:
            raise FrameError("the end of the input is at another place")
        self.ending = True

    def waiting(self, most: int = 1 << 16) -> bytes:
        """The next bytes for the program."""
        return bytes((self._sure or self._held)[:most])

    def took(self, count: int) -> None:
        """The program has so many of what `waiting` gave."""
        if self._sure:
            del self._sure[:count]
        else:
            del self._held[:count]
            self.taken += count

    def discard(self) -> None:
        """Somebody comes and sends again what was not taken."""
        self._held.clear()
        self.ending = False

    def commit(self) -> None:
        """Whoever typed it has left and sends nothing again, so it counts as taken now."""
        if len(self._sure) < SURE_MAX:
            self._sure += self._held
        self.taken += len(self._held)
        self._held.clear()

    def drop(self) -> None:
        """The program takes no more: what waits for it, and what will come, counts as taken."""
        self._sure.clear()
        self.took(len(self._held))
