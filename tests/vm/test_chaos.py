"""kill -9 of any process at any moment of any verb: records and machines agree afterwards,
what ran still runs, and nothing is left of what was deleted.

By default a few kills; with `-m slow` as many as the milestone asks for.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from support import procs
from support.until import until
from support.vm import START_S, Machines

pytestmark = [pytest.mark.timeout(3600)]

PROGRAMS = ("registry", "engine", "channel", "helper", "supervisord")
FEW, MANY = 6, 100
GAP_S = 7.0  # five deaths of a program within 30 s make it stay down
# What each verb leaves behind when it succeeds, and what it starts from.
VERBS = (
    ("create", "gone", "stopped"),
    ("start", "stopped", "running"),
    ("pause", "running", "paused"),
    ("resume", "paused", "running"),
    ("stop --grace 20", "running", "stopped"),
    ("delete", "stopped", "gone"),
)
RESTING = ("gone", "stopped", "running", "paused")


@pytest.fixture(scope="module")
def host() -> Iterator[Machines]:
    made = Machines()
    try:
        made.up()
        assert made.run("create", "calm").exit == 0
        made.start("calm")
        assert len(made.walls()) == 1  # what is counted below is seen
        yield made
    finally:
        made.close()


def bring(host: Machines, name: str, wanted: str) -> None:
    """Puts the instance into a state, by verbs that nobody disturbs."""
    now = host.state(name)
    if wanted == "gone":
        if now != "gone":
            assert host.run("delete", name, "--force", timeout=60).exit == 0
        return
    if now == "gone":
        assert host.run("create", name).exit == 0
        now = "stopped"
    if wanted == "stopped" and now != "stopped":
        assert host.run("stop", name, "--grace", "0", timeout=60).exit == 0
    if wanted in ("running", "paused") and now == "stopped":
        host.start(name)
    if wanted == "running" and now == "paused":
        assert host.run("resume", name, timeout=60).exit == 0
    if wanted == "paused" and now != "paused":
        assert host.run("pause", name, timeout=60).exit == 0


def kills(host: Machines, count: int, seed: int) -> None:
    dice = random.Random(seed)
    calm = host.vmm("calm")
    last: dict[str, float] = {}
    for number in range(count):
        verb, before, after = VERBS[number % len(VERBS)]
        program = PROGRAMS[dice.randrange(len(PROGRAMS))]
        delay = dice.random() * (4.0 if verb == "start" else 0.6)
        bring(host, "wild", before)
        name, *more = verb.split()
        time.sleep(max(0.0, last.get(program, 0.0) + GAP_S - time.monotonic()))
        process = host.popen(name, "wild", *more, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        timer = threading.Timer(delay, host.kill, (program,))
        timer.start()
        try:
            out, err = process.communicate(timeout=START_S)
        finally:
            process.kill()
            timer.join()
        last[program] = time.monotonic()
        print(number, verb, program, f"after {delay:.2f} s: exit", process.returncode)
        told = (number, seed, verb, program, round(delay, 2), process.returncode, out, err)
        state = until(
            f"it rests: {told}",
            lambda: s if (s := host.state("wild")) in RESTING else "",
            seconds=90,
        )
        if process.returncode == 0:
            assert state == after, told
        # Whoever looks while it is taken over, or while its VMM has no turn, sees `unknown`.
        until(f"it runs: {told}", lambda: host.state("calm") == "running", seconds=90)
        assert host.vmm("calm") == calm and procs.state(calm) not in "ZX", told
        agree(host, state, told)


def agree(host: Machines, state: str, told: object) -> None:
    """What the record says of `wild` is what is on this host, and nothing else is."""
    instances = 1 if state == "gone" else 2
    machines = 2 if state in ("running", "paused") else 1
    found = host.run("list", "--json").result
    assert found["problems"] == [], told

    def directories() -> list[str]:
        return [path for path in host.left() if "/instances/" in path]

    try:
        until(
            f"{instances} directories and {machines} machines",
            lambda: len(directories()) == instances and len(host.walls()) == machines,
            seconds=60,
        )
    except AssertionError as error:
        walls = {pid: procs.cmdline(pid) for pid in host.walls()}
        events = host.run("logs", "--tail", "40", "--json").result
        error.add_note(f"{told}\n{directories()}\n{walls}\n{events}")
        raise
    assert host.run("list", "--json").result["strays"] == [], told


def test_a_few_kills(host: Machines) -> None:
    kills(host, FEW, seed=int(os.environ.get("AGENT_BOX_TEST_SEED", "1")))
    assert host.run("logs", "--verify").exit == 0


@pytest.mark.slow
def test_many_kills(host: Machines) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    kills(host, MANY, seed)
    assert host.run("logs", "--verify").exit == 0
