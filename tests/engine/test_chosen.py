"""What setup keeps of the accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_box.engine import chosen


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / chosen.FILE
    assert chosen.read(file) is None
    for accel in ("kvm", "tcg"):
        chosen.write(file, accel)
        assert chosen.read(file) == accel
    assert [p.name for p in tmp_path.iterdir()] == [chosen.FILE]


@pytest.mark.parametrize("text", ["", "accel = 1", 'accel = "xen"', "\xff", "accel", "[accel]"])
def test_what_is_not_ours_chooses_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / chosen.FILE
    file.write_bytes(text.encode("latin-1"))
    assert chosen.read(file) is None
