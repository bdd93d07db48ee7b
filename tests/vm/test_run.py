"""A run in a real machine: a scripted agent does it, and the channel service dies under it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import acpagent, cli
from support.vm import CONFIG, Machines

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]  # emulated, and hosts are busy

AGENT = "/home/agent/acpagent.py"
PROFILES = "".join(
    f"""
[profiles.{name}]
cpus = 1
memory = "256M"
disk = "256M"
harness = ["python3", "-I", "-S", "{AGENT}", "{script}", "{argument}"]
"""
    for name, script, argument in (("good", "good", ""), ("slow", "slow", "/home/agent/go"))
)


@pytest.fixture(scope="module")
def host() -> Iterator[Machines]:
    made = Machines(config=CONFIG + PROFILES)
    try:
        made.up()
        for name in ("good", "slow"):
            assert made.run("create", name, "--profile", name).exit == 0
            made.start(name)
            text = Path(acpagent.__file__).read_text()
            ran = made.run("exec", name, "--", "sh", "-c", f"cat >{AGENT}", stdin=text)
            assert ran.exit == 0, ran
        yield made
    finally:
        made.close()


def test_a_prompt_is_answered(host: Machines) -> None:
    ran = host.run("run", "good", "--prompt", "say hello", timeout=120)
    assert (ran.exit, ran.out) == (0, "I will \ndo: say hello\n"), ran
    assert "allowed once: write a file\n" in ran.err
    allowed = [e for e in host.events("good") if e["kind"] == "permission-allowed"]
    assert [e["source"] for e in allowed] == ["agent-reported"]


def test_it_survives_the_end_of_the_channel_and_of_the_command_line(host: Machines) -> None:
    process = subprocess.Popen(
        [cli.BINARY, "run", "slow", "--prompt", "x", "--json"],
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
    assert host.run("exec", "slow", "--", "touch", "/home/agent/go", timeout=60).exit == 0
    ran = host.run("run", "slow", "--follow", timeout=120)
    if ran.exit == 3:  # it came to its end before anybody followed
        assert "no run goes on" in ran.err
    else:
        assert (ran.exit, ran.out) == (0, "1 2 3 \ndone\n"), ran
    ended = [e["facts"] for e in host.events("slow") if e["kind"] == "run-ended"]
    assert [(e["how"], e["stop_reason"]) for e in ended] == [("stopped", "end_turn")]
    assert json.loads(said.splitlines()[0])["type"] == "run"
