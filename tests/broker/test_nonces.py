"""Nonces: the same for the same boot, others for all else, and in a form that clients take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.broker import nonces

KEY = bytes(range(32))


def test_a_nonce_stays_what_it_is() -> None:
    """A broker of a later version must make the same, or a running guest is cut off."""
    made = nonces.make(KEY, "0" * 32, "anthropic", 3)
    assert made == "sk-agentbox-" + made[12:]
    assert made == nonces.make(KEY, "0" * 32, "anthropic", 3)
    assert made == KNOWN


KNOWN = "sk-agentbox-edw3xvebwnrrzaezskxib6ur2sqxdyfjjsc7ecfq3htzybhcir2a"

parts = st.tuples(st.text(max_size=6), st.text(max_size=6), st.integers(0, 30))


@given(a=parts, b=parts)
def test_two_are_equal_only_when_all_is(a: tuple[str, str, int], b: tuple[str, str, int]) -> None:
    """Also where the parts written one after the other would be the same text."""
    assert (nonces.make(KEY, *a) == nonces.make(KEY, *b)) == (a == b)


def test_another_key_makes_others() -> None:
    assert nonces.make(KEY, "i", "b", 1) != nonces.make(bytes(32), "i", "b", 1)


@given(a=parts)
def test_the_form(a: tuple[str, str, int]) -> None:
    made = nonces.make(KEY, *a).encode()
    assert nonces.PATTERN.fullmatch(made)
    assert nonces.same(made, made.decode())
    assert not nonces.same(made[:-1], made.decode())
    assert not nonces.same(made.upper(), made.decode())
    assert not nonces.same(b"", made.decode())


def test_what_is_no_key_or_boot() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        nonces.make(b"short", "i", "b", 1)
    with pytest.raises(ValueError, match="negative"):
        nonces.make(KEY, "i", "b", -1)
