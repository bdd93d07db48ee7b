from __future__ import annotations

import os
from typing import Any

import pytest
import zmq
from support.place import Place
from support.toy import CONTRACT, Blob, Number, Text

from agent_box.bus import base, keys, link, wire
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.link import Link
from agent_box.bus.peer import Line, Peer
from agent_box.bus.schema import Empty

TABLE = link.table(CONTRACT)


def prepared(name: str, request: Any, deadline_s: float | None = None, id: Any = None) -> Any:
    return link.prepare(TABLE, "engine", name, request, deadline_s, id)


def test_the_table_holds_what_is_declared_and_what_every_service_answers() -> None:
    declared = {m.name for m in CONTRACT.methods}
    assert set(TABLE) == declared | {m.name for m in base.METHODS}
    with pytest.raises(TypeError):
        TABLE["more"] = TABLE["echo"]  # type: ignore[index]


def test_a_call_has_the_longest_deadline_unless_it_says_less() -> None:
    for asked, span in ((None, 60), (0.5, 0.5), (60, 60)):
        method, body, deadline, id = prepared("echo", Text(text="x"), asked)
        left = (deadline - wire.now_ns()) / wire.NS
        assert method is TABLE["echo"] and span - 5 < left <= span
        assert wire.decode_body(body, Text) == Text(text="x") and id is None


def test_once_gets_an_id_of_its_own() -> None:
    ids = {prepared("add", Number(n=1))[3] for _ in range(100)}
    assert len(ids) == 100 and all(len(id) == 16 for id in ids)
    given = os.urandom(16)
    assert prepared("add", Number(n=1), id=given)[3] == given


def test_what_cannot_be_packed_is_refused_before_it_is_sent() -> None:
    for request in (Blob(data=bytes(1 << 20)),):
        with pytest.raises(Refusal) as caught:
            prepared("blob", request)
        assert caught.value.reason is Reason.BAD_REQUEST
    with pytest.raises(Refusal):
        prepared("echo", Text(text="\ud800"))


def test_every_socket_of_a_caller_lets_go_at_once(place: Place) -> None:
    with zmq.Context() as context:
        made = Link(
            context,
            Peer("engine"),
            place.sock,
            keys.load_secret(place.keys / "operator"),
            place.server_key,
        )
        assert made.socket.linger == 0 and made.monitor.linger == 0
        assert made.socket.getsockopt(zmq.IMMEDIATE) == 1
        assert made.socket.getsockopt(zmq.MAXMSGSIZE) == wire.FRAME_MAX
        assert made.socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
        made.close()


def test_the_line_follows_the_connection(toy_process: Place) -> None:
    place = toy_process
    peer = Peer("engine")
    with zmq.Context() as context:
        made = Link(
            context,
            peer,
            place.sock,
            keys.load_secret(place.keys / "operator"),
            place.server_key,
        )

        def until(line: Line) -> None:
            for _ in range(4000):
                made.read()
                made.write()
                if peer.line is line:
                    return
                zmq.select([made.socket, made.monitor], [], [], 0.005)
            raise AssertionError(f"never {line}")

        until(Line.UP)
        first = peer.epoch
        pending = peer.submit(
            TABLE["ping"],  # type: ignore[arg-type]
            wire.encode_body(Empty()),
            wire.now_ns() + 9 * wire.NS,
            None,
        )
        while not pending.done:
            made.write()
            made.read()
        assert pending.result == Empty()
        place.kill()
        until(Line.DOWN)
        place.spawn()
        until(Line.UP)
        assert peer.epoch != first
        made.close()
