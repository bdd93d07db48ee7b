"""What one exchange moves and costs, counted as it happens.

Nothing is counted twice, and nothing that the guest saw complete is counted later than that:
who sends a reply's last byte has called `settle` and `flush` before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from agent_box.broker import usage
from agent_box.broker.ledger import Count

FLUSH_BYTES: Final = 4 << 20  # counted at the latest when so many were moved


class Ended(NamedTuple):
    """How far an exchange came. `whole`: its reply is complete."""

    bytes_up: int
    bytes_down: int
    whole: bool


class Tally:
    """Args:
    count: is told what was used, as it happens.
    measured: the tokens and costs of an exchange.

    Attributes:
        meter: what reads the reply's tokens, when something can.
        up, down: bytes of bodies, of the whole exchange.
    """

    def __init__(
        self,
        count: Callable[[Count], object],
        measured: Callable[[usage.Meter | None, Ended], Count],
    ) -> None:
        self._count: Final = count
        self._measured: Final = measured
        self._told = 0, 0  # of `up` and `down`
        self._tokens: Count | None = None  # that are not told yet
        self._settled = False  # its tokens are counted
        self.meter: usage.Meter | None = None
        self.up = self.down = 0

    def sent(self, size: int) -> None:
        """So many bytes went up."""
        self.up += size
        self._flush_much()

    def received(self, size: int) -> None:
        """So many bytes came down."""
        self.down += size
        self._flush_much()

    def settle(self, *, whole: bool) -> None:
        """The exchange is over: its tokens are known, or never will be. Only the first counts."""
        if not self._settled:
            self._settled = True
            self._tokens = self._measured(self.meter, Ended(self.up, self.down, whole))

    def flush(self) -> None:
        """Tells what was not told yet."""
        if (self.up, self.down) == self._told and self._tokens is None:
            return
        count, self._tokens = self._tokens or Count(), None
        count.bytes_up, count.bytes_down = self.up - self._told[0], self.down - self._told[1]
        self._told = self.up, self.down
        if not count.empty:
            self._count(count)

    def _flush_much(self) -> None:
        if self.up + self.down - sum(self._told) >= FLUSH_BYTES:
            self.flush()
