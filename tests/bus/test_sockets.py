from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from agent_box.bus import sockets


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    one, two = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    one.bind("inproc://pair")
    two.connect("inproc://pair")
    yield one, two
    context.destroy(linger=0)


def test_a_message_comes_out_as_it_went_in(pair: tuple[zmq.Socket[bytes], ...]) -> None:
    one, two = pair
    assert not sockets.readable(two) and sockets.writable(one)
    sockets.send(one, b"AB1", b"header", b"")
    sockets.send(one, b"second")
    assert sockets.readable(two)
    assert sockets.receive(two) == [b"AB1", b"header", b""]
    assert sockets.receive(two) == [b"second"]
    with pytest.raises(zmq.Again):
        sockets.receive(two)


def test_frames_that_no_message_has_are_dropped_and_the_next_message_is_whole(
    pair: tuple[zmq.Socket[bytes], ...],
) -> None:
    one, two = pair
    sockets.send(one, *[b"%d" % n for n in range(100)])
    sockets.send(one, b"next")
    assert sockets.receive(two) == [b"%d" % n for n in range(sockets.FRAMES_MAX)]
    assert sockets.receive(two) == [b"next"]


def test_a_full_queue_is_told_and_nothing_is_sent_in_part() -> None:
    with zmq.Context() as context:
        one, two = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        one.sndhwm = two.rcvhwm = 2
        one.bind("inproc://pair")
        two.connect("inproc://pair")
        sent = 0
        with pytest.raises(zmq.Again):
            for _ in range(100):
                sockets.send(one, b"a", b"b")
                sent += 1
        assert not sockets.writable(one)
        got = 0
        while sockets.readable(two):
            assert sockets.receive(two) == [b"a", b"b"]
            got += 1
        assert got == sent
        one.close(0)
        two.close(0)


def test_waiting_a_moment_ends(pair: tuple[zmq.Socket[bytes], ...]) -> None:
    _, two = pair
    two.rcvtimeo = 20
    with pytest.raises(zmq.Again):
        sockets.receive(two, 0)
