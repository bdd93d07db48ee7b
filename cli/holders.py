"""Which process listens on a port of this host, as far as this account may see (proc(5))."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_LISTENS: Final = "0A"


def holder(port: int, proc: Path = Path("/proc")) -> str | None:
    """One line such as ``pid 812 (python3)``; None when nobody is seen to listen there."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue  # this kernel has no IPv6
        for fields in map(str.split, lines):
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for entry in proc.iterdir():
        if entry.name.isdigit() and _has(entry, inodes):
            try:
                return f"pid {entry.name} ({(entry / 'comm').read_text().strip()})"
            except OSError:
                continue  # it ended meanwhile
    return "a process of another account"


def _has(entry: Path, inodes: set[str]) -> bool:
    try:
        fds = list((entry / "fd").iterdir())
    except OSError:
        return False  # not ours, or gone
    for fd in fds:
        try:
            if os.readlink(fd) in inodes:
                return True
        except OSError:
            continue  # closed meanwhile
    return False
