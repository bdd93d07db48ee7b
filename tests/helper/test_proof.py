"""Only who holds the key gets in, and only to who holds it is anything said."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.helper import wire
from agent_box.helper.proof import EngineSide, HelperSide, mac, proves
from agent_box.helper.wire import WireError

KEY = bytes(range(32))


def sides(engine_key: bytes = KEY, helper_key: bytes = KEY) -> tuple[EngineSide, HelperSide]:
    return EngineSide(engine_key, os.urandom(32)), HelperSide(helper_key, os.urandom(32))


def test_both_with_the_key_agree() -> None:
    engine, helper = sides()
    engine.accept(helper.welcome(engine.proof(helper.hello())))


def test_an_engine_with_another_key_is_refused() -> None:
    engine, helper = sides(engine_key=bytes(32))
    with pytest.raises(WireError, match="wrong"):
        helper.welcome(engine.proof(helper.hello()))


def test_a_helper_with_another_key_is_refused() -> None:
    engine, _ = sides()
    _, other = sides(helper_key=bytes(32))
    proof = engine.proof(other.hello())
    with pytest.raises(WireError):
        other.welcome(proof)
    honest = HelperSide(KEY, os.urandom(32))
    with pytest.raises(WireError, match="helper's proof"):
        engine.accept(honest.welcome(EngineSide(KEY, os.urandom(32)).proof(honest.hello())))


def test_a_recorded_proof_serves_no_second_time() -> None:
    engine, helper = sides()
    recorded = engine.proof(helper.hello())
    helper.welcome(recorded)
    again = HelperSide(KEY, os.urandom(32))
    again.hello()
    with pytest.raises(WireError, match="wrong"):
        again.welcome(recorded)


def test_a_helper_cannot_be_made_to_prove_for_somebody() -> None:
    """Its own answer, sent back to it or to another one as an engine's."""
    helper, other = HelperSide(KEY, os.urandom(32)), HelperSide(KEY, os.urandom(32))
    challenge = wire.decode(helper.hello())["challenge"]  # type: ignore[index]
    for said in (mac(KEY, "helper", challenge, challenge), mac(KEY, "engine", challenge, "0" * 64)):
        with pytest.raises(WireError):
            helper.welcome(wire.encode({"v": 1, "challenge": challenge, "mac": said}))
        with pytest.raises(WireError):
            other.welcome(wire.encode({"v": 1, "challenge": challenge, "mac": said}))


def test_its_own_challenge_is_not_taken_back() -> None:
    helper = HelperSide(KEY, os.urandom(32))
    challenge = wire.decode(helper.hello())["challenge"]  # type: ignore[index]
    good = mac(KEY, "engine", challenge, challenge)
    with pytest.raises(WireError, match="came back"):
        helper.welcome(wire.encode({"v": 1, "challenge": challenge, "mac": good}))


@given(st.binary(max_size=400))
def test_noise_is_no_proof(data: bytes) -> None:
    engine, helper = sides()
    with pytest.raises(WireError):
        helper.welcome(data)
    with pytest.raises(WireError):
        engine.proof(data)
    with pytest.raises(WireError):
        engine.accept(data)


@given(st.text("0123456789abcdef", min_size=64, max_size=64))
def test_a_guessed_mac_is_none(guess: str) -> None:
    assert not proves(KEY, "engine", "a" * 64, "b" * 64, guess)
    assert proves(KEY, "engine", "a" * 64, "b" * 64, mac(KEY, "engine", "a" * 64, "b" * 64))
