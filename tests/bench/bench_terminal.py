"""Commands and terminals: what `exec -- true` costs and where, how soon a key is echoed, and
how fast output comes. Prints JSON.

    python tests/bench/bench_terminal.py [toy] [RUNS]

In a real machine, emulated; with `toy`, against local programs behind a channel that does
nothing else, which leaves our own part. Times are medians, in milliseconds; what the host did
meanwhile meets all of them, so processor time, which it does not lengthen, stands beside.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import resource
import select
import statistics
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import built, cli
from support.attached import Person, Toys
from support.vm import Machines

MB = 1_000_000
ECHO = (
    "import os, tty\ntty.setraw(0)\nos.write(1, b'ready\\r\\n')\n"
    "while True: os.write(1, os.read(0, 99))"
)
# A line for each fork, exec and wait, seconds: the guest's own price of `true`.
FORK = (
    "import subprocess, time\nfor _ in range(9):\n a = time.monotonic()\n"
    " subprocess.run(['true'])\n print(time.monotonic() - a)"
)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds that pass, and of processor in children that have ended."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    work()
    passed, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return passed * 1000, used * 1000


def medians(runs: int, work: Callable[[], Any]) -> dict[str, float]:
    found = [timed(work) for _ in range(runs)]
    passed, used = ([row[i] for row in found] for i in (0, 1))
    return {"ms": round(statistics.median(passed), 1), "cpu_ms": round(statistics.median(used), 1)}


def call(env: dict[str, str], *words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    more.setdefault("stdin", subprocess.DEVNULL)
    more.setdefault("stdout", subprocess.PIPE)
    return subprocess.run([cli.BINARY, *words], env=env, check=True, **more)


def echo(person: Person, runs: int) -> float:
    """From a key to its echo."""
    person.until(b"ready\r\n")
    found = []
    for number in range(runs):
        key = b"%c" % (ord("a") + number % 26)
        begun = time.monotonic()
        os.write(person.master, key)
        person.until(key, after=len(person.seen))
        found.append((time.monotonic() - begun) * 1000)
    return round(statistics.median(found), 2)


def local_echo(runs: int) -> float:
    """The same with a local program on a terminal of its own."""
    master, slave = pty.openpty()

    def own() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        ["python3", "-c", ECHO],
        stdin=slave,
        stdout=slave,
        start_new_session=True,
        preexec_fn=own,
    )
    while b"ready" not in os.read(master, 99):
        continue
    found = []
    for _ in range(runs):
        begun = time.monotonic()
        os.write(master, b"a")
        select.select([master], [], [])
        os.read(master, 99)
        found.append((time.monotonic() - begun) * 1000)
    process.kill()
    process.wait()
    return round(statistics.median(found), 2)


def flow(env: dict[str, str], size: int) -> dict[str, float]:
    """Output of a command into a pipe that is read at once."""
    words = ("exec", "web1", "--", "head", "-c", str(size), "/dev/zero")
    begun = time.monotonic()
    process = subprocess.Popen([str(cli.BINARY), *words], env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    came = 0
    while piece := process.stdout.read(1 << 16):
        came += len(piece)
    _, status, used = os.wait4(process.pid, 0)
    passed = time.monotonic() - begun
    process.stdout.close()
    if came != size or status:
        raise RuntimeError(f"{came} of {size} bytes came, status {status}")
    spent = (used.ru_utime + used.ru_stime) * 1000
    return {
        "MB/s": round(size / MB / passed, 1),
        "cli_cpu_ms_per_MB": round(spent / (size / MB), 2),
        "cli_peak_MiB": round(used.ru_maxrss / 1024),
    }


def screenful(env: dict[str, str], size: int) -> dict[str, float]:
    """The same through a terminal, filtered."""
    argv = ["exec", "web1", "--tty", "--", "sh", "-c", f"yes some text | head -c {size}"]
    begun = time.monotonic()
    with Person(argv, env | {"TERM": "xterm-256color"}) as person:
        while person.process.poll() is None:
            person.look(0.05)
            person.seen = b""
        person.end()
    return {"MB/s": round(size / MB / (time.monotonic() - begun), 1)}


def measure(env: dict[str, str], runs: int, size: int) -> dict[str, Any]:
    call(env, "exec", "web1", "--", "true")  # what is compiled once is compiled
    forks = call(env, "exec", "web1", "--", "python3", "-c", FORK).stdout.split()
    tty = ["exec", "web1", "--tty", "--", "python3", "-c", ECHO]
    with Person(tty, env | {"TERM": "xterm-256color"}) as person:
        keys = echo(person, runs * 10)
    return {
        "exec_true": medians(runs, lambda: call(env, "exec", "web1", "--", "true")),
        "list": medians(runs, lambda: call(env, "list")) if "AB_TOY" not in env else None,
        "version": medians(runs, lambda: call(env, "--version")),
        "guest_fork_true_ms": round(statistics.median(map(float, forks)) * 1000, 1),
        "key_echo_ms": keys,
        "key_echo_local_ms": local_echo(runs * 10),
        "exec_output": flow(env, size),
        "tty_output": screenful(env, size // 4),
    }


def main() -> None:
    words = sys.argv[1:]
    is_toy = words[:1] == ["toy"]
    runs = int(words[-1]) if words and words[-1].isdigit() else 11
    if is_toy:
        toys = Toys()
        try:
            found = measure(toys.env | {"AB_TOY": "1"}, runs, 100 * MB)
        finally:
            toys.close()
    else:
        machines = Machines()
        try:
            built.install(machines.paths)
            machines.run("create", "web1")
            machines.start("web1")
            found = measure(machines.env, runs, 20 * MB)
        finally:
            machines.close()
    load = round(os.getloadavg()[0], 1)
    print(json.dumps({"toy": is_toy, "runs": runs, "host_load": load, **found}, indent=2))


if __name__ == "__main__":
    main()
