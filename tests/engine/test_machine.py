"""Real machines under TCG, behind the real walls: the engine, its helper and a guest."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.machines import DISK, Machines
from support.until import until

from agent_box.bus.errors import Reason, Refusal
from agent_box.engine import contract as engine

pytestmark = [
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def machine(machines: Machines, port: str) -> str:
    """One that is provisioned, for tests that leave it running."""
    instance = machines.create()
    machines.boot(instance, guest=port)
    machines.provision(instance)
    return instance


def guest_skew_s(machines: Machines, instance: str) -> float:
    before = time.time()
    there = int(machines.ask(instance, "import time; print(time.time_ns())"))
    return there / 1e9 - (before + time.time()) / 2


def test_probe_finds_nothing_missing(machines: Machines) -> None:
    probed = machines.engine("probe", seconds=30)
    assert (probed.engine, probed.accel, probed.helper, probed.gaps) == ("qemu", "tcg", "user", [])


def test_pause_and_resume_keep_the_guests_clock(machines: Machines, machine: str) -> None:
    assert machines.engine("pause", machines.vmm(machine)).state == "paused"
    time.sleep(4)  # the pause itself
    resumed = time.monotonic()
    assert machines.engine("resume", machines.vmm(machine)).state == "running"
    provisioned = machines.set_time(machine)
    assert time.monotonic() - resumed < 2
    assert abs(provisioned.skew_ms) < 1000
    assert abs(guest_skew_s(machines, machine)) < 1


def test_the_agent_process_may_die_again_and_again(machines: Machines, machine: str) -> None:
    find = (
        "import os\nfor p in os.listdir('/proc'):\n"
        " if p.isdigit() and int(p) != os.getpid():\n"
        "  try: words = open(f'/proc/{p}/stat').read().split()\n"
        "  except OSError: continue\n"
        "  if words[3] == '1' and 'box-guest' in open(f'/proc/{p}/cmdline').read():\n"
    )
    seen = set()
    for _ in range(4):
        seen.add(machines.ask(machine, find + "   print(p); os.kill(int(p), 9)"))
        assert abs(machines.set_time(machine).skew_ms) < 1000
    assert len(seen) == 4
    kept = "import json; print(json.load(open('/run/box/provision.json'))['hostname'])"
    assert machines.ask(machine, kept) == "work"


def test_pid_1_survives_every_signal(machines: Machines, machine: str) -> None:
    said = machines.ask(
        machine,
        "import os\nfor n in range(1, 65): os.kill(1, n)\n"
        "for _ in range(300):\n if os.fork() == 0: os._exit(1)\n"
        "print(open('/proc/1/stat').read().split()[2])",
    )
    assert said in ("S", "R")
    assert abs(machines.set_time(machine).skew_ms) < 1000
    zombies = (
        "import os\nprint(sum(open(f'/proc/{p}/stat').read().split()[2] == 'Z'"
        " for p in os.listdir('/proc') if p.isdigit() and os.path.exists(f'/proc/{p}/stat')))"
    )
    until("orphans are reaped", lambda: machines.ask(machine, zombies) == "0")


def test_a_process_of_the_agents_uid_cannot_end_it(machines: Machines, machine: str) -> None:
    """A fork bomb, in the group that all of the agent's processes are in, and signals."""
    group = "/sys/fs/cgroup/agent"
    few = 150  # of these each forks again and again
    most, room = machines.ask(
        machine,
        f"print(open('{group}/pids.max').read(), open('/proc/sys/kernel/threads-max').read())\n"
        f"open('{group}/pids.max', 'w').write('{few}')",
    ).split()
    assert 0 < int(most) < int(room)
    # All of them weigh as much as one process of ours.
    assert machines.ask(machine, f"print(open('{group}/cpu.weight').read())") == "100"
    machines.ask(
        machine,
        "import os, time\n"
        "from agent_box.guest import processes, system\n"
        "if os.fork() == 0:\n"
        " null = os.open('/dev/null', os.O_RDWR)\n"
        " for n in range(3): os.dup2(null, n)\n"
        " os.closerange(3, 256)\n"
        " system.spare(0)\n"
        " processes.join()\n"
        " os.setgid(1000); os.setuid(1000)\n"
        " for p in os.listdir('/proc'):\n"
        "  if p.isdigit() and int(p) != os.getpid():\n"
        "   try: os.kill(int(p), 9)\n"
        "   except OSError: pass\n"
        " end = time.monotonic() + 30\n"
        " while time.monotonic() < end:\n"
        "  try: os.fork()\n"
        "  except OSError: pass\n"
        " os._exit(0)",
    )
    until(
        "the bomb is refused",
        lambda: (
            int(machines.ask(machine, f"print(open('{group}/pids.events').read().split()[1])")) > 0
        ),
        seconds=60,
    )
    assert abs(machines.set_time(machine).skew_ms) < 5000
    assert int(machines.ask(machine, f"print(open('{group}/pids.current').read())")) <= few
    machines.ask(machine, f"open('{group}/cgroup.kill', 'w').write('1')")
    until(
        "it is over",
        lambda: machines.ask(machine, f"print(open('{group}/pids.current').read())") == "0",
        seconds=60,
    )


def test_files_are_the_agents_and_sudo_is_as_provisioned(machines: Machines, machine: str) -> None:
    look = (
        "import os; r='/run/box/root'; print(os.path.exists(r+'/etc/sudoers.d/agent-box'),"
        " os.stat(r+'/home/agent').st_uid, open(r+'/etc/hostname').read().strip())"
    )
    assert machines.ask(machine, look) == "False 1000 work"
    machines.provision(machine, sudo=True, hostname="other")
    assert machines.ask(machine, look) == "True 1000 other"
    machines.provision(machine)
    assert machines.ask(machine, look) == "False 1000 work"


def test_space_that_the_guest_frees_is_given_back(machines: Machines, machine: str) -> None:
    image = machines.paths.state / "instances" / machine / "data.img"

    def used() -> int:
        return os.stat(image).st_blocks * 512 >> 20

    machines.ask(
        machine,
        "import os\nwith open('/run/box/data/x', 'wb') as f:\n"
        " for _ in range(40): f.write(os.urandom(1 << 20))\n"
        " os.fsync(f.fileno())",
    )
    assert used() >= 40
    machines.ask(machine, "import os; os.unlink('/run/box/data/x'); os.sync()")
    until("it shrinks", lambda: used() < 10)


def test_a_killed_engine_adopts_what_runs(machines: Machines, machine: str) -> None:
    pid = machines.vmm_pid(machine)
    for count in (1, 2):
        machines.restart("engine")
        machines.notes.wait("vmm-adopted", count)
        assert machines.query(machine).state == "running"
        assert abs(machines.set_time(machine).skew_ms) < 1000
    assert machines.vmm_pid(machine) == pid
    assert machines.notes.kinds(machine).count("vmm-started") == 1


def test_a_killed_channel_finds_its_guests_again(machines: Machines, machine: str) -> None:
    machines.restart("channel")
    assert abs(machines.set_time(machine).skew_ms) < 1000


def test_a_killed_helper_is_waited_for(machines: Machines, machine: str) -> None:
    pid = machines.vmm_pid(machine)
    for change in ("pause", "resume"):
        machines.kill_helper()
        with ThreadPoolExecutor(1) as pool:
            changing = pool.submit(machines.engine, change, machines.vmm(machine))
            time.sleep(0.3)  # how long the helper is away
            machines.start_helper()
            wanted = "paused" if change == "pause" else "running"
            assert changing.result(30).state == wanted
    assert abs(machines.set_time(machine).skew_ms) < 1000
    assert machines.vmm_pid(machine) == pid
    machines.notes.wait("helper-back")


def test_a_stopped_process_delays_no_list(machines: Machines, machine: str) -> None:
    pid = machines.vmm_pid(machine)
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(5):
            began = time.monotonic()
            seen = {o.instance: o.state for o in machines.engine("list").instances}
            assert time.monotonic() - began < 1.0
            assert seen[machine] == "unreachable"
    finally:
        os.kill(pid, signal.SIGCONT)
    machines.until_state(machine, "running")
    assert abs(machines.set_time(machine).skew_ms) < 1000


def test_an_end_while_no_engine_is_there_is_noted_once(machines: Machines, port: str) -> None:
    instance = machines.create()
    machines.boot(instance, guest=port)
    pid = machines.vmm_pid(instance)
    machines.kill("engine")
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        machines.restart("engine")
        until("it is seen", lambda: machines.query(instance).state == "stopped")
    machines.notes.wait("vmm-ended")
    ended = [note for note in machines.notes.of("vmm-ended") if note.instance == instance]
    assert [note.facts["by"] for note in ended] == ["vmm"]
    found = machines.query(instance)
    assert (found.boot, found.exit_signal) == (1, 9)
    with pytest.raises(Refusal) as refused:
        machines.engine("pause", machines.vmm(instance))
    assert refused.value.reason is Reason.WRONG_STATE
    machines.engine("delete", engine.Instance(instance=instance))
    machines.made.remove(instance)


@pytest.mark.parametrize("what", ["not ext4", "damaged"])
def test_a_bad_disk_is_told_and_not_touched(machines: Machines, port: str, what: str) -> None:
    instance = machines.create()
    image = machines.paths.state / "instances" / instance / "data.img"
    with image.open("r+b") as file:
        if what == "not ext4":
            file.seek(1024)
            file.write(bytes(1024))
        else:
            file.seek(1024 + 0x3A)
            file.write(b"\2\0")  # it had errors
            file.seek(4096)
            file.write(b"\xff" * (1 << 20))  # group descriptors, bitmaps, inodes
    before = image.read_bytes()[: 1 << 20]
    machines.boot(instance, guest=port)
    with pytest.raises(Refusal, match="data disk") as refused:
        machines.provision(instance)
    assert refused.value.reason is Reason.DISK_DAMAGED
    if what == "not ext4":
        assert image.read_bytes()[: 1 << 20] == before
    machines.poweroff(instance)  # it can still be spoken to
    machines.until_state(instance, "stopped")


def test_a_disk_that_grew_is_grown(machines: Machines, port: str) -> None:
    instance = machines.create()
    image = machines.paths.state / "instances" / instance / "data.img"
    os.truncate(image, 4 * DISK)
    machines.boot(instance, guest=port)
    machines.provision(instance)
    size = "import os; s = os.statvfs('/run/box/data'); print(s.f_blocks * s.f_frsize)"
    assert int(machines.ask(instance, size)) > 3.5 * DISK
    marker = "import os; f = open('/run/box/root/home/agent/kept', 'w'); f.write('x'); os.sync()"
    machines.ask(instance, marker)
    began = time.monotonic()
    machines.poweroff(instance)
    machines.until_state(instance, "stopped")
    assert time.monotonic() - began < 15
    said = subprocess.run(
        ["/sbin/dumpe2fs", "-h", str(image)], capture_output=True, text=True, check=True
    ).stdout
    assert "Filesystem state:         clean" in said and "needs_recovery" not in said
    machines.boot(instance, 2, guest=port)
    machines.provision(instance, 2)
    assert (
        machines.ask(instance, "print(open('/run/box/root/home/agent/kept').read())", boot=2) == "x"
    )
    machines.engine("kill", machines.vmm(instance, 2))


@pytest.mark.slow
def test_ten_stopped_processes_delay_no_list(machines: Machines) -> None:
    ids = [machines.create(64 << 20) for _ in range(10)]
    for instance in ids:
        machines.boot(instance, memory=128)
    pids = [machines.vmm_pid(instance) for instance in ids]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(5):
            began = time.monotonic()
            seen = {o.instance: o.state for o in machines.engine("list").instances}
            assert time.monotonic() - began < 1.0
            assert {seen[instance] for instance in ids} == {"unreachable"}
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    for instance in ids:
        machines.engine("kill", machines.vmm(instance))
