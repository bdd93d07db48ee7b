"""One edge-triggered epoll and one heap of timers, for all that an instance's plane waits on."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Final, Protocol

IN: Final = select.EPOLLIN
OUT: Final = select.EPOLLOUT
ERROR: Final = select.EPOLLERR | select.EPOLLHUP
UNSURE: Final = ERROR | select.EPOLLRDHUP | select.EPOLLPRI  # see `Handler`
_EDGES: Final = IN | OUT | select.EPOLLRDHUP | select.EPOLLPRI | select.EPOLLET
_EVENTS_MAX: Final = 512


class Handler(Protocol):
    """Whoever waits on a descriptor.

    An edge tells of all that came until `poll` looked. So a read of a stream that brought less
    than there was room for has emptied it, and the next edge tells of more. Not so where one of
    `UNSURE` was told before: no further edge tells of the end behind the last bytes, and a read
    stops at urgent data (tcp(7)).
    """

    def on_event(self, events: int) -> None: ...


class Poller:
    """Calls handlers from `poll`; never blocks. `now` is the time of the last `tick`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._fresh: set[int] = set()  # watched since the last look, which did not see them
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.now = clock()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def tick(self) -> float:
        """Looks at the clock."""
        self.now = self._clock()
        return self.now

    def watch(self, fd: int, handler: Handler) -> None:
        """Edges of the descriptor go to the handler. Closing the descriptor needs `forget`."""
        self._handlers[fd] = handler
        self._fresh.add(fd)
        try:
            self._epoll.register(fd, _EDGES)
        except OSError:
            del self._handlers[fd]
            raise

    def hand_over(self, fd: int, handler: Handler) -> None:
        """A watched descriptor has another handler from now on, which missed earlier edges."""
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        """To be called before the descriptor goes to somebody else, or is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def closing(self, fd: int) -> None:
        """As `forget`, for what is closed next and of which nobody has a copy: the kernel
        forgets such a descriptor by itself (epoll(7), question 6).
        """
        self._handlers.pop(fd, None)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Calls once, at the first `poll` after `when`. There is no way to take it back."""
        heappush(self._timers, (when, next(self._order), call))

    def poll(self) -> int:
        """Handles events and timers that are due. Returns how many events there were."""
        events = self._epoll.poll(0, _EVENTS_MAX)
        handlers = self._handlers
        fresh = self._fresh
        fresh.clear()
        for fd, mask in events:
            handler = handlers.get(fd)
            # A descriptor that was closed and opened again meanwhile: this was of the old one.
            if handler is not None and fd not in fresh:
                handler.on_event(mask)
        timers = self._timers
        while timers and timers[0][0] <= self.now:
            heappop(timers)[2]()
        return len(events)

    def wait(self) -> float | None:
        """Seconds until the next timer, or None without one."""
        return max(0.0, self._timers[0][0] - self._clock()) if self._timers else None

    def close(self) -> None:
        self._handlers.clear()
        self._timers.clear()
        self._epoll.close()
