"""The agent's group: made once or again, joined or refused. tests/engine/test_machine.py has
the fork bomb."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_box.guest import processes


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that looks as the kernel's does."""
    (tmp_path / "threads-max").write_text("1900\n")
    monkeypatch.setattr(processes, "ROOT", str(tmp_path))
    monkeypatch.setattr(processes, "THREADS_MAX", str(tmp_path / "threads-max"))
    return tmp_path


def test_it_is_made_and_joined(group: Path) -> None:
    for _ in range(2):  # an agent process that died made it already
        processes.prepare()
        assert (group / "agent" / "pids.max").read_text() == "950"
    assert (group / "cgroup.subtree_control").read_text() == "+pids +cpu"
    processes.join()
    assert (group / "agent" / "cgroup.procs").read_text() == "0"


def test_a_small_machine_can_still_work(group: Path) -> None:
    (group / "threads-max").write_text("100\n")
    assert processes.limit() == processes.LEAST


def test_without_a_group_nothing_is_started(
    group: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "ROOT", str(group / "none"))
    processes.prepare()
    assert "not counted" in capfd.readouterr().err
    with pytest.raises(OSError):
        processes.join()
