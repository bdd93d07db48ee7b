"""A guest in trouble: its hook fails, its memory, its disk and its processes run out. By the real
program, in one real machine. tests/engine/test_machine.py has a fork bomb."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support import cli
from support.attached import Person
from support.until import until
from support.vm import CONFIG, START_S, Machines

pytestmark = [pytest.mark.timeout(600)]

HOOK = "mkdir -p .agent-box; printf '%s' \"$1\" > .agent-box/hook.sh"


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    made = Machines(config=CONFIG + "hook_required = true\n")
    try:
        assert made.run("create", "web1").exit == 0
        yield made
    finally:
        made.close()


def command(machines: Machines, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [cli.BINARY, "exec", "web1", "--", *argv],
        env=machines.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def running(machines: Machines) -> None:
    """It runs, whatever was before."""
    if machines.state("web1") != "running":
        assert machines.run("start", "web1", "--no-hook", timeout=START_S).exit == 0


def hook(machines: Machines, text: str) -> None:
    """Puts it there; the instance is stopped after it."""
    assert command(machines, "sh", "-c", HOOK, "hook", text).returncode == 0
    assert machines.run("stop", "web1").exit == 0


def test_a_hook_that_must_be_there(machines: Machines) -> None:
    ran = machines.run("start", "web1", timeout=START_S)
    assert ran.exit == 1 and "the project hook failed: there is no such file" in ran.err
    assert machines.state("web1") == "stopped"
    assert machines.run("start", "web1", "--no-hook", timeout=START_S).exit == 0
    hook(machines, "echo first\necho last words >&2\nexit 3\n")
    ran = machines.run("start", "web1", timeout=START_S)
    assert ran.exit == 1 and "it ended with status 3: first | last words" in ran.err


@pytest.mark.slow
def test_a_hook_that_ends_after_the_channel_was_killed(machines: Machines) -> None:
    """The start goes on with the next channel, and what the hook exports is there."""
    assert machines.run("start", "web1", "--no-hook", timeout=START_S).exit == 0
    hook(machines, "touch begun; sleep 5; export FROM_HOOK=$PWD\n")
    starting = machines.popen("start", "web1")
    until("the guest is up", lambda: "guest-ready" in kinds_of_this_boot(machines), seconds=120)
    machines.kill("channel")
    assert starting.wait(START_S) == 0
    assert "hook-done" in kinds_of_this_boot(machines)
    assert command(machines, "sh", "-c", "echo $FROM_HOOK").stdout == "/home/agent/work\n"


def kinds_of_this_boot(machines: Machines) -> list[str]:
    kinds = machines.kinds("web1")
    return kinds[len(kinds) - kinds[::-1].index("start-begun") :]


def test_no_memory(machines: Machines) -> None:
    """The kernel ends what wants it all, and nothing else."""
    running(machines)
    code = "a = []\nwhile True: a += [b'x' * 999_999]"
    with Person(["attach", "web1", "--shell"], machines.env | {"TERM": "xterm"}) as person:
        person.until(b"$ ")
        ran = command(machines, "python3", "-c", code)
        assert (ran.returncode, ran.stdout, ran.stderr) == (137, "", ""), ran
        person.type(b"echo still$((1+1))\r")
        person.until(b"still2")
        person.type(b"exit\r")
        assert person.end()[0] == 0
    until("it is told", lambda: "guest-oom" in machines.kinds("web1"))
    assert machines.last("web1", "guest-oom")["process"] == "python3"


def test_no_disk(machines: Machines) -> None:
    """What writes fails with its own line; commands and terminals go on."""
    running(machines)
    ran = command(machines, "sh", "-c", "head -c 1G /dev/zero > much")
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1
    assert "No space left on device" in ran.stderr
    with Person(["attach", "web1", "--shell"], machines.env | {"TERM": "xterm"}) as person:
        person.until(b"$ ")
        person.type(b"rm much; exit 4\r")
        assert person.end()[0] == 4
    assert command(machines, "true").returncode == 0


# Threads are counted as processes are, and take the least memory.
FILLER = """
import sys, threading
threading.stack_size(65536)
done = threading.Event()
try:
    while True:
        threading.Thread(target=done.wait, daemon=True).start()
except RuntimeError:
    print("full", flush=True)
sys.stdin.read()
"""


@contextmanager
def beside(machines: Machines, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """A command that goes on until its input ends."""
    process = subprocess.Popen(
        [cli.BINARY, "exec", *argv],
        env=machines.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_no_processes_for_the_agent(machines: Machines) -> None:
    """What the operator starts is counted apart, and starts; what that forks is refused."""
    running(machines)
    with beside(machines, "web1", "--", "python3", "-c", FILLER) as filler:
        assert filler.stdout is not None
        assert filler.stdout.readline() == "full\n"
        ran = command(machines, "true")
        assert (ran.returncode, ran.stderr) == (0, ""), ran
        ran = command(machines, "sh", "-c", "/bin/true; echo went on")
        assert (ran.returncode, ran.stdout) == (2, ""), ran
        assert "Cannot fork" in ran.stderr and ran.stderr.count("\n") == 1
    ran = command(machines, "sh", "-c", "/bin/true; echo went on")
    assert (ran.returncode, ran.stdout) == (0, "went on\n"), ran


def test_no_processes_at_all(machines: Machines) -> None:
    """Root in the guest takes the kernel's own limit down to its least."""
    running(machines)
    script = (
        "limit=/proc/sys/kernel/threads-max; was=$(cat $limit); echo 20 >$limit && echo low;"
        " read _; echo $was >$limit"
    )
    with beside(machines, "web1", "--user", "root", "--", "sh", "-c", script) as root:
        assert root.stdout is not None
        assert root.stdout.readline() == "low\n"
        for more in ((), ("--json",)):
            ran = machines.run("exec", "web1", *more, "--", "true")
            assert ran.exit == 1, ran
            told = ran.lines[-1]["error"]["message"] if more else ran.err
            assert "nothing can be started in the guest: it has no more processes" in told
            assert ran.err.count("\n") == 1
        with Person(["attach", "web1", "--shell"], machines.env | {"TERM": "xterm"}) as person:
            code, said = person.end()
            assert code == 1 and "it has no more processes" in said
    ran = command(machines, "true")
    assert ran.returncode == 0, ran
