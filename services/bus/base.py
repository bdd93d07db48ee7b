"""What every service answers, whatever else it does.

`ping` is answered by the main loop and by nothing else, because a process that is alive and
connected may still be stuck; `hello` says who answers and whether it is ready, which for a
supervisor is more than "running".
"""

from __future__ import annotations

from typing import Final

from agent_box.bus.schema import Data, Empty, Kind, Method, Wire


class Hello(Wire, frozen=True):
    service: str
    version: str
    epoch: bytes  # 16 bytes, random at each start
    ready: bool
    pid: int  # as the process sees itself, in its own namespace
    started_ms: int  # Unix time, milliseconds
    problem: str | None  # why it is not ready, or works only in part


class Ask(Wire, frozen=True):
    request_id: bytes  # of a `Kind.ONCE` call that the asking role made


class Outcome(Wire, frozen=True):
    """What became of a `Kind.ONCE` call.

    `state` is one of
    - "done": `reply` is the packed reply;
    - "refused": `problem` is the packed `wire.Problem`;
    - "absent": it was never begun here and has had no effect; it may be sent again;
    - "unknown": it was begun and this service cannot say how it ended.
    """

    state: str
    reply: bytes | None
    problem: bytes | None


class Confinement(Wire, frozen=True):
    """What a process reads of itself, to be held against what its contract declares."""

    uid: int
    gid: int
    no_new_privs: bool
    seccomp_mode: int  # 0 none, 1 strict, 2 filter
    seccomp_filters: int
    capabilities_effective: str  # hexadecimal, as in /proc/self/status
    dumpable: bool
    landlock_abi: int  # 0: the kernel has none
    landlock_enforced: bool
    limits: dict[str, int]  # soft limits by name, -1 for none
    mounts: list[str]  # "path mode", e.g. "/usr ro"
    interfaces: list[str]
    namespaces: dict[str, str]  # e.g. "net": "net:[4026531840]"


METHODS: Final = (
    Method(
        name="hello", kind=Kind.READ, request=Empty, reply=Hello, deadline_s=10,
        data=Data.STATUS, summary="Who answers, and whether it is ready.",
    ),
    Method(
        name="ping", kind=Kind.READ, request=Empty, reply=Empty, deadline_s=10,
        data=Data.STATUS, summary="Answered by the main loop, so an answer means it turns.",
    ),
    Method(
        name="drain", kind=Kind.IDEMPOTENT, request=Empty, reply=Empty, deadline_s=10,
        data=Data.STATUS, summary="Finish what is begun, take nothing new, then exit.",
    ),
    Method(
        name="outcome", kind=Kind.READ, request=Ask, reply=Outcome, deadline_s=300,
        data=Data.RECORD, summary="What became of a call of the asking role.",
    ),
    Method(
        name="confinement", kind=Kind.READ, request=Empty, reply=Confinement, deadline_s=10,
        data=Data.STATUS, summary="The walls as the process sees them from inside.",
    ),
)  # fmt: skip
