"""What a plan may ask of whoever runs it. Each is carried out and answered, or refused."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, TypeVar

from agent_box.broker import contract as broker
from agent_box.bus.schema import Wire
from agent_box.channel import contract as channel
from agent_box.engine import contract as engine
from agent_box.netstack import contract as net
from agent_box.registry.journal import New
from agent_box.registry.record import Record


@dataclass(frozen=True)
class ReadConfig:
    """Result: `Config`, as it is on disk now."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Writes records and events in one transaction. Result: None.

    `begins`: from here on something outside of the database may be changed.
    `reply`: the outcome of the call, written in the same transaction.
    """

    put: Record | None = None
    remove: str | None = None  # the id of a record
    events: tuple[New, ...]
    begins: bool = False
    reply: Wire | None = None


@dataclass(frozen=True)
class EngineList:
    """Result: `engine.Observations`."""

    seconds: float = 5.0


@dataclass(frozen=True)
class EngineQuery:
    """Result: `engine.Observed`."""

    instance: str


@dataclass(frozen=True)
class EngineCreate:
    """Result: None."""

    instance: str
    disk: int


@dataclass(frozen=True)
class EngineDelete:
    """Result: None."""

    instance: str


@dataclass(frozen=True)
class ApplyPolicy:
    """Puts a policy in force at a live instance. Result: None."""

    instance: str
    policy: net.Policy


@dataclass(frozen=True)
class CheckFlow:
    """Result: `net.Verdict`."""

    policy: net.Policy
    flow: net.Flow


@dataclass(frozen=True)
class ListForwards:
    """Result: `net.Forwards`."""

    instance: str


@dataclass(frozen=True)
class ReadCounters:
    """Result: `net.Counters`."""

    instance: str


@dataclass(frozen=True)
class Clock:
    """Result: Unix time in milliseconds."""


@dataclass(frozen=True)
class Tell:
    """What is being waited for, for whoever follows. Result: None."""

    instance: str
    phase: str


@dataclass(frozen=True)
class Wake:
    """Something is left to do for the instance: `Life.drive` shall run. Result: None."""

    instance: str


@dataclass(frozen=True)
class WasRemoved:
    """Result: bool, whether the journal says that an instance of this id was removed."""

    instance: str


@dataclass(frozen=True)
class EngineBoot:
    """Result: `engine.Observed`."""

    boot: engine.Boot


@dataclass(frozen=True)
class EngineChange:
    """Result: `engine.Observed`."""

    change: Literal["pause", "resume", "kill"]
    vmm: engine.Vmm


@dataclass(frozen=True)
class Overtaken:
    """A result: another verb was accepted meanwhile."""


@dataclass(frozen=True)
class Provision:
    """Result: `channel.Provisioned`; `engine.Observed`, when the VMM ended; or `Overtaken`."""

    provision: channel.Provision
    intent: int
    seconds: float


@dataclass(frozen=True)
class AwaitEnd:
    """Result: `engine.Observed`, when the VMM ended; None after the time; or `Overtaken`."""

    vmm: engine.Vmm
    intent: int
    seconds: float


@dataclass(frozen=True)
class PowerOff:
    """Result: None, when the guest took the request; or `Overtaken`."""

    guest: channel.Guest
    intent: int
    seconds: float


@dataclass(frozen=True)
class SetTime:
    """Result: `channel.Provisioned`."""

    guest: channel.Guest


@dataclass(frozen=True)
class Release:
    """Ends what is attached to the guest. Result: None."""

    guest: channel.Guest


@dataclass(frozen=True)
class BrokerUp:
    """Result: None."""

    up: broker.InstanceUp


@dataclass(frozen=True)
class NetUp:
    """Result: None."""

    up: net.InstanceUp


@dataclass(frozen=True)
class Down:
    """Ends what `BrokerUp` and `NetUp` began. Result: None; or `Overtaken`, and nothing is done.

    `intent`: the number of the last verb; None when the instance is gone.
    """

    instance: str
    intent: int | None


Command = (
    Clock
    | Tell
    | Wake
    | WasRemoved
    | EngineBoot
    | EngineChange
    | Provision
    | AwaitEnd
    | PowerOff
    | SetTime
    | Release
    | BrokerUp
    | NetUp
    | Down
    | ReadConfig
    | Commit
    | EngineList
    | EngineQuery
    | EngineCreate
    | EngineDelete
    | ApplyPolicy
    | CheckFlow
    | ListForwards
    | ReadCounters
)
R = TypeVar("R")
Plan = Generator[Command, object, R]
