"""SQLite as our services use it: one file, one process, and what was committed stays.

WAL with synchronous=FULL: a commit returns after its pages are on the disk, and after a kill
at any point the last whole transaction is what is there. One connection, held for the life of
the process in exclusive mode, so a second process on the same file is refused at once.

A database file is not believed: its header says whose it is, its schema may call nothing, and
what SQLite finds wrong becomes a `Damaged` or a `Refusal` that names the file.
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

_BUSY_S: Final = 5.0  # for the locks of a predecessor that is still dying
_NO_SPACE: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)


class Damaged(Exception):
    """The file is not the database that it was. The message names it and what is wrong."""


class InUse(Damaged):
    """Another process holds it."""


class Durable:
    """An open database.

    Attributes:
        connection: in autocommit mode; `transaction` is the way to change anything.
        damage: what SQLite's own check found, or None. Reads go on, writes are refused.
    """

    def __init__(self, path: Path, *, application_id: int, version: int) -> None:
        """Opens what `create` made.

        Raises:
            Damaged: it is missing, not ours, empty, torn, of another program or version.
            InUse: another process holds it, even after some seconds.
        """
        self.path: Final = path
        _check_file(path, application_id)
        try:
            self.connection: Final = _connect(path, "rw")
        except sqlite3.Error as error:
            raise damaged(path, error) from None
        try:
            found = self.connection.execute("PRAGMA user_version").fetchone()[0]
            if found != version:
                raise Damaged(f"the database {path} is of another version of agent-box")
            self.damage: Final = self._check_pages()
        except sqlite3.Error as error:
            self.connection.close()
            raise damaged(path, error) from None
        except Damaged:
            self.connection.close()
            raise

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits what is executed within, wholly and durably, or nothing of it.

        Raises:
            Refusal: the disk is full (`DISK_FULL`), cannot be written (`EXHAUSTED`), or the file is
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

    def refusal(self, error: sqlite3.Error) -> Refusal:
        """What to answer when SQLite could not do it."""
        return refusal(self.path, error)

    def _undo(self) -> None:
        if self.connection.in_transaction:  # SQLite itself rolls back after some errors
            self.connection.execute("ROLLBACK")

    def _check_pages(self) -> str | None:
        try:
            found = self.connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as error:
            return str(damaged(self.path, error))
        return None if found == "ok" else f"the database {self.path} is damaged"


def create(
    path: Path,
    *,
    application_id: int,
    version: int,
    schema: str,
    fill: Callable[[sqlite3.Connection], object],
    page_bytes: int = 4096,
) -> None:
    """Makes a new database and gives it its name when it is complete.

    Args, Raises: as `build`; besides, OSError when something lies at `path`.
    """
    new = path.with_name(path.name + ".new")
    for leftover in _companions(path):  # of a database that is gone; SQLite would play it back
        leftover.unlink(missing_ok=True)
    build(
        new,
        application_id=application_id,
        version=version,
        schema=schema,
        fill=fill,
        page_bytes=page_bytes,
    )
    os.link(new, path)  # and not a rename, which would take the place of another's
    new.unlink()
    _sync(path.parent)


def build(
    path: Path,
    *,
    application_id: int,
    version: int,
    schema: str,
    fill: Callable[[sqlite3.Connection], object],
    page_bytes: int = 4096,
) -> None:
    """Makes a complete new database at `path`, synced, with no companions beside it.

    Whatever lies there is removed first.

    Args:
        schema: SQL statements.
        fill: makes what else belongs into it, such as tables of others; each change of its
            own in a transaction, or none.
        page_bytes: of a page, and so the least that a commit writes.

    Raises:
        sqlite3.Error, OSError: it could not be made; leftovers may lie there.
    """
    for leftover in (path, *_companions(path)):
        leftover.unlink(missing_ok=True)
    connection = _connect(path, "rwc", page_bytes)
    try:
        connection.execute(f"PRAGMA application_id = {application_id}")
        connection.execute(f"PRAGMA user_version = {version}")
        connection.executescript(f"BEGIN IMMEDIATE; {schema} COMMIT;")
        fill(connection)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        connection.close()
    _sync(path.parent)


def refusal(path: Path, error: sqlite3.Error | OSError) -> Refusal:
    """What to answer when the database at `path` could not be written."""
    where = path.parent
    if isinstance(error, OSError):
        return os_refusal(where, error)
    code = getattr(error, "sqlite_errorcode", 0)
    if code in _NO_SPACE or (code & 0xFF == sqlite3.SQLITE_IOERR and _is_full(where)):
        return Refusal(Reason.DISK_FULL, f"the disk of {where} is full; nothing has changed")
    if code & 0xFF == sqlite3.SQLITE_IOERR:
        return Refusal(
            Reason.EXHAUSTED, f"the disk of {where} cannot be written; nothing has changed"
        )
    if code & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
        return Refusal(Reason.EXHAUSTED, f"{path} is read-only; nothing has changed")
    return Refusal(Reason.TAMPERED, str(damaged(path, error)))


def os_refusal(where: Path, error: OSError) -> Refusal:
    """What to answer when the system could not write below `where`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refusal(Reason.DISK_FULL, f"the disk of {where} is full; nothing has changed")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return Refusal(Reason.EXHAUSTED, f"{where} is read-only; nothing has changed")
    return Refusal(
        Reason.EXHAUSTED, f"{where} cannot be written ({error.strerror}); nothing has changed"
    )


def damaged(path: Path, error: sqlite3.Error) -> Damaged:
    """What an error of SQLite means for the database at `path`, in one line."""
    if getattr(error, "sqlite_errorname", "") == "SQLITE_BUSY":
        return InUse(f"the database {path} is in use by another process")
    return Damaged(f"the database {path} is damaged or cannot be read ({name_of(error)})")


def name_of(error: sqlite3.Error) -> str:
    """SQLite's name for it, of a closed set: unlike a message, it cannot hold a value."""
    name: str = getattr(error, "sqlite_errorname", "unknown error")
    return "the disk is full" if name == "SQLITE_FULL" else name


def _connect(path: Path, mode: str, page_bytes: int | None = None) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=_BUSY_S, check_same_thread=True
    )
    try:
        for pragma in (
            *([] if page_bytes is None else [f"page_size = {page_bytes}"]),  # of a new file
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


def _check_file(path: Path, application_id: int) -> None:
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
    if int.from_bytes(header[68:72], "big") != application_id:  # sqlite.org/fileformat2.html
        raise Damaged(f"the database {path} was replaced by one of another program")
    if not os.access(path, os.W_OK):
        raise Damaged(f"the database {path} is read-only")


def _sync(directory: Path) -> None:
    """Makes the names in a directory durable."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _companions(path: Path) -> tuple[Path, ...]:
    return tuple(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))


def _is_full(path: Path) -> bool:
    with suppress(OSError):
        facts = os.statvfs(path)
        return facts.f_bavail == 0 or facts.f_favail == 0
    return False
