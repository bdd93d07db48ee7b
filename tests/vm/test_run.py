"""Runs in a real machine: scripted agents do them, good and bad, and the channel service dies.

One machine for all: its harness is told by a file what to be.
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

pytestmark = [pytest.mark.timeout(600)]  # emulated, and hosts are busy

AGENT = "/home/agent/acpagent.py"
SCRIPT = "/home/agent/script"
GO = "/home/agent/go"
HARNESS = f'harness = ["python3", "-I", "-S", "{AGENT}", "@{SCRIPT}"]\n'


@pytest.fixture(scope="module")
def host() -> Iterator[Machines]:
    made = Machines(config=CONFIG + HARNESS)
    try:
        made.up()
        assert made.run("create", "work").exit == 0
        made.start("work")
        text = Path(acpagent.__file__).read_text()
        ran = made.run("exec", "work", "--", "sh", "-c", f"cat >{AGENT}", stdin=text)
        assert ran.exit == 0, ran
        yield made
    finally:
        made.close()


def be(host: Machines, script: str) -> None:
    ran = host.run("exec", "work", "--", "sh", "-c", f"cat >{SCRIPT}", stdin=script)
    assert ran.exit == 0, ran


def test_a_prompt_is_answered(host: Machines) -> None:
    be(host, "good")
    ran = host.run("run", "work", "--prompt", "say hello", timeout=120)
    assert (ran.exit, ran.out) == (0, "I will \ndo: say hello\n"), ran
    assert "allowed once: write a file\n" in ran.err
    allowed = [e for e in host.events("work") if e["kind"] == "permission-allowed"]
    assert [e["source"] for e in allowed] == ["agent-reported"]


@pytest.mark.parametrize(
    ("script", "exit", "kind"),
    [
        ("stops max_tokens", 20, "run-failed"),
        ("dies 3", 20, "harness-exited"),
        ("bad_json", 20, "bad-json"),
        ("long_line 5000000", 20, "line-too-long"),
        ("forged_permission session", 20, "protocol"),
        ("forged_permission answer", 20, "protocol"),
        ("refuses", 20, "harness-error"),
        ("cancelled", 21, "run-timed-out"),
    ],
)
def test_a_hostile_harness_ends_with_its_code(
    host: Machines, script: str, exit: int, kind: str
) -> None:
    be(host, script)
    limit = ("--timeout", "3" if exit == 21 else "200")
    ran = host.run("run", "work", "--prompt", "x", *limit, "--json", timeout=240)
    assert ran.exit == exit, ran
    assert ran.lines[-1]["error"]["kind"] == kind
    look = ("exec", "work", "--", "sh", "-c", "pgrep -fc [a]cpagent.py; true")
    until("it is gone", lambda: host.run(*look, timeout=60).out.strip() == "0", seconds=60)


def test_it_survives_the_end_of_the_channel_and_of_the_command_line(host: Machines) -> None:
    be(host, f"slow {GO}")
    before = len(host.events("work"))
    process = subprocess.Popen(
        [cli.BINARY, "run", "work", "--prompt", "x", "--json"],
        env=host.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "3 " in line:
            break
    process.kill()
    process.wait()
    process.stdout.close()
    host.kill("channel")
    assert host.run("exec", "work", "--", "touch", GO, timeout=60).exit == 0
    ran = host.run("run", "work", "--follow", timeout=120)
    if ran.exit == 3:  # it came to its end before anybody followed
        assert "no run goes on" in ran.err
    else:
        assert (ran.exit, ran.out) == (0, "1 2 3 \ndone\n"), ran
    ended = [e["facts"] for e in host.events("work")[before:] if e["kind"] == "run-ended"]
    assert [(e["how"], e["stop_reason"]) for e in ended] == [("stopped", "end_turn")]
    assert json.loads(said.splitlines()[0])["type"] == "run"
