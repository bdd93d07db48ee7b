"""A loop whose time passes when nothing else is to be done: hours of timers in seconds.

Sockets are real. When no descriptor is ready, the clock jumps to the next timer, so what is
tried are the timeouts as they are, and not shorter ones in their place.
"""

from __future__ import annotations

import asyncio
import selectors

GRACE_S = 0.002  # a kernel that is late with what was sent over loopback


class _Selector(selectors.EpollSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000_000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        found = super().select(GRACE_S)
        if not found:
            self.now += timeout
        return found


class Loop(asyncio.SelectorEventLoop):
    """Its time stands still while anything happens, and jumps when nothing does."""

    def __init__(self) -> None:
        self._jumping = _Selector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Without the time that newer libraries give it: its threads end in real time."""
        await super().shutdown_default_executor()


def now() -> float:
    """Seconds of the running loop."""
    return asyncio.get_running_loop().time()
