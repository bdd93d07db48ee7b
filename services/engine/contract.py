"""engine: drives the virtual machines, and is the only one that may talk to the helper.

TRUST. The engine believes the transport about who is calling, the registry about which
instance shall exist and run, and the helper, after it proved that it holds the shared key,
about what the host did. It believes no virtual machine: what QEMU or Firecracker says is
capped and checked, because after an escape it is the guest that speaks. It parses no byte
of a guest at all: a stream that it dials is handed on as a descriptor, unread.

Channel and netstack get those descriptors on a socket of their own, in `dial/channel` and
`dial/netstack`; each is mounted into that one service, so the socket says who is asking and
which ports it may have. A request names instance, boot, port and deadline. It is answered
with one descriptor of a connected stream, or with why there is none: `refused` when nobody
in the guest has bound the port, `no-driver` when the guest said nothing by the deadline,
because it still boots, is paused or hangs. Many may be under way at once.
"""

from __future__ import annotations

from typing import Literal

from agent_box.bus.schema import Contract, Data, Empty, Event, Kind, Method, Wall, Wire


class Gap(Wire, frozen=True):
    name: str  # as in doctor, e.g. "engine-missing"
    text: str  # one line: what was tried and what came back


class Probed(Wire, frozen=True):
    engine: Literal["qemu", "firecracker"]  # as configured
    accel: Literal["kvm", "tcg"] | None  # never switched silently; None: not chosen yet
    version: str | None  # what the program said when it was run; None when it could not be
    helper: Literal["user", "system"]  # as configured
    protocol: int | None  # of the helper; None when it did not answer
    gaps: list[Gap]  # empty: a boot may be tried


class Instance(Wire, frozen=True):
    instance: str  # the id, 32 lowercase hex digits; a name never reaches the helper


class Vmm(Wire, frozen=True):
    """One run of an instance. What was meant for an earlier one is refused as a conflict."""

    instance: str
    boot: int


class Create(Wire, frozen=True):
    instance: str
    disk_bytes: int  # size of the sparse data disk


class Images(Wire, frozen=True):
    """Each by its sha256 in lowercase hex; a path has no place in a message."""

    kernel: str
    initramfs: str
    variant: str  # the read-only root
    guest: str  # box-guest, a drive of its own
    harness: str | None  # the harness layer; None when the profile names no harness


class Boot(Wire, frozen=True):
    instance: str
    boot: int  # counts up with every start; the same number again is the same boot
    cpus: int
    memory_bytes: int
    images: Images


class Observed(Wire, frozen=True):
    instance: str
    # Of the VMM, not what a guest says. That one runs at all is seen by its pidfd; whether
    # its vCPUs do is its own word, and `unreachable` when it gave none in time.
    state: Literal["stopped", "running", "paused", "unreachable"]
    boot: int | None  # of the VMM that runs or ran last; None when none ever ran
    exit_status: int | None  # how the last VMM ended; both None while one runs, or none ran
    exit_signal: int | None


class Dial(Wire, frozen=True):
    """A request on one of the dial sockets (bus/handover.py); no method of the bus."""

    instance: str
    boot: int
    port: int
    deadline_ms: int  # how long the guest may take to answer


class Observations(Wire, frozen=True):
    instances: list[Observed]  # all that the helper holds, also those the registry lost


CONTRACT = Contract(
    service="engine",
    trusts=(
        "The transport for the caller's role. The registry for what shall exist and run. "
        "The helper, once authenticated, for what the host did. No VMM for anything."
    ),
    methods=(
        Method(
            name="probe",
            kind=Kind.READ,
            request=Empty,
            reply=Probed,
            deadline_s=30,
            data=Data.STATUS,
            summary="Really runs the configured engine and asks the helper; names each gap.",
        ),
        Method(
            name="create",
            kind=Kind.IDEMPOTENT,
            request=Create,
            reply=Empty,
            deadline_s=120,
            data=Data.RECORD,
            summary="Allocates directories, the uid where there is one, and the data disk.",
        ),
        Method(
            name="boot",
            kind=Kind.IDEMPOTENT,
            request=Boot,
            reply=Observed,
            deadline_s=60,
            data=Data.RECORD,
            summary="Starts the VMM and its companions; answered when it runs, not when the "
            "guest does: that is for channel.provision to tell.",
        ),
        Method(
            name="pause",
            kind=Kind.IDEMPOTENT,
            request=Vmm,
            reply=Observed,
            deadline_s=30,
            data=Data.RECORD,
            summary="Freezes the vCPUs; memory and open streams stay.",
        ),
        Method(
            name="resume",
            kind=Kind.IDEMPOTENT,
            request=Vmm,
            reply=Observed,
            deadline_s=30,
            data=Data.RECORD,
            summary="Lets the vCPUs run again. The guest's clock is the channel's affair.",
        ),
        Method(
            name="kill",
            kind=Kind.IDEMPOTENT,
            request=Vmm,
            reply=Observed,
            deadline_s=30,
            data=Data.RECORD,
            summary="Ends the VMM and its companions; answered when they are gone.",
        ),
        Method(
            name="query",
            kind=Kind.READ,
            request=Instance,
            reply=Observed,
            deadline_s=10,
            data=Data.RECORD,
            summary="What is really there. Refused as state-unknown when the helper is silent.",
        ),
        Method(
            name="list",
            kind=Kind.READ,
            request=Empty,
            reply=Observations,
            deadline_s=10,
            data=Data.RECORD,
            summary="The same for every instance; a stopped VMM process cannot delay it.",
        ),
        Method(
            name="delete",
            kind=Kind.IDEMPOTENT,
            request=Instance,
            reply=Empty,
            deadline_s=120,
            data=Data.RECORD,
            summary="Removes all that create made and verifies each absence.",
        ),
    ),
    events=(
        Event(name="vmm-started", summary="A VMM runs, with its process and boot number."),
        Event(name="vmm-adopted", summary="One that ran before this start was found again."),
        Event(name="vmm-ended", summary="A VMM is gone: by the guest, a kill, or by itself."),
        Event(
            name="vmm-stalled",
            summary="The host's disk is full: the VMM froze the vCPUs. With room, resume.",
        ),
        Event(name="companion-ended", summary="Its vsock device or network worker is gone."),
        Event(name="helper-lost", summary="The helper does not answer; what runs goes on."),
        Event(name="helper-back", summary="The helper answers again."),
    ),
    wall=Wall(
        calls=("registry",),
        config=True,
        sockets=("dial/channel", "dial/netstack"),
        dials=("helper",),
        open_files=8192,
        why=(
            "Notes what happened to a VMM in the registry's journal. Reads [engine] from the "
            "config. Hands out dialled streams on the two dial sockets, one for each service "
            "that may have them. Reaches the helper, which does all that needs the host. "
            "Holds a descriptor or two for each stream while it is being dialled."
        ),
    ),
)
