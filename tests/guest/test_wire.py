"""Frames: what is cut right, and what ends a stream."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.guest import wire
from agent_box.guest.wire import Decoder, FrameError, Kind, encode, pack, unpack


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=8), st.data())
def test_frames_survive_any_cutting(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    whole = b"".join(encode(kind, payload) for kind, payload in frames)
    decoder, seen, at = Decoder(), [], 0
    while at < len(whole):
        step = data.draw(st.integers(1, len(whole) - at))
        seen += decoder.feed(whole[at : at + step])
        at += step
    assert seen == frames
    assert decoder.empty


@given(st.binary(max_size=2000))
def test_any_bytes_give_frames_or_a_frame_error(untrusted: bytes) -> None:
    decoder = Decoder(cap=500)
    taken = 0
    try:
        for kind, payload in decoder.feed(untrusted):
            assert untrusted[taken:].startswith(encode(kind, payload))
            taken += 5 + len(payload)
    except FrameError:
        length = int.from_bytes(untrusted[taken : taken + 4], "little")
        assert length == 0 or length > 500
    else:
        assert decoder.empty == (taken == len(untrusted))


@pytest.mark.parametrize("length", [0, wire.CONTROL_MAX + 1, 0xFFFFFFFF])
def test_a_bad_length_is_refused_before_its_bytes_come(length: int) -> None:
    with pytest.raises(FrameError, match=str(length)):
        list(Decoder().feed(length.to_bytes(4, "little")))


def test_a_frame_that_nobody_would_take_is_not_made() -> None:
    with pytest.raises(FrameError):
        encode(1, bytes(wire.CONTROL_MAX))


@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda key: key != "seq"),
        st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=20)),
        max_size=5,
    ),
    st.integers(0, 2**40),
)
def test_what_is_packed_comes_out(fields: dict[str, object], seq: int) -> None:
    ((kind, payload),) = Decoder().feed(pack(Kind.REQUEST, seq, fields))
    assert (kind, unpack(payload, seq)) == (Kind.REQUEST, fields)


@pytest.mark.parametrize(
    "untrusted",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"seq":1}',
        b'{"seq":0,"seq":0}',
        b'{"seq":0,"a":{"b":1,"b":2}}',
        b'{"seq":0,"a":NaN}',
        b'{"seq":0,"a":-Infinity}',
        b'{"seq":true}',
        b'{"seq":0.0}',
        b'{"seq":"0"}',
        b'{"seq":0}{}',
        b"\xff\xfe",
        b'{"seq":0,"a":' + b"[" * 9 + b"]" * 9 + b"}",
        b'{"seq":0,"a":' + b"[" * 50_000,
    ],
)
def test_a_control_frame_is_strict(untrusted: bytes) -> None:
    with pytest.raises(FrameError):
        unpack(untrusted, 0)


def test_sequence_numbers_neither_skip_nor_repeat() -> None:
    body = json.dumps({"seq": 5}).encode()
    assert unpack(body, 5) == {}
    for due in (4, 6):
        with pytest.raises(FrameError, match=f"frame {due} was due"):
            unpack(body, due)
