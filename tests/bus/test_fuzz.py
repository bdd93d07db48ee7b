"""Envelopes made to break things, sent by somebody with a right key.

Whatever is sent: an answer of the closed set or none, never a crash, never a traceback, and an
honest caller is served meanwhile. By hypothesis in a few seconds; for hours by

    python -m pytest tests/bus/test_fuzz.py --corpus-minutes 240
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.place import Place
from support.toy import METHODS, Text

from agent_box.bus import keys, wire

CANARY = b"canary-b7e1"
HOUSE = os.fsencode(Path(wire.__file__).parents[2])  # where our code lies on this host
FORBIDDEN = (b"Traceback", b"Error(", b".py", b"site-packages", b"msgspec", b"/home", HOUSE)
EXPECTED = (
    "dropped what is no message",
    "denied",
    "a call failed RuntimeError",
    # after millions of messages
    "a refusal is not on record Refusal('too many calls of the last two days are on record')",
)


class Attacker:
    """A connection with a right key that is made anew when it was cut."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.context = zmq.Context()
        self.honest = place.client()
        self.epoch = bytes(self.honest.call("hello", _empty()).epoch)  # type: ignore[attr-defined]
        self.socket = self._connect()
        self.answers = 0

    def _connect(self) -> zmq.Socket:
        made = self.context.socket(zmq.DEALER)
        made.linger = 0
        pair = keys.load_secret(self.place.keys / "operator")
        made.curve_serverkey = self.place.server_key
        made.curve_publickey = pair.public
        made.curve_secretkey = pair.reveal()
        made.sndtimeo = 20_000
        made.connect(f"ipc://{self.place.sock}")
        return made

    def send(self, frames: list[bytes]) -> None:
        if frames:
            self.socket.send_multipart(frames)

    def check(self) -> None:
        """What came back is an answer, and others are served."""
        assert self.honest.call("echo", Text(text="honest")) == Text(text="honest")
        assert self.place.process is not None and self.place.process.poll() is None
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            header, body = wire.decode_from_callee(frames)  # raises on anything else
            self.answers += 1
            for word in FORBIDDEN:
                assert word not in body, body
            if isinstance(header, wire.Failure):
                wire.to_refusal(body)

    def close(self) -> None:
        self.honest.close()
        self.context.destroy(linger=0)


def _empty() -> Any:
    from agent_box.bus.schema import Empty

    return Empty()


@pytest.fixture(scope="module")
def attacker() -> Iterator[Attacker]:
    place = Place()
    place.spawn()
    made = Attacker(place)
    try:
        yield made
        made.check()
        only_the_expected_is_logged(place.log)
    finally:
        made.close()
        place.close()


def only_the_expected_is_logged(log: Path) -> None:
    text = log.read_text()
    for line in text.splitlines():
        assert line.startswith(EXPECTED), line
    assert CANARY.decode() not in text


def call(epoch: bytes, **change: Any) -> dict[str, Any]:
    return {
        "op": "call",
        "version": 1,
        "id": 7,
        "epoch": epoch,
        "method": "echo",
        "deadline": wire.now_ns() + 5 * wire.NS,
        "request_id": None,
        **change,
    }


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8))
    | st.just(CANARY)
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)
bodies = (
    st.binary(max_size=200)
    | trees.map(lambda t: bytes(msgpack.packb(t)))
    | st.sampled_from(
        [
            b"",
            b"\x80",
            b"\xc1",
            b"\x81\xa4text\xa1x",
            b"\x82\xa4text\xa1x\xa4text\xa1y",
            b"\x82\xa4text\xa1x\xa5extra\x01",
            b"\x81\xa1n\x05",
            b"\x81\xa1n\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
            b"\x81\xa1n\xc7\x00\x05",
            b"\x81\xa1n" * 5000,
            b"\x91" * 50_000,
            b"\xdd\xff\xff\xff\xff",
            b"\x81\xa4text\xdb\xff\xff\xff\xff",
            bytes(msgpack.packb({"text": "x" * 300_000})),
            bytes(msgpack.packb({"n": math.inf})),
        ]
    )
)
OPS = ("greet", "call", "open", "cancel", "item", "credit", "end", "welcome", "reply", "stale", "")
fields = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(OPS) | scalars,
        "version": st.sampled_from([1, 1, 1, 2]) | scalars,
        "id": st.integers(0, 9) | scalars,
        "method": st.sampled_from(["hello", "ping", "outcome", "confinement", *METHODS]) | scalars,
        "deadline": st.just(0) | scalars,
        "request_id": st.binary(min_size=16, max_size=16) | scalars,
        "credit": st.integers(0, 70_000) | scalars,
        "n": st.integers(0, 70_000) | scalars,
        "epoch": scalars,
        "extra": scalars,
    },
)


@st.composite
def messages(draw: st.DrawFn, epoch: bytes) -> list[bytes]:
    shape = draw(st.integers(0, 9))
    if shape == 0:
        return draw(st.lists(st.binary(max_size=100) | st.just(b"AB1"), max_size=6))
    header = call(epoch) | draw(fields)
    for gone in draw(st.sets(st.sampled_from(sorted(header)), max_size=2)) if shape < 6 else ():
        del header[gone]
    if header.get("op") != "call" and draw(st.booleans()):
        wanted = {
            "greet": ("op", "version", "id"),
            "open": ("op", "version", "id", "epoch", "method", "deadline", "credit"),
            "credit": ("op", "version", "id", "n"),
        }.get(str(header.get("op")), ("op", "version", "id"))
        header = {k: v for k, v in header.items() if k in wanted}
    packed = bytes(msgpack.packb(header))
    if shape == 1:
        packed = packed[: draw(st.integers(0, len(packed)))]
    elif shape == 2:
        packed = bytes([packed[0] + 1]) + packed[1:] + b"\xa2id\x01"  # "id" twice
    return [b"AB1", packed, draw(bodies)]


@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_no_envelope_breaks_the_service(attacker: Attacker, data: st.DataObject) -> None:
    for frames in data.draw(st.lists(messages(attacker.epoch), min_size=1, max_size=6)):
        attacker.send(frames)
    attacker.check()


def test_an_answer_did_come_back(attacker: Attacker) -> None:
    """That the attacker is connected at all, so that the others mean something."""
    before = attacker.answers
    attacker.send([b"AB1", msgpack.packb(call(attacker.epoch)), b"\x81\xa4text\xa1x"])
    assert attacker.socket.poll(20_000)
    attacker.check()
    assert attacker.answers > before


@pytest.mark.parametrize("place_of_it", [0, 1, 2], ids=["magic", "header", "body"])
def test_what_is_oversize_loses_its_connection_only(attacker: Attacker, place_of_it: int) -> None:
    frames = [b"AB1", bytes(msgpack.packb(call(attacker.epoch))), b"\x80"]
    frames[place_of_it] = bytes(wire.FRAME_MAX + 100)
    with contextlib.suppress(zmq.Again):
        attacker.send(frames)
    attacker.check()
    test_an_answer_did_come_back(attacker)


class Mutator:
    """Changes good messages at random, a little or beyond recognition."""

    def __init__(self, epoch: bytes, seed: int) -> None:
        self.random = random.Random(seed)
        self.epoch = epoch
        good = {
            "echo": {"text": "x"},
            "blob": {"data": CANARY},
            "rich": {
                "name": "n",
                "data": b"d",
                "ratio": 0.5,
                "flag": True,
                "maybe": None,
                "names": ["a", "b"],
                "counts": {"k": 1},
                "inner": [{"n": 1}, {"n": 2}],
            },
            "later": {"n": 1},
            "put": {"text": "y"},
            "add": {"n": 1},
            "add_later": {"n": 1},
            "refuse": {"text": "no"},
            "outcome": {"request_id": bytes(16)},
            "hello": {},
            "ping": {},
            "confinement": {},
            "secret": {},
        }
        self.corpus: list[tuple[dict[str, Any], bytes]] = []
        for method, body in good.items():
            id = bytes(16) if method in ("add", "add_later", "refuse") else None
            header = call(epoch, method=method, request_id=id)
            self.corpus.append((header, bytes(msgpack.packb(body))))
        small = {"version": 1, "id": 7}
        for method in ("count", "sum", "mirror", "hang"):
            header = call(epoch, op="open", method=method, credit=4)
            del header["request_id"]
            self.corpus.append(
                (header, bytes(msgpack.packb({"n": 9} if method == "count" else {})))
            )
        for op in ("greet", "cancel", "item", "end"):
            self.corpus.append(({"op": op, **small}, b"\x81\xa1n\x01"))
        self.corpus.append(({"op": "credit", **small, "n": 3}, b"\x80"))

    def message(self) -> list[bytes]:
        chance = self.random
        header, body = chance.choice(self.corpus)
        header = dict(header)
        if "deadline" in header:
            header["deadline"] = wire.now_ns() + chance.choice((-1, 1, 3)) * wire.NS
        if header.get("request_id") is not None and chance.random() < 0.7:
            header["request_id"] = chance.randbytes(16)
        header["id"] = chance.randrange(20)
        packed = bytes(msgpack.packb(header))
        frames = [b"AB1", packed, body]
        for _ in range(chance.choice((0, 1, 1, 2, 5))):
            n = chance.choice((1, 1, 2, 2, 2, 0))
            frames[n] = self.mutate(frames[n])
        if chance.random() < 0.03:
            chance.shuffle(frames)
        if chance.random() < 0.03:
            frames = frames[: chance.randrange(4)] + [body] * chance.randrange(3)
        return frames

    def mutate(self, data: bytes) -> bytes:
        chance = self.random
        made = bytearray(data)
        at = chance.randrange(len(made) + 1)
        kind = chance.randrange(7)
        if kind == 0 and made:
            made[at % len(made)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del made[at:]
        elif kind == 2:
            made[at:at] = chance.randbytes(chance.randrange(1, 6))
        elif kind == 3:
            made[at:at] = chance.choice(
                (b"\xc1", b"\x91" * 40, b"\xc7\x00\x05", b"\xd4\x05x", b"\xcb\x7f\xf8" + bytes(6))
            )
        elif kind == 4 and made:
            made[at % len(made)] = chance.choice((0x80, 0x90, 0xC0, 0xDB, 0xDD, 0xDF, 0xFF))
        elif kind == 5:
            _, other = chance.choice(self.corpus)
            made[at:] = other[chance.randrange(len(other)) :]
        else:
            made += made[at:]
        return bytes(made)


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


@pytest.mark.timeout(0)  # it ends by its own clock
def test_the_corpus(attacker: Attacker, request: pytest.FixtureRequest) -> None:
    """A few seconds of the corpus mode, or as many minutes as asked for."""
    run_corpus(attacker, request.config.getoption("--corpus-minutes", default=0.0) or 0.1)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_corpus_for_ten_minutes(attacker: Attacker) -> None:
    run_corpus(attacker, 10)


def run_corpus(attacker: Attacker, minutes: float) -> None:
    seed = random.randrange(1 << 32)
    mutator = Mutator(attacker.epoch, seed)
    assert attacker.place.process is not None
    pid = attacker.place.process.pid
    until = time.monotonic() + minutes * 60
    sent, early = 0, 0
    try:
        while time.monotonic() < until:
            for _ in range(100):
                attacker.send(mutator.message())
            sent += 100
            attacker.check()
            if sent == 2_000:
                early = resident_kib(pid)
    except BaseException:
        print(f"seed {seed}, after {sent} messages")
        raise
    print(f"corpus: seed {seed}, {sent} messages, {attacker.answers} answers")
    if early:
        assert resident_kib(pid) < early + 64 * 1024
