"""Walls that a killed daemon left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_box.process.confine import BWRAP
from agent_box.process.leftovers import end_walls
from agent_box.process.paths import Paths

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Processes that wait, with a command line of the test's choice."""
    made: list[subprocess.Popen[bytes]] = []

    def start(*words: str, name: str = BWRAP) -> subprocess.Popen[bytes]:
        waits = "import sys; print(flush=True); sys.stdin.read()"
        made.append(
            subprocess.Popen(
                [name, "-c", waits, *words],
                executable=sys.executable,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert made[-1].stdout is not None
        made[-1].stdout.readline()
        return made[-1]

    yield start
    for each in made:
        each.kill()
        each.communicate()


def test_walls_of_this_runtime_directory_are_ended_and_nothing_else(
    spawn: Spawn, tmp_path: Path
) -> None:
    paths = Paths(runtime=tmp_path / "run", state=tmp_path / "state")
    service = ("--", "python3", "-I", "-B", "-m", "agent_box.registry", "--runtime")
    wall = spawn(*service, str(paths.runtime), "--state", str(paths.state))
    others = [
        spawn(*service, str(tmp_path / "run2")),
        spawn(*service, str(paths.runtime), name="/usr/bin/other"),
        spawn(*service),
        spawn("--", "python3", "-m", "agent_box.helper", "--runtime", str(paths.runtime)),
        spawn("--ro-bind", str(paths.runtime), "/run", "--", "qemu"),
    ]
    assert end_walls(paths) == [wall.pid]
    assert wall.wait(60) == -signal.SIGKILL
    assert [each.poll() for each in others] == [None] * len(others)
    assert end_walls(paths) == []


def test_a_process_that_ends_meanwhile_is_no_error(tmp_path: Path) -> None:
    paths = Paths(runtime=tmp_path / "run", state=tmp_path / "state")
    ended = subprocess.Popen(["true"], stdin=subprocess.DEVNULL)
    ended.wait()
    proc = tmp_path / "proc"
    (proc / str(ended.pid)).mkdir(parents=True)
    (proc / "self").mkdir()
    words = [BWRAP, "-m", "agent_box.store", "--runtime", str(paths.runtime)]
    (proc / str(ended.pid) / "cmdline").write_bytes(b"\0".join(map(os.fsencode, words)))
    assert end_walls(paths, proc) == []
