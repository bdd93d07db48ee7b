"""The detach keys, in every encoding and cut everywhere."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from agent_box.cli.detach import Detach

CTRL_P = (
    b"\x10",
    b"\x1b[112;5u",
    b"\x1b[112;69u",  # Caps Lock
    b"\x1b[112;133u",  # Num Lock
    b"\x1b[112;197u",
    b"\x1b[112:80;5u",  # with the shifted key
    b"\x1b[112;5:1u",  # with the event
    b"\x1b[112;5:2u",
    b"\x1b[112::112;5u",
    b"\x1b[27;5;112~",
    b"\x1b[27;5;80~",
)
CTRL_Q = (b"\x11", b"\x1b[113;5u", b"\x1b[113;69u", b"\x1b[113;133:1u", b"\x1b[27;5;113~")
OTHERS = (
    b"p",
    b"\x1b[112u",
    b"\x1b[112;3u",  # Alt
    b"\x1b[112;7u",  # Ctrl and Alt
    b"\x1b[27;3;112~",
    b"\x1b[A",
    b"\x1b[1;5P",
    b"\x1bOP",
    b"\xc3\xa9",
)


def typed(keys: Detach, pieces: Iterable[bytes]) -> tuple[bytes, bool]:
    out = b""
    for piece in pieces:
        passed, done = keys.feed(piece)
        out += passed
        if done:
            return out, True
    return out, False


def detach() -> Detach:
    return Detach((0x10, 0x11))


@pytest.mark.parametrize("one", CTRL_P)
@pytest.mark.parametrize("two", CTRL_Q)
def test_every_encoding_cut_at_every_byte(one: bytes, two: bytes) -> None:
    data = b"ls\r" + one + two
    assert typed(detach(), [data]) == (b"ls\r", True)
    assert typed(detach(), [data[i : i + 1] for i in range(len(data))]) == (b"ls\r", True)
    for cut in range(len(data)):
        assert typed(detach(), [data[:cut], data[cut:]]) == (b"ls\r", True)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("one", CTRL_P)
def test_another_key_gets_all_passed_on(one: bytes, other: bytes) -> None:
    for data in (one + other, other + one + other, one + other + b"\x11"):
        assert typed(detach(), [data]) == (data, False)
        for cut in range(len(data)):
            assert typed(detach(), [data[:cut], data[cut:]]) == (data, False)


def test_the_prefix_twice_and_then_the_end() -> None:
    assert typed(detach(), [b"\x10\x10\x11"]) == (b"\x10", True)
    keys = Detach(b"aab")
    assert typed(keys, [b"aaab"]) == (b"a", True)


def test_after_the_hold_the_prefix_is_passed_on_and_the_rest_still_counts() -> None:
    keys = detach()
    assert keys.feed(b"x\x10") == (b"x", False)
    assert keys.holds
    assert keys.pass_on() == (b"\x10", False)
    assert not keys.holds and keys.armed
    assert keys.feed(b"\x11") == (b"", True)


def test_disarmed_it_begins_anew() -> None:
    keys = detach()
    keys.feed(b"\x10")
    keys.pass_on()
    keys.disarm()
    assert not keys.armed
    assert keys.feed(b"\x11") == (b"\x11", False)


def test_what_was_passed_on_is_not_passed_on_twice() -> None:
    keys = detach()
    keys.feed(b"\x10")
    assert keys.pass_on() == (b"\x10", False)
    assert keys.feed(b"x") == (b"x", False)
    assert keys.feed(b"\x10") == (b"", False)
    assert keys.feed(b"y") == (b"\x10y", False)


def test_a_lone_escape_is_passed_on() -> None:
    keys = detach()
    assert keys.feed(b"\x1b") == (b"", False)
    assert keys.pass_on() == (b"\x1b", False)
    assert keys.feed(b"\x1b[") == (b"", False)
    assert keys.pass_on() == (b"\x1b[", False)
    assert keys.feed(b"A") == (b"A", False)


def test_keys_that_go_up_and_modifiers_are_no_keys() -> None:
    """With all events asked for, Control itself and every release are told as well."""
    control, let_go = b"\x1b[57442;5u", b"\x1b[112;5:3u"
    data = control + b"\x1b[112;5:1u" + let_go + b"\x1b[113;5:1u"
    assert typed(detach(), [data]) == (control, True)
    assert typed(detach(), [b"\x10" + control + b"z"]) == (b"\x10" + control + b"z", False)


def test_within_a_paste_nothing_is_a_key() -> None:
    paste = b"\x1b[200~" + b"\x10\x11" * 3 + b"\x1b[20" + b"\x1b[201~"
    for size in (1, 2, 3, 1000):
        keys = detach()
        pieces = [paste[i : i + size] for i in range(0, len(paste), size)]
        out = b""
        for piece in pieces:
            passed, done = keys.feed(piece)
            out += passed
            assert not done
        assert out == paste
        assert keys.feed(b"\x10\x11") == (b"", True)


@pytest.mark.parametrize("key", range(0x20))
def test_every_control_byte_alone_passes(key: int) -> None:
    keys = detach()
    out, done = keys.feed(bytes((key,)))
    more, done_later = keys.pass_on()
    assert out + more == bytes((key,)) and not (done or done_later)


@pytest.mark.parametrize("key", range(0x20))
def test_every_control_byte_can_be_the_key(key: int) -> None:
    keys = Detach((key, ord("d")))
    first, _ = keys.feed(bytes((key,)))
    if key == 0x1B:
        assert keys.pass_on() == (b"\x1b", False)
    assert first == b""
    assert keys.feed(b"d")[1]


def test_a_key_that_no_terminal_ends_is_passed_on() -> None:
    keys = detach()
    data = b"\x1b[" + b"1;" * 200
    assert typed(keys, [data])[0] + keys.pass_on()[0] == data


def test_no_sequence_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one key"):
        Detach(())


def test_noise_arrives_whole_or_detaches() -> None:
    """Whatever comes in whatever pieces, it is all there unless the keys were among it."""
    dice = random.Random(4)
    parts = (*CTRL_P[:3], b"\x1b", b"[", b"x", *OTHERS[:4], b"\x1b[200~\x1b[201~")
    for _ in range(3_000):
        data = b"".join(dice.choices(parts, k=dice.randint(1, 12)))
        keys, out, at = detach(), b"", 0
        while at < len(data):
            size = dice.randint(1, 5)
            passed, done = keys.feed(data[at : at + size])
            out += passed
            at += size
            assert not done  # no ctrl-q is among them
            if dice.random() < 0.3:
                out += keys.pass_on()[0]
        out += keys.pass_on()[0]
        assert out == data
