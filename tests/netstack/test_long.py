"""Connections that live for hours, with every timer of the plane at its own time."""

from __future__ import annotations

import queue
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from support import nginx, servers, tunguest
from support.guestnet import Net, round_trip, take, until
from support.http2 import Client
from support.nameserver import NameServer
from support.planes import here
from support.servers import Server

WHY_NOT = tunguest.unavailable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
HOUR = 3600.0

Make = Callable[..., Net]


def flows(plane: Net) -> int:
    return plane.do(lambda p: p.counters()).flows


@pytest.mark.skipif(nginx.FOUND is None, reason="there is no nginx")
def test_http2_over_half_a_day(net: Make, tmp_path: Path) -> None:
    """Asked now and then, pinged by the client, and left alone."""
    with nginx.plain_http2(tmp_path) as port:
        plane = net(here(f"app.test:{port}"))
        with plane.connect("app.test", port) as sock:
            client = Client(sock)
            first = client.get(b"/")
            assert first.startswith(b"HTTP/2.0 ")
            for _ in range(8):
                plane.go_by(HOUR / 4)
                client.ping()
                plane.go_by(HOUR / 4)
                assert client.get(b"/") == first, "it is another connection"
            plane.go_by(8 * HOUR)
            assert client.get(b"/") == first
            assert flows(plane) == 1 and plane.reports == []
        until(lambda: flows(plane) == 0)


def test_an_answer_that_comes_bit_by_bit_over_hours(net: Make) -> None:
    """As a stream of events: the guest asked once and says nothing more."""
    events: queue.Queue[bytes] = queue.Queue()

    def tell(sock: socket.socket) -> None:
        assert sock.recv(100) == b"subscribe"
        while event := events.get(timeout=60):
            sock.sendall(event)

    server = Server(tell)
    plane = net(here(f"app.test:{server.port}"))
    with plane.connect("app.test", server.port) as sock:
        sock.sendall(b"subscribe")
        for number in range(12):
            plane.go_by(50 * 60)
            event = b"%06d" % number * (1 if number % 2 else 20_000)
            events.put(event)
            assert take(sock, len(event)) == event
        assert flows(plane) == 1
        events.put(b"")
        assert sock.recv(1) == b""
    until(lambda: flows(plane) == 0)
    server.close()


def test_an_idle_guest_is_asked_now_and_then_and_not_more(net: Make) -> None:
    server = Server(servers.echo)
    plane = net(here(f"app.test:{server.port}"))
    with plane.connect("app.test", server.port) as sock:
        round_trip(sock)
        plane.go_by(60)  # whatever was left to be acknowledged
        ports = {sock.getsockname()[1], server.port}
        seen: list[bytes] = []

        def sink(packet: bytes, _when: float) -> bool:
            if {*struct.unpack_from(">HH", packet, 20)} == ports:  # not what others left
                seen.append(packet)
            return True

        plane.do(lambda p: p.capture(sink, 60))
        plane.go_by(9 * HOUR)
        plane.do(lambda p: p.capture(None))
        # An ACK each two hours (RFC 9293, 3.8.4), and the guest's answer.
        assert 6 <= len(seen) <= 8, seen
        assert not select.select([sock], [], [], 0)[0]
        round_trip(sock)
    server.close()


def test_an_address_that_a_program_keeps_leads_to_where_its_name_does(net: Make) -> None:
    server, other = Server(servers.echo), Server(lambda sock: sock.sendall(b"another"), "127.0.0.2")
    names = NameServer()
    names.records = {"app.test": [("A", "127.0.0.1", 60)]}
    rules = [here(f"app.test:{each.port}") for each in (server, other)]
    plane = net(*rules, hosts={}, nameserver="127.0.0.1", dns_port=names.port)
    kept = plane.address("app.test")
    with plane.connect(kept, server.port) as sock:
        round_trip(sock)
        names.records = {"app.test": [("A", "127.0.0.2", 60)]}
        plane.go_by(6 * HOUR)
        with plane.connect(kept, other.port) as new:
            assert take(new, 7) == b"another"
        round_trip(sock)
        assert plane.address("app.test") == kept
    for each in (server, other, names):
        each.close()
