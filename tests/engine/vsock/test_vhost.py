"""The VMM's messages as a playbook, and anything that a hostile VMM may send."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_box.engine.vsock import vhost
from agent_box.engine.vsock.vhost import (
    Call,
    Discard,
    Enable,
    Kick,
    Link,
    LinkError,
    Map,
    Message,
    Parser,
    Shared,
    Start,
    Stop,
)

CID = 3
ADDRESSES = (0x1000, 0x3000, 0x2000)  # desc, used, avail, as they lie in the message


def wire(request: int, payload: bytes = b"", flags: int = 1) -> bytes:
    return struct.pack("<III", request, flags, len(payload)) + payload


def parse(data: bytes, fds: list[int] | None = None, step: int = 1000) -> list[Message]:
    """All messages in it; descriptors come with the first byte."""
    parser = Parser()
    found = []
    while data:
        count = min(parser.wants(), step)
        message = parser.feed(data[:count], fds or [])
        fds = None
        data = data[count:]
        if message is not None:
            found.append(message)
    return found


class Told:
    """A link that has been told things."""

    def __init__(self) -> None:
        self.link = Link(CID)

    def tell(
        self, request: int, payload: bytes = b"", fds: list[int] | None = None, flags: int = 1
    ) -> tuple[list[vhost.Action], bytes]:
        (message,) = parse(wire(request, payload, flags), fds)
        return self.link.message(message)

    def map(self) -> None:
        self.tell(5, struct.pack("<IIQQQQ", 1, 0, 0x10000, 1 << 20, 0x50000, 0), [9])

    def start(self, queue: int, base: int = 0) -> Start:
        self.tell(8, struct.pack("<II", queue, 128))
        self.tell(10, struct.pack("<II", queue, base))
        self.tell(9, struct.pack("<IIQQQQ", queue, 0, *ADDRESSES, 0))
        actions, _ = self.tell(12, struct.pack("<Q", queue), [30 + queue])
        assert actions[0] == Kick(queue, 30 + queue)
        assert isinstance(actions[1], Start)
        return actions[1]


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


@pytest.mark.parametrize("step", [1, 3, 12, 13, 1000])
def test_messages_in_any_pieces(step: int) -> None:
    data = wire(1) + wire(2, u64(1 << 32)) + wire(3) + wire(8, struct.pack("<II", 0, 128), 9)
    assert [m.request for m in parse(data, step=step)] == [1, 2, 3, 8]


def test_no_byte_of_the_next_message_is_asked_for() -> None:
    parser = Parser()
    assert parser.wants() == 12
    assert parser.feed(wire(2, u64(0))[:12], []) is None
    assert parser.wants() == 8
    assert parser.feed(u64(0)[:3], []) is None
    assert parser.wants() == 5
    assert parser.feed(u64(0)[3:], []) == Message(2, 1, u64(0), [])
    assert parser.wants() == 12


@pytest.mark.parametrize(
    ("data", "fds"),
    [
        (wire(0), []),
        (wire(6, u64(0)), []),  # a dirty log was not offered
        (wire(25, bytes(20)), []),
        (wire(1000), []),
        (wire(1, flags=0), []),
        (wire(1, flags=2), []),
        (wire(1, flags=5), []),
        (wire(1, b"x"), []),
        (wire(2), []),
        (wire(2, bytes(9)), []),
        (struct.pack("<III", 5, 1, 0xFFFFFFFF), []),
        (struct.pack("<III", 24, 1, 269), []),
        (wire(1), [5]),
        (wire(12, u64(0)), [5, 6]),
        (wire(5, bytes(40))[:12], list(range(9))),
    ],
)
def test_what_no_message_begins_like(data: bytes, fds: list[int]) -> None:
    with pytest.raises(LinkError):
        parse(data, fds)


def test_descriptors_of_a_bad_message_are_given_back() -> None:
    parser = Parser()
    with pytest.raises(LinkError):
        parser.feed(wire(1), [7, 8])
    assert parser.take_fds() == [7, 8] and parser.take_fds() == []


def test_what_qemu_asks_first() -> None:
    told = Told()
    assert told.tell(1) == ([], wire(1, u64(1 << 32 | 1 << 30), 5))
    assert told.tell(15) == ([], wire(15, u64(1 << 3 | 1 << 9), 5))
    assert told.tell(16, u64(1 << 3 | 1 << 9)) == ([], b"")
    assert told.tell(17) == ([], wire(17, u64(2), 5))
    assert told.tell(3) == ([], b"")
    assert told.tell(2, u64(1 << 32)) == ([], b"")
    question = struct.pack("<III", 0, 8, 0)
    assert told.tell(24, question + bytes(8)) == ([], wire(24, question + u64(CID), 5))


@pytest.mark.parametrize(("offset", "size"), [(0, 4), (4, 4), (2, 100), (8, 8), (0, 256)])
def test_pieces_of_the_configuration(offset: int, size: int) -> None:
    question = struct.pack("<III", offset, size, 0)
    _, answer = Told().tell(24, question + bytes(size))
    assert answer[24:] == (u64(CID) + bytes(512))[offset : offset + size]


def test_success_is_told_when_it_is_asked_for_and_was_agreed() -> None:
    told = Told()
    assert told.tell(3, flags=9) == ([], b"")
    told.tell(16, u64(1 << 3))
    assert told.tell(3, flags=9) == ([], wire(3, u64(0), 5))
    assert told.tell(3) == ([], b"")
    assert told.tell(1, flags=9)[1] == wire(1, u64(1 << 32 | 1 << 30), 5)  # one answer


def test_memory() -> None:
    told = Told()
    payload = struct.pack("<II", 2, 0)
    payload += struct.pack("<QQQQ", 0, 0x1000, 0x7000, 0)
    payload += struct.pack("<QQQQ", 0x1000, 0x2000, 0x8000, 0x1000)
    actions, _ = told.tell(5, payload, [5, 6])
    regions = (Shared(0, 0x7000, 0x1000, 0, 5), Shared(0x1000, 0x8000, 0x2000, 0x1000, 6))
    assert actions == [Map(regions)]


@pytest.mark.parametrize(
    ("count", "rows", "fds"),
    [
        (0, [], []),
        (1, [(0, 4096, 0, 0)], []),
        (1, [(0, 4096, 0, 0)], [5, 6]),
        (2, [(0, 4096, 0, 0)], [5, 6]),
        (9, [(0, 4096, 0, 0)] * 8, [5] * 8),
        (1, [(0, 0, 0, 0)], [5]),
        (1, [(2**64 - 4096, 8192, 0, 0)], [5]),
        (1, [(0, 8192, 2**64 - 4096, 0)], [5]),
        (1, [(0, 8192, 0, 2**64 - 4096)], [5]),
        (1, [(0, 1 << 50, 0, 0)], [5]),
        (1, [(0, 4096, 0, 1 << 50)], [5]),
        (2, [(0, 8192, 0, 0), (4096, 8192, 0x10000, 0)], [5, 6]),
        (2, [(0, 8192, 0, 0), (0, 8192, 0x10000, 0)], [5, 6]),
    ],
)
def test_memory_that_cannot_be(
    count: int, rows: list[tuple[int, int, int, int]], fds: list[int]
) -> None:
    payload = struct.pack("<II", count, 0) + b"".join(struct.pack("<QQQQ", *r) for r in rows)
    with pytest.raises(LinkError):
        Told().tell(5, payload, fds)


def test_a_queue_starts_stops_and_goes_on() -> None:
    told = Told()
    told.map()
    assert told.start(1, 7) == Start(1, 128, 0x1000, 0x2000, 0x3000, 7, True)
    assert told.tell(11, struct.pack("<II", 1, 0)) == ([Stop(1)], b"")
    assert told.link.stopped(1, 99) == wire(11, struct.pack("<II", 1, 99), 5)
    assert told.start(1, 99).fresh is False
    told.tell(11, struct.pack("<II", 1, 0))
    told.link.stopped(1, 100)
    assert told.start(1, 0).fresh is True  # not where it stopped: another driver
    told.tell(11, struct.pack("<II", 1, 0))
    told.link.stopped(1, None)  # the guest had broken it
    assert told.start(1, 0).fresh is True


def test_bells() -> None:
    told = Told()
    assert told.tell(13, u64(1), [5]) == ([Call(1, 5)], b"")
    assert told.tell(13, u64(1 | 256)) == ([Call(1, None)], b"")
    assert told.tell(14, u64(0), [6]) == ([Discard(6)], b"")
    assert told.tell(14, u64(256)) == ([], b"")
    assert told.tell(18, struct.pack("<II", 0, 1)) == ([Enable(0, True)], b"")
    assert told.tell(18, struct.pack("<II", 1, 0)) == ([Enable(1, False)], b"")
    told.map()
    told.start(0)
    assert told.tell(12, u64(0), [8]) == ([Kick(0, 8)], b"")  # another bell, the same queue


@pytest.mark.parametrize(
    ("request_", "payload", "fds"),
    [
        (2, u64(1 << 27), []),
        (16, u64(1 << 0), []),
        (8, struct.pack("<II", 2, 128), []),
        (9, struct.pack("<IIQQQQ", 2, 0, 0, 0, 0, 0), []),
        (9, struct.pack("<IIQQQQ", 0, 1, 0, 0, 0, 0), []),
        (10, struct.pack("<II", 0, 65536), []),
        (11, struct.pack("<II", 2, 0), []),
        (18, struct.pack("<II", 2, 0), []),
        (12, u64(0), [5]),  # nothing is set up
        (12, u64(256), []),  # nobody rings
        (12, u64(0), []),
        (12, u64(256), [5]),
        (13, u64(2), [5]),
        (13, u64(1 << 63), [5]),
        (24, struct.pack("<III", 0, 9, 0) + bytes(8), []),
        (24, struct.pack("<III", 249, 8, 0) + bytes(8), []),
    ],
)
def test_what_a_vmm_must_not_say(request_: int, payload: bytes, fds: list[int]) -> None:
    told = Told()
    with pytest.raises(LinkError):
        told.tell(request_, payload, fds)


@pytest.mark.parametrize(
    ("request_", "payload"),
    [
        (8, struct.pack("<II", 0, 64)),
        (10, struct.pack("<II", 0, 0)),
        (9, struct.pack("<IIQQQQ", 0, 0, 1, 2, 3, 0)),
    ],
)
def test_a_queue_in_use_is_not_changed(request_: int, payload: bytes) -> None:
    told = Told()
    told.map()
    told.start(0)
    with pytest.raises(LinkError):
        told.tell(request_, payload)


def test_other_memory_under_running_queues() -> None:
    told = Told()
    told.map()
    told.start(1)
    payload = struct.pack("<IIQQQQ", 1, 0, 0, 1 << 20, 0x50000, 0)
    actions, _ = told.tell(5, payload, [9])
    assert isinstance(actions[0], Map) and isinstance(actions[1], Start)
    assert actions[1].queue == 1 and actions[1].fresh is False


def fuzz(seed: int, steps: int) -> int:
    """Any messages in any order; descriptors are numbers. How many were understood.

    Every descriptor that came is in an action, or given back with the error.
    """
    rnd = random.Random(seed)
    link, parser = Link(CID), Parser()
    owned: set[int] = set()
    given = understood = 0
    for _ in range(steps):
        request = rnd.choice([*vhost._SHAPES, *vhost._SHAPES, rnd.getrandbits(8)])
        low, high, most = vhost._SHAPES.get(request, (0, 16, 1))
        honest = rnd.random() < 0.9
        if request == vhost.SET_MEM_TABLE:
            count = rnd.randint(1, 3) if honest else rnd.randrange(20)
            payload = struct.pack("<II", count, 0) + b"".join(
                struct.pack("<QQQQ", i << 20, 1 << 20, i << 20, 0) for i in range(count)
            )
            bells = count
        elif request in (8, 9, 10, 11, 18):
            values = [rnd.choice((0, 1, 1, 128)) for _ in range((low - 8) // 8)]
            payload = struct.pack("<II", rnd.randrange(2 if honest else 9), rnd.choice((0, 128)))
            payload += b"".join(u64(value << 8) for value in values)
            bells = 0
        elif request in (12, 13, 14):
            payload, bells = u64(rnd.randrange(2 if honest else 600)), 1
        else:
            payload, bells = rnd.randbytes(rnd.randint(low, high)), 0
        if not honest:
            payload = payload[: rnd.randrange(len(payload) + 1)]
            bells = rnd.randrange(most + 2)
        fds = list(range(given, given + bells))
        given += bells
        owned |= set(fds)
        data = wire(request, payload, rnd.choice((1, 9)) if honest else rnd.getrandbits(5))
        try:
            while data:
                count = min(parser.wants(), rnd.randint(1, 60))
                message = parser.feed(data[:count], fds)
                fds, data = [], data[count:]
                if message is None:
                    continue
                assert len(message.payload) <= vhost.MAX_PAYLOAD
                try:
                    actions, answer = link.message(message)
                except LinkError:
                    owned -= set(message.fds)
                    raise
                assert len(answer) <= 12 + vhost.MAX_PAYLOAD
                understood += 1
                for action in actions:
                    if isinstance(action, Map):
                        owned -= {region.fd for region in action.regions}
                    elif isinstance(action, (Kick, Discard)):
                        owned.remove(action.fd)
                    elif isinstance(action, Call):
                        owned -= {action.fd}
                    elif isinstance(action, Stop):
                        link.stopped(action.queue, rnd.choice((None, rnd.getrandbits(16))))
                    elif isinstance(action, Start):
                        assert 0 < action.size <= 0xFFFFFFFF and action.base <= 0xFFFF
                assert not owned
        except LinkError:
            owned -= set(parser.take_fds())
            assert not owned
            link, parser = Link(CID), Parser()
    return understood


@given(st.integers(0, 2**64))
@settings(max_examples=100, deadline=None)
def test_any_message_in_any_order(seed: int) -> None:
    fuzz(seed, 100)


def test_the_fuzzer_is_understood() -> None:
    assert sum(fuzz(seed, 100) for seed in range(10)) > 300


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=20))
@settings(deadline=None)
def test_any_bytes(pieces: list[bytes]) -> None:
    parser = Parser()
    try:
        for piece in pieces:
            while piece:
                assert 1 <= parser.wants() <= 12 + vhost.MAX_PAYLOAD
                count = min(parser.wants(), len(piece))
                parser.feed(piece[:count], [])
                piece = piece[count:]
    except LinkError:
        pass


@pytest.mark.slow
def test_any_message_in_any_order_for_long() -> None:
    for seed in range(20_000):
        fuzz(seed, 100)
