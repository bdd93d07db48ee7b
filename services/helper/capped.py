"""A log of limited size, written by a shim and read by the helper, also after the shim's end.

The first bytes are kept for good, since a start that failed is told there, and the last ones.
It is a row of files, NAME.0, NAME.1 and so on, each but the first of the same size; when one is
begun, the last but one is removed, and never the first. So the position of each byte follows
from the file's number, and nothing else needs to be written down.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple


class Shape(NamedTuple):
    """Sizes in bytes: of the first file, and of each of the up to two others."""

    name: str
    first: int
    next: int

    def begins(self, number: int) -> int:
        return 0 if number == 0 else self.first + (number - 1) * self.next

    def size(self, number: int) -> int:
        return self.next if number else self.first

    def parse(self, name: str) -> int | None:
        match = re.fullmatch(rf"{re.escape(self.name)}\.(0|[1-9][0-9]{{0,15}})", name, re.ASCII)
        return int(match[1]) if match else None


CONSOLE = Shape("console", 64 << 10, 128 << 10)
MESSAGES = Shape("messages", 16 << 10, 16 << 10)  # what the programs say on standard error


class Writer:
    """The log in an open directory. What cannot be written is counted and let go: a full disk
    must not stop a machine.

    Args:
        anew: what is there is removed; otherwise it is continued.
    """

    def __init__(self, directory: int, shape: Shape, *, anew: bool = True) -> None:
        self._directory = directory
        self._shape = shape
        self._number = 0
        self._used = 0
        self._file: int | None = None
        self.lost = 0
        for number in _numbers(directory, shape):
            if anew:
                self._remove(number)
            else:
                self._number = number
                self._used = min(_size(directory, shape, number) or 0, shape.size(number))

    def write(self, data: bytes) -> None:
        while data:
            room = self._shape.size(self._number) - self._used
            if room == 0:
                self._next()
                continue
            self._put(data[:room])
            self._used += len(data[:room])
            data = data[room:]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _put(self, data: bytes) -> None:
        try:
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                name = f"{self._shape.name}.{self._number}"
                self._file = os.open(name, flags, 0o600, dir_fd=self._directory)
            os.pwrite(self._file, data, self._used)  # a hole where something was let go
        except OSError:
            self.lost += len(data)

    def _next(self) -> None:
        self.close()
        self._number += 1
        self._used = 0
        if self._number > 2:
            self._remove(self._number - 2)

    def _remove(self, number: int) -> None:
        try:
            os.unlink(f"{self._shape.name}.{number}", dir_fd=self._directory)
        except OSError:
            pass  # gone with its directory, or the disk cannot be written: it is only a log


def read(directory: int, shape: Shape, offset: int, most: int) -> tuple[int, int, bytes]:
    """Bytes from an offset on.

    Args:
        most: how many at most; 0 for none.

    Returns:
        The offset of the first one, later than asked for when what was there is no longer
        kept; the end of all; and the bytes, which may stop short of the end.
    """
    numbers = _numbers(directory, shape)
    end = 0
    parts: list[tuple[int, int]] = []
    for number in numbers:
        size = _size(directory, shape, number)
        if size is None:
            continue
        parts.append((number, size))
        end = max(end, shape.begins(number) + size)
    for number, size in parts:
        begins = shape.begins(number)
        if begins + size <= offset:
            continue
        start = max(offset, begins)
        data = _read(directory, shape, number, start - begins, most)
        if data or most == 0:
            return start, end, data
    return end, end, b""


def _numbers(directory: int, shape: Shape) -> list[int]:
    found = (shape.parse(name) for name in os.listdir(directory))
    return sorted(number for number in found if number is not None)


def _size(directory: int, shape: Shape, number: int) -> int | None:
    try:
        name = f"{shape.name}.{number}"
        found = os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None  # removed meanwhile
    return min(found, shape.size(number))


def _read(directory: int, shape: Shape, number: int, at: int, most: int) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(f"{shape.name}.{number}", flags, dir_fd=directory)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(fd, min(most, shape.size(number) - at), at)
    finally:
        os.close(fd)
