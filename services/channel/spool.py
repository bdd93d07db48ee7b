"""What is kept of a run: everything that happened to it, in order, in one file of its own.

A record is a kind (u8), when it was (u64, Unix ms), a length (u32) and that many bytes, all
little-endian. The first is the run itself, as JSON; the rest is what went into the driver. A
record that a kill cut off is dropped. What the driver made of it is never kept: feeding it the
records again makes it anew, the same bytes for the agent too.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

BYTES_MAX: Final = 64 << 20  # of a run's output
_HEAD: Final = struct.Struct("<BQI")
_READ: Final = 1 << 20


class Kind(IntEnum):
    """What a record is."""

    RUN = 1  # JSON, the first
    OUTPUT = 2  # bytes of the agent
    CANCEL = 3  # the reason, text
    GIVE_UP = 4
    EXITED = 5  # JSON
    LEFT = 6
    LOST = 7  # why, text
    FLOOD = 8


class Record(NamedTuple):
    kind: Kind
    at_ms: int
    data: bytes


class SpoolError(Exception):
    """The file is none of ours. One line."""


class Spool:
    """The file of one run, open for more.

    Attributes:
        output: bytes of the agent that are in it.
    """

    def __init__(self, path: Path, descriptor: int, size: int, output: int) -> None:
        self.path = path
        self._fd = descriptor
        self._size = size
        self.output = output

    @classmethod
    def create(cls, path: Path, run: bytes, at_ms: int) -> Spool:
        """A new one, with its first record.

        Raises:
            OSError: it exists, or the disk is full.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        made = cls(path, os.open(path, flags, 0o600), 0, 0)
        try:
            made.add(Kind.RUN, run, at_ms)
        except BaseException:
            made.close()
            path.unlink()
            raise
        return made

    @classmethod
    def open(cls, path: Path) -> tuple[Spool, list[Record]]:
        """One that was left, with all of its records; what was cut off is cut away.

        Raises:
            OSError: it cannot be read or written.
            SpoolError: it does not begin with a run.
        """
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        try:
            records, size = [], 0
            for record in _records(descriptor):
                records.append(record)
                size += _HEAD.size + len(record.data)
            if not records or records[0].kind is not Kind.RUN:
                raise SpoolError(f"{path.name} does not begin with a run")
            os.ftruncate(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        output = sum(len(r.data) for r in records if r.kind is Kind.OUTPUT)
        return cls(path, descriptor, size, output), records

    def add(self, kind: Kind, data: bytes, at_ms: int) -> None:
        """Writes a record; it is in the file, whoever is killed, when this returns.

        Raises:
            OSError: the disk is full; the file is as before.
        """
        record = _HEAD.pack(kind, at_ms, len(data)) + data
        done = 0
        try:
            while done < len(record):
                done += os.pwrite(self._fd, record[done:], self._size + done)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(record)
        if kind is Kind.OUTPUT:
            self.output += len(data)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _records(descriptor: int) -> Iterator[Record]:
    """The whole records from the start of a file."""
    with open(os.dup(descriptor), "rb", _READ) as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            kind, at_ms, length = _HEAD.unpack(head)
            if kind not in list(Kind) or length > BYTES_MAX:
                return
            data = file.read(length)
            if len(data) != length:
                return
            yield Record(Kind(kind), at_ms, data)
