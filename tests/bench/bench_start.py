"""A start, from `engine.boot` to provisioned, beside a bare QEMU. Prints JSON.

    python tests/bench/bench_start.py [RUNS]

The bare one boots the same kernel, initramfs, variant and box-guest with the same options, but
without jail, shim and vsock device, as far as PID 1 of the guest, which is told from the
console. The two take turns, so that what else the host does meets both. Seconds, medians.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.machines import Machines

from agent_box.engine import contract as engine
from agent_box.helper import machine, tsc

SAID = b" serves; data disk "  # the line of the agent process, which PID 1 forked
BOUND_S = 180.0
MEMORY_MIB = 256


def cpu(pid: int) -> float:
    """Seconds of processor that a process used: what a busy host does not lengthen."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bare(machines: Machines, directory: Path, khz: int) -> tuple[float, float, float]:
    """Seconds until the guest's first word, what its own clock said then, and processor."""
    data = directory / "data.img"
    with data.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["/sbin/mkfs.ext4", "-q", "-F", str(data)], check=True)
    profile = {
        "accel": "tcg", "cpus": 1, "memory_mib": MEMORY_MIB, "kernel": "", "initramfs": "",
        "variant": "", "guest": "", "harness": None,
    }  # fmt: skip
    words = plain(machines, machine.command("qemu-system-x86_64", profile, khz), data)
    begun = time.monotonic()
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    said = b""
    try:
        while SAID not in said or not said.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], BOUND_S)
            piece = os.read(process.stdout.fileno(), 65536) if ready else b""
            if not piece:
                raise RuntimeError(f"the bare machine said only {said[-500:]!r}")
            said += piece
        taken = time.monotonic() - begun
        return taken, uptime(said.decode(errors="replace")), cpu(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def plain(machines: Machines, words: list[str], data: Path) -> list[str]:
    """The command line without the jail's descriptors: its console is standard output, and the
    vsock device, its channel and the monitor are left out. PID 1 needs a vsock to bind, which
    its kernel has without a device."""
    made: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("-add-fd", "-chardev", "-mon", "-serial", "-sandbox"):
            next(rest)
            continue
        if word == "-device":
            value = next(rest)
            if "vsock" not in value:
                made += [word, value]
            continue
        for part in ("kernel", "initramfs", "variant", "guest"):
            word = word.replace(f"{machine.MACHINE_FILES}/{part}", str(machines.part(part)))
        made.append(word.replace("/dev/fdset/1", str(data)))
    return [*made, "-serial", "stdio", "-monitor", "none"]


def uptime(console: str) -> float:
    """The guest's own clock when its agent process served."""
    return next(
        float(line.split()[1].rstrip(":")) for line in console.splitlines() if SAID.decode() in line
    )


def ours(machines: Machines) -> dict[str, float]:
    """One start, and its parts."""
    instance = machines.create()
    begun = time.monotonic()
    machines.boot(instance, memory=MEMORY_MIB)
    running = time.monotonic()
    machines.provision(instance, seconds=BOUND_S)
    ready = time.monotonic()
    used = cpu(machines.vmm_pid(instance))
    there = uptime(machines.console(instance))
    machines.poweroff(instance)
    machines.until_state(instance, "stopped", seconds=60)
    off = time.monotonic()
    machines.engine("delete", engine.Instance(instance=instance))
    deleted = time.monotonic()
    machines.made.remove(instance)
    return {
        "start": ready - begun,
        "boot": running - begun,
        "provision": ready - running,
        "in_the_guest": there,  # of that, by its own clock, until the agent process serves
        "around_it": ready - begun - there,
        "vmm_processor": used,
        "poweroff": off - ready,
        "delete": deleted - off,
    }


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    khz = tsc.measure()
    machines = Machines()
    found: list[dict[str, float]] = []
    bares: list[tuple[float, float, float]] = []
    directory = Path(tempfile.mkdtemp())
    try:
        machines.up()
        ours(machines)  # the first one hashes the images
        for _ in range(runs):
            bares.append(bare(machines, directory, khz))
            found.append(ours(machines))
    finally:
        machines.close()
        shutil.rmtree(directory)
    parts = {name: round(statistics.median(f[name] for f in found), 2) for name in found[0]}
    ratios = [f["start"] / whole for f, (whole, _, _) in zip(found, bares, strict=True)]
    result = {
        "bare": round(statistics.median(whole for whole, _, _ in bares), 2),
        "bare_in_the_guest": round(statistics.median(there for _, there, _ in bares), 2),
        "bare_around_it": round(statistics.median(a - b for a, b, _ in bares), 2),
        "bare_processor": round(statistics.median(used for _, _, used in bares), 2),
        **parts,
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(r, 2) for r in ratios],
        "load": [round(value, 1) for value in os.getloadavg()],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
