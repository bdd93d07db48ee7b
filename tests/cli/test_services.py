"""The administrator's verbs, on a whole agent-box that they start themselves."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import cli, procs
from support.house import contract
from support.live import Live
from support.until import until

from agent_box.cli import link, walls
from agent_box.cli.logfile import LINE_MAX, Follower, last
from agent_box.cli.render import Failure, Render
from agent_box.cli.services import confined_pid
from agent_box.process import notices
from agent_box.process.paths import PROGRAMS, SERVICES


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """One for the whole file; each test leaves every service ready."""
    made = Live()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def up(live: Live) -> Live:
    live.up()
    return live


@pytest.fixture
def fresh() -> Iterator[Live]:
    made = Live()
    try:
        yield made
    finally:
        made.close()


# ------------------------------------------------------------------ start on demand


def test_a_verb_starts_the_daemon_and_it_stays(up: Live) -> None:
    pid = up.daemon_pid()
    assert pid
    assert procs.parent(pid) == 1  # nobody's child
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert stat[4] == "0"  # no controlling terminal
    for fd in (0, 1, 2):
        assert os.readlink(f"/proc/{pid}/fd/{fd}") == "/dev/null"
    assert "spawned: 'store'" in up.paths.log("daemon").read_text()
    assert up.run("service", "list").exit == 0
    assert up.daemon_pid() == pid


def test_many_at_once_start_one(fresh: Live) -> None:
    racing = [fresh.popen("service", "list", stdout=subprocess.DEVNULL) for _ in range(6)]
    assert [each.wait(60) for each in racing] == [0] * 6
    until("all are there", lambda: all(fresh.inner(s) for s in SERVICES))
    for service in SERVICES:
        assert len(fresh.inner(service)) == 1
    log = fresh.paths.log("daemon").read_text()
    assert log.count("RPC interface 'agent_box' initialized") == 1


def test_two_daemons_at_once_are_one_that_runs_and_one_that_names_it(fresh: Live) -> None:
    pair = [fresh.popen("daemon", stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    loser = until("one has ended", lambda: next((p for p in pair if p.poll() is not None), None))
    winner = pair[1 - pair.index(loser)]
    out, err = loser.communicate()
    assert loser.returncode == 2
    assert out == ""
    assert err.count("\n") == 1
    assert f"pid {winner.pid}" in err
    winner.terminate()
    winner.communicate(timeout=30)
    assert winner.returncode == 0


def test_the_daemon_in_the_foreground_is_the_process_itself(fresh: Live) -> None:
    process = fresh.popen("daemon", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until("it holds the lock", lambda: fresh.daemon_pid() == process.pid)
    ran = fresh.run("daemon", "--json")
    assert ran.exit == 2
    assert ran.error["kind"] == "held"
    assert f"pid {process.pid}" in ran.error["message"]
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_stop_waits_until_the_lock_is_free(fresh: Live) -> None:
    assert fresh.run("daemon", "--stop", "--json").result == {"stopped": False, "pid": None}
    assert fresh.run("service", "list").exit == 0
    pid = fresh.daemon_pid()
    assert fresh.run("daemon", "--stop", "--json").result == {"stopped": True, "pid": pid}
    assert fresh.holder() is None
    assert not fresh.pids()


def test_no_runtime_directory(fresh: Live) -> None:
    for verb in (("service", "list"), ("daemon",), ("service", "restart", "store")):
        ran = fresh.run(*verb, "--json", XDG_RUNTIME_DIR="")
        assert ran.exit == 2
        assert ran.error["kind"] == "runtime-dir-missing"
        assert "XDG_RUNTIME_DIR" in ran.error["message"]
    assert not fresh.pids()
    assert not fresh.paths.state.exists()


def test_a_state_directory_that_cannot_be_written(fresh: Live) -> None:
    state = fresh.home / "state"
    state.mkdir(mode=0o500)
    ran = fresh.run("service", "list", "--json")
    assert ran.exit == 2
    assert str(state) in ran.error["message"]
    assert not fresh.pids()
    state.chmod(0o700)


def test_root_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", "daemon")  # an account that every host has
    with pytest.raises(Failure) as raised:
        link.place()
    assert raised.value.exit == 2
    assert raised.value.kind == "root"
    for word in ("runuser -u daemon", "/run/user/1 ", "loginctl enable-linger daemon"):
        assert word in raised.value.message


# -------------------------------------------------------------------- one config file


def test_a_verb_with_another_config_is_refused_and_names_both(up: Live) -> None:
    other = up.home / "other" / "config.toml"
    other.parent.mkdir(exist_ok=True)
    other.write_text("version = 1\n")
    ran = up.run("service", "list", "--json", AGENT_BOX_CONFIG=str(other))
    assert ran.exit == 2
    assert ran.error["kind"] == "config-mismatch"
    for word in ("no config file", str(other), f"pid {up.daemon_pid()}", "agent-box daemon --stop"):
        assert word in ran.error["message"]


def test_a_restarted_daemon_uses_the_new_config(fresh: Live) -> None:
    config = fresh.home / "config" / "agent-box" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("version = 1\n")
    assert fresh.run("service", "list", "--json").result["daemon"]["config"] == str(config)
    # The same file by another name is the same file.
    alias = fresh.home / "alias.toml"
    alias.symlink_to(config)
    assert fresh.run("service", "list", AGENT_BOX_CONFIG=str(alias)).exit == 0
    # Gone: the search finds none, which is not what the daemon uses.
    away = config.rename(fresh.home / "away.toml")
    ran = fresh.run("service", "list", "--json")
    assert ran.exit == 2
    assert str(config) in ran.error["message"]
    assert "this command no config file" in ran.error["message"]
    away.rename(config)
    assert fresh.run("daemon", "--stop").exit == 0
    config.unlink()
    assert fresh.run("service", "list", "--json").result["daemon"]["config"] is None


def test_a_bad_config_starts_nothing(fresh: Live) -> None:
    config = fresh.home / "config" / "agent-box" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("version = 1\nbogus_key = 1\n")
    for verb in (("service", "list"), ("service", "restart", "all")):
        ran = fresh.run(*verb, "--json")
        assert ran.exit == 2
        assert ran.error["kind"] == "config-invalid"
        assert "bogus_key" in ran.error["message"]
    assert not fresh.pids()


def test_a_config_that_is_named_and_missing(fresh: Live) -> None:
    ran = fresh.run("service", "list", "--json", AGENT_BOX_CONFIG="/nonexistent/config.toml")
    assert ran.exit == 2
    assert ran.error["kind"] == "config-invalid"
    assert "/nonexistent/config.toml" in ran.error["message"]
    assert not fresh.pids()


def test_another_runtime_directory_is_named(up: Live) -> None:
    other = up.home / "run2"
    other.mkdir(mode=0o700, exist_ok=True)
    ran = up.run("service", "list", "--json", XDG_RUNTIME_DIR=str(other))
    assert ran.exit == 2
    assert ran.error["kind"] == "runtime-mismatch"
    assert str(other) in ran.error["message"]


@pytest.mark.parametrize("verb", [["list"], ["service", "list"], ["daemon"]], ids=" ".join)
def test_another_state_directory_is_told_who_has_the_runtime_directory(
    up: Live, verb: list[str]
) -> None:
    """At once, and nothing is left of the attempt."""
    other = up.home / "st2"
    begun = time.monotonic()
    ran = up.run(*verb, "--json", XDG_STATE_HOME=str(other))
    assert time.monotonic() - begun < link.READY_S / 2
    assert ran.exit == 2
    assert f"pid {up.daemon_pid()}" in ran.error["message"]
    assert str(up.paths.state) in ran.error["message"]
    assert not other.exists()


# ----------------------------------------------------------------- what is waited for


def test_a_start_that_takes_long_alarms_nobody(
    monkeypatch: pytest.MonkeyPatch, fresh: Live
) -> None:
    monkeypatch.setattr(link, "_SLOW_S", 0.0)
    for name, value in fresh.env.items():
        monkeypatch.setenv(name, value)
    said = io.StringIO()
    out = Render("test", json=False, stdout=said, stderr=said)
    client, _ = link.ready(_place(fresh), "store", out)
    client.close()
    assert said.getvalue() == "starting agent-box ...\n"


def test_a_service_that_is_stuck_is_named_and_not_waited_for_like_a_start(up: Live) -> None:
    """The daemon runs, so this is no exit 2."""
    (stuck,) = up.inner("store")
    age_ms = link.READY_S * 1000
    until("it is old", lambda: up.service("store")["uptime_ms"] > age_ms, seconds=40)
    os.kill(stuck, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        ran = up.run("secret", "list", "--json")
        took = time.monotonic() - begun
    finally:
        os.kill(stuck, signal.SIGCONT)
    assert ran.exit == 14
    assert ran.error["kind"] == "unavailable"
    assert ran.error["message"].startswith("store does not answer; see agent-box service list")
    assert took < link.READY_S * 0.75
    until("it answers again", lambda: up.service("store")["ready"])


# ------------------------------------------------------------------------------ list


def test_list_tells_of_each(up: Live) -> None:
    result = up.run("service", "list", "--json").result
    assert result["daemon"]["pid"] == up.daemon_pid()
    assert [row["name"] for row in result["services"]] == list(PROGRAMS)
    for row in result["services"]:
        assert row["ready"]
        assert row["state"] == "running"
        assert [row["pid"]] == up.inner(row["name"])  # the service itself, on the host
        assert row["uptime_ms"] > 0
    text = up.run("service", "list").out
    assert text.splitlines()[0].split() == [
        "NAME", "STATE", "READY", "PID", "UPTIME", "RESTARTS", "EPOCH",
    ]  # fmt: skip
    assert all(len(line) <= 80 for line in text.split("\n\n")[0].splitlines())


def test_a_service_that_is_stuck_holds_up_nobody(up: Live) -> None:
    (stuck,) = up.inner("engine")
    until("it is not young", lambda: up.service("engine")["uptime_ms"] > 6000)
    os.kill(stuck, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        rows = up.services()
        assert time.monotonic() - begun < 5
        assert not rows["engine"]["answering"]
        assert rows["engine"]["state"] == "running"
        assert all(row["ready"] for name, row in rows.items() if name != "engine")
        assert "not answering" in up.run("service", "list").out
    finally:
        os.kill(stuck, signal.SIGCONT)
    until("it answers again", lambda: up.service("engine")["ready"])


def test_a_killed_service_is_ready_again_and_counted(up: Live) -> None:
    before = up.service("channel")
    os.kill(before["pid"], signal.SIGKILL)
    until("ready again", lambda: (row := up.service("channel"))["ready"]
          and row["epoch"] != before["epoch"])  # fmt: skip
    after = up.service("channel")
    assert after["restarts"] == before["restarts"] + 1
    assert after["pid"] != before["pid"]


def test_confined_pid_of_what_is_gone_is_itself() -> None:
    assert confined_pid(2**22 + 1) == 2**22 + 1


# --------------------------------------------------------------------------- restart


def test_restart_gives_a_new_epoch(up: Live) -> None:
    before = up.services()
    (row,) = up.run("service", "restart", "store", "--json").result["services"]
    assert row["name"] == "store"
    after = up.services()
    assert after["store"]["epoch"] == row["epoch"] != before["store"]["epoch"]
    for name in SERVICES:
        if name != "store":
            assert after[name]["epoch"] == before[name]["epoch"]


def test_restart_all(up: Live) -> None:
    before = up.services()
    rows = up.run("service", "restart", "all", "--json").result["services"]
    assert [row["name"] for row in rows] == list(PROGRAMS)
    for name, row in up.services().items():
        assert row["ready"]
        if name == "helper":
            assert row["pid"] != before[name]["pid"]
        else:
            assert row["epoch"] != before[name]["epoch"]


def test_restart_of_one_that_is_stuck(up: Live) -> None:
    (stuck,) = up.inner("netstack")
    os.kill(stuck, signal.SIGSTOP)
    ran = up.run("service", "restart", "netstack", "--json")
    assert ran.result["services"][0]["name"] == "netstack"
    assert procs.state(stuck) in "XZ"


def test_a_service_that_dies_again_and_again_stays_down_until_it_is_restarted(up: Live) -> None:
    def dead() -> bool:
        for pid in up.inner("broker"):
            procs.send(pid, signal.SIGKILL)
        return up.statuses()["broker"].state == "fatal"

    until("fatal", dead)
    row = up.service("broker")
    assert row["state"] == "fatal"
    assert row["pid"] is None
    assert not row["answering"]
    assert "5 deaths in 30 s" in row["problem"]
    assert "5 deaths in 30 s" in up.run("service", "list").out
    # Who needs it is told at once, and how to mend it.
    with pytest.raises(Failure) as raised:
        link.ready(_place(up), "broker", _silent())
    assert raised.value.exit == 2
    assert raised.value.kind == "service-failed"
    assert "agent-box service restart broker" in raised.value.message
    ran = up.run("service", "inspect", "broker", "--json")
    assert (ran.exit, ran.error["state"]) == (4, "fatal")
    (again,) = up.run("service", "restart", "broker", "--json").result["services"]
    assert up.service("broker")["epoch"] == again["epoch"]
    (event,) = until("an event of the journal", lambda: _stay_down(up, "broker"))
    assert (event["by"], event["source"]) == ("supervisor", "host-observed")
    assert "5 deaths in 30 s" in event["facts"]["reason"]


def _stay_down(up: Live, service: str) -> list[dict[str, Any]]:
    events = up.run("logs", "--json").result["events"]
    return [
        event
        for event in events
        if event["kind"] == "service-fatal" and event["facts"]["service"] == service
    ]


def test_that_the_registry_stayed_down_is_in_the_journal_when_it_is_back(up: Live) -> None:
    def dead() -> bool:
        for pid in up.inner("registry"):
            procs.send(pid, signal.SIGKILL)
        return up.statuses()["registry"].state == "fatal"

    until("fatal", dead)
    assert len(notices.waiting(up.paths.notices)) == 1
    assert up.run("service", "restart", "registry").exit == 0
    until("it is told", lambda: not notices.waiting(up.paths.notices))
    assert len(_stay_down(up, "registry")) == 1
    assert up.run("logs", "--verify").exit == 0


def _place(live: Live) -> link.Place:
    return link.place(live.env)


def _silent() -> Render:
    return Render("test", json=False, stdout=io.StringIO(), stderr=io.StringIO())


@pytest.mark.parametrize("verb", ["restart", "logs", "inspect"])
@pytest.mark.parametrize("name", ["nobody", "../x", "STORE", ""])
def test_an_unknown_service_is_one_line_and_64(up: Live, verb: str, name: str) -> None:
    ran = up.run("service", verb, name, "--json")
    assert ran.exit == 64
    assert ran.error["kind"] == "usage"


# -------------------------------------------------------------------------- the log


def test_logs(up: Live) -> None:
    ran = up.run("service", "logs", "store", "--json")
    assert any('"event": "ready"' in line for line in ran.result["lines"])
    assert len(up.run("service", "logs", "store", "--tail", "2", "--json").result["lines"]) == 2
    assert up.run("service", "logs", "store", "--tail", "0").out == ""
    assert "spawned" in up.run("service", "logs", "daemon").out


def test_logs_of_what_never_ran(fresh: Live) -> None:
    for more in ((), ("--follow",)):
        ran = fresh.run("service", "logs", "store", *more)
        assert ran.exit == 3
    assert not fresh.pids()  # it starts nothing


def test_logs_follow_ends_by_interrupt(up: Live) -> None:
    process = up.popen(
        "service", "logs", "engine", "--follow", "--tail", "1", "--json", stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert first["type"] == "line"
    assert first["service"] == "engine"
    up.run("service", "restart", "engine")
    seen = ""
    while '"event": "ready"' not in seen:
        seen = json.loads(process.stdout.readline())["line"]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    end = json.loads(out.splitlines()[-1])
    assert (end["type"], end["ok"], end["exit"]) == ("end", False, 130)


def rotate(log: Path) -> None:
    """As supervisord does it."""
    for number in (2, 1):
        older = log.with_name(f"{log.name}.{number}")
        if older.exists():
            older.rename(log.with_name(f"{log.name}.{number + 1}"))
    log.rename(log.with_name(f"{log.name}.1"))
    log.touch()


@pytest.mark.parametrize("when", range(1, 21))
def test_following_loses_nothing_at_a_rotation_between_two_steps_of_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """A name that was found means another file a moment later: each of the follower's first
    steps in turn is preceded by a rotation, be it a look at a name or the opening of one."""
    log = tmp_path / "store.log"
    log.write_text("0\n")
    steps = written = 0

    def write() -> None:
        nonlocal written
        monkeypatch.undo()
        rotate(log)
        written += 1
        log.write_text(f"{written}\n")

    def preceded(name: str, real: Callable[..., Any]) -> None:
        def step(path: Path, *args: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == when:
                write()  # and no hook from now on
            return real(path, *args, **options)

        monkeypatch.setattr(Path, name, step)

    with Follower(log, None) as follower:
        write()
        write()
        preceded("open", Path.open)
        preceded("stat", Path.stat)
        got = []
        for line in follower.lines(timeout_s=10):
            got.append(line)
            if line == "2" and steps < when:
                write()  # the step is one that the follower does not take
            if len(got) == 4:
                break
    assert got == ["0", "1", "2", "3"]


def test_following_loses_nothing_at_rotations(tmp_path: Path) -> None:
    """While it is written to and rotated, once or twice between two looks. The writer is
    never further ahead than the number of files that are kept."""
    log = tmp_path / "store.log"
    log.write_text("old 1\nold 2\n")
    count, batch = 3000, 50
    ahead = threading.Semaphore(2)

    def write() -> None:
        for first in range(0, count, batch):
            ahead.acquire()
            with log.open("a") as file:
                for n in range(first, first + batch):
                    file.write(f"line {n}\n")
                    file.flush()
            rotate(log)

    with Follower(log, 1) as follower:
        writer = threading.Thread(target=write)
        writer.start()
        got = []
        for line in follower.lines(timeout_s=10):
            got.append(line)
            if (len(got) - 1) % batch == 0 and len(got) > 1:
                ahead.release()
            if len(got) == count + 1:
                break
        writer.join()
    assert got == ["old 2", *(f"line {n}" for n in range(count))]


def test_following_step_by_step(tmp_path: Path) -> None:
    log = tmp_path / "store.log"
    with Follower(log, None) as follower:
        lines = follower.lines(timeout_s=10)
        log.write_text("a\nb")  # it did not exist; and half a line is no line
        assert next(lines) == "a"
        with log.open("a") as file:
            file.write("b\n")
        assert next(lines) == "bb"
        with log.open("a") as file:
            file.write("c\nhalf")
        rotate(log)
        log.write_text("d\n")
        assert [next(lines), next(lines), next(lines)] == ["c", "half", "d"]
        rotate(log)
        log.write_text("e\n")
        rotate(log)
        log.write_text("f\n")
        assert [next(lines), next(lines)] == ["e", "f"]


def test_the_last_lines_over_all_files(tmp_path: Path) -> None:
    log = tmp_path / "store.log"
    assert last(log, None) == []
    log.write_text("a\nb\n")
    rotate(log)
    log.write_text("c\n")
    rotate(log)
    log.write_text("d\ne")
    assert last(log, None) == ["a", "b", "c", "d", "e"]
    assert last(log, 3) == ["c", "d", "e"]
    assert last(log, 0) == []
    with Follower(log, 3) as follower:
        assert next(follower.lines()) == "b"  # "e" is not complete yet: c, d before it
    log.write_bytes(b"\xff\xfe\n" + b"x" * (LINE_MAX + 10) + b"\n")
    assert last(log, 3)[0] == "��"


# --------------------------------------------------------------------------- inspect


@pytest.mark.parametrize("name", SERVICES)
def test_inspect_finds_each_wall_as_declared(up: Live, name: str) -> None:
    result = up.run("service", "inspect", name, "--json").result
    assert [result["pid"]] == up.inner(name)
    lines = {line["key"]: line for line in result["lines"]}
    assert {line["verdict"] for line in lines.values()} == {"same"}
    # And it says what /proc says, read here once more by other means.
    pid = result["pid"]
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    assert lines["capabilities"]["host"] == "none"
    assert int(status["CapEff"], 16) == 0
    assert lines["no-new-privs"]["host"] == "yes"
    assert status["NoNewPrivs"].strip() == "1"
    assert lines["seccomp"]["host"] == f"{status['Seccomp_filters'].strip()} filters"
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft == hard == contract(name).wall.open_files
    assert lines["rlimit-nofile"]["host"] == str(soft)
    mounted = [line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    shown = [key.removeprefix("mount ") for key in lines if key.startswith("mount ")]
    assert sorted(shown) == sorted(mounted)
    own_net = os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    assert lines["namespace-net"]["host"] == ("own" if own_net else "shared")
    assert own_net == (contract(name).wall.network.value == "none")
    outer = procs.cmdline(procs.parent(pid))
    assert outer[0].endswith("bwrap")
    assert lines["bubblewrap"]["host"] == f"{len(outer)} words"
    text = up.run("service", "inspect", name).out
    assert all(line.startswith("same ") for line in text.splitlines())


def test_inspect_shows_a_limit_that_was_changed(up: Live) -> None:
    pid = up.service("engine")["pid"]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (100, 200))
    ran = up.run("service", "inspect", "engine", "--json")
    assert ran.exit == 1
    assert ran.error["kind"] == "wall-differs"
    assert "rlimit-nofile" in ran.error["message"]
    (line,) = [each for each in ran.error["lines"] if each["verdict"] == "differs"]
    assert (line["key"], line["host"], line["service"]) == ("rlimit-nofile", "100 to 200", "100")
    text = up.run("service", "inspect", "engine").out
    assert sum(line.startswith("DIFFERS") for line in text.splitlines()) == 1
    up.run("service", "restart", "engine")
    assert up.run("service", "inspect", "engine").exit == 0


def test_inspect_without_an_answer_says_what_proc_shows(up: Live) -> None:
    pid = up.service("engine")["pid"]
    until("it is not young", lambda: up.service("engine")["uptime_ms"] > 6000)
    os.kill(pid, signal.SIGSTOP)
    try:
        ran = up.run("service", "inspect", "engine", "--json")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "says nothing of itself" in ran.err
    verdicts = {line["key"]: line["verdict"] for line in ran.result["lines"]}
    assert verdicts["capabilities"] == "same"
    assert verdicts["landlock"] == "unseen"


def test_every_kind_of_difference_is_shown(up: Live) -> None:
    """The running service against a contract that it was not started under."""
    here = _place(up)
    status = up.statuses()["channel"]
    assert status.pid is not None
    seen = walls.see(status.pid, confined_pid(status.pid))
    client = link.connect(here, "channel")
    try:
        from agent_box.bus.base import Confinement
        from agent_box.bus.schema import Empty, Network

        said = client.call("confinement", Empty())
        assert isinstance(said, Confinement)
    finally:
        client.close()
    declared = contract("channel")

    def differing(**changes: object) -> set[str]:
        other = replace(declared, wall=replace(declared.wall, **changes))  # type: ignore[arg-type]
        lines = walls.lines(other, here.paths, None, seen, said)
        return {line.key for line in lines if line.verdict == "differs"}

    assert differing() == set()
    assert differing(open_files=77) == {"rlimit-nofile"}
    assert differing(memory_mib=77) == {"rlimit-data"}
    assert differing(syscalls=(("setpriority", "for the test"),)) == {"seccomp-outer"}
    calls = tuple(s for s in SERVICES if s != "channel")
    more = {f"mount {here.paths.bus(s)}" for s in calls if s not in declared.wall.calls}
    assert more
    assert differing(calls=calls) == {"bubblewrap", *more}
    shared = differing(network=Network.HOST)
    assert {"bubblewrap", "seccomp-outer", "namespace-net"} <= shared
    # A service that lies about itself is shown by /proc, and the other way round.
    lines = walls.lines(declared, here.paths, None, seen, _structs_replace(said, uid=0))
    assert [line.key for line in lines if line.verdict == "differs"] == ["uid"]
    lines = walls.lines(
        declared, here.paths, None, replace(seen, dumpable=True, argv=seen.argv[:-1]), said
    )
    assert {line.key for line in lines if line.verdict == "differs"} == {"bubblewrap", "dumpable"}


def _structs_replace(said: object, **changes: object) -> object:
    import msgspec

    return msgspec.structs.replace(said, **changes)  # type: ignore[type-var]


def test_every_verb_of_mine_has_its_shape() -> None:
    for name in ("daemon", *(f"service-{v}" for v in ("list", "restart", "logs", "inspect"))):
        assert (cli.SCHEMAS / "results" / f"{name}.json").exists()
