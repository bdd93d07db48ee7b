"""The agent process's one loop: descriptors that are ready, and moments that have come."""

from __future__ import annotations

import heapq
import selectors
import time
from collections.abc import Callable

from agent_box.guest import system

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Any


class Timer:
    """A moment for which something is planned."""

    __slots__ = ("at", "work")

    def __init__(self, at: float, work: Callable[[], None]) -> None:
        self.at = at
        self.work: Callable[[], None] | None = work

    def cancel(self) -> None:
        self.work = None

    def __lt__(self, other: Timer) -> bool:
        return self.at < other.at


class Loop(selectors.DefaultSelector):
    """A selector whose data are callbacks that take the events.

    What one callback raises is its own affair: it is told on the console, its descriptor is
    looked at no more, and the others are served.
    """

    def __init__(self) -> None:
        super().__init__()
        self._timers: list[Timer] = []

    def later(self, seconds: float, work: Callable[[], None]) -> Timer:
        """Calls `work` once, in so many seconds, unless it is cancelled."""
        timer = Timer(time.monotonic() + seconds, work)
        heapq.heappush(self._timers, timer)
        return timer

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """What is wanted of a descriptor from now on; no events: nothing, not even its end."""
        try:
            key = self.get_key(fd)
        except KeyError:
            if events:
                self.register(fd, events, callback)
            return
        if not events:
            self.unregister(fd)
        elif key.events != events or key.data != callback:
            self.modify(fd, events, callback)

    def turn(self) -> None:
        """Waits for one thing, and does all that is due."""
        for key, events in self.select(self._wait()):
            now = self.get_map().get(key.fd)
            if now is None or now.fileobj is not key.fileobj or not events & now.events:
                continue  # a callback before this one closed it
            try:
                now.data(events & now.events)
            except Exception as error:  # noqa: BLE001 - one port's defect ends no other port
                self._failed(error)
                if self.get_map().get(key.fd) is now:
                    self.unregister(now.fileobj)
        while self._timers and self._timers[0].at <= time.monotonic():
            work = heapq.heappop(self._timers).work
            if work is not None:
                try:
                    work()
                except Exception as error:  # noqa: BLE001 - as above
                    self._failed(error)

    def _wait(self) -> float | None:
        while self._timers and self._timers[0].work is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0].at - time.monotonic()) if self._timers else None

    @staticmethod
    def _failed(error: Any) -> None:
        system.log(f"a callback failed: {type(error).__name__}: {error}")
