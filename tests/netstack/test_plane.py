"""The plane against the kernel's own TCP, and against servers on this host's loopback."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from scapy.layers.dns import DNS, DNSQR
from support import planes, servers, tunguest
from support.planes import Running, here, policy
from support.servers import Server
from support.tunguest import GATEWAY, TunGuest

WHY_NOT = tunguest.unavailable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture(scope="module")
def guest() -> Iterator[TunGuest]:
    made = TunGuest()
    yield made
    made.close()


@pytest.fixture
def echoing() -> Iterator[Server]:
    server = Server(servers.echo)
    yield server
    server.close()


def look_up(guest: TunGuest, name: str, kind: str = "A") -> DNS:
    with guest.socket(socket.SOCK_DGRAM) as sock:
        sock.sendto(bytes(DNS(id=7, rd=1, qd=DNSQR(qname=name, qtype=kind))), (GATEWAY, 53))
        return DNS(sock.recv(4096))


def address_of(guest: TunGuest, name: str) -> str:
    found = look_up(guest, name)
    assert found.rcode == 0 and found.ancount == 1, found.show(dump=True)
    return str(found.an[0].rdata)


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while data := sock.recv(1 << 20):
        parts.append(data)
    return b"".join(parts)


def test_a_flow_to_a_name_moves_bytes_both_ways(
    guest: TunGuest, echoing: Server, tmp_path: Path
) -> None:
    running = Running(
        policy=policy(here(f"app.test:{echoing.port}")),
        broker=None,
        etc=planes.etc(tmp_path / "etc", {"app.test": "127.0.0.1"}),
    )
    try:
        link = guest.new_link()
        running.do(lambda plane: plane.link(link))
        address = address_of(guest, "app.test")
        sent = os.urandom(8 << 20)
        with guest.socket() as sock:
            sock.connect((address, echoing.port))

            def send() -> None:
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)

            sender = threading.Thread(target=send)
            sender.start()
            assert read_all(sock) == sent
            sender.join()
        with guest.socket() as sock, pytest.raises(OSError) as failed:
            sock.connect((address, 9))
        assert failed.value.errno == errno.EHOSTUNREACH
        assert [report.rule for report in running.reports] == ["mode:allowlist"]
    finally:
        running.close()
