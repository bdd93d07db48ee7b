"""What somebody does to a database who can write the file while its service does not run."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def spoil(path: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute(statement, values)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
