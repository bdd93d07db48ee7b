"""Virtqueues: what an honest driver offers comes through, what a hostile one does is refused."""

from __future__ import annotations

import mmap
import os
import random
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vsockguest import GUEST, USER, Ring

from agent_box.engine.vsock.ring import (
    MAX_SIZE,
    READABLE,
    WRITABLE,
    Memory,
    Queue,
    Region,
    RingError,
)

SIZE = 8
BYTES = 1 << 16


class Bench:
    """A driver's ring, and the device's queue over the same memory."""

    def __init__(self, direction: int = READABLE, size: int = SIZE, base: int = 0) -> None:
        self.memory = memoryview(bytearray(BYTES))
        self.ring = Ring(self.memory, 0x1000, size)
        self.ring.index = self.ring.seen = base
        self.ring.avail16[1] = self.ring.used16[1] = base
        desc, avail, used = self.ring.addresses()
        self.queue = Queue(
            Memory([Region(GUEST, USER, self.memory)]),
            direction,
            size=size,
            desc=desc,
            avail=avail,
            used=used,
            base=base,
        )

    def drain(self) -> list[tuple[int, list[memoryview]]]:
        found = []
        while self.queue.pending():
            found.append(self.queue.take())
        return found


def test_a_chain_of_buffers() -> None:
    bench = Bench()
    bench.memory[0x100:0x105] = b"hello"
    bench.ring.describe(3, GUEST + 0x100, 2, 1, 5)
    bench.ring.describe(5, GUEST + 0x102, 3, 0)
    bench.ring.offer(3)
    head, buffers = bench.queue.take() if bench.queue.pending() else (0, [])
    assert (head, [bytes(b) for b in buffers]) == (3, [b"he", b"llo"])
    assert not bench.queue.pending()
    bench.queue.push(3, 0)
    assert bench.ring.returned() == []  # not before it is shown
    assert bench.queue.publish()
    assert bench.ring.returned() == [(3, 0)]
    assert not bench.queue.publish()


def test_what_is_written_is_in_the_guests_memory() -> None:
    bench = Bench(WRITABLE)
    bench.ring.describe(0, GUEST + 0x200, 4, 2)
    bench.ring.offer(0)
    assert bench.queue.pending() == 1
    _, buffers = bench.queue.take()
    buffers[0][:] = b"data"
    bench.queue.push(0, 4)
    bench.queue.publish()
    assert bytes(bench.memory[0x200:0x204]) == b"data"
    assert bench.ring.returned() == [(0, 4)]


def test_what_was_put_back_comes_again() -> None:
    bench = Bench()
    for i in range(3):
        bench.ring.describe(i, GUEST + i * 16, 16, 0)
        bench.ring.offer(i)
    assert [bench.queue.take()[0] for _ in range(bench.queue.pending())] == [0, 1, 2]
    assert bench.queue.base == 3
    bench.queue.put_back(2)
    assert bench.queue.base == 1
    assert [head for head, _ in bench.drain()] == [1, 2]


@pytest.mark.parametrize("base", [0, 65530, 65535])
def test_indices_wrap(base: int) -> None:
    bench = Bench(base=base)
    for turn in range(30):
        bench.ring.describe(turn % SIZE, GUEST + turn, 1, 0)
        bench.ring.offer(turn % SIZE)
        assert bench.queue.pending() == 1
        assert bench.queue.take()[0] == turn % SIZE
        bench.queue.push(turn % SIZE, turn)
        bench.queue.publish()
        assert bench.ring.returned() == [(turn % SIZE, turn)]
    assert bench.queue.base == (base + 30) & 0xFFFF


def test_a_full_queue_can_be_taken_whole() -> None:
    bench = Bench()
    for i in range(SIZE):
        bench.ring.describe(i, GUEST, 1, 0)
        bench.ring.offer(i)
    assert bench.queue.pending() == SIZE
    assert len(bench.drain()) == SIZE


def test_the_driver_may_not_want_to_be_interrupted() -> None:
    bench = Bench()
    bench.queue.push(0, 0)
    bench.ring.avail16[0] = 1
    assert not bench.queue.publish()
    assert bench.ring.returned() == [(0, 0)]


def test_a_buffer_in_a_second_region() -> None:
    first, second = (memoryview(bytearray(4096)) for _ in range(2))
    memory = Memory([Region(0, USER, first), Region(1 << 32, USER + 4096, second)])
    second[10:12] = b"!!"
    assert bytes(memory.guest((1 << 32) + 10, 2)) == b"!!"
    assert bytes(memory.user(USER + 4096 + 10, 2)) == b"!!"
    for address, length in ((4095, 2), ((1 << 32) - 1, 2), (1 << 33, 1), (0, 0), (2**64 - 1, 9)):
        with pytest.raises(RingError):
            memory.guest(address, length)
        with pytest.raises(RingError):
            memory.user(USER + address, length + 8192)


# index, address, length, flags, next of descriptors; the first is the head
HOSTILE: dict[str, list[tuple[int, int, int, int, int]]] = {
    "a loop of one": [(0, GUEST, 1, 1, 0)],
    "a loop of two": [(0, GUEST, 1, 1, 1), (1, GUEST, 1, 1, 0)],
    "below the memory": [(0, GUEST - 1, 2, 0, 0)],
    "above the memory": [(0, GUEST + BYTES, 1, 0, 0)],
    "over the edge": [(0, GUEST + BYTES - 1, 2, 0, 0)],
    "round the address space": [(0, 2**64 - 1, 2, 0, 0)],
    "the VMM's own address": [(0, USER, 16, 0, 0)],
    "huge": [(0, GUEST, 2**32 - 1, 0, 0)],
    "empty": [(0, GUEST, 0, 0, 0)],
    "empty in the middle": [(0, GUEST, 1, 1, 1), (1, GUEST, 0, 0, 0)],
    "outside in the middle": [(0, GUEST, 1, 1, 1), (1, 0, 1, 0, 0)],
    "next outside of the table": [(0, GUEST, 1, 1, SIZE)],
    "next far outside of the table": [(0, GUEST, 1, 1, 65535)],
    "indirect": [(0, GUEST, 16, 4, 0)],
    "indirect in the middle": [(0, GUEST, 1, 1, 1), (1, GUEST, 16, 4, 0)],
    "writable": [(0, GUEST, 16, 2, 0)],
    "writable in the middle": [(0, GUEST, 1, 1, 1), (1, GUEST, 16, 2, 0)],
    "unknown flags": [(0, GUEST, 16, 0x8000, 0)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_chains(name: str) -> None:
    bench = Bench()
    for row in HOSTILE[name]:
        bench.ring.describe(*row)
    bench.ring.offer(HOSTILE[name][0][0])
    assert bench.queue.pending() == 1
    with pytest.raises(RingError):
        bench.queue.take()


def test_a_head_outside_of_the_table() -> None:
    bench = Bench()
    bench.ring.offer(SIZE)
    assert bench.queue.pending() == 1
    with pytest.raises(RingError):
        bench.queue.take()


@pytest.mark.parametrize("index", [SIZE + 1, 1000, 65535])
def test_an_index_that_runs_ahead(index: int) -> None:
    bench = Bench()
    bench.ring.avail16[1] = index
    with pytest.raises(RingError):
        bench.queue.pending()


@pytest.mark.parametrize(
    ("size", "desc", "avail", "used"),
    [
        (0, 0, 0x800, 0xC00),
        (3, 0, 0x800, 0xC00),
        (MAX_SIZE * 2, 0, 0x8000, 0xC000),
        (8, 8, 0x800, 0xC00),
        (8, 0, 0x801, 0xC00),
        (8, 0, 0x800, 0xC02),
        (8, BYTES - 16, 0x800, 0xC00),
        (8, 0, BYTES - 4, 0xC00),
        (8, 0, 0x800, BYTES - 8),
        (8, -USER, 0x800, 0xC00),
    ],
)
def test_rings_that_cannot_be(size: int, desc: int, avail: int, used: int) -> None:
    memory = Memory([Region(GUEST, USER, memoryview(bytearray(BYTES)))])
    with pytest.raises(RingError):
        Queue(
            memory,
            READABLE,
            size=size,
            desc=USER + desc,
            avail=USER + avail,
            used=USER + used,
            base=0,
        )


PUBLISH = """
import mmap, os, sys
from agent_box.engine.vsock.ring import READABLE, Memory, Queue, Region
memory = memoryview(mmap.mmap(int(sys.argv[1]), 1 << 16))
queue = Queue(
    Memory([Region(0, 0, memory)]), READABLE, size=8, desc=0, avail=1024, used=2048, base=0
)
for _ in range(150_000):
    queue.push(0, 0)
    queue._used_next = 500  # always the same, so that whoever sees another saw half of it
    queue.publish()
"""


def test_a_driver_never_sees_half_an_index() -> None:
    """Another process looks all the time. `struct.pack_into` fails this within a moment."""
    fd = os.memfd_create("ring")
    os.ftruncate(fd, 1 << 16)
    shared = memoryview(mmap.mmap(fd, 1 << 16))
    used = shared[2048:2052].cast("H")
    process = subprocess.Popen(
        [sys.executable, "-B", "-c", PUBLISH, str(fd)], pass_fds=[fd], stderr=subprocess.PIPE
    )
    looks = 0
    while process.poll() is None:
        if used[1] == 500:
            seen = {used[1] for _ in range(5000)}
            assert seen == {500}
            looks += 1
    _, error = process.communicate()
    os.close(fd)
    assert process.returncode == 0, error
    assert looks


def play(seed: int, steps: int) -> int:
    """A driver that writes anything anywhere. Returns how many chains came through.

    Whatever it writes, what comes out lies in its memory, is of the right kind, and is no
    longer than the table; everything else is a `RingError`.
    """
    rnd = random.Random(seed)
    direction = rnd.choice((READABLE, WRITABLE))
    bench = Bench(direction, rnd.choice((1, 2, 8, 128)), rnd.choice((0, 65535, 1234)))
    size = bench.ring.size
    came = 0
    for _ in range(steps):
        for _ in range(rnd.randint(0, 4)):
            index = rnd.randrange(size)
            honest = rnd.random() < 0.7
            address = GUEST + rnd.randrange(BYTES) if honest else rnd.getrandbits(64)
            length = rnd.randrange(1, 5000) if honest else rnd.choice((0, 1, 2**32 - 1))
            flags = direction | rnd.choice((0, 1)) if honest else rnd.getrandbits(16)
            follows = rnd.randrange(size) if honest else rnd.getrandbits(16)
            bench.ring.describe(index, address, length, flags, follows)
        kind = rnd.random()
        if kind < 0.8:
            bench.ring.offer(rnd.randrange(size))
        elif kind < 0.85:
            bench.ring.offer(rnd.getrandbits(16))
        elif kind < 0.9:
            bench.ring.avail16[1] = rnd.getrandbits(16)
        elif kind < 0.95:
            at = rnd.randrange(0x1000, bench.ring.end)
            bench.memory[at] = rnd.getrandbits(8)
        try:
            taken = 0
            while bench.queue.pending() and taken < 2 * size:
                before = bench.queue.base
                head, buffers = bench.queue.take()
                taken += 1
                assert bench.queue.base == (before + 1) & 0xFFFF
                assert 0 <= head < size and 0 < len(buffers) <= size
                assert all(0 < len(b) <= BYTES and not b.readonly for b in buffers)
                came += 1
                if rnd.random() < 0.3:
                    bench.queue.put_back(1)
                    break
                bench.queue.push(head, rnd.randrange(5000))
            bench.queue.publish()
        except RingError:
            # the device drops it; a driver that begins anew gets another
            bench = Bench(direction, size, rnd.getrandbits(16))
    return came


@given(st.integers(0, 2**64))
@settings(max_examples=150, deadline=None)
def test_anything_at_all_in_the_ring(seed: int) -> None:
    play(seed, 60)


def test_the_fuzzer_reaches_both_ends() -> None:
    assert sum(play(seed, 60) for seed in range(20)) > 200


@pytest.mark.slow
def test_anything_at_all_in_the_ring_for_long() -> None:
    for seed in range(20_000):
        play(seed, 60)


@given(st.binary(min_size=16 * SIZE, max_size=16 * SIZE), st.binary(min_size=20, max_size=20))
@settings(max_examples=300, deadline=None)
def test_raw_bytes_in_the_ring(table: bytes, avail: bytes) -> None:
    bench = Bench()
    ring = bench.ring
    bench.memory[ring.desc : ring.desc + len(table)] = table
    bench.memory[ring.avail : ring.avail + len(avail)] = avail
    bench.memory[ring.avail + 2] %= SIZE + 1
    bench.memory[ring.avail + 3] = 0
    try:
        for _, buffers in bench.drain():
            assert sum(map(len, buffers)) <= SIZE * BYTES
    except RingError:
        return
    count = struct.unpack_from("<H", avail, 2)[0] & 0xFF
    assert bench.queue.base == count % (SIZE + 1)
