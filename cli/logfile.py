"""Reads the log of one service as supervisord writes it: rotated by size, old ones numbered.

``store.log`` is the newest; when it is full it becomes ``store.log.1``, that one
``store.log.2``, and so on. A reader that follows must not lose the end of a file that was
renamed under it, nor a whole file when two renames happened between two looks.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import select
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

LINE_MAX: Final = 64 << 10  # bytes; a longer line is shown in pieces

_IN_MODIFY: Final = 0x2
_IN_MOVED_TO: Final = 0x80
_IN_CREATE: Final = 0x100
_IN_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC


def files(log: Path) -> list[Path]:
    """The log's files that exist, oldest first. One may be renamed while it is looked for."""
    numbered = [
        (int(path.suffix[1:]), path)
        for path in log.parent.glob(f"{glob.escape(log.name)}.*")
        if path.suffix[1:].isdecimal()
    ]
    found = [path for _, path in sorted(numbered, reverse=True)]
    return [*found, log] if log.exists() else found


def last(log: Path, count: int | None) -> list[str]:
    """The last `count` lines over all files, or all lines for None, oldest first.

    Bytes that are not UTF-8 are replaced; line ends are taken off.

    Raises:
        OSError: a file is there and cannot be read.
    """
    lines: deque[str] = deque(maxlen=count)
    for file in _open(log):
        with file:
            while raw := file.readline(LINE_MAX):
                lines.append(_text(raw))
    return list(lines)


class Follower:
    """The lines that are appended from now on, or from the last few on.

    A context manager: it holds the file that it reads and an inotify descriptor on the
    directory.

    Args:
        log: need not exist yet; its directory must.
        tail: how many of the lines that are there already to give first; None for all.

    Raises:
        OSError: the directory cannot be watched, or the log cannot be read.
    """

    def __init__(self, log: Path, tail: int | None) -> None:
        self._log = log
        self._file: BinaryIO | None = None
        self._part = b""
        self._inotify = _watch(log.parent)
        # Watched before the first look, so nothing that is written in between is missed.
        self._first: list[str] = self._open_at_end(tail)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._inotify)
        if self._file is not None:
            self._file.close()

    def lines(self, *, timeout_s: float | None = None) -> Iterator[str]:
        """Each line as soon as it is complete. Ends only when nothing came for `timeout_s`."""
        yield from self._first
        self._first = []
        while True:
            yield from self._new()
            ready, _, _ = select.select([self._inotify], [], [], timeout_s)
            if not ready:
                return
            try:
                os.read(self._inotify, 64 << 10)
            except BlockingIOError:
                continue

    def _open_at_end(self, tail: int | None) -> list[str]:
        lines: deque[str] = deque(maxlen=tail)
        for file in _open(self._log):
            if self._file is not None:
                lines.extend(self._close())
            self._file = file
            lines.extend(self._read())
        return list(lines)

    def _new(self) -> Iterator[str]:
        if self._file is None:
            opened = _open(self._log)
            if not opened:
                return
            self._file, *newer = opened
            for file in newer:
                file.close()
        yield from self._read()
        # Files that took our file's name since: ours was renamed, and is complete once more
        # read, because supervisord closes a file before it renames it.
        while (successor := self._successor()) is not None:
            yield from self._read()
            yield from self._close()
            self._file = successor
            yield from self._read()

    def _successor(self) -> BinaryIO | None:
        """The file that was begun after the one that we read, when ours is not the newest."""
        assert self._file is not None
        ours = _identity(self._file)
        opened = _open(self._log)
        found = [_identity(file) for file in opened]
        # Not found at all: it was rotated out, and the oldest that there is came after it.
        wanted = found.index(ours) + 1 if ours in found else 0
        for number, file in enumerate(opened):
            if number != wanted:
                file.close()
        return opened[wanted] if wanted < len(opened) else None

    def _close(self) -> Iterator[str]:
        """Our file has ended, be it in the middle of a line."""
        assert self._file is not None
        self._file.close()
        if self._part:
            yield _text(self._part)
            self._part = b""

    def _read(self) -> Iterator[str]:
        assert self._file is not None
        while chunk := self._file.read(64 << 10):
            *whole, self._part = (self._part + chunk).split(b"\n")
            yield from map(_text, whole)
            while len(self._part) > LINE_MAX:
                yield _text(self._part[:LINE_MAX])
                self._part = self._part[LINE_MAX:]


def _open(log: Path) -> list[BinaryIO]:
    """The log's files as they stood at one moment, oldest first.

    A name means another file after each rename, and a file only ever moves to an older name:
    when every name still means the file that was opened by it, none was renamed in between.

    Raises:
        OSError: a file is there and cannot be read.
    """
    while True:
        # A file that is not found was renamed meanwhile: look again.
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            paths = files(log)
            opened: list[BinaryIO] = [stack.enter_context(path.open("rb")) for path in paths]
            named = [path.stat() for path in paths]
            if files(log) == paths and all(
                os.path.samestat(status, os.fstat(file.fileno()))
                for status, file in zip(named, opened, strict=True)
            ):
                stack.pop_all()
                return opened


def _identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\r\n").decode("utf-8", "replace")


def _watch(directory: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(_IN_FLAGS)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    path = os.fsencode(directory)
    if libc.inotify_add_watch(descriptor, path, _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE) < 0:
        number = ctypes.get_errno()
        os.close(descriptor)
        raise OSError(number, os.strerror(number), str(directory))
    return descriptor
