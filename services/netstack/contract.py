"""netstack: network policy and names; drives one worker for each running instance.

TRUST. The netstack believes the transport about who is calling, the registry about which
instance runs under which policy, the operator about forwards, and the engine about which
instance a dialled stream leads to. It moves no packet itself: a guest's bytes go to that
instance's worker alone, and what a worker reports is believed for its own instance and for
nothing else. A policy is taken whole: one that lacks a field, or says a thing twice, refuses
its instance and is never completed with something usual.
"""

from __future__ import annotations

from typing import Literal

from agent_box.bus.schema import (
    Contract,
    Data,
    Empty,
    Event,
    Kind,
    Method,
    Network,
    Stream,
    Wall,
    Wire,
)


class Rule(Wire, frozen=True):
    """Exactly one of `host` and `network` is set, each in the one form of config.egress."""

    id: str  # made from the fields below, so the same rule has the same id everywhere
    action: Literal["allow", "deny"]
    host: str | None  # lowercase A-labels; "*.x" is any depth below x and not x itself
    network: str | None  # CIDR
    ports: list[tuple[int, int]]  # inclusive ranges, sorted, disjoint
    protocol: Literal["tcp", "udp"]
    sni: bool  # on port 443 a TLS client must name its server
    allow_reserved: bool  # may lead into a reserved range


class Policy(Wire, frozen=True):
    generation: int  # counts up with every change
    mode: Literal["deny", "allowlist", "open"]
    allow_open: bool  # said separately, so that one flipped word does not open everything
    rules: list[Rule]  # their order means nothing
    endpoints: list[str]  # bindings: <binding>.broker.internal port 80 at the gateway


class Flow(Wire, frozen=True):
    """What is known of a flow by now. More knowledge can only turn an allow into a deny."""

    name: str | None  # that the guest asked for; None for a bare address
    address: str | None  # that it would go to; None while not resolved
    port: int
    protocol: Literal["tcp", "udp"]
    hello: Literal["unread", "no-name", "named"]  # its first bytes, as to TLS
    sni: str | None  # with named


class Verdict(Wire, frozen=True):
    verdict: Literal["allow", "deny"]
    rule: str  # a rule's id, or a built-in one such as "mode:allowlist"
    why: str  # one line for a person


class Check(Wire, frozen=True):
    policy: Policy
    flow: Flow


class InstanceUp(Wire, frozen=True):
    instance: str  # the id, 32 lowercase hex digits
    name: str  # for people, e.g. of whoever wants a port that it has
    boot: int  # counts up with every start
    policy: Policy


class Instance(Wire, frozen=True):
    instance: str


class Apply(Wire, frozen=True):
    instance: str
    policy: Policy


class Applied(Wire, frozen=True):
    generation: int  # in force at the worker
    revoked: int  # flows that the new policy refuses; each got a RST


class Forward(Wire, frozen=True):
    address: str  # on the host; 127.0.0.1 brings ::1 with it
    host_port: int
    guest_port: int
    public: bool  # the address is not a loopback one


class ForwardAdd(Wire, frozen=True):
    instance: str
    forward: Forward  # host_port 0 asks for a free one


class ForwardRemove(Wire, frozen=True):
    instance: str
    host_port: int


class Forwards(Wire, frozen=True):
    forwards: list[Forward]


class Counters(Wire, frozen=True):
    generation: int  # of the policy in force
    flows: int  # open now
    flows_total: int
    denied: int
    bytes_up: int  # guest to outside
    bytes_down: int
    dropped_frames: int  # malformed


class Capture(Wire, frozen=True):
    instance: str
    snap_bytes: int  # of each packet, at most
    count: int | None  # packets, then the end; None goes on


class Packets(Wire, frozen=True):
    pcap: bytes  # whole records of a pcap file; nonces are masked


class CaptureEnd(Wire, frozen=True):
    packets: int
    dropped: int  # not shown, because the reader was too slow


CONTRACT = Contract(
    service="netstack",
    trusts=(
        "The transport for the caller's role. The registry for which instance runs under "
        "which policy. The operator for forwards. The engine for where a stream leads. "
        "A worker for its own instance. No guest for anything."
    ),
    methods=(
        Method(
            name="check",
            kind=Kind.READ,
            request=Check,
            reply=Verdict,
            deadline_s=10,
            data=Data.RECORD,
            summary="What the policy says about a flow: the function that enforces it.",
        ),
        Method(
            name="instance_up",
            kind=Kind.IDEMPOTENT,
            request=InstanceUp,
            reply=Applied,
            deadline_s=30,
            data=Data.RECORD,
            summary="Hands the worker of this boot its policy and its stream to the guest.",
        ),
        Method(
            name="instance_down",
            kind=Kind.IDEMPOTENT,
            request=Instance,
            reply=Empty,
            deadline_s=30,
            data=Data.RECORD,
            summary="Ends flows and forwards of an instance; its worker ends with the VM.",
        ),
        Method(
            name="apply",
            kind=Kind.IDEMPOTENT,
            request=Apply,
            reply=Applied,
            deadline_s=30,
            data=Data.RECORD,
            summary="Puts a newer policy in force; an older generation is refused.",
        ),
        Method(
            name="counters",
            kind=Kind.READ,
            request=Instance,
            reply=Counters,
            deadline_s=10,
            data=Data.STATUS,
            summary="What the worker counted.",
        ),
        Method(
            name="forward_add",
            kind=Kind.IDEMPOTENT,
            request=ForwardAdd,
            reply=Forward,
            deadline_s=30,
            data=Data.RECORD,
            summary="Listens on the host for an instance; answers with the port. The same again "
            "is the same one.",
        ),
        Method(
            name="forwards",
            kind=Kind.READ,
            request=Instance,
            reply=Forwards,
            deadline_s=10,
            data=Data.RECORD,
            summary="The forwards of an instance.",
        ),
        Method(
            name="forward_remove",
            kind=Kind.IDEMPOTENT,
            request=ForwardRemove,
            reply=Empty,
            deadline_s=30,
            data=Data.RECORD,
            summary="Ends a forward and its connections.",
        ),
        Stream(
            name="capture",
            request=Capture,
            up=Empty,
            down=Packets,
            reply=CaptureEnd,
            window=64,
            data=Data.GUEST,
            summary="The instance's packets as they pass; a slow reader loses some, not we.",
        ),
    ),
    events=(
        Event(name="flow-denied", summary="A flow or a name was refused, and by which rule."),
        Event(name="flow-revoked", summary="An open flow was reset: a newer policy refuses it."),
        Event(name="flow-limited", summary="A limit of the instance held something back."),
        Event(name="denials-dropped", summary="More was refused than could be told; how many."),
        Event(name="policy-applied", summary="A generation is in force; flows revoked by it."),
        Event(name="forward-opened", summary="The host listens for an instance."),
        Event(name="forward-closed", summary="The host no longer does."),
        Event(name="worker-started", summary="Another worker runs; flows of the last are reset."),
        Event(name="netstack-started", summary="The service has started, and knows what runs."),
    ),
    wall=Wall(
        network=Network.HOST,
        calls=("registry",),
        dials=("dial/netstack", "vm/worker"),
        why=(
            "Listens for forwards and reads which addresses are the host's own, so it has the "
            "host's network. Notes denials in the registry's journal. Gets a stream to each "
            "guest as a descriptor from the engine on dial/netstack and hands it to the "
            "worker, whose control socket is in vm/worker."
        ),
    ),
)
