"""broker as it runs in this version: it answers, and refuses what is not built."""

from __future__ import annotations

from typing import Final

from agent_box.broker.contract import CONTRACT
from agent_box.process.skeleton import Context, Service, Unbuilt

MISSING: Final = "this version cannot serve guests yet: the broker's endpoints are not built"


def build(context: Context) -> Service:
    """Makes the service. `hello` carries what is missing, so that nobody has to try."""
    context.problem = MISSING
    return Unbuilt(CONTRACT, MISSING)
