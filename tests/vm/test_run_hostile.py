"""Harnesses that exhaust what they can reach, in a real machine, while another machine works.

Each ends with the code that docs/harnesses.md has; the other machine's run, which goes on
beside it, ends well; the services stay as they are and small; and the machine of the hostile
one is of use again.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import acpagent, cli
from support.until import until
from support.vm import CONFIG, Machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]  # emulated, and hosts are busy

AGENT = "/home/agent/acpagent.py"
SCRIPT = "/home/agent/script"
FILL = "/home/agent/fill"
HARNESS = f'harness = ["python3", "-I", "-S", "{AGENT}", "@{SCRIPT}"]\n'
BAD, GOOD = "bad", "good"
RESIDENT_MAX = 160 << 20  # bytes; a service alone has a quarter of it


@pytest.fixture(scope="module")
def host() -> Iterator[Machines]:
    made = Machines(config=CONFIG + HARNESS)
    try:
        made.up()
        text = Path(acpagent.__file__).read_text()
        for name in (BAD, GOOD):
            assert made.run("create", name).exit == 0
            made.start(name)
            ran = made.run("exec", name, "--", "sh", "-c", f"cat >{AGENT}", stdin=text)
            assert ran.exit == 0, ran
        be(made, GOOD, "good")
        yield made
    finally:
        made.close()


def be(host: Machines, name: str, script: str) -> None:
    ran = host.run("exec", name, "--", "sh", "-c", f"cat >{SCRIPT}", stdin=script, timeout=120)
    assert ran.exit == 0, ran


def peak(pid: int) -> int:
    """The most that a process ever had in memory, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.parametrize(
    ("script", "limit", "exit", "kind"),
    [
        ("flood", 600, 20, "too-much-output"),
        ("many", 600, 20, "too-much-output"),
        ("long_line 104857600", 600, 20, "line-too-long"),
        ("bad_json", 600, 20, "bad-json"),
        ("forged_permission id", 600, 20, "protocol"),
        ("forged_permission session", 600, 20, "protocol"),
        ("forged_permission answer", 600, 20, "protocol"),
        ("early", 600, 20, "protocol"),
        ("deaf", 5, 21, "run-timed-out"),
        ("forks here", 20, 21, "run-timed-out"),
        (f"fills {FILL}", 600, 0, ""),
    ],
)
def test_what_it_exhausts_is_its_own(
    host: Machines, script: str, limit: int, exit: int, kind: str
) -> None:
    be(host, BAD, script)
    before = {name: host.inner(name) for name in ("channel", "registry", "engine", "broker")}
    bad = subprocess.Popen(
        [cli.BINARY, "run", BAD, "--prompt", "x", "--timeout", str(limit), "--json"],
        env=host.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        ran = host.run("run", GOOD, "--prompt", "hello", timeout=300)
        assert (ran.exit, ran.out) == (0, "I will \ndo: hello\n"), ran
        out, _ = bad.communicate(timeout=900)
    finally:
        bad.kill()
        bad.wait()
    last = json.loads(out.splitlines()[-1])
    assert bad.returncode == exit, last
    assert last.get("error", {}).get("kind", "") == kind, last
    assert host.run("exec", GOOD, "--", "true", timeout=60).exit == 0
    after = {name: host.inner(name) for name in before}
    assert after == before  # none of them ended over it
    assert max(peak(pid) for pids in after.values() for pid in pids) < RESIDENT_MAX
    look = ("exec", BAD, "--", "sh", "-c", "pgrep -fc [a]cpagent.py; true")
    until("it is gone", lambda: host.run(*look, timeout=120).out.strip() == "0", seconds=300)
    assert host.run("exec", BAD, "--", "rm", "-f", FILL, timeout=60).exit == 0
    be(host, BAD, "good")
    ran = host.run("run", BAD, "--prompt", "hello", timeout=300)
    assert (ran.exit, ran.out) == (0, "I will \ndo: hello\n"), ran


def test_what_leaves_its_session_ends_with_the_machine(host: Machines) -> None:
    """A bomb that is in no process group of the harness outlives the run, in its own machine;
    the other one's work goes on, and a stop ends it."""
    be(host, BAD, "forks away")
    ran = host.run("run", BAD, "--prompt", "x", "--timeout", "20", "--json", timeout=300)
    assert ran.lines[-1]["error"]["kind"] == "run-timed-out", ran
    ran = host.run("run", GOOD, "--prompt", "hello", timeout=300)
    assert ran.exit == 0, ran
    assert host.run("stop", BAD, "--grace", "0", timeout=120).exit == 0
    host.start(BAD)
    be(host, BAD, "good")
    assert host.run("run", BAD, "--prompt", "hello", timeout=300).exit == 0
