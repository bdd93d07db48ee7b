"""What must reach another service though that one may be away: sent in order, and again until
it is taken or refused for good. Held in memory, and bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from agent_box.bus.errors import Code, Refusal

CAPACITY: Final = 1000
WAIT_S: Final = (0.5, 1.0, 2.0, 5.0)  # between tries, the last again and again
_AGAIN: Final = frozenset((Code.UNAVAILABLE, Code.DEADLINE, Code.UNKNOWN_OUTCOME))

T = TypeVar("T")


class Outbox(Generic[T]):
    """Args:
    send: raises `Refusal`. It may be called again with what it took already.
    lost: told of each item that is given up, and why: refused, or the oldest of too many.
    """

    def __init__(
        self,
        send: Callable[[T], Awaitable[object]],
        lost: Callable[[T, str], None],
        *,
        capacity: int = CAPACITY,
        waits: tuple[float, ...] = WAIT_S,
    ) -> None:
        self._send = send
        self._lost = lost
        self._capacity = capacity
        self._waits = waits
        self._items: deque[T] = deque()
        self._came = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        if len(self._items) >= self._capacity:
            self._lost(self._items.popleft(), "too many wait to be sent")
        self._items.append(item)
        self._empty.clear()
        self._came.set()

    async def run(self) -> None:
        """Sends, for as long as it is not cancelled."""
        while True:
            await self._came.wait()
            while self._items:
                item = self._items[0]
                await self._until_taken(item)
                if self._items and self._items[0] is item:
                    self._items.popleft()
            self._came.clear()
            self._empty.set()

    async def flush(self, seconds: float) -> bool:
        """Whether all was sent within that time."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def _until_taken(self, item: T) -> None:
        tries = 0
        while True:
            try:
                await self._send(item)
                return
            except Refusal as refusal:
                if refusal.code not in _AGAIN:
                    self._lost(item, refusal.message)
                    return
            await asyncio.sleep(self._waits[min(tries, len(self._waits) - 1)])
            tries += 1
