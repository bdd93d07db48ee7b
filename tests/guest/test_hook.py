"""The project hook, run by this host's bash."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_box.guest import hook, launch
from agent_box.guest.hook import Hook
from agent_box.guest.loop import Loop

LONG_S = 30.0  # a bound on a hang
BEFORE = {"PATH": "/usr/bin:/bin", "HOME": "/", "KEPT": "1", "CHANGED": "1"}

Run = Callable[..., Hook]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(script: str | None, *, expected: bool = True) -> Hook:
        path = tmp_path / "it's a hook.sh"
        if script is not None:
            path.write_text(script)
        loop = Loop()
        ends: list[str] = []
        made = Hook(loop, lambda: ends.append(made.state), launch.Ground(None, str(tmp_path), "/"))
        before = set(os.listdir("/proc/self/fd"))
        made.begin(str(path), BEFORE, expected=expected)
        until = time.monotonic() + LONG_S
        while not ends:
            assert time.monotonic() < until
            loop.later(0.05, lambda: None)
            loop.turn()
        assert set(os.listdir("/proc/self/fd")) == before
        loop.close()
        assert ends == [made.state]
        return made

    return run


def test_what_it_exports_is_found(run: Run, tmp_path: Path) -> None:
    made = run("echo noise\nexport CHANGED=2 NEW=$'a\\nb=c'\nHERE=1\nexport WHERE=$PWD")
    assert made.state == "done"
    assert made.exported == {"CHANGED": "2", "NEW": "a\nb=c", "WHERE": str(tmp_path)}


def test_its_end_is_an_exit_too(run: Run) -> None:
    assert run("export A=1\nexit 0\nexport A=2").exported == {"A": "1"}
    assert run("export A=1\nexit 4").text == "it ended with status 4"


def test_a_failure_tells_its_last_lines(run: Run) -> None:
    made = run("for n in $(seq 20); do echo line $n; done; echo bad >&2; false")
    assert made.state == "failed" and made.exported == {}
    assert made.text.startswith("it ended with status 1: line 14 | line 15")
    assert made.text.endswith("line 20 | bad")


def test_a_signal_is_a_failure(run: Run) -> None:
    assert run("kill -9 $$").text == "it was ended by signal 9"


def test_none_is_no_failure_unless_it_is_expected(run: Run) -> None:
    assert run(None, expected=False).state == "none"
    made = run(None, expected=True)
    assert (made.state, made.text) == ("failed", "there is no such file")


def test_one_that_hangs_is_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "SECONDS", 0.3)
    made = run("echo waiting; sleep 1000")
    assert made.state == "failed" and made.text == "it took longer than 0 s: waiting"


def test_a_child_that_it_leaves_keeps_nobody_waiting(run: Run) -> None:
    made = run("sleep 20 & export PID=$!")
    assert made.state == "done"
    os.kill(int(made.exported["PID"]), 9)


def test_one_that_exports_too_much_fails(run: Run) -> None:
    made = run("export A=$(head -c 100000 /dev/zero | tr '\\0' x) B C\nB=$A\nC=$A")
    assert made.state == "failed" and "over" in made.text
