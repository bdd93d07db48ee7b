"""Draws docs/states.md from the table of states.

`python -m agent_box.registry.statespage` prints it. The
document is checked in so that it can be read without running anything; a test compares it
with what this prints.
"""

from __future__ import annotations

from agent_box.registry.states import (
    ALLOWED,
    END,
    MEANING,
    OBSERVABLE,
    TRANSITIONS,
    Cause,
    State,
    Transition,
)

_HEAD = """\
# The states of an instance

Drawn from the table in `services/registry/states.py` by
`python -m agent_box.registry.statespage > docs/states.md`; a test fails when they differ.

An instance has exactly one state. While the engine cannot be asked, `unknown` is shown and
acted upon; the record keeps the last state that was true.
"""


def document() -> str:
    """The whole page, ending with a line feed."""
    parts = [
        _HEAD,
        _table(("State", "Meaning"), [(f"`{s}`", MEANING[s]) for s in State]),
        "## How it changes\n",
        diagram(),
        _table(("From", "Verb or event", "To", "Note"), [_row(t) for t in TRANSITIONS]),
        "## What each state allows\n\n`list`, `inspect` and `logs` work in every state. A verb "
        "in a state that does not allow it\nexits 4, and 12 where the state is `unknown`.\n",
        _table(
            ("Verb", "Allowed in", "Already done in"),
            [
                (f"`{verb}`", ", ".join(states), str(END[verb]) if verb in END else "")
                for verb, states in ALLOWED.items()
            ],
        ),
        "A verb on an instance that is already in its end state does nothing and succeeds.\n",
    ]
    return "\n".join(parts)


def diagram() -> str:
    """The transitions as a Mermaid state diagram in a code fence, ending with a line feed."""
    lines = ["```mermaid", "stateDiagram-v2"]
    for transition in TRANSITIONS:
        if transition.cause is Cause.SEEN:
            lines += [f"    unknown --> {state}: {transition.cause}" for state in OBSERVABLE]
            continue
        before = "[*]" if transition.before is None else str(transition.before)
        after = "[*]" if transition.after is None else str(transition.after)
        lines.append(f"    {before} --> {after}: {transition.cause}")
    return "\n".join([*lines, "```", ""])


def _row(transition: Transition) -> tuple[str, str, str, str]:
    if transition.cause is Cause.SEEN:
        after = "the observed state"
    else:
        after = str(transition.after or "removed")
    return (str(transition.before or "none"), str(transition.cause), after, transition.note)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(document(), end="")
