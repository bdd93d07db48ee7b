"""The updates of a run, in a file beside its spool: read by number, held by nobody in memory.

It is made anew from the spool whenever a run is brought back, so nothing in it is believed.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Final

import msgspec

from agent_box.channel.contract import Update

BATCH_MAX: Final = 512 << 10  # bytes of one answer, beyond its first update


class Updates:
    """Args:
    path: of the file; what lay there is emptied.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._starts = array("Q", [0])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def add(self, update: Update) -> None:
        """Raises:
        OSError: the disk is full.
        """
        data = msgspec.msgpack.encode((update.at_ms, update.kind, update.body))
        at, done = self._starts[-1], 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], at + done)
        self._starts.append(at + len(data))

    def read(self, cursor: int, limit: int) -> list[Update]:
        """Up to `limit` updates from number `cursor` on, fewer when they are large.

        Raises:
            OSError: they cannot be read.
        """
        found: list[Update] = []
        size = 0
        for number in range(cursor, min(cursor + limit, len(self))):
            start, end = self._starts[number], self._starts[number + 1]
            size += end - start
            if found and size > BATCH_MAX:
                break
            data = os.pread(self._fd, end - start, start)
            at_ms, kind, body = msgspec.msgpack.decode(data, type=tuple[int, str, str])
            found.append(Update(at_ms=at_ms, kind=kind, body=body))
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._path.unlink(missing_ok=True)
