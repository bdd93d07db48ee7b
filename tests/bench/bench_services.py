"""Memory of the idle services, and how long they take to be ready. Prints JSON.

    python tests/bench/bench_services.py

PSS is from /proc/PID/smaps_rollup: shared pages are counted in parts, so the sum over all
processes is what the machine really gives.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import procs
from support.live import Live
from support.until import until

from agent_box.cli import link
from agent_box.cli.render import Render
from agent_box.process.paths import SERVICES

IDLE_S = 5.0
RUNS = 5


def pss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise RuntimeError("no Pss")


def memory(live: Live) -> dict[str, float]:
    found = {"supervisord": pss_kib(live.daemon_pid()) / 1024}
    for service in SERVICES:
        found[service] = sum(map(pss_kib, live.pids(service))) / 1024
    found = {name: round(mib, 1) for name, mib in found.items()}
    return found | {"all": round(sum(found.values()), 1)}


def ready_ms(live: Live, service: str) -> int:
    """From kill -9 to the word of the next process that it is ready, in milliseconds."""
    here = link.place(live.env)
    out = Render("bench", json=False, stdout=sys.stdout, stderr=None)
    client, before = link.ready(here, service, out)
    client.close()
    (inner,) = live.inner(service)
    begun = time.monotonic()
    os.kill(inner, signal.SIGKILL)
    client, _ = link.ready(here, service, out, not_epoch=before.epoch)
    client.close()
    return int((time.monotonic() - begun) * 1000)


def main() -> None:
    live = Live()
    try:
        begun = time.monotonic()
        live.run("service", "list")
        first_verb = time.monotonic() - begun
        until("all are ready", live.ready)
        all_ready = time.monotonic() - begun
        time.sleep(IDLE_S)
        mib = memory(live)
        cpu = {p: procs.cpu_ticks(p) for p in live.pids()}
        time.sleep(IDLE_S)
        ticks = sum(procs.cpu_ticks(p) - before for p, before in cpu.items())
        killed: dict[str, list[int]] = {service: [] for service in SERVICES}
        restarted: dict[str, list[int]] = {service: [] for service in SERVICES}
        for run in range(RUNS):
            for service in SERVICES:
                if run < 3:  # five deaths in 30 s are too many
                    killed[service].append(ready_ms(live, service))
                (row,) = live.run("service", "restart", service, "--json").result["services"]
                restarted[service].append(row["took_ms"])
        print(
            json.dumps(
                {
                    "first_verb_ms": int(first_verb * 1000),
                    "all_ready_ms": int(all_ready * 1000),
                    "idle_pss_mib": mib,
                    "idle_cpu_percent": round(ticks / os.sysconf("SC_CLK_TCK") / IDLE_S * 100, 2),
                    "kill_to_ready_ms": killed,
                    "restart_to_ready_ms": restarted,
                },
                indent=2,
            )
        )
    finally:
        live.close()


if __name__ == "__main__":
    main()
