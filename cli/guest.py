"""The guest that `attach` and `exec` speak with: a running instance, and the way to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from agent_box.bus.errors import Reason, Refusal
from agent_box.channel.contract import Ended, Variable
from agent_box.cli import link
from agent_box.cli.render import Failure, Render

if TYPE_CHECKING:
    from agent_box.bus.client import Client
    from agent_box.registry.contract import Instance

TIMED_OUT: Final = 124  # as timeout(1)
LEFT: Final = 23  # the instance left running
LOST: Final = 14
SIGNALLED: Final = 128  # plus the number
LOOK_S: Final = 2.0  # between two questions whether the instance still runs
ASK_S: Final = 0.5  # for the answer; meanwhile nobody is heard


class Signalled(Exception):
    """A signal that ends us."""

    def __init__(self, number: int) -> None:
        self.number = number


class Guest:
    """A running instance and the way to it."""

    def __init__(self, found: Instance, registry: Client, channel: Client):
        self.name = found.row.name
        self.id = found.id
        self.harness = found.harness
        self.channel = channel
        self._boots = found.boots
        self._registry = registry
        self._looked = 0.0

    def look(self) -> None:
        """A stream was lost. Whether the instance is to blame is asked now and then.

        Raises:
            Failure: it does not run any more, or not in the boot that it was.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        try:
            found = self._ask(ASK_S)
        except Refusal as refusal:
            if refusal.reason is Reason.NOT_FOUND:
                raise self.left("was deleted") from None
            return  # the registry is away as well
        if found.row.state not in ("running", "unknown"):
            raise self.left(f"is {found.row.state}")
        if found.boots != self._boots:
            raise self.left("was started anew")

    def ended(self) -> Failure:
        """The channel says that the instance left running: how is for the registry to tell."""
        how = "was stopped or paused"
        try:
            found = self._ask(ASK_S)
            if found.row.state != "running":
                how = f"is {found.row.state}"
        except Refusal as refusal:
            if refusal.reason is Reason.NOT_FOUND:
                how = "was deleted"
        return self.left(how)

    def left(self, how: str) -> Failure:
        return Failure(LEFT, "left-running", f"{self.name} {how}", name=self.name)

    def _ask(self, seconds: float) -> Instance:
        from agent_box.registry.contract import Instance, Name

        found = self._registry.call("inspect", Name(name=self.name), deadline_s=seconds)
        assert isinstance(found, Instance)
        if found.id != self.id:
            raise Refusal(Reason.NOT_FOUND, "another instance has the name")
        return found


@contextmanager
def reach(out: Render, name: str) -> Iterator[Guest]:
    """The guest of a running instance.

    Raises:
        Failure: exit 3, 4 or 12; and what `link.ready` and `link.connect` raise.
    """
    from agent_box.registry.contract import Instance, Name

    here = link.place()
    registry, _ = link.ready(here, "registry", out)
    try:
        # Its greeting is on the way while the registry is asked.
        channel = link.connect(here, "channel")
        try:
            found = registry.call("inspect", Name(name=name))
            assert isinstance(found, Instance)
            state = found.row.state
            if state == "unknown":
                raise Failure(
                    12, "state-unknown", f"the state of {name} cannot be observed", state=state
                )
            if state != "running":
                why = f"{name} is {state}; this verb needs running"
                raise Failure(4, "wrong-state", why, state=state)
            yield Guest(found, registry, channel)
        finally:
            channel.close()
    finally:
        registry.close()


def variables(env: list[tuple[str, str]]) -> list[Variable]:
    return [Variable(name=name, value=value) for name, value in dict(env).items()]


def status(ended: Ended, guest: Guest) -> int:
    """The exit code. Raises Failure: the end was not the program's own."""
    if ended.how == "exited":
        return (ended.status or 0) & 0xFF
    if ended.how == "signalled":
        return SIGNALLED + ((ended.signal or 0) & 0x7F)
    if ended.how == "timed-out":
        raise Failure(TIMED_OUT, "timed-out", "the time is over, and the command was ended")
    if ended.how == "taken":
        raise Failure(1, "taken", "another attach has taken this terminal over")
    raise guest.ended()
