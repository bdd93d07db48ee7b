"""One daemon for one state directory: `flock`, held for life.

The kernel releases the lock whatever way the holder dies, so a stale file never stops a
start. The holder writes who it is into the locked file; that is believed only while the lock
is held. Asking who holds it takes no lock, so that asking cannot make a starting daemon fail.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CONTENT_MAX: Final = 8192


@dataclass(frozen=True)
class Holder:
    """Who holds the lock.

    Attributes:
        pid: of the holder; 0 when the kernel does not show it in our PID namespace.
        config: path of the config file that it was started with; None when it has none or
            has not written it yet.
        version: of its program; None when it has not written it yet.
        state: path of its state directory; None when it did not write one.
    """

    pid: int
    config: str | None
    version: str | None
    state: str | None = None


class Held(Exception):
    """Another process holds the lock.

    Attributes:
        holder: who; None when it let go in the meantime.
    """

    def __init__(self, path: Path, holder: Holder | None) -> None:
        who = f"pid {holder.pid}" if holder is not None and holder.pid else "another process"
        more = ""
        if holder is not None and holder.state:
            more += f", state directory {holder.state}"
        if holder is not None and holder.config:
            more += f", config {holder.config}"
        super().__init__(f"{path} is held by {who}{more}")
        self.holder = holder


class Lock:
    """A lock that is held. Keep it for as long as the process lives."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def fileno(self) -> int:
        """The locked descriptor; a child that inherits it keeps the lock held."""
        return self._descriptor

    def release(self) -> None:
        """Lets go. The file stays: removing it could let two hold "the" lock."""
        os.close(self._descriptor)


def acquire(path: Path, *, config: Path | None, version: str, state: Path | None = None) -> Lock:
    """Takes the lock or says who has it.

    Args:
        path: made with mode 0600 when it is missing; its directory must exist.
        config: the config file that this process uses.
        version: of this program.
        state: the state directory that this process uses.

    Raises:
        Held: another process has it.
        OSError: the file cannot be opened or written (read-only, full, a symbolic link).
    """
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Held(path, holder(path)) from None
            if not _is_the_file_at(path, descriptor):
                os.close(descriptor)  # somebody removed it between open and flock: once more
                continue
            who = {
                "pid": os.getpid(),
                "config": None if config is None else str(config),
                "version": version,
                "state": None if state is None else str(state),
            }
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(who).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return Lock(path, descriptor)


def holder(path: Path) -> Holder | None:
    """Who holds the lock now, or None when nobody does. Takes no lock and changes nothing.

    Source: proc_locks(5) for the fact and the pid; the file itself for the rest.

    Raises:
        OSError: /proc/locks or the file cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        pid = _flock_pid(found)
        if pid is None:
            return None
        untrusted_content = os.pread(descriptor, _CONTENT_MAX, 0)
        if _flock_pid(found) != pid:
            return holder(path)  # it changed hands while we read
    finally:
        os.close(descriptor)
    return _believe(pid, untrusted_content)


def _believe(pid: int, untrusted_content: bytes) -> Holder:
    try:
        untrusted_who = json.loads(untrusted_content)
    except ValueError:
        return Holder(pid, None, None)  # taken a moment ago, not written yet
    if not isinstance(untrusted_who, dict):
        return Holder(pid, None, None)
    written, config, version, state = (
        untrusted_who.get(key) for key in ("pid", "config", "version", "state")
    )
    if pid and written != pid:
        return Holder(pid, None, None)  # what the last holder wrote
    return Holder(
        written if isinstance(written, int) else 0,
        config if isinstance(config, str) else None,
        version if isinstance(version, str) else None,
        state if isinstance(state, str) else None,
    )


def _flock_pid(found: os.stat_result) -> int | None:
    """The pid in /proc/locks for a flock on this inode; None when there is none."""
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    with open("/proc/locks", encoding="ascii") as locks:
        lines = [line.split() for line in locks]
    same_inode = []
    for fields in lines:
        if len(fields) < 6 or fields[1] != "FLOCK":  # waiters have "->" there
            continue
        where, _, inode = fields[5].rpartition(":")
        if inode != str(found.st_ino):
            continue
        if where == device:
            return int(fields[4])
        same_inode.append(int(fields[4]))
    # The kernel prints the superblock's device, which on btrfs and overlayfs is not st_dev.
    if len(same_inode) == 1 and os.major(found.st_dev) == 0:
        return same_inode[0]
    return None


def _is_the_file_at(path: Path, descriptor: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
