"""What other services may have written into the journal, by the core that writes it."""

from __future__ import annotations

import pytest
from support.registries import World, made

from agent_box.bus.errors import Reason, Refusal
from agent_box.registry import contract as api
from agent_box.registry.adapter import SAYS
from agent_box.registry.core import Core
from agent_box.registry.notes import NOTES_BURST


def note(**fields: object) -> api.Note:
    given: dict[str, object] = {
        "event_id": b"e" * 16,
        "instance": None,
        "source": "host-observed",
        "kind": "vmm-ended",
        "facts": {"status": 1},
    }
    return api.Note(**{**given, **fields})  # type: ignore[arg-type]


def test_a_note_is_written_under_the_role_that_said_it() -> None:
    world = World()
    core, id = made(world)
    (new,) = core.note("engine", note(instance=id), now_ms=1)
    assert (new.by, new.source, new.kind, new.instance, new.name) == (
        "engine", "host-observed", "vmm-ended", id, "web1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("caller", "fields", "reason"),
    [
        ("engine", {"source": "guest-channel"}, Reason.DENIED),
        ("engine", {"source": "agent-reported"}, Reason.DENIED),
        ("operator", {}, Reason.DENIED),
        ("store", {}, Reason.DENIED),
        ("engine", {"kind": "removed"}, Reason.BAD_REQUEST),
        ("engine", {"kind": "journal-cut"}, Reason.BAD_REQUEST),
        ("engine", {"kind": "run-ended"}, Reason.BAD_REQUEST),
        ("engine", {"event_id": b"short"}, Reason.BAD_REQUEST),
        ("engine", {"instance": "f" * 32}, Reason.NOT_FOUND),
        ("engine", {"facts": {"Bad key": 1}}, Reason.BAD_REQUEST),
        ("engine", {"facts": {"t": "x" * 3000}}, Reason.BAD_REQUEST),
    ],
)
def test_a_note_that_may_not_be(caller: str, fields: dict[str, object], reason: Reason) -> None:
    with pytest.raises(Refusal) as error:
        World().core().note(caller, note(**fields), now_ms=1)
    assert error.value.reason is reason


@pytest.mark.parametrize("source", ["host-observed", "guest-channel", "agent-reported"])
def test_the_channel_speaks_for_guests_and_agents(source: str) -> None:
    (new,) = World().core().note("channel", note(kind="run-ended", source=source), now_ms=1)
    assert new.source == source


def test_the_supervisor_says_one_thing_and_nobody_else_says_it() -> None:
    core = Core(SAYS)
    (new,) = core.note("supervisor", note(kind=api.SERVICE_FATAL), now_ms=1)
    assert (new.by, new.kind) == ("supervisor", "service-fatal")
    for kind in sorted(frozenset().union(*SAYS.values()) - {api.SERVICE_FATAL}):
        with pytest.raises(Refusal) as error:
            core.note("supervisor", note(kind=kind), now_ms=1)
        assert error.value.reason is Reason.BAD_REQUEST
    for caller in sorted({*SAYS} - {"supervisor"}):
        with pytest.raises(Refusal) as error:
            core.note(caller, note(kind=api.SERVICE_FATAL), now_ms=1)
        assert error.value.reason is Reason.BAD_REQUEST


def test_one_instance_cannot_fill_the_journal() -> None:
    core: Core = World().core()
    for _ in range(NOTES_BURST):
        core.note("engine", note(), now_ms=1_000)
    for _ in range(3):
        with pytest.raises(Refusal) as error:
            core.note("engine", note(), now_ms=1_000)
        assert error.value.reason is Reason.EXHAUSTED
    core.note("channel", note(kind="run-ended"), now_ms=1_000)  # others have their own
    told, new = core.note("engine", note(), now_ms=2_000)
    assert told.kind == "notes-dropped"
    assert told.facts == {"caller": "engine", "dropped": 3}
    assert new.kind == "vmm-ended"
    assert len(core.note("engine", note(), now_ms=2_000)) == 1
