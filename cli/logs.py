"""The verb `logs`: the journal, printed, followed and verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from agent_box.cli import link
from agent_box.cli.render import Failure, Render, clean, time_text

if TYPE_CHECKING:
    from agent_box.bus.client import Client
    from agent_box.registry.contract import Entries, Entry

PAGE: Final = 1_000  # events asked for at once
WAIT_MS: Final = 20_000  # how long the registry may hold a question about new events
MARGIN_S: Final = 5.0  # on top of that, until the answer counts as lost
LOST_S: Final = 30.0  # so long a follower waits for the registry to come back


def logs(
    out: Render,
    *,
    name: str | None,
    follow: bool,
    since: int | None,
    tail: int | None,
    source: str | None,
    verify: bool,
    head: bool,
) -> None:
    """Events of one instance or of all; or the chain's check, or its head."""
    with link.service("registry", out) as registry:
        if verify:
            _verify(out, registry)
        elif head:
            _head(out, registry)
        elif follow:
            _follow(out, registry, name, since, tail, source)
        else:
            _print(out, registry, name, since, tail, source)


def _ask(
    registry: Client,
    name: str | None,
    since: int | None,
    source: str | None,
    *,
    after: int,
    tail: int | None = None,
    wait_ms: int = 0,
) -> Entries:
    from agent_box.registry.contract import Entries, Read

    request = Read(
        after=after,
        tail=tail,
        since_ms=since,
        source=source,  # type: ignore[arg-type]
        name=name,
        limit=PAGE,
        wait_ms=wait_ms,
    )
    reply = registry.call("logs", request, deadline_s=wait_ms / 1000 + MARGIN_S)
    assert isinstance(reply, Entries)
    return reply


def _print(
    out: Render,
    registry: Client,
    name: str | None,
    since: int | None,
    tail: int | None,
    source: str | None,
) -> None:
    """All that is there now. Text is printed as it comes; the object when it is whole."""
    events: list[dict[str, Any]] = []
    page = _ask(registry, name, since, source, after=0, tail=tail)
    first = page.first
    while page.events:
        if out.json:
            events += map(_event, page.events)
        else:
            out.text("".join(f"{_line(entry)}\n" for entry in page.events))
        page = _ask(registry, name, since, source, after=page.next)
    out.result({"first": first, "next": page.next, "events": events})


def _follow(
    out: Render,
    registry: Client,
    name: str | None,
    since: int | None,
    tail: int | None,
    source: str | None,
) -> None:
    """Goes on until it is interrupted. The cursor outlives the registry and our connection.

    Raises:
        Failure: exit 14; the registry did not come back within `LOST_S`.
    """
    import time

    from agent_box.bus.errors import Code, Refusal

    cursor, wait_ms = 0, 0
    heard = time.monotonic()
    while True:
        try:
            page = _ask(registry, name, since, source, after=cursor, tail=tail, wait_ms=wait_ms)
        except Refusal as refusal:
            if refusal.code not in (Code.UNAVAILABLE, Code.DEADLINE, Code.UNKNOWN_OUTCOME):
                raise
            if time.monotonic() - heard > LOST_S:
                raise Failure(
                    14, "connection-lost", f"the registry is gone: {refusal.message}"
                ) from None
            continue
        heard = time.monotonic()
        for entry in page.events:
            out.item("event", _event(entry), _line(entry))
        # From here on the cursor says where we are, and `tail` would skip what is new.
        cursor, tail, wait_ms = page.next, None, WAIT_MS


def _event(entry: Entry) -> dict[str, Any]:
    return {
        "seq": entry.seq,
        "time": time_text(entry.time_ms),
        "instance": entry.instance,
        "name": entry.name,
        "source": entry.source,
        "kind": entry.kind,
        "by": entry.by,
        "facts": entry.facts,
        "prev": entry.prev,
        "hash": entry.hash,
    }


def _line(entry: Entry) -> str:
    """One line, whatever stands in the facts. The hash of a record is for programs only."""
    words = [time_text(entry.time_ms), entry.source, entry.name or "-", entry.kind]
    words += [f"{key}={_fact(entry.facts[key])}" for key in sorted(entry.facts) if key != "record"]
    return clean(" ".join(words))


def _fact(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if value and value.isprintable() and not any(c in value for c in " \"'=\\"):
        return value
    from json import dumps

    return dumps(value, ensure_ascii=False)


def _verify(out: Render, registry: Client) -> None:
    from agent_box.bus.schema import Empty
    from agent_box.registry.contract import Verified

    found = registry.call("verify", Empty(), deadline_s=300)
    assert isinstance(found, Verified)
    facts: dict[str, Any] = {
        "first": found.first,
        "last": found.last,
        "head": found.head,
        "bad_seq": found.bad_seq,
        "problem": found.problem,
        "records": [{"name": p.name, "problem": p.problem} for p in found.records],
    }
    if found.ok:
        text = f"events {found.first} to {found.last} verified, head {found.head}"
        out.result({"verified": True, **facts}, text)
        return
    problems = [p for p in (found.problem, *(f"{r.name}: {r.problem}" for r in found.records)) if p]
    raise Failure(1, "tampered", f"the journal does not verify: {'; '.join(problems)}", **facts)


def _head(out: Render, registry: Client) -> None:
    from agent_box.bus.schema import Empty
    from agent_box.registry.contract import Head

    head = registry.call("head", Empty())
    assert isinstance(head, Head)
    time = time_text(head.time_ms)
    out.result({"seq": head.seq, "hash": head.hash, "time": time}, f"{head.seq} {head.hash} {time}")
