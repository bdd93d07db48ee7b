"""The table of states against the rules of docs/cli.md, and the document drawn from it."""

from __future__ import annotations

import pytest
from support.source import ROOT

from agent_box.registry import statespage
from agent_box.registry.states import (
    ALLOWED,
    END,
    LIVE,
    MEANING,
    OBSERVABLE,
    TRANSITIONS,
    Answer,
    Cause,
    State,
    Verb,
    ask,
    move,
    needs,
)

# What each verb of docs/cli.md needs, written down a second time and in another form.
RULES = {
    "start": "stopped",
    "stop": "starting running paused unknown",
    "pause": "running",
    "resume": "paused",
    "delete": "stopped",
    "delete --force": "stopped running paused unknown",
    "attach": "running",
    "run": "running",
    "forward": "running",
    "policy show": "stopped starting running paused stopping unknown",
    "policy set": "stopped starting running paused stopping unknown",
}
STEPS = """
creating > disk and record ready > stopped
creating > a failure > deleting
stopped > start > starting
starting > handshake and provisioning done > running
starting > boot timeout or VMM failure > stopping
starting > stop > stopping
running > pause > paused
paused > resume > running
running > stop > stopping
paused > stop > stopping
stopping > guest off, or a kill after the grace > stopped
running > the VMM, the helper or the host went away > stopped
paused > the VMM, the helper or the host went away > stopped
starting > the VMM, the helper or the host went away > stopped
stopped > delete > deleting
running > engine query failed > unknown
"""


@pytest.mark.parametrize(("verb", "states"), RULES.items())
def test_what_each_state_allows_is_what_the_rules_say(verb: str, states: str) -> None:
    assert {str(s) for s in ALLOWED[Verb(verb)]} == set(states.split())


@pytest.mark.parametrize("line", STEPS.strip().splitlines())
def test_the_transitions_of_the_rules_are_there(line: str) -> None:
    before, cause, after = line.split(" > ")
    assert move(State(before), Cause(cause)) is State(after)


def test_an_instance_comes_and_goes() -> None:
    assert move(None, Cause.CREATE) is State.CREATING
    assert move(State.DELETING, Cause.ABSENT) is None


@pytest.mark.parametrize("seen", OBSERVABLE)
def test_unknown_becomes_what_is_seen(seen: State) -> None:
    assert move(State.UNKNOWN, Cause.SEEN, seen) is seen
    assert move(seen, Cause.UNSEEN) is State.UNKNOWN


@pytest.mark.parametrize(
    ("before", "cause", "seen"),
    [
        (State.PAUSED, Cause.PAUSE, None),
        (State.STOPPED, Cause.STOP, None),
        (State.UNKNOWN, Cause.START, None),
        (State.UNKNOWN, Cause.SEEN, None),
        (State.UNKNOWN, Cause.SEEN, State.UNKNOWN),
        (State.UNKNOWN, Cause.SEEN, State.CREATING),
        (None, Cause.START, None),
    ],
)
def test_no_other_way_leads_anywhere(
    before: State | None, cause: Cause, seen: State | None
) -> None:
    with pytest.raises(ValueError, match="no transition"):
        move(before, cause, seen)


def test_a_cause_leads_to_one_place() -> None:
    pairs = [(t.before, t.cause) for t in TRANSITIONS]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("state", State)
def test_each_verb_has_an_answer_in_each_state(verb: Verb, state: State) -> None:
    answer = ask(verb, state)
    if END.get(verb) is state:
        assert answer is Answer.ALREADY
    else:
        assert (answer is Answer.GO) == (state in ALLOWED[verb])
    assert state not in ALLOWED[verb] or END.get(verb) is not state


@pytest.mark.parametrize(("verb", "end"), END.items())
def test_already_there_is_a_success(verb: Verb, end: State) -> None:
    assert ask(verb, end) is Answer.ALREADY


def test_a_verb_that_moves_has_its_transition_wherever_it_is_allowed() -> None:
    moving = {Verb.START, Verb.STOP, Verb.PAUSE, Verb.RESUME, Verb.DELETE}
    for verb in moving:
        for state in ALLOWED[verb]:
            assert move(state, Cause(verb.value)) is not None


def test_every_state_can_be_reached_and_left() -> None:
    reached = {t.after for t in TRANSITIONS} | set(OBSERVABLE)
    assert reached >= set(State)
    assert {t.before for t in TRANSITIONS} >= set(State)
    assert set(LIVE) < set(OBSERVABLE)
    assert set(MEANING) == set(State)


def test_needs_reads_well() -> None:
    assert needs(Verb.PAUSE) == "running"
    assert needs(Verb.STOP) == "starting, running, paused or unknown"


def test_the_document_is_drawn_from_the_table() -> None:
    assert (ROOT / "docs" / "states.md").read_text() == statespage.document(), (
        "run: python -m agent_box.registry.statespage > docs/states.md"
    )


def test_the_drawing_shows_every_transition() -> None:
    diagram = statespage.diagram()
    for transition in TRANSITIONS:
        assert f": {transition.cause}" in diagram
    assert all(f" {state}" in diagram for state in State)
