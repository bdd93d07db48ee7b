"""What became of the calls that must not be repeated.

A `Kind.ONCE` call carries a `request_id`. Its result is written in the *same transaction* as
its effect, before the reply: then there is no moment at which one is there without the other,
and after any crash the question "did it happen?" has an answer.

In a handler:

    with database:                 # one transaction
        database.execute(...)      # the effect
        call.commit(reply)         # the result, for whoever asks
    return reply

A handler whose effect is outside of the database (it starts a process, say) calls
`call.begin()` first. If the service dies between that and `commit`, the answer is "unknown".
"""

from __future__ import annotations

import sqlite3
import time
from typing import Final, NamedTuple, Protocol

from agent_box.bus.errors import Reason, Refusal

KEEP_S: Final = 48 * 3600  # twice what is promised, so that a clock set forward takes none
ROWS_MAX: Final = 100_000  # with fewer than one new call a second, this is never reached

BEGUN: Final = "begun"
DONE: Final = "done"
REFUSED: Final = "refused"


class Prior(NamedTuple):
    """What is on record of an earlier call.

    Attributes:
        method: its name.
        state: "begun", "done" or "refused".
        body: the packed reply or the packed `wire.Problem`; empty when begun.
    """

    method: str
    state: str
    body: bytes


class Outcomes(Protocol):
    """A record of calls by caller and request id."""

    def lookup(self, caller: str, request_id: bytes) -> Prior | None:
        """What is known; None when nothing was begun."""

    def record(self, caller: str, request_id: bytes, method: str, state: str, body: bytes) -> None:
        """Writes or advances a record. Within a transaction of the caller, if there is one;
        otherwise it is durable on return.

        Raises:
            Refusal: EXHAUSTED, the record is full of calls that must still be kept.
        """


class SqliteOutcomes:
    """Outcomes in the database of the service, beside the effects.

    Args:
        connection: the one that the handlers write with.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        with self._db:
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS outcomes ("
                " caller TEXT NOT NULL, request_id BLOB NOT NULL, method TEXT NOT NULL,"
                " state TEXT NOT NULL, body BLOB NOT NULL, at INTEGER NOT NULL,"
                " PRIMARY KEY (caller, request_id)) STRICT, WITHOUT ROWID"
            )
            self._db.execute("CREATE INDEX IF NOT EXISTS outcomes_at ON outcomes (at)")
        self._rows = int(self._db.execute("SELECT count(*) FROM outcomes").fetchone()[0])

    def lookup(self, caller: str, request_id: bytes) -> Prior | None:
        row = self._db.execute(
            "SELECT method, state, body FROM outcomes WHERE caller = ? AND request_id = ?",
            (caller, request_id),
        ).fetchone()
        return None if row is None else Prior(*row)

    def record(self, caller: str, request_id: bytes, method: str, state: str, body: bytes) -> None:
        if self._db.in_transaction:
            self._write(caller, request_id, method, state, body)
            return
        with self._db:
            self._write(caller, request_id, method, state, body)

    def _write(self, caller: str, request_id: bytes, method: str, state: str, body: bytes) -> None:
        now = int(time.time())
        known = self._db.execute(
            "UPDATE outcomes SET state = ?, body = ?, at = ? WHERE caller = ? AND request_id = ?",
            (state, body, now, caller, request_id),
        )
        if known.rowcount:
            return
        self._make_room(now)
        self._db.execute(
            "INSERT INTO outcomes (caller, request_id, method, state, body, at)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (caller, request_id, method, state, body, now),
        )
        self._rows += 1

    def _make_room(self, now: int) -> None:
        """A few old ones each time, so no call has to wait for many. `_rows` is at least what
        is there: a transaction that is rolled back is not counted out again."""
        gone = self._db.execute(
            "DELETE FROM outcomes WHERE (caller, request_id) IN"
            " (SELECT caller, request_id FROM outcomes WHERE at < ? ORDER BY at LIMIT 4)",
            (now - KEEP_S,),
        )
        self._rows -= gone.rowcount
        if self._rows >= ROWS_MAX:
            self._rows = int(self._db.execute("SELECT count(*) FROM outcomes").fetchone()[0])
            if self._rows >= ROWS_MAX:
                raise Refusal(Reason.EXHAUSTED, "too many calls of the last two days are on record")
