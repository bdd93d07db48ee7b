"""An instance from its image to its end, on real machines, with every process killed in turn."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from support import procs
from support.until import until
from support.vm import START_S, Machines

pytestmark = [pytest.mark.timeout(600)]  # emulated, and hosts are busy

PROGRAMS = ("registry", "channel", "engine", "store", "helper", "supervisord")
LISTED_S = 1.0  # `list` answers within this, the start of the program not counted
PROGRAM_S = 1.0  # a bound on that on a busy host


@pytest.fixture(scope="module")
def host() -> Iterator[Machines]:
    with closing(Machines()) as made:
        made.up()
        yield made


@pytest.fixture(scope="module")
def web(host: Machines) -> str:
    """An instance that runs. Who stops it starts it again."""
    assert host.run("create", "web").exit == 0
    host.start("web")
    return "web"


def test_a_whole_life(host: Machines) -> None:
    for line, said in (
        ("create work", "work created"),
        ("start work", "work is running"),
        ("start work", "work is running"),
        ("pause work", "work is paused"),
        ("pause work", "work is paused"),
        ("resume work", "work is running"),
        ("service restart engine", "engine is ready again"),
        ("inspect work", "state: running"),
        ("stop work", "work is stopped"),
        ("stop work", "work is stopped"),
        ("delete work", "work is deleted"),
    ):
        ran = host.run(*line.split(), timeout=START_S)
        assert (ran.exit, said in ran.out) == (0, True), (line, ran)
    assert host.run("inspect", "work").exit == 3
    kinds = host.kinds("work")
    others = ("vmm-", "guest-", "helper-", "companion-", "start-again")  # that, on a busy host
    ours = [k for k in kinds if not k.startswith(others)]
    assert ours == [
        "create-begun", "allocate-begun", "created", "start-begun", "start-done",
        "pause-begun", "pause-done", "resume-begun", "resume-done", "stop-begun", "stop-done",
        "delete-begun", "removed",
    ]  # fmt: skip
    assert {"vmm-started", "guest-ready", "vmm-ended"} <= set(kinds)
    assert 700 <= host.last("work", "guest-ready")["timer"] <= 1150, "it waits at another pace"
    stopped = host.last("work", "stop-done")
    assert (stopped["by"], stopped.get("status")) == ("guest", 0)
    assert abs(host.last("work", "resume-done")["skew_ms"]) < 1000
    assert [x for x in host.left() if "web" not in x] == [] or host.state("web") != "gone"
    assert host.run("logs", "--verify").exit == 0


def test_nothing_of_a_deleted_instance_is_left(host: Machines) -> None:
    before = set(host.left())
    assert host.run("create", "gone").exit == 0
    assert set(host.left()) - before
    host.start("gone")
    assert host.run("delete", "gone").exit == 4
    assert host.run("delete", "gone", "--force", timeout=60).exit == 0
    assert set(host.left()) == before


def test_inspect_tells_everything(host: Machines, web: str) -> None:
    found = host.run("inspect", web, "--json").result
    assert (found["state"], found["engine"]["state"]) == ("running", "running")
    assert (found["doing"], found["failed"]) == (None, None)
    assert found["boots"] == found["engine"]["boot"]
    manifest = (host.paths.images / "manifests" / "base").read_text().strip()
    assert (
        found["digests"]["variant"]
        in (host.paths.images / "manifests" / f"{manifest}.json").read_text()
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_machine_outlives_every_process_of_ours(host: Machines, web: str, program: str) -> None:
    pid = host.vmm(web)
    started = host.kinds(web).count("vmm-started")
    host.kill(program)
    until("it runs again", lambda: host.state(web) == "running", seconds=60)
    assert procs.state(pid) not in "ZX"
    assert host.run("pause", web, timeout=60).exit == 0
    assert host.run("resume", web, timeout=60).exit == 0
    assert host.vmm(web) == pid and host.kinds(web).count("vmm-started") == started
    host.up()


def test_a_paused_machine_is_paused_after_everything_was_killed(host: Machines, web: str) -> None:
    pid = host.vmm(web)
    assert host.run("pause", web, timeout=60).exit == 0
    for program in ("helper", "engine", "registry", "supervisord"):
        host.kill(program)
    until("it is seen again", lambda: host.state(web) == "paused", seconds=60)
    assert host.run("resume", web, timeout=60).exit == 0
    assert host.vmm(web) == pid
    host.up()


def test_a_machine_that_does_not_answer_is_unknown_and_list_is_quick(
    host: Machines, web: str
) -> None:
    pid = host.vmm(web)
    os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert host.state(web) == "unknown"
        assert time.monotonic() - begun < LISTED_S + PROGRAM_S
        for verb in ("pause", "start", "delete"):
            assert host.run(verb, web, timeout=60).exit == 12
        assert host.run("inspect", web, "--json").result["engine"]["state"] == "unreachable"
    finally:
        os.kill(pid, signal.SIGCONT)
    until("it answers again", lambda: host.state(web) == "running")


def test_a_machine_that_was_killed_is_stopped_and_starts_again(host: Machines, web: str) -> None:
    os.kill(host.vmm(web), signal.SIGKILL)
    until("it is stopped", lambda: host.state(web) == "stopped")
    assert host.last(web, "state-changed")["signal"] == signal.SIGKILL
    assert host.run("pause", web).exit == 4
    assert host.run("inspect", web, "--json").result["engine"]["exit_signal"] == signal.SIGKILL
    host.start(web)


@pytest.mark.parametrize("program", ["registry", "engine", "channel", "helper"])
def test_a_start_that_loses_a_process_tells_the_truth(
    host: Machines, web: str, program: str
) -> None:
    assert host.run("stop", web, "--grace", "0", timeout=60).exit == 0
    process = host.popen("start", web, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until("it starts", lambda: host.kinds(web)[-1] in ("vmm-started", "start-begun"))
        host.kill(program)
        out, err = process.communicate(timeout=START_S)
    finally:
        process.kill()
        process.wait()
    state = host.state(web)
    assert state == ("running" if process.returncode == 0 else "stopped"), (out, err)
    host.up()
    host.start(web)


def test_a_stop_cancels_a_start(host: Machines, web: str) -> None:
    assert host.run("stop", web, "--grace", "0", timeout=60).exit == 0
    process = host.popen("start", web, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        until("it starts", lambda: host.kinds(web)[-1] == "vmm-started")
        assert host.run("stop", web, timeout=60).exit == 0
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 4 and "another verb came meanwhile" in err
    assert host.state(web) == "stopped"
    host.start(web)


def test_the_clock_is_right_after_a_pause(host: Machines, web: str) -> None:
    assert host.run("pause", web, timeout=60).exit == 0
    time.sleep(5)  # the pause itself
    assert host.run("resume", web, timeout=60).exit == 0
    assert abs(host.last(web, "resume-done")["skew_ms"]) < 1000


# ---------------------------------------------------------------------- bad input


def test_no_image(host: Machines) -> None:
    file = host.home / "config" / "agent-box" / "config.toml"
    before = file.read_text()
    file.write_text(before + '[profiles.other]\nimage = "other"\nmemory = "256M"\n')
    try:
        ran = host.run("create", "none", "--profile", "other", "--json")
        assert ran.error["exit"] == 3 and "image build other" in ran.error["message"]
        assert host.run("create", "none", "--memory", "1000G", "--json").error["exit"] == 64
    finally:
        file.write_text(before)


def test_a_flipped_byte_refuses_the_start_and_names_the_digest(host: Machines) -> None:
    assert host.run("create", "flip").exit == 0
    digest = host.run("inspect", "flip", "--json").result["digests"]["guest"]
    blob = host.paths.blob(digest)
    before = blob.read_bytes()
    blob.unlink()  # other tests use the same file
    blob.write_bytes(before[:5000] + bytes([before[5000] ^ 1]) + before[5001:])
    try:
        ran = host.run("start", "flip", "--json", timeout=60)
        assert ran.error["exit"] == 3 and digest in ran.error["message"]
    finally:
        blob.write_bytes(before)
    host.start("flip")
    assert host.run("delete", "flip", "--force", timeout=60).exit == 0


def test_a_directory_that_was_removed_by_hand(host: Machines) -> None:
    assert host.run("create", "hand").exit == 0
    id = host.run("inspect", "hand", "--json").result["id"]
    shutil.rmtree(host.paths.state / "instances" / id)
    assert host.state("hand") == "unknown"
    ran = host.run("start", "hand", "--json")
    assert ran.error["exit"] == 12 and "delete --force hand" in ran.error["message"]
    assert host.run("delete", "hand", "--force", timeout=60).exit == 0
