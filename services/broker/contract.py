"""broker: HTTP endpoints for guests; puts the credential in and opens TLS itself.

TRUST. The broker believes the transport about who is calling, and the registry about which
instance runs, since when, and the names of its bindings. It does not believe the registry
about where a binding leads: it reads `[bindings]` from the config file itself, so that a
captured registry cannot send a credential elsewhere. It believes the store about values,
for one request. A guest is known by the socket that only its own network worker can see; of
what comes through it, and of what an upstream sends back, nothing is believed.
"""

from __future__ import annotations

from agent_box.bus.schema import Contract, Data, Empty, Event, Kind, Method, Network, Wall, Wire


class InstanceUp(Wire, frozen=True):
    instance: str  # the id, 32 lowercase hex digits
    name: str  # pushes may go only to refs/heads/agent-box/<name>/
    boot: int  # counts up with every start; nonces of another boot are void
    bindings: list[str]  # all of them, by name; empty means none, and is never left out


class Instance(Wire, frozen=True):
    instance: str


class NoncesOf(Wire, frozen=True):
    instance: str
    boot: int


class Nonce(Wire, frozen=True):
    binding: str
    kind: str  # anthropic, git-basic, ...: says where a client puts the nonce
    endpoint: str  # http://<binding>.broker.internal
    nonce: str  # worth nothing outside this instance, this binding and this boot
    place: str  # of kinds header, query and basic: the header, parameter or user; else empty
    repos: list[str]  # of git-basic, OWNER/NAME; else empty
    upstream: str  # https://github.com, where a client would go without us


class Nonces(Wire, frozen=True):
    nonces: list[Nonce]


class UsageOf(Wire, frozen=True):
    instance: str | None  # None: all, those that were deleted too
    since_day: int  # days since 1970-01-01, UTC


class Used(Wire, frozen=True):
    instance: str
    name: str  # as it was called when it last started
    binding: str
    day: int  # days since 1970-01-01, UTC
    requests: int
    refused: int
    bytes_up: int  # of bodies, guest to upstream
    bytes_down: int
    tokens_in: int  # from the provider's replies, which the guest cannot forge
    tokens_out: int
    cost: int  # micro-units of the currency, by the operator's price table
    unpriced: int  # tokens of models that the table does not know


class Usage(Wire, frozen=True):
    currency: str
    refused_nonces: int  # since the broker's start
    used: list[Used]


CONTRACT = Contract(
    service="broker",
    trusts=(
        "The transport for the caller's role. The registry for which instance runs with which "
        "bindings, by name. The config file for what a binding is. The store for a value, "
        "for one request. No guest and no upstream for anything."
    ),
    methods=(
        Method(
            name="instance_up",
            kind=Kind.IDEMPOTENT,
            request=InstanceUp,
            reply=Empty,
            deadline_s=30,
            data=Data.RECORD,
            summary="Opens the instance's socket for exactly these bindings of this boot.",
        ),
        Method(
            name="instance_down",
            kind=Kind.IDEMPOTENT,
            request=Instance,
            reply=Empty,
            deadline_s=30,
            data=Data.RECORD,
            summary="Closes the socket and ends what runs through it.",
        ),
        Method(
            name="nonces",
            kind=Kind.READ,
            request=NoncesOf,
            reply=Nonces,
            deadline_s=10,
            data=Data.NONCE,
            summary="The stand-ins that this boot of the guest presents in place of keys.",
        ),
        Method(
            name="usage",
            kind=Kind.READ,
            request=UsageOf,
            reply=Usage,
            deadline_s=10,
            data=Data.RECORD,
            summary="What was used of each binding on each day, counted here.",
        ),
    ),
    events=(
        Event(name="request-refused", summary="The gate refused a request, and by which rule."),
        Event(name="nonce-refused", summary="A request came with a wrong nonce."),
        Event(name="reply-cut", summary="An upstream's reply held the credential and was cut."),
    ),
    wall=Wall(
        network=Network.HOST,
        calls=("store", "registry"),
        config=True,
        sockets=("vm/broker",),
        open_files=8192,
        why=(
            "Opens connections to upstreams, so it has the host's network. Asks the store for "
            "one credential a request. Notes refusals in the registry's journal. Reads "
            "[bindings] and CA files from the config's directory. Listens on one socket for "
            "each running instance. Two descriptors for each request under way."
        ),
    ),
)
