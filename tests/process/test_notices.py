"""A notice is there until it is told, is told once, and a broken one stops no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_box.process import notices


def test_what_is_left_is_read_oldest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((30, 10, 20))
    monkeypatch.setattr(notices, "_now_ms", lambda: next(times))
    for service in ("store", "broker", "engine"):
        notices.leave(tmp_path, service, "5 deaths")
    found = notices.read(tmp_path)
    assert [(n.service, n.at_ms) for n in found] == [("broker", 10), ("engine", 20), ("store", 30)]
    assert len({n.event_id for n in found}) == 3
    assert all(len(n.event_id) == 16 for n in found)
    notices.done(tmp_path, found[0])
    notices.done(tmp_path, found[0])  # two tellers: as good
    assert notices.read(tmp_path) == found[1:]


def test_no_directory_is_no_notice(tmp_path: Path) -> None:
    assert notices.waiting(tmp_path / "none") == []
    with pytest.raises(OSError):
        notices.leave(tmp_path / "none", "store", "5 deaths")


def test_a_reason_of_any_length_fits_into_an_event(tmp_path: Path) -> None:
    notices.leave(tmp_path, "store", "x" * 10_000)
    (found,) = notices.read(tmp_path)
    assert found.reason == "x" * notices.REASON_MAX


@pytest.mark.parametrize(
    "said",
    [
        b"", b"{", b"[]", b"null", b'"a"', b"{}", b"\xff", b"[" * 2000,
        b'{"service": 1, "reason": "", "at_ms": 0}',
        b'{"service": "a", "reason": null, "at_ms": 0}',
        b'{"service": "a", "reason": "", "at_ms": true}',
    ],
)  # fmt: skip
def test_what_is_no_notice_is_removed(tmp_path: Path, said: bytes) -> None:
    (tmp_path / ("a" * 32)).write_bytes(said)
    (tmp_path / "half.new").write_bytes(b"{")
    notices.leave(tmp_path, "store", "5 deaths")
    assert [n.service for n in notices.read(tmp_path)] == ["store"]
    assert not (tmp_path / ("a" * 32)).exists()


def test_they_do_not_fill_the_disk(tmp_path: Path) -> None:
    for _ in range(notices.KEPT_MAX + 3):
        notices.leave(tmp_path, "store", "5 deaths")
    assert len(notices.waiting(tmp_path)) == notices.KEPT_MAX
