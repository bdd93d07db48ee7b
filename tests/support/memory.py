"""What is in the memory of other processes, as their owner may read it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from support.canary import Canary, Found

CHUNK = 8 << 20
PAGE = 4096
_OURS = ("/memfd:", "/dev/shm/", "[heap]", "[stack", "[anon")


def search(canary: Canary, pid: int) -> list[Found]:
    """Every form in all that the process could write or was given: its own memory and what it
    shares, but not the read-only parts of files.

    Raises:
        PermissionError: this process's memory may not be read.
    """
    found = set()
    for start, end, name in regions(pid):
        for chunk in chunks(pid, start, end, overlap=canary.longest):
            found |= {Found(f"memory of {pid}, {name}", form) for form in canary.within(chunk)}
    return sorted(found)


def regions(pid: int) -> Iterator[tuple[int, int, str]]:
    """Empty when it has ended."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return
    for line in maps.splitlines():
        span, mode, _, _, _, *rest = line.split(maxsplit=5)
        name = rest[0] if rest else "anonymous"
        if not mode.startswith("r") or name in ("[vvar]", "[vsyscall]", "[vvar_vclock]"):
            continue
        if "w" in mode or name == "anonymous" or name.startswith(_OURS):
            start, end = (int(each, 16) for each in span.split("-"))
            yield start, end, name


def chunks(pid: int, start: int, end: int, *, overlap: int) -> Iterator[bytes]:
    """What can be read from `start` to `end`, zeros left out; each begins with the end of the
    one before, so that nothing is cut in two."""
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except (FileNotFoundError, ProcessLookupError):
        return
    zeros = bytes(CHUNK)
    tail = b""
    at = start
    try:
        while at < end:
            wanted = min(CHUNK, end - at)
            try:
                piece = os.pread(memory, wanted, at)
            except OSError:
                piece = b""
            if not piece:  # a hole, or a page of a device
                at, tail = at + PAGE, b""
                continue
            at += len(piece)
            if piece != zeros[: len(piece)]:
                yield tail + piece
            tail = piece[-overlap:]
    finally:
        os.close(memory)
