"""supervisord as we run it, over stand-in programs: what it starts, starts again, ends."""

from __future__ import annotations

import json
import os
import random
import secrets
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import procs, supervised
from support.until import until

from agent_box.process.supervision import (
    LOG_BYTES,
    SOCKET_FILE,
    STOP_SECONDS,
    Control,
    ControlError,
    Program,
    Status,
    configuration,
)
from agent_box.process.watch import DEATHS, WITHIN_S, Deaths


class Running:
    def __init__(self, root: Path, *programs: list[str]) -> None:
        self.root = root
        self.directory = root / "run" / "supervisor"
        self.control = Control(self.directory)
        self.process = subprocess.Popen(
            [sys.executable, "-I", supervised.__file__, str(root), json.dumps(programs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "running\n"

    def status(self, name: str) -> Status:
        return self.control.statuses()[name]

    def pid(self, name: str) -> int:
        return until(f"{name} has a pid", lambda: self.status(name).pid or 0)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


Start = Callable[..., Running]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Shorter than pytest's: a socket below it has 107 bytes for its path."""
    with tempfile.TemporaryDirectory(prefix="ab-") as path:
        yield Path(path)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Running] = []

    def begin(*programs: list[str], root: Path | None = None, wait: bool = True) -> Running:
        running = Running(tmp_path if root is None else root, *programs)
        started.append(running)
        if wait:
            running.wait()
        return running

    yield begin
    for running in started:
        running.end()


def text(path: Path) -> str:
    """What a file holds; nothing when it is not there, e.g. in the middle of a rotation."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def sleeper(fraction: str = "") -> list[str]:
    """A program that lives long; with digits of its own in its command line."""
    return ["/bin/sh", "-c", f"exec sleep 1000{fraction}"]


# ------------------------------------------------------------------- configuration

ARGUMENT = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=("Cs",)))


@settings(deadline=None)
@given(words=st.lists(ARGUMENT, min_size=1, max_size=5))
def test_every_argument_reaches_the_program_as_it_is(words: list[str]) -> None:
    """Through supervisord's own reader: its comments, its % and its shell words."""
    from supervisor.options import UnhosedConfigParser, expand

    text = configuration(
        [Program("store", ("/bin/x", *words))], report=(), password="p", silent=True
    )
    parser = UnhosedConfigParser()
    parser.read_string(text)
    value = expand(parser.get("program:store", "command"), {"here": "/"}, "command")
    assert shlex.split(value) == ["/bin/x", *words]


@pytest.mark.parametrize("bad", ["a\nb", "a\rb", "a\0b"])
def test_an_argument_that_supervisord_cannot_hold_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        configuration([Program("store", ("/bin/x", bad))], report=(), password="p", silent=True)


def test_the_password_is_not_in_the_configuration() -> None:
    password = secrets.token_urlsafe(32)
    assert password not in configuration([], report=(), password=password, silent=True)


def test_awkward_directories_and_arguments(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "a ;b # %d %(here)s \"'"
    root.mkdir()
    out = tmp_path / "out"
    words = ["", "a ;b", " #c", "%d", "%(here)s", '"', "'", "\\", "$HOME", "*", "é"]
    start(["store", "/bin/sh", "-c", 'printf "%s\\n" "$@" > "$0"; exec sleep 99', str(out), *words],
          root=root)  # fmt: skip
    expected = "\n".join(words) + "\n"
    assert until("the arguments", lambda: out.exists() and out.read_text()) == expected
    assert (root / "state/logs/store.log").exists()


# ------------------------------------------------------------------ deaths, purely


def test_five_deaths_within_the_time_are_too_many() -> None:
    deaths = Deaths()
    assert [deaths.count(t) for t in (0.0, 1.0, 2.0, 3.0, 4.0)] == [1, 2, 3, 4, DEATHS]


def test_deaths_that_lie_further_back_do_not_count() -> None:
    deaths = Deaths()
    assert [deaths.count(t * WITHIN_S / 3.9) for t in range(20)][-1] == 4
    assert deaths.count(10_000.0) == 1


def test_forgotten_deaths_do_not_count() -> None:
    deaths = Deaths()
    for _ in range(4):
        deaths.count(0.0)
    deaths.forget()
    assert deaths.count(0.0) == 1


# ------------------------------------------------------------------- life and death


def test_a_killed_program_is_started_again(start: Start) -> None:
    running = start(["store", *sleeper()])
    first = running.pid("store")
    assert running.status("store").restarts == 0
    os.kill(first, signal.SIGKILL)
    until("another pid", lambda: running.status("store").pid not in (None, first))
    status = running.status("store")
    assert status.restarts == 1
    assert status.state in ("starting", "running")
    assert status.reason is None


def test_a_program_that_ends_well_is_started_again(start: Start) -> None:
    """A service that was drained through the bus exits with 0 and must come back."""
    running = start(["store", "/bin/sh", "-c", 'read x < "$0" && exit 0; sleep 99', "/dev/null"],
                    ["engine", *sleeper()])  # fmt: skip
    assert until("it runs", lambda: running.status("store").state == "running")
    fifo = running.root / "fifo"
    os.mkfifo(fifo)
    again = start(["store", "/bin/sh", "-c", 'read x < "$0"; exit 0', str(fifo)],
                  root=running.root / "b")  # fmt: skip
    first = again.pid("store")
    fifo.write_text("x\n")
    until("another pid", lambda: again.status("store").pid not in (None, first))


def test_five_rapid_deaths_keep_it_down_until_it_is_started(start: Start) -> None:
    running = start(["store", "/bin/sh", "-c", "exit 3"], ["engine", *sleeper()])
    until("fatal", lambda: running.status("store").state == "fatal")
    status = running.status("store")
    assert status.pid is None
    assert status.uptime_ms is None
    assert status.restarts == DEATHS - 1
    assert status.reason == "5 deaths in 30 s, the last with exit status 3"
    assert running.status("engine").state == "running"
    # The operator's start forgets them: it has five lives again.
    running.control.start("store")
    until("more starts", lambda: running.status("store").restarts == 2 * DEATHS - 1)
    until("fatal again", lambda: running.status("store").state == "fatal")
    log = (running.root / "state/logs/daemon.log").read_text()
    assert "store failed and stays down: 5 deaths" in log


def test_its_own_word_that_it_cannot_run_is_believed_at_once(start: Start) -> None:
    running = start(["store", "/bin/sh", "-c", "exit 71"])
    until("fatal", lambda: running.status("store").state == "fatal")
    assert running.status("store").restarts == 0
    assert "its log" in (running.status("store").reason or "")


def test_a_program_that_is_not_there_has_a_reason(start: Start) -> None:
    running = start(["store", "/no/such/program"])
    until("a reason", lambda: running.status("store").state in ("backoff", "fatal"))


def test_stop_and_start(start: Start) -> None:
    running = start(["store", *sleeper()])
    first = running.pid("store")
    running.control.stop("store")
    assert running.status("store").state == "stopped"
    assert procs.state(first) == "X"
    running.control.stop("store")  # stopped already: as good
    running.control.start("store")
    assert running.pid("store") != first
    running.control.start("store")  # runs already: as good


# Ignores nothing until it is told that it may: as a service does that is still starting.
LATE = """\
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
def end(*_):
    print("finished", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
while True: signal.pause()
"""


def late(root: Path, go: Path) -> list[str]:
    program = root / "late.py"
    program.write_text(LATE)
    return [sys.executable, "-I", str(program), str(go)]


def test_a_stop_lets_it_finish_and_reaches_the_whole_group(start: Start, tmp_path: Path) -> None:
    """The outer process ignores SIGTERM, the inner one acts on it: so it is with bubblewrap."""
    go = tmp_path / "go"
    go.touch()
    running = start(["store", "/bin/sh", "-c", 'trap "" TERM; "$@"; exit 0', "sh",
                     *late(tmp_path, go)])  # fmt: skip
    log = running.root / "state/logs/store.log"
    until("it is up", lambda: "up" in text(log))
    begun = time.monotonic()
    running.control.stop("store")
    assert log.read_text().endswith("finished\n")
    assert time.monotonic() - begun < STOP_SECONDS - 1


def test_a_stop_reaches_a_program_that_was_not_listening_yet(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    running = start(["store", *late(tmp_path, go)])
    log = running.root / "state/logs/store.log"
    until("it is up", lambda: "up" in text(log))
    running.process.terminate()
    until("it stops", lambda: running.status("store").state == "stopping")
    go.touch()
    assert running.process.wait(STOP_SECONDS - 1) == 0
    assert log.read_text().endswith("finished\n")


def test_a_signal_in_the_first_moment_of_a_program_is_not_lost(start: Start) -> None:
    """When it is forked already and not yet the program, with supervisord's handlers."""
    names = ("registry", "store", "broker", "netstack", "channel", "engine")
    for n in range(5):
        running = start(*([s, *sleeper()] for s in names), wait=False)
        running.wait()
        time.sleep(n * 0.002)  # not a wait for anything: the moment is the test
        running.process.terminate()
        assert running.process.wait(STOP_SECONDS - 1) == 0


def test_an_unknown_program_is_an_error(start: Start) -> None:
    running = start(["store", *sleeper()])
    with pytest.raises(ControlError, match="BAD_NAME"):
        running.control.start("nobody")
    with pytest.raises(ControlError, match="BAD_NAME"):
        running.control.stop("nobody")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything_and_the_exit_is_0(start: Start, number: int) -> None:
    running = start(["store", *sleeper()], ["engine", *sleeper()])
    pids = [running.pid("store"), running.pid("engine")]
    running.process.send_signal(number)
    assert running.process.wait(20) == 0
    assert [procs.state(pid) for pid in pids] == ["X", "X"]
    assert not (running.directory / SOCKET_FILE).exists()


def test_no_program_outlives_supervisord_whenever_that_is_killed(tmp_path: Path) -> None:
    """Killed at any moment of its start too, when a child may not be a program yet."""
    dice = random.Random(5)
    for n in range(12):
        word = f".{secrets.randbits(60)}"
        root = tmp_path / str(n)
        names = ("registry", "store", "broker", "netstack", "channel", "engine")
        running = Running(root, *([s, *sleeper(word)] for s in names))
        running.wait()
        time.sleep(dice.uniform(0, 0.04))  # not a wait for anything: the moment is the test
        running.process.kill()
        running.process.wait()
        until("all gone", lambda word=word: not procs.with_word(word), seconds=5)
        running.end()


def test_a_stale_socket_does_not_stop_a_start(start: Start, tmp_path: Path) -> None:
    first = start(["store", *sleeper()])
    first.process.kill()
    first.process.wait()
    assert (first.directory / SOCKET_FILE).exists()
    second = start(["store", *sleeper()])
    assert second.pid("store")


# ---------------------------------------------------------------- the control socket


def test_the_control_socket_is_ours_alone(start: Start) -> None:
    running = start(["store", *sleeper()])
    for path, mode in ((running.directory, 0o700), (running.directory / SOCKET_FILE, 0o600),
                       (running.directory / "password", 0o600),
                       (running.directory / "supervisord.conf", 0o600)):  # fmt: skip
        assert stat.S_IMODE(path.stat().st_mode) == mode, path


def test_a_wrong_password_is_refused(start: Start) -> None:
    running = start(["store", *sleeper()])
    password = running.directory / "password"
    right = password.read_text()
    password.write_text("wrong")
    with pytest.raises(ControlError, match="401"):
        running.control.statuses()
    password.write_text(right)
    assert running.status("store")


def test_the_password_is_in_no_command_line_and_no_environment(start: Start) -> None:
    running = start(["store", *sleeper()])
    password = (running.directory / "password").read_bytes()
    for pid in (running.process.pid, running.pid("store")):
        for what in ("cmdline", "environ"):
            assert password not in Path(f"/proc/{pid}/{what}").read_bytes()


def test_a_program_inherits_nothing_but_its_three_descriptors(start: Start) -> None:
    running = start(["store", *sleeper()])
    pid = running.pid("store")
    until("it is the program", lambda: procs.cmdline(pid)[:1] == ["sleep"])
    assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"]


def test_supervisord_that_does_not_answer_is_an_error_in_time(start: Start) -> None:
    running = start(["store", *sleeper()])
    running.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(ControlError, match="does not answer"):
            Control(running.directory, timeout_s=0.2).statuses()
    finally:
        running.process.send_signal(signal.SIGCONT)


def test_no_supervisord_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="cannot be reached"):
        Control(tmp_path).statuses()


# ------------------------------------------------------------------------------ logs


def test_logs_are_kept_and_rotated(start: Start) -> None:
    """What a program writes to stdout and stderr, in order, and not without end."""
    loud = f"head -c {6 * LOG_BYTES} /dev/zero | tr '\\0' x; echo; echo end >&2; exec sleep 99"
    running = start(["store", "/bin/sh", "-c", loud])
    logs = running.root / "state/logs"
    until("the end", lambda: "end\n" in text(logs / "store.log"))
    names = sorted(p.name for p in logs.glob("store.log*"))
    assert names == ["store.log", "store.log.1", "store.log.2", "store.log.3"]
    for path in logs.glob("*.log*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert path.stat().st_size < 2 * LOG_BYTES
