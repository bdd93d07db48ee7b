"""Who gets in: strangers, the wrong domain, recordings and crowds that say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq
from support.place import Place
from support.toy import MemoryLog, Text, Toy, make_server

from agent_box.bus import keys, wire
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Empty
from agent_box.bus.zap import Gate

GREETING = [wire.MAGIC, wire.encode_header(wire.Greet(version=1, id=1)), b"\x80"]


def answered(dealer: zmq.Socket, sock: Path, ms: int = 700) -> bool:
    """Whether anything at all comes back."""
    dealer.linger = 0
    dealer.connect(f"ipc://{sock}")
    dealer.send_multipart(GREETING)
    return bool(dealer.poll(ms))


@pytest.fixture
def context() -> zmq.Context:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def curve(dealer: zmq.Socket, pair: keys.KeyPair, server: bytes) -> zmq.Socket:
    dealer.curve_serverkey = server
    dealer.curve_publickey = pair.public
    dealer.curve_secretkey = pair.reveal()
    return dealer


def served(place: Place) -> None:
    with place.client() as client:
        assert client.call("echo", Text(text="x"), deadline_s=30) == Text(text="x")


def test_the_honest_are_answered(toy_process: Place, context: zmq.Context) -> None:
    pair = keys.load_secret(toy_process.keys / "operator")
    dealer = curve(context.socket(zmq.DEALER), pair, toy_process.server_key)
    assert answered(dealer, toy_process.sock, 20_000)


def test_an_unknown_key_gets_no_answer(toy_process: Place, context: zmq.Context) -> None:
    dealer = curve(context.socket(zmq.DEALER), keys.fresh(), toy_process.server_key)
    assert not answered(dealer, toy_process.sock)
    served(toy_process)


def test_no_key_gets_no_answer(toy_process: Place, context: zmq.Context) -> None:
    assert not answered(context.socket(zmq.DEALER), toy_process.sock)
    plain = context.socket(zmq.DEALER)
    plain.plain_username = b"operator"
    plain.plain_password = b"operator"
    assert not answered(plain, toy_process.sock)
    served(toy_process)


def test_the_key_of_another_service_reaches_nobody(
    toy_process: Place, context: zmq.Context
) -> None:
    pair = keys.load_secret(toy_process.keys / "operator")
    wrong = keys.load_public(toy_process.keys / "public", "registry")
    assert not answered(curve(context.socket(zmq.DEALER), pair, wrong), toy_process.sock)
    served(toy_process)


def test_a_known_public_key_without_its_secret_gets_no_answer(
    toy_process: Place, context: zmq.Context
) -> None:
    mixed = keys.KeyPair(
        keys.load_public(toy_process.keys / "public", "operator"), keys.fresh().reveal()
    )
    dealer = curve(context.socket(zmq.DEALER), mixed, toy_process.server_key)
    assert not answered(dealer, toy_process.sock)
    served(toy_process)


def test_a_role_claimed_by_name_is_not_believed(toy_process: Place, context: zmq.Context) -> None:
    pair = keys.load_secret(toy_process.keys / "broker")
    dealer = curve(context.socket(zmq.DEALER), pair, toy_process.server_key)
    dealer.setsockopt(zmq.ROUTING_ID, b"operator")
    dealer.setsockopt(zmq.METADATA, b"X-User-Id:operator")
    assert answered(dealer, toy_process.sock, 20_000)
    header, _ = wire.decode_from_callee(dealer.recv_multipart())
    assert isinstance(header, wire.Welcome)
    call = wire.Call(
        version=1,
        id=2,
        epoch=header.epoch,
        method="ping",
        deadline=wire.now_ns() + 9 * wire.NS,
        request_id=None,
    )
    dealer.send_multipart([wire.MAGIC, wire.encode_header(call), b"\x80"])
    assert dealer.poll(20_000)
    _, untrusted = wire.decode_from_callee(dealer.recv_multipart())
    refusal = wire.to_refusal(untrusted)
    assert refusal.reason is Reason.DENIED and refusal.message.startswith("broker ")


def test_a_client_whose_key_is_refused_is_told_at_once(toy_process: Place) -> None:
    before = time.monotonic()
    with (
        toy_process.client(secret=keys.fresh()) as client,
        pytest.raises(Refusal) as caught,
    ):
        client.call("ping", Empty())
    assert caught.value.reason is Reason.DENIED
    assert time.monotonic() - before < 9  # the deadline would have been 10 s


class Recorder:
    """Stands between an honest client and the service and keeps what the client sends."""

    def __init__(self, listen: Path, to: Path) -> None:
        self.recorded = bytearray()
        self._to = to
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(listen))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket(socket.AF_UNIX)
        server.connect(str(self._to))
        back = threading.Thread(target=self._pump, args=(server, client, None))
        back.start()
        self._pump(client, server, self.recorded)
        back.join()
        client.close()
        server.close()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, keep: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if keep is not None:
                    keep += data
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for thread in self._threads:
            thread.join()


def test_a_recorded_connection_replayed_gets_no_answer(toy_process: Place) -> None:
    place = toy_process
    recorder = Recorder(place.root / "m", place.sock)
    with place.client(sock=place.root / "m") as client:
        assert client.call("add", _number(1))
        assert client.call("echo", Text(text="x"))
    recorder.close()
    assert place.added() == 1 and len(recorder.recorded) > 500
    for cut in (len(recorder.recorded), 64 + 200, 64):
        replay = socket.socket(socket.AF_UNIX)
        replay.settimeout(20)
        replay.connect(str(place.sock))
        got = bytearray()
        with contextlib.suppress(OSError):
            replay.sendall(bytes(recorder.recorded[:cut]))
            replay.shutdown(socket.SHUT_WR) if cut == 64 else None
            while data := replay.recv(65536):
                got += data
        # The greeting and WELCOME, which anybody gets; never READY, never a MESSAGE.
        assert b"READY" not in got and b"MESSAGE" not in got and len(got) < 300
        replay.close()
    assert place.added() == 1
    served(place)


def _number(n: int) -> object:
    from support.toy import Number

    return Number(n=n)


def test_the_honest_are_served_among_300_that_are_silent(toy_process: Place) -> None:
    place = toy_process
    crowd = []
    for number in range(300):
        one = socket.socket(socket.AF_UNIX)
        one.connect(str(place.sock))
        if number % 3 == 1:
            one.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03")  # half a greeting
        elif number % 3 == 2:
            one.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE" + bytes(15) + bytes(32))
        crowd.append(one)
    for _ in range(5):
        served(place)
    for one in crowd:  # and each is sent away when its time is over
        one.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            while one.recv(4096):
                pass
        one.close()
    served(place)


def test_a_crowd_that_sends_garbage_is_sent_away(toy_process: Place) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(300), b"\xff" * 300):
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(60)
        one.connect(str(toy_process.sock))
        one.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            while one.recv(4096):
                pass
        one.close()
    served(toy_process)


def test_an_empty_or_taken_domain_is_refused() -> None:
    pair = keys.fresh()
    gate = Gate({"operator": pair.public})
    try:
        with pytest.raises(ValueError, match="empty"):
            gate.socket(zmq.ROUTER, "", pair, frozenset({"operator"}))
        gate.socket(zmq.ROUTER, "one", pair, frozenset({"operator"}))
        with pytest.raises(ValueError, match="taken"):
            gate.socket(zmq.ROUTER, "one", pair, frozenset({"operator"}))
    finally:
        gate.close()


def test_two_roles_with_one_key_are_refused() -> None:
    pair = keys.fresh()
    with pytest.raises(ValueError, match="same key"):
        Gate({"operator": pair.public, "broker": pair.public})


@pytest.mark.parametrize(
    ("domain", "roles", "wanted"),
    [
        ("one", {"operator"}, True),
        ("one", {"broker"}, False),  # known, but not admitted here
        ("one", set(), False),
    ],
)
def test_the_domain_decides_who_is_admitted(
    place: Place, domain: str, roles: set[str], wanted: bool
) -> None:
    async def main() -> None:
        gate = Gate(keys.load_all_public(place.keys / "public", ("operator", "broker")))
        gate.start()
        server = keys.load_secret(place.keys / "engine")
        router = gate.socket(zmq.ROUTER, domain, server, frozenset(roles))
        router.bind(f"ipc://{place.sock}")
        assert await asyncio.to_thread(knock, place, router) is wanted
        assert (gate.refused > 0) is not wanted
        gate.close()

    asyncio.run(main())


def knock(place: Place, router: zmq.Socket) -> bool:
    with zmq.Context() as context:
        pair = keys.load_secret(place.keys / "operator")
        dealer = curve(context.socket(zmq.DEALER), pair, place.server_key)
        dealer.linger = 0
        dealer.connect(f"ipc://{place.sock}")
        dealer.send(b"knock")
        heard = bool(router.poll(1000))
        dealer.close()
        return heard


def test_a_socket_of_another_domain_is_not_admitted(place: Place) -> None:
    """The handler answers for the domains that it gave out and for no other."""

    async def main() -> None:
        gate = Gate(keys.load_all_public(place.keys / "public", ("operator",)))
        gate.start()
        router = gate.context.socket(zmq.ROUTER)
        router.linger = 0
        router.curve_server = 1
        router.curve_secretkey = keys.load_secret(place.keys / "engine").reveal()
        router.zap_domain = b"elsewhere"
        router.bind(f"ipc://{place.sock}")
        assert not await asyncio.to_thread(knock, place, router)
        assert gate.refused > 0
        gate.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "request_",
    [
        [],
        [b"1.0"],
        [b"1.0", b"1", b"one", b"", b"", b"NULL"],
        [b"1.0", b"1", b"one", b"", b"", b"PLAIN", b"operator", b"x"],
        [b"2.0", b"1", b"one", b"", b"", b"CURVE", b"k" * 32],
        [b"1.0", b"1", b"one", b"", b"", b"CURVE", b"k" * 32],
        [b"1.0", b"1", b"", b"", b"", b"CURVE", b"k" * 32],
    ],
    ids=range(7),
)
def test_the_handler_refuses_what_it_does_not_know(request_: list[bytes]) -> None:
    gate = Gate({"operator": keys.fresh().public})
    try:
        answer = gate._answer(request_)
        assert answer[2] == b"400" and answer[4] == b""
    finally:
        gate.close()


def test_a_refused_handshake_is_logged_now_and_then_without_the_key(place: Place) -> None:
    log = MemoryLog()
    server = make_server(Toy(place.database), place.sock, place.keys, log)
    try:
        for _ in range(50):
            server.gate._answer([b"1.0", b"1", b"agent-box/engine", b"", b"", b"CURVE", b"k" * 32])
        (line,) = log.lines
        assert line["event"] == "handshake refused" and "kkk" not in str(line)
        assert server.gate.refused == 50
    finally:
        asyncio.run(server.close())


def test_every_server_socket_has_a_handler_a_domain_and_short_patience(place: Place) -> None:
    server = make_server(Toy(place.database), place.sock, place.keys, MemoryLog())
    try:
        for made in (server._router,):
            assert made.getsockopt(zmq.ZAP_ENFORCE_DOMAIN) == 1
            assert made.getsockopt(zmq.ZAP_DOMAIN).rstrip(b"\0") == b"agent-box/engine"
            assert made.getsockopt(zmq.MECHANISM) == zmq.CURVE
            assert made.linger == 0 and made.getsockopt(zmq.HANDSHAKE_IVL) <= 5_000
            assert made.getsockopt(zmq.BACKLOG) >= 1_000
            assert made.getsockopt(zmq.MAXMSGSIZE) == wire.FRAME_MAX
        assert server._monitor.linger == 0 and server.gate._socket.linger == 0
    finally:
        asyncio.run(server.close())
