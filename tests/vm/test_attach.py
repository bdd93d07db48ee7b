"""`attach` and `exec` in a real machine, by the real program at a real terminal."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest
from support import cli
from support.attached import Person
from support.until import until
from support.vm import Machines

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]

LINES = "for n in $(seq 1 {}); do echo line $n; done"


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    made = Machines()
    try:
        assert made.run("create", "web1").exit == 0
        made.start("web1")
        yield made
    finally:
        made.close()


def shell(machines: Machines, *args: str, rows: int = 24) -> Person:
    env = machines.env | {"TERM": "xterm-256color"}
    return Person(["attach", "web1", *(args or ("--shell",))], env, rows=rows)


def command(
    machines: Machines, *argv: str, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [cli.BINARY, "exec", "web1", "--", *argv],
        env=machines.env,
        input=stdin,
        capture_output=True,
        timeout=300,
        check=False,
    )


def terminals(machines: Machines) -> list[str]:
    found = machines.run("attach", "web1", "--list", "--json").result["terminals"]
    return [row["terminal"] for row in found]


def test_the_show(machines: Machines) -> None:
    ran = command(machines, "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, b"out\n", b"err\n")


def test_every_byte_both_ways(machines: Machines) -> None:
    data = os.urandom(2_000_000)
    ran = command(machines, "cat", stdin=data)
    assert ran.returncode == 0 and ran.stderr == b""
    assert ran.stdout == data


@pytest.mark.slow
def test_100_mib_come_whole(machines: Machines) -> None:
    code = (
        "import hashlib, os, sys\nmade = hashlib.sha256()\n"
        f"for _ in range(100):\n data = os.urandom({1 << 20})\n made.update(data)\n"
        " sys.stdout.buffer.write(data)\nsys.stderr.write(made.hexdigest())"
    )
    ran = command(machines, "python3", "-c", code)
    assert len(ran.stdout) == 100 << 20
    assert hashlib.sha256(ran.stdout).hexdigest() == ran.stderr.decode()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("web1:/nowhere -- true", 64, "/nowhere"),
        ("web1 -- no-such-program", 127, "no-such-program"),
        ("web1 --timeout 1 -- sleep 600", 124, "the time is over"),
        ("gone -- true", 3, "gone"),
    ],
)
def test_what_cannot_be(machines: Machines, words: str, code: int, said: str) -> None:
    ran = subprocess.run(
        [cli.BINARY, "exec", *words.split()], env=machines.env, capture_output=True, check=False
    )
    assert ran.returncode == code and ran.stdout == b""
    assert said in ran.stderr.decode() and ran.stderr.count(b"\n") == 1


def test_a_shell_over_restarts_and_kills_of_the_channel(machines: Machines) -> None:
    """During output, and detached: nothing is lost or doubled, and the shell never notices."""
    with shell(machines, rows=31) as person:
        at = person.until(b"$ ")
        person.type(b"stty size; echo $TERM $LANG; V=kept\r")
        at = person.until(b"31 80\r\nxterm-256color C.UTF-8\r\n", after=at)
        at = person.until(b"$ ", after=at)
        person.type(LINES.format(6000).encode() + b"; echo end$((6*7))\r")
        until("output begins", lambda: person.look(1) and b"line 200\r" in person.seen)
        machines.kill("channel")
        person.type(b"echo typed mean")
        until("it goes on", lambda: person.look(1) and b"line 2500\r" in person.seen)
        person.type(b"while\r")
        assert machines.run("service", "restart", "channel").exit == 0
        at = person.until(b"end42\r\n", after=at)
        at = person.until(b"\rtyped meanwhile\r\n", after=at)
        # The guest's terminal echoes what is typed wherever the output is just then.
        output = person.seen.replace(b"echo typed mean", b"").replace(b"while\r\n", b"", 1)
        numbers = re.findall(rb"line ([0-9]+)\r\n", output)
        assert list(map(int, numbers)) == list(range(1, 6001))
        person.type(b"\x10\x11")
        code, said = person.end()
        assert code == 0 and person.is_restored
        id = said.split()[7]
    machines.kill("channel")
    assert id in terminals(machines)
    with shell(machines, "--terminal", id, rows=40) as person:
        person.until(b"typed meanwhile")  # what there was
        person.until(b"$ ")
        at = len(person.seen)
        person.type(b"stty size; echo $V; exit 5\r")
        person.until(b"40 80\r\nkept\r\n", after=at)
        assert person.end()[0] == 5
        assert person.is_restored
    assert id not in terminals(machines)


def test_the_cli_is_killed_and_the_terminal_goes_on(machines: Machines) -> None:
    with shell(machines) as person:
        person.until(b"$ ")
        person.type(b"echo before$((1+1))\r")
        person.until(b"before2")
        person.process.send_signal(signal.SIGKILL)
        person.process.wait()
    id = terminals(machines)[-1]
    with shell(machines, "--terminal", id) as person:
        person.until(b"before2")
        person.type(b"exit\r")
        assert person.end()[0] == 0


def test_a_program_on_the_whole_screen_sees_its_size(machines: Machines) -> None:
    with Person(
        ["exec", "web1", "--tty", "--", "less", "/etc/services"],
        machines.env | {"TERM": "xterm-256color"},
        rows=10,
    ) as person:
        person.until(b"/etc/services")
        assert b"\x1b[?1049h" in person.seen
        at = len(person.seen)
        person.resize(30, 80)
        person.until(b"ftp", after=at)  # which is in line 20, and now has room
        person.type(b"q")
        assert person.end()[0] == 0
        assert b"\x1b[?1049l" in person.seen[at:] and person.is_restored


def test_pausing_and_stopping_it_is_23(machines: Machines) -> None:
    for verb in ("pause", "stop"):
        with shell(machines) as person:
            person.until(b"$ ")
            running = subprocess.Popen(
                [str(cli.BINARY), "exec", "web1", "--", "sleep", "600"],
                env=machines.env,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            until("the command runs", lambda: b"sleep" in command(machines, "ps", "ax").stdout)
            assert machines.run(verb, "web1").exit == 0
            code, said = person.end()
            assert code == 23 and person.is_restored, said
            assert said.startswith("agent-box: web1 ") and said.count("\n") == 1
            assert running.wait(60) == 23
            assert running.stderr is not None
            assert running.stderr.read().decode().startswith("agent-box: web1 ")
            running.stderr.close()
        if verb == "pause":
            assert machines.run("resume", "web1").exit == 0
    ran = command(machines, "true")
    assert ran.returncode == 4 and json.dumps("web1 is stopped")[1:-1] in ran.stderr.decode()
