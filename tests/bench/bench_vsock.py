"""Measures the vsock device: bytes per second both ways, round trips, streams, memory.

    python tests/bench/bench_vsock.py                     # against a driver in this process
    python tests/bench/bench_vsock.py --kernel vmlinux --initrd initrd --root root.erofs \\
        --tsc-khz 2400000                                 # in a real machine

Without a machine the driver is Python too and takes most of the time: use it to compare one
version of the device with another. Aims in a machine under TCG: 400 MB/s from the guest and
200 MB/s to it. Prints one JSON object per round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOAK = HERE.parent / "engine" / "vsock"
sys.path[:0] = [str(HERE.parent), str(SOAK)]

from support.vsockguest import Backend, Guest, Vmm  # noqa: E402
from support.vsockvm import Machine  # noqa: E402

ECHO, COUNT, SOURCE = 6000, 6002, 6003


def cpu(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss(pid: int) -> int:
    """Private memory of a process in KiB (RssAnon: it is not dumpable, so PSS is hidden)."""
    for row in Path(f"/proc/{pid}/status").read_text().splitlines():
        if row.startswith("RssAnon:"):
            return int(row.split()[1])
    raise AssertionError("the kernel tells no RssAnon")


def rate(backend: Backend, move: Callable[[], int]) -> tuple[int, int]:
    """MB/s, and MB for each second of the device's CPU."""
    before, start = cpu(backend.process.pid), time.monotonic()
    count = move()
    seconds, used = time.monotonic() - start, cpu(backend.process.pid) - before
    return round(count / 1e6 / seconds), round(count / 1e6 / max(used, 0.01))


def from_guest(backend: Backend, total: int) -> int:
    with backend.dial(SOURCE) as sock:
        sock.sendall(b"%d 262144 0 1\n" % total)
        buffer = bytearray(1 << 18)
        count = 0
        while got := sock.recv_into(buffer):
            count += got
    assert count == total
    return count


def to_guest(backend: Backend, total: int) -> int:
    with backend.dial(COUNT) as sock:
        piece = bytes(1 << 18)
        for _ in range(total // len(piece)):
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
        count = int(sock.recv(100))
    assert count == total
    return count


def trips(backend: Backend, count: int) -> list[float]:
    times = []
    with backend.dial(ECHO) as sock:
        for _ in range(count):
            start = time.monotonic()
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
            times.append(time.monotonic() - start)
    return sorted(times)


def streams(backend: Backend, count: int) -> float:
    start = time.monotonic()
    for _ in range(count):
        with backend.dial(ECHO) as sock:
            sock.sendall(b"x")
            assert sock.recv(1) == b"x"
    return (time.monotonic() - start) / count


def round_of(backend: Backend, total: int) -> dict[str, float]:
    out, out_cpu = rate(backend, lambda: from_guest(backend, total))
    into, into_cpu = rate(backend, lambda: to_guest(backend, total))
    times = trips(backend, 1000)
    return {
        "from_guest_mb_s": out,
        "from_guest_mb_per_cpu_s": out_cpu,
        "to_guest_mb_s": into,
        "to_guest_mb_per_cpu_s": into_cpu,
        "round_trip_us": round(statistics.median(times) * 1e6),
        "round_trip_p99_us": round(times[990] * 1e6),
        "stream_ms": round(streams(backend, 200) * 1e3, 2),
        "device_kib": pss(backend.process.pid),
        "load": os.getloadavg()[0],
    }


def serve(guest: Guest, port: int) -> None:
    """What soakpeer.py does in a machine, over the driver of this process."""
    while True:
        try:
            stream = guest.accept(port, timeout=3600)
        except TimeoutError:
            return
        if port == ECHO:
            while data := stream.recv():
                stream.sendall(data)
        elif port == COUNT:
            count = 0
            while data := stream.recv():
                count += len(data)
            stream.sendall(b"%d\n" % count)
        else:
            total = int(stream.recv().split()[0])
            piece = bytes(1 << 18)
            while total:
                stream.sendall(piece[:total])
                total -= min(total, len(piece))
        stream.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("kernel", "initrd", "root"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--tsc-khz", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.kernel is not None:
            machine = Machine(
                Path(name), options.kernel, options.initrd, options.root,
                SOAK / "soakpeer.py", tsc_khz=options.tsc_khz,
            )  # fmt: skip
            try:
                machine.wait(ECHO).close()
                for _ in range(options.rounds):
                    print(json.dumps(round_of(machine.backend, options.mib << 20)), flush=True)
            finally:
                machine.close()
            return
        with Backend(Path(name)) as backend:
            vmm = Vmm(backend.vmm_end)
            guest = Guest(vmm)
            for port in (ECHO, COUNT, SOURCE):
                guest.listen(port)
                threading.Thread(target=serve, args=(guest, port), daemon=True).start()
            guest.up()
            for _ in range(options.rounds):
                print(json.dumps(round_of(backend, options.mib << 20)), flush=True)
            guest.down()
            vmm.close()


if __name__ == "__main__":
    main()
