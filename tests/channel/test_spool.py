"""The spool of a run: what is in it stays, and what a kill cut off is dropped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_box.channel.contract import Update
from agent_box.channel.spool import Kind, Record, Spool, SpoolError
from agent_box.channel.updates import BATCH_MAX, Updates


def made(path: Path) -> Spool:
    spool = Spool.create(path, b"{}", 1)
    spool.add(Kind.OUTPUT, b"one\n", 2)
    spool.add(Kind.CANCEL, b"timed-out", 3)
    spool.add(Kind.OUTPUT, b"two\n", 4)
    return spool


RECORDS = [
    Record(Kind.RUN, 1, b"{}"),
    Record(Kind.OUTPUT, 2, b"one\n"),
    Record(Kind.CANCEL, 3, b"timed-out"),
    Record(Kind.OUTPUT, 4, b"two\n"),
]


def test_what_was_put_in_comes_out(tmp_path: Path) -> None:
    spool = made(tmp_path / "s")
    assert spool.output == 8
    spool.close()
    again, records = Spool.open(tmp_path / "s")
    assert records == RECORDS
    assert again.output == 8
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    again.close()
    with pytest.raises(FileExistsError):
        Spool.create(tmp_path / "s", b"{}", 1)


def test_cut_at_any_byte_the_whole_records_stay_and_it_goes_on(tmp_path: Path) -> None:
    made(tmp_path / "s").close()
    data = (tmp_path / "s").read_bytes()
    first = len(data) - sum(len(r.data) + 13 for r in RECORDS[1:])
    for cut in range(len(data)):
        (tmp_path / "s").write_bytes(data[:cut])
        if cut < first:
            with pytest.raises(SpoolError):
                Spool.open(tmp_path / "s")
            continue
        spool, records = Spool.open(tmp_path / "s")
        assert records == RECORDS[: len(records)]
        spool.add(Kind.LEFT, b"", 9)
        spool.close()
        spool, again = Spool.open(tmp_path / "s")
        assert again == [*records, Record(Kind.LEFT, 9, b"")]
        spool.close()


def test_garbage_is_dropped_and_a_link_is_not_followed(tmp_path: Path) -> None:
    made(tmp_path / "s").close()
    with (tmp_path / "s").open("ab") as file:
        file.write(os.urandom(8) + b"\xff" * 100)
    spool, records = Spool.open(tmp_path / "s")
    spool.close()
    assert records[:4] == RECORDS
    (tmp_path / "link").symlink_to(tmp_path / "s")
    with pytest.raises(OSError, match="symbolic"):
        Spool.open(tmp_path / "link")


def test_a_full_disk_leaves_it_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = made(tmp_path / "s")
    before = (tmp_path / "s").read_bytes()

    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        spool.add(Kind.OUTPUT, b"three\n", 5)
    monkeypatch.undo()
    assert (tmp_path / "s").read_bytes() == before
    spool.close()


def test_updates_are_read_by_number(tmp_path: Path) -> None:
    updates = Updates(tmp_path / "u")
    wanted = [Update(at_ms=n, kind="plan", body='{"é": %d}' % n) for n in range(20)]  # noqa: UP031
    for each in wanted:
        updates.add(each)
    assert updates.read(0, 100) == wanted
    assert updates.read(5, 3) == wanted[5:8]
    assert updates.read(20, 3) == updates.read(99, 3) == []
    large = Update(at_ms=1, kind="plan", body="x" * (BATCH_MAX - 10))
    for _ in range(3):
        updates.add(large)
    assert updates.read(20, 3) == [large]
    updates.close()
    assert not (tmp_path / "u").exists()
