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
    base = statistics.median(took["python3 -c pass"])
    print(f"{'':<30} {'median':>8} {'least':>8} {'ratio':>7}   of {rounds} rounds")
    for name, times in took.items():
        median = statistics.median(times)
        print(f"{name:<30} {median * 1e3:6.1f}ms {min(times) * 1e3:6.1f}ms {median / base:6.1f}x")
    load = os.getloadavg()[0]
    print(f"load average {load:.1f} on {os.cpu_count()} processors")


def measure(
    commands: dict[str, tuple[str, ...]], env: dict[str, str], rounds: int
) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 2):  # the first two fill the caches
        for name, words in commands.items():
            begun = time.perf_counter()
            subprocess.run(words, env=env, capture_output=True, check=False)
            if number > 1:
                took[name].append(time.perf_counter() - begun)
    return took


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
