"""Heads that parsers read in two ways are refused; the others h11 reads as we do."""

from __future__ import annotations

import json
from pathlib import Path

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import brokering as b

from agent_box.broker import head as heads
from agent_box.broker.head import Framing, Head, agrees, end, hopeless, parse
from agent_box.broker.refusal import Reason, Refuse, body

CORPUS = json.loads((Path(__file__).parent / "corpus" / "requests.json").read_text())


def by_h11(raw: bytes) -> h11.Request | None:
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    server.receive_data(raw)
    try:
        event = server.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request) else None


def alike(read: Head, raw: bytes) -> None:
    """h11 refuses what has not one Host; here the gate does."""
    event = by_h11(raw)
    if event is None:
        assert len(read.get(b"host")) != 1
    else:
        assert agrees(read, event)


def at(case: dict[str, str]) -> bytes:
    return case["bytes"].encode("latin-1")


@pytest.mark.parametrize("case", CORPUS["refused"], ids=lambda case: str(case["name"]))
def test_ambiguous_is_refused(case: dict[str, str]) -> None:
    raw = at(case)
    length = end(raw)
    if length is None:  # a head without an end: refused at once, or when time is up
        assert hopeless(raw) is not None or case["why"] == "never-ends"
        return
    refused = parse(raw[:length], 1)
    assert isinstance(refused, Refuse), refused
    assert str(refused.reason) == case["why"]
    assert 400 <= refused.status < 600


@pytest.mark.parametrize("case", CORPUS["accepted"], ids=lambda case: str(case["name"]))
def test_plain_is_read_and_h11_agrees(case: dict[str, str]) -> None:
    raw = at(case)
    length = end(raw)
    assert length is not None
    read = parse(raw[:length], 1)
    assert isinstance(read, Head), read
    event = by_h11(raw[:length])
    assert event is not None
    assert agrees(read, event)


JUNK = st.one_of(
    st.binary(max_size=30),
    st.lists(
        st.sampled_from([b"\r\n", b"\n", b" ", b":", b"Host: a", b"\t", b"x: y", b"\0", b"\r"])
    ).map(b"".join),
)


def spoilt(junk: bytes, place: int, drop: int) -> None:
    raw = b.raw("anthropic", "nonce", more=b"Content-Length: 5\r\nX-A: b\r\n")
    place = min(place, len(raw))
    raw = raw[:place] + junk + raw[place + drop :]
    length = end(raw)
    read = None if length is None else parse(raw[:length], 1)
    if isinstance(read, Head):
        alike(read, raw[:length])


@given(junk=JUNK, place=st.integers(0, 200), drop=st.integers(0, 12))
@settings(max_examples=1500, deadline=None)
def test_what_we_read_h11_reads_alike(junk: bytes, place: int, drop: int) -> None:
    spoilt(junk, place, drop)


@pytest.mark.slow
@given(junk=JUNK, place=st.integers(0, 200), drop=st.integers(0, 12))
@settings(max_examples=100_000, deadline=None)
def test_long_fuzzing(junk: bytes, place: int, drop: int) -> None:
    spoilt(junk, place, drop)


def test_agreement_is_about_everything() -> None:
    raw = b.raw("anthropic", "nonce")
    read, event = b.head(raw), by_h11(raw)
    assert event is not None
    assert agrees(read, event)
    for other in (
        raw.replace(b"POST", b"PUT"),
        raw.replace(b"/v1/messages", b"/v1/message"),
        raw.replace(b"Content-Length: 2", b"Content-Length: 3"),
        raw.replace(b"\r\n\r\n", b"\r\nX: y\r\n\r\n"),
    ):
        event = by_h11(other)
        assert event is not None
        assert not agrees(read, event)


def test_what_a_head_says() -> None:
    read = b.head(
        b"POST /a?b HTTP/1.1\r\nHost: H\r\nX-One:   two \t\r\nx-one: three\r\n"
        b"Transfer-Encoding: Chunked\r\nExpect: 100-Continue\r\nConnection: close, x-one\r\n\r\n"
    )
    assert read.get(b"x-one") == (b"two", b"three")
    assert (read.framing, read.length, read.expects_continue) == (Framing.CHUNKED, None, True)
    assert not read.keep_alive
    assert read.upgrade is None
    plain = b.head(b"GET / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n\r\n")
    assert (plain.framing, plain.expects_continue) == (Framing.NONE, False)
    assert plain.keep_alive
    up = b.head(b"GET / HTTP/1.1\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n\r\n")
    assert up.upgrade == "websocket"


def test_sizes() -> None:
    def sized(count: int, each: int) -> Head | Refuse:
        lines = b"".join(b"x-%d: %s\r\n" % (i, b"v" * each) for i in range(count))
        return parse(b"GET / HTTP/1.1\r\n" + lines + b"\r\n", 1)

    assert isinstance(sized(heads.MAX_HEADERS, 10), Head)
    for many, each in ((heads.MAX_HEADERS + 1, 10), (1, heads.MAX_LINE), (99, 1000)):
        refused = sized(many, each)
        assert isinstance(refused, Refuse)
        assert (refused.reason, refused.status) == (Reason.HEAD_TOO_LARGE, 431)


def test_a_head_is_waited_for_only_while_it_can_still_be_one() -> None:
    raw = b.raw("anthropic", "nonce")
    for cut in range(len(raw)):
        assert end(raw[:cut]) is None
        assert hopeless(raw[:cut]) is None
    assert end(raw + b"the body\r\n\r\n") == len(raw)
    assert hopeless(b"x" * (heads.MAX_HEAD + 1)) is heads.TOO_LONG
    assert end(b"x" * (heads.MAX_HEAD + 5) + b"\r\n\r\n") is None
    assert hopeless(b"GET / HTTP/1.1\n") is not None
    assert hopeless(b"GET / HTTP/1.1\r\nHost: a\x00") is not None


def test_nothing_that_was_sent_is_repeated() -> None:
    refused = parse(b"GET /canary\x01 HTTP/1.1\r\nHost: canary\r\n\r\n", 1)
    assert isinstance(refused, Refuse)
    told = json.loads(body(refused))
    assert told["error"]["code"] == "head-bad"
    assert "canary" not in json.dumps(told)
