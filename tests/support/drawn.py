"""What a person sees: the screen that a terminal draws of all that it was sent."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyte
from support.attached import LIMIT_S, Person


class Drawn:
    """The screen before a person, as an emulator of a terminal draws it."""

    def __init__(self, person: Person, rows: int = 24, columns: int = 80) -> None:
        self._person = person
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._drawn = 0  # bytes of what the person has seen

    @property
    def lines(self) -> list[str]:
        """All rows, without the blanks at their ends."""
        self._draw()
        return [line.rstrip() for line in self._screen.display]

    @property
    def cursor(self) -> tuple[int, int]:
        """Row and column, from 0."""
        self._draw()
        return self._screen.cursor.y, self._screen.cursor.x

    def resize(self, rows: int, columns: int) -> None:
        """The window changes."""
        self._draw()
        self._screen.resize(rows, columns)
        self._person.resize(rows, columns)

    def until(
        self, what: str, look: Callable[[list[str]], object], *, seconds: float = LIMIT_S
    ) -> list[str]:
        """The screen, once it is as it should be."""
        deadline = time.monotonic() + seconds
        while not look(lines := self.lines):
            left = deadline - time.monotonic()
            shown = "\n".join(lines)
            assert left > 0, f"not drawn: {what}\n{shown}"
            assert self._person.look(left) or self._person.process.poll() is None, shown
        return lines

    def _draw(self) -> None:
        while self._person.look(0):
            pass
        new = self._person.seen[self._drawn :]
        self._drawn += len(new)
        self._stream.feed(new)
