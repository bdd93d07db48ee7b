"""Writing to a connection: what is written in one turn of the loop leaves in one piece.

A head, the body that is there already and the end of it are several events of HTTP; sent one
by one each would be a system call, a TLS record and a wake-up of the other side. Nothing waits
for more than the end of the turn, and nothing overtakes.
"""

from __future__ import annotations

import asyncio
from typing import Final

WHOLE: Final = 1 << 16  # bytes; a larger piece goes out at once and is not copied


class Outgoing:
    """Args:
    writer: whose transport nobody else writes to.
    high: bytes that wait for the reader before `drain` does.
    """

    def __init__(self, writer: asyncio.StreamWriter, high: int) -> None:
        self._writer: Final = writer
        self._transport: Final = writer.transport
        self._parts: list[bytes] = []
        self._size = 0
        self._transport.set_write_buffer_limits(high=high)

    def write(self, data: bytes) -> None:
        """In order, by the end of the loop's turn."""
        if not self._parts and len(data) < WHOLE:
            asyncio.get_running_loop().call_soon(self.flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size >= WHOLE:
            self.flush()

    def flush(self) -> None:
        """At once."""
        parts, self._parts, self._size = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    async def drain(self, seconds: float) -> None:
        """Waits until the reader is no further behind than it may be.

        Raises:
            OSError: the connection is lost.
            TimeoutError: it stayed behind for so long.
        """
        if not self._transport.is_closing() and not self._transport.get_write_buffer_size():
            return
        async with asyncio.timeout(seconds):
            await self._writer.drain()

    async def finish(self, seconds: float) -> None:
        """Gives the reader all that was written, and then the end.

        Raises:
            OSError, TimeoutError: as `drain`, of everything.
        """
        self.flush()
        self._transport.set_write_buffer_limits(high=0)
        async with asyncio.timeout(seconds):
            await self._writer.drain()
        if self._writer.can_write_eof():
            self._writer.write_eof()

    def abort(self) -> None:
        """Ends the connection at once; what was not sent is lost."""
        self._parts, self._size = [], 0
        self._transport.abort()
