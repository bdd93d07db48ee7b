"""Measures the host's time stamp counter: `python -I -m agent_box.helper.tsc` prints its kHz.

In a process of its own, since it maps a page that can be executed. Under TCG a guest reads the
host's counter, so its kernel must be told how fast that runs; no file of the kernel says so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Final

WAIT_S: Final = 0.05
TRIES: Final = 3
READINGS: Final = 100  # at each end; some 0.2 ms in all, of which one is hardly ever disturbed
# lfence; rdtsc; lfence; shl $32, %rdx; or %rdx, %rax; ret
_CODE: Final = bytes.fromhex("0faee8 0f31 0faee8 48c1e220 4809d0 c3".replace(" ", ""))


def measure() -> int:
    """kHz, of the try that was disturbed least.

    Raises:
        OSError: no page may be executed, or not on this machine.
    """
    if os.uname().machine != "x86_64":
        raise OSError(f"no time stamp counter is known on {os.uname().machine}")
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_CODE)
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    tries = []
    for _ in range(TRIES):
        first, first_ns, spread = _both(read)
        select.select([], [], [], WAIT_S)
        last, last_ns, spread_last = _both(read)
        tries.append((spread + spread_last, (last - first) * 1e6 / (last_ns - first_ns)))
    return round(min(tries)[1])


def _both(read: Callable[[], int]) -> tuple[float, int, int]:
    """The counter and the clock at one moment, and how long that moment was: of many readings
    the one in which least came between, since on a busy host any of them may be interrupted."""
    tightest: tuple[int, float, int] | None = None
    for _ in range(READINGS):
        before = read()
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        after = read()
        found = (after - before, (before + after) / 2, now)
        if tightest is None or found < tightest:
            tightest = found
    assert tightest is not None
    spread, counter, clock = tightest
    return counter, clock, spread


def main() -> int:
    try:
        print(measure())
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
