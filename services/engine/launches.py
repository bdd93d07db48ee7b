"""The name of one run of an instance, as the helper knows it.

The registry counts boots; the helper knows launches by 32 hexadecimal digits. One is made
from the other and can be read back, so the engine keeps no table that could be lost.
"""

from __future__ import annotations

import hashlib
from typing import Final

BOOT_MAX: Final = (1 << 53) - 1


def launch_id(instance: str, boot: int) -> str:
    """The launch of that boot: 16 digits that tie it to the instance, 16 that are the boot."""
    tie = hashlib.sha256(f"{instance}:{boot}".encode()).hexdigest()[:16]
    return f"{tie}{boot:016x}"


def boot_of(instance: str, untrusted_launch: str | None) -> int | None:
    """Which boot a launch is; None for none, or for one that is not ours."""
    if untrusted_launch is None:
        return None
    try:
        boot = int(untrusted_launch[16:], 16)
    except ValueError:
        return None
    return boot if launch_id(instance, boot) == untrusted_launch else None
