"""registry: which instances there are, what happened to them, and what is done to them.

TRUST. The registry believes the transport about who is calling, the operator about what
shall be, the engine about what is, and the config file about profiles and policies. What
another service notes in the journal is kept under the source that the service's role may
speak for: text that came from a guest or an agent stays that instance's claim, and nothing
here is decided by it.
"""

from __future__ import annotations

from typing import Final, Literal

from agent_box.bus.schema import Contract, Data, Empty, Event, Kind, Method, Wall, Wire

Source = Literal["host-observed", "guest-channel", "agent-reported"]
Fact = str | int | bool
Doing = Literal["start", "stop", "pause", "resume", "delete"]


class Images(Wire, frozen=True):
    """Each by its sha256 in lowercase hex. Whoever opens one hashes it first."""

    kernel: str
    initramfs: str
    variant: str
    guest: str
    harness: str | None


class Create(Wire, frozen=True):
    """None stands for what the profile says.

    The operator's own command says which files the image is now: it sees the cache, and the
    registry has no need to. An instance keeps them, whatever is built later.
    """

    name: str
    profile: str | None  # None: [defaults] profile, or the built-in one
    cpus: int | None
    memory: int | None  # bytes
    disk: int | None  # bytes
    image: str  # the variant that was looked up: the profile's, or it is refused
    images: Images


class Name(Wire, frozen=True):
    name: str


class Start(Wire, frozen=True):
    name: str
    no_hook: bool  # this boot goes without the project hook


class Stop(Wire, frozen=True):
    name: str
    grace_ms: int | None  # for the guest to power off; 0 is a kill; None: as in the config


class Delete(Wire, frozen=True):
    name: str
    force: bool  # also when it is running, paused or unknown: it is killed first


class Row(Wire, frozen=True):
    name: str
    state: str  # a state of the table in states.py
    kind: Literal["persistent", "ephemeral"]
    profile: str
    image: str  # the variant
    cpus: int
    memory: int  # bytes
    disk: int  # bytes
    images: Images  # that it boots; they may not be removed


class Problem(Wire, frozen=True):
    name: str  # of the instance, or its id when the name cannot be read
    problem: str  # one line: why its record cannot be used


class Rows(Wire, frozen=True):
    instances: list[Row]  # by name
    problems: list[Problem]
    strays: list[str]  # ids that the engine holds and no record knows


class Failed(Wire, frozen=True):
    """Why the last verb did not come to its end."""

    doing: Doing
    reason: str  # of `bus.errors.Reason`
    message: str
    facts: dict[str, str]
    at_ms: int  # Unix time, milliseconds


class Progress(Wire, frozen=True):
    """How far a verb is. It goes on whether or not anybody asks."""

    id: str
    name: str
    intent: int  # counts up with every verb that was accepted; the number of this one
    row: Row | None  # None: the instance is gone
    doing: Doing | None  # None: nothing is left to do
    phase: str  # one line for a person: what is being waited for; empty with None
    failed: Failed | None  # how the last one ended, when it did not end well


class Follow(Wire, frozen=True):
    """Answered when something differs from what the caller knows, or the time is over."""

    id: str
    name: str  # for the answer
    intent: int
    doing: Doing | None
    phase: str
    wait_ms: int


class Machine(Wire, frozen=True):
    """What the engine said when it was last asked."""

    state: str  # of the VMM: stopped, running, paused or unreachable
    boot: int | None
    exit_status: int | None
    exit_signal: int | None
    observed_ms: int  # Unix time, milliseconds


class Forward(Wire, frozen=True):
    address: str
    host_port: int
    guest_port: int
    public: bool


class Counters(Wire, frozen=True):
    """What the network worker counted since it was started."""

    generation: int  # of the policy in force
    flows: int  # open now
    flows_total: int
    denied: int
    bytes_up: int  # guest to outside
    bytes_down: int
    dropped_frames: int  # malformed


class Instance(Wire, frozen=True):
    row: Row
    id: str  # 32 lowercase hex digits
    harness: str | list[str] | None  # a known one by name, or a command with its arguments
    sudo: bool
    hook: str | None  # a program in the guest, run at its start; None is the usual one
    hook_required: bool
    bindings: list[str]
    policy: str  # the named policy that it follows
    policy_mode: str
    policy_generation: int
    policy_changes: int  # made on top of the named policy
    created_ms: int  # Unix time, milliseconds
    changed_ms: int
    boots: int
    images: Images
    doing: Doing | None  # a verb that has not come to its end
    phase: str
    failed: Failed | None
    machine: Machine | None  # None: the engine has not answered
    forwards: list[Forward] | None  # None: netstack has not answered
    counters: Counters | None  # None: no machine runs, or netstack has not answered


class Entry(Wire, frozen=True):
    """One event of the journal. `hash` covers all the rest and, by `prev`, all before it."""

    seq: int
    time_ms: int  # Unix time, milliseconds, when it was written
    instance: str | None  # the id
    name: str | None  # that the instance had
    source: Source
    kind: str
    by: str  # the role that says so
    facts: dict[str, Fact]
    prev: str  # 64 hex digits
    hash: str


class Read(Wire, frozen=True):
    """A cursor read: events after `after`, oldest first."""

    after: int  # a seq; 0 is the beginning
    tail: int | None  # only the last so many of those that are there
    since_ms: int | None
    source: Source | None
    name: str | None  # of an instance that is or was
    limit: int  # events in one reply
    wait_ms: int  # how long to wait for one when there is none


class Entries(Wire, frozen=True):
    epoch: bytes  # of this start of the registry; the cursor outlives it
    first: int  # the oldest seq that is kept; what was before it has been cut
    events: list[Entry]
    next: int  # to ask with as `after`


class Verified(Wire, frozen=True):
    ok: bool
    first: int
    last: int
    head: str  # the hash of the last event
    bad_seq: int | None  # the first event that is not as it was written
    problem: str | None  # what is wrong, in one line
    records: list[Problem]  # records that are not as the journal says


class Head(Wire, frozen=True):
    seq: int
    hash: str
    time_ms: int


class Note(Wire, frozen=True):
    """An event that another service saw or was told."""

    event_id: bytes  # 16 bytes, random; the same id again is the same event
    instance: str | None
    source: Source  # one that the caller's role may speak for
    kind: str  # declared in the caller's contract
    facts: dict[str, Fact]


class Noted(Wire, frozen=True):
    seq: int


class PolicyRule(Wire, frozen=True):
    id: str
    action: Literal["allow", "deny"]
    host: str | None
    network: str | None
    ports: list[tuple[int, int]]
    protocol: Literal["tcp", "udp"]
    sni: bool
    allow_reserved: bool


class PolicyTable(Wire, frozen=True):
    """A policy in full, as `policy set --file` brings it."""

    mode: Literal["deny", "allowlist", "open"]
    allow_open: bool
    rules: list[PolicyRule]


class PolicySet(Wire, frozen=True):
    """Parts that are None, empty or False change nothing. They apply in this order."""

    name: str
    policy: str | None  # follow this named policy from now on; drops earlier changes
    reset: bool  # drop earlier changes
    table: PolicyTable | None  # put this in the place of the named policy
    mode: Literal["deny", "allowlist", "open"] | None
    remove: list[str]  # HOST[:PORTS][/PROTOCOL], or the id of a rule
    allow: list[str]  # HOST[:PORTS][/PROTOCOL]
    allow_open: bool  # leave for the mode open
    allow_reserved: bool  # leave for the rules of `allow` to lead into reserved ranges


class PolicyView(Wire, frozen=True):
    policy: str
    generation: int
    mode: Literal["deny", "allowlist", "open"]
    rules: list[PolicyRule]
    changes: int  # on top of the named policy
    endpoints: list[str]  # of the broker


class PolicyCheck(Wire, frozen=True):
    name: str
    target: str  # HOST[:PORT][/PROTOCOL]


class PolicyVerdict(Wire, frozen=True):
    verdict: Literal["allow", "deny"]
    rule: str
    why: str
    generation: int


def _method(
    name: str, kind: Kind, request: type[Wire], reply: type[Wire], data: Data, summary: str,
    *, deadline_s: float = 10,
) -> Method:  # fmt: skip
    return Method(
        name=name, kind=kind, request=request, reply=reply, deadline_s=deadline_s, data=data,
        summary=summary,
    )  # fmt: skip


SERVICE_FATAL: Final = "service-fatal"  # the only one that the supervisor may note

CONTRACT = Contract(
    service="registry",
    trusts=(
        "The transport for the caller's role. The operator for what shall be, the engine for "
        "what is, the config file for profiles and policies. Each other service for what its "
        "role may note, and for nothing else."
    ),
    methods=(
        _method("create", Kind.ONCE, Create, Row, Data.RECORD,
                "Makes an instance: its record, then what the engine allocates, or neither.",
                deadline_s=150),
        _method("list", Kind.READ, Empty, Rows, Data.RECORD,
                "One row for each instance; unknown where the engine has not answered."),
        _method("inspect", Kind.READ, Name, Instance, Data.RECORD,
                "The full record and what the engine and netstack say now."),
        _method("start", Kind.ONCE, Start, Progress, Data.RECORD,
                "Boots a stopped instance. Answered when that is on record; then ask `follow`.",
                deadline_s=30),
        _method("stop", Kind.ONCE, Stop, Progress, Data.RECORD,
                "Powers the guest off, and kills it when the grace passes; as start.",
                deadline_s=30),
        _method("pause", Kind.ONCE, Name, Progress, Data.RECORD,
                "Freezes the vCPUs; as start.", deadline_s=30),
        _method("resume", Kind.ONCE, Name, Progress, Data.RECORD,
                "Lets the vCPUs run again and sets the guest's clock; as start.", deadline_s=30),
        _method("delete", Kind.ONCE, Delete, Progress, Data.RECORD,
                "Removes all of an instance and verifies each absence; as start.",
                deadline_s=30),
        _method("follow", Kind.READ, Follow, Progress, Data.RECORD,
                "How far a verb is; waits for the next step when asked to.", deadline_s=60),
        _method("logs", Kind.READ, Read, Entries, Data.JOURNAL,
                "Events from a cursor on; waits for the next when asked to.", deadline_s=60),
        _method("verify", Kind.READ, Empty, Verified, Data.STATUS,
                "Checks the whole chain, and each record against it.", deadline_s=300),
        _method("head", Kind.READ, Empty, Head, Data.STATUS,
                "The head of the chain; one that is kept elsewhere shows a rewritten chain."),
        _method("note", Kind.IDEMPOTENT, Note, Noted, Data.JOURNAL,
                "Appends an event of another service.", deadline_s=30),
        _method("policy_show", Kind.READ, Name, PolicyView, Data.RECORD,
                "The policy of an instance, its rules and its generation."),
        _method("policy_set", Kind.ONCE, PolicySet, PolicyView, Data.RECORD,
                "Changes the policy of an instance, live.", deadline_s=60),
        _method("policy_check", Kind.READ, PolicyCheck, PolicyVerdict, Data.RECORD,
                "What the policy of an instance says about a destination."),
    ),
    events=(
        Event(name="create-begun", summary="The record is written; nothing is allocated yet."),
        Event(name="allocate-begun", summary="The engine is asked from here on."),
        Event(name="created", summary="All of it is there; the instance is stopped."),
        Event(name="create-failed", summary="A step failed; what was made is being removed."),
        Event(name="removed", summary="The absence of all parts was verified; the record is gone."),
        Event(name="undo-pending", summary="What was made could not be removed yet."),
        Event(name="start-begun", summary="It shall run; the boot has its number from here on."),
        Event(name="start-done", summary="The guest shook hands and is provisioned."),
        Event(
            name="start-again",
            summary="Its kernel misjudged its timer, so it is booted once more.",
        ),
        Event(name="start-failed", summary="It did not come up; what runs of it is ended."),
        Event(name="stop-begun", summary="It shall stop, and how long the guest may take."),
        Event(name="stop-done", summary="No VMM runs any more, and how the last one ended."),
        Event(name="pause-begun", summary="The vCPUs shall be frozen."),
        Event(name="pause-done", summary="They are; memory stays."),
        Event(name="resume-begun", summary="The vCPUs shall run again."),
        Event(name="resume-done", summary="They do, and whether the guest got the time."),
        Event(name="verb-failed", summary="A pause, resume or stop did not come to its end."),
        Event(name="delete-begun", summary="All of it is being removed."),
        Event(name="stray-found", summary="The engine holds what no record knows."),
        Event(name="stray-removed", summary="It was ours and had been deleted; now it is gone."),
        Event(name="state-changed", summary="The instance has another state, and why."),
        Event(name="policy-changed", summary="A new generation of the policy is recorded."),
        Event(name="policy-failed", summary="It could not be put in force at the running guest."),
        Event(name="record-anchored", summary="Carries a record's hash over a cut."),
        Event(name="journal-cut", summary="Old events were removed; the chain goes on here."),
        Event(name="notes-dropped", summary="More was noted of an instance than may be kept."),
        Event(name=SERVICE_FATAL, summary="A service died again and again and stays down."),
        Event(name="started", summary="The registry started, and what it found."),
    ),
    wall=Wall(
        calls=("engine", "netstack", "broker", "channel"),
        config=True,
        why=(
            "Asks the engine what is there and tells it what shall be; asks netstack what a "
            "policy says; tells broker and channel about starts and stops. Reads profiles and "
            "policies from the config."
        ),
    ),
)  # fmt: skip
