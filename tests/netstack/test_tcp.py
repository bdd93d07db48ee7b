"""The TCP state machine, segment by segment, without a socket or a clock.

What it sends is taken apart by scapy, which shares no code with us.
"""

from __future__ import annotations

import random
from math import inf

import pytest
from scapy.layers.inet import IP, TCP
from support.planes import machine_invariants

from agent_box.netstack import tcp
from agent_box.netstack.packet import ACK, FIN, GUEST, PSH, RST, SYN
from agent_box.netstack.tcp import (
    ANSWERED,
    BURST,
    CALLING,
    DATA,
    DEAD,
    LATER,
    MSS,
    NOW,
    OPEN,
    OPENED,
    RESET,
    ROOM,
    RTO_MAX_S,
    SMALL,
    SYN_TRIES,
    WAITING,
    Tcp,
)
from agent_box.netstack.wire import Wire

KEY = GUEST + bytes((198, 18, 1, 0)) + (40000).to_bytes(2, "big") + (443).to_bytes(2, "big")
M = 0xFFFFFFFF
ISS = 0xFFFFFF00  # so that every playbook wraps round
GUEST_ISS = 0xFFFFFFF0


class Play:
    """One connection, and the guest that a test plays."""

    def __init__(self, *, scale: int | None = 7, mss: int = MSS, window: int = 65535) -> None:
        self.wire = Wire()
        self.armed: list[float] = []
        self.wire.arm = self._arm
        self.tcp = Tcp(self.wire, KEY, ISS)
        self.mss = mss
        self.scale = scale
        self.window = window
        self.seq = GUEST_ISS
        self.ack = 0

    def _arm(self, flow: Tcp) -> None:
        flow.armed = flow.deadline
        self.armed.append(flow.deadline)

    def frames(self) -> list[TCP]:
        """What was sent since, each dissected and its length checked."""
        data = b"".join(bytes(part) for part in self.wire.out)
        assert len(data) == self.wire.queued
        self.wire.out.clear()
        self.wire.queued = 0
        found = []
        while data:
            length = int.from_bytes(data[:4], "little")
            packet = IP(data[14 : 4 + length])
            assert packet.len == length - 10 and packet.dst == "198.18.0.2"
            assert packet[TCP].dport == 40000 and packet[TCP].sport == 443
            found.append(packet[TCP])
            data = data[4 + length :]
        return found

    def frame(self) -> TCP:
        (only,) = self.frames()
        return only

    def guest(
        self, flags: int = ACK, payload: bytes = b"", *, seq: int | None = None,
        ack: int | None = None, window: int | None = None,
    ) -> int:  # fmt: skip
        """The guest sends; its own sequence number goes on when it sent where it is."""
        at = self.seq if seq is None else seq
        bits = self.tcp.arrive(
            at & M, (self.ack if ack is None else ack) & M, flags,
            self.window if window is None else window,
            memoryview(payload) if payload else None,
        )  # fmt: skip
        if seq is None:
            self.seq = (self.seq + len(payload) + bool(flags & FIN)) & M
        return bits

    def send(self, data: bytes) -> None:
        slot = self.wire.slot()
        slot[: len(data)] = data
        self.tcp.send(slot, len(data))

    def send_whole(self, data: bytes) -> None:
        """Of segments of full size."""
        slots = []
        for at in range(0, len(data), self.tcp.segment):
            slots.append(self.wire.slot())
            slots[-1][: self.tcp.segment] = data[at : at + self.tcp.segment]
        self.tcp.send_whole(slots)

    def open(self) -> Play:
        self.tcp.called(self.seq, self.mss, self.scale)
        self.seq = (self.seq + 1) & M
        assert not self.wire.out, "answered before upstream accepted"
        self.tcp.accept()
        answer = self.frame()
        assert answer.flags == "SA" and answer.seq == ISS and answer.ack == self.seq
        self.ack = (ISS + 1) & M
        assert self.guest() & OPENED
        assert self.tcp.state == OPEN
        return self

    def take(self) -> bytes:
        """What the relay would send upstream."""
        pieces, self.tcp.arrived = self.tcp.arrived or [], None
        data = b"".join(bytes(piece) for piece in pieces)
        if data:
            self.tcp.taken(len(data))
        return data

    def pass_time(self, seconds: float) -> int:
        """Lets the clock run to there, and timers fire, as their keeper does it."""
        end = self.wire.now + seconds
        bits = 0
        while self.tcp.deadline <= end:
            self.wire.now = max(self.wire.now, self.tcp.deadline)
            self.tcp.armed = inf
            bits |= self.tcp.timer()
            if bits & (RESET | ROOM):
                return bits
        self.wire.now = end
        return bits


def options(segment: TCP) -> dict[str, object]:
    return {name: value for name, value in segment.options if name != "NOP"}


# -- opening


def test_a_syn_is_answered_only_once_upstream_accepted() -> None:
    play = Play()
    play.tcp.called(play.seq, MSS, 7)
    assert play.guest(SYN, seq=GUEST_ISS) == 0  # sent again while we connect
    assert play.wire.out == [] and play.tcp.state == WAITING


def test_the_answer_offers_our_mss_and_a_scale_if_the_guest_did() -> None:
    for scale in (7, 0, None):
        play = Play(scale=scale)
        play.tcp.called(GUEST_ISS, MSS, scale)
        play.tcp.accept()
        found = options(play.frame())
        assert found["MSS"] == MSS
        assert found.get("WScale") == (None if scale is None else 7)


def test_an_upstream_that_refuses_is_a_rst_for_the_syn() -> None:
    play = Play()
    play.tcp.called(GUEST_ISS, MSS, 7)
    play.tcp.abort()
    answer = play.frame()
    assert answer.flags == "RA" and answer.ack == (GUEST_ISS + 1) & M and answer.seq == 0
    assert play.tcp.state == DEAD


def test_a_lost_answer_is_sent_again_and_given_up() -> None:
    play = Play()
    play.tcp.called(GUEST_ISS, MSS, 7)
    play.tcp.accept()
    play.frames()
    play.pass_time(1.5)
    assert play.frame().flags == "SA"
    assert play.guest(SYN, seq=GUEST_ISS) == 0  # the guest asks again itself
    assert play.frame().flags == "SA"
    assert play.pass_time(300) & RESET
    flags = [str(segment.flags) for segment in play.frames()]
    assert flags == ["SA"] * (SYN_TRIES - 2) + ["RA"]


def test_data_with_the_last_ack_of_the_handshake_counts() -> None:
    play = Play()
    play.tcp.called(play.seq, MSS, 7)
    play.tcp.accept()
    play.frames()
    play.seq, play.ack = (GUEST_ISS + 1) & M, (ISS + 1) & M
    bits = play.guest(ACK | PSH, b"early")
    assert bits & OPENED and bits & DATA and play.take() == b"early"


def test_a_wrong_ack_does_not_open() -> None:
    play = Play()
    play.tcp.called(play.seq, MSS, 7)
    play.tcp.accept()
    play.frames()
    assert play.guest(ACK, seq=(GUEST_ISS + 1) & M, ack=ISS + 2) == 0
    assert play.tcp.state == ANSWERED


def test_a_call_to_the_guest() -> None:
    play = Play()
    play.tcp.call()
    call = play.frame()
    assert call.flags == "S" and options(call) == {"MSS": MSS, "WScale": 7}
    assert play.tcp.state == CALLING
    play.tcp.options(1460, 9)
    assert play.guest(SYN | ACK, ack=ISS + 1) & OPENED
    assert play.tcp.state == OPEN and play.tcp.mss == 1460
    assert play.frame().flags == "A"


def test_a_call_that_nobody_takes_is_reset_and_one_unheard_ends() -> None:
    play = Play()
    play.tcp.call()
    assert play.guest(RST, ack=0) == 0, "a RST that acknowledges nothing of ours is not the answer"
    assert play.guest(RST | ACK, ack=ISS + 1) == RESET
    again = Play()
    again.tcp.call()
    assert again.pass_time(300) & RESET


# -- from the guest


def test_data_in_order_is_taken_and_acknowledged_once_for_a_batch() -> None:
    play = Play().open()
    for piece in (b"one", b"two", b"three"):
        assert play.guest(ACK | PSH, piece) & DATA
    assert not play.wire.out and play.tcp.due == NOW
    assert play.take() == b"onetwothree"
    if play.tcp.due:  # unless the window had to be told of anyway
        play.tcp.acknowledge()
    assert play.frame().ack == play.seq


def test_a_lone_small_segment_may_wait_for_its_acknowledgement_and_a_second_may_not() -> None:
    play = Play().open()
    play.guest(ACK | PSH, b"a question")
    assert play.tcp.due == LATER and play.take() == b"a question"
    play.send(b"the answer")
    assert play.frame().ack == play.seq and not play.tcp.due, "the answer brought it"
    play.guest(ACK | PSH, b"one")
    assert play.tcp.due == LATER
    play.guest(ACK | PSH, b"more")
    assert play.tcp.due == NOW
    play.tcp.acknowledge()
    assert play.frame().ack == play.seq and not play.tcp.due
    play.guest(ACK, b"x" * (SMALL + 1))
    assert play.tcp.due == NOW, "one of many"


def test_a_frame_brings_whole_segments_of_the_guests_size() -> None:
    for mss, most in ((MSS, MSS), (1460, 44 * 1460), (536, 122 * 536)):
        play = Play(mss=mss, window=4096).open()
        assert play.tcp.room() == most


def test_a_gap_is_answered_at_once_each_time() -> None:
    play = Play().open()
    start = play.seq
    for offset in (10, 20, 30):
        assert not play.guest(ACK, b"x" * 10, seq=start + offset) & DATA
    answers = play.frames()
    assert [answer.ack for answer in answers] == [start] * 3
    assert play.guest(ACK, b"y" * 10) & DATA and play.take() == b"y" * 10 + b"x" * 30


def test_what_came_before_its_time_counts_once_the_gap_is_filled() -> None:
    play = Play().open()
    start = play.seq
    data = random.Random(3).randbytes(5000)
    order = [(4000, 5000), (1000, 2500), (2000, 3000), (1000, 1500), (3500, 4200)]
    for first, last in order:
        play.guest(ACK, data[first:last], seq=start + first)
    assert play.wire.held and play.take() == b""
    play.guest(ACK, data[:1000], seq=start)
    assert play.take() == data[:3000]
    play.guest(ACK, data[3000:3600], seq=start + 3000)
    assert play.take() == data[3000:]
    assert play.wire.held == 0 and play.tcp._early is None


def test_what_came_early_is_bounded() -> None:
    play = Play().open()
    for offset in range(1, 1000, 2):
        play.guest(ACK, b"x", seq=play.seq + offset)
    assert len(play.tcp._early or ()) == tcp.EARLY_MAX
    play.guest(ACK, b"y" * 60000, seq=play.seq + (1 << 20))  # beyond the window
    assert play.wire.held == tcp.EARLY_MAX
    play.tcp.die()
    assert play.wire.held == 0


def test_what_is_known_is_acknowledged_and_what_is_half_known_counts_for_its_rest() -> None:
    play = Play().open()
    start = play.seq
    play.guest(ACK, b"abcdef")
    assert play.take() == b"abcdef"
    assert play.guest(ACK, b"abc", seq=start) & DATA
    assert play.take() == b"" and play.tcp.due == NOW
    play.guest(ACK, b"defghi", seq=start + 3)
    assert play.take() == b"ghi"


def test_a_keepalive_is_answered() -> None:
    for payload in (b"", b"\0"):  # RFC 1122 §4.2.3.6: with or without an old byte
        play = Play().open()
        assert play.guest(ACK, payload, seq=play.seq - 1) & DATA
        assert play.tcp.due == NOW and play.take() == b""


def test_the_window_closes_with_our_queue_and_reopens_by_half() -> None:
    play = Play().open()
    sent = 0
    while True:
        room = play.tcp._shown
        if not room:
            break
        play.guest(ACK, b"z" * min(room, 60000))
        sent += min(room, 60000)
        play.tcp.acknowledge()
    assert sent == play.wire.window
    assert play.frames()[-1].window == 0
    play.guest(ACK, b"!", seq=play.seq)  # beyond the window: dropped, and acknowledged
    assert play.tcp.due == NOW and play.tcp.rcv_nxt == (GUEST_ISS + 1 + sent) & M
    play.tcp.acknowledge()
    assert play.frame().window == 0
    play.tcp.arrived = None
    for taken in (1000, play.wire.window // 2 - 1000, 5):
        play.tcp.taken(taken)
    updates = play.frames()
    assert updates and updates[0].window << 7 >= 32768, "an update, and no silly window"


def test_a_window_once_shown_is_never_taken_back() -> None:
    play = Play().open()
    play.tcp.acknowledge()
    edge = play.frame().ack + play.tcp._shown
    play.wire.held = play.wire.memory  # others filled the memory
    play.guest(ACK, b"x")
    play.tcp.acknowledge()
    answer = play.frame()
    assert answer.ack + play.tcp._shown >= edge


def test_memory_of_all_flows_is_bounded() -> None:
    play = Play().open()
    play.wire.held = play.wire.memory
    play.guest(ACK, b"a" * 60000)  # one that holds nothing may still have something
    assert play.tcp.holding == SMALL
    before = play.tcp.rcv_nxt
    play.guest(ACK, b"b" * 100, seq=before)
    assert play.tcp.rcv_nxt == before and play.tcp.due, "dropped, for the guest to send again"


def test_without_scaling_the_window_fits_its_field() -> None:
    play = Play(scale=None).open()
    play.guest(ACK, b"x")
    play.tcp.acknowledge()
    assert play.frame().window == 65535
    assert play.tcp._shown == 65535


def test_fin_in_order_finishes_the_guest_side_alone() -> None:
    play = Play().open()
    play.guest(FIN | ACK, b"data")
    assert play.tcp.finished and play.take() == b"data"
    play.tcp.acknowledge()
    assert play.frame().ack == play.seq
    assert play.tcp.room() > 0, "we may still send"
    play.send(b"reply")
    assert bytes(play.frame().payload) == b"reply"


def test_fin_beyond_a_gap_does_not_count_yet() -> None:
    play = Play().open()
    play.guest(FIN | ACK, seq=play.seq + 3)
    assert not play.tcp.finished
    play.guest(ACK, b"gap")
    play.guest(FIN | ACK)
    assert play.tcp.finished
    play.guest(FIN | ACK, seq=play.seq - 1)  # and again
    assert play.tcp.rcv_nxt == play.seq


# -- ends


def test_a_rst_is_never_answered() -> None:
    for flags in (RST, RST | ACK, RST | SYN, RST | FIN):
        for offset in (0, 5, -5, 1 << 30):
            play = Play().open()
            bits = play.guest(flags, seq=play.seq + offset)
            assert play.wire.out == []
            assert (bits == RESET) == (0 <= offset <= 1 << 20)
            assert (play.tcp.state == DEAD) == (bits == RESET)


def test_a_syn_on_an_open_connection_is_challenged() -> None:
    play = Play().open()
    assert play.guest(SYN, seq=play.seq + 100) == 0
    assert play.frame().flags == "A" and play.tcp.state == OPEN


def test_an_ack_of_what_was_never_sent_is_answered_and_ignored() -> None:
    play = Play().open()
    assert play.guest(ACK, b"x", ack=play.ack + 1000) == 0
    assert play.frame().ack == play.seq - 1 and play.take() == b""


def test_dying_gives_everything_back() -> None:
    play = Play().open()
    play.send(b"a" * 50000)
    play.send(b"b" * 10)
    play.guest(ACK, b"c" * 10)
    assert play.wire.kept and play.wire.held
    play.tcp.abort()
    assert (play.wire.kept, play.wire.held) == (0, 0)
    assert str(play.frames()[-1].flags) == "RA"
    assert play.tcp.deadline is inf


# -- to the guest


def test_large_data_goes_as_one_segment_for_the_guest_to_split() -> None:
    play = Play(mss=1460).open()
    data = random.Random(1).randbytes(60000)
    play.send(data)
    head = bytes(play.wire.out[0])
    assert head[4:6] == b"\1\1" and int.from_bytes(head[8:10], "little") == 1460
    assert bytes(play.frame().payload) == data


def test_the_guests_window_is_kept() -> None:
    play = Play(scale=0, window=1000).open()
    assert play.tcp.room() == 1000
    play.send(b"x" * 600)
    assert play.tcp.room() == 0 and play.tcp.blocked
    play.frames()
    bits = play.guest(ACK, ack=play.ack + 600, window=1000)
    assert bits & ROOM
    play.tcp.blocked = False
    assert play.tcp.room() == 1000


def test_a_closed_window_is_probed_for_as_long_as_it_takes() -> None:
    play = Play().open()
    play.guest(ACK, window=0)
    assert play.tcp.room() == 0
    times = []
    for _ in range(12):
        assert play.pass_time(play.tcp.deadline - play.wire.now) == 0
        probe = play.frame()
        assert probe.seq == play.ack - 1 and not bytes(probe.payload) and probe.flags == "A"
        times.append(play.wire.now)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert gaps[-1] == RTO_MAX_S and gaps == sorted(gaps)
    assert play.guest(ACK, window=500) & ROOM
    play.tcp.blocked = False
    assert play.tcp.room() == 500 << 7


def test_what_is_not_acknowledged_is_sent_again() -> None:
    play = Play().open()
    pieces = [bytes([65 + i]) * 1000 for i in range(4)]
    for piece in pieces:
        play.send(piece)
    play.frames()
    play.guest(ACK, ack=play.ack + 1000)
    assert play.pass_time(2) & ROOM
    assert not play.tcp.again(1 << 20)
    assert bytes(play.frame().payload) == pieces[1], "one, until the way proves to be open"
    assert play.tcp.room() == 0
    assert play.guest(ACK, ack=play.ack + 2000) & ROOM
    assert not play.tcp.again(1 << 20)
    assert [bytes(s.payload) for s in play.frames()] == pieces[2:]


def test_half_an_acknowledged_segment_is_sent_from_its_middle() -> None:
    play = Play().open()
    play.send(b"a" * 500 + b"b" * 500)
    play.frames()
    play.guest(ACK, ack=play.ack + 500)
    play.pass_time(2)
    play.tcp.again(1 << 20)
    again = play.frame()
    assert bytes(again.payload) == b"b" * 500 and again.seq == (play.ack + 500) & M


def test_three_duplicates_are_a_loss_and_more_are_the_same_one() -> None:
    play = Play().open()
    for i in range(6):
        play.send(bytes([i]) * 100)
    play.frames()
    assert [play.guest(ACK) & ROOM for _ in range(3)] == [0, 0, ROOM]
    play.tcp.again(1 << 20)
    assert len(play.frames()) == 6
    assert [play.guest(ACK) & ROOM for _ in range(9)] == [0] * 9


def test_an_ack_with_another_window_is_no_duplicate() -> None:
    play = Play().open()
    play.send(b"x" * 100)
    for window in (65000, 64000, 63000, 62000):
        play.guest(ACK, window=window)
    assert play.tcp.resend is None


def test_a_loss_is_not_answered_with_the_whole_burst_again() -> None:
    play = Play().open()
    for _ in range(20):
        play.send(b"x" * 65000)
    play.frames()
    for _ in range(3):
        play.guest(ACK)
    assert play.tcp.again(1 << 30) is False
    first = sum(len(bytes(s.payload)) for s in play.frames())
    assert first <= BURST + 65000 and play.tcp.resend is not None
    assert play.tcp.room() == 0, "nothing new before the old has arrived"
    play.guest(ACK, ack=play.ack + 65000 * 4)
    assert play.tcp.again(1 << 30) is False
    assert play.frames(), "and on as it is acknowledged"


def test_the_timer_stands_still_while_our_frames_wait_for_the_link() -> None:
    play = Play().open()
    play.send(b"x" * 100)
    assert play.pass_time(500) == 0  # the frame is still in `out`
    play.frames()
    assert play.pass_time(3) & ROOM


def test_the_fin_is_sent_again_too() -> None:
    play = Play().open()
    play.send(b"x")
    play.tcp.finish()
    play.frames()
    play.guest(ACK, ack=play.ack + 1)
    assert play.pass_time(3) & ROOM
    play.tcp.again(1 << 20)
    assert play.frame().flags == "FA"
    play.guest(ACK, ack=play.ack + 2)
    assert play.tcp.fin_acked and play.tcp.deadline is inf


def test_small_data_does_not_hold_a_slot_and_pieces_are_bounded() -> None:
    play = Play(window=65535).open()
    count = 0
    while play.tcp.room():
        play.send(b"x" * 10)
        count += 1
        assert count < 5000
    assert count == tcp.KEPT_MAX
    assert play.wire.kept < count * 1024
    assert len(play.wire.slots) >= 1


@pytest.mark.parametrize("mss", [1460, 40000, MSS])
def test_segments_sent_together_are_as_those_sent_one_by_one(mss: int) -> None:
    together, alone = (Play(mss=mss, scale=7, window=1 << 14).open() for _ in range(2))
    taps: list[list[bytes]] = [[], []]
    segment = together.tcp.segment
    assert together.tcp.whole(9) == 9 and together.tcp.whole(100) == (1 << 21) // segment
    for number, play in enumerate((together, alone)):
        play.wire.tap = taps[number].append
    data = random.Random(1).randbytes(5 * segment)
    together.send_whole(data)
    for at in range(0, len(data), segment):
        alone.send(data[at : at + segment])
    assert taps[0] == taps[1] and len(taps[0]) == 5
    assert together.wire.kept == alone.wire.kept
    assert together.tcp.deadline == alone.tcp.deadline < inf
    sent = together.frames()
    assert b"".join(bytes(each.payload) for each in sent) == data
    assert sent == alone.frames()
    machine_invariants(together.tcp)
    together.guest(ack=together.ack + 2 * segment)
    assert together.tcp.whole(100) == ((1 << 21) - 3 * segment) // segment
    together.guest(ack=together.ack + 5 * segment)
    assert together.wire.kept == 0 and together.tcp.deadline is inf


def test_no_more_segments_together_than_there_is_room_for() -> None:
    play = Play(window=65535, scale=None).open()
    assert play.tcp.whole(7) == 1
    play.send(b"x" * 100)
    assert play.tcp.whole(7) == 0
    play = Play(mss=64, scale=14, window=65535).open()
    play.wire.kept = play.wire.memory
    assert play.tcp.whole(7) == 0
    play.wire.kept = 0
    for _ in range(tcp.KEPT_MAX - 2):
        play.send(b"x")
    assert play.tcp.whole(7) == 2


def test_a_new_way_to_the_guest_is_tried_at_once() -> None:
    play = Play().open()
    play.send(b"x" * (SMALL + 1))
    play.frames()
    for _ in range(6):
        play.pass_time(100)
        play.tcp.again(1 << 20)
        play.frames()
    play.tcp.nudge()
    assert play.tcp.deadline == play.wire.now
    assert play.pass_time(0) & ROOM


# -- whatever comes


def _fuzz(rounds: int, seed: int) -> int:
    """Random and nearly right segments against the invariants. Returns how many segments."""
    rng = random.Random(seed)
    count = 0
    for _ in range(rounds):
        play = Play(scale=rng.choice([None, 0, 7, 14]), mss=rng.choice([1, 536, 1460, MSS]))
        kind = rng.random()
        if kind < 0.1:
            play.tcp.call()
        elif kind < 0.2:
            play.tcp.called(play.seq, play.mss, play.scale)
        else:
            play.open()
        upstream = 0
        for _ in range(rng.randrange(1, 60)):
            count += 1
            machine = play.tcp
            before = machine.state
            near = [0, 1, -1, 3, 1000, 65535, 1 << 20, 1 << 30, 1 << 31, -(1 << 20)]
            seq = (machine.rcv_nxt + rng.choice(near) * rng.choice([0, 0, 0, 1])) & M
            ack = rng.choice([machine.snd_una, machine.snd_nxt, machine.snd_nxt])
            ack = (ack + rng.choice(near) * rng.choice([0, 0, 0, 1])) & M
            flags = rng.choice([ACK] * 12 + [FIN | ACK, RST, SYN, SYN | ACK, 0, FIN, 63, 255])
            payload = bytes(rng.choice([0, 0, 1, 10, 1460, 40000]))
            had = machine.rcv_nxt
            queued = len(play.wire.out)
            early = bool(machine._early)
            bits = play.guest(flags, payload, seq=seq, ack=ack, window=rng.choice(
                [0, 1, 512, 65535]))  # fmt: skip
            if flags & RST:
                assert len(play.wire.out) == queued, "a RST was answered"
            if before == DEAD:
                assert not bits and len(play.wire.out) == queued
            got = (machine.rcv_nxt - had) & M
            assert got <= len(payload) + 1 or before == CALLING or early
            if bits & ROOM:
                machine.blocked = False
            if machine.resend is not None:
                machine.again(rng.choice([1, 1 << 20]))
            if machine.state == OPEN:
                action = rng.random()
                if action < 0.4:
                    room = machine.room()
                    many = machine.whole(7) if room else 0
                    if many and action < 0.1:
                        play.send_whole(bytes(many * machine.segment))
                        upstream += many * machine.segment
                    elif room:
                        size = rng.randrange(1, min(room, 65535) + 1)
                        play.send(bytes(size))
                        upstream += size
                elif action < 0.6:
                    play.take()
                elif action < 0.65:
                    machine.finish()
                elif action < 0.8 and machine.due:
                    machine.acknowledge()
            if rng.random() < 0.2:
                play.pass_time(rng.choice([0.1, 1, 100]))
            if rng.random() < 0.7:
                play.wire.out.clear()
                play.wire.queued = 0
            machine_invariants(play.tcp)
        play.tcp.die()
        assert (play.wire.kept, play.wire.held) == (0, 0)
    return count


@pytest.mark.parametrize("seed", range(4))
def test_no_sequence_of_segments_breaks_it(seed: int) -> None:
    assert _fuzz(400, seed) > 400


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_sequence_of_millions_of_segments_breaks_it() -> None:
    total = 0
    seed = 1000
    while total < 3_000_000:
        total += _fuzz(2000, seed)
        seed += 1


def _lossy(seed: int, loss: float) -> None:
    """Two of these machines talk over a link that loses; every byte arrives, in order."""
    rng = random.Random(seed)
    sender = Play(window=65535).open()
    data = rng.randbytes(rng.randrange(1, 400_000))
    expected = sender.ack
    received = bytearray()
    at = 0
    finished = acked = False
    for _ in range(100_000):
        if acked:
            break
        machine = sender.tcp
        while at < len(data) and (room := machine.room()):
            many = min(machine.whole(7), (len(data) - at) // machine.segment)
            if many and rng.random() < 0.3:
                size = many * machine.segment
                sender.send_whole(data[at : at + size])
            else:
                size = min(room, rng.randrange(1, 30000), len(data) - at)
                sender.send(data[at : at + size])
            at += size
        if at == len(data):
            machine.finish()
        segments = sender.frames()
        for segment in segments:
            if rng.random() < loss:
                continue
            payload = bytes(segment.payload)
            skip = (expected - segment.seq) & M
            if payload and skip <= len(payload):
                received += payload[skip:]
                expected = (expected + len(payload) - skip) & M
            if segment.flags & FIN and (segment.seq + len(payload)) & M == expected:
                finished = True
                expected = (expected + 1) & M
            if rng.random() >= loss:
                sender.guest(ACK, ack=expected)
                machine.blocked = False
        if not segments:
            sender.pass_time(9)
        if machine.resend is not None:
            machine.again(1 << 20)
        acked = machine.fin_acked
        machine_invariants(machine)
    assert finished and acked and bytes(received) == data


@pytest.mark.parametrize("seed", range(6))
def test_everything_arrives_over_a_link_that_loses(seed: int) -> None:
    _lossy(seed, loss=[0.0, 0.01, 0.1, 0.3, 0.5, 0.2][seed])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_everything_arrives_over_many_links_that_lose() -> None:
    for seed in range(300):
        _lossy(seed, loss=random.Random(seed).random() * 0.5)
