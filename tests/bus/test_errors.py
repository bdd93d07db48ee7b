from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.bus.errors import MEANING, MESSAGE_MAX, Code, Reason, Refusal


def test_every_reason_has_a_meaning_and_every_code_a_reason() -> None:
    assert set(MEANING) == set(Reason)
    assert {m.code for m in MEANING.values()} == set(Code)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (Code.BAD_REQUEST, 64),
        (Code.DENIED, 1),
        (Code.NOT_FOUND, 3),
        (Code.CONFLICT, 5),
        (Code.PRECONDITION, 4),
        (Code.EXHAUSTED, 1),
        (Code.DEADLINE, 14),
        (Code.UNAVAILABLE, 14),
        (Code.UNKNOWN_OUTCOME, 14),
        (Code.INTERNAL, 1),
    ],
)
def test_each_code_has_its_exit_code(code: Code, exit_code: int) -> None:
    assert (
        MEANING[Reason(code.replace("_", "-"))] == (code, exit_code)
        if code
        not in (
            Code.CONFLICT,
            Code.PRECONDITION,
        )
        else (code, exit_code) in MEANING.values()
    )


@given(st.text())
def test_a_message_is_one_printable_line(text: str) -> None:
    message = Refusal(Reason.DENIED, text).message
    assert len(message) <= MESSAGE_MAX
    assert all(c.isprintable() for c in message)


def test_a_message_cannot_forge_lines_or_escapes() -> None:
    assert Refusal(Reason.DENIED, "a\nb\x1b[31m\u202e").message == "a?b?[31m?"
