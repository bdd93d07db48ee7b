"""The store on a real disk: what is durable, what is refused, and what a restart finds."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from support.stores import (
    Box,
    full_list,
    listed,
    protect,
    put,
    remove,
    reveal,
    run,
    sealed,
    unlock,
)

from agent_box.bus.errors import Reason, Refusal
from agent_box.process.secret import Secret
from agent_box.store import core as deciding
from agent_box.store import seal
from agent_box.store.adapter import Store
from agent_box.store.contract import Name, Protect, Unlock
from agent_box.store.custody import Custody
from agent_box.store.handing import Handed


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


@pytest.fixture
def fast_kdf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argon2id with little memory, where its strength is not what is tested."""
    monkeypatch.setattr(seal, "KDF_PASSES", 1)
    monkeypatch.setattr(seal, "KDF_MEMORY", 8 << 20)


def refusal(reason: Reason, match: str = "") -> pytest.RaisesExc[Refusal]:
    return pytest.raises(Refusal, match=match, check=lambda r: r.reason is reason)


# --------------------------------------------------------------------------------- verbs


def test_the_first_start_makes_a_store_with_a_private_key_file(box: Box) -> None:
    with box.opened() as store:
        assert store.problem is None
        assert full_list(store).protection == "key-file"
        assert not full_list(store).locked
    files = {p.relative_to(box.data.parent): p for d in (box.data, box.keys) for p in d.iterdir()}
    kinds = sorted(p.name.split("-")[0] for p in files.values())
    assert kinds == ["credentials.db", "custody.json", "master"]
    assert {p.stat().st_mode & 0o777 for p in files.values() if "db" not in p.name} == {0o600}


def test_what_was_stored_outlives_a_restart(box: Box) -> None:
    with box.opened() as store:
        assert put(store, "a", b"one") == 1
        box.now_ms += 1
        assert put(store, "a", b"two") == 2
        assert put(store, "b", b"\xff\x80 latin") == 1
        remove(store, "b")
        assert put(store, "c", b"three") == 1
    with box.opened() as store:
        assert {n: reveal(store, n) for n in listed(store)} == {"a": b"two", "c": b"three"}
        assert listed(store)["a"].updated_ms == box.now_ms
    assert box.log.events().count("made a new store") == 1


def test_what_is_acknowledged_is_there_for_the_next_request(box: Box) -> None:
    with box.opened() as store:
        for number in range(50):
            put(store, "a", b"%d" % number)
            assert reveal(store, "a") == b"%d" % number
            assert listed(store)["a"].version == number + 1


def test_a_failure_within_a_removal_undoes_it(box: Box) -> None:
    """The result of a call that must not be repeated is written with its effect, or neither."""

    def fails(reply: object) -> None:
        raise Refusal(Reason.EXHAUSTED, "no room for the result")

    with box.opened() as store:
        put(store, "a", b"one")
        with refusal(Reason.EXHAUSTED):
            store.remove(Name(name="a"), fails)
        assert reveal(store, "a") == b"one"
        remove(store, "a")
        with refusal(Reason.NOT_FOUND, "a"):
            remove(store, "a")


def test_the_disk_never_holds_a_value_in_the_clear(box: Box) -> None:
    with box.opened() as store:
        for number in range(20):
            put(store, f"n{number}", b"canary-value-in-the-clear" * (number + 1))
        remove(store, "n3")
        key = next(box.keys.glob("master-*.key")).read_bytes()
        for directory in (box.data, box.keys):
            for path in directory.iterdir():
                content = path.read_bytes()
                assert b"canary" not in content
                assert path.suffix == ".key" or key not in content
    assert "canary" not in repr(box.log.lines)


# ------------------------------------------------------------------- tampering with the file


def test_tampered_swapped_and_truncated_rows_are_named_and_others_served(box: Box) -> None:
    with box.opened() as store:
        for name in ("a", "b", "c", "d", "e", "good"):
            put(store, name, name.encode() * 9)
    with box.sql() as sql:
        sql.execute("UPDATE credential SET sealed = substr(sealed, 1, 20) WHERE name = 'a'")
        sql.execute(
            "UPDATE credential SET sealed = CAST(substr(sealed, 1, 30) || x'00' || "
            "substr(sealed, 32) AS BLOB) WHERE name = 'b'"
        )
        c, d = (
            sql.execute("SELECT sealed FROM credential WHERE name = ?", (n,)).fetchone()[0]
            for n in "cd"
        )
        sql.execute("UPDATE credential SET sealed = ? WHERE name = 'c'", (d,))
        sql.execute("UPDATE credential SET sealed = ? WHERE name = 'd'", (c,))
        sql.execute("UPDATE credential SET version = 7 WHERE name = 'e'")
    with box.opened() as store:
        problems = {name: c.problem for name, c in listed(store).items()}
        assert problems == dict.fromkeys("abcde", deciding.TAMPERED) | {"good": None}
        for name in "abcde":
            with refusal(Reason.TAMPERED, f"^credential {name}: tampered with"):
                reveal(store, name)
        assert reveal(store, "good") == b"good" * 9
        put(store, "a", b"mended")
        assert reveal(store, "a") == b"mended"


def test_a_row_of_the_past_put_back_into_the_file_is_named(box: Box) -> None:
    with box.opened() as store:
        put(store, "a", b"old")
        put(store, "b", b"two")
    with box.sql() as sql:
        rows = sql.execute("SELECT * FROM credential").fetchall()
    with box.opened() as store:
        put(store, "a", b"new")
        remove(store, "b")
    with box.sql() as sql:
        sql.executemany("INSERT OR REPLACE INTO credential VALUES (?, ?, ?, ?)", rows)
    with box.opened() as store:
        assert {n: c.problem for n, c in listed(store).items()} == {
            "a": deciding.OLDER,
            "b": deciding.REMOVED,
        }


def test_a_row_deleted_from_the_file_is_named(box: Box) -> None:
    with box.opened() as store:
        put(store, "a", b"one")
    with box.sql() as sql:
        sql.execute("DELETE FROM credential")
    with box.opened() as store, refusal(Reason.TAMPERED, "a: its row is gone"):
        reveal(store, "a")


def test_a_schema_that_was_loosened_is_not_trusted(box: Box) -> None:
    with box.opened() as store:
        put(store, "a", b"one")
        put(store, "b", b"two")
    with box.sql() as sql:
        sql.execute("ALTER TABLE credential RENAME TO strict_one")
        sql.execute("CREATE TABLE credential (name PRIMARY KEY, version, updated_ms, sealed)")
        sql.execute("INSERT INTO credential SELECT * FROM strict_one")
        sql.execute("UPDATE credential SET version = 'x', sealed = 5 WHERE name = 'a'")
        sql.execute("INSERT INTO credential VALUES (x'ff', NULL, NULL, NULL)")
    with box.opened() as store:
        assert listed(store)["a"].problem == deciding.UNREADABLE
        assert reveal(store, "b") == b"two"


def _missing(box: Box) -> str:
    box.database.unlink()
    return "credentials.db is missing"


def _emptied(box: Box) -> str:
    box.database.write_bytes(b"")
    return "credentials.db was emptied"


def _torn(box: Box) -> str:
    os.truncate(box.database, 5000)
    return "credentials.db is damaged"


def _garbage(box: Box) -> str:
    box.database.write_bytes(os.urandom(20_000))
    return "credentials.db is damaged: it is not a SQLite file"


def _another_program(box: Box) -> str:
    box.database.unlink()
    with box.sql() as sql:
        sql.execute("CREATE TABLE t (x)")
    return "credentials.db was replaced"


def _another_store(box: Box) -> str:
    other = Box(box.data.parent / "other")
    with other.opened():
        pass
    shutil.copy(other.database, box.database)
    return "credentials.db belongs to another store"


def _another_version(box: Box) -> str:
    with box.sql() as sql:
        sql.execute("PRAGMA user_version = 9")
    return "of another version"


def _a_link(box: Box) -> str:
    box.database.rename(box.data / "elsewhere")
    box.database.symlink_to("elsewhere")
    return "credentials.db is not a regular file"


def _no_custody(box: Box) -> str:
    (box.keys / "custody.json").unlink()
    return "custody.json is missing"


def _torn_custody(box: Box) -> str:
    os.truncate(box.keys / "custody.json", 50)
    return "custody.json is damaged"


def _open_custody(box: Box) -> str:
    (box.keys / "custody.json").chmod(0o644)
    return "custody.json has mode 0644"


def _open_directory(box: Box) -> str:
    box.keys.chmod(0o755)
    return "keys has mode 0755"


def _all_but_the_key(box: Box) -> str:
    box.database.unlink()
    (box.keys / "custody.json").unlink()
    return "are missing, but the key of a store is there"


@pytest.mark.parametrize(
    "harm",
    [
        _missing, _emptied, _torn, _garbage, _another_program, _another_store, _another_version,
        _a_link, _no_custody, _torn_custody, _open_custody, _open_directory, _all_but_the_key,
    ],
)  # fmt: skip
def test_a_store_that_is_not_what_it_was_says_so_and_makes_nothing_anew(
    box: Box, harm: object
) -> None:
    with box.opened() as store:
        put(store, "a", b"one")
    assert callable(harm)
    expected = harm(box)
    before = _contents(box)
    with box.opened() as store:
        assert store.problem is not None
        for verb in (store.list, store.seal_key, lambda: remove(store, "a")):
            with refusal(Reason.TAMPERED, expected):
                verb()
    assert _contents(box) == before


def _contents(box: Box) -> dict[str, bytes]:
    return {
        f"{d.name}/{p.name}": p.read_bytes()
        for d in (box.data, box.keys)
        for p in d.iterdir()
        if not p.name.endswith(("-wal", "-shm"))
    }


def test_when_all_of_it_is_taken_away_a_new_store_begins(box: Box) -> None:
    """As docs/store.md says, for a key that was lost; even what SQLite left beside the file."""
    wal = box.database.with_name(box.database.name + "-wal")
    with box.opened() as store:
        put(store, "a", b"one")
        left = wal.read_bytes()
    assert left
    box.database.unlink()
    wal.write_bytes(left)
    for path in (box.keys / "custody.json", *box.keys.glob("master-*.key")):
        path.unlink()
    with box.opened() as store:
        assert store.problem is None
        assert listed(store) == {}
        put(store, "a", b"two")


def test_damage_that_only_a_full_check_finds_stops_writes_and_not_reads(box: Box) -> None:
    with box.opened() as store:
        put(store, "a", b"one")
        for number in range(40):
            put(store, f"n{number}", b"x" * 900)
    with box.sql() as sql:
        page = sql.execute("SELECT rootpage FROM sqlite_master WHERE name = 'credential'")
        rows = page.fetchone()[0]
        size = sql.execute("PRAGMA page_size").fetchone()[0]
        index = sql.execute("SELECT rootpage FROM sqlite_master WHERE type = 'index'").fetchone()
    assert rows != index[0]
    with open(box.database, "r+b") as file:
        # the last leaf of the table: its header says that it has no cells
        file.seek(0, os.SEEK_END)
        last = file.tell() // size - 1
        file.seek(last * size)
        file.write(b"\x0d" + bytes(7))
    with box.opened() as store:
        assert store.problem is not None
        assert "damaged" in store.problem
        assert full_list(store).problem == store.problem
        assert reveal(store, "a") == b"one"
        with refusal(Reason.TAMPERED, "nothing is written"):
            put(store, "a", b"two")
        assert reveal(store, "a") == b"one"


def test_a_second_store_on_the_same_files_does_not_open(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_box.bus.durable._BUSY_S", 0.05)
    with box.opened() as store:
        put(store, "a", b"one")
        with box.opened() as second:
            assert "in use by another process" in str(second.problem)
        assert put(store, "a", b"two") == 2


# ------------------------------------------------------------------------------- master key


def _key_file(box: Box) -> Path:
    return next(box.keys.glob("master-*.key"))


def test_a_key_file_that_others_may_read_is_refused_until_it_is_private(box: Box) -> None:
    with box.opened() as store:
        put(store, "a", b"one")
    _key_file(box).chmod(0o640)
    with box.opened() as store:
        assert "has mode 0640" in str(store.problem)
        assert "has mode 0640" in str(listed(store)["a"].problem)
        assert not full_list(store).locked
        with refusal(Reason.TAMPERED, "^a: cannot be read: .*has mode 0640"):
            reveal(store, "a")
        with refusal(Reason.TAMPERED, "^b: not stored: .*has mode 0640"):
            put(store, "b", b"two")
        with refusal(Reason.WRONG_STATE, "no key or passphrase helps"):
            unlock(store, b"k" * 32)
    _key_file(box).chmod(0o600)
    with box.opened() as store:
        assert reveal(store, "a") == b"one"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"k" * 32, deciding.WRONG_KEY),
        (b"k" * 31, "has 31 bytes"),
        (b"k" * 33, "larger than 32 bytes"),
        (b"", "has 0 bytes"),
        (None, "is missing"),
    ],
)
def test_a_wrong_key_file_is_named_by_credential(
    box: Box, content: bytes | None, expected: str
) -> None:
    with box.opened() as store:
        put(store, "a", b"one")
    right = _key_file(box).read_bytes()
    if content is None:
        _key_file(box).rename(box.keys / "away")
    else:
        _key_file(box).write_bytes(content)
    with box.opened() as store:
        assert expected in str(store.problem)
        assert expected in str(listed(store)["a"].problem)
        with refusal(Reason.TAMPERED, expected):
            reveal(store, "a")
    if content is None:
        (box.keys / "away").rename(next(iter(_names(box))))
    else:
        _key_file(box).write_bytes(right)
    with box.opened() as store:
        assert reveal(store, "a") == b"one"


def _names(box: Box) -> list[Path]:
    custody = Custody.decode((box.keys / "custody.json").read_bytes())
    return [box.keys / f"master-{custody.key}.key"]


@pytest.mark.usefixtures("fast_kdf")
def test_with_a_passphrase_it_comes_up_locked_and_says_so(box: Box) -> None:
    with box.opened() as store:
        put(store, "a", b"one")
        protect(store, "passphrase", b"open sesame")
        assert reveal(store, "a") == b"one"  # it stays open until it is started again
        assert not list(box.keys.glob("master-*"))
    with box.opened() as store:
        assert str(store.problem).startswith("locked: run `agent-box secret unlock`")
        assert store.seal_key().locked
        assert full_list(store).locked
        assert full_list(store).protection == "passphrase"
        assert listed(store)["a"].version == 1
        for verb in (lambda: reveal(store, "a"), lambda: put(store, "a", b"2")):
            with refusal(Reason.STORE_LOCKED, "secret unlock"):
                verb()
        with refusal(Reason.DENIED, "not the passphrase of the store"):
            unlock(store, b"open Sesame")
        assert full_list(store).locked
        with refusal(Reason.BAD_REQUEST, "passphrase is empty"):
            unlock(store, b"")
        unlock(store, b"open sesame")
        assert store.problem is None
        assert not full_list(store).locked
        assert reveal(store, "a") == b"one"
        unlock(store, b"anything")  # open already: as a repeated call would find it
        protect(store, "key-file")
    with box.opened() as store:
        assert store.problem is None
        assert reveal(store, "a") == b"one"


def test_the_real_passphrase_parameters_work(box: Box) -> None:
    with box.opened() as store:
        put(store, "a", b"one")
        protect(store, "passphrase", b"open sesame")
    custody = Custody.decode((box.keys / "custody.json").read_bytes())
    assert (custody.passes, custody.memory) == (3, 256 << 20)
    with box.opened() as store:
        unlock(store, b"open sesame")
        assert reveal(store, "a") == b"one"


@pytest.mark.parametrize("protection", ["keyring", "systemd-creds"])
def test_a_key_that_is_handed_in_opens_it(box: Box, protection: str) -> None:
    key = b"k" * 32
    with box.opened() as store:
        put(store, "a", b"one")
        blob = b"blob" if protection == "systemd-creds" else b""
        protect(store, protection, key, key="ab" * 16, blob=blob)  # type: ignore[arg-type]
        assert not list(box.keys.glob("master-*"))
    with box.opened(lambda: Handed(Secret(key), None)) as store:
        assert store.problem is None
        assert reveal(store, "a") == b"one"
    with box.opened(lambda: Handed(None, "no keyring answers")) as store:
        assert str(store.problem).startswith("locked: no keyring answers")
        assert full_list(store).locked
        with refusal(Reason.STORE_LOCKED, "no keyring answers"):
            reveal(store, "a")
        with refusal(Reason.DENIED):
            unlock(store, b"x" * 32)
        with refusal(Reason.DENIED):
            unlock(store, b"short")
        unlock(store, key)
        assert reveal(store, "a") == b"one"
    with box.opened(lambda: Handed(Secret(b"x" * 32), None)) as store:
        assert "gave a key that does not open" in str(store.problem)
        assert full_list(store).locked


def test_what_is_handed_in_is_not_asked_for_under_other_protections(box: Box) -> None:
    def never() -> Handed:
        raise AssertionError("asked")

    for _ in range(2):
        with box.opened(never) as store:
            assert store.problem is None


@pytest.mark.parametrize(
    ("protection", "secret", "why"),
    [
        ("key-file", b"k" * 32, "a secret belongs to"),
        ("passphrase", None, "a secret belongs to"),
        ("keyring", None, "a secret belongs to"),
        ("keyring", b"k" * 31, "a key has 32 bytes"),
        ("passphrase", b"", "passphrase is empty"),
        ("passphrase", b"a\nb", "line end"),
    ],
)
def test_a_protection_that_makes_no_sense_is_refused_and_changes_nothing(
    box: Box, protection: str, secret: bytes | None, why: str
) -> None:
    with box.opened() as store:
        before = _contents(box)
        with refusal(Reason.BAD_REQUEST, why):
            protect(store, protection, secret)  # type: ignore[arg-type]
        assert _contents(box) == before


@pytest.mark.parametrize("member", ["passes", "memory"])
def test_an_impossible_derivation_is_not_begun(box: Box, member: str) -> None:
    """The file could ask for more memory than there is, at every attempt."""
    with box.opened() as store:
        put(store, "a", b"one")
    path = box.keys / "custody.json"
    custody = Custody.decode(path.read_bytes())
    changed = {**custody.__dict__, "protection": "passphrase", "salt": b"s" * 16}
    changed |= {"passes": 3, "memory": 8 << 20, member: (1 << 40) - 1}
    path.write_bytes(Custody(**changed).encode())
    with box.opened() as store, refusal(Reason.TAMPERED, "impossible derivation"):
        unlock(store, b"word")


def test_a_passphrase_that_is_tried_many_times_at_once_takes_memory_once(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio
    import threading

    inside, most, lock = 0, 0, threading.Lock()

    def derive(*arguments: object) -> Secret:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        threading.Event().wait(0.02)
        with lock:
            inside -= 1
        return Secret(b"x" * 32)

    with box.opened() as store:
        monkeypatch.setattr(seal, "KDF_PASSES", 1)
        monkeypatch.setattr(seal, "KDF_MEMORY", 8 << 20)
        protect(store, "passphrase", b"word")
    with box.opened() as store:
        monkeypatch.setattr(seal, "key_of_passphrase", derive)

        async def many() -> list[object]:
            calls = [store.unlock(Unlock(secret=sealed(store, b"guess"))) for _ in range(6)]
            return await asyncio.gather(*calls, return_exceptions=True)

        results = run(many())
    assert all(isinstance(r, Refusal) and r.reason is Reason.DENIED for r in results)
    assert most == 1


def test_too_little_memory_for_a_passphrase_is_a_clear_refusal(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> Secret:
        raise MemoryError("Argon2id needs 256 MiB of memory")

    with box.opened() as store:
        put(store, "a", b"one")
        monkeypatch.setattr(seal, "key_of_passphrase", fails)
        with refusal(Reason.EXHAUSTED, "Argon2id needs 256 MiB"):
            protect(store, "passphrase", b"word")
        assert reveal(store, "a") == b"one"
    with box.opened() as store:
        assert reveal(store, "a") == b"one"


# ------------------------------------------------------------------------- a disk that fails

_ON_A_SMALL_DISK = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from agent_box.bus.errors import Reason, Refusal
from support.stores import Box, protect, put, reveal, listed, remove
os.umask(0o077)
box = Box(Path(sys.argv[2]))
Path(sys.argv[2], "somebody-else").write_bytes(bytes(600_000))
with box.opened() as store:
    put(store, "a", b"first")
    stored, refused = 0, None
    for number in range(1000):
        try:
            put(store, f"n{number}", os.urandom(20_000).hex().encode()[:30_000])
            stored += 1
        except Refusal as refusal:
            refused = refusal
            break
    assert refused is not None and refused.reason is Reason.DISK_FULL, repr(refused)
    assert "nothing has changed" in refused.message and f"n{stored}" not in listed(store)
    # small writes may still fit into what SQLite has allocated; each says yes or no truly
    values = {}
    for number in range(30):
        try:
            put(store, "a", b"%d" % number)
            values["a"] = b"%d" % number
        except Refusal as refusal:
            assert refusal.reason is Reason.DISK_FULL, repr(refusal)
    before = values.get("a", b"first")
    assert reveal(store, "a") == before
    with open(sys.argv[2] + "/filler", "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(512))
        except OSError:
            pass
    try:
        protect(store, "key-file")
    except Refusal as refusal:
        assert refusal.reason is Reason.DISK_FULL, repr(refusal)
        print("protect refused")
    assert reveal(store, "a") == before
with box.opened() as store:
    assert store.problem is None, store.problem
    assert reveal(store, "a") == before
    assert len(listed(store)) == stored + 1
    assert not any(c.problem for c in listed(store).values())
    os.unlink(sys.argv[2] + "/somebody-else")
    remove(store, "n0")
    put(store, "b", b"room again")
with box.opened() as store:
    assert reveal(store, "b") == b"room again"
print("stored", stored)
"""


def test_a_full_disk_is_a_clear_refusal_and_loses_nothing(tmp_path: Path) -> None:
    done = _on_a_disk_of("size=1500k", tmp_path, _ON_A_SMALL_DISK)
    assert "protect refused" in done
    assert "stored" in done


def test_a_first_start_on_a_full_disk_is_a_problem_and_the_next_one_works(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.stores import Box, put, reveal
os.umask(0o077)
box = Box(Path(sys.argv[2]))
filler = os.open(sys.argv[2] + "/filler", os.O_CREAT | os.O_WRONLY)
try:
    while True:
        os.write(filler, bytes(4096))
except OSError:
    pass
with box.opened() as store:
    assert store.problem is not None
    print(store.problem)
os.ftruncate(filler, 0)
with box.opened() as store:
    assert store.problem is None, store.problem
    put(store, "a", b"one")
    assert reveal(store, "a") == b"one"
"""
    assert "o space left on device" in _on_a_disk_of("size=600k", tmp_path, script)


def test_a_read_only_disk_is_a_clear_refusal(tmp_path: Path) -> None:
    script = """
import ctypes, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.stores import Box, put, reveal
os.umask(0o077)
def remount(flags):  # MS_REMOUNT is 32, MS_RDONLY 1
    done = ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", sys.argv[2].encode(), b"tmpfs",
                                                   ctypes.c_ulong(flags), None)
    assert done == 0, os.strerror(ctypes.get_errno())
box = Box(Path(sys.argv[2]))
with box.opened() as store:
    put(store, "a", b"one")
remount(1 | 32)
with box.opened() as store:
    print(store.problem)
remount(32)
with box.opened() as store:
    assert reveal(store, "a") == b"one"
"""
    assert "read-only" in _on_a_disk_of("size=4m", tmp_path, script)


def _on_a_disk_of(options: str, mount_point: Path, script: str) -> str:
    """Runs a script with a small file system at `mount_point`, in namespaces of its own."""
    command = [
        "unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
        'mount -t tmpfs -o mode=700,"$1" tmpfs "$2" && shift && exec "$2" -c "$3" "$4" "$1"',
        "sh", options, str(mount_point), sys.executable, script,
        str(Path(__file__).parents[1]),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_sqlite_is_set_to_be_durable(box: Box) -> None:
    with box.opened() as store:
        assert store.database is not None
        sql: sqlite3.Connection = store.database.connection

        def pragma(name: str) -> object:
            return sql.execute(f"PRAGMA {name}").fetchone()[0]

        assert (pragma("journal_mode"), pragma("synchronous")) == ("wal", 2)
        assert pragma("locking_mode") == "exclusive"
        assert pragma("trusted_schema") == 0
        assert pragma("temp_store") == 2


def test_requests_of_the_wrong_kind_do_not_reach_the_disk(box: Box) -> None:
    with box.opened() as store:
        request = Protect(protection="keyring", key="../../x", secret=sealed(store, b"k" * 32),
                          blob=b"")  # fmt: skip
        before = _contents(box)
        with refusal(Reason.BAD_REQUEST, "a key's name"):
            run(store.protect(request))
        assert _contents(box) == before


def test_problem_is_none_for_a_healthy_store(box: Box) -> None:
    store: Store = box.open()
    assert store.problem is None
    store.close()
