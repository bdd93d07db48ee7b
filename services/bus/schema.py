"""The words in which a service writes its contract: types, methods, events and its wall.

A contract imports this module and nothing else of ours, so it can be read alone. The
declared table is the only way to a handler: a method that is not in `Contract.methods`
does not exist, whatever attributes an object may have.

Wire types have no default values. A field that is missing is an error and never silently
"the usual": an allow-list that got lost on the way must refuse, not open.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec

BASE_METHODS: Final = (  # every service answers these
    "hello",
    "ping",
    "drain",
    "outcome",
    "confinement",
)


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every value on the bus: immutable, no unknown fields, no defaults."""


class Empty(Wire, frozen=True):
    """A request or a reply without content."""


class Kind(StrEnum):
    """What a caller may do after a reply was lost."""

    READ = "read"  # changes nothing: send again
    IDEMPOTENT = "idempotent"  # twice is the same as once: send again
    ONCE = "once"  # carries a request_id; ask `outcome` and never send again blindly


class Data(StrEnum):
    """The most sensitive thing that a method carries, for the auditor's page."""

    STATUS = "status"  # health, versions, counts
    RECORD = "record"  # names, sizes, states, policies of instances
    JOURNAL = "journal"  # events; text in them may be a guest's claim
    SEALED = "sealed-credential"  # a credential, sealed to the key of its one reader
    NONCE = "nonce"  # stand-ins that only one guest can use
    GUEST = "guest-bytes"  # bytes of the guest, hostile


@dataclass(frozen=True, kw_only=True)
class Method:
    """One operation: a request, then a reply.

    `deadline_s` is the longest time in seconds that a caller may ask for; a frame that asks
    for more is refused.
    """

    name: str
    kind: Kind
    request: type[Wire]
    reply: type[Wire]
    deadline_s: float
    data: Data
    summary: str


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A two-way flow of items under credit, opened by a request and ended by a reply.

    The receiver of a direction grants credit; a sender without credit waits, because a
    ROUTER drops silently at its high-water mark. `window` is the most items in flight.
    A stream does not survive its connection; what must survive is a cursor read.
    """

    name: str
    request: type[Wire]
    up: type[Wire]  # caller to service
    down: type[Wire]  # service to caller
    reply: type[Wire]
    window: int
    data: Data
    summary: str


@dataclass(frozen=True, kw_only=True)
class Event:
    """A kind of journal entry that the service causes."""

    name: str
    summary: str


class Network(Enum):
    NONE = "none"  # a network namespace of its own with nothing in it
    HOST = "host"  # the host's: only for those that must reach upstreams


@dataclass(frozen=True, kw_only=True)
class Wall:
    """What the process may touch. The bubblewrap, seccomp and Landlock profiles come from
    this and from nothing else, so this page is the wall that stands.

    Attributes:
        network: `Network.HOST` needs a `why`.
        calls: services whose bus directory is mounted, read-only.
        config: whether the directory of the config file is mounted, read-only.
        sockets: directories below the runtime directory that hold sockets of this service
            besides its bus socket, writable, e.g. ``dial/channel``.
        dials: directories below the runtime directory with sockets on which somebody else
            listens for this service alone, mounted read-only (connect needs no more).
        launcher: a module that runs outside of the wall before each start, as
            ``--keys DIR -- COMMAND...``, and becomes the service; empty for none.
        syscalls: names of system calls allowed beyond the base set, each with its reason.
        open_files: RLIMIT_NOFILE.
        memory_mib: RLIMIT_DATA in MiB, a bound on runaway growth, not a working-set figure.
        why: the reason for each thing above that is more than nothing.
    """

    network: Network = Network.NONE
    calls: tuple[str, ...] = ()
    config: bool = False
    sockets: tuple[str, ...] = ()
    dials: tuple[str, ...] = ()
    launcher: str = ""
    syscalls: tuple[tuple[str, str], ...] = ()
    open_files: int = 1024
    memory_mib: int = 512
    why: str


_sound: Final[set[Any]] = set()  # types in which no field goes missing, at any depth
_SCALARS: Final = (bool, int, float, str, bytes, NoneType)


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The whole public face of a service."""

    service: str
    trusts: str  # one sentence each: whom it believes, and about what
    methods: tuple[Method | Stream, ...]
    events: tuple[Event, ...]
    wall: Wall

    def __post_init__(self) -> None:
        names = [m.name for m in self.methods]
        twice = {n for n in names if names.count(n) > 1} | (set(names) & set(BASE_METHODS))
        if twice:
            raise ValueError(f"{self.service}: declared twice: {', '.join(sorted(twice))}")
        for method in self.methods:
            for wire in _wire_types(method):
                seen: set[Any] = set()
                _check_type(wire, wire.__name__, seen)
                _sound.update(seen)  # each start of a service reads several contracts


def _wire_types(method: Method | Stream) -> tuple[type[Wire], ...]:
    if isinstance(method, Method):
        return (method.request, method.reply)
    return (method.request, method.up, method.down, method.reply)


def _check_type(wire: Any, where: str, seen: set[Any]) -> None:
    """Refuses, at any depth, a type in which a field could go missing unnoticed, and one that
    does not come out of the decoder as it went in."""
    origin = get_origin(wire)
    if wire in _SCALARS or wire in seen or wire in _sound:
        return
    if isinstance(wire, type) and issubclass(wire, msgspec.Struct):
        if not issubclass(wire, Wire):
            raise ValueError(f"{where}: {wire.__name__} is not a Wire type")
        style = wire.__struct_config__
        if not (style.forbid_unknown_fields and style.frozen) or style.array_like:
            raise ValueError(f"{where}: {wire.__name__} gives up what Wire promises")
        seen.add(wire)
        for field in msgspec.structs.fields(wire):
            at = f"{where}.{field.name}"
            if not field.required:
                raise ValueError(f"{at} has a default value")
            _check_type(field.type, at, seen)
    elif isinstance(wire, type) and issubclass(wire, StrEnum) or origin is Literal:
        return
    elif origin is Annotated:
        _check_type(get_args(wire)[0], where, seen)
    elif origin in (Union, UnionType, list, tuple):
        for inner in get_args(wire):
            if inner is not Ellipsis:
                _check_type(inner, where, seen)
    elif origin is dict and get_args(wire)[0] is str:
        _check_type(get_args(wire)[1], where, seen)
    else:
        raise ValueError(f"{where} has a type that cannot be sent: {wire}")
