"""The user unit, by a systemctl that notes what it is told; and what is chosen to run guests."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_box.cli import link, setup
from agent_box.cli.render import Failure, Render
from agent_box.config.load import load
from agent_box.engine import chosen
from agent_box.process.paths import Paths


class Told:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, text: str) -> int:
        self.lines.append(text)
        return len(text)

    def flush(self) -> None: ...


@pytest.fixture
def out() -> Render:
    return Render("setup", json=False, stdout=Told(), stderr=Told())  # type: ignore[arg-type]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with systemd; the file has a line for each call of systemctl."""
    bin, noted = tmp_path / "bin", tmp_path / "calls"
    bin.mkdir()
    fake = bin / "systemctl"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {noted}\nexit 0\n')
    fake.chmod(0o755)
    program = bin / "agent-box"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setattr(setup, "SYSTEMD", tmp_path)
    monkeypatch.setattr("sys.argv", ["agent-box", "setup"])
    return noted


def test_the_unit_is_installed_and_taken_away(out: Render, calls: Path, tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "AGENT_BOX_CONFIG": "/a b/c.toml"}
    path = setup._install_unit(out, env)
    assert path == tmp_path / "config/systemd/user/agent-box.service"
    lines = path.read_text().splitlines()
    assert "KillMode=process" in lines
    assert f'ExecStart="{tmp_path}/bin/agent-box" daemon' in lines
    assert 'Environment="AGENT_BOX_CONFIG=/a b/c.toml"' in lines
    assert setup._remove_unit(out, env) == path
    assert calls.read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable agent-box.service",
        "--user disable --now agent-box.service",
        "--user daemon-reload",
    ]
    assert not (tmp_path / "config/systemd").exists()
    assert setup._remove_unit(out, env) is None


def test_without_systemd_it_says_so(
    out: Render, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "SYSTEMD", tmp_path / "none")
    assert setup._install_unit(out, {"HOME": str(tmp_path)}) is None
    assert "systemd does not run here" in "".join(out._stderr.lines)  # type: ignore[union-attr]
    assert list(tmp_path.iterdir()) == []


def test_a_systemctl_that_fails_is_told(out: Render, calls: Path, tmp_path: Path) -> None:
    (tmp_path / "bin/systemctl").write_text("#!/bin/sh\necho 'no bus' >&2\nexit 1\n")
    with pytest.raises(Failure, match="daemon-reload: no bus"):
        setup._install_unit(out, {"XDG_CONFIG_HOME": str(tmp_path / "config")})


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("/a", '"/a"'),
        ("/a b", '"/a b"'),
        ('/"', '"/\\""'),
        ("/%h", '"/%%h"'),
        ("/$x", '"/$$x"'),
        ("/\\", '"/\\\\"'),
    ],
)
def test_words_are_quoted_as_systemd_reads_them(word: str, text: str) -> None:
    assert setup._quoted(word) == text


def test_a_control_character_is_refused() -> None:
    with pytest.raises(Failure, match="control characters"):
        setup.unit_text(Path("/x"), {"AGENT_BOX_CONFIG": "/a\nExecStart=/evil"})


class Host:
    """Where guests run as `runs` says, by what the engine would read."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch, opens: bool) -> None:
        self.here = link.Place(Paths(state / "run", state), None)
        self.file = chosen.file(self.here.paths)
        self.file.parent.mkdir(parents=True)
        self.tried: list[tuple[str | None, float | None]] = []
        self.runs: Callable[[str | None], str | None] = lambda accel: None
        monkeypatch.setattr(setup, "_runs", self._run)
        monkeypatch.setattr(setup, "_no_kvm", lambda: None if opens else "/dev/kvm: no")

    def _run(self, out: Render, within_s: float | None) -> str | None:
        accel = chosen.read(self.file)
        self.tried.append((accel, within_s))
        return self.runs(accel)

    def choose(self, out: Render) -> Any:
        return setup._accelerator(out, self.here, load(None), "an image")


@pytest.mark.parametrize("opens", [True, False])
def test_kvm_that_runs_no_guest_is_told_and_tcg_chosen(
    out: Render, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    host = Host(tmp_path, monkeypatch, opens)
    host.runs = lambda accel: "it aborts" if accel == "kvm" else None
    assert host.choose(out)["accel"] == chosen.read(host.file) == "tcg"
    assert [accel for accel, _ in host.tried] == (["kvm", "tcg"] if opens else ["tcg"])
    assert host.tried[-1][1] is None  # the last resort has as long as any start
    why = "it aborts" if opens else "/dev/kvm: no"
    assert f"accelerator: tcg, because with kvm: {why}" in "".join(out._stderr.lines)  # type: ignore[union-attr]


def test_who_may_not_open_kvm_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    assert re.search("Permission denied; .* group .* log in again", setup._no_kvm() or "")


@pytest.mark.parametrize("before", [None, "tcg"])
@pytest.mark.parametrize("ends", [Failure, KeyboardInterrupt])
def test_what_ran_no_guest_is_not_chosen(
    out: Render,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: chosen.Accel | None,
    ends: type[BaseException],
) -> None:
    host = Host(tmp_path, monkeypatch, opens=True)
    if before is not None:
        chosen.write(host.file, before)

    def runs(accel: str | None) -> str:
        if ends is KeyboardInterrupt:
            raise KeyboardInterrupt
        return f"{accel} has none"

    host.runs = runs
    with pytest.raises(ends, match="kvm has none; tcg has none" if ends is Failure else None):
        host.choose(out)
    assert chosen.read(host.file) == before
