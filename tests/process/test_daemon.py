"""The daemon's own life: its locks, what it lays out, what it keeps, how it refuses."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import procs
from support.live import Live
from support.until import until

from agent_box.process import daemon, lock
from agent_box.process.paths import ROLES, SERVICES
from agent_box.process.supervision import ControlError


@pytest.fixture
def live() -> Iterator[Live]:
    made = Live()
    yield made
    made.close()


def start(live: Live, *words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*daemon.command(None), *words],
        env=live.env | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str, str]:
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def running(live: Live) -> bool:
    try:
        return bool(live.statuses())
    except ControlError:
        return False


def test_it_holds_both_locks_lays_everything_out_and_ends_with_0(live: Live) -> None:
    process = start(live)
    until("it runs", lambda: running(live))
    for path in (live.paths.lock, daemon.runtime_lock(live.paths)):
        holder = lock.holder(path)
        assert holder is not None
        assert holder.pid == process.pid
        assert holder.config is None
    for role in ROLES:
        assert (live.paths.keys(role) / "curve.secret").exists()
        assert (live.paths.public_keys / role).exists()
    for service in SERVICES:
        assert (live.paths.supervisor / f"{service}.bpf").exists()
    pids = live.pids()
    code, out, _ = end(process)
    assert code == 0
    assert "spawned: 'store'" in out  # in the foreground it tells what it does
    assert all(procs.state(pid) in "XZ" for pid in pids)
    assert lock.holder(live.paths.lock) is None


def test_everything_it_makes_is_closed_to_others(live: Live) -> None:
    process = start(live)
    until("it runs", lambda: running(live))
    for root in (live.paths.runtime, live.paths.state):
        for path in [root, *root.rglob("*")]:
            if path.is_symlink():
                continue
            mode = path.stat().st_mode
            if stat.S_ISSOCK(mode) and path.parent.parent.name == "bus":
                continue  # zmq makes it; the directory is closed
            assert stat.S_IMODE(mode) & 0o077 == 0, f"{path} {stat.S_IMODE(mode):o}"
    end(process)


def test_a_second_one_names_the_first_and_exits_2(live: Live) -> None:
    first = start(live)
    until("it runs", lambda: running(live))
    second = start(live)
    out, err = second.communicate(timeout=30)
    assert second.returncode == 2
    assert f"pid {first.pid}" in err
    assert err.count("\n") == 1
    assert out == ""
    assert running(live)
    end(first)


def test_another_state_directory_does_not_get_the_same_sockets(live: Live) -> None:
    first = start(live)
    until("it runs", lambda: running(live))
    second = start(live, XDG_STATE_HOME=str(live.home / "other"))
    _, err = second.communicate(timeout=30)
    assert second.returncode == 2
    assert f"pid {first.pid}" in err
    assert f"state directory {live.paths.state}" in err
    assert not (live.home / "other").exists()  # it lays out nothing of its own
    end(first)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_it_well_at_any_time(live: Live, number: int) -> None:
    process = start(live)
    until("it runs", lambda: running(live))
    assert end(process, number)[0] == 0


def test_a_sigterm_before_supervisord_is_there_ends_it_well(live: Live) -> None:
    process = start(live)
    until("the lock is held", lambda: live.holder())
    assert end(process)[0] == 0
    assert not live.pids()


def test_no_program_inherits_the_locks(live: Live) -> None:
    process = start(live)
    until("it runs", lambda: running(live))
    files = {live.paths.lock.stat().st_ino, daemon.runtime_lock(live.paths).stat().st_ino}
    until("all are there", lambda: all(live.inner(s) for s in SERVICES))
    looked = 0
    for pid in procs.descendants(process.pid):
        try:
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                assert fd.stat().st_ino not in files
                looked += 1
        except (PermissionError, FileNotFoundError):
            # Undumpable: the service itself, and what wraps it would hold them too. Or it
            # has closed a file meanwhile.
            continue
    assert looked
    # And the proof by what matters: the lock is free the moment that the daemon is killed.
    process.kill()
    process.communicate()
    assert lock.holder(live.paths.lock) is None


def test_killed_it_leaves_nothing_and_the_next_starts(live: Live) -> None:
    first = start(live)
    until("all are there", lambda: running(live) and all(live.inner(s) for s in SERVICES))
    first.kill()
    first.communicate()
    until("nothing is left", lambda: not live.pids(), seconds=5)
    second = start(live)
    until("all are there", lambda: running(live) and all(live.inner(s) for s in SERVICES))
    assert end(second)[0] == 0


def test_nothing_of_the_environment_but_the_harmless_reaches_anybody(live: Live) -> None:
    canary = "sk-canary-00112233"
    process = start(live, ANTHROPIC_API_KEY=canary, LD_PRELOAD="", PYTHONPATH="/nowhere")
    until("it runs", lambda: running(live))
    until("all are there", lambda: all(live.inner(s) for s in SERVICES))
    for pid in procs.descendants(process.pid):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except (PermissionError, FileNotFoundError):
            continue
        assert canary.encode() not in environ, procs.cmdline(pid)
        assert b"PYTHONPATH" not in environ
    end(process)


def test_no_core_is_written_of_anything(live: Live) -> None:
    process = start(live)
    until("it runs", lambda: running(live))
    for pid in (process.pid, *procs.descendants(process.pid)):
        limits = Path(f"/proc/{pid}/limits").read_text()
        core = next(line for line in limits.splitlines() if line.startswith("Max core"))
        assert core.split()[4:6] == ["0", "0"]
    end(process)


# -------------------------------------------------------------------------- refusals


def refusal(live: Live, *words: str, **env: str) -> str:
    process = start(live, *words, **env)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2, err
    assert err.count("\n") == 1
    assert not live.pids()
    return err


def test_a_bad_config_stops_it_and_starts_nothing(live: Live) -> None:
    config = live.home / "c" / "config.toml"
    config.parent.mkdir()
    config.write_text("version = 1\nno_such_key = 3\n")
    err = refusal(live, "--config", str(config))
    assert "no_such_key" in err
    log = live.paths.log("daemon").read_text()
    assert "no_such_key" in log
    assert not list(live.paths.supervisor.iterdir())


def test_no_runtime_directory_stops_it(live: Live) -> None:
    assert "XDG_RUNTIME_DIR" in refusal(live, XDG_RUNTIME_DIR="")


def test_an_open_runtime_directory_stops_it(live: Live) -> None:
    os.chmod(live.home / "run", 0o710)  # noqa: S103 - it is the test
    assert "open to others" in refusal(live)


def test_a_state_directory_that_cannot_be_written_stops_it(live: Live) -> None:
    (live.home / "state").mkdir(mode=0o500)
    assert "cannot make" in refusal(live)
    os.chmod(live.home / "state", 0o700)


def test_a_state_directory_open_to_others_stops_it(live: Live) -> None:
    live.paths.state.mkdir(parents=True)
    os.chmod(live.paths.state, 0o701)
    assert "open to others" in refusal(live)


def test_a_damaged_key_stops_it_and_is_named(live: Live) -> None:
    home = live.paths.keys("store")
    for directory in (live.paths.state, home.parent, home):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
    (home / "curve.secret").write_text("not a key")
    (home / "curve.secret").chmod(0o600)
    assert "curve.secret" in refusal(live)


def test_root_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(daemon.Cannot, match="ordinary user"):
        daemon._settle()


def test_foreign_words_are_refused(live: Live) -> None:
    assert "--bogus" in refusal(live, "--bogus")
    with pytest.raises(daemon.Cannot):
        daemon.parse([])
    with pytest.raises(daemon.Cannot):
        daemon.parse(["--config", "relative.toml"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"background": True, "report": 3},
        {"json": True},
    ],
)
@pytest.mark.parametrize("config", [None, Path("/a/config.toml")])
def test_it_reads_what_is_written_for_it(config: Path | None, options: dict[str, int]) -> None:
    words = daemon.command(config, **options)  # type: ignore[arg-type]
    assert words[0] == sys.executable
    parsed = daemon.parse(words[words.index("agent_box.process.daemon") + 1 :])
    assert parsed.config == config
    for name, value in options.items():
        assert getattr(parsed, name) == value


def test_json_answers_with_one_object(live: Live) -> None:
    process = start(live, "--json")
    until("it runs", lambda: running(live))
    _, out, err = end(process)
    assert json.loads(out) == {"schema": 1, "verb": "daemon", "ok": True, "result": {}}
    assert err == ""


def test_a_starter_at_the_other_end_of_a_pipe_hears_how_it_went(live: Live) -> None:
    reader, writer = os.pipe()
    first = subprocess.Popen(
        daemon.command(None, background=True, report=writer), env=live.env, pass_fds=[writer]
    )
    os.close(writer)
    assert first.wait(30) == 0  # it leaves at once, its child stays
    with open(reader) as pipe:
        report = json.loads(pipe.read())
    assert report == {"ok": True, "pid": live.daemon_pid()}
    reader, writer = os.pipe()
    subprocess.run(
        daemon.command(None, background=True, report=writer),
        env=live.env,
        pass_fds=[writer],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    os.close(writer)
    with open(reader) as pipe:
        report = json.loads(pipe.read())
    assert report["ok"] is False
    assert report["kind"] == "held"
    assert str(live.daemon_pid()) in report["message"]
