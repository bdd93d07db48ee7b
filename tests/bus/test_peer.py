"""The caller's half without sockets: against a network and a service that do their worst."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.toy import CONTRACT, Number, Text

from agent_box.bus import base, peer, wire
from agent_box.bus.errors import Code, Reason, Refusal
from agent_box.bus.peer import Flow, Line, Peer, Pending
from agent_box.bus.schema import Empty, Kind, Method, Stream

METHODS: dict[str, Any] = {m.name: m for m in (*CONTRACT.methods, *base.METHODS)}
FAR = 1 << 60
NAMES = {Kind.READ: "echo", Kind.IDEMPOTENT: "put", Kind.ONCE: "add"}


class Service:
    """A service as the protocol has it: durable effects, and an epoch for each life."""

    def __init__(self) -> None:
        self.life = 0
        self.effects: Counter[bytes] = Counter()
        self.outcomes: dict[bytes, bytes] = {}
        self.draining = False

    @property
    def epoch(self) -> bytes:
        return self.life.to_bytes(16, "big")

    def restart(self) -> None:
        self.life += 1
        self.draining = False

    def answer(self, frames: list[bytes], crash: bool = False) -> list[bytes] | None:
        """The reply to one request; with `crash` the effect happens and no reply comes."""
        header, body = wire.decode_from_caller(frames)
        epoch = self.epoch
        if isinstance(header, wire.Greet):
            return pack(wire.Welcome(version=1, id=header.id, epoch=epoch))
        if not isinstance(header, wire.Call):
            return None
        if header.epoch != epoch:
            return pack(wire.Stale(version=1, id=header.id, epoch=epoch))
        if self.draining and header.method != "outcome":
            return pack(wire.Away(version=1, id=header.id, epoch=epoch))
        reply = wire.Reply(version=1, id=header.id, epoch=epoch)
        if header.method == "outcome":
            id = wire.decode_body(body, base.Ask).request_id
            known = self.outcomes.get(id)
            told = base.Outcome(state="done" if known else "absent", reply=known, problem=None)
            return pack(reply, wire.encode_body(told))
        if header.request_id is not None:
            if header.request_id not in self.outcomes:
                self.effects[header.request_id] += 1
                self.outcomes[header.request_id] = wire.encode_body(
                    Number(n=wire.decode_body(body, Number).n)
                )
            result = self.outcomes[header.request_id]
        elif header.method == "put":
            result = wire.encode_body(Number(n=len(wire.decode_body(body, Text).text)))
        else:
            result = body
        return None if crash else pack(reply, result)


def pack(header: wire.Header, body: bytes = b"\x80") -> list[bytes]:
    return [wire.MAGIC, wire.encode_header(header), body]


class Network(RuleBasedStateMachine):
    """Every call ends exactly once, with its own answer, and `ONCE` happens at most once."""

    def __init__(self) -> None:
        super().__init__()
        self.peer = Peer("engine")
        self.service = Service()
        self.up: deque[list[bytes]] = deque()
        self.down: deque[list[bytes]] = deque()
        self.late: list[list[bytes]] = []  # of earlier connections
        self.events: deque[str] = deque()  # of the monitor, not yet seen by the peer
        self.linked = False
        self.full = False
        self.number = 0
        self.ends: Counter[int] = Counter()
        self.calls: list[tuple[int, Pending, bytes | None]] = []

    def send(self, frames: list[bytes]) -> bool:
        if self.full or not self.linked:
            return False
        self.up.append(frames)
        return True

    def pump(self) -> None:
        self.peer.pump(self.send)

    @rule(kind=st.sampled_from(list(Kind)))
    def call(self, kind: Kind) -> None:
        self.number += 1
        number = self.number
        method = METHODS[NAMES[kind]]
        request: Any = Number(n=number) if kind is Kind.ONCE else Text(text="x" * number)
        id = number.to_bytes(16, "big") if kind is Kind.ONCE else None

        def finish(_pending: Pending) -> None:
            self.ends[number] += 1

        pending = self.peer.submit(method, wire.encode_body(request), FAR, id, finish)
        self.calls.append((number, pending, id))
        self.pump()

    @precondition(lambda self: not self.linked)
    @rule()
    def connect(self) -> None:
        self.linked = True
        self.events.append("up")

    @precondition(lambda self: self.linked)
    @rule(restart=st.booleans(), again=st.booleans())
    def break_(self, restart: bool, again: bool) -> None:
        """The line breaks; perhaps it is there again before the peer has heard of it."""
        self.late += self.down
        self.up.clear()
        self.down.clear()
        self.linked = False
        self.events.append("down")
        if restart:
            self.service.restart()
        if again:
            self.connect()

    @precondition(lambda self: self.linked)
    @rule()
    def restart_unseen(self) -> None:
        """The process is another one, and the line did not break (as far as anyone saw)."""
        self.service.restart()

    @precondition(lambda self: self.events)
    @rule()
    def hear(self) -> None:
        {"up": self.peer.connected, "down": self.peer.disconnected}[self.events.popleft()]()
        self.pump()

    @precondition(lambda self: self.up)
    @rule(crash=st.booleans(), twice=st.booleans())
    def serve(self, crash: bool, twice: bool) -> None:
        reply = self.service.answer(self.up.popleft(), crash)
        if crash:
            self.break_(True, False)
        elif reply is not None:
            self.down += [reply] * (1 + twice)

    @precondition(lambda self: self.down)
    @rule()
    def deliver(self) -> None:
        self.peer.received(self.down.popleft())
        self.pump()

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def deliver_late(self, data: st.DataObject) -> None:
        self.peer.received(data.draw(st.sampled_from(self.late)))
        self.pump()

    @rule()
    def drain(self) -> None:
        self.service.draining = True

    @rule(full=st.booleans())
    def fill(self, full: bool) -> None:
        self.full = full
        self.pump()

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), how=st.sampled_from(["expire", "abandon"]))
    def give_up(self, data: st.DataObject, how: str) -> None:
        number, pending, id = data.draw(st.sampled_from(self.calls))
        was_done = pending.done
        getattr(self.peer, how)(pending)
        self.pump()
        assert pending.done
        if not was_done and how == "expire" and id is not None:
            assert pending.error is not None
            if pending.error.code is Code.UNAVAILABLE and not self.up:
                assert self.service.effects[id] == 0, "told that nothing has happened"
        assert self.ends[number] == 1

    @invariant()
    def once_is_at_most_once(self) -> None:
        assert all(count == 1 for count in self.service.effects.values())

    @invariant()
    def an_end_is_an_end(self) -> None:
        for number, pending, id in self.calls:
            assert self.ends[number] == pending.done
            if pending.result is not None:
                if isinstance(pending.result, Text):
                    assert len(pending.result.text) == number
                else:
                    assert pending.result == Number(n=number)
                if id is not None:
                    assert self.service.effects[id] == 1

    def teardown(self) -> None:
        """In the end the network behaves, and then nothing may be left over."""
        self.full = False
        if self.service.draining:
            if self.linked:
                self.break_(True, False)
            self.service.restart()
        if not self.linked:
            self.connect()
        self.pump()
        for _ in range(10_000):
            if self.events:
                self.hear()
            elif self.down:
                self.deliver()
            elif self.up:
                self.serve(False, False)
            else:
                break
        assert self.peer.line is Line.UP and self.peer.idle()
        for number, pending, _ in self.calls:
            assert pending.done and self.ends[number] == 1
            assert pending.result is not None or pending.error is not None
        self.an_end_is_an_end()


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=150, stateful_step_count=60)


@pytest.mark.slow
@pytest.mark.timeout(0)  # about five minutes; it ends by itself
def test_the_network_for_long() -> None:
    run_state_machine_as_test(
        Network, settings=settings(max_examples=5_000, stateful_step_count=100)
    )


# Single rules, spelled out.


def up(life: int = 0) -> tuple[Peer, list[list[bytes]]]:
    """A peer that is connected, and the list in which its messages arrive."""
    made, sent = Peer("engine"), list[list[bytes]]()
    made.connected()
    made.pump(lambda f: sent.append(f) is None)
    header, _ = wire.decode_from_caller(sent.pop())
    made.received(pack(wire.Welcome(version=1, id=header.id, epoch=bytes(15) + bytes([life]))))
    assert made.line is Line.UP
    return made, sent


def submit(made: Peer, name: str, request: Any, sent: list[list[bytes]]) -> tuple[Pending, Any]:
    method: Method = METHODS[name]
    id = bytes(16) if method.kind is Kind.ONCE else None
    pending = made.submit(method, wire.encode_body(request), FAR, id)
    made.pump(lambda f: sent.append(f) is None)
    return pending, wire.decode_from_caller(sent[-1])[0]


def test_a_reply_of_another_epoch_is_a_loss() -> None:
    made, sent = up()
    pending, header = submit(made, "echo", Text(text="x"), sent)
    reply = wire.Reply(version=1, id=header.id, epoch=b"other epoch 1234")
    made.received(pack(reply, wire.encode_body(Text(text="x"))))
    assert not pending.done and pending.lost
    pending, header = submit(made, "add", Number(n=1), sent)
    reply = wire.Reply(version=1, id=header.id, epoch=b"other epoch 1234")
    made.received(pack(reply, wire.encode_body(Number(n=1))))
    assert not pending.done and pending.asking


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (base.Outcome(state="unknown", reply=None, problem=None), Reason.UNKNOWN_OUTCOME),
        (base.Outcome(state="done", reply=None, problem=None), Reason.UNKNOWN_OUTCOME),
        (base.Outcome(state="whatever", reply=None, problem=None), Reason.UNKNOWN_OUTCOME),
        (base.Outcome(state="done", reply=b"\xc1", problem=None), Reason.INTERNAL),
        (base.Outcome(state="refused", reply=None, problem=b"\xc1"), Reason.INTERNAL),
        (
            base.Outcome(
                state="refused",
                reply=None,
                problem=wire.encode_refusal(Refusal(Reason.EXISTS, "there")),
            ),
            Reason.EXISTS,
        ),
    ],
    ids=range(6),
)
def test_what_an_outcome_means(outcome: base.Outcome, reason: Reason) -> None:
    made, sent = up()
    pending, _ = submit(made, "add", Number(n=1), sent)
    made.disconnected()
    made.connected()
    made.pump(lambda f: sent.append(f) is None)
    greet, _ = wire.decode_from_caller(sent[-1])
    made.received(pack(wire.Welcome(version=1, id=greet.id, epoch=bytes(16))))
    made.pump(lambda f: sent.append(f) is None)
    header, body = wire.decode_from_caller(sent[-1])
    assert isinstance(header, wire.Call) and header.method == "outcome"
    assert wire.decode_body(body, base.Ask).request_id == bytes(16)
    reply = wire.Reply(version=1, id=header.id, epoch=bytes(16))
    made.received(pack(reply, wire.encode_body(outcome)))
    assert pending.error is not None and pending.error.reason is reason


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", wire.encode_body(Number(n=1)), b"\x81\xa4text\x01"]
)
@pytest.mark.parametrize("kind", [wire.Reply, wire.Failure])
def test_an_answer_that_is_none_is_internal(kind: Any, body: bytes) -> None:
    made, sent = up()
    pending, header = submit(made, "echo", Text(text="x"), sent)
    made.received(pack(kind(version=1, id=header.id, epoch=bytes(16)), body))
    assert pending.error is not None and pending.error.reason is Reason.INTERNAL


def test_too_many_waiting_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "WAITING_MAX", 3)
    made = Peer("engine")
    for _ in range(3):
        made.submit(METHODS["echo"], b"\x80", FAR, None)
    with pytest.raises(Refusal) as caught:
        made.submit(METHODS["echo"], b"\x80", FAR, None)
    assert caught.value.reason is Reason.EXHAUSTED


def test_a_stale_answer_of_the_same_epoch_does_not_loop() -> None:
    made, sent = up()
    _, header = submit(made, "echo", Text(text="x"), sent)
    before = len(sent)
    made.received(pack(wire.Stale(version=1, id=header.id, epoch=bytes(16))))
    made.pump(lambda f: sent.append(f) is None)
    assert len(sent) == before


def test_a_refused_key_ends_all_calls() -> None:
    made = Peer("engine")
    pending = made.submit(METHODS["echo"], b"\x80", FAR, None)
    flow = made.open(METHODS["hang"], b"\x80", FAR, lambda: None)
    made.denied()
    for ended in (pending, flow):
        assert ended.error is not None and ended.error.reason is Reason.DENIED
    assert made.idle()


def test_a_drain_does_not_drain_the_next_process_as_well() -> None:
    made, sent = up(1)
    pending, _ = submit(made, "drain", Empty(), sent)
    for life, over in ((1, False), (2, True)):
        made.disconnected()
        made.connected()
        made.pump(lambda f: sent.append(f) is None)
        greet, _ = wire.decode_from_caller(sent[-1])
        made.received(pack(wire.Welcome(version=1, id=greet.id, epoch=bytes(15) + bytes([life]))))
        before = len(sent)
        made.pump(lambda f: sent.append(f) is None)
        assert pending.done is over and len(sent) - before == (not over)
    assert pending.result == Empty() and made.idle()


# Streams.


def opened(window_items: int = 0) -> tuple[Peer, list[list[bytes]], Flow, int]:
    made, sent = up()
    flow = made.open(METHODS["mirror"], wire.encode_body(Empty()), FAR, lambda: None)
    made.pump(lambda f: sent.append(f) is None)
    header, _ = wire.decode_from_caller(sent[-1])
    assert isinstance(header, wire.Open)
    made.received(pack(wire.Credit(version=1, id=header.id, n=16)))
    assert flow.accepted and flow.credit == 16
    for _ in range(window_items):
        made.received(pack(wire.Item(version=1, id=header.id), b"\x81\xa4data\xc4\x00"))
    return made, sent, flow, header.id


def test_credit_never_grows_beyond_the_window() -> None:
    made, _, flow, id = opened()
    for _ in range(5):
        made.received(pack(wire.Credit(version=1, id=id, n=60_000)))
    assert flow.credit == 16


def test_a_callee_that_sends_more_than_its_credit_loses_the_stream() -> None:
    made, _, flow, id = opened(16)
    assert not flow.done
    made.received(pack(wire.Item(version=1, id=id), b"\x81\xa4data\xc4\x00"))
    assert flow.done and flow.error is not None and flow.error.reason is Reason.INTERNAL
    assert len(flow.inbox) == 16


@given(st.lists(st.sampled_from(["item", "take"]), max_size=200))
def test_the_inbox_stays_within_the_window(steps: list[str]) -> None:
    made, sent, flow, id = opened()
    room = 16  # as the callee knows it
    for step in steps:
        if step == "item" and room:
            room -= 1
            made.received(pack(wire.Item(version=1, id=id), b"\x81\xa4data\xc4\x00"))
        elif step == "take" and flow.inbox:
            sent.clear()
            made.take(flow)
            made.pump(lambda f: sent.append(f) is None)
            for frames in sent:
                header, _ = wire.decode_from_caller(frames)
                assert isinstance(header, wire.Credit)
                room += header.n
        assert not flow.done and len(flow.inbox) + room <= 16
    while flow.inbox:
        made.take(flow)
    assert flow.room >= 8  # who reads gets more


def test_windows_together_stay_below_the_high_water_mark() -> None:
    made, _ = up()
    method: Stream = METHODS["hang"]
    flows = [
        made.open(method, b"\x80", FAR, lambda: None)
        for _ in range(peer.WINDOWS_MAX // method.window)
    ]
    with pytest.raises(Refusal) as caught:
        made.open(method, b"\x80", FAR, lambda: None)
    assert caught.value.reason is Reason.EXHAUSTED
    made.close_flow(flows[0])
    made.open(method, b"\x80", FAR, lambda: None)


def test_the_caps_fit_below_the_high_water_mark() -> None:
    """ZeroMQ frees room in steps of half a queue, so half is what may be counted on."""
    from agent_box.bus import link, server, zap

    assert min(link.HWM, zap.HWM) // 2 >= peer.IN_FLIGHT_MAX + peer.WINDOWS_MAX
    assert peer.WINDOWS_MAX <= server.WINDOWS_PER_PEER
    assert peer.IN_FLIGHT_MAX <= server.PENDING_PER_CALLER
