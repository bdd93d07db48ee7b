"""The first line of a client, in any pieces, and the patience with silent ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.engine.vsock.hybrid import LINE_BYTES, Line, LineError, Porch, accepted


def say(pieces: list[bytes]) -> tuple[int | None, int]:
    """Port, and how many bytes were taken of all."""
    line = Line()
    taken = 0
    for piece in pieces:
        piece = piece[: line.wants()]
        count, port = line.feed(piece)
        taken += count
        if port is not None:
            return port, taken
        assert count == len(piece)
    return None, taken


@given(st.integers(0, 2**32 - 2), st.binary(max_size=20), st.lists(st.integers(1, 5)))
def test_a_line_in_any_pieces(port: int, behind: bytes, cuts: list[int]) -> None:
    text = b"CONNECT %d\n" % port
    whole = text + behind
    pieces = []
    for cut in [*cuts, *[1] * len(whole)]:
        pieces.append(whole[:cut])
        whole = whole[cut:]
    line = Line()
    left = b"".join(pieces)
    for piece in pieces:
        seen = piece[: line.wants()]
        count, found = line.feed(seen)
        left = left[count:]
        if found is not None:
            break
    else:
        raise AssertionError("never complete")
    assert found == port and left == behind


@given(st.lists(st.binary(min_size=1, max_size=LINE_BYTES), max_size=40))
def test_anything_else_is_refused_or_incomplete(pieces: list[bytes]) -> None:
    try:
        port, taken = say(pieces)
    except LineError:
        return
    text = b"".join(pieces)[:taken]
    assert (port is None and b"\n" not in text and taken < LINE_BYTES) or (
        text.startswith(b"CONNECT ") and text.endswith(b"\n") and int(text[8:]) == port
    )


@pytest.mark.parametrize(
    "text", [b"\n", b"CONNECT \n", b"CONNECT +5\n", b"CONNECT 5 \n", b"x" * 32]
)
def test_wrong_lines(text: bytes) -> None:
    with pytest.raises(LineError):
        Line().feed(text)


def test_the_answer() -> None:
    assert accepted(1 << 30) == b"OK 1073741824\n"


def test_the_silent_are_overdue_in_order_and_the_parked_never() -> None:
    porch: Porch[str] = Porch(10)
    for i, name in enumerate("abcd"):
        porch.came(name, i)
    porch.park("b", 5000)
    porch.left("c")
    assert porch.deadline() == 10 and len(porch) == 3
    assert porch.overdue(9.9) == []
    assert porch.overdue(10) == ["a"]
    assert porch.overdue(1000) == ["d"]
    assert porch.deadline() is None and porch.expired == 2
    assert porch.release() == [("b", 5000)] and porch.release() == []
    assert len(porch) == 0
