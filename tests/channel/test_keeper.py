"""Whom to keep on time over a restart, and when a clock jumped."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_box.channel.keeper import FILE, Clocks, Jumps, Kept

HOUR = 3600 * 10**9


def kept(directory: Path) -> Kept:
    def failed(error: OSError) -> None:
        raise error

    return Kept(directory, failed)


def test_they_are_there_after_a_restart(tmp_path: Path) -> None:
    before = kept(tmp_path)
    before.add("a", 1)
    before.add("b", 2)
    before.drop("a", 1)
    before.drop("b", 1)  # another boot
    assert kept(tmp_path).boots == {"b": 2}


@pytest.mark.parametrize(
    "untrusted", [b"", b"{", b"[1]", b"null", b"\xff", b'{"a": "1", "b": true}', b"[" * 100_000]
)
def test_a_file_that_is_none_is_nobody(tmp_path: Path, untrusted: bytes) -> None:
    (tmp_path / FILE).write_bytes(untrusted)
    made = kept(tmp_path)
    assert made.boots == {}
    made.add("a", 1)
    assert kept(tmp_path).boots == {"a": 1}


def test_a_full_disk_is_told_and_nothing_is_lost_now(tmp_path: Path) -> None:
    told: list[OSError] = []
    made = Kept(tmp_path / "absent", told.append)
    made.add("a", 1)
    assert made.boots == {"a": 1}
    assert len(told) == 1


def test_a_jump_is_noticed_once_and_a_tick_is_none() -> None:
    now = {"wall": 10 * HOUR, "steady": 0}
    jumps = Jumps(Clocks(wall=lambda: now["wall"], steady=lambda: now["steady"]))
    for step in (10**9, HOUR):  # time passes on both
        now["wall"] += step
        now["steady"] += step
        assert not jumps.jumped()
    for by in (4 * HOUR, -4 * HOUR, 300_000_000):
        now["wall"] += by
        assert jumps.jumped()
        assert not jumps.jumped()
    for _ in range(3):  # slewed, a little at a time
        now["wall"] += 60_000_000
        assert not jumps.jumped()
    now["wall"] += 60_000_000
    assert jumps.jumped()
