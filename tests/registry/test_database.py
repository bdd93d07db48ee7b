"""The database: what was committed stays, what others changed is named, the oldest go in order."""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.registries import CONFIG, create
from support.spoil import spoil

from agent_box.bus.durable import Damaged, InUse
from agent_box.bus.errors import Reason, Refusal
from agent_box.registry import database as stored
from agent_box.registry import journal, record
from agent_box.registry.database import Database, Query
from agent_box.registry.journal import BadEvent, New, Verifier
from agent_box.registry.record import Record

ALL = Query(after=0, since_ms=None, source=None, name=None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    opened = Database(path)
    yield opened
    opened.close()


def a_record(name: str = "web1", number: int = 1) -> Record:
    profile = CONFIG.profiles["rust"]
    policy = CONFIG.policies[profile.policy]
    return record.draft(create(name), profile, policy, id=f"{number:032x}", now_ms=1)


def carrying(rec: Record, kind: str = "created") -> New:
    return new(kind, instance=rec.id, name=rec.name, record=journal.record_hash(record.pack(rec)))


def new(
    kind: str = "x",
    *,
    instance: str | None = None,
    name: str | None = None,
    source: journal.Source = "host-observed",
    **facts: journal.Fact,
) -> New:
    return New(kind=kind, by="registry", source=source, instance=instance, name=name, facts=facts)


def put(database: Database, rec: Record) -> None:
    database.commit(put=rec, events=[carrying(rec)], time_ms=1)


def verified(database: Database) -> Verifier:
    verifier = Verifier()
    for rows in stored.iterate(database, size=7):
        verifier.feed(rows)
    verifier.finish(database.head)
    return verifier


def kinds(database: Database, query: Query = ALL, limit: int = 100) -> list[str]:
    return [entry.kind for entry in database.page(query, limit=limit).entries]


def test_record_and_event_are_written_together(path: Path) -> None:
    database = Database(path)
    rec = a_record()
    put(database, rec)
    later = msgspec.structs.replace(rec, state="stopped")
    database.commit(put=later, events=[carrying(later, "changed")], time_ms=2)
    database.close()
    database = Database(path)
    (found,) = database.found()
    assert record.unpack(found.packed) == later
    assert found.expected == journal.record_hash(found.packed)
    assert kinds(database) == ["created", "changed"]
    assert verified(database).records == {rec.id: found.expected}
    gone = new("removed", instance=rec.id, name=rec.name, record="")
    database.commit(remove=rec.id, events=[gone], time_ms=3)
    assert database.found() == []
    assert verified(database).records == {}
    database.close()


def test_a_record_without_its_event_is_not_written(database: Database) -> None:
    with pytest.raises(ValueError):
        database.commit(put=a_record(), events=[new()], time_ms=1)
    assert (database.found(), database.head.seq) == ([], 0)
    assert verified(database).bad_seq is None


def test_nothing_of_a_failed_transaction_stays(database: Database) -> None:
    def fail() -> None:
        raise Refusal(Reason.EXHAUSTED, "no")

    rec = a_record()
    with pytest.raises(Refusal):
        database.commit(put=rec, events=[carrying(rec)], time_ms=1, within=fail)
    with pytest.raises(BadEvent):
        database.commit(events=[new(), new(t="x" * 3000)], time_ms=1)
    assert (database.found(), database.head.seq, database.bytes) == ([], 0, 0)
    put(database, rec)
    assert database.head.seq == 1
    assert verified(database).bad_seq is None


def test_two_records_of_one_name_cannot_be(database: Database) -> None:
    put(database, a_record())
    with pytest.raises(Refusal):
        put(database, a_record(number=2))
    assert len(database.found()) == 1


def test_a_note_is_known_by_its_id(database: Database) -> None:
    entries = database.note("engine", b"i" * 16, [new("one"), new("two")], time_ms=1)
    assert database.noted("engine", b"i" * 16) == entries[-1].seq == 2
    assert database.noted("netstack", b"i" * 16) is None
    assert database.noted("engine", b"j" * 16) is None


# ---------------------------------------------------------------------- reading


def fill(database: Database, count: int) -> None:
    for number in range(count):
        name = "web1" if number % 2 else "web2"
        source: journal.Source = "guest-channel" if number % 3 else "host-observed"
        database.commit(events=[new(f"k{number}", name=name, source=source)], time_ms=1000 + number)


def test_pages(database: Database) -> None:
    fill(database, 10)
    first = database.page(ALL, limit=4)
    assert [e.seq for e in first.entries] == [1, 2, 3, 4]
    assert first.next == 4
    rest = database.page(Query(after=4, since_ms=None, source=None, name=None), limit=100)
    assert [e.seq for e in rest.entries] == [5, 6, 7, 8, 9, 10]
    assert rest.next == 10
    assert [e.prev for e in rest.entries[1:]] == [e.hash for e in rest.entries[:-1]]
    assert first.entries[0].prev == journal.GENESIS
    assert rest.entries[0].prev == first.entries[-1].hash


def test_filters_move_the_cursor_over_what_they_left_out(database: Database) -> None:
    fill(database, 10)
    only = Query(after=0, since_ms=1005, source="guest-channel", name="web1")
    page = database.page(only, limit=100)
    assert [e.kind for e in page.entries] == ["k5", "k7"]
    assert page.next == 10
    assert kinds(database, Query(after=0, since_ms=None, source=None, name="web3")) == []


@pytest.mark.parametrize(("count", "after"), [(0, 10), (1, 9), (3, 5), (5, 1), (99, 0)])
def test_the_last_so_many(database: Database, count: int, after: int) -> None:
    fill(database, 10)
    query = Query(after=0, since_ms=None, source=None, name="web1")
    assert database.before_last(query, count) == after
    page = database.page(Query(after=after, since_ms=None, source=None, name="web1"), limit=100)
    assert len(page.entries) == min(count, 5)


def test_a_page_is_no_larger_than_a_message(database: Database) -> None:
    facts = {f"f{n}": "x" * 2000 for n in range(8)}
    database.commit(events=[new(**facts) for _ in range(60)], time_ms=1)
    page = database.page(ALL, limit=1000)
    assert 0 < len(page.entries) < 60
    assert sum(len(e.body) for e in page.entries) <= stored.PAGE_BYTES
    assert page.next == page.entries[-1].seq


# ---------------------------------------------------------------------- cutting


def test_a_cut_by_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "KEEP_EVENTS", 5)
    database = Database(path)
    rec = a_record()
    put(database, rec)
    database.note("engine", b"i" * 16, [new()], time_ms=1)
    for number in range(50):
        database.commit(events=[new("fill", n=number, text="x" * 100)], time_ms=2)
    size = database.bytes
    appended = database.cut(now_ms=3, keep_bytes=size // 2)
    assert [e.kind for e in appended] == ["record-anchored", "journal-cut"]
    assert appended[-1].facts["why"] == "size"
    assert appended[-1].facts["removed"] == database.before.seq
    assert database.bytes <= size // 2
    assert database.cut(now_ms=3, keep_bytes=size // 2) == []
    assert verified(database).bad_seq is None
    assert database.noted("engine", b"i" * 16) is None
    assert database.page(ALL, limit=1).entries[0].prev == database.before.hash
    database.close()
    database = Database(path)
    (found,) = database.found()
    assert found.expected == journal.record_hash(found.packed)
    assert verified(database).records == {rec.id: found.expected}
    total = sum(len(row.body) for rows in stored.iterate(database, size=9) for row in rows)
    assert total == database.bytes
    for _ in range(3):  # and cuts upon cuts
        for number in range(50):
            database.commit(events=[new("fill", n=number, text="x" * 100)], time_ms=2)
        assert database.cut(now_ms=3, keep_bytes=size // 2)
        assert verified(database).bad_seq is None
        assert verified(database).records == {rec.id: found.expected}
    database.close()


def test_a_cut_by_age(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "KEEP_EVENTS", 2)
    database = Database(path)
    for age in range(10):
        database.commit(events=[new(f"k{age}")], time_ms=age * 1000)
    assert database.cut(now_ms=9000, keep_ms=20_000) == []
    (told,) = database.cut(now_ms=9000, keep_ms=5000)
    assert told.facts["why"] == "age"
    assert kinds(database)[0] == "k4"
    assert verified(database).bad_seq is None
    database.cut(now_ms=1_000_000, keep_ms=1)
    assert kinds(database) == ["k9", "journal-cut", "journal-cut"]
    assert verified(database).bad_seq is None
    database.close()


def test_a_cut_does_not_make_a_changed_record_right(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "KEEP_EVENTS", 1)
    database = Database(path)
    rec = a_record()
    put(database, rec)
    for _ in range(5):
        database.commit(events=[new()], time_ms=2)
    database.close()
    other = record.pack(msgspec.structs.replace(rec, cpus=64))
    spoil(path, "UPDATE record SET packed = ?", other)
    database = Database(path)
    assert database.cut(now_ms=10_000, keep_ms=1)
    (found,) = database.found()
    assert found.expected == journal.record_hash(record.pack(rec))
    assert found.expected != journal.record_hash(found.packed)
    assert verified(database).records[rec.id] == found.expected
    database.close()


def test_a_cut_does_not_hide_a_gap(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "KEEP_EVENTS", 4)
    database = Database(path)
    for _ in range(10):
        database.commit(events=[new()], time_ms=1)
    database.close()
    spoil(path, "DELETE FROM event WHERE seq = 6")
    database = Database(path)
    assert database.cut(now_ms=10_000, keep_ms=1) == []
    assert verified(database).bad_seq == 6
    database.close()


# --------------------------------------------------------------------- tampering


@pytest.mark.parametrize(
    ("statement", "bad"),
    [
        ("UPDATE event SET body = CAST(replace(body, 'web1', 'web9') AS BLOB) WHERE seq = 2", 2),
        ("UPDATE event SET body = x'00' WHERE seq = 3", 3),
        ("UPDATE event SET name = 'other' WHERE seq = 4", 4),
        ("UPDATE event SET time_ms = 5 WHERE seq = 4", 4),
        ("UPDATE event SET hash = zeroblob(32) WHERE seq = 4", 4),
        ("DELETE FROM event WHERE seq = 5", 5),
        ("DELETE FROM event WHERE seq <= 3", 4),
        ("DELETE FROM event WHERE seq >= 9", 9),
        ("DELETE FROM event", 1),
        ("UPDATE chain SET seq = 9", 10),
        ("UPDATE chain SET hash = zeroblob(32)", 10),
    ],
)
def test_a_changed_journal_names_the_first_place(path: Path, statement: str, bad: int) -> None:
    database = Database(path)
    fill(database, 10)
    database.close()
    spoil(path, statement)
    database = Database(path)
    verifier = verified(database)
    assert verifier.bad_seq == bad
    assert f"event {bad}: " in (verifier.problem or "")
    database.page(ALL, limit=100)  # and what can be read is still served
    database.close()


def test_a_row_that_is_no_event_is_shown_as_that(path: Path) -> None:
    database = Database(path)
    fill(database, 3)
    database.close()
    spoil(path, "UPDATE event SET body = x'1b5b33316d' WHERE seq = 2")
    database = Database(path)
    assert kinds(database) == ["k0", "unreadable", "k2"]
    database.close()


def test_a_changed_record_does_not_fit_what_the_journal_says(path: Path) -> None:
    database = Database(path)
    put(database, a_record("one", 1))
    put(database, a_record("two", 2))
    database.close()
    other = record.pack(msgspec.structs.replace(a_record("two", 2), cpus=64))
    spoil(path, "UPDATE record SET packed = ? WHERE name = 'two'", other)
    database = Database(path)
    fits = {f.name: f.expected == journal.record_hash(f.packed) for f in database.found()}
    assert fits == {"one": True, "two": False}
    database.close()
    for seq in (1, 99):  # a row that points at another event
        spoil(path, f"UPDATE record SET seq = {seq} WHERE name = 'two'")
        database = Database(path)
        assert {f.name: f.expected for f in database.found()}["two"] is None
        database.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"x" * 5000),
        lambda path: path.write_bytes(path.read_bytes()[:50]),
        lambda path: spoil(path, "PRAGMA user_version = 9"),
        lambda path: spoil(path, "PRAGMA application_id = 9"),
        lambda path: spoil(path, "DELETE FROM chain"),
        lambda path: spoil(path, "DROP TABLE chain"),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("/etc/hostname")),
        lambda path: path.chmod(0o400),
    ],
)
def test_a_file_that_is_not_the_database_is_refused_by_name(
    path: Path, damage: Callable[[Path], object]
) -> None:
    Database(path).close()
    damage(path)
    with pytest.raises(Damaged, match=str(path)):
        Database(path)


def test_pages_that_were_overwritten_are_noticed(path: Path) -> None:
    database = Database(path)
    fill(database, 300)
    database.close()
    content = bytearray(path.read_bytes())
    content[8192:] = random.Random(1).randbytes(len(content) - 8192)
    path.write_bytes(content)
    try:
        database = Database(path)
    except Damaged:
        return
    with pytest.raises(Refusal) as error:
        database.commit(events=[new()], time_ms=1)
    assert error.value.reason is Reason.TAMPERED
    database.close()


# -------------------------------------------------------------- other processes


def child(path: Path, start: int) -> subprocess.Popen[str]:
    """A registry's database at work: says each number when it has been committed."""
    return subprocess.Popen(
        [sys.executable, "-m", "support.registry_child", str(path), str(start)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
    )


def killed(path: Path, start: int, acknowledge: int) -> int:
    """Runs the child until it has said so many numbers, kills it, and gives the last one."""
    process = child(path, start)
    assert process.stdout is not None
    last = start - 1
    for _ in range(acknowledge):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()  # said before it died: committed as well
    process.wait()
    process.stdout.close()
    return max([last, *(int(line) for line in rest.split("\n")[:-1])])


def survivors(path: Path, last: int) -> None:
    database = Database(path)
    assert verified(database).bad_seq is None
    numbers = set()
    after = 0
    while True:
        query = Query(after=after, since_ms=None, source=None, name=None)
        page = database.page(query, limit=1000)
        numbers |= {e.facts["n"] for e in page.entries if "n" in e.facts}
        if not page.entries:
            break
        after = page.next
    assert numbers >= set(range(last + 1))
    assert len(numbers) <= last + 2  # the one that was under way may be there, wholly
    records = {f.name: record.unpack(f.packed).boots for f in database.found()}
    assert all(f.expected == journal.record_hash(f.packed) for f in database.found())
    assert records["web1"] in (last, last + 1)
    assert records["web1"] == max(n for n in numbers if isinstance(n, int))
    database.close()


def rounds(path: Path, count: int) -> None:
    chance = random.Random(count)
    last = -1
    for _ in range(count):
        last = killed(path, last + 1, chance.randint(1, 25))
        survivors(path, last)


def test_what_was_acknowledged_survives_kill_9(path: Path) -> None:
    rounds(path, 6)


@pytest.mark.slow
def test_what_was_acknowledged_survives_kill_9_often(path: Path) -> None:
    rounds(path, 60)


def test_a_second_process_cannot_open_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_box.bus import durable

    process = child(path, 0)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        monkeypatch.setattr(durable, "_BUSY_S", 0.05)
        with pytest.raises(InUse, match=f"{path} is in use by another process"):
            Database(path)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    Database(path).close()  # and its lock died with it


def test_a_full_disk_is_said_and_nothing_is_lost(path: Path) -> None:
    """The limit on the size of a file stands in for the end of the disk."""
    database = Database(path)
    rec = a_record()
    put(database, rec)
    before = database.head
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    wal = path.with_name(path.name + "-wal")
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size + 4096, limits[1]))
    try:
        with pytest.raises(Refusal) as error:
            for _ in range(50):
                before = database.head
                database.commit(events=[new(text="x" * 2000)] * 4, time_ms=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    assert error.value.code == "exhausted"
    assert str(path.parent) in error.value.message
    assert "nothing has changed" in error.value.message
    assert database.head == before
    assert verified(database).bad_seq is None
    put(database, msgspec.structs.replace(rec, cpus=1))
    database.close()
    database = Database(path)
    assert verified(database).bad_seq is None
    assert len(database.found()) == 1
    database.close()


def test_sqlites_own_word_for_a_full_disk(path: Path) -> None:
    database = Database(path)
    pages = database._db.execute("PRAGMA page_count").fetchone()[0]
    database._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Refusal) as error:
        for _ in range(50):
            database.commit(events=[new(text="x" * 2000)] * 4, time_ms=1)
    assert (error.value.reason, error.value.exit) == (Reason.DISK_FULL, 1)
    assert verified(database).bad_seq is None
    database.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises((sqlite3.Error, OSError)):
            Database(tmp_path / "registry.db")
    finally:
        tmp_path.chmod(0o700)
