"""Ten machines do the main job at once: each pushes its own branch, and has its own alone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from support import cli
from support.jobs import Job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
]  # emulated, and hosts are busy

NAMES = [f"w{number}" for number in range(10)]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    made = Job(*NAMES)
    try:
        yield made
    finally:
        made.close()


def test_each_does_its_own(job: Job) -> None:
    runs = {
        name: subprocess.Popen(
            [cli.BINARY, "run", name, "--prompt", f"agent-box/{name}/ten"],
            env=job.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for name in NAMES
    }  # fmt: skip
    told = {}
    try:
        for name, process in runs.items():
            told[name] = (*process.communicate(timeout=900), process.returncode)
    finally:
        for process in runs.values():
            process.kill()
            process.wait()
    branches = job.branches()
    for name, (out, _, code) in told.items():
        assert code == 0, told
        assert out.endswith(f"pushed {branches[f'agent-box/{name}/ten']}\n"), told
    assert set(branches) == {"main", *(f"agent-box/{name}/ten" for name in NAMES)}
    ids = {name: job.run("inspect", name, "--json").result["id"] for name in NAMES}
    assert len(set(ids.values())) == len(NAMES)
    rows = {row["name"]: row for row in job.run("usage", "--json").result["usage"]}
    assert set(rows) == set(NAMES) and len({row["requests"] for row in rows.values()}) == 1, rows
    nonces = set()
    for name in NAMES:
        events = job.events(name)
        assert {event["instance"] for event in events} == {ids[name]}
        assert [e["kind"] for e in events].count("run-ended") == 1
        ran = job.run("exec", name, "--", "sh", "-c", "cat ~/.config/agent-box/git; ls ~ ")
        assert ran.exit == 0
        assert sum(line.isdigit() for line in ran.out.splitlines()) == 1  # clones
        nonces.add(next(line for line in ran.out.splitlines() if "extraHeader" in line))
    assert len(nonces) == len(NAMES)


def test_none_writes_for_another(job: Job) -> None:
    push = "git push origin HEAD:refs/heads/agent-box/w1/taken"
    script = f"cd ~/[0-9]*/ && if {push} 2>&1; then echo taken; else echo refused; fi"
    before = job.branches()
    ran = job.run("exec", "w0", "--", "sh", "-c", script, timeout=120)
    assert ran.exit == 0 and ran.out.endswith("refused\n"), ran
    assert job.last("w0", "request-refused")["reason"] == "push-ref"
    assert job.branches() == before
