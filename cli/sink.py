"""Where output goes: a descriptor that is written to and never waited for.

Whoever writes to a pipe or a terminal that nobody reads is stuck in the kernel and hears
nothing. The flag that prevents it belongs to the open file, which others share with us (the
shell, the other end of `2>&1`), so it is set on an opening of our own.
"""

from __future__ import annotations

import os
import socket
import stat
from typing import Final

LIMIT: Final = 1 << 18  # bytes; with more that waits there is no `room`
PIECE: Final = 1 << 16
ATOMIC: Final = 1 << 12  # PIPE_BUF: what a pipe that is ready takes without blocking


class Sink:
    """One descriptor of ours.

    Attributes:
        number: of the descriptor; wait for writing on `descriptor`.
        written: bytes that it has taken.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.written = 0
        self._waiting = bytearray()
        self._piece = PIECE
        self._socket: socket.socket | None = None
        self._own = -1
        mode = os.fstat(number).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(number))
        elif stat.S_ISFIFO(mode) or os.isatty(number):
            try:
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._own = os.open(f"/proc/self/fd/{number}", flags)
            except OSError:  # somebody else's terminal, or a pipe without a reader
                self._piece = ATOMIC
        self.descriptor = self._own if self._own >= 0 else number

    @property
    def room(self) -> bool:
        return len(self._waiting) < LIMIT

    @property
    def waits(self) -> bool:
        """Whether something is left to be written."""
        return bool(self._waiting)

    def put(self, data: bytes) -> None:
        """Takes what shall be written, and writes what can be.

        Raises:
            OSError: as `write`.
        """
        if self._waiting:
            self._waiting += data
            return
        done = self._write(data) if data and self._piece == PIECE else 0
        if done < len(data):
            self._waiting += memoryview(data)[done:]

    def write(self) -> None:
        """Writes what the descriptor, which is ready, takes now.

        Raises:
            OSError: EPIPE, nobody reads any more; ENOSPC and others.
        """
        done = self._write(bytes(self._waiting[: self._piece]))
        del self._waiting[:done]

    def drop(self) -> bool:
        """Forgets what waits. Whether there was something."""
        waited = bool(self._waiting)
        self._waiting.clear()
        return waited

    def close(self) -> None:
        if self._own >= 0:
            os.close(self._own)
            self._own = -1
        if self._socket is not None:
            self._socket.close()

    def _write(self, data: bytes) -> int:
        try:
            if self._socket is not None:
                done = self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            else:
                done = os.write(self.descriptor, data)
        except BlockingIOError:
            return 0
        self.written += done
        return done
