"""The timers of an instance's flows, in steps.

Most flows end before theirs is due, so what must be cheap is to set one and to forget it: flows
whose time comes within one step wait together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, inf
from typing import Final

from agent_box.netstack.poller import Poller
from agent_box.netstack.wire import Timed

STEPS: Final = 64  # in a second: so late may a timer be


class Timers:
    """Args:
    due: gets each flow whose time has come. Its `deadline` may have moved on meanwhile.
    """

    def __init__(self, poller: Poller, due: Callable[[Timed], None]) -> None:
        self._poller = poller
        self._due = due
        self._waiting: dict[float, set[Timed]] = {}

    def arm(self, flow: Timed) -> None:
        """Calls once its `deadline`, as it is now, has passed, instead of when it was to before."""
        when = ceil(flow.deadline * STEPS) / STEPS
        if when == flow.armed:
            return
        self.disarm(flow)
        flow.armed = when
        waiting = self._waiting.get(when)
        if waiting is None:
            waiting = self._waiting[when] = set()
            self._poller.at(when, partial(self._passed, when))
        waiting.add(flow)

    def disarm(self, flow: Timed) -> None:
        """Keeps nothing of the flow."""
        waiting = self._waiting.get(flow.armed)
        if waiting is not None:
            waiting.discard(flow)
        flow.armed = inf

    def _passed(self, when: float) -> None:
        for flow in self._waiting.pop(when):
            flow.armed = inf
            self._due(flow)
