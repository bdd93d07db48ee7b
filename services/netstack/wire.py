"""What the flows of one instance share on their way to the guest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

SLOT: Final = 65536  # bytes of upstream data read at a time
_SLOTS_MAX: Final = 128  # kept for reuse


class Timed(Protocol):
    """Something with a deadline; `armed` is for the keeper of timers alone."""

    deadline: float
    armed: float


def _nothing(_flow: Timed) -> None:
    """Nobody keeps timers."""


def cost(length: int, slot: memoryview | None) -> int:
    """Bytes of memory that a kept segment takes, about."""
    return length + 256 if slot is None else SLOT


@dataclass(slots=True)
class Wire:
    """What the flows of one instance share on their way to the guest.

    Attributes:
        out: buffers to send, in order; whole frames, each of one or two buffers.
        queued: bytes in `out`.
        now: the time in seconds, of a clock that only goes forward.
        window: the most that a flow takes from its guest ahead of upstream, in bytes.
        sending: the most that a flow has under way to its guest, in bytes.
        memory: bytes of all flows together beyond which new ones get little.
        held: bytes taken from the guest that upstream has not taken yet.
        kept: bytes of memory for what was sent and not acknowledged.
        arm: called when a flow's `deadline` came nearer.
        disarm: called when a flow that is `armed` ended.
        tap: gets every packet, for a capture.
    """

    out: list[bytes | memoryview] = field(default_factory=list)
    queued: int = 0
    now: float = 0.0
    window: int = 1 << 20
    sending: int = 4 << 20
    memory: int = 128 << 20
    held: int = 0
    kept: int = 0
    slots: list[memoryview] = field(default_factory=list)
    arm: Callable[[Timed], None] = _nothing
    disarm: Callable[[Timed], None] = _nothing
    tap: Callable[[bytes], None] | None = None

    def slot(self) -> memoryview:
        """Room for `SLOT` bytes, used before if possible: fresh pages cost more than bytes."""
        return self.slots.pop() if self.slots else memoryview(bytearray(SLOT))

    def give_back(self, slot: memoryview) -> None:
        if len(self.slots) < _SLOTS_MAX:
            self.slots.append(slot)

    def frame(self, frame: bytes) -> None:
        """Queues a whole frame."""
        self.out.append(frame)
        self.queued += len(frame)
        if self.tap is not None:
            self.tap(frame[14:])
