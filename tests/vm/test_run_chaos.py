"""kill -9 of each process in turn during a run that ends with a push.

The run either finishes or ends with a code that docs/operations.md has, and says nothing that
is not so; the machine lives; the repository is whole; and nothing is left over. That page's
table is what `OUTCOMES` says here.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import cli
from support.jobs import NAME, Job
from support.until import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]  # emulated, and hosts are busy

# Exit codes of `run` when it is killed meanwhile, and whether what was under way through it
# may be lost, so that the agent is told of a failure. The command line's own death is -9.
OUTCOMES: dict[str, tuple[set[int], bool]] = {
    "channel": ({0}, False),
    "registry": ({0}, False),
    "engine": ({0}, False),
    "store": ({0}, False),
    "netstack": ({0}, False),
    "helper": ({0}, False),
    "worker": ({0}, True),
    "broker": ({0}, True),
    "command line": ({-signal.SIGKILL}, False),
    "supervisord": ({0, 14}, True),
}
GAP_S = 7.0  # five deaths of a program within 30 s make it stay down
LONG_S = 2.5  # about what the job takes


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    made = Job()
    try:
        yield made
    finally:
        made.close()


def worker(job: Job) -> int:
    """The process that is the machine's network."""
    found = job.run("inspect", NAME, "--json").result["id"]
    record = json.loads((job.paths.state / "instances" / found / "state.json").read_text())
    pid: int = record["procs"]["worker"]["pid"]
    return pid


def kill(job: Job, victim: str, run: subprocess.Popen[str]) -> None:
    if victim == "command line":
        run.kill()
    elif victim == "worker":
        os.kill(worker(job), signal.SIGKILL)
    else:
        job.kill(victim)


def disturbed(job: Job, victim: str, delay: float, name: str) -> None:
    told: Any = (victim, round(delay, 2), name)
    branch = f"agent-box/{NAME}/{name}"
    before = job.branches()
    vmm = job.vmm(NAME)
    process = subprocess.Popen(
        [cli.BINARY, "run", NAME, "--prompt", branch, "--json"],
        env=job.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.readline()
    timer = threading.Timer(delay, kill, (job, victim, process))
    timer.start()
    try:
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
        timer.join()
    exits, lossy = OUTCOMES[victim]
    told = (*told, process.returncode, first, out[-1500:], err)
    assert process.returncode in {*exits, 0}, told
    if process.returncode:  # the run goes on without it
        job.up()
        followed = job.run("run", NAME, "--follow", timeout=200)
        assert followed.exit in (0, 3), (told, followed)
    else:
        items = [json.loads(line) for line in out.splitlines()]
        chunks = [i["update"] for i in items if i.get("kind") == "agent_message_chunk"]
        said = "".join(chunk["content"]["text"] for chunk in chunks)
        assert "pushed " in said or lossy, (told, said, job.events(NAME)[-12:])
        if "pushed " in said:
            assert job.branches()[branch] == said.rpartition("pushed ")[2][:40], (told, said)
    job.up()
    after = job.branches()
    assert before.items() <= after.items() and len(after) - len(before) <= 1, told
    if not lossy:
        assert branch in after, told
    assert (job.vmm(NAME), job.state(NAME)) == (vmm, "running"), told
    assert job.run("exec", NAME, "--", "true", timeout=60).exit == 0, told
    ended = [e["facts"] for e in job.events(NAME) if e["kind"] == "run-ended"]
    assert {(e["how"], e["stop_reason"]) for e in ended} == {("stopped", "end_turn")}, told
    until("one machine", lambda: len(job.walls()) == 1)
    look = ("exec", NAME, "--", "sh", "-c", "pgrep -fc [a]cpagent.py; true")
    until("no harness", lambda: job.run(*look, timeout=60).out.strip() == "0", seconds=60)


def test_each_process_once(job: Job) -> None:
    dice = random.Random(7)
    for victim in OUTCOMES:
        disturbed(job, victim, dice.random() * LONG_S, victim.replace(" ", "-"))


def test_each_process_often(job: Job) -> None:
    seed = int(time.time())
    print("seed", seed)
    dice = random.Random(seed)
    for number in range(20):
        for victim in OUTCOMES:
            began = time.monotonic()
            disturbed(job, victim, dice.random() * LONG_S, f"{victim.replace(' ', '-')}-{number}")
            time.sleep(max(0.0, GAP_S / 4 - (time.monotonic() - began)))
