from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_box.bus import outcomes
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.outcomes import BEGUN, DONE, REFUSED, Prior, SqliteOutcomes

ID = b"i" * 16


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    made = sqlite3.connect(tmp_path / "db")
    yield made
    made.close()


def age(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    later = time.time() + seconds
    monkeypatch.setattr(outcomes.time, "time", lambda: later)


def test_nothing_is_known_of_what_was_not_begun(db: sqlite3.Connection) -> None:
    assert SqliteOutcomes(db).lookup("operator", ID) is None


def test_a_record_advances_and_is_durable(db: sqlite3.Connection, tmp_path: Path) -> None:
    made = SqliteOutcomes(db)
    made.record("operator", ID, "add", BEGUN, b"")
    with sqlite3.connect(tmp_path / "db") as other:
        assert SqliteOutcomes(other).lookup("operator", ID) == Prior("add", BEGUN, b"")
    made.record("operator", ID, "add", DONE, b"\x80")
    assert made.lookup("operator", ID) == Prior("add", DONE, b"\x80")
    assert made.lookup("broker", ID) is None
    assert made.lookup("operator", b"x" * 16) is None
    made.record("broker", ID, "remove", REFUSED, b"\x81")
    assert made.lookup("broker", ID) == Prior("remove", REFUSED, b"\x81")
    assert made.lookup("operator", ID) == Prior("add", DONE, b"\x80")


def test_a_record_goes_with_the_transaction_of_the_effect(db: sqlite3.Connection) -> None:
    made = SqliteOutcomes(db)
    db.execute("CREATE TABLE effects (n INTEGER)")
    with pytest.raises(RuntimeError), db:
        db.execute("INSERT INTO effects VALUES (1)")
        made.record("operator", ID, "add", DONE, b"\x80")
        raise RuntimeError("dies here")
    assert made.lookup("operator", ID) is None
    assert db.execute("SELECT count(*) FROM effects").fetchone() == (0,)
    with db:
        db.execute("INSERT INTO effects VALUES (1)")
        made.record("operator", ID, "add", DONE, b"\x80")
        assert db.in_transaction
    assert made.lookup("operator", ID) is not None


def test_records_are_kept_for_a_day_and_not_for_ever(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SqliteOutcomes(db)
    for number in range(20):
        made.record("operator", number.to_bytes(16, "big"), "add", DONE, b"\x80")
    age(monkeypatch, 25 * 3600)
    for number in range(20, 40):
        made.record("operator", number.to_bytes(16, "big"), "add", DONE, b"\x80")
    assert all(made.lookup("operator", n.to_bytes(16, "big")) for n in range(40))
    age(monkeypatch, 25 * 3600 + outcomes.KEEP_S)
    for number in range(40, 60):
        made.record("operator", number.to_bytes(16, "big"), "add", DONE, b"\x80")
    assert not any(made.lookup("operator", n.to_bytes(16, "big")) for n in range(20))
    assert made.lookup("operator", (59).to_bytes(16, "big"))


def test_a_full_record_refuses_rather_than_forgets(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "ROWS_MAX", 5)
    made = SqliteOutcomes(db)
    for number in range(5):
        made.record("operator", number.to_bytes(16, "big"), "add", BEGUN, b"")
    with pytest.raises(Refusal) as caught:
        made.record("operator", ID, "add", DONE, b"\x80")
    assert caught.value.reason is Reason.EXHAUSTED
    made.record("operator", (3).to_bytes(16, "big"), "add", DONE, b"\x80")  # what is there ends
    age(monkeypatch, outcomes.KEEP_S + 10)
    made.record("operator", ID, "add", DONE, b"\x80")
    assert made.lookup("operator", ID)


def test_a_count_is_taken_at_the_start(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "ROWS_MAX", 2)
    made = SqliteOutcomes(db)
    made.record("operator", b"1" * 16, "add", DONE, b"\x80")
    made.record("operator", b"2" * 16, "add", DONE, b"\x80")
    with pytest.raises(Refusal):
        SqliteOutcomes(db).record("operator", ID, "add", DONE, b"\x80")
