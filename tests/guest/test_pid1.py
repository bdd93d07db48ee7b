"""PID 1 goes on: its loop is played with everything below it made to fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from agent_box.guest import pid1, system
from agent_box.guest.pid1 import RESPAWN_S, STEADY_S, Respawn
from agent_box.guest.ports import Inherited


class Stop(BaseException):
    """Ends the loop: nothing else may."""


def test_the_wait_grows_with_each_death_and_begins_anew_after_a_steady_life() -> None:
    respawn, now, waits = Respawn(), 100.0, []
    for _ in range(7):
        now += respawn.wait(now)
        respawn.started(5, now)
        assert respawn.wait(now) == pid1.FOREVER_S
        assert respawn.ended(5, now)
        waits.append(respawn.wait(now))
    assert [round(w, 3) for w in waits] == [*RESPAWN_S, RESPAWN_S[-1], RESPAWN_S[-1]]
    respawn.started(6, now)
    assert respawn.ended(6, now + STEADY_S + 1)
    assert respawn.wait(now + STEADY_S + 1) == 0


def test_another_process_is_not_the_agent() -> None:
    respawn = Respawn()
    assert not respawn.ended(0, 1.0)
    respawn.started(5, 1.0)
    assert not respawn.ended(6, 1.0)
    assert respawn.ended(5, 1.0)
    assert not respawn.ended(5, 1.0)  # the number is somebody else's by now


class Loop:
    """`pid1.main` with everything below it replaced; `turns` says what each wait meets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *turns: Any) -> None:
        self.turns = list(turns)
        self.forks = 0
        self.fork_fails = 0
        self.now = 1000.0
        self.logged: list[str] = []
        self.ended: list[tuple[int, int]] = []
        monkeypatch.setattr(pid1, "_mounts", lambda: None)
        monkeypatch.setattr(pid1, "_tun", lambda: None)
        monkeypatch.setattr(pid1, "listeners", dict)
        monkeypatch.setattr(pid1, "_fork", self._fork)
        monkeypatch.setattr(pid1, "_reap", lambda: self.ended.pop(0) if self.ended else None)
        monkeypatch.setattr(pid1.signal, "signal", lambda *_: None)
        monkeypatch.setattr(pid1.signal, "pthread_sigmask", lambda *_: None)
        monkeypatch.setattr(pid1.signal, "sigtimedwait", self._wait)
        monkeypatch.setattr(pid1.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(system, "log", self.logged.append)
        monkeypatch.setattr(system, "prepare_log", lambda: None)

    def run(self) -> None:
        with pytest.raises(Stop):
            pid1.main()

    def _fork(self, _inherited: Inherited) -> int:
        if self.fork_fails:
            self.fork_fails -= 1
            raise BlockingIOError("no process can be made")
        self.forks += 1
        return 100 + self.forks

    def _wait(self, _signals: object, seconds: float) -> None:
        self.now += seconds
        if not self.turns:
            raise Stop
        turn = self.turns.pop(0)
        if isinstance(turn, BaseException):
            raise turn
        self.ended += turn


def test_a_dead_agent_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, [(101, -9)], [(7, 0), (102, 1)], [], [(55, -11)])
    loop.run()
    assert loop.forks == 3
    assert loop.logged == [
        "the agent process 101 ended with status -9",
        "the agent process 102 ended with status 1",
    ]


@pytest.mark.parametrize(
    "error", [OSError("x"), MemoryError(), RuntimeError("y"), RecursionError()]
)
def test_no_exception_ends_it(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    loop = Loop(monkeypatch, error, [(101, 0)], error, error, [])
    loop.run()
    assert loop.forks == 2


def test_a_full_process_table_is_met_with_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, [], [], [])
    loop.fork_fails = 3
    loop.run()
    assert loop.forks == 1
    assert loop.now >= 1000 + 3 * RESPAWN_S[-1]  # no turn without a wait
    assert len(loop.logged) == 3


def test_without_a_port_the_machine_goes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    off: list[bool] = []

    def fail() -> None:
        raise OSError("no vsock")

    monkeypatch.setattr(pid1, "listeners", fail)
    monkeypatch.setattr(system, "power_off", lambda: off.append(True))
    pid1.main()
    assert off == [True]
    assert "no vsock" in loop.logged[0]


CHILD = """
import os, sys
from agent_box.guest import pid1, system
pid1._mounts = lambda: None
pid1._tun = lambda: None
pid1.listeners = dict
def fork(inherited):
    pid = os.fork()
    if pid == 0:
        while True:
            import time; time.sleep(60)
    print(pid, flush=True)
    return pid
pid1._fork = fork
pid1.main()
"""


def test_signals_do_not_end_it_and_orphans_are_reaped() -> None:
    """As a process of this host, which has no kernel to drop signals for it: so only those that
    it ignores or waits for itself."""
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        first = int(process.stdout.readline())
        for number in (*pid1.IGNORED, signal.SIGCHLD):
            process.send_signal(number)
        os.kill(first, signal.SIGKILL)
        second = int(process.stdout.readline())
        assert second != first and process.poll() is None
        os.kill(second, signal.SIGKILL)
        third = int(process.stdout.readline())
        assert not os.path.exists(f"/proc/{first}") and not os.path.exists(f"/proc/{second}")
        os.kill(third, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_log_that_nobody_reads_blocks_nobody() -> None:
    code = (
        "import os; from agent_box.guest import system; r, w = os.pipe(); os.dup2(w, 2);"
        "system.prepare_log();"
        "[system.log('x' * 10000 + chr(10) + chr(0xd800)) for _ in range(1000)];"
        "os.close(2); system.log('gone')"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
