"""A service is alone, and does not outlive what started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import procs
from support.house import House, inner_pid
from support.until import until

from agent_box.bus.errors import Refusal
from agent_box.bus.schema import Empty
from agent_box.process import lifeline

# Waits for the lock, says that it has it, and keeps it.
HOLD = (
    "import sys, signal\n"
    "from pathlib import Path\n"
    "from agent_box.process import lifeline\n"
    "try:\n"
    "    lifeline.alone(Path(sys.argv[1]), seconds=float(sys.argv[2]))\n"
    "except lifeline.Busy as busy:\n"
    "    print(busy, flush=True)\n"
    "    sys.exit(1)\n"
    "print('alone', flush=True)\n"
    "signal.pause()\n"
)


def hold(path: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-Ic", HOLD, str(path), str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(*all_processes: subprocess.Popen[str]) -> None:
    for process in all_processes:
        process.kill()
        process.communicate()


def test_one_is_alone_and_another_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = hold(path, 5)
    assert said(first) == "alone\n"
    second = hold(path, 0.1)
    assert "held" in said(second)
    assert second.wait(10) == 1
    end(first, second)


def test_who_waits_gets_it_when_the_other_dies(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = hold(path, 5)
    assert said(first) == "alone\n"
    second = hold(path, 60)
    first.kill()
    assert said(second) == "alone\n"
    end(first, second)


def test_who_waits_ends_with_its_lifeline(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = hold(path, 5)
    assert said(first) == "alone\n"
    second = hold(path, 600)
    assert second.stdin is not None
    second.stdin.close()
    assert second.wait(30) == 1
    second.stdin = None
    end(first, second)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        lifeline.alone(tmp_path / "lock", seconds=0)
    assert not (tmp_path / "elsewhere").exists()


def start(house: House, service: str) -> subprocess.Popen[str]:
    """As supervisord does it: a pipe is its standard input, which nobody else holds."""
    with house.paths.log(service).open("ab") as log:
        return subprocess.Popen(
            house.command(service),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            process_group=0,
            text=True,
        )


def ready(house: House, service: str) -> bool:
    try:
        with house.client(service) as client:
            return bool(client.call("hello", Empty(), deadline_s=2).ready)  # type: ignore[attr-defined]
    except Refusal:
        return False


def test_a_service_ends_at_once_when_its_supervisor_is_gone(house: House) -> None:
    """Even when the kernel does not kill it: here its parent goes on living."""
    process = start(house, "engine")
    until("it is ready", lambda: ready(house, "engine"))
    inner = inner_pid(process)
    assert inner is not None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 1
    assert procs.state(inner) in "XZ"


def test_a_service_dies_with_what_walls_it_in(house: House) -> None:
    process = start(house, "engine")
    until("it is ready", lambda: ready(house, "engine"))
    inner = inner_pid(process)
    assert inner is not None
    process.kill()
    process.communicate()
    until("it is gone", lambda: procs.state(inner) in "XZ", seconds=5)


def test_a_second_process_of_a_service_touches_nothing_of_the_first(house: House) -> None:
    first = start(house, "engine")
    until("it is ready", lambda: ready(house, "engine"))
    sock = house.paths.sock("engine").stat().st_ino
    begun = time.monotonic()
    second = start(house, "engine")
    assert second.wait(60) == 1
    assert time.monotonic() - begun > 1  # it waited for the first to be gone
    assert "still there" in house.log("engine")
    assert house.paths.sock("engine").stat().st_ino == sock
    assert ready(house, "engine")
    for process in (first, second):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
