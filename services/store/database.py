"""The store's database: SQLite, one row per credential, nothing in it in the clear but names.

How it is opened, written and refused is `bus.durable`'s; here is what lies in it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from agent_box.bus import durable
from agent_box.bus.durable import Damaged, Durable
from agent_box.bus.errors import Reason, Refusal
from agent_box.store.core import Birth, Row, Unreadable

APPLICATION_ID: Final = 0x41425354  # "ABST", in the header of the file
SCHEMA_VERSION: Final = 1

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


def create(path: Path, birth: Birth, prepare: Callable[[sqlite3.Connection], object]) -> None:
    """Makes a complete new database at `path`; see `durable.build`.

    Args:
        prepare: makes the tables of others that live in the same file.
    """

    def fill(connection: sqlite3.Connection) -> None:
        prepare(connection)
        connection.execute(
            "INSERT INTO store VALUES (1, ?, ?, ?)",
            (birth.custody.store, birth.fingerprint, birth.book),
        )

    durable.build(
        path, application_id=APPLICATION_ID, version=SCHEMA_VERSION, schema=_SCHEMA, fill=fill
    )


class Database(Durable):
    """An open database.

    Attributes:
        id: of the store that it belongs to.
        fingerprint: of the key that its rows are sealed under.
    """

    def __init__(self, path: Path) -> None:
        """Opens what `create` made.

        Raises:
            Damaged: see `durable.Durable`; or it does not say whose it is.
        """
        super().__init__(path, application_id=APPLICATION_ID, version=SCHEMA_VERSION)
        try:
            row = self.connection.execute(
                "SELECT id, fingerprint FROM store WHERE one = 1"
            ).fetchone()
            if row is None or not all(isinstance(v, bytes) and len(v) == 16 for v in row):
                raise Damaged(f"the database {path} is damaged: it does not say whose it is")
        except sqlite3.Error as error:
            self.close()
            raise durable.damaged(path, error) from None
        except Damaged:
            self.close()
            raise
        self.id: Final[bytes] = row[0]
        self.fingerprint: Final[bytes] = row[1]

    # ------------------------------------------------------------------------- reading

    def book(self) -> bytes:
        """The sealed book, empty when there is none.

        Raises:
            Refusal: it cannot be read. Not the same as none: a new one must not replace it.
        """
        try:
            row = self.connection.execute("SELECT book FROM store WHERE one = 1").fetchone()
        except sqlite3.Error as error:
            raise Refusal(Reason.TAMPERED, str(durable.damaged(self.path, error))) from None
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
            raise Refusal(Reason.TAMPERED, str(durable.damaged(self.path, error))) from None
        for (name,) in names:
            if isinstance(name, str) and (row := self.row(name)) is not None:
                yield row

    # ------------------------------------------------------------------------- writing

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
