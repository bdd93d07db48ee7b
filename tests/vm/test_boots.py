"""Many boots on a host that is busy, and many machines at once. Each is slow; run it by hand
with `-m slow -s`, and it says how long the boots took.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from support.vm import START_S, Machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BOOTS = 50
AT_ONCE = 10
ROOM_GIB = 24


@pytest.fixture
def host() -> Iterator[Machines]:
    with closing(Machines()) as made:
        made.up()
        yield made


@contextmanager
def busy() -> Iterator[None]:
    """Every core has something else to do all the time."""
    hogs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def told(what: str, seconds: list[float]) -> None:
    print(
        f"\n{what}: {len(seconds)} reached running, in {min(seconds):.1f} to {max(seconds):.1f} s,"
        f" median {statistics.median(seconds):.1f} s",
        flush=True,
    )


def test_every_boot_reaches_running_while_the_cores_are_busy(host: Machines) -> None:
    assert host.run("create", "web").exit == 0
    taken = []
    with busy():
        for _ in range(BOOTS):
            begun = time.monotonic()
            host.start("web")
            taken.append(time.monotonic() - begun)
            assert host.run("stop", "web", "--grace", "0", timeout=120).exit == 0
    assert host.kinds("web").count("start-done") == len(taken) == BOOTS
    told("boots", taken)


def test_ten_machines_at_once(host: Machines) -> None:
    """Their memory is taken as the guests use it, and much of it is one image for all."""
    names = [f"m{number}" for number in range(AT_ONCE)]
    for name in names:
        assert host.run("create", name, "--memory", "2G").exit == 0

    def boot(name: str) -> float:
        begun = time.monotonic()
        ran = host.run("start", name, "--json", timeout=3 * START_S)
        assert ran.exit == 0, (ran, host.events(name))
        return time.monotonic() - begun

    with ThreadPoolExecutor(3) as pool:  # more would only wait for the two cores
        taken = list(pool.map(boot, names))
    assert {host.state(name) for name in names} == {"running"}
    used = sum(map(pss, host.pids())) + sum(pss(host.vmm(name)) for name in names)
    assert used < ROOM_GIB << 30
    told(f"machines at once, {used / (1 << 30):.1f} GiB in all", taken)
    for name in names:
        assert host.run("delete", name, "--force", timeout=120).exit == 0
    assert host.walls() == []


def pss(pid: int) -> int:
    """Bytes that a process has to itself, and its share of what it shares."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return sum(int(row.split()[1]) << 10 for row in file if row.startswith("Pss:"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
