"""channel: speaks with the guests: control, terminals, commands and the harness.

TRUST. The channel believes the transport about who is calling, the registry about which
instance runs and how it shall be provisioned, the broker about nonces, and the engine about
which instance a dialled stream leads to. It believes no guest: every frame is capped and
checked, and what it says is told on as that instance's claim. It has no network, no
credential and no way to the helper.

Bytes of terminals and commands carry absolute offsets both ways. Whoever comes back says
where it stopped; nothing is lost or doubled when the caller or this service starts again.
"""

from __future__ import annotations

from typing import Final, Literal

from agent_box.bus.schema import Contract, Data, Empty, Event, Kind, Method, Stream, Wall, Wire


class Instance(Wire, frozen=True):
    instance: str  # the id, 32 lowercase hex digits


class Guest(Wire, frozen=True):
    """One run of an instance; a guest of another boot is never spoken to by mistake."""

    instance: str
    boot: int


class Variable(Wire, frozen=True):
    name: str
    value: str


class Hook(Wire, frozen=True):
    """A file that is sourced before terminals and harness start."""

    path: str  # in the guest, absolute or from ~/ on
    expected: bool  # whether it is a failure when it is not there
    required: bool  # whether a failure of it is one of the start


class Provision(Wire, frozen=True):
    """All of it, every time: an empty list says none."""

    instance: str
    boot: int  # counts up with every start
    hostname: str
    environment: list[Variable]  # the agent's, on top of what the guest itself sets
    bindings: list[str]  # by name; with any, the broker is asked for their nonces
    harness: str | None  # kage, codex, ...; None when the profile names none
    hook: Hook | None  # None: none is run
    sudo: bool  # whether the agent's uid may become root
    # Whether a guest whose kernel misjudged its timer is refused, with `timer` in the facts, or
    # only one that has none at all. Its rate is measured anew at each boot (guest/timer.py).
    timer: Literal["right", "any"]


class Provisioned(Wire, frozen=True):
    version: str  # of box-guest, by its own claim
    skew_ms: int  # the guest's clock against ours, after it was set


class Size(Wire, frozen=True):
    rows: int
    columns: int


# What a caller of attach or exec keeps to (docs/terminals.md).
CHUNK_MAX: Final = 1 << 16  # bytes of data in one item, either way
INPUT_MAX: Final = 1 << 18  # bytes of input that may be under way beyond `taken`
SEEN_EVERY: Final = 1 << 18  # bytes of output after which it must be acknowledged; sooner is fine


class Attach(Wire, frozen=True):
    instance: str
    terminal: str  # its id: 1 to 32 lowercase hex digits, drawn by the caller for a new one
    new: bool  # begin it, unless it is there already; otherwise it is joined, or NOT_FOUND
    offset: int  # of the first output byte wanted; 0 is the oldest that is kept
    shell: bool  # a shell, or `argv`; otherwise the harness's own terminal program
    argv: list[bytes]  # empty: the login shell. Without meaning when joining, as all below
    user: Literal["agent", "root"]
    directory: str | None  # in the guest; None is the usual one
    environment: list[Variable]  # on top of what the guest sets
    timeout_ms: int | None
    term: str  # the value of TERM
    size: Size  # before the first byte, when joining too


class Typed(Wire, frozen=True):
    offset: int  # of `data` in all that was typed into this terminal
    data: bytes
    seen: int  # output up to here has arrived; the guest may forget it
    size: Size | None  # a new size, when it changed


class Shown(Wire, frozen=True):
    terminal: str  # its id, for joining it again
    offset: int  # of `data` in all that this terminal put out
    data: bytes  # empty in the first item, which comes at once, and when only `taken` changed
    taken: int  # input up to here has arrived


class Ended(Wire, frozen=True):
    # taken: by a newer attachment; left-running: the instance was paused or stopped
    how: Literal["exited", "signalled", "taken", "timed-out", "left-running"]
    status: int | None  # with exited
    signal: int | None  # with signalled


class Terminal(Wire, frozen=True):
    terminal: str
    user: Literal["agent", "root"]
    attached: bool
    command: str  # what was begun in it, for a person; the guest's claim


class Terminals(Wire, frozen=True):
    terminals: list[Terminal]


class Exec(Wire, frozen=True):
    instance: str
    command: str  # its id: 1 to 32 lowercase hex digits, drawn by the caller
    new: bool  # begin it, unless it is there already; otherwise it is joined, or NOT_FOUND
    stdout: int  # of the first byte wanted of each; 0 in the beginning
    stderr: int
    argv: list[bytes]  # searched in PATH; without meaning when joining, as all below
    user: Literal["agent", "root"]
    directory: str | None
    environment: list[Variable]
    timeout_ms: int | None


class ExecInput(Wire, frozen=True):
    offset: int
    data: bytes
    end: bool  # no more standard input after this
    signal: int | None  # one to send to the command's process group
    stdout: int  # output up to here has arrived of each; the guest may forget it
    stderr: int


class ExecOutput(Wire, frozen=True):
    source: Literal["stdout", "stderr"]
    offset: int  # within its source
    data: bytes  # empty in the first item, which comes at once, and when only `taken` changed
    taken: int  # input up to here has arrived


class Run(Wire, frozen=True):
    """The same id again is the same run, so it may be asked for twice."""

    run: str  # its id, drawn by the caller: 32 lowercase hex digits
    instance: str
    harness: str | list[str]  # a preset's name, or a command with its arguments
    prompt: str
    session: str | None  # a harness session to load; None begins one
    directory: str | None  # of the session, in the guest
    timeout_ms: int | None


class RunId(Wire, frozen=True):
    run: str


class RunEnd(Wire, frozen=True):
    how: Literal["stopped", "timed-out", "cancelled", "left-running", "failed"]
    stop_reason: str | None  # with stopped: the harness's word, e.g. end_turn
    code: str | None  # with failed: see docs/cli.md
    text: str  # why, in one line; empty where there is nothing to say


class RunRow(Wire, frozen=True):
    run: str
    session: str | None  # None until the harness said it
    begun_ms: int  # Unix time
    live: bool


class RunRows(Wire, frozen=True):
    runs: list[RunRow]  # newest first


class RunRead(Wire, frozen=True):
    run: str
    cursor: int  # of the first update wanted; 0 is the beginning
    limit: int
    wait_ms: int  # how long to wait for one when there is none


class Update(Wire, frozen=True):
    at_ms: int  # Unix time, milliseconds, when it reached us
    # as in the Agent Client Protocol, e.g. agent_message_chunk, tool_call; box_session and
    # box_permission are our own
    kind: str
    body: str  # JSON, the agent's claim


class Updates(Wire, frozen=True):
    updates: list[Update]
    cursor: int  # to ask with next
    end: RunEnd | None  # None while it goes on, or while there are more updates


CONTRACT = Contract(
    service="channel",
    trusts=(
        "The transport for the caller's role. The registry for what a guest is provisioned "
        "with. The broker for nonces. The engine for where a stream leads. No guest for "
        "anything."
    ),
    methods=(
        Method(
            name="provision",
            kind=Kind.IDEMPOTENT,
            request=Provision,
            reply=Provisioned,
            deadline_s=600,
            data=Data.NONCE,
            summary="Shakes hands with a booting guest and gives it all it shall have.",
        ),
        Method(
            name="set_time",
            kind=Kind.IDEMPOTENT,
            request=Guest,
            reply=Provisioned,
            deadline_s=10,
            data=Data.STATUS,
            summary="Sets the guest's clock, as after a resume.",
        ),
        Method(
            name="poweroff",
            kind=Kind.IDEMPOTENT,
            request=Guest,
            reply=Empty,
            deadline_s=30,
            data=Data.STATUS,
            summary="Asks the guest to power off; answered when it has taken the request.",
        ),
        Method(
            name="release",
            kind=Kind.IDEMPOTENT,
            request=Guest,
            reply=Empty,
            deadline_s=10,
            data=Data.STATUS,
            summary="Ends what is attached to a guest that was paused, until `set_time`.",
        ),
        Stream(
            name="attach",
            request=Attach,
            up=Typed,
            down=Shown,
            reply=Ended,
            window=64,
            data=Data.GUEST,
            summary="A terminal in the guest, new or joined again.",
        ),
        Method(
            name="terminals",
            kind=Kind.READ,
            request=Instance,
            reply=Terminals,
            deadline_s=10,
            data=Data.GUEST,
            summary="The terminals that the guest holds.",
        ),
        Stream(
            name="exec",
            request=Exec,
            up=ExecInput,
            down=ExecOutput,
            reply=Ended,
            window=64,
            data=Data.GUEST,
            summary="A command without a terminal; stdout and stderr stay apart.",
        ),
        Method(
            name="run",
            kind=Kind.IDEMPOTENT,
            request=Run,
            reply=RunId,
            deadline_s=60,
            data=Data.GUEST,
            summary="Begins one prompt in the harness.",
        ),
        Method(
            name="runs",
            kind=Kind.READ,
            request=Instance,
            reply=RunRows,
            deadline_s=10,
            data=Data.RECORD,
            summary="The runs of an instance, for following one again.",
        ),
        Method(
            name="run_read",
            kind=Kind.READ,
            request=RunRead,
            reply=Updates,
            deadline_s=60,
            data=Data.GUEST,
            summary="Updates of a run from a cursor on; waits for the next.",
        ),
        Method(
            name="run_cancel",
            kind=Kind.IDEMPOTENT,
            request=RunId,
            reply=Empty,
            deadline_s=30,
            data=Data.RECORD,
            summary="Cancels the prompt; its end comes through run_read.",
        ),
    ),
    events=(
        Event(name="guest-ready", summary="A guest shook hands and took its provisioning."),
        Event(name="forgery-refused", summary="A guest sent a bad frame; its stream was ended."),
        Event(name="guest-phase", summary="A step of the guest's boot, as it says."),
        Event(name="guest-oom", summary="Its kernel ended a process for want of memory."),
        Event(name="guest-disk", summary="Its data disk is nearly full."),
        Event(name="guest-warning", summary="A program in it wrote a line for the operator."),
        Event(name="hook-done", summary="The project hook was sourced."),
        Event(name="hook-failed", summary="It was not, or not to its end; with its last lines."),
        Event(name="root-session", summary="An operator opened a root terminal or command."),
        Event(name="permission-allowed", summary="A harness asked for leave and got it once."),
        Event(name="run-ended", summary="A prompt came to its end, and how."),
    ),
    wall=Wall(
        calls=("broker", "registry"),
        dials=("dial/channel",),
        open_files=8192,
        why=(
            "Gets nonces from the broker for a guest's provisioning. Notes what guests claim "
            "in the registry's journal. Gets its streams as descriptors from the engine on "
            "dial/channel. One descriptor for each terminal, command and control stream."
        ),
    ),
)
