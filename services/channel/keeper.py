"""Which guests are kept on time, and the file in which a killed channel left them.

The file is a hint: it says whom to dial after a restart. Whether that boot still runs is the
engine's to tell, and one that does not is dropped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FILE: Final = "guests.json"
FILE_MAX: Final = 1 << 20
EVERY_S: Final = 60.0
LOOK_S: Final = 0.5  # how often the host's clock is looked at for a jump
JUMP_NS: Final = 200_000_000


@dataclass(frozen=True)
class Clocks:
    """The host's clocks in ns: one that people set, one that only counts, and one that counts
    while the host sleeps too."""

    wall: Callable[[], int] = time.time_ns
    steady: Callable[[], int] = time.monotonic_ns
    boot: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Kept:
    """Instances and their boots, written before it is acted on.

    Args:
        failed: told when the file cannot be written. They are kept on time nevertheless, until
            the next restart.
    """

    def __init__(self, directory: Path, failed: Callable[[OSError], None]) -> None:
        self._path = directory / FILE
        self._failed = failed
        self.boots: dict[str, int] = {}
        try:
            with self._path.open("rb") as file:
                untrusted = json.loads(file.read(FILE_MAX))
        except (FileNotFoundError, ValueError, RecursionError):
            return  # the first start, or a torn file: the next provisioning writes another
        if isinstance(untrusted, dict):
            self.boots = {
                name: boot
                for name, boot in untrusted.items()
                if isinstance(name, str) and type(boot) is int
            }

    def add(self, instance: str, boot: int) -> None:
        if self.boots.get(instance) != boot:
            self.boots[instance] = boot
            self._write()

    def drop(self, instance: str, boot: int) -> None:
        if self.boots.get(instance) == boot:
            del self.boots[instance]
            self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(self.boots))
            os.replace(new, self._path)
        except OSError as error:
            self._failed(error)


class Jumps:
    """Notices that the host's wall clock jumped, as by a suspend or a hand that set it.

    The difference between wall clock and monotonic clock moves only then, or slowly, as when
    a clock is slewed; what adds up to a jump is one.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._offset = self._look()

    def _look(self) -> int:
        return self._clocks.wall() - self._clocks.steady()

    def jumped(self) -> bool:
        """Whether it did since the last time that it had, by more than `JUMP_NS`."""
        offset = self._look()
        far = abs(offset - self._offset) > JUMP_NS
        if far:
            self._offset = offset
        return far
