"""The verbs that change whether an instance runs: start, stop, pause, resume and delete.

The registry puts what is wanted on record and answers; from then on it is done whether or not
anybody waits. We wait, and ask how far it is: of this registry, or of the next one when it is
started again meanwhile.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from agent_box.cli import link
from agent_box.cli.render import Failure, Render

if TYPE_CHECKING:
    from agent_box.bus.client import Client
    from agent_box.bus.schema import Wire
    from agent_box.registry.contract import Progress

SLOW_S: Final = 1.0  # what takes longer is told
WAIT_MS: Final = 20_000  # how long the registry may hold a question
MARGIN_S: Final = 5.0  # on top of that, until the answer counts as lost
STUCK_S: Final = 45.0  # so long we wait while nothing goes on


def start(out: Render, *, name: str, no_hook: bool) -> None:
    """Boots it; returns when the guest shook hands and is provisioned."""
    from agent_box.registry.contract import Start

    _carry_out(out, "start", name, Start(name=name, no_hook=no_hook))


def stop(out: Render, *, name: str, grace: int | None) -> None:
    """Powers the guest off, and kills it when the grace passes."""
    from agent_box.registry.contract import Stop

    grace_ms = None if grace is None else grace * 1000
    _carry_out(out, "stop", name, Stop(name=name, grace_ms=grace_ms))


def pause(out: Render, *, name: str) -> None:
    """Freezes the vCPUs."""
    from agent_box.registry.contract import Name

    _carry_out(out, "pause", name, Name(name=name))


def resume(out: Render, *, name: str) -> None:
    """Lets the vCPUs run again."""
    from agent_box.registry.contract import Name

    _carry_out(out, "resume", name, Name(name=name))


def delete(out: Render, *, name: str, force: bool) -> None:
    """Removes it and verifies each absence."""
    from agent_box.registry.contract import Delete

    _carry_out(out, "delete", name, Delete(name=name, force=force))


def remove(out: Render, name: str) -> None:
    """As ``delete --force``, without an answer of its own.

    Raises:
        Failure, Refusal: it is not gone.
    """
    from agent_box.registry.contract import Delete

    _done(out, "delete", name, Delete(name=name, force=True))


def bring_up(out: Render, name: str, *, within_s: float | None) -> None:
    """As ``start``, without an answer of its own, and for no longer than that.

    Raises:
        Failure, Refusal: it is not running. After the time it goes on starting.
    """
    from agent_box.registry.contract import Start

    _done(out, "start", name, Start(name=name, no_hook=False), within_s=within_s)


# ------------------------------------------------------------------------------ below


def _carry_out(out: Render, verb: str, name: str, request: Wire) -> None:
    begun = time.monotonic()
    ended = _done(out, verb, name, request)
    took_ms = round((time.monotonic() - begun) * 1000)
    if ended.row is None:
        result = {"name": name, "id": ended.id, "state": None, "took_ms": took_ms}
        out.result(result, f"{name} is deleted, and nothing of it is left")
        return
    row = ended.row
    result = {"name": name, "id": ended.id, "state": row.state, "took_ms": took_ms}
    out.result(result, f"{name} is {row.state}")


def _done(
    out: Render, verb: str, name: str, request: Wire, *, within_s: float | None = None
) -> Progress:
    """Asks for it and waits for its end. Raises Failure, Refusal."""
    from agent_box.registry.contract import Progress

    registry, _ = link.ready(link.place(), "registry", out)
    try:
        accepted = registry.call(verb, request)
        assert isinstance(accepted, Progress)
        registry, ended = _follow(out, registry, accepted, within_s)
    finally:
        registry.close()
    if ended.intent != accepted.intent and ended.row is not None:
        raise Failure(
            4,
            "wrong-state",
            f"{name}: another verb came meanwhile, and it is {ended.row.state} now",
            state=ended.row.state,
        )
    if ended.row is None and verb != "delete":
        raise Failure(3, "not-found", f"{name} was deleted meanwhile")
    if ended.failed is not None:
        raise _refusal(name, ended, "")
    return ended


def _follow(
    out: Render, registry: Client, now: Progress, within_s: float | None
) -> tuple[Client, Progress]:
    """Waits until nothing is left to do, and tells what takes long.

    Returns:
        The connection, which may be another one by then, and how it ended.
    """
    from agent_box.bus.errors import Code, Refusal
    from agent_box.registry.contract import Follow, Progress

    accepted, begun, told = now, time.monotonic(), ""
    moved = begun
    while now.doing is not None and now.intent == accepted.intent:
        slow = time.monotonic() - begun >= SLOW_S
        if slow and now.phase and now.phase != told:
            told = now.phase
            out.progress(f"{now.name}: {told} ...")
        if within_s is not None and time.monotonic() - begun > within_s:
            why = f"{now.name} is not there after {within_s:.0f} s: {now.phase}"
            raise Failure(13, "boot-timeout", why)
        if now.failed is None:
            moved = time.monotonic()
        elif time.monotonic() - moved > STUCK_S:
            raise _refusal(now.name, now, "; it is on record, and is tried again")
        quick = told != now.phase or now.failed is not None or within_s is not None
        wait_ms = int(SLOW_S * 1000) if quick else WAIT_MS
        ask = Follow(
            id=now.id,
            name=now.name,
            intent=now.intent,
            doing=now.doing,
            phase=now.phase,
            wait_ms=wait_ms,
        )
        try:
            answer = registry.call("follow", ask, deadline_s=wait_ms / 1000 + MARGIN_S)
        except Refusal as refusal:
            if refusal.code not in (Code.UNAVAILABLE, Code.DEADLINE, Code.UNKNOWN_OUTCOME):
                raise
            registry.close()
            registry, _ = link.ready(link.place(), "registry", out)
            continue
        assert isinstance(answer, Progress)
        now = answer
    return registry, now


def _refusal(name: str, ended: Progress, more: str) -> Exception:
    from agent_box.bus.errors import Reason, Refusal

    assert ended.failed is not None
    failed = ended.failed
    message = failed.message if name in failed.message else f"{name}: {failed.message}"
    state = {} if ended.row is None else {"state": ended.row.state}
    return Refusal(Reason(failed.reason), f"{message}{more}", facts={**state, **failed.facts})
