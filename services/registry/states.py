"""The states of an instance: one table, from which everything else follows.

Pure data. What a verb may do, how a state changes, what the documents show: all is read from
`TRANSITIONS`, `ALLOWED` and `END`, and nothing is decided beside them. docs/states.md is
drawn from here (`python -m agent_box.registry.statespage`).

An instance has exactly one state. `unknown` is what is shown, and acted upon, while the
engine cannot say what is there; the record keeps the last state that was true.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class State(StrEnum):
    CREATING = "creating"
    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    DELETING = "deleting"
    UNKNOWN = "unknown"


MEANING: Final[dict[State, str]] = {
    State.CREATING: "The record is written, and the engine allocates the uid and the data disk.",
    State.STOPPED: "No VMM runs. The data disk holds everything.",
    State.STARTING: "The VMM runs. The handshake and provisioning are awaited.",
    State.RUNNING: "The guest answered the handshake and got its provisioning.",
    State.PAUSED: "The vCPUs are frozen. Guest RAM stays in host memory.",
    State.STOPPING: "The guest powers off, or the engine kills the VMM after the grace.",
    State.DELETING: "Every resource is removed, and each absence verified.",
    State.UNKNOWN: "The engine could not be asked. Nothing is assumed.",
}


class Cause(StrEnum):
    """Why a state changes: a verb, or something that happened."""

    CREATE = "create"
    START = "start"
    STOP = "stop"
    PAUSE = "pause"
    RESUME = "resume"
    DELETE = "delete"
    ALLOCATED = "disk and record ready"
    FAILED = "a failure"
    PROVISIONED = "handshake and provisioning done"
    BOOT_FAILED = "boot timeout or VMM failure"
    OFF = "guest off, or a kill after the grace"
    GONE = "the VMM, the helper or the host went away"
    ABSENT = "every absence verified"
    UNSEEN = "engine query failed"
    SEEN = "the next query succeeds"


class Transition(NamedTuple):
    """`before` None is "no record yet"; `after` None is "removed", and for `SEEN` the state
    that was observed."""

    before: State | None
    cause: Cause
    after: State | None
    note: str = ""


_S = State
# What the engine can be asked about: the others are the registry's own doing.
OBSERVABLE: Final = (_S.STOPPED, _S.STARTING, _S.RUNNING, _S.PAUSED, _S.STOPPING)
LIVE: Final = (_S.STARTING, _S.RUNNING, _S.PAUSED)  # a VMM runs, and a policy is in force

TRANSITIONS: Final[tuple[Transition, ...]] = (
    Transition(None, Cause.CREATE, _S.CREATING),
    Transition(_S.CREATING, Cause.ALLOCATED, _S.STOPPED),
    Transition(
        _S.CREATING,
        Cause.FAILED,
        _S.DELETING,
        "The partial resources are removed and verified absent.",
    ),
    Transition(_S.STOPPED, Cause.START, _S.STARTING, "Cold boot."),
    Transition(_S.STARTING, Cause.PROVISIONED, _S.RUNNING),
    Transition(_S.STARTING, Cause.BOOT_FAILED, _S.STOPPING, "Exit 13 for a timeout."),
    Transition(_S.STARTING, Cause.STOP, _S.STOPPING, "Cancels the boot."),
    Transition(_S.RUNNING, Cause.PAUSE, _S.PAUSED),
    Transition(_S.PAUSED, Cause.RESUME, _S.RUNNING, "The guest gets the host's time."),
    Transition(_S.RUNNING, Cause.STOP, _S.STOPPING, "Guest poweroff over port 5000."),
    Transition(
        _S.PAUSED,
        Cause.STOP,
        _S.STOPPING,
        "The engine resumes the guest first, then powers it off.",
    ),
    Transition(_S.UNKNOWN, Cause.STOP, _S.STOPPING, "A kill."),
    Transition(_S.STOPPING, Cause.OFF, _S.STOPPED),
    *(
        Transition(
            state,
            Cause.GONE,
            _S.STOPPED,
            "A pause does not survive this. The next start cold-boots."
            if state is _S.PAUSED
            else "",
        )
        for state in (_S.RUNNING, _S.PAUSED, _S.STARTING)
    ),
    Transition(_S.STOPPED, Cause.DELETE, _S.DELETING),
    Transition(_S.DELETING, Cause.ABSENT, None, "The record goes last."),
    *(Transition(state, Cause.UNSEEN, _S.UNKNOWN) for state in OBSERVABLE),
    Transition(_S.UNKNOWN, Cause.SEEN, None, "The observed state."),
)


class Verb(StrEnum):
    """The verbs that look at the state. `list`, `inspect` and `logs` work in every state."""

    START = "start"
    STOP = "stop"
    PAUSE = "pause"
    RESUME = "resume"
    DELETE = "delete"
    DELETE_FORCE = "delete --force"
    ATTACH = "attach"
    RUN = "run"
    EXEC = "exec"
    FORWARD = "forward"
    CAPTURE = "capture"
    POLICY_SHOW = "policy show"
    POLICY_SET = "policy set"
    POLICY_CHECK = "policy check"


_POLICY: Final = tuple(s for s in State if s not in (_S.CREATING, _S.DELETING))

ALLOWED: Final[dict[Verb, tuple[State, ...]]] = {
    Verb.START: (_S.STOPPED,),
    Verb.STOP: (_S.STARTING, _S.RUNNING, _S.PAUSED, _S.UNKNOWN),
    Verb.PAUSE: (_S.RUNNING,),
    Verb.RESUME: (_S.PAUSED,),
    Verb.DELETE: (_S.STOPPED,),
    Verb.DELETE_FORCE: (_S.STOPPED, _S.RUNNING, _S.PAUSED, _S.UNKNOWN),
    Verb.ATTACH: (_S.RUNNING,),
    Verb.RUN: (_S.RUNNING,),
    Verb.EXEC: (_S.RUNNING,),
    Verb.FORWARD: (_S.RUNNING,),
    Verb.CAPTURE: (_S.RUNNING,),
    Verb.POLICY_SHOW: _POLICY,
    Verb.POLICY_SET: _POLICY,
    Verb.POLICY_CHECK: _POLICY,
}

# A verb on an instance that is already in its end state does nothing and succeeds.
END: Final[dict[Verb, State]] = {
    Verb.START: _S.RUNNING,
    Verb.STOP: _S.STOPPED,
    Verb.PAUSE: _S.PAUSED,
    Verb.RESUME: _S.RUNNING,
}


class Answer(StrEnum):
    GO = "go"  # the state allows the verb
    ALREADY = "already"  # it is in the end state: do nothing and succeed
    REFUSED = "refused"  # exit 4, or 12 when the state is unknown


def ask(verb: Verb, state: State) -> Answer:
    """Whether the verb may be done in the state."""
    if END.get(verb) is state:
        return Answer.ALREADY
    return Answer.GO if state in ALLOWED[verb] else Answer.REFUSED


def needs(verb: Verb) -> str:
    """The states that allow the verb, for a refusal: ``running``, ``starting, running or``..."""
    words = [str(state) for state in ALLOWED[verb]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def move(before: State | None, cause: Cause, observed: State | None = None) -> State | None:
    """The state after `cause`.

    Args:
        before: None when there is no record yet.
        observed: with `Cause.SEEN`, what the engine saw.

    Returns:
        None when the instance is removed.

    Raises:
        ValueError: the table has no such transition: a defect of the caller.
    """
    for transition in TRANSITIONS:
        if (transition.before, transition.cause) == (before, cause):
            if cause is not Cause.SEEN:
                return transition.after
            if observed in OBSERVABLE:
                return observed
    raise ValueError(f"no transition from {before} by {cause} (observed {observed})")
