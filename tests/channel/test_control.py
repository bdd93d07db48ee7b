"""The host's half against the guest's, and against what is no guest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.channel import control
from agent_box.channel.control import Session, clock, refused
from agent_box.guest import control as guest
from agent_box.guest.wire import VERSION, FrameError, Kind, VersionError, encode, pack

DISK = {"state": "ok", "bytes": 1, "text": ""}
HELLO: dict[str, Any] = {"versions": [VERSION], "guest": "1", "boot": None, "disk": DISK}


def shaken() -> Session:
    session = Session()
    session.feed(pack(Kind.HELLO, 0, HELLO))
    session.greet()
    return session


def test_the_two_halves_understand_each_other() -> None:
    here, there = Session(), guest.Session({k: v for k, v in HELLO.items() if k != "versions"})
    assert here.feed(there.outgoing()) is None
    assert here.hello == control.Hello("1", None, "ok", "")
    there.feed(here.greet())
    for op in ("ping", "trim", "poweroff"):
        (action,) = there.feed(here.request(op, {}))
        assert action.op == op
        there.reply({"now_ns": 5})
        reply = here.feed(there.outgoing())
        assert reply is not None and refused(reply) is None and clock(reply) == 5
    there.feed(here.request("ping", {}))
    there.refuse("no")
    reply = here.feed(there.outgoing())
    assert reply is not None and refused(reply) == "no"


@pytest.mark.parametrize("versions", [[], [VERSION + 1], [0, 9]])
def test_another_version_is_one_clear_line(versions: list[int]) -> None:
    with pytest.raises(VersionError, match=f"and this host {VERSION}") as error:
        Session().feed(pack(Kind.HELLO, 0, {**HELLO, "versions": versions}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("versions", None), ("versions", [True]), ("versions", "1"), ("versions", [[1]]),
        ("guest", None), ("guest", 1), ("boot", -1), ("boot", True), ("boot", "1"),
        ("disk", None), ("disk", {}), ("disk", {"state": "fine", "text": ""}),
        ("timer", -1), ("timer", True), ("timer", 0.5), ("timer", "1000"),
        ("timer", (1 << 32) + 1), ("timer", 10**400),
        ("disk", {"state": "ok", "text": 1}), ("disk", {"state": ["ok"], "text": ""}),
    ],
)  # fmt: skip
def test_a_hello_of_another_shape_is_none(name: str, value: object) -> None:
    with pytest.raises(FrameError):
        Session().feed(pack(Kind.HELLO, 0, {**HELLO, name: value}))


def test_what_it_says_is_printable_and_short() -> None:
    session = Session()
    text = "\x1b[2J\u202eab\n\ud800" + "x" * 9000
    session.feed(pack(Kind.HELLO, 0, {**HELLO, "guest": text}))
    assert session.hello is not None
    assert session.hello.guest.startswith("?[2J?ab??")
    assert len(session.hello.guest) == control.TEXT_MAX


@pytest.mark.parametrize(
    "untrusted",
    [
        pack(Kind.REPLY, 0, {"ok": True}),  # before hello
        pack(Kind.HELLO, 1, HELLO),  # a number is skipped
        pack(Kind.HELLO, 0, HELLO) * 2,
        pack(Kind.HELLO, 0, HELLO) + pack(Kind.REPLY, 1, {"ok": True}),  # nothing was asked
        pack(Kind.HELLO, 0, HELLO) + pack(Kind.REQUEST, 1, {"op": "ping"}),
        pack(99, 0, HELLO),
        (control.FRAME_MAX + 1).to_bytes(4, "little"),
        bytes(4),
        encode(1, b"[" * 60_000),
        encode(1, b'{"seq":0,"x":' + b"9" * 6000 + b"}"),
    ],
)
def test_a_frame_out_of_turn_is_none(untrusted: bytes) -> None:
    with pytest.raises(FrameError):
        Session().feed(untrusted)


def test_a_reply_twice_or_with_an_old_number_is_none() -> None:
    session = shaken()
    session.request("ping", {})
    with pytest.raises(RuntimeError):
        session.request("ping", {})
    session.feed(pack(Kind.REPLY, 1, {"ok": True}))
    session.request("ping", {})
    with pytest.raises(FrameError, match="frame 2 was due"):
        session.feed(pack(Kind.REPLY, 1, {"ok": True}))


@pytest.mark.parametrize(
    "reply", [{}, {"ok": None}, {"ok": 1}, {"ok": False}, {"ok": False, "text": 1}]
)
def test_a_reply_without_an_outcome_is_none(reply: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        refused(reply)


@pytest.mark.parametrize("now", [None, True, -1, 1 << 63, 1.5, "1"])
def test_a_clock_of_another_shape_is_none(now: object) -> None:
    with pytest.raises(FrameError):
        clock({"now_ns": now})


@given(st.lists(st.binary(max_size=80), max_size=20))
def test_any_bytes_are_taken_or_end_it(pieces: list[bytes]) -> None:
    session = Session()
    try:
        for untrusted in pieces:
            session.feed(untrusted)
    except FrameError:
        pass


@given(st.binary(max_size=200))
def test_any_payload_of_a_hello_is_taken_or_ends_it(payload: bytes) -> None:
    session = Session()
    try:
        session.feed(encode(Kind.HELLO, payload))
    except FrameError:
        assert session.hello is None
