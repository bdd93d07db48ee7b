"""What a guest may tell of itself on port 5002, and its frames. Both ends import this; no I/O.

A frame's payload is strict JSON with a sequence number, as on port 5000. The guest greets, the
host answers, then events go up, each with a number that counts on over streams, and the host
says up to which number it has them for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Any, Final

EVENTS_PORT: Final = 5002
EVENTS_VERSION: Final = 1
EVENT_MAX: Final = 4096  # bytes of a frame, either way
TEXT_MAX: Final = 200  # characters of one fact
BURST: Final = 32  # events at once
EVERY_S: Final = 5.0  # beyond that, one in this time


class Said(IntEnum):
    """What a frame of port 5002 is."""

    HELLO = 1  # each side, first
    EVENT = 2  # guest to host
    SEEN = 3  # host to guest


# Kind of event: its facts and their types. `dropped` says how many were too many before it.
KINDS: Final[Mapping[str, Mapping[str, type]]] = {
    "guest-phase": {"phase": str, "uptime_ms": int, "dropped": int},
    "guest-oom": {"process": str, "pid": int, "dropped": int},
    "guest-disk": {"disk": str, "used_percent": int, "dropped": int},
    "guest-warning": {"text": str, "dropped": int},
}


class Rate:
    """A bucket of `burst` that fills by one in `every` seconds. It is told the time."""

    def __init__(self, now: float, burst: float = BURST, every: float | None = None) -> None:
        self._burst = burst
        self._every = every
        self._left = burst
        self._at = now

    def take(self, now: float) -> bool:
        """Whether one more is within the rate."""
        self._left = min(self._burst, self._left + (now - self._at) / (self._every or EVERY_S))
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def good(kind: Any, facts: Any) -> bool:
    """Whether it is an event as declared."""
    wanted = KINDS.get(kind) if isinstance(kind, str) else None
    return (
        wanted is not None
        and isinstance(facts, dict)
        and facts.keys() == wanted.keys()
        and all(type(facts[name]) is wanted[name] for name in wanted)
        and all(len(v) <= TEXT_MAX for v in facts.values() if isinstance(v, str))
        and all(0 <= v < 1 << 53 for v in facts.values() if type(v) is int)
    )
