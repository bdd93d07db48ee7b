"""What /proc says about processes, for tests that count them."""

from __future__ import annotations

import os
from pathlib import Path


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def cmdline(pid: int) -> list[str]:
    """Its arguments; empty when it is gone, a zombie or a kernel thread."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode(errors="replace") for part in raw.split(b"\0")[:-1]]


def send(pid: int, number: int) -> None:
    """A signal to a process that may have ended meanwhile."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def state(pid: int) -> str:
    """One letter, e.g. S, T or Z; X when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]


def with_word(word: str) -> list[int]:
    """Living processes that have `word` within one of their arguments; not this one."""
    return [
        pid
        for pid in all_pids()
        if pid != os.getpid() and any(word in part for part in cmdline(pid))
    ]


def parent(pid: int) -> int:
    """0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, parents first."""
    children: dict[int, list[int]] = {}
    for each in all_pids():
        children.setdefault(parent(each), []).append(each)
    found, queue = [], [pid]
    while queue:
        for child in children.get(queue.pop(0), []):
            found.append(child)
            queue.append(child)
    return found


def cpu_ticks(pid: int) -> int:
    """User and system time that it has used, in clock ticks."""
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(stat[11]) + int(stat[12])
