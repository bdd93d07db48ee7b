"""One connection, as bytes: what came and was not read yet, and what is to go.

An asyncio protocol of our own instead of its streams: a piece that comes is copied once, or
not at all when it goes straight on (`relay`), and waiting for one costs a future.

What is written in one turn of the loop leaves in one piece: a head, the body that is there
already and the end of it are several events of HTTP, and sent one by one each would be a
system call, a TLS record and a wake-up of the other side. Nothing waits for more than the end
of the turn, and nothing overtakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

WHOLE: Final = 1 << 16  # bytes; a larger piece goes out at once
# Into which all connections receive: between a receive and the call that takes what came,
# nothing else of the process runs. A room of its own for each would cost its size in memory.
_ROOM: Final = memoryview(bytearray(1 << 18))


class Line(asyncio.BufferedProtocol):
    """Made by a server or a connect of the running loop; read by one at a time.

    Args:
        limit: bytes that wait to be read before the sender is held back.
        high: bytes that wait for the other side before `drain` does.
        made: is told when the connection stands.

    Attributes:
        ended: is called once when no more bytes come, whether or not anybody reads.
    """

    def __init__(self, limit: int, high: int, made: Callable[[Line], None] | None = None) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._limit: Final = limit
        self._high: Final = high
        self._made: Final = made
        self._transport: asyncio.Transport | None = None
        self._came: list[bytes] = []  # and was not read
        self._size = 0  # of that
        self._held_back = False  # the sender
        self._over = False  # nothing more comes
        self._error: Exception | None = None  # by which it ended, and not in order
        self._reading: asyncio.Future[None] | None = None
        self._until: float | None = None  # it waits
        self._alarm: asyncio.TimerHandle | None = None  # not later than that
        self._sink: Callable[[memoryview], bool] | None = None
        self._parts: list[bytes] = []  # to go
        self._parts_size = 0
        self._full = False  # the other side is behind
        self._draining: list[asyncio.Future[None]] = []
        self.ended: Callable[[], None] | None = None

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    # ------------------------------------------------------------------ told by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._high)
        if self._made is not None:
            self._made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _ROOM

    def buffer_updated(self, nbytes: int) -> None:
        if self._sink is not None:
            if not self._sink(_ROOM[:nbytes]):
                self._sink = None
                self._wake()
            return
        self._came.append(bytes(_ROOM[:nbytes]))
        self._size += nbytes
        if self._size >= self._limit:
            self._hold_back()
        self._wake()

    def eof_received(self) -> bool:
        self._end()
        return self.transport.get_extra_info("sslcontext") is None  # still to be written to

    def connection_lost(self, exc: Exception | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if exc is not None:
            self._error = exc
        self._end()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        for waiting in self._draining:
            if not waiting.done():
                waiting.set_result(None)

    # ------------------------------------------------------------------ reading

    @property
    def over(self) -> bool:
        """Whether no more bytes come."""
        return self._over

    @property
    def quiet(self) -> bool:
        """It is open, and nothing came that was not read, as far as can be seen."""
        return not (self._came or self._over or self.transport.is_closing())

    async def read(self, until: float | None) -> bytes:
        """All that came and was not read; empty at the end.

        Args:
            until: of the loop's clock; None: for ever.

        Raises:
            OSError: the connection was lost, or aborted.
            TimeoutError: nothing came until then.
        """
        while not self._came:
            if self._over:
                if self._error is not None:
                    raise ConnectionResetError("the connection is lost") from self._error
                return b""
            await self._something(until)
        came, self._came, self._size = self._came, [], 0
        if self._held_back:
            self._held_back = False
            if not self.transport.is_closing():
                self.transport.resume_reading()
        return came[0] if len(came) == 1 else b"".join(came)

    async def relay(self, sink: Callable[[memoryview], bool], until: float) -> None:
        """Gives `sink` what comes, at once and uncopied, until it wants no more. What it is
        given is its own no longer than until it returns.

        Raises:
            OSError: the connection ended before.
            TimeoutError: it wants more then.
        """
        if self._came and not sink(memoryview(await self.read(until))):
            return
        if self._over:
            raise ConnectionResetError("the connection ended")
        self._sink = sink
        try:
            await self._something(until)
        finally:
            unfinished, self._sink = self._sink is not None, None
        if unfinished:
            raise ConnectionResetError("the connection ended")

    async def _something(self, until: float | None) -> None:
        assert self._reading is None
        reading = self._reading = self._loop.create_future()
        self._until = until
        if until is not None and (self._alarm is None or self._alarm.when() > until):
            self._set_alarm(until)
        try:
            await reading
        finally:
            self._reading = self._until = None

    def _set_alarm(self, at: float) -> None:
        """The alarm of an earlier wait is left alone when it rings before this one's: it costs
        less to set it anew then than a timer for each wait, of which hardly one ever rings."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(at, self._rang, at)

    def _rang(self, at: float) -> None:
        self._alarm = None
        if self._reading is None or self._until is None:
            return
        if self._until > at:
            self._set_alarm(self._until)
        else:
            _late(self._reading)

    def _wake(self) -> None:
        reading = self._reading
        if reading is not None and not reading.done():
            reading.set_result(None)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            if self.ended is not None:
                self.ended()
        self._wake()

    def _hold_back(self) -> None:
        if not self._held_back and not self.transport.is_closing():
            self._held_back = True
            self.transport.pause_reading()

    # ------------------------------------------------------------------ writing

    def write(self, data: bytes) -> None:
        """In order, by the end of the loop's turn."""
        if not self._parts and len(data) < WHOLE:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._parts_size += len(data)
        if self._parts_size >= WHOLE:
            self.flush()

    def write_now(self, data: bytes | memoryview) -> None:
        """At once. `data` is not kept: from Python 3.12 on a transport keeps what does not
        leave, not a copy of it, so it gets one."""
        self.flush()
        transport = self.transport
        if not transport.is_closing():
            transport.write(bytes(data))

    @property
    def behind(self) -> bool:
        """Whether `drain` would wait, or fail."""
        return self._full or self.transport.is_closing()

    def flush(self) -> None:
        """At once."""
        parts = self._parts
        if parts:
            self._parts, self._parts_size = [], 0
            if not self.transport.is_closing():
                self.transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    async def drain(self, seconds: float) -> None:
        """Waits until the reader is no further behind than it may be.

        Raises:
            OSError: the connection is lost.
            TimeoutError: it stayed behind for so long.
        """
        if self.transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        if not self._full:
            return
        waiting = self._loop.create_future()
        self._draining.append(waiting)
        timer = self._loop.call_later(seconds, _late, waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            self._draining.remove(waiting)
        if self.transport.is_closing():
            raise ConnectionResetError("the connection is lost")

    async def finish(self, seconds: float) -> None:
        """Gives the reader all that was written, and then the end.

        Raises:
            OSError, TimeoutError: as `drain`, of everything.
        """
        self.flush()
        self.transport.set_write_buffer_limits(high=0)
        await self.drain(seconds)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def abort(self) -> None:
        """Ends the connection at once; what was not sent is lost."""
        self._parts, self._parts_size = [], 0
        if self._error is None:
            self._error = ConnectionAbortedError()  # or it would look like an end in order
        self.transport.abort()


def _late(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_exception(TimeoutError())
