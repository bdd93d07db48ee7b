"""netstack as it runs in this version: it judges flows, and refuses what is not built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.server import Call, Handler, StreamHandler
from agent_box.netstack.contract import CONTRACT, Check, Verdict
from agent_box.netstack.own import own
from agent_box.netstack.policy import PolicyInvalid, load
from agent_box.process.skeleton import Context, Service, Unbuilt

MISSING: Final = "this version gives instances no network yet: the network stack is not built"


class Netstack(Unbuilt):
    """Answers `check`; everything else is unavailable."""

    def __init__(self) -> None:
        super().__init__(CONTRACT, MISSING)
        self.handlers: Mapping[str, Handler | StreamHandler] = {**self.handlers, "check": check}


def check(request: Check, _call: Call) -> Verdict:
    """What the policy says about a flow, by the function that enforces it."""
    try:
        return load(request.policy).decide(request.flow, own=own())
    except PolicyInvalid as error:
        raise Refusal(Reason.BAD_REQUEST, f"the policy cannot be enforced: {error}") from None


def build(context: Context) -> Service:
    """Makes the service. `hello` carries what is missing, so that nobody has to try."""
    context.problem = MISSING
    return Netstack()
