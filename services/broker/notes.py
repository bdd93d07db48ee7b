"""Refusals as events of an instance: the first at once, those that follow as a number.

A guest can cause as many refusals as it likes. What is noted of them is bounded by what may
differ: binding, reason and route, all of them words of ours or of the config. Nothing that a
guest wrote stands in an event.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, NamedTuple

from agent_box.registry.contract import Fact, Note

WINDOW_S: Final = 10.0  # alike ones are one event in this time
KEYS_MAX: Final = 4096


class Told(NamedTuple):
    """What makes two refusals alike."""

    instance: str
    kind: str  # of the event: request-refused, nonce-refused, reply-cut
    binding: str  # empty when none was found
    reason: str
    route: str  # as the config or the kind declares it; empty when none was found


class Notes:
    """Args:
    put: takes an event for the registry.
    now: seconds, of a clock that never goes back.
    """

    def __init__(self, put: Callable[[Note], None], now: Callable[[], float]) -> None:
        self._put: Final = put
        self._now: Final = now
        self._open: dict[Told, tuple[float, int]] = {}  # until when, how many not yet told
        self.refused = 0  # nonces, since the start

    def add(self, told: Told) -> None:
        if told.kind == "nonce-refused":
            self.refused += 1
        until, count = self._open.get(told, (0.0, 0))
        if told in self._open and self._now() < until:
            self._open[told] = (until, count + 1)
            return
        if told not in self._open and len(self._open) >= KEYS_MAX:
            self.sweep()
            if len(self._open) >= KEYS_MAX:
                return
        self._tell(told, count + 1)
        self._open[told] = (self._now() + WINDOW_S, 0)

    def sweep(self) -> None:
        """Tells what was held back and whose time is over."""
        now = self._now()
        for told, (until, count) in list(self._open.items()):
            if now < until:
                continue
            del self._open[told]
            if count:
                self._tell(told, count)

    def flush(self) -> None:
        """Tells all that was held back, at the end."""
        for told, (_, count) in self._open.items():
            if count:
                self._tell(told, count)
        self._open.clear()

    def _tell(self, told: Told, count: int) -> None:
        facts: dict[str, Fact] = {"reason": told.reason, "count": count}
        if told.binding:
            facts["binding"] = told.binding
        if told.route:
            facts["route"] = told.route
        self._put(
            Note(
                event_id=os.urandom(16),
                instance=told.instance,
                source="host-observed",
                kind=told.kind,
                facts=facts,
            )
        )
