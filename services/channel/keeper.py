"""Which guests are kept on time, and the file in which a killed channel left them.

The file is a hint: it says whom to dial after a restart. Whether that boot still runs is the
engine's to tell, and one that does not is dropped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

FILE: Final = "guests.json"
EVERY_S: Final = 60.0
LOOK_S: Final = 1.0  # how often the host's clock is looked at for a jump
JUMP_NS: Final = 200_000_000


class Kept:
    """Instances and their boots, written before it is acted on."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self.boots: dict[str, int] = {}
        try:
            untrusted = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return  # the first start, or a torn file: the next provisioning writes another
        if isinstance(untrusted, dict):
            self.boots = {
                name: boot
                for name, boot in untrusted.items()
                if isinstance(name, str) and type(boot) is int
            }

    def add(self, instance: str, boot: int) -> None:
        self.boots[instance] = boot
        self._write()

    def drop(self, instance: str, boot: int) -> None:
        if self.boots.get(instance) == boot:
            del self.boots[instance]
            self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.boots))
        os.replace(new, self._path)


class Clock:
    """Notices that the host's wall clock jumped, as by a suspend or a hand that set it.

    The difference between wall clock and monotonic clock moves only then.
    """

    def __init__(self, wall_ns: int, monotonic_ns: int) -> None:
        self._offset = wall_ns - monotonic_ns

    def jumped(self, wall_ns: int, monotonic_ns: int) -> bool:
        """Whether it did since the last look, by more than `JUMP_NS`."""
        offset = wall_ns - monotonic_ns
        far = abs(offset - self._offset) > JUMP_NS
        if far:
            self._offset = offset
        return far
