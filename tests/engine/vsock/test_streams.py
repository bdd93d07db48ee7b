"""The virtio-vsock protocol as a playbook: packets in, effects and packets out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_box.engine.vsock import streams
from agent_box.engine.vsock.streams import (
    BOTH,
    CREDIT,
    CREDIT_REQUEST,
    CREDIT_STEP,
    CREDIT_UPDATE,
    DATA,
    DEAF,
    FINISH,
    GONE,
    LARGE_STREAMS,
    LARGE_WINDOW,
    MAX_RESETS,
    NO_RECEIVE,
    NO_SEND,
    OPENED,
    REQUEST,
    RESPONSE,
    RST,
    RW,
    SHUTDOWN,
    SMALL_WINDOW,
    Full,
    Stream,
    Table,
    header,
)

CID = 3
PORT = 5000
ALLOC = 65536


class Play:
    """A table, and a guest that says what it is told to say."""

    def __init__(self, limit: int = 100) -> None:
        self.table = Table(CID, limit=limit)

    def hear(self) -> list[tuple[int, int, int, int, int]]:
        """What the guest is told: op, flags, its port, window, forwarded."""
        found = []
        while (packet := self.table.control()) is not None:
            fields = header.unpack(packet)
            assert fields[0] == 2 and fields[1] == CID and fields[4] == 0
            found.append((fields[6], fields[7], fields[3], fields[8], fields[9]))
        assert not self.table.has_control
        return found

    def say(
        self,
        stream: Stream,
        op: int,
        *,
        size: int = 0,
        flags: int = 0,
        alloc: int = ALLOC,
        passed: int = 0,
    ) -> int:
        """A packet of the guest's. The effect."""
        fields = (CID, 2, stream.guest_port, stream.host_port, size, 1, op, flags, alloc, passed)
        found, effect = self.table.packet(fields, size)
        assert found is None or found is stream
        return effect

    def open(self) -> Stream:
        stream = self.table.open(PORT)
        stream.host = object()
        assert [row[0] for row in self.hear()] == [REQUEST]
        assert self.say(stream, RESPONSE) == OPENED | CREDIT
        return stream


def test_a_stream_is_opened() -> None:
    play = Play()
    stream = play.table.open(PORT)
    assert not stream.open and stream.credit() == 0
    assert play.hear() == [(REQUEST, 0, PORT, LARGE_WINDOW, 0)]
    assert play.say(stream, RESPONSE, alloc=1000) == OPENED | CREDIT
    assert stream.open and stream.credit() == 1000
    assert play.hear() == []


def test_a_refusal() -> None:
    play = Play()
    stream = play.table.open(PORT)
    play.hear()
    assert play.say(stream, RST) == GONE
    assert stream.gone and len(play.table) == 0 and play.hear() == []


def test_credit_of_the_guest_limits_what_is_sent() -> None:
    play = Play()
    stream = play.open()
    assert stream.credit() == ALLOC
    play.table.sent(stream, ALLOC - 1)
    assert stream.credit() == 1
    play.table.sent(stream, 1)
    assert stream.credit() == 0
    # any packet carries credit
    assert play.say(stream, RW, size=1, passed=500) == DATA | CREDIT
    assert stream.credit() == 500
    assert play.say(stream, CREDIT_UPDATE, passed=ALLOC) == CREDIT
    assert stream.credit() == ALLOC


def test_a_guest_that_lies_about_credit_gets_none() -> None:
    play = Play()
    stream = play.open()
    play.table.sent(stream, 1000)
    play.say(stream, CREDIT_UPDATE, alloc=ALLOC, passed=5000)  # more than was ever sent
    assert stream.credit() == 0
    play.say(stream, CREDIT_UPDATE, alloc=100, passed=0)  # its buffer shrank
    assert stream.credit() == 0
    play.say(stream, CREDIT_UPDATE, alloc=ALLOC, passed=1000)
    assert stream.credit() == ALLOC


def test_counters_wrap_at_32_bits() -> None:
    play = Play()
    stream = play.open()
    for turn in range(1, 5):
        play.table.sent(stream, 2**31)
        play.say(stream, CREDIT_UPDATE, passed=(turn * 2**31) & 0xFFFFFFFF)
        assert stream.credit() == ALLOC
        for _ in range(2**31 // LARGE_WINDOW):
            assert play.say(stream, RW, size=LARGE_WINDOW, passed=(turn * 2**31) & 0xFFFFFFFF) == (
                DATA | CREDIT
            )
            play.table.forwarded(stream, LARGE_WINDOW)
        told = play.hear()
        assert told[-1][4] == (turn * 2**31) & 0xFFFFFFFF


def test_credit_is_told_in_steps() -> None:
    play = Play()
    stream = play.open()
    play.say(stream, RW, size=3 * CREDIT_STEP)
    play.table.forwarded(stream, CREDIT_STEP - 1)
    assert play.hear() == []
    play.table.forwarded(stream, 1)
    assert play.hear() == [(CREDIT_UPDATE, 0, PORT, LARGE_WINDOW, CREDIT_STEP)]
    play.table.forwarded(stream, CREDIT_STEP)
    play.table.forwarded(stream, CREDIT_STEP)  # one packet tells both
    assert play.hear() == [(CREDIT_UPDATE, 0, PORT, LARGE_WINDOW, 3 * CREDIT_STEP)]
    assert play.say(stream, CREDIT_REQUEST) == CREDIT
    assert [row[0] for row in play.hear()] == [CREDIT_UPDATE]


def test_data_to_the_guest_carries_credit() -> None:
    play = Play()
    stream = play.open()
    play.say(stream, RW, size=CREDIT_STEP - 1)
    play.table.forwarded(stream, CREDIT_STEP - 1)
    packet = bytearray(50)
    play.table.write_header(memoryview(packet), stream, 6)
    fields = header.unpack_from(packet)
    assert fields == (
        2, CID, stream.host_port, PORT, 6, 1, RW, 0, LARGE_WINDOW, CREDIT_STEP - 1,
    )  # fmt: skip
    play.table.sent(stream, 6)
    play.table.forwarded(stream, 1)
    assert play.hear() == []  # a step counts from what was told last


@pytest.mark.parametrize("size", [LARGE_WINDOW + 1, 2**32 - 1])
def test_more_than_the_window_ends_the_stream(size: int) -> None:
    play = Play()
    stream = play.open()
    assert play.say(stream, RW, size=size) == GONE
    assert [row[0] for row in play.hear()] == [RST]
    assert play.table.violations == 1 and len(play.table) == 0


def test_the_window_is_of_what_was_not_forwarded() -> None:
    play = Play()
    stream = play.open()
    assert play.say(stream, RW, size=LARGE_WINDOW) == DATA | CREDIT
    play.table.forwarded(stream, 10)
    assert play.say(stream, RW, size=10) == DATA | CREDIT
    assert play.say(stream, RW, size=1) == GONE


def test_a_packet_longer_than_its_buffers_ends_the_stream() -> None:
    play = Play()
    stream = play.open()
    fields = (CID, 2, PORT, stream.host_port, 11, 1, RW, 0, ALLOC, 0)
    assert play.table.packet(fields, 10) == (stream, GONE)


@pytest.mark.parametrize("op", [0, REQUEST, RESPONSE, 8, 65535])
def test_what_an_open_stream_must_not_hear(op: int) -> None:
    play = Play()
    stream = play.open()
    assert play.say(stream, op) == GONE
    assert play.table.violations == 1


@pytest.mark.parametrize("op", [0, REQUEST, RW, SHUTDOWN, CREDIT_UPDATE, CREDIT_REQUEST, 9])
def test_what_a_stream_must_not_hear_before_it_is_open(op: int) -> None:
    play = Play()
    stream = play.table.open(PORT)
    play.hear()
    assert play.say(stream, op) == GONE
    assert [row[0] for row in play.hear()] == [RST]


def test_an_answer_before_the_question() -> None:
    play = Play()
    stream = play.table.open(PORT)
    assert play.say(stream, RESPONSE) == GONE
    assert [row[0] for row in play.hear()] == [RST]


def test_connections_of_the_guest_are_refused_and_counted() -> None:
    play = Play()
    for kind in (1, 2):
        fields = (CID, 2, 700, 1234, 0, kind, REQUEST, 0, ALLOC, 0)
        assert play.table.packet(fields, 0) == (None, 0)
        packet = play.table.control()
        assert packet is not None
        assert header.unpack(packet) == (2, CID, 1234, 700, 0, kind, RST, 0, 0, 0)
    assert play.table.refused == 2 and len(play.table) == 0


def test_a_reset_is_not_answered() -> None:
    play = Play()
    assert play.table.packet((CID, 2, 1, 2, 0, 1, RST, 0, 0, 0), 0) == (None, 0)
    assert play.hear() == []


@pytest.mark.parametrize(("source", "target"), [(2, 2), (4, 2), (CID, 3), (CID, 2**64 - 1)])
def test_packets_from_or_to_others_are_dropped(source: int, target: int) -> None:
    play = Play()
    stream = play.open()
    fields = (source, target, PORT, stream.host_port, 0, 1, RST, 0, 0, 0)
    assert play.table.packet(fields, 0) == (None, 0)
    assert stream.open and play.table.strays == 1 and play.hear() == []


def test_the_client_ends_one_way_then_the_other() -> None:
    play = Play()
    stream = play.open()
    play.table.host_ended(stream)
    assert play.hear() == [(SHUTDOWN, NO_SEND, PORT, LARGE_WINDOW, 0)]
    assert stream.credit() == 0
    assert play.say(stream, RW, size=5) == DATA | CREDIT
    play.table.host_deaf(stream)
    assert [row[:2] for row in play.hear()] == [(SHUTDOWN, BOTH)]
    play.table.host_ended(stream)  # said before
    assert play.hear() == []
    assert len(play.table) == 1  # until the guest has read all and says so
    assert play.say(stream, RST) == GONE
    assert len(play.table) == 0


def test_the_guest_ends_one_way_then_the_other() -> None:
    play = Play()
    stream = play.open()
    assert play.say(stream, SHUTDOWN, flags=NO_SEND) == CREDIT | FINISH
    assert stream.finished and stream.credit() == ALLOC
    assert play.say(stream, SHUTDOWN, flags=NO_RECEIVE) == GONE  # flags add up
    assert [row[0] for row in play.hear()] == [RST]
    assert len(play.table) == 0


def test_a_guest_that_reads_no_more_is_sent_nothing() -> None:
    play = Play()
    stream = play.open()
    assert play.say(stream, SHUTDOWN, flags=NO_RECEIVE) == CREDIT | DEAF
    assert stream.credit() == 0 and not stream.finished
    assert play.say(stream, RW, size=5) == DATA | CREDIT


def test_data_after_the_end_is_a_violation() -> None:
    play = Play()
    stream = play.open()
    play.say(stream, SHUTDOWN, flags=NO_SEND)
    assert play.say(stream, RW, size=1) == GONE


def test_a_client_that_leaves_before_the_guest_was_asked_leaves_no_trace() -> None:
    play = Play()
    play.table.abort(play.table.open(PORT))
    assert play.hear() == [] and len(play.table) == 0


def test_a_client_that_leaves_before_the_answer() -> None:
    play = Play()
    stream = play.table.open(PORT)
    play.hear()
    play.table.abort(stream)
    assert [row[0] for row in play.hear()] == [RST]
    play.table.abort(stream)
    assert play.hear() == []
    assert play.say(stream, RESPONSE) == 0  # it crossed the reset
    assert [row[0] for row in play.hear()] == [RST]


def test_a_full_table() -> None:
    play = Play(limit=3)
    first, second, third = (play.open() for _ in range(3))
    with pytest.raises(Full):
        play.table.open(PORT)
    for stream in (second, first):
        play.table.host_ended(stream)
        play.table.host_deaf(stream)
        play.table.host_closed(stream)
    play.hear()
    play.open_after = play.table.open(PORT)  # type: ignore[attr-defined]
    assert second.gone and not first.gone and play.table.evicted == 1
    assert [row[0] for row in play.hear()] == [RST, REQUEST]
    assert third.open


def test_ports_are_not_used_twice() -> None:
    play = Play()
    play.table._next_port = streams._LAST_PORT
    ports = [play.table.open(PORT).host_port for _ in range(3)]
    assert ports == [streams._LAST_PORT, streams._FIRST_PORT, streams._FIRST_PORT + 1]
    play.table._next_port = streams._FIRST_PORT
    assert play.table.open(PORT).host_port == streams._FIRST_PORT + 2


def test_windows_shrink_when_there_are_many_and_memory_is_bounded() -> None:
    play = Play(limit=1000)
    many = [play.open() for _ in range(LARGE_STREAMS + 5)]
    assert [s.window for s in many] == [LARGE_WINDOW] * LARGE_STREAMS + [SMALL_WINDOW] * 5
    play.say(many[0], RST)  # its client may still have to read a window full
    assert play.open().window == SMALL_WINDOW
    play.table.host_closed(many[0])
    assert play.open().window == LARGE_WINDOW
    play.table.host_closed(many[1])
    play.say(many[1], RST)
    assert play.open().window == LARGE_WINDOW
    assert play.open().window == SMALL_WINDOW


def test_credit_of_a_small_window_comes_in_smaller_steps() -> None:
    play = Play(limit=1000)
    for _ in range(LARGE_STREAMS):
        play.open()
    stream = play.open()
    play.say(stream, RW, size=SMALL_WINDOW)
    play.table.forwarded(stream, SMALL_WINDOW // 4)
    assert [row[0] for row in play.hear()] == [CREDIT_UPDATE]


def test_resets_that_cannot_be_told_congest() -> None:
    play = Play()
    for port in range(MAX_RESETS):
        assert not play.table.congested
        play.table.packet((CID, 2, port, 1, 0, 1, REQUEST, 0, 0, 0), 0)
    assert play.table.congested
    play.table.control()
    assert not play.table.congested


def test_a_driver_that_begins_anew_knows_nothing() -> None:
    play = Play()
    opened = [play.open() for _ in range(3)]
    play.table.host_ended(opened[0])
    play.table.packet((CID, 2, 9, 9, 0, 1, REQUEST, 0, 0, 0), 0)
    assert play.table.forget() == opened
    assert all(stream.gone for stream in opened)
    assert not play.table.has_control and play.table.control() is None


def fuzz(seed: int, steps: int) -> Table:
    """A guest and clients that do anything in any order.

    No stream ever is owed more than its window, everything that waits to be told is bounded,
    and what is said of a stream that is gone has no effect.
    """
    rnd = random.Random(seed)
    limit = rnd.choice((1, 5, 50))
    table = Table(CID, limit=limit)
    ever: list[Stream] = []
    owed: dict[Stream, int] = {}
    for _ in range(steps):
        what = rnd.random()
        stream = rnd.choice(ever[-60:]) if ever else None
        if what < 0.12:
            try:
                stream = table.open(rnd.choice((1, 2, PORT)))
            except Full:
                continue
            stream.host = object()
            ever.append(stream)
            owed[stream] = 0
        elif what < 0.35:
            table.control()
        elif stream is None:
            continue
        elif what < 0.8:
            honest = rnd.random() < 0.8
            if stream._state == 0 and honest:
                op = rnd.choice((RESPONSE, RESPONSE, RST))
            else:
                op = rnd.choice((RW, RW, RW, CREDIT_UPDATE, CREDIT_REQUEST, SHUTDOWN, RST))
                op = op if honest else rnd.choice((REQUEST, rnd.getrandbits(16)))
            size = rnd.choice((0, 1, 4096, 65536)) if honest else rnd.getrandbits(32)
            fields = (
                CID if honest else rnd.choice((2, CID)),
                2,
                stream.guest_port,
                stream.host_port if honest else rnd.getrandbits(32),
                size,
                1 if honest else rnd.randrange(3),
                op,
                rnd.getrandbits(2) if honest else rnd.getrandbits(32),
                ALLOC if honest else rnd.getrandbits(32),
                stream._sent & 0xFFFFFFFF if honest else rnd.getrandbits(32),
            )
            was_gone = stream.gone
            found, effect = table.packet(fields, size if honest else rnd.randrange(70000))
            assert (found is None) == (effect == 0)
            assert found is None or not (was_gone and found is stream)
            if effect & DATA:
                assert found is not None
                owed[found] += size
                assert owed[found] <= found.window
        elif what < 0.9:
            count = rnd.randint(0, owed[stream])
            owed[stream] -= count
            table.forwarded(stream, count)
        elif what < 0.94:
            count = min(stream.credit(), rnd.randrange(5000))
            table.sent(stream, count)
        else:
            ends = (table.host_ended, table.host_deaf, table.host_closed)
            for end in rnd.sample(ends, rnd.randint(1, 3)) if rnd.random() < 0.8 else ():
                end(stream)
            if rnd.random() < 0.1:
                table.abort(stream)
        assert len(table) <= limit
        assert len(table._waiting) <= limit
        assert len(table._resets) <= MAX_RESETS + limit
        assert 0 <= table._large <= LARGE_STREAMS
        assert len(table._lingering) <= len(table)
    while table.control() is not None:
        pass
    assert not table.has_control
    for stream in table.forget():
        table.host_closed(stream)
    for stream in ever:
        table.host_closed(stream)
    assert table._large == 0 and len(table) == 0
    return table


@given(st.integers(0, 2**64))
@settings(max_examples=100, deadline=None)
def test_anything_in_any_order(seed: int) -> None:
    fuzz(seed, 300)


def test_the_fuzzer_reaches_what_it_should() -> None:
    tables = [fuzz(seed, 2000) for seed in range(10)]
    for name in ("opened", "refused", "violations", "strays", "evicted"):
        assert sum(getattr(table, name) for table in tables), name


@pytest.mark.slow
def test_anything_in_any_order_for_long() -> None:
    for seed in range(3000):
        fuzz(seed, 1000)
