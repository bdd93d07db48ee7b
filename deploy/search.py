"""Looks for secrets in files and in the memory of processes. For `demo.py`."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

PIECE: Final = 16 << 20  # bytes that are looked into at once


def forms(secret: bytes) -> list[bytes]:
    """As it is, and in base64 wherever in a text it begins."""
    return [secret, *(base64.b64encode(bytes(n) + secret)[4:-4] for n in range(3))]


def holds(pieces: Iterator[bytes], forms: Iterable[bytes]) -> bytes | None:
    """The first of the forms that is there."""
    overlap = max(map(len, forms))
    tail = b""
    for piece in pieces:
        whole = tail + piece
        for form in forms:
            if form in whole:
                return form
        tail = whole[-overlap:]
    return None


def written(file: Path) -> Iterator[bytes]:
    """The file without its holes: a disk is mostly one."""
    with file.open("rb", buffering=0) as opened:
        at, end = 0, os.fstat(opened.fileno()).st_size
        while at < end:
            try:
                at = os.lseek(opened.fileno(), at, os.SEEK_DATA)
            except OSError:
                return  # nothing more was written
            piece = opened.read(PIECE)
            at += len(piece)
            if not piece:
                return
            yield piece


def memory(pid: int) -> Iterator[bytes]:
    """All that the process can write; its account may read it."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, mode, *_ = line.split()
            if not mode.startswith("rw"):
                continue
            at, end = (int(each, 16) for each in span.split("-"))
            while at < end:
                try:
                    memory.seek(at)
                    piece = memory.read(min(PIECE, end - at))
                except OSError:
                    break  # a device's
                if not piece:
                    break
                at += len(piece)
                yield piece
