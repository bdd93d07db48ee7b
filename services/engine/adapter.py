"""engine as it runs in this version: it answers, and refuses what is not built."""

from __future__ import annotations

from typing import Final

from agent_box.engine.contract import CONTRACT
from agent_box.process.skeleton import Context, Service, Unbuilt

MISSING: Final = "this version cannot run instances yet: the engine's drivers are not built"


def build(context: Context) -> Service:
    """Makes the service. `hello` carries what is missing, so that nobody has to try."""
    context.problem = MISSING
    return Unbuilt(CONTRACT, MISSING)
