"""What a guest wrote is there afterwards, whatever ended; its clock is the host's, wherever that
jumps; and a host whose disk is full is told and spoils nothing. Real machines under TCG."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import procs
from support.machines import Machines
from support.spoil import fill
from support.until import until

from agent_box.bus.errors import Reason, Refusal
from agent_box.engine import contract as engine

pytestmark = [pytest.mark.timeout(600)]

MIB = 1 << 20
HOURS_4_S = 4 * 3600
JUMP_S = 2.0  # in which a guest has the host's time after a jump
BUSY_S = 3.0  # a bound on that on a busy host
KEPT = "/run/box/root/home/agent/kept"


def write(machines: Machines, instance: str, text: str, *, boot: int) -> None:
    """Appends a line and syncs that file and nothing else."""
    code = (
        f"import os\nwith open({KEPT!r}, 'a') as f:\n"
        f" f.write({text!r} + '\\n'); f.flush(); os.fsync(f.fileno())\n"
        f"d = os.open(os.path.dirname({KEPT!r}), os.O_RDONLY); os.fsync(d); print('done')"
    )
    assert machines.ask(instance, code, boot=boot) == "done"


def read(machines: Machines, instance: str, *, boot: int) -> list[str]:
    return machines.ask(instance, f"print(open({KEPT!r}).read())", boot=boot).split()


def test_a_synced_file_is_there_whatever_ends(machines: Machines, port: str) -> None:
    instance = machines.create()
    machines.boot(instance, guest=port)
    machines.provision(instance)
    written: list[str] = []

    def then(what: str, boot: int) -> None:
        if written:
            assert read(machines, instance, boot=boot) == written, what
        write(machines, instance, what, boot=boot)
        written.append(what)

    then("begun", 1)
    machines.engine("pause", machines.vmm(instance))
    machines.engine("resume", machines.vmm(instance))
    then("resumed", 1)
    pid = machines.vmm_pid(instance)
    (shim,) = [p for p in procs.with_word("agent_box.helper.shim") if pid in procs.descendants(p)]
    os.kill(shim, signal.SIGKILL)
    for service in ("engine", "channel"):
        machines.kill(service)
    machines.kill_helper()
    machines.up()
    machines.until_state(instance, "running", seconds=60)
    machines.set_time(instance)  # the new channel learns of it
    then("all-killed", 1)
    assert machines.vmm_pid(instance) == pid

    def again(boot: int) -> None:
        machines.until_state(instance, "stopped", seconds=60)
        machines.boot(instance, boot, guest=port)
        machines.provision(instance, boot)

    os.kill(pid, signal.SIGKILL)
    again(2)
    then("vmm-killed", 2)
    machines.poweroff(instance, 2)
    again(3)
    then("stopped", 3)
    assert read(machines, instance, boot=3) == [
        "begun", "resumed", "all-killed", "vmm-killed", "stopped",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def steady(machines: Machines, port: str) -> str:
    """One that is provisioned, for tests that leave it running."""
    instance = machines.create()
    machines.boot(instance, guest=port)
    machines.provision(instance)
    return instance


def test_a_jump_of_the_hosts_clock_is_in_the_guest_at_once(machines: Machines, steady: str) -> None:
    wait = (
        "import time\nbefore = time.time() - time.monotonic()\n"
        "while abs(time.time() - time.monotonic() - before) < 3600: time.sleep(0.01)\n"
        "print(time.time_ns())"
    )
    machines.start_channel(0)
    machines.provision(steady)
    for off_s in (HOURS_4_S, -HOURS_4_S):
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(machines.ask, steady, wait)
            until(
                "the guest looks at its clock",
                lambda: int(machines.ask(steady, LOOKERS)) > 0,
            )
            jumped = time.time()
            machines.move_clock(off_s * 10**9)
            there = int(waiting.result(60)) / 1e9
            now = time.time()
        assert now - jumped < JUMP_S + BUSY_S
        # What it printed was true at some moment between the jump and its answer.
        assert jumped - 1 < there - off_s < now + 1
    machines.restart("channel")
    machines.provision(steady)


# How many processes in the guest sleep between two looks.
LOOKERS = (
    "import os\nn = 0\nfor p in os.listdir('/proc'):\n"
    " if p.isdigit() and int(p) != os.getpid():\n"
    "  try: n += 'nanosleep' in open(f'/proc/{p}/wchan').read()\n"
    "  except OSError: pass\n"
    "print(n)"
)


@pytest.mark.parametrize("seconds", [pytest.param(30, marks=pytest.mark.slow)])
def test_a_long_pause_is_made_up_for(machines: Machines, steady: str, seconds: int) -> None:
    machines.engine("pause", machines.vmm(steady))
    time.sleep(seconds)  # the pause itself
    resumed = time.monotonic()
    machines.engine("resume", machines.vmm(steady))
    assert abs(machines.set_time(steady).skew_ms) < 1000
    assert time.monotonic() - resumed < JUMP_S + BUSY_S
    before = time.time()
    there = int(machines.ask(steady, "import time; print(time.time_ns())")) / 1e9
    assert before - 1 < there < time.time() + 1


# ------------------------------------------------------------------------ a full disk


@pytest.fixture(scope="module")
def small() -> Iterator[Machines]:
    """Instances lie on a file system of 120 MiB."""
    made = Machines(instances_bytes=120 * MIB)
    try:
        made.up()
        yield made
    finally:
        made.close()


def test_a_full_disk_during_create_start_and_run(small: Machines) -> None:
    port = small.port()
    filler = fill(small.instances(), leave=MIB)
    with pytest.raises(Refusal, match="the host's disk is full") as refused:
        small.create()
    assert refused.value.reason is Reason.DISK_FULL
    assert [path.name for path in small.instances().iterdir()] == ["filler"]
    assert small.engine("list").instances == []
    filler.unlink()

    instance = small.create()
    filler = fill(small.instances(), leave=MIB)
    with pytest.raises(Refusal, match="the host's disk is full") as refused:
        small.boot(instance, guest=port)
    assert refused.value.reason is Reason.DISK_FULL
    assert small.query(instance).state == "stopped"
    filler.unlink()

    small.boot(instance, guest=port)
    small.provision(instance)
    write(small, instance, "before", boot=1)
    filler = fill(small.instances(), leave=4 * MIB)
    much = (
        "import hashlib, os\nif os.fork() == 0:\n"
        " data = b'0123456789abcdef' * 4096\n"
        " with open('/run/box/root/home/agent/much', 'wb') as f:\n"
        "  for _ in range(24 * 16): f.write(data)\n"
        "  f.flush(); os.fsync(f.fileno())\n"
        " os.rename('/run/box/root/home/agent/much', '/run/box/root/home/agent/whole')\n"
        " os.sync(); os._exit(0)\n"
    )
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(small.ask, instance, much)  # it ends when the machine goes on
        small.until_state(instance, "paused", seconds=60)
        small.notes.wait("vmm-stalled")
        with pytest.raises(Refusal, match="make room") as refused:
            until("it is frozen again", lambda: resumed(small, instance), seconds=60)
        assert refused.value.reason is Reason.DISK_FULL
        filler.unlink()
        assert small.engine("resume", small.vmm(instance)).state == "running"
        writing.result(90)
    whole = (
        "import os, time\nwhile not os.path.exists('/run/box/root/home/agent/whole'):"
        " time.sleep(0.05)\n"
        "print(open('/run/box/root/home/agent/whole', 'rb').read() == b'0123456789abcdef' * 4096"
        " * 24 * 16)"
    )
    assert small.ask(instance, whole) == "True"
    assert read(small, instance, boot=1) == ["before"]
    small.poweroff(instance)
    small.until_state(instance, "stopped", seconds=60)
    small.boot(instance, 2, guest=port)
    small.provision(instance, 2)
    assert small.ask(instance, whole, boot=2) == "True"
    small.engine("kill", engine.Vmm(instance=instance, boot=2))


def resumed(machines: Machines, instance: str) -> bool:
    """False: it goes on for now, until it writes again. Raises Refusal when it may not."""
    machines.engine("resume", machines.vmm(instance))
    machines.until_state(instance, "paused", seconds=60)
    return False
