"""What a verb costs: `agent-box VERB` against `python3 -c pass`, run in turns.

    .venv/bin/python tests/bench/bench_cli.py [ROUNDS]

Starts an agent-box of its own and ends it. All modules are compiled beforehand, as pip does
on installation. The ratio is of medians; aim for `list`: at most 12.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.cli import BINARY
from support.live import Live

BARE = ("/usr/bin/python3", "-c", "pass")
OURS = (sys.executable, "-c", "pass")
VERBS = ("--help", "start work", "list", "list --json", "inspect work", "secret list")


def main(rounds: int) -> None:
    commands: dict[str, tuple[str, ...]] = {
        "python3 -c pass": BARE,
        "the same of our environment": OURS,
    }
    commands |= {f"agent-box {verb}": (str(BINARY), *verb.split()) for verb in VERBS}
    live = Live()
    try:
        live.up()
        took = measure(commands, live.env, rounds)
    finally:
        live.close()
    wall, cpu = ({n: statistics.median(t[i] for t in took[n]) for n in took} for i in (0, 1))
    base = "python3 -c pass"
    print(f"median of {rounds} rounds, as time on the clock and on a processor")
    for name in took:
        print(
            f"{name:<30} {wall[name] * 1e3:6.1f} ms {wall[name] / wall[base]:5.1f}x"
            f"   {cpu[name] * 1e3:6.1f} ms {cpu[name] / cpu[base]:5.1f}x"
        )
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


def measure(
    commands: dict[str, tuple[str, ...]], env: dict[str, str], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(rounds + 2):  # the first two fill the caches
        for name, words in commands.items():
            begun = time.perf_counter()
            process = subprocess.Popen(
                words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            _, _, usage = os.wait4(process.pid, 0)
            if number > 1:
                wall = time.perf_counter() - begun
                took[name].append((wall, usage.ru_utime + usage.ru_stime))
            process.returncode = 0  # it has been waited for
    return took


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
