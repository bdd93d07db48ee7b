"""The closed set of errors. Nothing else crosses a process border.

A service raises `Refusal(Reason.X, "one line")`. The bus carries the reason, the line and
a few named facts; a traceback never leaves the process that it happened in. What is not a
`Refusal` becomes `Reason.INTERNAL` with an id, under which the detail stands in the log
of the service.

Exit codes are those of docs/cli.md; the more specific reason has the more specific code.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class Code(StrEnum):
    """What a caller can do about it. Ten values, fixed for protocol version 1."""

    BAD_REQUEST = "bad_request"  # the caller's mistake; sending it again cannot help
    DENIED = "denied"  # the policy does not grant this method to this role
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"  # something of that name or id exists already
    PRECONDITION = "precondition"  # right request, wrong state
    EXHAUSTED = "exhausted"  # a limit or a full disk
    DEADLINE = "deadline"  # time ran out; a READ or IDEMPOTENT call may be sent again
    UNAVAILABLE = "unavailable"  # it was not sent, or not begun: nothing has happened
    UNKNOWN_OUTCOME = "unknown_outcome"  # it was sent and the reply is lost
    INTERNAL = "internal"  # a defect; only an id is told


class Meaning(NamedTuple):
    code: Code
    exit: int


class Reason(StrEnum):
    """Why, for a machine to read: the `kind` of the CLI's JSON errors."""

    BAD_REQUEST = "bad-request"
    DENIED = "denied"
    NOT_FOUND = "not-found"
    EXISTS = "exists"
    CONFLICT = "conflict"
    RUN_BUSY = "run-busy"
    WRONG_STATE = "wrong-state"
    STORE_LOCKED = "store-locked"
    TAMPERED = "tampered"
    CONFIG_INVALID = "config-invalid"
    EXHAUSTED = "exhausted"
    DISK_FULL = "disk-full"
    DISK_DAMAGED = "disk-damaged"
    DEADLINE = "deadline"
    UNAVAILABLE = "unavailable"
    UNKNOWN_OUTCOME = "unknown-outcome"
    CONNECTION_LOST = "connection-lost"
    ENGINE_UNAVAILABLE = "engine-unavailable"
    HELPER_UNAVAILABLE = "helper-unavailable"
    STATE_UNKNOWN = "state-unknown"
    BOOT_TIMEOUT = "boot-timeout"
    BOOT_FAILED = "boot-failed"
    INTERNAL = "internal"


MEANING: Final[dict[Reason, Meaning]] = {
    Reason.BAD_REQUEST: Meaning(Code.BAD_REQUEST, 64),
    Reason.DENIED: Meaning(Code.DENIED, 1),
    Reason.NOT_FOUND: Meaning(Code.NOT_FOUND, 3),
    Reason.EXISTS: Meaning(Code.CONFLICT, 5),
    Reason.CONFLICT: Meaning(Code.CONFLICT, 5),
    Reason.RUN_BUSY: Meaning(Code.CONFLICT, 22),
    Reason.WRONG_STATE: Meaning(Code.PRECONDITION, 4),
    Reason.STORE_LOCKED: Meaning(Code.PRECONDITION, 4),
    Reason.TAMPERED: Meaning(Code.PRECONDITION, 1),
    Reason.CONFIG_INVALID: Meaning(Code.PRECONDITION, 2),
    Reason.EXHAUSTED: Meaning(Code.EXHAUSTED, 1),
    Reason.DISK_FULL: Meaning(Code.EXHAUSTED, 1),
    Reason.DISK_DAMAGED: Meaning(Code.PRECONDITION, 1),
    Reason.DEADLINE: Meaning(Code.DEADLINE, 14),
    Reason.UNAVAILABLE: Meaning(Code.UNAVAILABLE, 14),
    Reason.UNKNOWN_OUTCOME: Meaning(Code.UNKNOWN_OUTCOME, 14),
    Reason.CONNECTION_LOST: Meaning(Code.UNKNOWN_OUTCOME, 14),
    Reason.ENGINE_UNAVAILABLE: Meaning(Code.UNAVAILABLE, 10),
    Reason.HELPER_UNAVAILABLE: Meaning(Code.UNAVAILABLE, 11),
    Reason.STATE_UNKNOWN: Meaning(Code.PRECONDITION, 12),
    Reason.BOOT_TIMEOUT: Meaning(Code.DEADLINE, 13),
    Reason.BOOT_FAILED: Meaning(Code.PRECONDITION, 1),
    Reason.INTERNAL: Meaning(Code.INTERNAL, 1),
}

MESSAGE_MAX: Final = 512  # characters; a message is one line for a person


class Refusal(Exception):
    """An answer that says no.

    Args:
        reason: one of the closed set.
        message: one line for a person, at most `MESSAGE_MAX` characters; it names the thing.
            Control characters are replaced, so no peer can forge lines or escape sequences.
        facts: short strings that a program may want, e.g. ``state="stopped"``.
        id: of the log record that holds the detail of a defect; only with `Reason.INTERNAL`.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        facts: dict[str, str] | None = None,
        id: str | None = None,
    ) -> None:
        printable = "".join(c if c.isprintable() else "?" for c in message)
        super().__init__(printable[:MESSAGE_MAX])
        self.reason = reason
        self.facts = facts or {}
        self.id = id

    @property
    def message(self) -> str:
        return str(self.args[0])

    @property
    def code(self) -> Code:
        return MEANING[self.reason].code

    @property
    def exit(self) -> int:
        """The CLI's exit code for this reason."""
        return MEANING[self.reason].exit
