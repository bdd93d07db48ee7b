"""What programs in the guest write for the operator."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_box.guest import claims, warnings
from agent_box.guest.events import Events
from agent_box.guest.loop import Loop
from agent_box.guest.warnings import Warnings


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


class Told(Events):
    """Keeps what is told, and does not count it against the rate of all."""

    def tell(self, kind: str, **facts: object) -> None:
        assert kind == "guest-warning" and claims.good(kind, {**facts, "dropped": 0})
        lines.append(str(facts["text"]))

    @property
    def dropped(self) -> int:
        return self._dropped


lines: list[str] = []


@pytest.fixture
def told(loop: Loop, tmp_path: Path) -> Told:
    lines.clear()
    made = Told(loop)
    Warnings(loop, made, str(tmp_path))
    return made


def write(tmp_path: Path, data: bytes) -> None:
    fd = os.open(tmp_path / "agent-box" / "warnings", os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, data)
    os.close(fd)


def test_a_line_is_told_and_any_program_may_write(loop: Loop, told: Told, tmp_path: Path) -> None:
    write(tmp_path, b"first\nsec")
    loop.turn()
    write(tmp_path, b"ond \xc3\xa9\n\n \n")
    loop.turn()
    assert lines == ["first", "second é"]
    assert stat.S_IMODE(os.stat(tmp_path / "agent-box" / "warnings").st_mode) == 0o622


def test_what_it_holds_is_text_and_not_long(loop: Loop, told: Told, tmp_path: Path) -> None:
    write(tmp_path, b"\x1b]0;title\x07 \xff" + b"x" * 4000)
    for _ in range(3):
        write(tmp_path, b"y" * 4000)
        loop.turn()
    write(tmp_path, b"\n")
    loop.turn()
    assert len(lines) == 1 and len(lines[0]) == claims.TEXT_MAX
    assert lines[0].startswith("]0;title  \ufffdxx") and lines[0].isprintable()


def test_too_many_are_counted_and_the_writer_waits(
    loop: Loop, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "PAUSE_S", 0.01)
    write(tmp_path, b"again\n" * 100)
    loop.turn()
    assert len(lines) == warnings.BURST and told.dropped == 100 - warnings.BURST
    write(tmp_path, b"more\n")
    loop.turn()  # the pause is over
    loop.turn()
    assert told.dropped == 101 - warnings.BURST


def test_links_are_not_followed(
    loop: Loop, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "agent-box").symlink_to(elsewhere)
    Warnings(loop, Told(loop), str(run))
    assert list(elsewhere.iterdir()) == []
    assert "no program can warn" in capfd.readouterr().err


def test_an_agent_process_after_another_makes_it_anew(loop: Loop, tmp_path: Path) -> None:
    lines.clear()
    for _ in range(2):
        Warnings(loop, Told(loop), str(tmp_path))
    write(tmp_path, b"fresh\n")
    loop.turn()
    assert lines == ["fresh"]
