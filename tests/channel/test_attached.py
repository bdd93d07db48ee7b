"""One stream of a guest's, byte by byte: what is taken, and what no box-guest sends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agent_box.bus.errors import Reason, Refusal
from agent_box.channel.attached import Attached, End, Opened, Out, Taken
from agent_box.guest import streams
from agent_box.guest.kept import Input, Output
from agent_box.guest.streams import Frame
from agent_box.guest.wire import FrameError


def opened(offsets: list[int], taken: int = 0) -> bytes:
    return streams.note(Frame.OPENED, {"id": "a", "offsets": offsets, "taken": taken})


def out(offset: int, data: bytes, source: int = 0) -> bytes:
    return streams.data(Frame.OUTPUT, offset, data, source)


def begun(sources: int = 2) -> Attached:
    made = Attached([0] * sources)
    made.feed(opened([0] * sources))
    return made


def test_output_goes_on_where_it_stopped_and_is_put_together() -> None:
    made = Attached([5])
    found = made.feed(opened([7], 3) + out(7, b"ab") + out(9, b"c"))
    assert [type(f) for f in found] == [Opened, Out]
    assert found[1] == Out(0, 7, b"abc") and made.taken == 3 and made.next == [10]


def test_input_goes_on_where_it_was_taken() -> None:
    made = Attached([0])
    made.feed(opened([0], 10))
    assert made.typed(8, b"0123") == streams.data(Frame.INPUT, 10, b"23")
    assert made.typed(8, b"0123") == b""
    assert made.no_more() == streams.data(Frame.INPUT_END, 12, b"")
    assert made.feed(streams.data(Frame.TAKEN, 12, b"")) == [Taken()]
    assert made.taken == 12


@pytest.mark.parametrize("offset", [-1, 1, 1 << 40])
def test_a_gap_in_what_the_caller_types_is_refused(offset: int) -> None:
    with pytest.raises(Refusal) as refused:
        begun().typed(offset, b"x")
    assert refused.value.reason is Reason.BAD_REQUEST


def test_a_caller_may_type_so_far_ahead_and_see_no_future() -> None:
    made = begun()
    for n in range(streams.INPUT_MAX // streams.CHUNK_MAX):
        made.typed(n * streams.CHUNK_MAX, bytes(streams.CHUNK_MAX))
    with pytest.raises(Refusal, match="too much"):
        made.typed(streams.INPUT_MAX, b"x")
    made.feed(out(0, b"abc"))
    assert made.saw(0, 3)
    for offset in (4, -1):
        with pytest.raises(Refusal):
            made.saw(0, offset)


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"how": "exited", "status": 7, "signal": None}, End("exited", 7, None)),
        ({"how": "signalled", "status": None, "signal": 9}, End("signalled", None, 9)),
        ({"how": "taken", "status": None, "signal": None}, End("taken", None, None)),
        ({"how": "timed-out", "status": None, "signal": None}, End("timed-out", None, None)),
    ],
)
def test_every_end(fields: dict[str, Any], end: End) -> None:
    made = begun()
    assert made.feed(out(0, b"x") + streams.note(Frame.ENDED, fields))[-1] == end
    with pytest.raises(FrameError):
        made.feed(out(1, b"x"))


@pytest.mark.parametrize(
    "lie",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        out(1, b"skips"),
        out(0, b""),
        out(0, b"x", 2),
        out(0, b"x", 255),
        out(0, b"abc") + out(2, b"repeats"),
        streams.data(Frame.TAKEN, 1, b""),
        opened([0, 0]),
        streams.data(Frame.INPUT, 0, b"x"),
        streams.leave(),
        streams.note(Frame.ENDED, {}),
        streams.note(Frame.ENDED, {"how": "left-running", "status": None, "signal": None}),
        streams.note(Frame.ENDED, {"how": "exited", "status": 256, "signal": None}),
        streams.note(Frame.ENDED, {"how": "exited", "status": True, "signal": None}),
        streams.note(Frame.ENDED, {"how": "exited", "status": None, "signal": None}),
        streams.note(Frame.ENDED, {"how": "signalled", "status": None, "signal": 65}),
        streams.note(Frame.ENDED, {"how": ["exited"], "status": 0, "signal": None}),
    ],
)
def test_what_no_box_guest_sends(lie: bytes) -> None:
    with pytest.raises(FrameError):
        begun().feed(lie)


@pytest.mark.parametrize(
    "lie",
    [
        out(0, b"x"),
        opened([0]),
        opened([0, 0, 0]),
        opened([0, -1]),
        opened([0, 0], -1),
        opened([0, 0], 1 << 62),
        streams.note(Frame.OPENED, {"offsets": [0, True], "taken": 0}),
        streams.note(Frame.OPENED, {"offsets": [0, 0], "taken": None}),
        streams.note(Frame.OPENED, {}),
        streams.note(Frame.REFUSED, {"reason": "denied", "text": "x"}),
        streams.note(Frame.REFUSED, {"reason": "not-found", "text": 1}),
        b"\x02\0\0\0\x02[",
    ],
)
def test_what_no_box_guest_begins_with(lie: bytes) -> None:
    with pytest.raises(FrameError):
        Attached([0, 0]).feed(lie)


def test_a_refusal_is_the_guests_own_line_cut() -> None:
    frame = streams.note(Frame.REFUSED, {"reason": "not-found", "text": "none\x1b" + "x" * 900})
    with pytest.raises(Refusal, match="none\\?x") as refused:
        Attached([0]).feed(frame)
    assert refused.value.reason is Reason.NOT_FOUND and len(refused.value.message) <= 400


def _garbage(rounds: int) -> None:
    rnd = random.Random(4)
    good = [opened([0, 0]), out(0, b"abc"), out(0, b"x", 1), streams.data(Frame.TAKEN, 0, b"")]
    for _ in range(rounds):
        data = bytearray(b"".join(rnd.choices(good, k=rnd.randrange(1, 8))))
        for _ in range(rnd.randrange(4)):
            data[rnd.randrange(len(data))] = rnd.randrange(256)
        made = Attached([0, 0])
        try:
            while data:
                size = rnd.randrange(1, 64)
                made.feed(bytes(data[:size]))
                del data[:size]
        except (FrameError, Refusal):
            continue


def test_garbage_raises_nothing_else() -> None:
    _garbage(5_000)


@pytest.mark.slow
def test_much_garbage_raises_nothing_else() -> None:
    _garbage(1_000_000)


def _lossy(seed: int) -> None:
    """Output and input over streams that break at any moment: both arrive whole and once."""
    rnd = random.Random(seed)
    output, input = Output(4096, rnd.choice((0, 1024))), Input()
    put_out, typed = rnd.randbytes(20_000), rnd.randbytes(5_000)
    got, arrived, made = bytearray(), bytearray(), 0
    attached, cursor, sent = Attached([0]), 0, 0
    attached.feed(opened([0]))
    while len(got) < len(put_out) or len(arrived) < len(typed):
        match rnd.randrange(6):
            case 0 if made < len(put_out):
                room = min(rnd.randrange(1, 3000), output.room(watched=True))
                piece = put_out[made : made + room]
                output.add(piece, watched=True)
                made += len(piece)
            case 1 if cursor < output.end:
                piece = output.slice(cursor, rnd.randrange(1, 2000))
                for happened in attached.feed(out(cursor, piece)):
                    assert isinstance(happened, Out) and happened.offset == len(got)
                    got += happened.untrusted
                cursor += len(piece)
            case 2:
                frame = attached.saw(0, len(got))
                output.saw(streams.read_output(frame[5:])[1])
            case 3:
                start = rnd.randrange(attached.taken, sent + 1)
                piece = typed[start : start + rnd.randrange(1, 900)]
                frame = attached.typed(start, piece)
                sent = max(sent, start + len(piece))
                if frame:
                    offset, data = streams.read_input(frame[5:])
                    input.add(offset, data)
            case 4:
                piece = input.waiting(rnd.randrange(1, 500))
                arrived += piece
                input.took(len(piece))
            case _ if rnd.random() < 0.2:  # the stream breaks; whoever comes back says where
                attached = Attached([len(got)])
                cursor = max(len(got), output.base)
                output.saw(len(got))
                input.discard()
                sent = input.taken
                attached.feed(opened([cursor], input.taken))
    assert bytes(got) == put_out and bytes(arrived) == typed


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_doubled(seed: int) -> None:
    _lossy(seed)
