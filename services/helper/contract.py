"""helper: what the host must do for a machine, as fixed operations on ids and digests.

TRUST. The helper believes the kernel about who connects (SO_PEERCRED), and a peer that proved
it holds the engine's key about nothing but this: that the engine asks. It then does one of the
operations below and no other. None takes a path, a command line, an option of a program or a
descriptor; an instance is an id, an image is the sha256 of its bytes. So an engine that was
taken over can start, stop and delete machines, and reach the monitor and the streams of those
it started, and that is all: no file of the operator's, no program of its choice.

What machines and devices say is read by nobody here: their sockets are handed on unread, the
console is copied into a file of limited size, and whether a process lives is asked of the
kernel. What an exited process leaves behind is found by its number and start time, never by
its name.

In user mode the helper is the operator, and what it keeps apart are machines from one another
and from the operator. In system mode (not built yet) it is root, each instance has a uid of its
own, and an instance belongs to the uid that allocated it; the operations are the same.

One datagram of a SEQPACKET socket is one message: a JSON object, at most `MESSAGE_BYTES` long,
with exactly the declared fields. First both prove that they hold the key (`wire`); then each
request `{v, req, op, args}` is answered by `{v, req, reply}` or `{v, req, error: {code,
detail}}`, in any order, descriptors beside it. A message that is none ends the connection.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PROTOCOL: Final = 1
MESSAGE_BYTES: Final = 65536
IN_FLIGHT: Final = 64  # requests of one connection that are not answered yet
CONSOLE_BYTES: Final = 32768  # in one reply

MIN_DISK: Final = 64 << 20
MAX_DISK: Final = 16 << 40
MAX_CPUS: Final = 64
MIN_MEMORY: Final = 64  # MiB
MAX_MEMORY: Final = 1 << 20


class Hex(NamedTuple):
    """Exactly so many lowercase hexadecimal digits."""

    digits: int


class Int(NamedTuple):
    low: int
    high: int


class Bool(NamedTuple):
    """true or false."""


class Text(NamedTuple):
    """At most so many characters; from the helper, for people."""

    most: int


class Word(NamedTuple):
    """One of these."""

    words: tuple[str, ...]


class Maybe(NamedTuple):
    """The same, or null. A field is never left out."""

    of: Type


class Many(NamedTuple):
    of: Type
    most: int


class Struct(NamedTuple):
    """An object with exactly these fields."""

    fields: tuple[tuple[str, Type], ...]


Type = Hex | Int | Bool | Text | Word | Maybe | Many | Struct

ID: Final = Hex(32)  # of an instance
LAUNCH: Final = Hex(32)  # of one boot; fresh each time
DIGEST: Final = Hex(64)  # sha256
PID: Final = Int(1, 1 << 22)
TIME_MS: Final = Int(0, 1 << 53)  # since the epoch

PROFILE: Final = Struct(
    (
        ("engine", Word(("qemu",))),
        ("accel", Word(("kvm", "tcg"))),  # never switched to the other
        ("cpus", Int(1, MAX_CPUS)),
        ("memory_mib", Int(MIN_MEMORY, MAX_MEMORY)),
        ("kernel", DIGEST),
        ("initramfs", DIGEST),
        ("variant", DIGEST),
        ("guest", DIGEST),
        ("harness", Maybe(DIGEST)),
    )
)
EXIT: Final = Struct(
    (
        ("code", Maybe(Int(0, 255))),  # both null: it was not seen, only that it is gone
        ("signal", Maybe(Int(1, 64))),
        # guest: it powered off. kill: the operation. device-died: its vsock device did, so it
        # was killed. vmm: it failed or was killed from outside. host: the host was restarted.
        ("by", Word(("guest", "kill", "device-died", "vmm", "host"))),
        ("at_ms", TIME_MS),
    )
)
STATE: Final = Struct(
    (
        ("id", ID),
        # partial: an allocate or release was interrupted; either one finishes it.
        # failed: a launch was; the machine never ran.
        ("state", Word(("partial", "allocated", "starting", "running", "exited", "failed"))),
        ("launch_id", Maybe(LAUNCH)),  # of the last one
        ("disk_bytes", Maybe(Int(0, MAX_DISK))),
        ("vmm", Maybe(Struct((("pid", PID), ("start", Int(0, 1 << 62)))))),
        # Whether each lives. A machine without its shim runs on; without its device it is
        # being killed.
        ("shim", Bool()),
        ("device", Bool()),
        ("worker", Bool()),
        ("restarts", Int(0, 1 << 31)),  # of the worker, in this launch
        ("exit", Maybe(EXIT)),
        ("error", Maybe(Text(1000))),  # why it is failed
    )
)
GAP: Final = Struct((("name", Text(40)), ("text", Text(500))))
PROBED: Final = Struct(
    (
        ("protocol", Int(1, 1000)),
        ("mode", Word(("user", "system"))),
        ("uid", Int(0, 1 << 32)),
        ("qemu", Maybe(Text(100))),  # what each program said when it was run
        ("bwrap", Maybe(Text(100))),
        ("mkfs", Maybe(Text(100))),
        ("kvm", Bool()),  # /dev/kvm was opened and answered
        ("tsc_khz", Maybe(Int(1, 1 << 40))),  # measured once in the life of a host's kernel
        ("jail", Bool()),  # a program really ran in the jail of a machine
        ("gaps", Many(GAP, 16)),  # empty: a launch may be tried, with either accelerator
    )
)

ERRORS: Final[dict[str, str]] = {
    "bad_request": "The request is not as declared.",
    "not_found": "No such instance.",
    "conflict": "Another launch of it is meant, or it was allocated with another size.",
    "precondition": "The instance is in another state; the detail says which.",
    "exhausted": "The host's disk is full, or too much is asked at once.",
    "unavailable": "The machine has no such socket, or its shim does not answer in time.",
    "image_missing": "No image of this digest; the detail is the digest.",
    "image_corrupt": "An image's bytes are not what its digest says; the detail is the digest.",
    "launch_failed": "A process of the machine ended at once; the detail has its last words.",
    "host": "The host refuses; the detail says what.",
    "internal": "A defect; the helper's log has it under the id in the detail.",
}


class Op(NamedTuple):
    """One operation.

    Attributes:
        repeats: asking again when the answer was lost has no further effect. All do.
        descriptors: how many come with a good answer.
        deadline_s: in which it answers; longer means the helper is lost.
    """

    name: str
    request: Struct
    reply: Struct
    descriptors: int
    deadline_s: int
    summary: str


_ONE: Final = Struct((("id", ID),))
_BOOT: Final = Struct((("id", ID), ("launch_id", LAUNCH)))
_NOTHING: Final = Struct(())

OPS: Final = (
    Op("probe", _NOTHING, PROBED, 0, 60, "Runs what a launch needs, and tells what is missing."),
    Op(
        "allocate",
        Struct((("id", ID), ("disk_bytes", Int(MIN_DISK, MAX_DISK)))),
        STATE,
        0,
        60,
        "Makes the instance's directory and its sparse data disk with an empty ext4.",
    ),
    Op(
        "launch",
        Struct((("id", ID), ("launch_id", LAUNCH), ("profile", PROFILE))),
        STATE,
        0,
        60,
        "Starts the machine; answered when its monitor does. The same launch_id again is the "
        "same launch, also after its end.",
    ),
    Op("dial", _BOOT, _NOTHING, 1, 5, "A stream to the machine's hybrid vsock; nothing is read."),
    Op("monitor", _BOOT, _NOTHING, 1, 5, "A stream to QMP. It serves one at a time."),
    Op(
        "watch",
        _BOOT,
        STATE,
        1,
        5,
        "A pipe with a byte for each change of state after this answer; it ends with the shim.",
    ),
    Op(
        "console",
        Struct((("id", ID), ("offset", Int(0, 1 << 53)))),
        Struct(
            (
                ("launch_id", Maybe(LAUNCH)),
                ("offset", Int(0, 1 << 53)),  # of the first byte: later than asked in a gap
                ("end", Int(0, 1 << 53)),  # of all there is
                ("data", Text(CONSOLE_BYTES * 4 // 3 + 4)),  # base64
            )
        ),
        0,
        5,
        "What the last launch wrote to its console, from an offset on: the first 64 KiB and the "
        "last 128 to 256 KiB are kept.",
    ),
    Op("kill", _BOOT, STATE, 0, 30, "Ends the machine and all with it; answered when it is gone."),
    Op(
        "list",
        Struct((("after", Maybe(ID)),)),
        Struct((("instances", Many(STATE, 64)), ("more", Bool()))),
        0,
        5,
        "Every instance of which anything is left, in the order of ids, from one on.",
    ),
    Op("release", _ONE, _NOTHING, 0, 60, "Removes all of the instance and verifies each absence."),
)
