"""How a database of ours is made, opened and refused; what lies in it is its service's."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from agent_box.bus import durable
from agent_box.bus.durable import Damaged, Durable, InUse
from agent_box.bus.errors import Reason, Refusal

ID, VERSION = 0x41425454, 3
SCHEMA = "CREATE TABLE t (x INTEGER NOT NULL) STRICT;"


def fill(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO t VALUES (1)")


def make(path: Path) -> None:
    durable.create(path, application_id=ID, version=VERSION, schema=SCHEMA, fill=fill)


def opened(path: Path) -> Durable:
    return Durable(path, application_id=ID, version=VERSION)


def rows(database: Durable) -> list[int]:
    return [x for (x,) in database.connection.execute("SELECT x FROM t ORDER BY x")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.db"


def test_what_is_made_is_complete_and_private(path: Path) -> None:
    make(path)
    assert [p.name for p in path.parent.iterdir()] == ["t.db"]
    assert path.stat().st_mode & 0o777 == 0o600
    database = opened(path)
    assert rows(database) == [1]
    for pragma, value in (
        ("journal_mode", "wal"),
        ("synchronous", 2),
        ("locking_mode", "exclusive"),
    ):
        assert database.connection.execute(f"PRAGMA {pragma}").fetchone()[0] == value
    database.close()


def test_leftovers_do_not_get_into_a_new_one(path: Path) -> None:
    for end in (".new", ".new-wal", "-wal", "-shm", "-journal"):
        path.with_name(path.name + end).write_bytes(b"left over")
    make(path)
    assert [p.name for p in path.parent.iterdir()] == ["t.db"]
    database = opened(path)
    assert rows(database) == [1]
    database.close()


def test_what_is_there_is_never_replaced(path: Path) -> None:
    make(path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        make(path)
    assert path.read_bytes() == before


def test_nothing_has_the_name_when_making_it_fails(path: Path) -> None:
    def fail(connection: sqlite3.Connection) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError):
        durable.create(path, application_id=ID, version=VERSION, schema=SCHEMA, fill=fail)
    assert not path.exists()
    make(path)
    opened(path).close()


def test_a_transaction_is_whole_or_nothing(path: Path) -> None:
    make(path)
    database = opened(path)
    with database.transaction():
        database.connection.execute("INSERT INTO t VALUES (2)")
    for error in (KeyError("a defect"), Refusal(Reason.EXHAUSTED, "no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), database.transaction():
            database.connection.execute("INSERT INTO t VALUES (3)")
            raise error
    with pytest.raises(Refusal), database.transaction():
        database.connection.execute("INSERT INTO t VALUES (3)")
        database.connection.execute("INSERT INTO t VALUES (NULL)")
    assert rows(database) == [1, 2]
    database.close()


def test_a_second_one_is_told_who_is_in_the_way(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_BUSY_S", 0.01)
    make(path)
    first = opened(path)
    with pytest.raises(InUse, match="in use by another process"):
        opened(path)
    first.close()
    opened(path).close()


@pytest.mark.parametrize(
    ("application_id", "version", "words"),
    [(ID + 1, VERSION, "another program"), (ID, VERSION + 1, "another version")],
)
def test_one_of_something_else(path: Path, application_id: int, version: int, words: str) -> None:
    make(path)
    before = path.read_bytes()
    with pytest.raises(Damaged, match=words):
        Durable(path, application_id=application_id, version=version)
    if application_id != ID:
        assert path.read_bytes() == before  # what is not ours is not touched


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, Reason.DISK_FULL),
        (errno.EDQUOT, Reason.DISK_FULL),
        (errno.EROFS, Reason.EXHAUSTED),
        (errno.EACCES, Reason.EXHAUSTED),
        (errno.EIO, Reason.EXHAUSTED),
    ],
)
def test_what_the_system_says_and_what_is_told(path: Path, number: int, reason: Reason) -> None:
    told = durable.refusal(path, OSError(number, os.strerror(number)))
    assert told.reason is reason
    assert str(path.parent) in told.message and "nothing has changed" in told.message
