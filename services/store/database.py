"""The store's database: SQLite, one row per credential, nothing in it in the clear but names.

WAL with synchronous=FULL: a commit returns after its pages are on the disk, and after a kill
at any point the last whole transaction is what is there. One connection, held for the life
of the process in exclusive mode, so a second store on the same file fails at once.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from agent_box.bus.errors import Reason, Refusal
from agent_box.store.core import Birth, Row, Unreadable
from agent_box.store.files import sync_directory

APPLICATION_ID: Final = 0x41425354  # "ABST", in the header of the file
SCHEMA_VERSION: Final = 1
_BUSY_S: Final = 5.0  # for the locks of a predecessor that is still dying

_SCHEMA: Final = """
CREATE TABLE store (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    id BLOB NOT NULL,
    fingerprint BLOB NOT NULL,
    book BLOB NOT NULL
) STRICT;
CREATE TABLE credential (
    name TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL,
    sealed BLOB NOT NULL
) STRICT;
"""

_NO_SPACE: Final = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE}


class Damaged(Exception):
    """The file is not the database that it was. The message names it and what is wrong."""


def create(path: Path, birth: Birth, prepare: Callable[[sqlite3.Connection], object]) -> None:
    """Makes a complete new database at `path`, synced, with no companions beside it.

    Args:
        prepare: makes the tables of others that live in the same file.

    Raises:
        sqlite3.Error, OSError: it could not be made; leftovers may lie there.
    """
    for leftover in (path, *_companions(path)):
        leftover.unlink(missing_ok=True)
    connection = _connect(path, "rwc")
    try:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        prepare(connection)
        connection.execute(
            "INSERT INTO store VALUES (1, ?, ?, ?)",
            (birth.custody.store, birth.fingerprint, birth.book),
        )
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()
    sync_directory(path.parent)


class Database:
    """An open database.

    Attributes:
        connection: in autocommit mode; `transaction` is the way to change anything.
        id: of the store that it belongs to.
        fingerprint: of the key that its rows are sealed under.
        damage: what SQLite's own check found, or None. Reads go on, writes are refused.
    """

    def __init__(self, path: Path) -> None:
        """Opens what `create` made.

        Raises:
            Damaged: it is missing, not ours, empty, torn, or of another program.
        """
        self.path: Final = path
        _check_file(path)
        try:
            self.connection: Final = _connect(path, "rw")
        except sqlite3.Error as error:
            raise Damaged(_damage(path, error)) from None
        try:
            self._check_version()
            row = self.connection.execute(
                "SELECT id, fingerprint FROM store WHERE one = 1"
            ).fetchone()
            if row is None or not all(isinstance(v, bytes) and len(v) == 16 for v in row):
                raise Damaged(f"the database {path} is damaged: it does not say whose it is")
            self.id: Final[bytes] = row[0]
            self.fingerprint: Final[bytes] = row[1]
            self.damage: Final = self._check_pages()
        except sqlite3.Error as error:
            self.connection.close()
            raise Damaged(_damage(path, error)) from None
        except Damaged:
            self.connection.close()
            raise

    def close(self) -> None:
        self.connection.close()

    # ------------------------------------------------------------------------- reading

    def book(self) -> bytes:
        """The sealed book, empty when there is none.

        Raises:
            Refusal: it cannot be read. Not the same as none: a new one must not replace it.
        """
        try:
            row = self.connection.execute("SELECT book FROM store WHERE one = 1").fetchone()
        except sqlite3.Error as error:
            raise Refusal(Reason.TAMPERED, _damage(self.path, error)) from None
        return row[0] if row is not None and isinstance(row[0], bytes) else b""

    def row(self, name: str) -> Row | Unreadable | None:
        """One credential's row, None when there is none."""
        try:
            row = self.connection.execute(
                "SELECT name, version, updated_ms, sealed FROM credential WHERE name = ?", (name,)
            ).fetchone()
        except sqlite3.DatabaseError:
            return Unreadable(name)
        if row is None:
            return None
        # STRICT holds while nobody rewrites the schema; this file is not to be believed.
        types = (str, int, int, bytes)
        if not all(isinstance(v, t) for v, t in zip(row, types, strict=True)):
            return Unreadable(name)
        return Row(*row)

    def rows(self) -> Iterator[Row | Unreadable]:
        """Every row. One that cannot be read does not hide the others.

        Raises:
            Refusal: not even the names can be read.
        """
        try:
            names = self.connection.execute("SELECT name FROM credential ORDER BY name").fetchall()
        except sqlite3.DatabaseError as error:
            raise Refusal(Reason.TAMPERED, _damage(self.path, error)) from None
        for (name,) in names:
            if isinstance(name, str) and (row := self.row(name)) is not None:
                yield row

    # ------------------------------------------------------------------------- writing

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits what is executed within, wholly and durably, or nothing of it.

        Raises:
            Refusal: the disk is full (`DISK_FULL`), cannot be written, or the file is
                damaged; nothing has changed.
        """
        if self.damage is not None:
            raise Refusal(Reason.TAMPERED, f"nothing is written: {self.damage}")
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield
            self.connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._undo()
            raise self.refusal(error) from error
        except BaseException:
            self._undo()
            raise

    def put(self, row: Row) -> None:
        self.connection.execute(
            "INSERT INTO credential VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
            "version = excluded.version, updated_ms = excluded.updated_ms, "
            "sealed = excluded.sealed",
            row,
        )

    def remove(self, name: str) -> None:
        self.connection.execute("DELETE FROM credential WHERE name = ?", (name,))

    def put_book(self, book: bytes) -> None:
        self.connection.execute("UPDATE store SET book = ? WHERE one = 1", (book,))

    # --------------------------------------------------------------------------- below

    def _undo(self) -> None:
        if self.connection.in_transaction:  # SQLite itself rolls back after some errors
            self.connection.execute("ROLLBACK")

    def refusal(self, error: sqlite3.Error) -> Refusal:
        """What to answer when SQLite could not do it."""
        code = getattr(error, "sqlite_errorcode", 0)
        where = self.path.parent
        if code in _NO_SPACE or (code & 0xFF == sqlite3.SQLITE_IOERR and _is_full(where)):
            return Refusal(Reason.DISK_FULL, f"the disk of {where} is full; nothing has changed")
        if code & 0xFF == sqlite3.SQLITE_IOERR:
            return Refusal(
                Reason.EXHAUSTED, f"the disk of {where} cannot be written; nothing has changed"
            )
        if code & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
            return Refusal(Reason.WRONG_STATE, f"{self.path} is read-only; nothing has changed")
        return Refusal(Reason.TAMPERED, _damage(self.path, error))

    def _check_version(self) -> None:
        version = self.connection.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise Damaged(f"the database {self.path} is of another version of agent-box")

    def _check_pages(self) -> str | None:
        try:
            found = self.connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as error:
            return _damage(self.path, error)
        return None if found == "ok" else f"the database {self.path} is damaged"


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=_BUSY_S, check_same_thread=True
    )
    try:
        for pragma in (
            "trusted_schema = OFF",  # a schema that somebody wrote must not call functions
            "cell_size_check = ON",
            "mmap_size = 0",  # a file that shrinks must be an error, not a SIGBUS
            "temp_store = MEMORY",
            "secure_delete = ON",
            "locking_mode = EXCLUSIVE",
            "journal_mode = WAL",
            "synchronous = FULL",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _check_file(path: Path) -> None:
    """Looks at the file before SQLite does, which would begin to change what is not ours."""
    try:
        facts = os.lstat(path)
        if not stat.S_ISREG(facts.st_mode):
            raise Damaged(f"the database {path} is not a regular file")
        if facts.st_uid != os.geteuid():
            raise Damaged(f"the database {path} belongs to uid {facts.st_uid}")
        with open(path, "rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        raise Damaged(f"the database {path} is missing") from None
    except OSError as error:
        raise Damaged(f"the database {path}: {error.strerror}") from None
    if not header:
        raise Damaged(f"the database {path} was emptied: it has no bytes")
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise Damaged(f"the database {path} is damaged: it is not a SQLite file")
    if int.from_bytes(header[68:72], "big") != APPLICATION_ID:  # sqlite.org/fileformat2.html
        raise Damaged(f"the database {path} was replaced: it is not a credential store")
    if not os.access(path, os.W_OK):
        raise Damaged(f"the database {path} is read-only")


def _companions(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))


def refusal_of(error: OSError, where: Path) -> Refusal:
    """What to answer when the system could not write below `where`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refusal(Reason.DISK_FULL, f"the disk of {where} is full; nothing has changed")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return Refusal(Reason.WRONG_STATE, f"{where} is read-only; nothing has changed")
    return Refusal(
        Reason.EXHAUSTED, f"{where} cannot be written ({error.strerror}); nothing has changed"
    )


def _is_full(path: Path) -> bool:
    with suppress(OSError):
        facts = os.statvfs(path)
        return facts.f_bavail == 0 or facts.f_favail == 0
    return False


def name_of(error: sqlite3.Error) -> str:
    """SQLite's name for it, of a closed set: unlike a message, it cannot hold a value."""
    name: str = getattr(error, "sqlite_errorname", "unknown error")
    return "the disk is full" if name == "SQLITE_FULL" else name


def _damage(path: Path, error: sqlite3.Error) -> str:
    if getattr(error, "sqlite_errorname", "") == "SQLITE_BUSY":
        return f"the database {path} is in use by another process"
    return f"the database {path} is damaged or cannot be read ({name_of(error)})"
