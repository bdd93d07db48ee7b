"""Events: numbers, what is kept until it is seen, rates, and what is watched."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_box.channel.events import Claim, Claims
from agent_box.guest import claims, events
from agent_box.guest.claims import Rate, Said
from agent_box.guest.events import Events, Watch
from agent_box.guest.loop import Loop
from agent_box.guest.wire import FrameError, pack


class Host:
    """The host's end of one stream, with the channel's own core."""

    def __init__(self, loop: Loop, made: Events) -> None:
        self.loop = loop
        self.sock, theirs = socket.socketpair()
        for sock in (self.sock, theirs):
            sock.setblocking(False)
        made.serve(theirs)
        self.core = Claims(time.monotonic())
        self.greeted = False

    def turn(self) -> list[Claim]:
        timer = self.loop.later(0.01, lambda: None)
        self.loop.turn()
        timer.cancel()
        try:
            found = self.core.feed(self.sock.recv(65536), time.monotonic())
        except BlockingIOError:
            return []
        if not self.greeted:
            self.sock.send(self.core.greet())
            self.greeted = True
        return found

    def events(self, count: int) -> list[Claim]:
        found: list[Claim] = []
        until = time.monotonic() + 20
        while len(found) < count:
            assert time.monotonic() < until
            found += self.turn()
        return found


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_what_was_not_seen_is_sent_again_with_its_number(loop: Loop) -> None:
    made = Events(loop)
    made.phase("one")
    first = Host(loop, made)
    assert [c.facts["phase"] for c in first.events(1)] == ["one"]
    made.phase("two")
    assert [c.number for c in first.events(1)] == [2]
    first.sock.send(first.core.seen(1))
    first.turn()
    second = Host(loop, made)
    assert [(c.number, c.facts["phase"]) for c in second.events(1)] == [(2, "two")]
    assert second.core.run == first.core.run
    first.sock.close()
    second.sock.close()


def test_too_many_are_dropped_and_counted(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Events(loop)
    for _ in range(claims.BURST + 7):
        made.phase("x")
    monkeypatch.setattr(claims, "EVERY_S", 1e-9)
    made.phase("last")
    host = Host(loop, made)
    last = host.events(claims.BURST + 1)[-1]
    assert last.facts["phase"] == "last" and last.facts["dropped"] == 7
    host.sock.close()


def test_a_bad_frame_ends_its_stream_alone(loop: Loop) -> None:
    made = Events(loop)
    host = Host(loop, made)
    host.turn()
    host.sock.send(pack(Said.SEEN, 1, {"number": 9}))
    host.turn()
    assert host.sock.recv(10) == b""
    made.phase("fine")
    other = Host(loop, made)
    assert other.events(1)
    other.sock.close()
    host.sock.close()


def test_a_process_that_the_kernel_ends_is_told(loop: Loop, tmp_path: Path) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    made = Events(loop)
    made.tell = lambda kind, **facts: told.append((kind, facts))  # type: ignore[method-assign]
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    watch = Watch(loop, made, str(tmp_path / "none"), str(pipe))
    line = b"3,880,5500,-;Out of memory: Killed process 71 (python3) total-vm:1kB\n"
    # the kernel gives one record to each read; the second is what root of the guest wrote
    for record in (line, b"12" + line[1:], b"6,881,5501,-;something else\n"):
        writer = os.open(pipe, os.O_WRONLY)
        os.write(writer, record)
        watch._kernel(0)
        os.close(writer)
    loop.watch(watch._log, 0, watch._kernel)
    os.close(watch._log)
    assert told == [("guest-oom", {"process": "python3", "pid": 71})]


def test_a_disk_is_told_once_until_it_has_room_again(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    made = Events(loop)
    made.tell = lambda kind, **facts: told.append(facts["used_percent"])  # type: ignore[method-assign]
    watch = Watch(loop, made, str(tmp_path), str(tmp_path / "none"))
    told.clear()

    class Stat:
        f_blocks = 100
        f_bavail = 100

    monkeypatch.setattr(events.os, "statvfs", lambda _: Stat)
    for free in (50, 9, 5, 12, 9, 20, 3):
        Stat.f_bavail = free
        watch.look()
    assert told == [91, 97]


HELLO = pack(Said.HELLO, 0, {"versions": [1], "run": "0" * 16})
FACTS = {"phase": "x", "uptime_ms": 1, "dropped": 0}


def event(seq: int, number: Any, kind: Any = "guest-phase", facts: Any = FACTS) -> bytes:
    return pack(Said.EVENT, seq, {"number": number, "kind": kind, "facts": facts})


@pytest.mark.parametrize(
    "lie",
    [
        b"\xff\xff\xff\xff",
        pack(Said.HELLO, 0, {"versions": [2], "run": "0" * 16}),
        pack(Said.HELLO, 0, {"versions": [1], "run": "x" * 16}),
        event(0, 1),
        HELLO + HELLO,
        HELLO + event(2, 1),
        HELLO + event(1, 1) + event(2, 3),
        HELLO + event(1, 1) + event(2, 1),
        HELLO + event(1, 0),
        HELLO + event(1, True),
        HELLO + event(1, 1, "forgery-refused"),
        HELLO + event(1, 1, ["guest-phase"]),
        HELLO + event(1, 1, facts={**FACTS, "more": 1}),
        HELLO + event(1, 1, facts={**FACTS, "dropped": -1}),
        HELLO + event(1, 1, facts={**FACTS, "phase": "x" * 201}),
        HELLO + event(1, 1, facts={**FACTS, "uptime_ms": "1"}),
        HELLO + b"".join(event(n, n) for n in range(1, 2000)),
    ],
)
def test_what_no_box_guest_tells(lie: bytes) -> None:
    with pytest.raises(FrameError):
        Claims(0.0).feed(lie, 0.0)


def test_a_claim_is_made_printable() -> None:
    found = Claims(0.0).feed(HELLO + event(1, 4, facts={**FACTS, "phase": "a\x1b[2J"}), 0.0)
    assert found == [Claim(4, "guest-phase", {**FACTS, "phase": "a?[2J"})]


def test_a_rate_fills_again() -> None:
    rate = Rate(0.0, 2)
    assert [rate.take(0.0) for _ in range(3)] == [True, True, False]
    assert rate.take(claims.EVERY_S) and not rate.take(claims.EVERY_S)
