"""The registry's database: records and journal, in one file and in one transaction.

Whatever changes a record appends the event that says so, together or not at all. The event
carries the hash of the record, so a row that somebody else wrote is noticed at the next start
and by `logs --verify`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent_box.bus import durable
from agent_box.bus.durable import Damaged, Durable
from agent_box.bus.outcomes import SqliteOutcomes
from agent_box.registry import journal
from agent_box.registry import record as kept
from agent_box.registry.core import Found
from agent_box.registry.journal import BadEvent, Entry, Mark, New, Stored
from agent_box.registry.record import Record

APPLICATION_ID: Final = 0x41425247  # "ABRG", in the header of the file
SCHEMA_VERSION: Final = 1

KEEP_BYTES: Final = 64 << 20  # of canonical texts; then the oldest go
KEEP_MS: Final = 180 * 24 * 3600 * 1000
KEEP_EVENTS: Final = 1_000  # the youngest, however old or large
PAGE_BYTES: Final = 512 << 10  # of canonical texts in one reply: half of what a message holds
PAGE_EVENTS: Final = 1_000

_SCHEMA: Final = """
CREATE TABLE record (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    packed BLOB NOT NULL,
    seq INTEGER NOT NULL
) STRICT;
CREATE TABLE event (
    seq INTEGER PRIMARY KEY,
    time_ms INTEGER NOT NULL,
    instance TEXT,
    name TEXT,
    source TEXT NOT NULL,
    body BLOB NOT NULL,
    hash BLOB NOT NULL
) STRICT;
CREATE INDEX event_name ON event (name, seq);
CREATE TABLE noted (
    caller TEXT NOT NULL,
    event_id BLOB NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (caller, event_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX noted_seq ON noted (seq);
CREATE TABLE chain (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    before_seq INTEGER NOT NULL,
    before_hash BLOB NOT NULL,
    seq INTEGER NOT NULL,
    hash BLOB NOT NULL,
    time_ms INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) STRICT;
"""


@dataclass(frozen=True, kw_only=True)
class Query:
    """Which events are wanted; see `contract.Read`."""

    after: int
    since_ms: int | None
    source: str | None
    name: str | None


@dataclass(frozen=True)
class Page:
    """`next` is the seq up to which everything has been looked at."""

    entries: list[Entry]
    next: int


class Database:
    """Records and journal. Every method that writes is one transaction.

    Attributes:
        outcomes: of `Kind.ONCE` calls, in the same file.
        before: what the oldest event that is kept follows.
        head: the last event.
        head_ms: its time.
        bytes: of all canonical texts that are kept.
    """

    def __init__(self, path: Path) -> None:
        """Opens the database, and makes it when there is none.

        Raises:
            Damaged: see `durable.Durable`.
            sqlite3.Error, OSError: it cannot be made.
        """
        if not path.exists():
            durable.create(
                path,
                application_id=APPLICATION_ID,
                version=SCHEMA_VERSION,
                schema=_SCHEMA,
                fill=_begin,
            )
        self._file: Final = Durable(path, application_id=APPLICATION_ID, version=SCHEMA_VERSION)
        self._db: Final = self._file.connection
        try:
            self.outcomes: Final = SqliteOutcomes(self._db)
            self._read_chain()
        except sqlite3.Error as error:
            self._file.close()
            raise durable.damaged(path, error) from None
        except Damaged:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    # ------------------------------------------------------------------------ records

    def found(self) -> list[Found]:
        """Every record, with the hash that the journal has of it.

        Raises:
            Refusal: they cannot be read.
        """
        with self._reading():
            rows = self._db.execute(
                "SELECT id, record.name, packed, record.seq, event.body FROM record"
                " LEFT JOIN event ON event.seq = record.seq ORDER BY record.name"
            ).fetchall()
        return [
            Found(id, name, packed, _expected(id, seq, body))
            for id, name, packed, seq, body in rows
        ]

    def commit(
        self,
        *,
        put: Record | None = None,
        remove: str | None = None,
        events: Sequence[New],
        time_ms: int,
        within: Callable[[], None] | None = None,
    ) -> list[Entry]:
        """Writes a record, or removes one, with the events that tell of it.

        Args:
            within: is called inside the transaction, e.g. to put an outcome on record.

        Raises:
            Refusal: nothing has changed; see `durable.Durable.transaction`.
            BadEvent: an event cannot be written down; nothing has changed.
        """
        with self._file.transaction():
            entries = self._append(events, time_ms)
            if put is not None:
                packed = kept.pack(put)
                self._db.execute(
                    "INSERT INTO record VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
                    " name = excluded.name, packed = excluded.packed, seq = excluded.seq",
                    (put.id, put.name, packed, _carrier(entries, put.id)),
                )
            if remove is not None:
                self._db.execute("DELETE FROM record WHERE id = ?", (remove,))
            if within is not None:
                within()
        self._took(entries)
        return entries

    # ------------------------------------------------------------------------ journal

    def noted(self, caller: str, event_id: bytes) -> int | None:
        """The seq of an event that was noted under this id before."""
        with self._reading():
            row = self._db.execute(
                "SELECT seq FROM noted WHERE caller = ? AND event_id = ?", (caller, event_id)
            ).fetchone()
        return None if row is None else int(row[0])

    def note(
        self, caller: str, event_id: bytes, events: Sequence[New], *, time_ms: int
    ) -> list[Entry]:
        """Appends the events of one note and remembers its id. Raises as `commit`."""
        with self._file.transaction():
            entries = self._append(events, time_ms)
            self._db.execute(
                "INSERT INTO noted VALUES (?, ?, ?)", (caller, event_id, entries[-1].seq)
            )
        self._took(entries)
        return entries

    def page(self, query: Query, *, limit: int) -> Page:
        """The oldest events that the query selects, as many as fit.

        A row that is not an event any more appears as one of kind ``unreadable``, so that it
        neither hides nor stops the others.
        """
        where, values = _where(query)
        entries: list[Entry] = []
        size = 0
        with self._reading():
            rows = self._db.execute(
                "SELECT seq, time_ms, instance, name, source, body, hash,"
                " (SELECT hash FROM event AS p WHERE p.seq = event.seq - 1)"
                f" FROM event WHERE {where} ORDER BY seq LIMIT ?",
                (*values, min(limit, PAGE_EVENTS)),
            )
            for seq, time_ms, instance, name, source, body, hash, prev in rows:
                size += len(body)
                if entries and size > PAGE_BYTES:
                    return Page(entries, entries[-1].seq)
                row = Stored(seq, instance, name, source, time_ms, body, hash)
                entries.append(_entry(row, self.before.hash if prev is None else prev))
        if len(entries) >= min(limit, PAGE_EVENTS):
            return Page(entries, entries[-1].seq)
        return Page(entries, max(self.head.seq, query.after))

    def before_last(self, query: Query, count: int) -> int:
        """The seq after which `count` selected events remain; the query's own when fewer do."""
        if count == 0:
            return max(self.head.seq, query.after)
        where, values = _where(query)
        with self._reading():
            row = self._db.execute(
                f"SELECT seq FROM event WHERE {where} ORDER BY seq DESC LIMIT 1 OFFSET ?",
                (*values, count - 1),
            ).fetchone()
        return query.after if row is None else int(row[0]) - 1

    def mentions(self, name: str) -> bool:
        """Whether any event is about an instance that had this name."""
        with self._reading():
            row = self._db.execute("SELECT 1 FROM event WHERE name = ? LIMIT 1", (name,)).fetchone()
        return row is not None

    def was_removed(self, instance: str) -> bool:
        """Whether the journal says that an instance of this id existed and was removed."""
        with self._reading():
            rows = self._db.execute(
                "SELECT seq, time_ms, instance, name, source, body, hash FROM event"
                " WHERE instance = ? ORDER BY seq",
                (instance,),
            )
            return any(
                _entry(Stored(seq, id, name, source, time_ms, body, hash), hash).kind == "removed"
                for seq, time_ms, id, name, source, body, hash in rows
            )

    def rows(self, after: int, limit: int) -> list[Stored]:
        """Rows as they are, for the verifier."""
        with self._reading():
            return [
                Stored(*row)
                for row in self._db.execute(
                    "SELECT seq, instance, name, source, time_ms, body, hash FROM event"
                    " WHERE seq > ? ORDER BY seq LIMIT ?",
                    (after, limit),
                )
            ]

    def too_large(self) -> bool:
        """Whether `cut` has something to remove for its size."""
        return self.bytes > KEEP_BYTES and self.head.seq - KEEP_EVENTS > self.before.seq

    def cut(
        self, *, now_ms: int, keep_bytes: int | None = None, keep_ms: int | None = None
    ) -> list[Entry]:
        """Removes the oldest events that are too many or too old, and records the cut.

        A tenth more than must is removed for size, so that not every append cuts. A record
        whose hash stood in a removed event gets an event that carries it on.

        Returns:
            The events that this appended; empty when there was nothing to cut.

        Raises:
            Refusal: as `commit`.
        """
        last, why = self._cut_place(
            now_ms,
            KEEP_BYTES if keep_bytes is None else keep_bytes,
            KEEP_MS if keep_ms is None else keep_ms,
        )
        if last is None:
            return []
        with self._file.transaction():
            # What the journal says of a record is carried on, and not what its row says now:
            # a row that somebody changed must not become right by a cut.
            carried = [
                (id, name, expected)
                for id, name, seq, body in self._db.execute(
                    "SELECT id, record.name, record.seq, event.body FROM record"
                    " JOIN event ON event.seq = record.seq WHERE record.seq <= ? ORDER BY id",
                    (last.seq,),
                )
                if (expected := _expected(id, seq, body)) is not None
            ]
            events = [
                New(
                    kind=journal.ANCHOR,
                    by=journal.REGISTRY,
                    source="host-observed",
                    instance=id,
                    name=name,
                    facts={journal.RECORD: expected},
                )
                for id, name, expected in carried
            ]
            removed, size = self._db.execute(
                "SELECT count(*), total(length(body)) FROM event WHERE seq <= ?", (last.seq,)
            ).fetchone()
            events.append(journal.cut_event(last, removed=removed, why=why))
            entries = self._append(events, now_ms)
            for entry in entries[:-1]:
                self._db.execute(
                    "UPDATE record SET seq = ? WHERE id = ?", (entry.seq, entry.instance)
                )
            self._db.execute("DELETE FROM event WHERE seq <= ?", (last.seq,))
            self._db.execute("DELETE FROM noted WHERE seq <= ?", (last.seq,))
            self._db.execute(
                "UPDATE chain SET before_seq = ?, before_hash = ?, bytes = bytes - ?",
                (last.seq, last.hash, int(size)),
            )
        self._read_chain()
        return entries

    # -------------------------------------------------------------------------- below

    def _append(self, events: Sequence[New], time_ms: int) -> list[Entry]:
        """Within a transaction. What is in memory stays as it was."""
        mark, entries = self.head, []
        for new in events:
            entry = journal.link(new, after=mark, time_ms=time_ms)
            self._db.execute(
                "INSERT INTO event VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    entry.seq,
                    entry.time_ms,
                    entry.instance,
                    entry.name,
                    entry.source,
                    entry.body,
                    entry.hash,
                ),
            )
            entries.append(entry)
            mark = Mark(entry.seq, entry.hash)
        if entries:
            self._db.execute(
                "UPDATE chain SET seq = ?, hash = ?, time_ms = ?, bytes = bytes + ?",
                (mark.seq, mark.hash, time_ms, sum(len(e.body) for e in entries)),
            )
        return entries

    def _took(self, entries: Sequence[Entry]) -> None:
        """After the commit."""
        if entries:
            last = entries[-1]
            self.head = Mark(last.seq, last.hash)
            self.head_ms = last.time_ms
            self.bytes += sum(len(e.body) for e in entries)

    def _read_chain(self) -> None:
        row = self._db.execute(
            "SELECT before_seq, before_hash, seq, hash, time_ms, bytes FROM chain WHERE one = 1"
        ).fetchone()
        if row is None or not all(
            isinstance(value, kind)
            for value, kind in zip(row, (int, bytes, int, bytes, int, int), strict=True)
        ):
            raise Damaged(f"the database {self._file.path} does not say where its journal ends")
        self.before = Mark(row[0], row[1])
        self.head = Mark(row[2], row[3])
        self.head_ms = int(row[4])
        self.bytes = int(row[5])

    def _cut_place(self, now_ms: int, keep_bytes: int, keep_ms: int) -> tuple[Mark | None, str]:
        """The last event that is to go, and why."""
        youngest = self.head.seq - KEEP_EVENTS
        if youngest <= self.before.seq:
            return None, ""
        last, why = self.before.seq, ""
        with self._reading():
            too_old = self._db.execute(
                "SELECT min(seq) FROM event WHERE time_ms >= ?", (now_ms - keep_ms,)
            ).fetchone()[0]
            old_end = (self.head.seq + 1 if too_old is None else int(too_old)) - 1
            if old_end > last:
                last, why = old_end, "age"
            if self.bytes > keep_bytes:
                excess = self.bytes - keep_bytes * 9 // 10
                for seq, size in self._db.execute(
                    "SELECT seq, length(body) FROM event ORDER BY seq"
                ):
                    if excess <= 0:
                        break
                    excess -= size
                    if seq > last:
                        last, why = seq, "size"
            last = min(last, youngest)
            if last <= self.before.seq:
                return None, ""
            row = self._db.execute("SELECT hash FROM event WHERE seq = ?", (last,)).fetchone()
        if row is None:
            return None, ""  # a gap; `verify` names it, and a cut must not hide it
        return Mark(last, row[0]), why

    def _reading(self) -> _Reading:
        return _Reading(self._file)


class _Reading:
    """Turns an error of SQLite into the refusal that names the file."""

    def __init__(self, file: Durable) -> None:
        self._file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, sqlite3.Error):
            raise self._file.refusal(error) from error


def _begin(connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT INTO chain VALUES (1, 0, ?, 0, ?, 0, 0)", (journal.GENESIS, journal.GENESIS)
    )
    SqliteOutcomes(connection)


def _where(query: Query) -> tuple[str, tuple[int | str, ...]]:
    """Conditions in our own words; only the values are somebody's."""
    parts: list[str] = ["seq > ?"]
    values: list[int | str] = [query.after]
    for column, value in (
        ("time_ms >= ?", query.since_ms),
        ("source = ?", query.source),
        ("name = ?", query.name),
    ):
        if value is not None:
            parts.append(column)
            values.append(value)
    return " AND ".join(parts), tuple(values)


def _carrier(entries: Sequence[Entry], id: str) -> int:
    """The seq of the event that carries the record's hash."""
    for entry in entries:
        if entry.instance == id and entry.facts.get(journal.RECORD):
            return entry.seq
    raise ValueError("a record is written without the event that carries its hash")


def _expected(id: str, seq: int, body: object) -> str | None:
    """The hash that the journal has of a record, None when it has none that can be read."""
    if not isinstance(body, bytes):
        return None
    try:
        entry = journal.read(body, prev=b"", hash=b"")
    except BadEvent:
        return None
    recorded = entry.facts.get(journal.RECORD)
    fits = (entry.seq, entry.by, entry.instance) == (seq, journal.REGISTRY, id)
    return recorded if fits and isinstance(recorded, str) else None


def _entry(row: Stored, prev: bytes) -> Entry:
    try:
        return journal.read(row.body, prev=prev, hash=row.hash)
    except BadEvent as error:
        return Entry(
            seq=row.seq,
            time_ms=row.time_ms,
            kind="unreadable",
            by=journal.REGISTRY,
            source="host-observed",
            instance=None,
            name=None,
            facts={"problem": str(error)},
            body=row.body,
            prev=prev,
            hash=row.hash,
        )


def iterate(database: Database, *, size: int) -> Iterator[list[Stored]]:
    """All rows in pieces, oldest first."""
    after = database.before.seq
    while rows := database.rows(after, size):
        yield rows
        after = rows[-1].seq
