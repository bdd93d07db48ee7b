"""A credential that does a job in a real machine is nowhere but in the store and the broker.

Looked for in every file of this host's that was written since, the machine's disk and a capture
of its packets among them; in the memory of every process of agent-box but the two, the
machine's own memory among it; in the journal, and in all that was printed.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import cli, memory, procs
from support.canary import Canary, Found
from support.jobs import NAME, Job
from support.until import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
]  # emulated, and hosts are busy

BRANCH = f"agent-box/{NAME}/canary"
ALLOWED = ("store", "broker")
LARGEST = 1 << 30  # bytes of a file; the machine's disk is one of the files
PLANTED = "/home/agent/planted"


class Scene:
    def __init__(self) -> None:
        self.since_ns = time.time_ns()
        self.job = Job()
        self.canary = Canary(self.job.token.encode())
        self.closed: set[int] = set()

    def processes(self) -> dict[int, str]:
        """All of agent-box's but the two, each with what it is."""
        mine = {*self.job.pids(), self.job.vmm(NAME)}
        for pid in list(mine):
            mine.update(procs.descendants(pid))
        left = {pid for name in ALLOWED for pid in self.job.inner(name)}
        left.add(self.job.forge.pid)
        return {pid: " ".join(procs.cmdline(pid))[:200] for pid in sorted(mine - left)}

    def in_memory(self) -> list[Found]:
        """Where a service's memory is closed even to its own account, that is its wall."""
        found = []
        self.closed = set()
        for pid in self.processes():
            try:
                found += memory.search(self.canary, pid)
            except PermissionError:
                self.closed.add(pid)
        return found

    def in_files(self) -> list[Found]:
        """The certificate's key and the like of the forge are outside of agent-box, but the
        token is in no file of it, either."""
        places = [self.job.home, Path("/tmp"), Path("/dev/shm"), Path("/var/tmp")]
        return self.canary.in_files(places[:1], since_ns=self.since_ns, longest=LARGEST) + (
            self.canary.in_files(places[1:], since_ns=self.since_ns, deep=False, longest=LARGEST)
        )


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    made = Scene()
    try:
        yield made
    finally:
        made.job.close()


def test_after_the_job_it_is_nowhere(scene: Scene) -> None:
    job, canary = scene.job, scene.canary
    packets = job.home / "packets.pcap"
    capture = subprocess.Popen(
        [cli.BINARY, "capture", NAME, "-w", str(packets)],
        env=job.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        until("it captures", lambda: packets.exists() and packets.stat().st_size >= 24)
        ran = job.run("run", NAME, "--prompt", BRANCH, timeout=300)
    finally:
        capture.send_signal(signal.SIGINT)
        printed, _ = capture.communicate(timeout=60)
    assert ran.exit == 0 and ran.out.endswith(f"pushed {job.branches()[BRANCH]}\n"), ran
    assert packets.stat().st_size > 1 << 20  # what was pushed went by
    said = [ran.out, ran.err]
    for verb in (
        ("logs", NAME),
        ("logs", NAME, "--json"),
        ("usage", NAME, "--json"),
        ("inspect", NAME, "--json"),
        ("secret", "list", "--json"),
        ("doctor", "--json"),
        ("exec", NAME, "--", "env"),
        ("exec", NAME, "--user", "root", "--", "dmesg"),
    ):
        shown = job.run(*verb)
        said += [shown.out, shown.err]
    assert canary.within("".join(said).encode() + printed) == []
    assert scene.in_files() == []
    assert canary.in_processes() == []
    assert scene.job.vmm(NAME) in scene.processes()
    assert scene.in_memory() == []
    assert job.vmm(NAME) not in scene.closed  # the machine's memory was looked into


def test_the_search_would_have_found_it(scene: Scene) -> None:
    """In the machine's memory and on its disk, given to it by hand."""
    job = scene.job
    script = f"cat >{PLANTED}; sync; cat {PLANTED} >/dev/null"
    assert job.run("exec", NAME, "--", "sh", "-c", script, stdin=job.token).exit == 0
    disks = {f.where for f in scene.in_files()}
    assert any("/instances/" in where for where in disks), disks
    vmm = job.vmm(NAME)
    assert any(f.where.startswith(f"memory of {vmm},") for f in scene.in_memory())
