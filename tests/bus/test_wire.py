from __future__ import annotations

import math
from typing import Any, Literal

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.toy import Blob, Number, Rich, Text

from agent_box.bus import wire
from agent_box.bus.errors import MESSAGE_MAX, Reason, Refusal
from agent_box.bus.schema import Empty, Wire

EPOCH = b"e" * 16
HEADERS = [
    wire.Greet(version=1, id=1),
    wire.Call(version=1, id=2, epoch=EPOCH, method="m", deadline=5, request_id=None),
    wire.Call(version=1, id=2, epoch=EPOCH, method="m", deadline=5, request_id=b"r" * 16),
    wire.Open(version=1, id=3, epoch=EPOCH, method="m", deadline=5, credit=4),
    wire.Cancel(version=1, id=4),
    wire.Item(version=1, id=5),
    wire.Credit(version=1, id=6, n=1),
    wire.End(version=1, id=7),
]
ANSWERS = [
    wire.Welcome(version=1, id=1, epoch=EPOCH),
    wire.Reply(version=1, id=2, epoch=EPOCH),
    wire.Failure(version=1, id=2, epoch=EPOCH),
    wire.Stale(version=1, id=2, epoch=EPOCH),
    wire.Away(version=1, id=2, epoch=EPOCH),
    wire.Probe(version=1, id=0),
    wire.Item(version=1, id=5),
    wire.Credit(version=1, id=6, n=1),
]
GOOD = {
    "name": "a",
    "data": b"b",
    "ratio": 0.5,
    "flag": True,
    "maybe": None,
    "names": ["x"],
    "counts": {"k": 1},
    "inner": [{"n": 1}],
}


def pack(value: Any) -> bytes:
    return msgpack.packb(value)


@pytest.mark.parametrize("header", HEADERS, ids=lambda h: type(h).__name__)
def test_a_request_comes_out_as_it_went_in(header: wire.Header) -> None:
    assert wire.decode_from_caller([wire.MAGIC, wire.encode_header(header), b"x"]) == (header, b"x")


@pytest.mark.parametrize("header", ANSWERS, ids=lambda h: type(h).__name__)
def test_an_answer_comes_out_as_it_went_in(header: wire.Header) -> None:
    assert wire.decode_from_callee([wire.MAGIC, wire.encode_header(header), b"x"]) == (header, b"x")


def test_a_request_is_no_answer_and_an_answer_is_no_request() -> None:
    with pytest.raises(wire.WireError):
        wire.decode_from_callee([wire.MAGIC, wire.encode_header(HEADERS[1]), b""])
    with pytest.raises(wire.WireError):
        wire.decode_from_caller([wire.MAGIC, wire.encode_header(ANSWERS[1]), b""])


CALL = {
    "op": "call",
    "version": 1,
    "id": 1,
    "epoch": EPOCH,
    "method": "m",
    "deadline": 1,
    "request_id": None,
}


def test_the_header_under_test_is_good() -> None:
    wire.decode_from_caller([wire.MAGIC, pack(CALL), b""])


@pytest.mark.parametrize("missing", CALL)
def test_a_header_without_a_field_is_refused(missing: str) -> None:
    broken = {k: v for k, v in CALL.items() if k != missing}
    with pytest.raises(wire.WireError):
        wire.decode_from_caller([wire.MAGIC, pack(broken), b""])


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"version": 2},
        {"version": True},
        {"version": 1.0},
        {"id": -1},
        {"id": 1 << 60},
        {"id": "1"},
        {"epoch": b"short"},
        {"epoch": "e" * 16},
        {"method": ""},
        {"method": "m" * 65},
        {"method": b"m"},
        {"deadline": -1},
        {"deadline": 1 << 63},
        {"deadline": math.nan},
        {"request_id": b"short"},
        {"request_id": "cmVxdWVzdF9pZF8xMjM0NQ=="},
        {"op": "nope"},
        {"op": 1},
    ],
    ids=str,
)
def test_a_header_with_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_from_caller([wire.MAGIC, pack({**CALL, **change}), b""])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"AB1"],
        [b"AB1", pack(CALL)],
        [b"AB1", pack(CALL), b"", b""],
        [b"AB2", pack(CALL), b""],
        [b"", pack(CALL), b""],
        [b"AB1", b"", b""],
        [b"AB1", pack(CALL)[:-1], b""],
        [b"AB1", pack(CALL) + b"\x00", b""],
        [b"AB1", pack([CALL]), b""],
        [b"AB1", pack(CALL | {"method": "m" * wire.HEADER_MAX}), b""],
        [b"AB1", b"\x81" * 400, b""],
        [b"AB1", b"\x91" * 500, b""],
    ],
    ids=range(13),
)
def test_other_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_from_caller(frames)


def doubled(key: str, one: bytes, two: bytes) -> bytes:
    return b"\x82" + pack(key) + one + pack(key) + two


def test_a_duplicate_key_is_refused_at_any_depth() -> None:
    twice = doubled("n", b"\x01", b"\x02")
    for body in (twice, b"\x81\xa5inner\x91" + twice, b"\x81\xa5inner" + twice):
        with pytest.raises(wire.WireError, match="twice"):
            wire.decode_body(body, Rich)


def test_a_duplicate_key_in_the_header_is_refused() -> None:
    header = b"\x88" + pack(CALL)[1:] + pack("id") + b"\x05"
    with pytest.raises(wire.WireError, match="twice"):
        wire.decode_from_caller([b"AB1", header, b""])


def test_good_bodies_pass() -> None:
    assert wire.decode_body(pack(GOOD), Rich).inner == [Number(n=1)]
    assert wire.decode_body(b"\x80", Empty) == Empty()


@pytest.mark.parametrize("missing", GOOD)
def test_a_body_without_a_field_is_refused(missing: str) -> None:
    with pytest.raises(wire.WireError, match=f"missing required field `{missing}`"):
        wire.decode_body(pack({k: v for k, v in GOOD.items() if k != missing}), Rich)


@pytest.mark.parametrize(
    "change",
    [
        {"extra": None},
        {"inner": [{"n": 1, "m": 2}]},
        {"inner": [{}]},
        {"name": b"bytes"},
        {"name": 5},
        {"data": "aGVsbG8="},  # base64 text is not bytes
        {"ratio": math.nan},
        {"ratio": math.inf},
        {"ratio": -math.inf},
        {"ratio": "0.5"},
        {"flag": 1},
        {"flag": "true"},
        {"counts": {"k": 1.0}},
        {"counts": {"k": True}},
        {"counts": {b"k": 1}},
        {"names": "x"},
        {"names": [None]},
        {"maybe": False},
    ],
    ids=str,
)
def test_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_body(pack({**GOOD, **change}), Rich)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\x01",
        b"\xa1x",
        b"\x80\x80",
        b"\xc1",
        b"\x81\xa1n",
        pack({"n": msgpack.ExtType(5, b"")}),
        pack({"n": msgpack.ExtType(5, b"1234")}),
        pack({"n": msgpack.Timestamp(1)}),
        b"\x81\xa1n\xc7\x00\xff",
        pack({5: 1}),
        b"\x81\xa1n\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1n\xdb\xff\xff\xff\xff",
        b"\x81\xa2\xff\xfe\x01",
        b"\x81\xa1n\xa3\xed\xa0\x80",
        b"\x91" * 100_000,
        b"\x81\xa1n" * 100_000,
        b"\x81\x80\x01",
    ],
    ids=range(21),
)
def test_what_is_not_a_map_within_the_caps_is_refused(body: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_body(body, Number)


def nested(depth: int) -> bytes:
    return b"\x91" * (depth - 1) + b"\x90"


def test_nesting_is_limited() -> None:
    wire._look(msgpack.unpackb(nested(wire.DEPTH_MAX)), 1)
    for depth in (wire.DEPTH_MAX + 2, 100, 900):
        body = pack({**GOOD, "names": []})[:-1]
        with pytest.raises(wire.WireError, match="deeper"):
            wire.decode_body(b"\x81\xa5names" + nested(depth), Rich)
        assert body


def test_a_body_over_the_cap_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(wire.WireError, match="larger"):
        wire.decode_body(b"\xc1" * (wire.BODY_MAX + 1), Blob)


def test_the_caps_hold_when_sending() -> None:
    with pytest.raises(wire.WireError, match="larger"):
        wire.encode_body(Blob(data=bytes(wire.BODY_MAX)))
    with pytest.raises(wire.WireError):
        wire.encode_body(Text(text="\ud800"))
    with pytest.raises(wire.WireError):
        wire.encode_body(Number(n=1 << 70))
    with pytest.raises(wire.WireError):
        wire.encode_header(wire.Cancel(version=1, id=1 << 70))


def test_a_large_body_within_the_cap_passes() -> None:
    blob = Blob(data=bytes(wire.BODY_MAX - 64))
    assert wire.decode_body(wire.encode_body(blob), Blob) == blob


def test_a_refusal_comes_out_as_it_went_in() -> None:
    told = Refusal(Reason.WRONG_STATE, "box is stopped", facts={"state": "stopped"}, id=None)
    heard = wire.to_refusal(wire.encode_refusal(told))
    assert (heard.reason, heard.message, heard.facts) == (told.reason, told.message, told.facts)


def test_a_refusal_that_does_not_fit_is_still_told() -> None:
    told = Refusal(Reason.CONFLICT, "x" * 600, facts={"k": "v" * wire.BODY_MAX})
    heard = wire.to_refusal(wire.encode_refusal(told))
    assert (heard.reason, heard.message) == (Reason.CONFLICT, "x" * MESSAGE_MAX)


@pytest.mark.parametrize(
    "problem",
    [
        {"reason": "no such", "message": "", "facts": {}, "id": None},
        {"reason": "denied", "message": "x" * 513, "facts": {}, "id": None},
        {"reason": "denied", "message": "", "facts": {str(n): "" for n in range(33)}, "id": None},
        {"reason": "denied", "message": "", "facts": {}, "id": "x" * 65},
        {"reason": "denied", "message": "", "facts": {}},
    ],
    ids=range(5),
)
def test_what_is_no_refusal_is_refused(problem: dict[str, Any]) -> None:
    with pytest.raises(wire.WireError):
        wire.to_refusal(pack(problem))


CANARY = "canary-5f0c"


@pytest.mark.parametrize(
    "body",
    [
        {"reason": CANARY, "message": "", "facts": {}, "id": None},
        {"reason": "denied", "message": CANARY * 100, "facts": {}, "id": None},
        {"reason": "denied", "message": CANARY, "facts": CANARY, "id": None},
        {"reason": CANARY.encode(), "message": CANARY, "facts": {}, "id": None},
    ],
    ids=range(4),
)
def test_an_error_does_not_repeat_a_value(body: dict[str, Any]) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.decode_body(pack(body), wire.Problem)
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


texts = st.text(st.characters(codec="utf-8"), max_size=50)
riches = st.builds(
    Rich,
    name=texts,
    data=st.binary(max_size=200),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
    maybe=st.none() | texts,
    names=st.lists(texts, max_size=5),
    counts=st.dictionaries(texts, st.integers(-(1 << 63), (1 << 63) - 1), max_size=5),
    inner=st.lists(st.builds(Number, n=st.integers(0, 1 << 32)), max_size=5),
)


@given(riches)
def test_every_value_comes_out_as_it_went_in(value: Rich) -> None:
    assert wire.decode_body(wire.encode_body(value), Rich) == value


@given(st.binary(max_size=300))
def test_any_bytes_are_a_body_or_a_wire_error(untrusted: bytes) -> None:
    try:
        assert type(wire.decode_body(untrusted, Rich)) is Rich
    except wire.WireError:
        pass


@given(st.lists(st.binary(max_size=100) | st.just(b"AB1"), max_size=4))
def test_any_frames_are_a_message_or_a_wire_error(untrusted: list[bytes]) -> None:
    for decode in (wire.decode_from_caller, wire.decode_from_callee):
        try:
            decode(untrusted)
        except wire.WireError:
            pass


@given(riches, st.data())
def test_a_truncated_body_is_refused(value: Rich, data: st.DataObject) -> None:
    packed = wire.encode_body(value)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(wire.WireError):
        wire.decode_body(packed[:cut], Rich)


class Flat(Wire, frozen=True):
    """Takes the short way: no float, and not within itself."""

    name: str
    data: bytes
    flag: bool
    maybe: str | None
    names: list[str]
    counts: dict[str, int]
    pair: tuple[Number, ...]
    kind: Literal["a", "b"]


class Nested(Wire, frozen=True):
    inner: list[Nested]


flats = st.builds(
    Flat,
    name=texts,
    data=st.binary(max_size=50),
    flag=st.booleans(),
    maybe=st.none() | texts,
    names=st.lists(texts, max_size=4),
    counts=st.dictionaries(texts, st.integers(-(1 << 63), (1 << 63) - 1), max_size=4),
    pair=st.lists(st.builds(Number, n=st.integers(0, 1 << 32)), max_size=3).map(tuple),
    kind=st.sampled_from(["a", "b"]),
)


def either_way(untrusted: bytes, into: type[Wire]) -> None:
    """The short way is only a shorter way: both give the same value or refuse."""
    results: list[Any] = []
    for shortest in (wire._CANONICAL_MAX, -1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire, "_CANONICAL_MAX", shortest)
            try:
                results.append(wire.decode_body(untrusted, into))
            except wire.WireError as error:
                results.append(str(error))
    assert results[0] == results[1]


def test_which_types_take_the_short_way() -> None:
    assert wire._is_flat(Flat, ())
    assert wire._is_flat(wire.Problem, ())
    assert not wire._is_flat(Rich, ())  # a float could be NaN
    assert not wire._is_flat(Nested, ())  # could be nested without end
    assert not wire._is_flat(Any, ())


def test_a_type_within_itself_is_refused_when_deep() -> None:
    body: Any = {"inner": []}
    for _ in range(7):
        body = {"inner": [body]}
    wire.decode_body(pack(body), Nested)
    for _ in range(10):
        body = {"inner": [body]}
    with pytest.raises(wire.WireError, match="deeper"):
        wire.decode_body(pack(body), Nested)


@given(flats, st.data())
def test_the_short_way_refuses_what_the_long_way_refuses(value: Flat, data: st.DataObject) -> None:
    packed = bytearray(wire.encode_body(value))
    either_way(bytes(packed), Flat)
    at = data.draw(st.integers(0, len(packed) - 1))
    match data.draw(st.integers(0, 3)):
        case 0:
            packed[at] = data.draw(st.integers(0, 255))
        case 1:
            del packed[at:]
        case 2:
            packed[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        case 3:  # one more field, which stands there already
            packed[0] += 1
            packed += pack("flag") + b"\xc2"
    either_way(bytes(packed), Flat)


@given(
    st.dictionaries(
        st.sampled_from([*Flat.__struct_fields__, "extra"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | texts
        | st.binary(max_size=9)
        | st.lists(texts, max_size=2)
        | st.dictionaries(texts, texts, max_size=2),
    )
)
def test_both_ways_agree_on_maps_of_anything(untrusted: dict[str, Any]) -> None:
    try:
        packed = pack(untrusted)
    except OverflowError:
        return
    either_way(packed, Flat)


@pytest.mark.parametrize("header", HEADERS, ids=lambda h: type(h).__name__)
def test_a_header_in_another_order_takes_the_long_way(header: wire.Header) -> None:
    fields = msgpack.unpackb(wire.encode_header(header))
    other = pack(dict(reversed(fields.items())))
    assert wire.decode_from_caller([wire.MAGIC, other, b""])[0] == header
