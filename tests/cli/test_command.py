"""`exec` by the real program: a command in a guest that is this host, on pipes, behind a channel
that can be killed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support import cli
from support.attached import Person, Toys, resting
from support.until import until


def test_output_status_and_nothing_of_ours(toys: Toys) -> None:
    ran = toys.run("exec", "web1", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, b"out\n", b"err\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_command_that_a_signal_ends(toys: Toys, number: int) -> None:
    ran = toys.run("exec", "web1", "--", "sh", "-c", f"kill -{number} $$")
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + number, b"", b"")


def test_every_byte_both_ways(toys: Toys) -> None:
    data = os.urandom(3_000_000)
    script = 'cat | tee /dev/stderr; printf "" '
    ran = toys.run("exec", "web1", "--", "sh", "-c", script, stdin=data)
    assert ran.returncode == 0
    assert ran.stdout == data and ran.stderr == data


def test_arguments_are_passed_as_they_are(toys: Toys) -> None:
    words = ["", "a b", "*", "--json", "-x", "\n", "é", "\udcff\udc80"]
    ran = toys.run("exec", "web1", "--", "printf", "%s\\0", *words)
    assert ran.stdout == b"".join(os.fsencode(word) + b"\0" for word in words)


def test_directory_and_variables(toys: Toys) -> None:
    script = 'pwd; printf %s "$A|$B"'
    ran = toys.run("exec", "web1:/usr", "--env", "A=1", "--env", "B=x=y", "--", "sh", "-c", script)
    assert ran.stdout == b"/usr\n1|x=y"


@pytest.mark.parametrize("redirect", ["</dev/null", "<&-", "</etc/passwd"])
def test_stdin_of_every_kind(toys: Toys, redirect: str) -> None:
    command = f'exec "$0" exec web1 -- cat {redirect}'
    ran = subprocess.run(
        ["sh", "-c", command, cli.BINARY], env=toys.env, capture_output=True, timeout=60, check=True
    )
    expected = Path("/etc/passwd").read_bytes() if "passwd" in redirect else b""
    assert (ran.stdout, ran.stderr) == (expected, b"")


def test_stdin_stays_open_while_the_command_runs(toys: Toys) -> None:
    process = toys.popen(
        "exec", "web1", "--", "head", "-n", "1", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin and process.stdout
    process.stdin.write(b"first\n")
    process.stdin.flush()
    assert process.stdout.read() == b"first\n"  # and it ends, though stdin is open
    assert process.wait(60) == 0
    process.stdin.close()
    process.stdout.close()


def test_the_timeout(toys: Toys) -> None:
    ran = toys.run("exec", "web1", "--timeout", "1", "--", "sleep", "600")
    assert ran.returncode == 124
    assert ran.stderr == b"agent-box: the time is over, and the command was ended\n"


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2"])
def test_signals_are_passed_on(toys: Toys, name: str) -> None:
    script = f'trap "echo got {name}; exit 9" {name}; echo ready; while :; do sleep 0.05; done'
    process = toys.popen("exec", "web1", "--", "sh", "-c", script, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(getattr(signal, f"SIG{name}"))
    assert process.stdout.read() == b"got " + name.encode() + b"\n"
    assert process.wait(60) == 9
    process.stdout.close()


def test_nobody_reads_what_it_writes(toys: Toys) -> None:
    """As `yes | head`: the command gets SIGPIPE, and we end as whoever gets it."""
    command = '{ "$0" exec web1 -- yes; echo "$?" >&2; } | head -n 1'
    ran = subprocess.run(
        ["sh", "-c", command, cli.BINARY], env=toys.env, capture_output=True, timeout=60, check=True
    )
    assert (ran.stdout, ran.stderr) == (b"y\n", b"141\n")


def test_a_disk_that_is_full(toys: Toys) -> None:
    with open("/dev/full", "wb") as full:
        ran = toys.run("exec", "web1", "--", "echo", "x", stdout=full, stderr=subprocess.PIPE)
    assert ran.returncode == 1
    assert ran.stderr == b"agent-box: stdout: No space left on device\n"


def test_a_reader_that_is_slow_gets_everything(toys: Toys) -> None:
    size = 12_000_000
    process = toys.popen(
        "exec", "web1", "--", "head", "-c", str(size), "/dev/zero", stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    peak = until("it is full", lambda: resting(process.pid))
    rest = process.stdout.read()
    assert len(first + rest) == size and process.wait(60) == 0
    assert peak < 200_000  # KiB: it did not take in what nobody read
    process.stdout.close()


@pytest.mark.slow
def test_100_mib_with_a_reader_that_stalls(toys: Toys) -> None:
    size = 100 << 20
    code = f"import os\nfor _ in range(100): os.write(1, os.urandom({1 << 20}))"
    ran = toys.run("exec", "web1", "--", "sh", "-c", f"python3 -c '{code}' | tee /dev/stderr")
    assert len(ran.stdout) == size
    assert hashlib.sha256(ran.stdout).digest() == hashlib.sha256(ran.stderr).digest()


def test_json_has_every_byte_and_the_end(toys: Toys) -> None:
    ran = toys.run(
        "exec", "web1", "--json", "--", "sh", "-c", r"printf '\377\0'; echo e >&2; exit 3"
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    cli.check_stream(lines, cli.Ran(("exec",), ran.returncode, "", ""))
    found = {line["source"]: line["data"] for line in lines[:-1]}
    assert found == {"stdout": "/wA=", "stderr": "ZQo="}
    expected = {"type": "end", "ok": False, "exit": 3, "how": "exited", "status": 3, "signal": None}
    assert lines[-1] == expected


def test_a_terminal_is_not_driven_and_a_pipe_gets_every_byte(toys: Toys) -> None:
    text = b"\x1b]52;c;aGVsbG8=\x07\x1b[1mbold\x1b[m\x05"
    argv = ["exec", "web1", "--", "printf", text.decode().replace("\x1b", r"\033")]
    assert toys.run(*argv).stdout == text
    with Person(argv, toys.env) as person:
        assert person.end()[0] == 0
        assert person.seen == b"\x1b[1mbold\x1b[m"


def test_a_killed_channel_during_output_and_input(toys: Toys) -> None:
    """Nothing is lost and nothing doubled, in either direction."""
    data = os.urandom(6_000_000)
    process = toys.popen(
        "exec", "web1", "--", "cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdin and process.stdout
    got, sent, kills = bytearray(), 0, 0
    os.set_blocking(process.stdin.fileno(), False)
    os.set_blocking(process.stdout.fileno(), False)
    while len(got) < len(data):
        assert process.poll() is None
        if sent < len(data):
            sent += process.stdin.write(data[sent : sent + 65536]) or 0
            if sent == len(data):
                process.stdin.close()
        got += process.stdout.read(65536) or b""
        if kills < 4 and len(got) > (kills + 1) * 1_000_000:
            kills += 1
            toys.kill_channel()
            toys.start_channel()
    os.set_blocking(process.stdout.fileno(), True)
    assert process.stdout.read() == b""
    assert process.wait(60) == 0 and kills == 4
    assert bytes(got) == data
    process.stdout.close()
