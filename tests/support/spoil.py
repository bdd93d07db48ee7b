"""A database that somebody wrote to while its service did not run, and a disk that is full."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path


def spoil(path: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute(statement, values)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def fill(directory: Path, *, leave: int) -> Path:
    """A file that takes all of the file system of that directory but so many bytes."""
    path = directory / "filler"
    free = os.statvfs(directory)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - leave)
    return path
